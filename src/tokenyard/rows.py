"""The types that parts hand to each other: what an exchange delivers, what experts return, what a combine returns.

Each station of a token's way has a type of its own, so that a result cannot be reduced twice, a batch cannot
be combined before its experts ran, and a kernel cannot hand back "a tensor or a tuple":

    ReceivedRows ── experts ──► ExpertRows ── combine ──► CombinedRows
                       │            ▲              └────► RankRows (not yet reduced over ranks)
                       ├► UnfinalizedRows.finish(), or .weighted() where choices are summed at home ──► ChoiceRows
                       └► PlacedRows (written into the exchange's own CombineBuffer)

All of them are frozen. They hold tensors, so they compare by identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tokenyard.duties import Duty, record, record_weights
from tokenyard.errors import ContractError
from tokenyard.formats.base import EncodedRows, kind_of, saturated

# Elements of results that are rounded at a time (512 KiB of float32, within the L2 cache of a core).
WRITE_BLOCK = 128 * 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRoutes:
    """For each received row: the experts *of this rank* that take it, and their routing weights.

    `ids_RK` (int32) counts experts on this rank from 0; `-1` marks an expert that lives elsewhere, or nobody.
    `weights_RK` is float32 and means something only where the id is not `-1`.
    """

    ids_RK: Tensor  # int32: the experts of this rank, counted from 0; -1: one that lives elsewhere, or nobody
    weights_RK: Tensor  # float32: the routing weights
    renumbered: LocalRoutes | None = None  # the routes with local ids, where `ids_RK` holds weight slots

    @cached_property
    def pairs(self) -> Tensor:
        """`pairs_N`: for each choice that an expert of this rank takes, row · K + choice, in ascending order.

        It is computed once: on a GPU the host has to wait for the number of pairs.
        """
        if self.renumbered is not None:
            return self.renumbered.pairs
        return (self.ids_RK.reshape(-1) >= 0).nonzero().squeeze(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingLogits:
    """The router's logits, for experts that route by themselves. They travel instead of routes."""

    logits_RE: Tensor  # float32: a logit for each expert of the layer


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedRows:
    """A dispatched batch: the rows that this rank received, in (source rank, token) order."""

    rows: EncodedRows  # the rows, in the layer's wire
    # The routes to this rank's experts, or logits for experts that route by themselves.
    routes: LocalRoutes | RoutingLogits
    counts_W: tuple[int, ...]  # rows from each source rank
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # the caller's further per-token payloads
    # The slot of each row, where `rows` is a view of the exchange's workspace, in which some slots hold no row.
    # Such rows are valid until they are combined. None: `rows` holds the R rows and nothing else.
    slots_R: Tensor | None = None
    # Whether a row may have no expert on this rank: `rows` are all slots of a workspace, empty ones included, or all
    # tokens, wherever their experts are.
    may_be_empty: bool = False
    # The buffer from which the combine reads results: experts may write into it. None: experts return their results.
    results: CombineBuffer | None = None
    # The same buffer, where the layer asks experts that declare `places_results` to write into it.
    place: CombineBuffer | None = None

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return sum(self.counts_W)

    def dense(self) -> EncodedRows:
        """The R rows without empty slots; a copy, if `rows` is a view of the workspace."""
        return self.rows if self.slots_R is None else self.rows.select(self.slots_R)

    def result(self, rows_RH: Tensor) -> ExpertRows | PlacedRows:
        """The result of experts whose rows are weighted and summed; written into `place`, if the layer gave one."""
        return ExpertRows(rows_RH=rows_RH) if self.place is None else self.place.write(rows_RH)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRows:
    """What experts return: one row per received row, weighted, summed over the experts of this rank.

    A row none of whose experts live here is zero. There is no field that says "reduced over ranks": rows that
    were reduced have another type, which `combine` does not take.
    """

    rows_RH: Tensor  # the results, of a floating-point dtype, without padding


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceRows:
    """Weighted expert outputs, not summed: with `LayerSpec(sum="choices")` the exchange sums them at home.

    One row for each choice of a received row whose expert lives here, in the order of received rows and choices.
    """

    rows_NH: Tensor  # the results, of a floating-point dtype, without padding


