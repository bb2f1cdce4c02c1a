"""A rank that is stopped and comes back, or is killed: who is named, and that the trials would notice wrong names."""

import json
from pathlib import Path

import pytest

from tests.faults import named
from tests.products import product

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "named-cpu.json"
PAGE = ROOT / "docs" / "guide" / "faults.md"
WRONG = ("unnamed", "innocent", "different")


@pytest.mark.parametrize(("job", "seed"), product(named.JOBS, [3, 8]))
def test_only_the_victim_is_named(job, seed):
    trial = named.draw(seed, [job])
    assert [text for name, text in named.findings(trial, named.run(trial)) if name in WRONG] == []


def said(peers, after=""):
    return {"peers": peers, "text": "an error", "after": after}


@pytest.mark.parametrize(
    ("lethal", "said_by_rank", "found"),
    [
        (False, [said([1])] * 4, []),
        (True, [said([1]), None, said([1]), said([1])], []),
        (False, [said(None)] * 4, ["no loss"]),
        (False, [None] * 4, ["other"]),
        (False, [said([])] * 4, ["unnamed"] * 4),
        (False, [said([0, 1])] * 4, ["innocent"] * 4),
        (False, [said([1]), said([0]), said([1]), said([1])], ["innocent", "different"]),
        (False, [said([1]), said([1]), said([]), said([1])], ["unnamed", "different"]),
        (False, [said([1]), None, said([1]), said([1])], ["other"]),
        (False, [said([1]), said(None), said([1]), said([1])], ["other"]),
        (False, [said([1], after="no"), said([1]), said([1]), said([1])], ["other"]),
    ],
)
def test_what_ranks_say_is_held_against_the_victim(lethal, said_by_rank, found):
    job = "subgroups" if lethal else "two_sided"
    seeds = (named.draw(seed, [job]) for seed in range(1000))
    trial = next(trial for trial in seeds if trial.victim == 1 and trial.lethal == lethal)
    assert [name for name, _ in named.findings(trial, said_by_rank)] == found


def test_trials_are_drawn_of_every_kind():
    trials = [named.draw(seed) for seed in range(200)]
    assert {trial.job for trial in trials} == set(named.JOBS)
    assert {(trial.lethal, trial.leaves) for trial in trials} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert {trial.hosts for trial in trials} == {1, 2}
    assert all(0.3 <= trial.beyond <= 0.9 for trial in trials)


def test_the_page_quotes_the_last_trials():
    results = json.loads(RESULTS.read_text())["results"]
    for counts in results["counts"].values():
        assert counts["trials"] >= 200
    assert named.markdown(results) in PAGE.read_text()
