"""What travels back: the results of received rows, and their sum over ranks at home.

    Results         checked results, ready to be sent     until they were sent
    ResultsAtHome   the results of this rank's tokens     until they are summed

**The sum over ranks:** in float32, in rank order, from +0, rounded once, with each row read only once.

A token has at most one row from each rank, and rows stand in the order of tokens. There are two ways. Both add in the
order of `RankRows.sum`, and give the same bits:

- **Where they stand.** Rows of the output's own dtype are taken as lines of one table: all memory from the first of
  them to the last, whatever lies in between. The sum is the product of a sparse matrix of ones, which has a line per
  token with its rows in rank order, and that table. Torch adds the products of a line in float32, in their order, and
  rounds at the end.
- **Decoded.** Else the tokens are walked in blocks whose float32 sums stay in the cache: for each rank in turn the
  block's rows are decoded and added, then the tensors that the caller adds, then the block is rounded into the output.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from tokenyard.duties import Duty, record
from tokenyard.errors import ContractError, InputError
from tokenyard.exchange.announcement import Announcements
from tokenyard.exchange.batch import Arrival, WayBack, without_graph
from tokenyard.exchange.returns import ChoicePlaces
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows, Payload, check_device, dtype_name, is_matrix
from tokenyard.rows import ExpertResult, PlacedRows, check_choice_rows, check_expert_rows, describe

# float32 elements of a block of sums (512 KiB: with the rows that are added, it fits a core's L2 cache).
# CPU time of a sum at T 512, H 2048 from 4 ranks, 4 processes on 2 cores: 8.1 ms at 32 Ki, 5.1 to 6.5 at 64 Ki,
# 4.6 to 5.7 at 128 Ki, 5.3 to 6.5 at 256 Ki.
BLOCK = 128 * 1024
# Elements of a block that is summed where it stands: each block has a fixed cost, and its result is allocated and
# copied. The same sum by one process alone: 3.5 ms at 64 Ki, 3.0 at 128 Ki, 2.7 at 256 Ki, 2.3 at 512 Ki and 1 Mi.
TABLE_BLOCK = 512 * 1024
# Bytes: a table with narrower lines has so many lines that to index them costs more than to decode the rows.
NARROWEST_LINE = 512


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, eq=False)
class SumAhead:
    """What the sum of results is written into, and adds: known when they are sent, so a transport may start it."""

    out_TH: Tensor | None  # what the sum is written into; None: a new tensor
    add: Sequence[Tensor]  # tensors of the caller's that are added to it


@dataclass(frozen=True, kw_only=True, eq=False)
class Results(Generic[WayBack]):
    """Checked results of an arrival, ready to be sent back."""

    arrival: Arrival[WayBack]  # the rows that they are the results of
    # A result per received row, or per choice; None: the experts have written them into the exchange's buffer.
    rows_RH: Tensor | None
    # `rows_RH` in the combine wire; None if there are none, or the transport encodes them.
    encoded: EncodedRows | None
    announcements: Announcements  # what this rank tells the others of them
    # Payloads that travel beside results (`ExchangeSpec.returns`), a row for each; `encoded` has them, too.
    beside: Mapping[str, Tensor] = field(default_factory=dict)
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

    def placed(self, payload: Payload) -> Tensor:
        """The numbers of this rank's choices that came beside results (`ExchangeSpec.returns`), `[T, K · width]`."""
        raise ContractError(
            f"{type(self).__name__} has no payloads beside results",
            expected=f"payload {payload.name!r} of each choice, which the layer declares",
            fix="carry the payloads of `spec.combine_layout`, and return RowsAtHome",
        )


