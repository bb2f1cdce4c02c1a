"""Every mutant is alive, and dies by the check that is named for it; and the page says the same.

All bugs run in `make test`: there is no subset.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.known_bugs import page
from tests.known_bugs.catalog import KNOWN_BUGS
from tests.known_bugs.known_bug import ExchangeCheck, SuiteCheck, TrainerCheck, smoke
from tests.models import on_ranks
from tokenyard.conformance.suites import EXCHANGE_GRADIENT_CHECKS

# Those of gradients die on other ranks and exchanges in tests/conformance/test_gradient_suite.py.
ON_ANY_RANKS = [
    bug
    for bug in KNOWN_BUGS
    if isinstance(bug.caught_by, ExchangeCheck) and bug.caught_by.name not in EXCHANGE_GRADIENT_CHECKS
]
every_bug = pytest.mark.parametrize("bug", KNOWN_BUGS, ids=lambda bug: bug.id)


@every_bug
@pytest.mark.parametrize("exchange", ["two_sided", "one_sided", "hierarchical"])
def test_the_mutant_is_alive(bug, exchange, monkeypatch):
    bug.mutate(monkeypatch)
    for y_TH in smoke(exchange):
        assert (y_TH.dtype, y_TH.shape) == (torch.bfloat16, (8, 32))
        assert y_TH.isfinite().all()
    if bug.also_alive is not None:
        on_ranks(2, bug.also_alive)


@cache
def clean(check):
    """What a check finds without a mutant; bugs share checks."""
    return check.finding()


@every_bug
def test_the_check_that_is_named_for_it_kills_the_mutant(bug):
    assert clean(bug.caught_by) is None
    finding = page.caught(bug)
    assert finding is not None, f"the mutant survives {bug.caught_by}"
    assert bug.says in finding
    told = page.comparable(page.section(bug, finding))
    assert told in page.comparable(page.PAGE.read_text()), "run: python -m tests.known_bugs.page"


@every_bug
def test_tokenyard_check_catches_it_by_name(bug):
    if bug.in_check is None:  # it is caught by such a check already, or it needs a GPU
        of_suites = isinstance(bug.caught_by, SuiteCheck | TrainerCheck)
        assert of_suites or bug.id == "growth_under_a_graph"
        return
    assert clean(bug.in_check) is None
    with pytest.MonkeyPatch.context() as patch:
        bug.mutate(patch)
        assert bug.in_check.finding() is not None, f"the mutant survives {bug.in_check}"


@pytest.mark.parametrize("world", [2, 3, 8])
def test_mutants_of_exchanges_die_on_more_ranks(world):
    for bug in ON_ANY_RANKS:
        wider = replace(bug, caught_by=replace(bug.caught_by, world=world))
        assert clean(wider.caught_by) is None
        assert page.caught(wider) is not None, f"the mutant survives {wider.caught_by}"


def test_mutants_of_exchanges_die_between_hosts_too():
    for bug in ON_ANY_RANKS:
        between = replace(bug, caught_by=replace(bug.caught_by, exchange="hierarchical"))
        assert clean(between.caught_by) is None
        # There, routes are looked up for copies of what the caller gave: nothing of his is changed.
        harmless = bug.id == "input_changed_in_place"
        assert (page.caught(between) is None) == harmless, f"{bug.id} on {between.caught_by}"


def test_the_page_holds_every_bug_and_nothing_else():
    expected = page.frame({bug.id: page.section(bug, "") for bug in KNOWN_BUGS})
    found = re.sub(r"^(Caught by .*?: “).*”$", r"\1”", page.PAGE.read_text(), flags=re.M)
    assert found == expected, "run: python -m tests.known_bugs.page"


def test_every_mutant_is_another_one():
    assert len({bug.id for bug in KNOWN_BUGS}) == len(KNOWN_BUGS) == 45
