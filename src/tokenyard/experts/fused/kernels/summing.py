"""The sum of a row's experts, from the results of the second product by pair.

A row that one expert takes has its result already. Of the others `weight · result` is added up in float32, in the order
of the choices, from zero: as `UnfinalizedRows.finish` does it, and with its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def experts_here(
    ids_N, item, total,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """How many experts take an item's row; 0 behind the last item."""
    k = tl.arange(0, CHOICES)
    row = tl.zeros([], tl.int64) + item // ACROSS
    ids = tl.load(ids_N + row * TOP_K + k, mask=(k < TOP_K) & (item < total), other=-1)
    return tl.sum(((ids >= 0) & (ids < EXPERTS)).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def sum_rows(
    partial_sums, weights_N, ids_N, out, out_slots_R, num_rows, out_stride,
    H: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr,
    HAS_OUT_SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum the rows that several experts take: every block takes parts of rows in turn."""
    ACROSS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    total = num_rows * ACROSS
    next_count = experts_here(ids_N, tl.program_id(0), total, TOP_K, CHOICES, EXPERTS, ACROSS)
    if EARLY:
        gdc_wait()  # ids were there before
        gdc_launch_dependents()
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        count = next_count
        next_count = experts_here(ids_N, item + tl.num_programs(0), total, TOP_K, CHOICES, EXPERTS, ACROSS)
        if count > 1:
            row = tl.zeros([], tl.int64) + item // ACROSS
            column = item % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
            is_column = column < H
            sums = tl.zeros([COLUMNS], tl.float32)
            for choice in tl.static_range(TOP_K):  # all of them are loaded at once
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
