"""`make_together`: a step that each rank does for itself, and that succeeds on all ranks or on none."""

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
    """Call `make` on every rank; return its result here, and the notes of all ranks. If one raises, all do. Collective.

    `note` makes a JSON value of the result, for the other ranks. These are waited for at least `seconds`.
    """
    made: Made
    mine: Any = None
    error: Exception | None = None
    try:
        made = make()
        mine = note(made)
    except Exception as raised:
        error = raised.at(layer=layer, rank=group.rank) if isinstance(raised, TokenyardError) else raised
    report = {
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "caused_by_peer": isinstance(
            error, PeerFailed
        ),  # the error was caused by another rank, in a smaller group
        "note": mine,
    }
    with group.patience(seconds):
        by_rank = group.gather_json(report, phase=what)
    if error is not None:
        raise error
    if failed := [rank for rank, other in enumerate(by_rank) if other["error"] is not None]:
        # Prefer a rank that failed by itself to one that raised because of another rank.
        first = min(failed, key=lambda rank: bool(by_rank[rank]["caused_by_peer"]))
        raise PeerFailed(first, by_rank[first]["error"], phase=what, layer=layer, rank=group.rank)
    return made, [other["note"] for other in by_rank]
