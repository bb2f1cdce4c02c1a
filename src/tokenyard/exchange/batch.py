"""What travels, in four types with four lifetimes.

    BatchRoutes     who gets which row of a batch         immutable; can be used again, for a second dispatch
    Batch           a checked batch, ready to be sent     until it was sent
    Arrival         the rows that came to this rank       until they are combined
    ResultsAtHome   the results of this rank's tokens     until they are summed

A transport is given a `Batch` and makes an `Arrival`; it is given `Results` and makes `ResultsAtHome`. If a rank fails
before it can send a batch or results, its transport is given a `Failure` instead, and announces why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.duties import Duty, record
from tokenyard.errors import Corrupted
from tokenyard.exchange.announcement import Announcements
from tokenyard.exchange.batch_routes import BatchRoutes, rows_out
from tokenyard.exchange.reduce import sum_over_ranks, without_graph
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows, Format, check_rows
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits


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


# -- The way out -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A checked batch, ready to be sent."""

    spec: ExchangeSpec  # what the exchange knows of the layer
    round: int  # the number of the round trip, from 1
    region: int  # which of `in_flight` pairs of regions it uses, the same on every rank
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
class Arrival:
    """The rows that came to this rank in a dispatch. It is combined exactly once, and valid until then."""

    received: ReceivedRows  # the rows that arrived here
    spec: ExchangeSpec  # what the exchange knows of the layer
    round: int  # the number of the round trip, from 1
    region: int  # which of `in_flight` pairs of regions it uses, the same on every rank
    routes: BatchRoutes  # who gets which row of this rank's own batch, whose results come home
    # The rows that each rank has announced, and expects results of. Empty if only the device knows them.
    counts_W: tuple[int, ...]
    way_back: Any = None  # what the transport keeps for the way back; only the transport reads it
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


# -- The way back ------------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, eq=False)
class SumAhead:
    """What the sum of results is written into, and adds: known when they are sent, so a transport may start it."""

    out_TH: Tensor | None  # what the sum is written into; None: a new tensor
    add: Sequence[Tensor]  # tensors of the caller's that are added to it


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """Checked results of an arrival, ready to be sent back."""

    arrival: Arrival  # the rows that they are the results of
    # A result per received row, or per choice; None: the experts have written them into the exchange's buffer.
    rows_RH: Tensor | None
    # `rows_RH` in the combine wire; None if there are none, or the transport encodes them.
    encoded: EncodedRows | None
    announcements: Announcements  # what this rank tells the others of them
    # Called by the transport when results are encoded and in their place, before it announces them.
    on_results_written: Callable[[], None] = _nothing
    # Checks the sums that relays make of results, in a paranoid plan.
    watch: SumWatch | None = None
    sum_ahead: SumAhead | None = None  # the sum to start now, if the caller computes meanwhile

    @torch.no_grad()
    def write(self, packets_by_rank: Sequence[Tensor]) -> None:
        """Write the packets of the results for each source rank, `[rows, stride]`."""
        assert self.encoded is not None
        layout, start = self.arrival.spec.combine_layout, 0
        for packets in packets_by_rank:
            end = start + packets.shape[0]
            rows = {name: payload[start:end] for name, payload in self.encoded.payloads.items()}
            layout.write(packets, rows)
            start = end

    def packets_by_rank(self) -> tuple[Tensor, ...]:
        """The packets of the results for each source rank, `[rows, stride]`."""
        assert self.encoded is not None
        shape = self.encoded.num_rows, self.arrival.spec.combine_layout.stride
        packets = torch.empty(shape, dtype=torch.uint8, device=self.encoded.device)
        by_rank = tuple(packets.split(list(self.arrival.results_due)))
        self.write(by_rank)
        return by_rank


