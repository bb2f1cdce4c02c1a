"""The fast experts for CPU and CUDA: they sort pairs by expert, then compute two products per expert.

    sort pairs ── gather rows ── W13 · x ── activation ── W2 · h ── weight ── sum over a row's choices

Rows are decoded to the dtype of the weights. How a product is computed is chosen by `product_path`, a pure
function of the shape:

- `grouped_mm`: all experts in one call of `torch.nn.functional.grouped_mm`. It wants rows whose width is a
  multiple of 16 bytes. (It leaves rows past its last offset uninitialized; there are none here, since only
  pairs that exist are sorted.)
- `upcast`: expert by expert, the weights widened to float32 tile by tile, and a float32 product. A CPU
  without 16-bit matrix units emulates bf16 products at a third of its float32 rate, so that from some number
  of rows on, widening the weights pays. Nothing is rounded to 16 bits between the two products. A CPU that has
  such units (AMX, AVX512-BF16) does not need it: 512 rows to 8 of 64 experts, [2048, 2048] and [2048, 1024],
  took 127 ms widened and 74 ms by `grouped_mm` on 16 AMX cores.
- `mm`: expert by expert, in the dtype of the weights, for shapes that `grouped_mm` does not take.

Quantized weights are computed by `tiles.py`: they are decoded a tile at a time, to float32, and never held as a whole.

In `grouped_mm` and `mm` the sums are float32 inside a product, and its output is rounded to the dtype of the
weights, as is the activation's result. The activation itself, the bias, the routing weight and the sum over a
row's experts are always float32, and that sum has one order: the order of the row's choices, bit for bit as
`UnfinalizedRows.finish` does it. Unlike those of the reference experts, the bits of a row may still depend on
how many rows share its expert, since a BLAS library chooses its tiles by that number. With `batch_invariant` they do
not: a CPU then computes row by row (`tiles.py`), with the reproducible activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.duties import Duty, record, record_weights
from tokenyard.errors import ContractError
from tokenyard.experts import workers
from tokenyard.experts.base import local_routes
from tokenyard.experts.gradients import FirstProduct, Products
from tokenyard.experts.pairs import SortedPairs, check_local_id, check_shapes
from tokenyard.experts.tiles import product_by_tiles
from tokenyard.experts.trained import TrainedExperts
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import WEIGHT_FORMATS, Fp8Block128, QuantizedMatrix
from tokenyard.rows import CombineBuffer, ExpertRows, LocalRoutes, PlacedRows, ReceivedRows, UnfinalizedRows

Item = TypeVar("Item")
Matrices = TypeVar("Matrices")  # the matrices of all experts: one tensor, or a list with one for each expert
ProductPath = Literal["grouped_mm", "upcast", "mm"]

# Rows of one expert from which on a CPU is faster with float32 products. Measured on a core with AVX-512 but
# no 16-bit matrix units, one expert of [2048, 2048], milliseconds for 16-bit → upcast:
#   bf16   4 rows: 1.9 → 2.8    8: 3.1 → 3.3    16: 5.0 → 4.9    32: 9.5 → 4.7    64: 17.9 → 7.7
#   fp16   4 rows: 2.8 → 3.4    8: 6.0 → 3.7    16: 8.9 → 3.9    32: 16.5 → 4.6   64: 34.0 → 6.4
UPCAST_ROWS = {torch.bfloat16: 16, torch.float16: 8}

# Elements of the weights that are widened at a time (4 MiB of float32, which stay in the cache). 64 rows ·
# [2048, 2048] on one core: 8.4 ms at 4 Mi elements, 6.5 at 1 Mi, 8.4 at 512 Ki, 11 at 128 Ki; 5.2 if the
# weights were float32 already.
UPCAST_TILE = 1024 * 1024

# float32 elements of the weighted results that are summed at a time (512 KiB, within the L2 cache).
SUM_BLOCK = 128 * 1024

GROUPED_MM_ALIGNMENT = 16  # bytes


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions that multiply and add this 16-bit dtype."""
    features = {
        torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),
        torch.float16: ("amx_fp16", "avx512_fp16", "fp16_arith"),
    }.get(dtype, ())
    found = torch.cpu.get_capabilities()
    return any(found.get(feature, False) for feature in features)


