"""What an exchange is told of a layer (`ExchangeSpec`), and what it hands out: batches, handles, the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from tokenyard.errors import Corrupted, InputError, shown
from tokenyard.exchange.workspace import LayerBytes, RowLayout, SlotLayout
from tokenyard.formats.base import EncodedRows, Format, Payload, check_rows, dtype_name, is_matrix
from tokenyard.routing import Placement, Routes
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits, describe

# The payload that rows of a sealed spec carry beside all others, out and back; `tokenyard.exchange.seals` makes it.
SEAL = "seal"
SEAL_HEAD = 3  # numbers that say whose row it is


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
    # Where experts were lost with their ranks: whether a token's other weights make up for it.
    renormalizes_dropped: bool = False
    # Whether rows carry seals, by which the other end sees that they are what was sent.
    sealed: bool = False

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
        """What travels out beside a row and its routes: the caller's further payloads, and the seal if there is one."""
        if not self.sealed:
            return self.extra
        own = len(self.wire.payloads(self.hidden_size)) + len(self.extra)
        routes = 1 if self.carries_logits else self.top_k  # a checksum of logits, a copy of routes
        return (*self.extra, Payload(name=SEAL, dtype=torch.int64, width=SEAL_HEAD + own + routes))

    @property
    def slots(self) -> int:
        """Rows that may arrive on a rank: `max_tokens` from each."""
        return self.placement.world * self.max_tokens

    @cached_property
    def dispatch_slots(self) -> SlotLayout:
        """The payloads of a packet, for all slots of a workspace's dispatch region."""
        return SlotLayout.of(self.dispatch_layout.payloads, self.slots)

    @cached_property
    def combine_slots(self) -> SlotLayout:
        """The payloads of a result, for all slots of a workspace's combine region."""
        return SlotLayout.of(self.combine_layout.payloads, self.slots)

    @cached_property
    def combine_layout(self) -> RowLayout:
        """A packet on the way back: the result row in the combine wire's format."""
        payloads = self.combine_wire.payloads(self.hidden_size)
        if self.sealed:
            payloads += (Payload(name=SEAL, dtype=torch.int64, width=SEAL_HEAD + len(payloads)),)
        return RowLayout.of(payloads)

    @cached_property
    def nbytes(self) -> LayerBytes:
        """The memory that a round trip of this layer takes on one rank, at most."""
        out, back = self.dispatch_layout.stride, self.combine_layout.stride
        return LayerBytes(
            dispatch_row=out, combine_row=back, dispatch=self.slots * out, combine=self.slots * back
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnencodedRows:
    """Rows as they are, for an exchange that encodes them on their way."""

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
class ReturnPath:
    """How results get home: which of my tokens went to each rank, and how many rows each rank sent me."""

    tokens_by_rank: tuple[Tensor, ...]
    received_counts: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """The handle of one dispatch: the batch that arrived here, and the way back. Combined exactly once."""

    received: ReceivedRows  # the rows that arrived here
    spec: ExchangeSpec  # what the exchange knows of the layer
    round: int  # the number of the round trip, from 1
    return_path: ReturnPath  # which rows go back to whom
    flight: int = 0  # which of `in_flight` places it has, the same on every rank
    seals_RC: Tensor | None = None  # the seals of the rows that arrived, in a paranoid plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Outgoing:
    """A checked batch, ready to be moved."""

    rows: EncodedRows
    routes: Routes | RoutingLogits
    extra: Mapping[str, Tensor]
    tokens_by_rank: tuple[Tensor, ...]
    # `(rank_TK, local_TK)`: where each choice goes. None, where logits travel.
    resolved: tuple[Tensor, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the tokens of this rank."""
        return self.rows.num_rows

    @property
    def counts(self) -> list[int]:
        """Rows for each rank."""
        return [tokens.numel() for tokens in self.tokens_by_rank]

    def local_routes(self, routes: Routes) -> tuple[Tensor, Tensor]:
        """Ids and weights of every row that goes out, by rank: the ids of that rank's own experts, else -1."""
        token_N = torch.cat(self.tokens_by_rank)
        counts = torch.tensor(self.counts, device=token_N.device)
        target_N = torch.arange(len(counts), device=token_N.device).repeat_interleave(counts)
        assert self.resolved is not None  # these are routes
        rank_TK, local_TK = self.resolved
        here_NK = rank_TK[token_N] == target_N.unsqueeze(1)
        weights_NK = torch.where(here_NK, routes.topk_weights_TK[token_N].float(), 0.0)
        return torch.where(here_NK, local_TK[token_N], -1), weights_NK


def tokens_by_rank(rank_TK: Tensor, world: int) -> tuple[Tensor, ...]:
    """For each rank, the tokens (ascending) that have an expert there: each once, however many experts.

    >>> [tokens.tolist() for tokens in tokens_by_rank(torch.tensor([[0, 0], [1, -1], [1, 0]]), world=3)]
    [[0, 2], [1, 2], []]
    """
    # One column more than ranks takes the choices of nobody.
    goes_TW = torch.zeros(rank_TK.shape[0], world + 1, dtype=torch.bool, device=rank_TK.device)
    goes_TW.scatter_(1, torch.where(rank_TK < 0, world, rank_TK), True)
    goes_WT = goes_TW[:, :world].t()
    return tuple(goes_WT.nonzero()[:, 1].split(goes_WT.sum(dim=1).tolist()))


def check_arrival(dispatched: Dispatched) -> None:
    """Raise unless as many rows came from each rank as it expects results of."""
    found, announced = dispatched.received.counts_W, dispatched.return_path.received_counts
    for source, (came, due) in enumerate(zip(found, announced, strict=True)):
        if came != due:
            raise Corrupted(
                f"{came} rows from rank {source} have an expert here, and it announced {due}",
                expected="the ids that were sent",
                source=source,
                place="ids",
            )


def check_device(what: str, found: torch.device, device: torch.device) -> None:
    """Raise unless something is where the group moves bytes: on any CPU, or on that very GPU."""
    if found.type != device.type or (device.index is not None and found.index != device.index):
        raise InputError(f"{what} is on {found}", expected=str(device), fix="move it there first")


def check_extra(
    spec: ExchangeSpec, extra: Mapping[str, Tensor], num_tokens: int, device: torch.device
) -> None:
    """Raise unless the caller's further payloads are the declared ones."""
    declared = {payload.name: payload for payload in spec.extra}
    if not isinstance(extra, Mapping) or set(extra) != set(declared):
        raise InputError(
            f"the further payloads are {shown(sorted(extra, key=str) if isinstance(extra, Mapping) else extra)}",
            expected=f"{sorted(declared)}, as the layer declares",
            fix="declare them in LayerSpec(payloads=…) and pass each one in every call",
        )
    for name, tensor in extra.items():
        declared[name].check(tensor, num_tokens)
        check_device(f"payload {name!r}", tensor.device, device)


def check_logits(spec: ExchangeSpec, routes: object, num_tokens: int) -> RoutingLogits:
    """Raise unless these are logits for experts that route by themselves."""
    logits_TE = routes.logits_RE if isinstance(routes, RoutingLogits) else None
    found = routes if logits_TE is None else logits_TE
    expected = (num_tokens, spec.num_experts)
    if not is_matrix(logits_TE) or tuple(logits_TE.shape) != expected or logits_TE.dtype != torch.float32:
        raise InputError(
            f"the layer's experts route by themselves, and were given {describe(found)}",
            expected=f"RoutingLogits of float32{list(expected)}",
            fix="pass the router's logits, not routes",
        )
    return RoutingLogits(logits_RE=logits_TE)


def check_output(spec: ExchangeSpec, tensor: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise unless a tensor can take the result, or be added to it."""
    expected = (num_tokens, spec.hidden_size)
    if not is_matrix(tensor) or tuple(tensor.shape) != expected or tensor.dtype != spec.dtype:
        raise InputError(
            f"a tensor to write into or to add is {describe(tensor)}",
            expected=f"{dtype_name(spec.dtype)}{list(expected)}: the shape and dtype of the input",
            fix="allocate it with torch.empty_like(x_TH)",
        )
    check_device("a tensor to write into or to add", tensor.device, device)


def check_writable(out: Tensor) -> None:
    """Raise unless every element of a tensor can be written by itself, and nothing else hangs on it."""
    steps = sorted((step, count) for step, count in zip(out.stride(), out.shape, strict=True) if count > 1)
    # Each step must lead beyond what the smaller ones reach.
    overlaps = any(step < reach * count for (reach, count), (step, _) in pairwise([(1, 1), *steps]))
    if out.numel() and overlaps:
        found, fix = "whose elements share memory", "pass torch.empty_like(x_TH)"
    elif out.requires_grad:
        found, fix = "that wants a gradient", "pass out.detach(), or leave `out` away"
    elif out.is_inference() and not torch.is_inference_mode_enabled():
        found, fix = "made in inference mode", "call the layer in inference mode, too"
    else:
        return
    raise InputError(
        f"`out` is {describe(out)} {found}", expected="a tensor of its own that can be written", fix=fix
    )


def received_rows(spec: ExchangeSpec, packets: Tensor, counts: tuple[int, ...]) -> ReceivedRows:
    """The packets that arrived, as a batch: views of the bytes, no copy."""
    tensors = spec.dispatch_layout.unpack(packets)
    names = [payload.name for payload in spec.wire.payloads(spec.hidden_size)]
    rows = EncodedRows(
        format=spec.wire,
        hidden_size=spec.hidden_size,
        payloads={name: tensors[name] for name in names},
    )
    routes: LocalRoutes | RoutingLogits
    if spec.carries_logits:
        routes = RoutingLogits(logits_RE=tensors["logits"])
    else:
        routes = LocalRoutes(ids_RK=tensors["ids"], weights_RK=tensors["weights"])
    extra = {payload.name: tensors[payload.name] for payload in spec.further}
    return ReceivedRows(rows=rows, routes=routes, counts_W=counts, extra=extra)
