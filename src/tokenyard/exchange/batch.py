"""What travels out: who gets which row, a checked batch, and the rows that came to a rank.

    BatchRoutes     who gets which row of a batch         immutable; can be used again, for a second dispatch
    Batch           a checked batch, ready to be sent     until it was sent
    Arrival         the rows that came to this rank       until they are combined

A transport is given a `Batch` and makes an `Arrival`; it is given `Results` and makes `ResultsAtHome` (`results`). If
a rank fails before it can send a batch or results, its transport is given a `Failure` instead, and announces why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import Corrupted
from tokenyard.exchange.announcement import Announcements
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows, Format, check_rows
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits

# What a transport keeps of a dispatch for its combine: each transport has a type of its own. Code that does not depend
# on the transport leaves it out (`Arrival`, `Results`).
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    WayBack = TypeVar("WayBack", default=Any)
else:
    from typing import TypeVar

    WayBack = TypeVar("WayBack")


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRoutes:
    """Who gets which row of a batch. What is computed here is computed once, however often the routes are used."""

    spec: ExchangeSpec  # what the exchange knows of the layer
    routes: Routes | RoutingLogits  # as they travel: without choices whose expert was lost with its rank
    num_tokens: int  # T, the tokens of this rank
    rank: int  # this rank: which replica of an expert serves a token depends on it
    # The value of `resolved`, if it is known, as for rows that a relay forwards; None: the placement gives it.
    choices: tuple[Tensor, Tensor] | None = None

    @cached_property
    def resolved(self) -> tuple[Tensor, Tensor]:
        """`(rank_TK, local_TK)`: the rank that each choice goes to, and the number of the expert there."""
        if self.choices is not None:
            return self.choices
        assert isinstance(self.routes, Routes)
        return self.spec.placement.resolve(self.routes.topk_ids_TK, self.rank)

    @cached_property
    def stays_whole(self) -> bool:
        """Whether there is one CPU rank, and every choice of every token is one of its experts."""
        routes = self.routes
        there = routes.topk_ids_TK if isinstance(routes, Routes) else routes.logits_RE
        # If `choices` are given, ids do not say where experts are. On a GPU, to read ids would be one more wait.
        if self.spec.placement.world > 1 or self.choices is not None or not there.is_cpu:
            return False
        return isinstance(routes, RoutingLogits) or self.num_tokens == 0 or routes.id_range()[0] >= 0

    @cached_property
    def rows_out(self) -> tuple[Tensor, Tensor]:
        """`(rank_N, token_N)` of every row that goes out, by rank. If logits travel, every token goes to all ranks."""
        world = self.spec.placement.world
        if isinstance(self.routes, RoutingLogits):
            everything = torch.ones(world, self.num_tokens, device=self.routes.logits_RE.device)
            rank_N, token_N = everything.nonzero().unbind(1)
            return rank_N, token_N
        return rows_out(self.resolved[0], world)

    @cached_property
    def tokens_by_rank(self) -> tuple[Tensor, ...]:
        """For each rank, the tokens (ascending) that go there."""
        if self.stays_whole:
            return (torch.arange(self.num_tokens),)
        return tuple(self.rows_out[1].split_with_sizes(self.counts))

    @cached_property
    def counts(self) -> list[int]:
        """Rows for each rank."""
        if self.stays_whole:
            return [self.num_tokens]
        counts: list[int] = self.rows_out[0].bincount(minlength=self.spec.placement.world).tolist()
        return counts

    @cached_property
    def choices_by_rank(self) -> tuple[Tensor, ...]:
        """For each rank, the choices (ascending) whose results it returns, as token · K + choice."""
        return choices_by_part(self.resolved[0], self.spec.placement.world)

    @property
    def result_counts(self) -> list[int]:
        """Results that come home from each rank: one for each row, or for each choice if choices are summed at home."""
        return [c.numel() for c in self.choices_by_rank] if self.spec.sums_choices else self.counts

    def of_tokens(self, first: int, last: int) -> BatchRoutes:
        """The routes of some consecutive tokens."""
        if isinstance(self.routes, RoutingLogits):
            logits = RoutingLogits(logits_RE=self.routes.logits_RE[first:last])
            return replace(self, routes=logits, num_tokens=last - first)
        rank_TK, local_TK = self.resolved
        return replace(
            self,
            routes=self.routes.of_tokens(slice(first, last)),
            num_tokens=last - first,
            choices=(rank_TK[first:last], local_TK[first:last]),
        )

    def local_routes(self) -> tuple[Tensor, Tensor]:
        """`(ids_NK, weights_NK)` of every row that goes out, by rank: local ids of that rank's experts, else -1."""
        assert isinstance(self.routes, Routes)
        weights_TK = without_graph(self.routes.topk_weights_TK)
        if self.stays_whole:
            local_TK = self.spec.placement.local_ids(self.routes.topk_ids_TK)
            return local_TK, weights_TK.to(torch.float32, copy=True)
        target_N, token_N = self.rows_out
        rank_TK, local_TK = self.resolved
        here_NK = rank_TK[token_N] == target_N.unsqueeze(1)
        weights_NK = torch.where(here_NK, weights_TK[token_N].float(), 0.0)
        return torch.where(here_NK, local_TK[token_N], -1), weights_NK