def product_path(
    rows_per_expert: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    native: bool = False,
) -> ProductPath:
    """The way to compute products of this shape; `native`: the CPU has instructions that multiply this dtype.

    >>> product_path(64, 2048, 1024, torch.bfloat16, torch.device("cpu"))
    'upcast'
    >>> product_path(64, 2048, 1024, torch.bfloat16, torch.device("cpu"), native=True)
    'grouped_mm'
    >>> product_path(4, 100, 1024, torch.bfloat16, torch.device("cuda"))
    'mm'
    """
    emulated = device.type == "cpu" and not native and dtype in UPCAST_ROWS
    if emulated and rows_per_expert >= UPCAST_ROWS[dtype]:
        return "upcast"
    widths = (hidden_size * dtype.itemsize, intermediate_size * dtype.itemsize)
    return "mm" if any(width % GROUPED_MM_ALIGNMENT for width in widths) else "grouped_mm"


class GroupedExperts(TrainedExperts):
    """Experts computed on pairs grouped by expert, with the matrix product that is fastest for the shape."""

    name = "grouped"
    counts_duties = True
    any_strides = True
    places_results = True
    weight_formats = tuple(WEIGHT_FORMATS)
    inner_formats = (Fp8Block128.name,)
    batch_invariant = ("cpu",)
    trains = ("cpu",)
    _last: tuple[tuple[int, ...], ExpertWeights] | None = None
    # The matrices of each expert of `_last`, transposed, for products of single rows.
    _single: tuple[ExpertWeights, list[Tensor], list[Tensor]] | None = None

    @property
    def weights(self) -> ExpertWeights:
        """The weights as they are now (no copies). The object is cached until a buffer becomes another tensor."""
        buffers = tuple(
            map(id, self._buffers.values())
        )  # `_last` keeps these tensors alive, so their ids stay unique
        if self.spec.trains:  # parameters change, and wrappers put others in their place
            return super().weights
        if self._last is None or self._last[0] != buffers:
            self._last = buffers, super().weights
        return self._last[1]

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy, without what is cached: it is found by the ids of this object's buffers."""
        return {name: value for name, value in vars(self).items() if name not in ("_last", "_single")}

    def _single_matrices(self, weights: ExpertWeights) -> tuple[list[Tensor], list[Tensor]]:
        """Transposed views of each expert's matrices, cached, since making a view takes some microseconds."""
        if self.spec.trains:
            w13, w2 = weights.plain_matrices()
            return list(w13.mT.unbind()), list(w2.mT.unbind())
        if self._single is None or self._single[0] is not weights:
            w13, w2 = weights.plain_matrices()
            self._single = weights, list(w13.mT.unbind()), list(w2.mT.unbind())
        return self._single[1:]

    @property
    def products(self) -> Products:
        """How the products of a backward are computed."""
        return Products(
            by_rows=_product,
            over_rows=lambda a_nO, b_nI: torch.mm(a_nO.t(), b_nI),
            inner=lambda a_nD, b_nD: (a_nD * b_nD).sum(1),
            column_sums=lambda a_nD: a_nD.sum(0),
            reproducible=self.spec.batch_invariant,
        )

    def compute_pairs(
        self,
        received: ReceivedRows,
        weights: ExpertWeights,
        *,
        finalize: bool,
        first: FirstProduct | None = None,
    ) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Sort pairs, gather rows, and compute both products; with `finalize`, weight and sum the results."""
        spec = self.spec
        if received.rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.compute_fixed(received, finalize=finalize)
        routes = local_routes(received)
        by_tiles = isinstance(weights.w13, QuantizedMatrix) or spec.batch_invariant
        one_row = received.num_rows == 1 and routes.ids_RK.shape[:1] == (1,)
        if one_row and not by_tiles and routes.ids_RK.is_cpu:
            return self._one_row(weights, received, routes, finalize=finalize, first=first)
        pairs = self.sorted_pairs(received)
        if by_tiles:
            y_NH = self._tile_by_tile(weights, self.incoming(received, torch.float32), pairs, first)
        else:
            x_RH = self.incoming(received, weights.plain_matrices()[0].dtype)
            at_once = self._path(weights, max(pairs.counts, default=0)) == "grouped_mm"
            compute = self._all_at_once if at_once else self._one_by_one
            y_NH = compute(weights, x_RH, pairs, first)
        weights_N = torch.ones_like(pairs.weights_N) if spec.weight_on == "input" else pairs.weights_N
        if finalize:
            return sum_choices(y_NH, weights_N, pairs, received.place)
        return UnfinalizedRows(
            rows_NH=y_NH[pairs.place_N],
            weights_N=weights_N,
            index_N=pairs.index_N,
            num_rows=pairs.num_rows,
            top_k=pairs.top_k,
        )

    @torch.no_grad()
    def compute_fixed(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows:
        """What `compute` does, without reading a value on the host, so that a CUDA graph can capture it.

        Buffers have a row for every (row, choice), whether its id is -1 or not. Choices of -1 are sorted to the end,
        where the products stop before them, and their rows, which are uninitialized, are not added.
        """
        spec, weights, routes = self.spec, self.weights, local_routes(received)
        quantized = isinstance(weights.w13, QuantizedMatrix)
        if quantized or not finalize or self._path(weights, 0) != "grouped_mm":
            raise ContractError(
                f"grouped experts of {spec.hidden_size} and {spec.intermediate_size} columns with {spec.weights} "
                "weights were captured" + ("" if finalize else " without finalizing"),
                expected=f"plain weights and rows whose bytes are a multiple of {GROUPED_MM_ALIGNMENT}, finalized "
                "by the experts",
                fix="run this layer outside of the CUDA graph",
            )
        w13, _ = weights.plain_matrices()
        (num_rows, top_k), num_experts = routes.ids_RK.shape, spec.num_local_experts
        expert_N = routes.ids_RK.reshape(-1).long()
        expert_N = torch.where(
            expert_N < 0, num_experts, expert_N
        )  # choices of -1 are sorted to the end, behind all experts
        sorted_N, order_N = torch.sort(expert_N, stable=True)
        every_L = torch.arange(num_experts, device=order_N.device)
        ends_L = torch.searchsorted(sorted_N, every_L, right=True, out_int32=True)
        weights_N = routes.weights_RK.reshape(-1).float()
        x_NH = self.incoming(received, w13.dtype)[order_N // top_k]
        if spec.weight_on == "input":
            x_NH = (x_NH.float() * weights_N[order_N].unsqueeze(1)).to(w13.dtype)
        own_N = sorted_N.clamp(max=num_experts - 1)
        y_NH = self._both_products(
            weights, weights.plain_matrices(), x_NH, own_N, partial(_by_groups, ends_L)
        )
        place_N = torch.empty_like(order_N).scatter_(
            0, order_N, torch.arange(len(order_N), device=order_N.device)
        )
        sums_RH = y_NH.new_zeros(num_rows, spec.hidden_size, dtype=torch.float32)
        for choice in range(top_k):
            y_RH = y_NH[place_N[choice::top_k]].float()
            if spec.weight_on == "output":
                y_RH = y_RH * weights_N[choice::top_k].unsqueeze(1)
            sums_RH += torch.where(routes.ids_RK[:, choice : choice + 1] >= 0, y_RH, 0.0)
        return ExpertRows(rows_RH=sums_RH)

    def _path(self, weights: ExpertWeights, rows: int) -> ProductPath:
        spec, (w13, w2) = self.spec, weights.plain_matrices()
        dtype, device = w13.dtype, w13.device
        native = device.type == "cpu" and cpu_multiplies(dtype)
        path = product_path(rows, spec.hidden_size, spec.intermediate_size, dtype, device, native=native)
        # Adopted weights may have any alignment, say in a memory-mapped file, and any strides.
        usable = all(w.is_contiguous() and w.data_ptr() % GROUPED_MM_ALIGNMENT == 0 for w in (w13, w2))
        return "mm" if path == "grouped_mm" and not usable else path

    def _inputs(self, x_RH: Tensor, pairs: SortedPairs, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of some pairs in the dtype of the product, times their weights if `weight_on` is "input"."""
        x_nH = x_RH[pairs.row_N[chosen]]
        if self.spec.weight_on == "input":
            record_weights(pairs.weights_N[chosen])
            return (x_nH.float() * pairs.weights_N[chosen].unsqueeze(1)).to(dtype)
        return x_nH.to(dtype)

    def _all_at_once(
        self, weights: ExpertWeights, x_RH: Tensor, pairs: SortedPairs, first: FirstProduct | None
    ) -> Tensor:
        """The results of all pairs, in the order of `by_expert_N`, by two grouped products."""
        order, matrices = pairs.by_expert_N, weights.plain_matrices()
        if order.shape[0] == 0:
            if first is not None:
                first.take(x_RH.new_empty(0, matrices[0].shape[1]))
            return x_RH.new_empty(0, self.spec.hidden_size)
        ends_L = pairs.counts_L.cumsum(0, dtype=torch.int32)
        x_NH = self._inputs(x_RH, pairs, order, matrices[0].dtype)
        return self._both_products(
            weights, matrices, x_NH, pairs.expert_N, partial(_by_groups, ends_L), first
        )

    def _one_row(
        self,
        weights: ExpertWeights,
        received: ReceivedRows,
        routes: LocalRoutes,
        *,
        finalize: bool,
        first: FirstProduct | None,
    ) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """The result of a batch of one row, choice by choice, without sorting or gathering."""
        check_shapes(routes)
        (w13, _), (ids,) = weights.plain_matrices(), routes.ids_RK.tolist()
        check_local_id(max(ids, default=-1), self.spec.num_local_experts)
        choices = [choice for choice, expert in enumerate(ids) if expert >= 0]
        experts = [ids[choice] for choice in choices]
        x_1H, weights_N1 = self.incoming(received, w13.dtype), routes.weights_RK.t()
        if weights_N1.dtype != torch.float32:
            weights_N1 = weights_N1.float()
        if len(experts) < len(ids):
            weights_N1 = weights_N1[choices]
        x_NH = x_1H  # all pairs share the row, unless it is multiplied with their weights
        if self.spec.weight_on == "input":
            record_weights(weights_N1)
            x_NH = (x_1H.float() * weights_N1).to(w13.dtype)
            weights_N1 = torch.ones_like(weights_N1)
        y_NH = x_1H.new_empty(0, self.spec.hidden_size)
        if experts:
            single, by_row = self._single_matrices(weights), partial(_row_by_row, experts)
            y_NH = self._both_products(weights, single, x_NH, experts, by_row, first)
            if first is not None and first.pre_NI is not None:  # in the order of the choices
                first.pre_NI = first.pre_NI[torch.tensor(experts).argsort(stable=True)]
        elif first is not None:
            first.take(x_1H.new_empty(0, w13.shape[1]))
        if not finalize:
            index_N = torch.tensor(choices, dtype=torch.int64)
            weights_N = weights_N1.squeeze(1).clone()  # may still be a view of the routes
            return UnfinalizedRows(
                rows_NH=y_NH, weights_N=weights_N, index_N=index_N, num_rows=1, top_k=len(ids)
            )
        record_weights(weights_N1)
        record(Duty.REDUCE_EXPERTS, len(experts))
        # NumPy gives the same sums, and a call of torch takes several times as long.
        sums_1H = np.zeros((1, self.spec.hidden_size), dtype=np.float32)
        for y_H in (y_NH * weights_N1).numpy():
            sums_1H += y_H
        return received.result(torch.from_numpy(sums_1H))

    def _both_products(
        self,
        weights: ExpertWeights,
        matrices: tuple[Matrices, Matrices],
        x_NH: Tensor,
        expert_N: Tensor | list[int],
        product: Callable[[Tensor, Matrices], Tensor],
        first: FirstProduct | None = None,
    ) -> Tensor:
        """Both products of rows, whose experts are `expert_N`, with the function `product(rows, matrices)`."""
        w13, w2 = matrices
        pre = product(x_NH, w13)
        if weights.b13 is not None:
            pre = pre + weights.b13[expert_N].float()
        if first is not None:
            first.take(pre)
            if first.only:
                return x_NH.new_empty(pre.shape[0], self.spec.hidden_size)
        y_NH = product(self.spec.activation(pre).to(x_NH.dtype), w2)
        return y_NH if weights.b2 is None else y_NH + weights.b2[expert_N].float()

    def _one_by_one(
        self, weights: ExpertWeights, x_RH: Tensor, pairs: SortedPairs, first: FirstProduct | None
    ) -> Tensor:
        """The results of all pairs, in the order of `by_expert_N`, expert by expert, in float32."""
        (w13, w2), b13, b2 = weights.plain_matrices(), weights.b13, weights.b2
        shape = (len(pairs.index_N), self.spec.hidden_size)
        y_NH = torch.empty(shape, dtype=torch.float32, device=w13.device)
        if first is not None:
            first.pre_NI = w13.new_empty(shape[0], w13.shape[1], dtype=first.dtype)

        def compute_one(expert_and_run: tuple[int, slice]) -> None:
            expert, run = expert_and_run
            chosen = pairs.by_expert_N[run]
            # For an expert with few rows 16 bits are faster, even if the weights of others in the batch are widened.
            upcast = self._path(weights, len(chosen)) == "upcast"
            x_nH = self._inputs(x_RH, pairs, chosen, torch.float32 if upcast else w13.dtype)
            pre = _product(x_nH, w13[expert])
            if b13 is not None:
                pre = pre + b13[expert].float()
            if first is not None and first.pre_NI is not None:
                first.pre_NI[run] = pre
                if first.only:
                    return
            y_nH = _product(self.spec.activation(pre).to(x_nH.dtype), w2[expert], out=y_NH[run])
            if b2 is not None:
                y_nH += b2[expert].float()

        _for_each(compute_one, pairs.runs(), pairs.counts, y_NH.device)
        return y_NH

    def _tile_by_tile(
        self, weights: ExpertWeights, x_RH: Tensor, pairs: SortedPairs, first: FirstProduct | None
    ) -> Tensor:
        """The results of all pairs, in the order of `by_expert_N`, in float32, from weights decoded tile by tile."""
        runs, invariant = list(pairs.runs()), self.spec.batch_invariant
        x_NH = self._inputs(x_RH, pairs, pairs.by_expert_N, torch.float32)
        pre = product_by_tiles(x_NH, weights.w13, weights.b13, runs, row_by_row=invariant)
        if first is not None:
            first.take(pre)
            if first.only:
                return x_NH
        act = self.spec.activation.reproducible if invariant else self.spec.activation
        return product_by_tiles(self.between(act(pre)), weights.w2, weights.b2, runs, row_by_row=invariant)