class SumWatch(ABC):
    """Checks, in a paranoid plan, the results that a relay sums, and adds checksums to its sums."""

    @abstractmethod
    def results(self, home: RowsAtHome, heads_NC: Tensor) -> ResultsAtHome:
        """Results at a relay, which are checked when they are summed; an error is raised at the end of the round.

        `heads_NC`: source rank, token and round of each row that the relay forwarded, from its checksums.
        """

    @abstractmethod
    def with_checksums(self, sums: EncodedRows, tokens_N: Tensor) -> EncodedRows:
        """The sums of some tokens, with checksums that are compared at home."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsAtHome(ResultsAtHome):
    """Results as encoded rows, by the rank that returned them."""

    rows_by_rank: list[EncodedRows]  # in the order of this rank's tokens, and of their choices
    tokens_by_rank: tuple[Tensor, ...]  # the tokens that they belong to
    ranks: tuple[int, ...] | None = None  # the ranks that returned them; None: all of the group, in order
    # The choice (0 to K - 1) of its token that each row is the result of; None: rows are summed over ranks.
    choices_by_rank: tuple[Tensor, ...] | None = None
    # Where payloads belong that rows carry and that are not summed (`ExchangeSpec.returns`); None: there are none.
    places: ChoicePlaces | None = None

    @classmethod
    def of(cls, arrival: Arrival, payloads_by_rank: Sequence[Mapping[str, Tensor]]) -> RowsAtHome:
        """The payloads that each rank returned for an arrival, as results."""
        spec = arrival.spec
        wire, width = spec.combine_wire, spec.hidden_size
        rows = [EncodedRows(format=wire, hidden_size=width, payloads=some) for some in payloads_by_rank]
        places = ChoicePlaces.of(arrival.routes) if spec.returns else None
        if not spec.sums_choices:
            return cls(rows_by_rank=rows, tokens_by_rank=arrival.routes.tokens_by_rank, places=places)
        returned = arrival.routes.choices_by_rank
        return cls(
            rows_by_rank=rows,
            tokens_by_rank=tuple(choice_N // spec.top_k for choice_N in returned),
            choices_by_rank=tuple(choice_N % spec.top_k for choice_N in returned),
            places=places,
        )

    @property
    def results_by_rank(self) -> list[EncodedRows]:
        """The rows that are summed, without the payloads that are placed."""
        if self.places is None:
            return self.rows_by_rank
        return [self.places.without(rows) for rows in self.rows_by_rank]

    def summands(self) -> tuple[list[EncodedRows], tuple[Tensor, ...]]:
        """Rows and their tokens in the order of the sum, by rank or by choice. In each part no token occurs twice."""
        if self.choices_by_rank is None:
            return self.results_by_rank, self.tokens_by_rank
        choice_N, token_N = torch.cat(self.choices_by_rank), torch.cat(self.tokens_by_rank)
        order_N = (choice_N << 32 | token_N).argsort()
        results_by_rank = self.results_by_rank
        first = results_by_rank[0]
        payloads = {
            name: torch.cat([rows.payloads[name] for rows in results_by_rank]) for name in first.payloads
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
        rows_by_rank = tuple(rows.decode(torch.float32).clone() for rows in self.results_by_rank)
        return rows_by_rank, self.tokens_by_rank

    def placed(self, payload: Payload) -> Tensor:
        return (
            super().placed(payload) if self.places is None else self.places.placed(payload, self.rows_by_rank)
        )


# -- Checks ----------------------------------------------------------------------------------------------


def check_output(spec: ExchangeSpec, tensor: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise unless a tensor has the shape, dtype and device of the result, to be `out` or a term of `add`."""
    expected = (num_tokens, spec.hidden_size)
    if not is_matrix(tensor) or tuple(tensor.shape) != expected or tensor.dtype != spec.dtype:
        raise InputError(
            f"a tensor to write into or to add is {describe(tensor)}",
            expected=f"{dtype_name(spec.dtype)}{list(expected)}: the shape and dtype of the input",
            fix="allocate it with torch.empty_like(x_TH)",
        )
    check_device("a tensor to write into or to add", tensor.device, device)


def check_writable(out: Tensor) -> None:
    """Raise unless a tensor can be written in place: no overlapping elements, no gradient, no inference tensor."""
    steps = sorted((step, count) for step, count in zip(out.stride(), out.shape, strict=True) if count > 1)
    # Each stride must be at least as large as what the dimension of the next smaller stride spans.
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