class ResultsAtHome(ABC):
    """The results that came back for this rank's tokens: they are summed, or returned rank by rank."""

    def summed(self) -> Tensor | None:
        """The sum that the transport began when results were sent (`Results.sum_ahead`); None: `sum_into` makes it."""
        return None

    @abstractmethod
    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        """Write the float32 sum over ranks (or choices), in their order, and of `add`, into `out_TH`. Rounded once."""

    @abstractmethod
    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Copies of the rows that each rank returned, in float32, and the tokens that they belong to."""


class SumWatch(ABC):
    """Checks, in a paranoid plan, the results that a relay sums, and adds checksums to its sums."""

    @abstractmethod
    def results(self, home: RowsAtHome, heads_NC: Tensor) -> ResultsAtHome:
        """Results at a relay, which are checked when they are summed; an error is raised at the end of the round.

        `heads_NC`: source rank, token and round of each row that the relay forwarded, from its checksums.
        """

    @abstractmethod
    def sealed(self, sums: EncodedRows, tokens_N: Tensor) -> EncodedRows:
        """The sums of some tokens, with checksums that are compared at home."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsAtHome(ResultsAtHome):
    """Results as encoded rows, by the rank that returned them."""

    rows_by_rank: list[EncodedRows]  # in the order of this rank's tokens, and of their choices
    tokens_by_rank: tuple[Tensor, ...]  # the tokens that they belong to
    ranks: tuple[int, ...] | None = None  # the ranks that returned them; None: all of the group, in order
    # The choice (0 to K - 1) of its token that each row is the result of; None: rows are summed over ranks.
    choices_by_rank: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, arrival: Arrival, payloads_by_rank: Sequence[Mapping[str, Tensor]]) -> RowsAtHome:
        """The payloads that each rank returned for an arrival, as results."""
        spec = arrival.spec
        rows = [spec.results(payloads) for payloads in payloads_by_rank]
        if not spec.sums_choices:
            return cls(rows_by_rank=rows, tokens_by_rank=arrival.routes.tokens_by_rank)
        returned = arrival.routes.choices_by_rank
        return cls(
            rows_by_rank=rows,
            tokens_by_rank=tuple(choice_N // spec.top_k for choice_N in returned),
            choices_by_rank=tuple(choice_N % spec.top_k for choice_N in returned),
        )

    def summands(self) -> tuple[list[EncodedRows], tuple[Tensor, ...]]:
        """Rows and their tokens in the order of the sum, by rank or by choice. In each part no token occurs twice."""
        if self.choices_by_rank is None:
            return self.rows_by_rank, self.tokens_by_rank
        choice_N, token_N = torch.cat(self.choices_by_rank), torch.cat(self.tokens_by_rank)
        order_N = (choice_N << 32 | token_N).argsort()
        first = self.rows_by_rank[0]
        payloads = {
            name: torch.cat([rows.payloads[name] for rows in self.rows_by_rank]) for name in first.payloads
        }
        together = replace(first, payloads=payloads).select(order_N)
        ends = [0, *choice_N.bincount().cumsum(0).tolist()] if len(choice_N) else [0, 0]
        rows = [together.slice(start, end) for start, end in pairwise(ends)]
        return rows, tuple(token_N[order_N].split([part.num_rows for part in rows]))

    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        if self.choices_by_rank is not None:  # this sum over ranks is one over experts, too
            record(Duty.REDUCE_EXPERTS, sum(tokens.numel() for tokens in self.tokens_by_rank))
        return sum_over_ranks(*self.summands(), out_TH, add)

    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        # Copies even of float32 rows: what comes home must not be a view of a peer's memory.
        rows_by_rank = tuple(rows.decode(torch.float32).clone() for rows in self.rows_by_rank)
        return rows_by_rank, self.tokens_by_rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Failure:
    """Given to a transport in place of a batch or results: this rank takes part only to announce that it failed."""

    spec: ExchangeSpec  # what the exchange knows of the layer
    region: int  # which of `in_flight` pairs of regions the round uses
    announcements: Announcements  # with the error
    arrival: Arrival | None  # the arrival that will not be combined; None: the dispatch failed


def tokens_by_rank(rank_TK: Tensor, world: int) -> tuple[Tensor, ...]:
    """For each rank, the tokens (ascending) that have an expert there: each once, however many experts.

    >>> [tokens.tolist() for tokens in tokens_by_rank(torch.tensor([[0, 0], [1, -1], [1, 0]]), world=3)]
    [[0, 2], [1, 2], []]
    """
    rank_N, token_N = rows_out(rank_TK, world)
    return tuple(token_N.split(rank_N.bincount(minlength=world).tolist()))


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