def _by_groups(ends_L: Tensor, x_ND: Tensor, w_LOD: Tensor) -> Tensor:
    """The product of rows sorted by expert; `ends_L` is the end of each expert's rows."""
    return functional.grouped_mm(x_ND, w_LOD.mT, offs=ends_L)


def _row_by_row(experts: Sequence[int], x_ND: Tensor, w_LDO: Sequence[Tensor]) -> Tensor:
    """The product of each row with the transposed matrix of its expert; a single row is used for all experts."""
    count = len(experts)
    rows = [x_ND] * count if x_ND.shape[0] == 1 else x_ND.split_with_sizes([1] * count)
    products = [torch.mm(x_1D, w_LDO[expert]) for x_1D, expert in zip(rows, experts, strict=True)]
    return torch.cat(products)


def _product(x_nD: Tensor, w_OD: Tensor, out: Tensor | None = None) -> Tensor:
    """`x_nD @ w_OD.T`, written to `out` if it is given. Weights narrower than the rows are widened by tiles."""
    if x_nD.dtype == w_OD.dtype:
        y_nO = torch.mm(x_nD, w_OD.t())
        return y_nO if out is None else out.copy_(y_nO)
    outputs, inner = w_OD.shape
    y_nO = x_nD.new_empty(x_nD.shape[0], outputs) if out is None else out
    step = max(1, min(outputs, UPCAST_TILE // inner))
    tile_oD = x_nD.new_empty(step, inner)
    for o in range(0, outputs, step):
        tile = tile_oD[: min(step, outputs - o)].copy_(w_OD[o : o + step])
        torch.mm(x_nD, tile.t(), out=y_nO[:, o : o + step])
    return y_nO


def _for_each(
    function: Callable[[Item], None], items: Iterable[Item], rows: Sequence[int], device: torch.device
) -> None:
    """Call `function` on each item, in parallel if that keeps all threads of a CPU busy."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads > 1 and workers.worth_sharing(rows, threads):
        workers.for_each(function, items, threads)
    else:
        for item in items:
            function(item)


def sum_choices(
    y_NH: Tensor, weights_N: Tensor, pairs: SortedPairs, place: CombineBuffer | None
) -> ExpertRows | PlacedRows:
    """Weight results that are in the order of `by_expert_N`, and sum those of each row, from +0, in float32.

    The products and additions are those of `UnfinalizedRows.finish`, in the same order (a row's first pair, its
    second, …), so the bits are the same. A CPU works block by block, so that each result is read from memory once,
    and each sum is rounded into its `place` from the cache. (1,886 rows of 2,048 with 4,154 pairs, one core: 13.5 ms,
    and 58 ms by passes over all rows.)
    """
    record_weights(weights_N)
    record(Duty.REDUCE_EXPERTS, len(weights_N))
    (num_pairs, hidden_size), num_rows, top_k = y_NH.shape, pairs.num_rows, pairs.top_k
    whole = num_pairs == num_rows * top_k  # all K choices of all rows are experts of this rank
    if not whole and not y_NH.is_cpu:
        return ExpertRows(rows_RH=_sum_by_passes(y_NH, weights_N, pairs))
    per_row = max(1, num_pairs // max(1, num_rows))
    block = max(1, SUM_BLOCK // (per_row * hidden_size) if y_NH.is_cpu else num_rows)
    ends = None if whole else [0, *torch.bincount(pairs.row_N, minlength=num_rows).cumsum(0).tolist()]
    sums_RH = y_NH.new_empty(num_rows if place is None else 0, hidden_size, dtype=torch.float32)

    def sum_block(r: int) -> None:
        end = min(r + block, num_rows)
        some = slice(r * top_k, end * top_k) if ends is None else slice(ends[r], ends[end])
        # A 16-bit row times a float32 weight is a float32 product, without a copy in between.
        weighted_nH = y_NH[pairs.place_N[some]] * weights_N[some].unsqueeze(1)
        sums_rH = sums_RH[r:end].zero_() if place is None else weighted_nH.new_zeros(end - r, hidden_size)
        if ends is None:
            for choice_rH in weighted_nH.view(-1, top_k, hidden_size).unbind(1):
                sums_rH += choice_rH
        else:
            sums_rH.index_add_(0, pairs.row_N[some] - r, weighted_nH)  # a CPU adds in the order of the pairs
        if place is not None:
            place.write(sums_rH, r)

    _for_each(sum_block, range(0, num_rows, block), [block] * (num_rows // block), y_NH.device)
    return ExpertRows(rows_RH=sums_RH) if place is None else place.placed()


def _sum_by_passes(y_NH: Tensor, weights_N: Tensor, pairs: SortedPairs) -> Tensor:
    """The sums on a GPU, whose `index_add_` has no fixed order: pass n adds the n-th pair of each row."""
    num_rows = pairs.num_rows
    sums_RH = y_NH.new_zeros(num_rows, y_NH.shape[1], dtype=torch.float32)
    pairs_R = torch.bincount(pairs.row_N, minlength=num_rows)
    first_R = pairs_R.cumsum(0) - pairs_R
    for nth in range(int(pairs_R.max())):
        rows = (pairs_R > nth).nonzero().squeeze(1)
        pair = first_R[rows] + nth
        sums_RH[rows] += y_NH[pairs.place_N[pair]] * weights_N[pair].unsqueeze(1)
    return sums_RH
