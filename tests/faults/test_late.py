"""A rank that is stopped for longer than the deadline, and continued: the page says what came of the trials."""

import json
from pathlib import Path

import pytest

from tests.faults import late

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "late-cpu.json"
PAGE = ROOT / "docs" / "guide" / "losing-ranks.md"


@pytest.mark.long  # tests/exchange/test_broken_plans.py has a trial of each exchange
@pytest.mark.parametrize("seed", range(len(late.EXCHANGES), 4 * len(late.EXCHANGES)))
def test_no_wrong_row_comes_of_a_late_rank(seed):
    assert late.complaints(late.run(late.draw(seed))) == []


def test_wrong_rows_and_wrong_errors_are_complaints():
    said = [{"right": 3, "PeerLost": 1, "PlanBroken": 2}, {"wrong": 1, "after a loss": 2, "ValueError": 3}]
    assert late.complaints(said[:1]) == []
    assert late.complaints(said) == [
        "rank 1: 1 × wrong",
        "rank 1: 2 × after a loss",
        "rank 1: 3 × ValueError",
    ]


def test_the_page_quotes_the_last_trials():
    results = json.loads(RESULTS.read_text())["results"]
    assert results["trials"] >= 200
    assert results["with a loss"] >= 100
    assert results["off"] == []
    assert late.sentence(results) in PAGE.read_text()
