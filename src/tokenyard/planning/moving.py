"""Moving experts between the ranks of a plan: weights go from rank to rank in pieces, then a layer switches.

A layer's move has three parts, of which only the last changes anything:

1. every rank makes room for the experts that come to it, and all say whether they could;
2. the weights travel, tensor by tensor, in pieces of at most `PIECE` bytes a rank, and are put together with those
   of the experts that stay;
3. all ranks say that they are ready. Then each takes the new weights for the old ones, without a wait or a copy.

An error in the first two parts, on any rank, is an error on all, and the old placement serves on. When a rank is lost
there, the others raise `PeerLost`, and have the old placement. If it is lost while all say that they are ready, some
may have heard of all and others not: `go_on_without` then finds that their placements differ (`PlanMismatch`).

Beside its pieces a rank needs memory for the experts that come, and for one layer's experts once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tokenyard.errors import PeerFailed, PlanError, TokenyardError
from tokenyard.experts import Experts, ExpertWeights
from tokenyard.formats import QuantizedMatrix
from tokenyard.group import Group
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Move, Placement, moves

# Bytes that a rank sends and receives at a time, at most.
PIECE = 16 * 1024 * 1024

Made = TypeVar("Made")


class HoldsExperts(Protocol):
    """A layer whose experts can be moved."""

    experts: Experts  # the experts of this rank, with their weights

    def switch(self, wiring: Wiring, weights: ExpertWeights) -> None:
        """Serve another placement, with the weights of the experts that it gives this rank."""


def in_their_places(present: Placement, wanted: Placement) -> Placement:
    """The wanted placement, in which experts that stay on a rank keep their local index where they can.

    >>> in_their_places(Placement.explicit(4, [[0, 1], [2, 3]]), Placement.explicit(4, [[2, 0], [3, 1]])).table
    ((0, 2), (1, 3))
    """
    table = []
    for now, then in zip(present.table, wanted.table, strict=True):
        kept = [expert for expert in now[: len(then)] if expert in then]
        rest = iter([expert for expert in then if expert not in kept])
        held = [expert if expert in kept else next(rest) for expert in now[: len(then)]]
        table.append((*held, *rest))
    return replace(wanted, table=tuple(table))


def moved_weights(
    group: Group, layer: str, held: ExpertWeights | None, present: Placement, wanted: Placement
) -> ExpertWeights:
    """The weights of the experts that a placement gives this rank, from those that ranks hold now. Collective."""
    mine, path = group.rank, moves(present, wanted)

    def make_room() -> dict[str, Tensor]:
        if held is None:
            raise PlanError(
                "no MoELayer of this rank has the experts of this layer",
                expected="a layer made with this plan, and in use",
                fix="rebalance layers that exist: plan.rebalance({name: placement})",
                layer=layer,
                rank=mine,
            )
        count = sum(move.target == mine for move in path)
        return {name: tensor.new_empty(count, *tensor.shape[1:]) for name, tensor in held.by_name().items()}

    arriving = said_by_all(group, make_room, phase="making room for experts")
    assert held is not None
    for name, tensor in held.by_name().items():
        _fetch(group, path, present, tensor, arriving[name])
    return said_by_all(
        group, lambda: _put_together(mine, path, held, arriving, present, wanted), phase="moving experts"
    )


def said_by_all(group: Group, make: Callable[[], Made], *, phase: str) -> Made:
    """Make something on every rank; an error on one is an error on all. Collective."""
    made: Made | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as raised:
        error = raised.at(rank=group.rank) if isinstance(raised, TokenyardError) else raised
    told = "" if error is None else f"{type(error).__name__}: {error}"
    answers = group.gather_json(told, phase=phase)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer:
            raise PeerFailed(rank, answer, phase=phase, rank=group.rank)
    assert made is not None
    return made


def _fetch(group: Group, path: Sequence[Move], present: Placement, tensor: Tensor, arriving: Tensor) -> None:
    """Send one tensor's parts of the experts that leave, and receive those of the experts that come."""
    mine, ranks = group.rank, range(group.size)
    leaving = [
        _bytes_of(tensor[present.local_experts(mine).index(move.expert)])
        for target in ranks
        for move in path
        if (move.source, move.target) == (mine, target)
    ]
    came = [move for source in ranks for move in path if (move.source, move.target) == (source, mine)]
    places = [[move for move in path if move.target == mine].index(move) for move in came]
    send = [sum((move.source, move.target) == (mine, rank) for move in path) for rank in ranks]
    receive = [sum((move.source, move.target) == (rank, mine) for move in path) for rank in ranks]
    width = _width(tensor)
    # The same on every rank: that with most experts to send or to receive sets it.
    most = max((sum(rank in (m.source, m.target) for m in path) for rank in ranks), default=1)
    step = max(1, PIECE // max(1, most))
    into = [_bytes_of(arriving[place]) for place in places]
    for start in range(0, width, step):
        end = min(start + step, width)
        rows = [part[start:end] for part in leaving]
        sent = torch.stack(rows) if rows else torch.empty(0, end - start, dtype=torch.uint8)
        arrived = group.all_to_all_rows(sent.to(group.device), send, receive, phase="moving experts")
        for part, row in zip(into, arrived, strict=True):
            part[start:end] = row


def _width(tensor: Tensor) -> int:
    """Bytes of one expert's part of a tensor."""
    return tensor.dtype.itemsize * torch.Size(tensor.shape[1:]).numel()


def _bytes_of(part: Tensor) -> Tensor:
    """The bytes of one expert's part of a tensor; without a copy where it is contiguous."""
    return part.contiguous().reshape(-1).view(torch.uint8)


def _put_together(
    rank: int,
    path: Sequence[Move],
    held: ExpertWeights,
    arriving: dict[str, Tensor],
    present: Placement,
    wanted: Placement,
) -> ExpertWeights:
    """The weights of the experts of the wanted placement, of those that are here and those that came."""
    here = {expert: place for place, expert in enumerate(present.local_experts(rank))}
    came = {move.expert: place for place, move in enumerate(move for move in path if move.target == rank)}

    def chosen(name: str, tensor: Tensor) -> Tensor:
        owned = wanted.local_experts(rank)
        new = tensor.new_empty(len(owned), *tensor.shape[1:])
        for place, expert in enumerate(owned):
            new[place] = tensor[here[expert]] if expert in here else arriving[name][came[expert]]
        return new

    parts: dict[str, Tensor | QuantizedMatrix] = {}
    for name, part in held.parts().items():
        if isinstance(part, QuantizedMatrix):
            payloads = {key: chosen(f"{name}_{key}", payload) for key, payload in part.payloads.items()}
            shape = (len(wanted.local_experts(rank)), *part.shape[1:])
            parts[name] = replace(part, shape=shape, payloads=payloads)
        else:
            parts[name] = chosen(name, part)
    return ExpertWeights(**parts)  # type: ignore[arg-type]
