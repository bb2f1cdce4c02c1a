"""Steps that each rank does for itself, and that succeed on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tokenyard.errors import PeerFailed, TokenyardError
from tokenyard.group.base import Group

Made = TypeVar("Made")


def make_together(
    group: Group,
    what: str,
    make: Callable[[], Made],
    *,
    seconds: float,
    note: Callable[[Made], Any] = lambda made: None,
    layer: str | None = None,
) -> tuple[Made, list[Any]]:
    """The result of `make` on this rank, and the notes of all ranks. If one rank raises, all do. Collective.

    The others are waited for at least so many seconds.
    """
    made: Made
    told: Any = None
    error: Exception | None = None
    try:
        made = make()
        told = note(made)
    except Exception as raised:
        error = raised.at(layer=layer, rank=group.rank) if isinstance(raised, TokenyardError) else raised
    report = {
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "told": isinstance(error, PeerFailed),  # in a group of some of these ranks
        "note": told,
    }
    with group.patience(seconds):
        by_rank = group.gather_json(report, phase=what)
    if error is not None:
        raise error
    if failed := [rank for rank, other in enumerate(by_rank) if other["error"] is not None]:
        # Who failed itself, if anybody says so.
        first = min(failed, key=lambda rank: bool(by_rank[rank]["told"]))
        raise PeerFailed(first, by_rank[first]["error"], phase=what, layer=layer, rank=group.rank)
    return made, [other["note"] for other in by_rank]