def rows_out(rank_TK: Tensor, world: int) -> tuple[Tensor, Tensor]:
    """`(rank_N, token_N)` of every row that goes out, by rank: a token once for each rank that has an expert of it.

    >>> [index.tolist() for index in rows_out(torch.tensor([[0, 0], [1, -1], [1, 0]]), world=3)]
    [[0, 0, 1, 1], [0, 2, 1, 2]]
    """
    # One column more than ranks takes the choices of nobody: -1 modulo W + 1.
    goes_TW = torch.zeros(rank_TK.shape[0], world + 1, dtype=torch.bool, device=rank_TK.device)
    goes_TW.scatter_(1, rank_TK.remainder(world + 1), True)
    rank_N, token_N = goes_TW[:, :world].t().nonzero().unbind(1)
    return rank_N, token_N


def choices_by_part(part_TK: Tensor, parts: int) -> tuple[Tensor, ...]:
    """For each part (a rank, or a host), the choices (ascending) that go there, as token · K + choice.

    >>> [choices.tolist() for choices in choices_by_part(torch.tensor([[0, 0], [1, -1], [1, 0]]), parts=2)]
    [[0, 1, 5], [2, 4]]
    """
    part_N, choice_N = part_TK.flatten().sort(stable=True)
    nobody, *counts = (part_N + 1).bincount(minlength=parts + 1).tolist()
    return tuple(choice_N[nobody:].split(counts))


