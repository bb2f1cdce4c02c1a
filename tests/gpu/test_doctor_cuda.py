"""`tokenyard doctor` where there is a GPU: it tries every exchange there."""

import pytest

from tokenyard.cli import doctor as module
from tokenyard.exchange import EXCHANGES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("exchange", [name for name, cls in EXCHANGES.items() if "cuda" in cls.devices])
def test_every_exchange_is_tried_and_right(exchange):
    ok, detail = module._on_gpus(exchange)
    assert ok, detail
    assert detail.startswith("2 ranks, ")
    assert "on one GPU" in detail