@dataclass(frozen=True, kw_only=True, eq=False)
class CombineBuffer:
    """The part of the workspace from which the combine reads results: experts that write into it save a copy.

    The result of received row r belongs into `rows_SH[slots_R[r]]`, or into `rows_SH[r]` if `slots_R` is None, in the
    dtype of `rows_SH`. After all results are written, the experts return `placed()`, which `combine` takes. The buffer
    belongs to one dispatch. An exchange that offers a buffer delivers only rows that some expert of this rank takes.
    """

    rows_SH: Tensor  # a row for each slot of the workspace
    slots_R: Tensor | None  # the slot of each received row; None: slot r is row r
    # Whether a paranoid plan checks the results. Experts then return them, because more can be checked that way.
    is_watched: bool = False

    def write(self, rows_nH: Tensor, first: int = 0) -> PlacedRows:
        """Write the results of received rows from `first` on, rounded as a plain wire rounds them.

        They are written in blocks that fit into the cache: rounded values stay there until they are written.
        """
        step = max(1, WRITE_BLOCK // rows_nH.shape[1])
        for start in range(0, rows_nH.shape[0], step):
            some_nH = saturated(rows_nH[start : start + step], self.rows_SH.dtype)
            chosen = slice(first + start, first + start + len(some_nH))
            if self.slots_R is None:
                self.rows_SH[chosen] = some_nH
            else:
                self.rows_SH.index_copy_(0, self.slots_R[chosen], some_nH)
        return self.placed()

    def placed(self) -> PlacedRows:
        """The result to return once all rows are written, weighted and summed over the experts of this rank."""
        return PlacedRows(buffer=self)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedRows:
    """The result of experts that wrote into a `CombineBuffer`: as `ExpertRows`, but already where combine reads it."""

    buffer: CombineBuffer  # the buffer that the rows were written into


# What a combine takes: `ChoiceRows` in layers with sum="choices", one of the others elsewhere.
ExpertResult = ExpertRows | ChoiceRows | PlacedRows


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfinalizedRows:
    """Expert outputs before weighting and summing: one row per (received row, expert) pair.

    Row n belongs to received row `index_N[n] // K` and to its choice `index_N[n] % K`; `weights_N[n]` is the
    routing weight that is still to be applied (ones, where it was applied on the input).
    `finish()` does what `finalize=True` would have done, bit for bit.
    """

    rows_NH: Tensor  # the output of an expert for a row
    weights_N: Tensor  # the routing weights that are still to be applied
    index_N: Tensor  # the received row times K, plus the choice
    num_rows: int  # R, the rows that were received
    top_k: int  # K, the experts that a token chooses

    def weighted(self) -> ChoiceRows:
        """Weight the rows, in float32, in the order of received rows and their choices. Nothing is summed."""
        record_weights(self.weights_N)
        order_N = torch.argsort(self.index_N)
        rows_NH = self.rows_NH[order_N].float() * self.weights_N[order_N].float().unsqueeze(1)
        return ChoiceRows(rows_NH=rows_NH)

    def finish(self) -> ExpertRows:
        """Weight the rows and sum each token's experts, in float32, in the order of its choices."""
        record_weights(self.weights_N)
        record(Duty.REDUCE_EXPERTS, len(self.index_N))
        sums_RH = self.rows_NH.new_zeros(self.num_rows, self.rows_NH.shape[1], dtype=torch.float32)
        row_N, choice_N = self.index_N // self.top_k, self.index_N % self.top_k
        for choice in range(self.top_k):
            # Each row occurs at most once here, so that the order of the sum is fixed.
            chosen = (choice_N == choice).nonzero().squeeze(1)
            if chosen.numel():
                weighted_NH = self.rows_NH[chosen].float() * self.weights_N[chosen].float().unsqueeze(1)
                sums_RH[row_N[chosen]] += weighted_NH
        return ExpertRows(rows_RH=sums_RH)


@dataclass(frozen=True, kw_only=True, eq=False)
class CombinedRows:
    """The output of a layer: a row for each token of this rank, reduced over ranks, in the dtype of the input."""

    y_TH: Tensor  # the output of the layer


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRows:
    """Results that were returned to the rank of their tokens and not reduced over ranks, which is the caller's duty.

    Rank w returned `rows_by_rank[w]` (float32) for the tokens `tokens_by_rank[w]` of this rank.
    """

    rows_by_rank: tuple[Tensor, ...]  # the results that each rank returned, in float32
    tokens_by_rank: tuple[Tensor, ...]  # the tokens of this rank that they belong to
    num_tokens: int  # T, the tokens of this rank
    dtype: torch.dtype  # the dtype of the layer's output

    @classmethod
    def joined(cls, passes: Sequence[RankRows]) -> RankRows:
        """The results of all passes of a batch as one, in the order of the passes."""
        if len(passes) == 1:
            return passes[0]
        rows = zip(*(part.rows_by_rank for part in passes), strict=True)
        tokens = zip(*(part.tokens_by_rank for part in passes), strict=True)
        return replace(
            passes[0], rows_by_rank=tuple(map(torch.cat, rows)), tokens_by_rank=tuple(map(torch.cat, tokens))
        )

    def reduce(self) -> CombinedRows:
        """Sum over ranks, in rank order, in float32, and round once to the layer's dtype, as `combine` does."""
        return CombinedRows(y_TH=self.sum().to(self.dtype))

    def sum(self) -> Tensor:
        """The float32 sum over ranks, in rank order, before it is rounded."""
        record(Duty.REDUCE_RANKS, sum(tokens.numel() for tokens in self.tokens_by_rank))
        first = self.rows_by_rank[0]
        sums_TH = torch.zeros(self.num_tokens, first.shape[1], dtype=torch.float32, device=first.device)
        for rows_NH, token_N in zip(self.rows_by_rank, self.tokens_by_rank, strict=True):
            # A rank returns at most one row for each token, so that the order of the sum is fixed.
            sums_TH.index_add_(0, token_N, rows_NH)
        return sums_TH


def check_result(result: object, received: ReceivedRows) -> ExpertRows | PlacedRows:
    """Raise unless `result` is what experts may return: rows placed in `received.results`, or valid `ExpertRows`."""
    if isinstance(result, PlacedRows) and result.buffer is received.results:
        return result
    return check_expert_rows(result, received)


def check_choice_rows(result: object, received: ReceivedRows) -> ChoiceRows:
    """Raise unless `result` is what combine takes with sum="choices": `ChoiceRows` with a row for each choice."""
    if not isinstance(result, ChoiceRows):
        raise ContractError(
            f"combine was given {describe(result)}",
            expected="ChoiceRows, weighted and not summed: the layer's choices are summed at home",
            fix="call `.weighted()` on what experts return with finalize=False",
        )
    assert isinstance(received.routes, LocalRoutes)  # logits are refused by the plan
    expected = (len(received.routes.pairs), received.rows.hidden_size)
    _check_tensor(
        "ChoiceRows",
        result.rows_NH,
        expected,
        rows="one row per choice of this rank's experts",
        fix="return a row for every id of `received.routes` that is not -1, cut to H",
    )
    return result


def check_expert_rows(result: object, received: ReceivedRows) -> ExpertRows:
    """Raise unless `result` is what combine takes: `ExpertRows` with one row per received row."""
    if not isinstance(result, ExpertRows):
        hint = {
            UnfinalizedRows: "call `.finish()` on it, or let the experts finalize",
            ChoiceRows: 'call `.finish()` in place of `.weighted()`, or plan with sum="choices"',
            CombinedRows: "these rows were reduced over ranks already: use `.y_TH`",
            RankRows: "these rows came home already: call `.reduce()` on them",
        }.get(type(result), "return ExpertRows(rows_RH=...) from the experts")
        raise ContractError(
            f"combine was given {describe(result)}",
            expected="ExpertRows, weighted and summed per rank",
            fix=hint,
        )
    expected = (received.num_rows, received.rows.hidden_size)
    _check_tensor(
        "ExpertRows",
        result.rows_RH,
        expected,
        rows="one row per received row, without padding",
        fix="return a row for every received row (zeros where no local expert takes it), cut to H",
    )
    return result


def _check_tensor(holder: str, found: object, shape: tuple[int, int], *, rows: str, fix: str) -> None:
    """Raise unless `found` is a floating-point tensor of this shape; the error says what its `rows` should be."""
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
        raise ContractError(
            f"{holder} holds {describe(found)}",
            expected=f"a floating-point tensor {list(shape)}: {rows}",
            fix=fix,
        )


def describe(value: object, *, device: bool = False) -> str:
    """How an error describes a value of the wrong kind: dtype and shape of a tensor, and its device on request."""
    if isinstance(value, Tensor):
        return f"a tensor {kind_of(value)}" + (f" on {value.device}" if device else "")
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
