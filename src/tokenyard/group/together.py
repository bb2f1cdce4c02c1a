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
    words = None if error is None else f"{type(error).__name__}: {error}"
    with group.patience(seconds):
        by_rank = group.gather_json([words, isinstance(error, PeerFailed), mine], phase=what)
    if error is not None:
        raise error
    if failed := [rank for rank, (words, _, _) in enumerate(by_rank) if words is not None]:
        # Prefer a rank that failed by itself to one that failed because of another rank, in a smaller group.
        first = min(failed, key=lambda rank: bool(by_rank[rank][1]))
        raise PeerFailed(first, by_rank[first][0], phase=what, layer=layer, rank=group.rank)
    return made, [note for _, _, note in by_rank]
