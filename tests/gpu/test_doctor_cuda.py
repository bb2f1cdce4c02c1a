"""`tokenyard doctor` where there is a GPU: it tries every exchange there."""

from importlib import import_module

import pytest

import tokenyard as ty

pytestmark = pytest.mark.gpu
module = import_module("tokenyard.cli.doctor")  # the package's attribute of this name is the command


@pytest.mark.parametrize("exchange", ty.EXCHANGES)
def test_every_exchange_is_tried_and_right(exchange):
    ok, detail = module._on_gpus(exchange)
    assert ok, detail
    assert detail.startswith("2 ranks, ")
    assert "on one GPU" in detail