def check_sum(
    arrival: Arrival,
    *,
    reduces: bool,
    out: Tensor | None,
    add: Sequence[Tensor],
    most: int | None,
    device: torch.device,
) -> None:
    """Raise unless the plan lets this party sum over ranks, and `out` and `add` have the shape of the result.

    `reduces`: whether the exchange was asked to sum; `most`: how many tensors it can add, None for any number.
    """
    spec = arrival.spec
    if reduces != spec.reduces_ranks:
        raise ContractError(
            f"the {'exchange' if reduces else 'caller'} was asked to reduce over ranks",
            expected=f"the {'exchange' if spec.reduces_ranks else 'caller'} to do it, as the plan says",
            fix='take them unreduced, or plan with reduce_ranks="exchange"'
            if reduces
            else 'let the exchange do it, or plan with reduce_ranks="caller"',
        )
    for tensor in ([] if out is None else [out]) + list(add):
        check_output(spec, tensor, arrival.batch_tokens, device)
    if out is not None:
        check_writable(out)
    if most is not None and len(add) > most:
        raise InputError(
            f"{len(add)} tensors to add",
            expected=f"at most {most} on a GPU",
            fix="add some of them before",
        )


def check_result(arrival: Arrival, result: ExpertResult) -> Tensor | None:
    """The result rows of an arrival, checked; None if the experts wrote them into the combine buffer themselves."""
    if isinstance(result, PlacedRows) and arrival.received.results is not None:
        if result.buffer is not arrival.received.results:
            raise ContractError(
                "combine was given rows that were placed in the buffer of another dispatch",
                expected="PlacedRows of `received.results`, of this very dispatch",
                fix="ask for the buffer after each dispatch",
            )
        return None
    if arrival.spec.sums_choices:
        return check_choice_rows(result, arrival.received).rows_NH
    return check_expert_rows(result, arrival.received).rows_RH


# -- The sum over ranks ------------------------------------------------------------------------------------


def sum_over_ranks(
    home: Sequence[EncodedRows], tokens_by_rank: Sequence[Tensor], out_TH: Tensor, add: Sequence[Tensor]
) -> Tensor:
    """Write into `out_TH` the sum of `home[w]`, the rows of tokens `tokens_by_rank[w]`, and of `add`."""
    if len(home) == 1 and not add and tokens_by_rank[0].numel() == out_TH.shape[0]:
        return _sum_of_one_rank(home[0], out_TH)
    record(Duty.REDUCE_RANKS, sum(tokens.numel() for tokens in tokens_by_rank))
    table = None if add else _table_of(home, out_TH)
    if table is None:
        return _sum_decoded(home, tokens_by_rank, out_TH, add)
    return _sum_where_they_stand(table, tokens_by_rank, out_TH)


def _sum_of_one_rank(rows: EncodedRows, out_TH: Tensor) -> Tensor:
    """Write the rows of one rank, which has all tokens, into `out_TH`.

    Adds +0, as a sum that begins there does: -0 becomes +0. It does so before the rounding, because a negative sum that
    is smaller than the output's smallest number is no zero, and rounds to -0.
    """
    record(Duty.REDUCE_RANKS, out_TH.shape[0])
    (first, *_), dtype = rows.payloads.values(), out_TH.dtype
    same = not rows.format.quantized and first.dtype == dtype
    y_TH = without_graph(rows.decode(dtype if same else torch.float32))
    return torch.add(y_TH, 0.0, out=out_TH)  # rounds the float32 sum


# -- Where they stand --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Memory that holds the rows of all ranks, cut into lines: a row is one line, or several consecutive ones."""

    lines: Tensor
    lines_per_row: int
    first_lines: list[int]  # by rank: where its first row starts
    steps: list[int]  # by rank: lines from a row to the next


