"""Sums the results of a row's experts, which the second product stored by pair.

A row that one expert takes has its result already. For other rows, `weight · result` is added up in float32, from zero,
in the order of the choices: as in `UnfinalizedRows.finish`, with the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.experts.fused.kernels.arguments import await_items


@triton.jit
def await_experts(
    ids_K, how_many, TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, ITEMS: tl.constexpr
):  # fmt: skip
    """Wait until ITEMS items of the second product are counted for each tile of a row's experts (`kernels.sorting`)."""
    k = tl.arange(0, CHOICES)
    id_K = tl.load(ids_K + k, mask=k < TOP_K, other=-1)
    here = (id_K >= 0) & (id_K < EXPERTS)
    tiles_K = how_many + 3 + 2 * tl.where(here, id_K, 0)
    await_items(tiles_K + 1, tl.load(tiles_K, mask=here, other=0) * ITEMS)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["how_many", "num_rows"])
def sum_rows(
    partial_sums, weights_N, ids_N, out, out_slots_R, how_many, num_rows, out_stride,
    H: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    HAS_OUT_SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ITEMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum COLUMNS columns of those of ROWS rows (at most 32) that several experts take.

    The ids of all rows are loaded at once, so that rows that need no sum cost no further load. A row waits until the
    second product has counted ITEMS items for each tile of the row's experts. With ITEMS = 0 nothing is counted, and
    all blocks wait for the kernel before.
    """
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    r, k = tl.arange(0, ROWS), tl.arange(0, CHOICES)
    is_pair = (first_row + r < num_rows)[:, None] & (k < TOP_K)[None, :]
    ids = tl.load(ids_N + (first_row + r)[:, None] * TOP_K + k[None, :], mask=is_pair, other=-1)
    here = ((ids >= 0) & (ids < EXPERTS)).to(tl.int32)
    several = tl.sum((tl.sum(here, axis=1) > 1).to(tl.int32) << r)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < H
    if EARLY and ITEMS == 0:
        gdc_wait()  # the ids do not depend on the previous kernel
        gdc_launch_dependents()
    for nth in range(ROWS):
        if (several >> nth) & 1:
            row = first_row + nth
            if ITEMS > 0:
                await_experts(ids_N + row * TOP_K, how_many, TOP_K, CHOICES, EXPERTS, ITEMS)
            sums = tl.zeros([COLUMNS], tl.float32)
            for choice in tl.static_range(TOP_K):  # unrolled, so that all choices are loaded at once
                pair = row * TOP_K + choice
                expert = tl.load(ids_N + pair)
                there = is_column & (expert >= 0) & (expert < EXPERTS)
                found = tl.load(partial_sums + pair * H + column, mask=there, other=0.0).to(tl.float32)
                if WEIGHTED:
                    weight = tl.load(weights_N + pair).to(tl.float32)
                    found *= tl.where((expert >= 0) & (expert < EXPERTS), weight, 0.0)
                sums += found
            line = row
            if HAS_OUT_SLOTS:
                line = tl.load(out_slots_R + row).to(tl.int64)
            tl.store(out + line * out_stride + column, sums.to(out.dtype.element_ty), mask=is_column)
    if EARLY and ITEMS > 0:
        # Later kernels wait only for this one, so it must not end before the second product.
        if (tl.program_id(0) == tl.num_programs(0) - 1) & (tl.program_id(1) == tl.num_programs(1) - 1):
            gdc_wait()