def tokens_by_rank(rank_TK: Tensor, world: int) -> tuple[Tensor, ...]:
    """For each rank, the tokens (ascending) that have an expert there: each once, however many experts.

    >>> [tokens.tolist() for tokens in tokens_by_rank(torch.tensor([[0, 0], [1, -1], [1, 0]]), world=3)]
    [[0, 2], [1, 2], []]
    """
    rank_N, token_N = rows_out(rank_TK, world)
    return tuple(token_N.split(rank_N.bincount(minlength=world).tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class UnencodedRows:
    """Rows in the input's dtype, for a transport that encodes them in `format` itself."""

    format: Format
    x_TH: Tensor

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.x_TH.shape[1]

    @property
    def num_rows(self) -> int:
        """T."""
        return self.x_TH.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.x_TH.device

    def check(self) -> None:
        """Raise unless these are rows."""
        check_rows(self.x_TH)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A checked batch, ready to be sent."""

    spec: ExchangeSpec  # what the exchange knows of the layer
    round: int  # the number of the round trip, from 1
    region: int  # which of `in_flight` pairs of regions it uses, the same on every rank
    forward: int = 0  # in a backward, the round of the forward; 0: a forward
    part: Part | None = None  # which tokens of a larger batch these are; None: they are a whole batch
    rows: EncodedRows | UnencodedRows  # not encoded only where the transport says that it encodes this wire
    extra: Mapping[str, Tensor]  # further payloads, one row per token
    routes: BatchRoutes  # who gets which row
    announcements: Announcements  # what this rank tells the others of it
    # Counts to which a transport with `counts_choices` adds the batch's choices: of nobody, then of each expert.
    choice_counts: Tensor | None = None
    ahead: bool = False  # whether the caller computes something while it travels
    takes_slots: bool = False  # whether the experts accept empty slots among received rows, with ids of -1

    @property
    def num_tokens(self) -> int:
        """T, the tokens of this rank."""
        return self.routes.num_tokens

    @property
    def payloads(self) -> dict[str, Tensor]:
        """The payloads of the encoded rows and the caller's further ones, without routes: a row per token."""
        assert isinstance(self.rows, EncodedRows)
        return {**self.rows.payloads, **self.extra}

    def copied(self) -> Batch:
        """The same batch with tensors of its own."""
        assert isinstance(self.rows, EncodedRows)
        routes = self.routes.routes
        if isinstance(routes, Routes):
            weights_TK = without_graph(routes.topk_weights_TK).clone()
            routes = replace(routes, topk_ids_TK=routes.topk_ids_TK.clone(), topk_weights_TK=weights_TK)
        payloads = {name: payload.clone() for name, payload in self.rows.payloads.items()}
        return replace(
            self,
            rows=replace(self.rows, payloads=payloads),
            extra={name: tensor.clone() for name, tensor in self.extra.items()},
            routes=replace(self.routes, routes=routes, choices=self.routes.resolved),
        )

    @torch.no_grad()  # routing weights may require a gradient; packets never do
    def write(self, packets_by_rank: Sequence[Tensor]) -> None:
        """Write the packets of the rows that go to each rank, `[rows, stride]`: a token once for each rank."""
        ids_NK, weights_NK = self.routes.local_routes()
        self.spec.dispatch_layout.write_some(
            packets_by_rank,
            self.payloads,
            self.routes.tokens_by_rank,
            {"ids": ids_NK, "weights": weights_NK},
        )

    def packets(self) -> Tensor:
        """Packets of all rows that go out, `[rows, stride]`, those for rank 0 first: a token once for each rank."""
        shape = sum(self.routes.counts), self.spec.dispatch_layout.stride
        packets = torch.empty(shape, dtype=torch.uint8, device=self.rows.device)
        self.write(packets.split(self.routes.counts))
        return packets

    def arrived(self, received: ReceivedRows, counts_W: Sequence[int], way_back: Any = None) -> Arrival:
        """The arrival of this dispatch, made of the received rows and the number that each rank has announced."""
        return Arrival(
            received=received,
            spec=self.spec,
            round=self.round,
            region=self.region,
            forward=self.forward,
            routes=self.routes,
            counts_W=tuple(counts_W),
            way_back=way_back,
            part=self.part,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The tokens of one pass: some consecutive ones of a batch whose rows are more than ranks take at a time."""

    batch: Batch  # all tokens
    first: int  # the first token of this pass
    parts: int  # the tokens from `first` on were cut into so many parts, of which this is the first
    # The rows that later passes bring to the place that gets most; set when all ranks have announced theirs.
    left: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrival(Generic[WayBack]):
    """The rows that came to this rank in a dispatch. It is combined exactly once, and valid until then."""

    received: ReceivedRows  # the rows that arrived here
    spec: ExchangeSpec  # what the exchange knows of the layer
    round: int  # the number of the round trip, from 1
    region: int  # which of `in_flight` pairs of regions it uses, the same on every rank
    routes: BatchRoutes  # who gets which row of this rank's own batch, whose results come home
    # The rows that each rank has announced, and expects results of. Empty if only the device knows them.
    counts_W: tuple[int, ...]
    way_back: WayBack  # what the transport keeps for the way back; only the transport reads it
    forward: int = 0  # in a backward, the round of the forward; 0: a forward
    checksums_RC: Tensor | None = None  # the checksums that came with the rows, in a paranoid plan
    # An error that this rank found after the dispatch had ended; the others receive it in the combine.
    problem: Exception | None = None
    part: Part | None = None  # which tokens of a larger batch went out; None: all of it

    @property
    def batch_tokens(self) -> int:
        """The number of tokens of this rank's whole batch, of which this may be one pass."""
        return self.routes.num_tokens if self.part is None else self.part.batch.num_tokens

    @property
    def tokens(self) -> slice:
        """The tokens of the whole batch that belong to this pass."""
        first = 0 if self.part is None else self.part.first
        return slice(first, first + self.routes.num_tokens)

    @property
    def has_more(self) -> bool:
        """Whether another pass of the same batch follows, on all ranks (`Exchange.dispatch_next`)."""
        return self.part is not None and self.part.left > 0

    @property
    def results_due(self) -> tuple[int, ...]:
        """The results that each rank expects: one for each row, or for each choice if choices are summed at home."""
        return self._choices_due if self.spec.sums_choices and self.counts_W else self.counts_W

    @cached_property
    def _choices_due(self) -> tuple[int, ...]:
        assert isinstance(self.received.routes, LocalRoutes)
        here_R = (self.received.routes.ids_RK >= 0).sum(dim=1)
        return tuple(torch.stack([part.sum() for part in here_R.split(self.received.counts_W)]).tolist())

    def check_counts(self) -> None:
        """Raise unless as many rows came from each rank as it expects results of."""
        for source, (came, due) in enumerate(zip(self.received.counts_W, self.counts_W, strict=False)):
            if came != due:
                raise Corrupted(
                    f"{came} rows from rank {source} have an expert here, and it announced {due}",
                    expected="the ids that were sent",
                    source=source,
                    place="ids",
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Failure:
    """Given to a transport in place of a batch or results: this rank takes part only to announce that it failed."""

    spec: ExchangeSpec  # what the exchange knows of the layer
    region: int  # which of `in_flight` pairs of regions the round uses
    announcements: Announcements  # with the error
    arrival: Arrival | None  # the arrival that will not be combined; None: the dispatch failed


def numbered(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Concatenated ranges: `counts[i]` consecutive numbers from `starts[i]` on.

    >>> numbered([7, 0], [2, 3]).tolist()
    [7, 8, 0, 1, 2]
    """
    # By NumPy: an operator of torch takes several times as long, and there is one for each rank.
    runs = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return torch.from_numpy(np.concatenate(runs))


def received_rows(
    spec: ExchangeSpec, packets: Tensor, counts: Sequence[int], slots_R: Tensor | None = None
) -> ReceivedRows:
    """Received packets, `counts[w]` of them from rank w, as `ReceivedRows` whose rows are views of the packets.

    `slots_R`: the index of each received row among `packets`; None: `packets` holds nothing else.
    """
    tensors = spec.dispatch_layout.unpack(packets)

    def of_rows(name: str) -> Tensor:
        return tensors[name] if slots_R is None else tensors[name][slots_R]

    routes: LocalRoutes | RoutingLogits
    if spec.carries_logits:
        routes = RoutingLogits(logits_RE=of_rows("logits"))
    else:
        routes = LocalRoutes(ids_RK=of_rows("ids"), weights_RK=of_rows("weights"))
    return ReceivedRows(
        rows=spec.rows(tensors),
        routes=routes,
        counts_W=tuple(counts),
        extra={payload.name: of_rows(payload.name) for payload in spec.further},
        slots_R=slots_R,
    )


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor without its autograd graph: itself, or a detached view."""
    return tensor.detach() if tensor.requires_grad else tensor