class _Memory:
    """Bytes at an address, described by NumPy's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def _table_of(home: Sequence[EncodedRows], out_TH: Tensor) -> _Table | None:
    """One table for the rows of all ranks; None if they must be decoded, or do not lie on common lines."""
    if out_TH.device.type != "cpu" or any(rows.format.quantized for rows in home):
        return None
    rows_by_rank = [next(iter(rows.payloads.values())) for rows in home]
    there = [rows for rows in rows_by_rank if rows.shape[0]]
    if not there or any(rows.dtype != out_TH.dtype or rows.stride(1) != 1 for rows in there):
        return None
    size = out_TH.dtype.itemsize
    row_bytes = out_TH.shape[1] * size
    start = min(rows.data_ptr() for rows in there)
    end = max(rows.data_ptr() + (len(rows) - 1) * rows.stride(0) * size + row_bytes for rows in there)
    line = gcd(row_bytes, *(n for rows in there for n in (rows.data_ptr() - start, rows.stride(0) * size)))
    if line < min(NARROWEST_LINE, row_bytes):
        return None
    # The memory between the rows may hold anything: no line of it is ever read.
    memory = torch.from_numpy(np.asarray(_Memory(start, end - start)))
    return _Table(
        lines=memory.view(out_TH.dtype).view(-1, line // size),
        lines_per_row=row_bytes // line,
        first_lines=[(rows.data_ptr() - start) // line for rows in rows_by_rank],
        steps=[rows.stride(0) * size // line for rows in rows_by_rank],
    )


def _sum_where_they_stand(table: _Table, tokens_by_rank: Sequence[Tensor], out_TH: Tensor) -> Tensor:
    num_tokens, hidden_size = out_TH.shape
    parts, world = table.lines_per_row, len(tokens_by_rank)
    # The index by NumPy: small operators of torch take several times as long.
    line_TW = np.full((num_tokens, world), -1)
    for rank, (tokens, first, step) in enumerate(
        zip(tokens_by_rank, table.first_lines, table.steps, strict=True)
    ):
        line_TW[tokens.numpy(), rank] = first + step * np.arange(tokens.numel())
    line_NW = line_TW
    if parts > 1:
        line_TPW = line_TW[:, None] + np.arange(parts)[:, None]
        line_NW = np.where(line_TW[:, None] >= 0, line_TPW, -1).reshape(-1, world)
    there_NW = line_NW >= 0
    line_L = torch.from_numpy(line_NW[there_NW])
    ends_N = np.zeros(len(line_NW) + 1, dtype=np.int64)
    np.cumsum(there_NW.sum(axis=1), out=ends_N[1:])
    ones = torch.ones(line_L.numel(), dtype=out_TH.dtype)
    block = max(1, TABLE_BLOCK // hidden_size)
    for start in range(0, num_tokens, block):
        end = min(start + block, num_tokens)
        block_ends = ends_N[start * parts : end * parts + 1]
        first, last = block_ends[0], block_ends[-1]
        chosen = torch.sparse_csr_tensor(
            torch.from_numpy(block_ends - first),
            line_L[first:last],
            ones[first:last],
            size=((end - start) * parts, table.lines.shape[0]),
            check_invariants=False,
        )
        sums: Any = torch.sparse.mm(chosen, table.lines, reduce="sum")
        out_TH[start:end] = sums.view(-1, hidden_size)
    return out_TH


with warnings.catch_warnings():
    # Torch warns once per process that its sparse CSR tensors are in beta. Here a twin checks them: `RankRows.sum`.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1), check_invariants=False)


# -- Decoded -----------------------------------------------------------------------------------------------


@torch.no_grad()  # a residual may require a gradient; layers have none, and sums are made in place
def _sum_decoded(
    home: Sequence[EncodedRows], tokens_by_rank: Sequence[Tensor], out_TH: Tensor, add: Sequence[Tensor]
) -> Tensor:
    num_tokens, hidden_size = out_TH.shape
    step = max(1, BLOCK // hidden_size)
    starts = range(0, num_tokens, step)
    edges = torch.tensor([*starts, num_tokens], device=out_TH.device)
    bounds = [torch.searchsorted(tokens, edges).tolist() for tokens in tokens_by_rank]
    # Made once: fresh memory for every block costs half of the time again.
    block_TH, decoded_TH = torch.empty(2, step, hidden_size, dtype=torch.float32, device=out_TH.device)
    for number, start in enumerate(starts):
        end = min(start + step, num_tokens)
        sums_TH = block_TH[: end - start].zero_()
        for rows, tokens, bound in zip(home, tokens_by_rank, bounds, strict=True):
            first, last = bound[number], bound[number + 1]
            if first < last:
                some_TH = _decode(rows.slice(first, last), decoded_TH[: last - first])
                # No token occurs twice within a rank, so the order of additions is fixed, on any device.
                sums_TH.index_add_(0, tokens[first:last] - start, some_TH)
        for term_TH in add:
            sums_TH += term_TH[start:end].float()
        out_TH[start:end] = sums_TH
    return out_TH


def _decode(rows: EncodedRows, into_NH: Tensor) -> Tensor:
    """Decode rows to float32; rows of a plain format are written into `into_NH`, without a new tensor."""
    if rows.format.quantized:
        return rows.decode(torch.float32)
    (data,) = rows.payloads.values()
    return into_NH.copy_(data)
