"""What an exchange is told of a layer: sizes, formats, where the experts are. It does not know what an expert is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tokenyard.exchange.workspace import LayerBytes, RowLayout, SlotLayout
from tokenyard.formats.base import EncodedRows, Format, Payload
from tokenyard.routing import Placement

# The payload that rows of a paranoid plan carry beside all others, out and back (`integrity.checksums`).
CHECKSUMS = "checksums"
SOURCE, TOKEN, ROUND = range(3)  # its first columns, which say whose row it is
CHECKSUM_HEAD = 3


@dataclass(frozen=True, kw_only=True)
class ExchangeSpec:
    """What an exchange must carry for one layer."""

    layer: str  # the name of the layer
    index: int  # the number of the layer in its plan
    hidden_size: int  # H, the width of a row
    num_experts: int  # E, the experts of the layer
    top_k: int  # K, the experts that a token chooses
    max_tokens: int  # the most tokens that a rank brings in a call
    dtype: torch.dtype  # the dtype of the rows that go in and come out
    wire: Format  # the format of the way out
    combine_wire: Format  # the format of the way back
    placement: Placement  # which rank owns which expert
    routed_scaling: float = 1.0  # the factor that routing weights hold
    carries_logits: bool = False  # whether logits travel instead of routes
    extra: tuple[Payload, ...] = ()  # further payloads of the caller's, one row per token
    reduces_ranks: bool = True  # whether the exchange sums over ranks; else the caller does
    # Whether the result of each choice comes home by itself, to be summed there in the order of a token's choices; else
    # each rank sums over its own experts of a token first.
    sums_choices: bool = False
    # If experts were lost with their ranks: whether a token's other weights grow to make up for those of lost ones.
    renormalizes_dropped: bool = False
    # The number of the host of each rank, where results are summed inside each host first; else empty.
    hosts: tuple[int, ...] = ()
    # The most rows that a rank receives in one pass of a batch; None: there is room for all that may come.
    max_rows: int | None = None
    # The dtype of sums over ranks that are summed again later, as relays' are; None: they are the result, in `dtype`.
    sum_dtype: torch.dtype | None = None
    # Whether experts may move to other ranks, and be copied there, while the layer is served.
    movable: bool = False
    # Whether rows carry checksums, which the receiver compares (a paranoid plan).
    checksummed: bool = False
    # What comes home of each choice beside the results: payloads whose numbers are placed, never summed.
    returns: tuple[Payload, ...] = ()
    # Whether gradients of a layer's rows travel, along the routes of a forward; `index` is a number of its own then.
    of_gradients: bool = False

    @cached_property
    def counted_as(self) -> str:
        """The name under which statistics count it: that of the layer; gradients are counted apart."""
        return f"{self.layer} (gradients)" if self.of_gradients else self.layer

    @cached_property
    def dispatch_layout(self) -> RowLayout:
        """A packet on the way out: the encoded row, its routes (or logits), the further payloads."""
        if self.carries_logits:
            routes = [Payload(name="logits", dtype=torch.float32, width=self.num_experts)]
        else:
            routes = [
                Payload(name="ids", dtype=torch.int32, width=self.top_k),
                Payload(name="weights", dtype=torch.float32, width=self.top_k),
            ]
        return RowLayout.of([*self.wire.payloads(self.hidden_size), *routes, *self.further])

    @cached_property
    def further(self) -> tuple[Payload, ...]:
        """What travels out beside a row and its routes: the caller's further payloads, and checksums."""
        if not self.checksummed:
            return self.extra
        own = len(self.wire.payloads(self.hidden_size)) + len(self.extra)
        routes = 1 if self.carries_logits else self.top_k  # a checksum of logits, a copy of routes
        return (*self.extra, Payload(name=CHECKSUMS, dtype=torch.int64, width=CHECKSUM_HEAD + own + routes))

    def rows(self, tensors: Mapping[str, Tensor]) -> EncodedRows:
        """Dispatched rows in the wire; their payloads are picked by name from these tensors."""
        payloads = {payload.name: tensors[payload.name] for payload in self.wire.payloads(self.hidden_size)}
        return EncodedRows(format=self.wire, hidden_size=self.hidden_size, payloads=payloads)

    def results(self, payloads: Mapping[str, Tensor]) -> EncodedRows:
        """Results in the combine wire that have these payloads."""
        return EncodedRows(format=self.combine_wire, hidden_size=self.hidden_size, payloads=payloads)

    @property
    def slots(self) -> int:
        """Rows that may arrive on a rank at a time: `max_tokens` from each rank, or `max_rows` in all."""
        return self.placement.world * self.max_tokens if self.max_rows is None else self.max_rows

    def first_slots(self, counts: Sequence[int]) -> list[int]:
        """The slot of each source rank's first row: windows of `max_tokens`, or with `max_rows` no gaps."""
        return list(self.windows) if self.max_rows is None else [0, *accumulate(counts[:-1])]

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The slot of each source rank's first row, where there is room for all rows that may come."""
        return tuple(source * self.max_tokens for source in range(self.placement.world))

    @cached_property
    def dispatch_slots(self) -> SlotLayout:
        """The payloads of a packet, for all slots of a workspace's dispatch region."""
        return SlotLayout.of(self.dispatch_layout.payloads, self.slots)

    @cached_property
    def results_per_row(self) -> int:
        """The most results that a row has on a rank: one, or one for each of its choices."""
        return self.top_k if self.sums_choices else 1

    @cached_property
    def combine_slots(self) -> SlotLayout:
        """The payloads of a result, for all slots of a workspace's combine region."""
        return SlotLayout.of(self.combine_layout.payloads, self.slots * self.results_per_row)

    @cached_property
    def returned(self) -> tuple[Payload, ...]:
        """The payloads of `returns` as they travel beside a result: the numbers of all choices that it is a sum of."""
        width = 1 if self.sums_choices else self.top_k
        return tuple(replace(payload, width=payload.width * width) for payload in self.returns)

    @cached_property
    def combine_layout(self) -> RowLayout:
        """A packet on the way back: the result row in the combine wire's format, and what else comes home."""
        payloads = (*self.combine_wire.payloads(self.hidden_size), *self.returned)
        if self.checksummed:
            payloads += (Payload(name=CHECKSUMS, dtype=torch.int64, width=CHECKSUM_HEAD + len(payloads)),)
        return RowLayout.of(payloads)

    @cached_property
    def slot_nbytes(self) -> LayerBytes:
        """The memory that a round trip takes on one rank if rows lie in slots, payload by payload."""
        return LayerBytes(
            dispatch_row=sum(payload.nbytes for payload in self.dispatch_slots.payloads),
            combine_row=sum(payload.nbytes for payload in self.combine_slots.payloads),
            dispatch=self.dispatch_slots.nbytes,
            combine=self.combine_slots.nbytes,
        )

    @cached_property
    def nbytes(self) -> LayerBytes:
        """The memory that a round trip of this layer takes on one rank, at most."""
        out, back = self.dispatch_layout.stride, self.combine_layout.stride
        return LayerBytes(
            dispatch_row=out,
            combine_row=back,
            dispatch=self.slots * out,
            combine=self.slots * self.results_per_row * back,
        )
