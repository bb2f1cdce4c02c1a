"""Every error class has a section on the page of errors, with a message that it really raises."""

from __future__ import annotations

import pytest

import tokenyard as ty
from docs.generate import error_table
from docs.generate.error_table import (
    EXAMPLES,
    error_classes,
    page,
    what_you_see,
)
from tokenyard.errors import Corrupted, Drifted


def all_kinds(base: type = ty.TokenyardError) -> set[type]:
    """The classes of the package that derive from a class, however far down. (FlashInfer's keep theirs inside.)"""
    own = {
        kind
        for kind in base.__subclasses__()
        if kind.__module__.startswith("tokenyard.")
        and not kind.__module__.startswith("tokenyard.integrations.flashinfer.")
    }
    return own.union(*(all_kinds(kind) for kind in own))


def test_every_error_class_is_public_and_has_a_section():
    assert set(error_classes()) == all_kinds() == set(EXAMPLES) == set(error_table.ADVICE)


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_each_class_says_by_itself_when_it_is_raised(kind):
    assert vars(kind).get("when"), f"{kind.__name__} has no `when` of its own"
    assert len({other.when for other in error_classes()}) == len(error_classes())


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_what_you_see_is_a_whole_message_of_that_class(kind):
    message = what_you_see(kind)
    assert message.startswith(f"{kind.__name__}: ")
    assert "; expected " in message
    assert "; fix: " in message
    assert f"\n{message}\n" in page()
    assert f"## {kind.__name__}\n" in page()
    assert error_table.ADVICE[kind]


def test_an_example_that_raises_something_else_is_found_out(monkeypatch):
    monkeypatch.setitem(error_table.EXAMPLES, ty.PeerLost, EXAMPLES[Drifted])
    with pytest.raises(AssertionError, match="the example of PeerLost raises Drifted"):
        page()
    monkeypatch.setitem(error_table.EXAMPLES, ty.PeerLost, lambda: None)
    with pytest.raises(AssertionError, match="the example of PeerLost raises nothing"):
        page()


def test_a_class_without_an_example_is_missed(monkeypatch):
    left = {kind: example for kind, example in EXAMPLES.items() if kind is not Corrupted}
    monkeypatch.setattr(error_table, "EXAMPLES", left)
    with pytest.raises(KeyError):
        page()
