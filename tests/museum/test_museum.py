"""Every mutant is alive, and dies by the check that is named for it; and the page tells it as it is.

All exhibits run in `make test`: there is no subset.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.models import on_ranks
from tests.museum import page
from tests.museum.catalog import EXHIBITS
from tests.museum.exhibit import ExchangeCheck, SuiteCheck, smoke

ON_ANY_RANKS = [exhibit for exhibit in EXHIBITS if isinstance(exhibit.caught_by, ExchangeCheck)]
every_exhibit = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.id)


@every_exhibit
@pytest.mark.parametrize("exchange", ["two_sided", "one_sided"])
def test_the_mutant_is_alive(exhibit, exchange, monkeypatch):
    exhibit.mutate(monkeypatch)
    for y_TH in smoke(exchange):
        assert (y_TH.dtype, y_TH.shape) == (torch.bfloat16, (8, 32))
        assert y_TH.isfinite().all()
    if exhibit.also_alive is not None:
        on_ranks(2, exhibit.also_alive)


@cache
def clean(check):
    """What a check finds without a mutant; exhibits share checks."""
    return check.finding()


@every_exhibit
def test_the_check_that_is_named_for_it_kills_the_mutant(exhibit):
    assert clean(exhibit.caught_by) is None
    finding = page.caught(exhibit)
    assert finding is not None, f"the mutant survives {exhibit.caught_by}"
    assert exhibit.says in finding
    told = page.comparable(page.section(exhibit, finding))
    assert told in page.comparable(page.PAGE.read_text()), "run: python -m tests.museum.page"


@every_exhibit
def test_tokenyard_check_catches_it_by_name(exhibit):
    if exhibit.in_check is None:  # it is caught by such a check already, or it needs a GPU
        assert isinstance(exhibit.caught_by, SuiteCheck) or exhibit.id == "growth_under_a_graph"
        return
    assert clean(exhibit.in_check) is None
    with pytest.MonkeyPatch.context() as patch:
        exhibit.mutate(patch)
        assert exhibit.in_check.finding() is not None, f"the mutant survives {exhibit.in_check}"


@pytest.mark.parametrize("world", [2, 3, 8])
def test_mutants_of_exchanges_die_on_more_ranks(world):
    for exhibit in ON_ANY_RANKS:
        wider = replace(exhibit, caught_by=replace(exhibit.caught_by, world=world))
        assert clean(wider.caught_by) is None
        assert page.caught(wider) is not None, f"the mutant survives {wider.caught_by}"


def test_the_page_holds_every_exhibit_and_nothing_else():
    expected = page.frame({exhibit.id: page.section(exhibit, "") for exhibit in EXHIBITS})
    found = re.sub(r"^(```text .*\n)(?s:.*?)^```$", r"\1\n```", page.PAGE.read_text(), flags=re.M)
    assert found == expected, "run: python -m tests.museum.page"


def test_every_mutant_is_another_one():
    assert len({exhibit.id for exhibit in EXHIBITS}) == len(EXHIBITS) == 30
