"""Every combination of parts on a GPU, drawn at random, against float64. `python -m tests.gpu.drawn` goes on longer."""

import os

import pytest

from tests.gpu.drawn import run

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
def test_layers_drawn_at_random_are_inside_of_their_bounds_and_repeat():
    found = run(int(os.environ.get("TOKENYARD_DRAW", "0")), seconds=600.0, device="cuda")
    assert found["wrong"] == []
    assert found["trials"] >= 200, found
