"""Faults while experts move: a few; the page says what came of the many."""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.faults import moves


# Killed while it copies, and when all have heard that it is ready; one that comes; while a rank comes, and while one
# leaves.
@pytest.mark.parametrize("seed", [1, 39, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 20, 23, 58))])
def test_those_that_are_left_have_one_placement_and_right_results(seed):
    trial = moves.draw(seed)
    said, was_hit = moves.run(trial)
    assert (trial.action, was_hit) == ("kill", True)
    assert moves.complaints(trial, said) == []


def test_every_stage_and_action_is_drawn():
    trials = list(map(moves.draw, range(72)))
    stages = {(change, stage) for change in moves.CHANGES for stage in moves.stages_of(change)}
    drawn = {((trial.change, trial.stage), trial.action) for trial in trials}
    assert drawn == set(product(stages, moves.ACTIONS))
    assert {trial.victim for trial in trials if trial.change == "join"} == {moves.WORLD}


def test_wrong_results_and_different_placements_are_complaints():
    trial = moves.draw(0)
    old, new = ([list(row) for row in p.without([trial.victim]).table] for p in (moves.OLD, moves.NEW))
    good = {"wrong": 0, "errors": [], "threads": 0, "memory": [], "lost": [trial.victim], "table": old}
    said = [good] * moves.WORLD
    said[trial.victim] = None
    other = (trial.victim + 1) % moves.WORLD
    assert moves.complaints(trial, said) == []
    wrong = [
        {"wrong": 1},
        {"table": new},
        {"table": [[0]]},
        {"lost": [other]},
        {"threads": 1},
        {"memory": [7]},
    ]
    for change in wrong:
        assert moves.complaints(trial, [*said[:other], good | change, *said[other + 1 :]])
    assert moves.complaints(trial, [*said[:other], None, *said[other + 1 :]])


def test_the_page_quotes_the_last_faults():
    root = Path(__file__).parents[2]
    results = json.loads((root / "bench" / "results" / "moves-cpu.json").read_text())["results"]
    assert results["hit"] == results["trials"] >= 200
    assert results["join"] >= 60
    assert results["off"] == []
    assert moves.sentence(results) in (root / "docs" / "guide" / "balancing.md").read_text()
