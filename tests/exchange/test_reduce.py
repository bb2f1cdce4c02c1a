"""The sum over ranks has one order and one rounding, wherever the rows stand: bit for bit that of `RankRows`."""

import subprocess
import sys

import pytest
import torch

from tokenyard.exchange import results
from tokenyard.formats import EncodedRows, get
from tokenyard.rows import RankRows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 6e-8)


def rows_of_ranks(draw, world, num_tokens, hidden_size, dtype, *, share, gap=0, special=False):
    """Rows and tokens of each rank, all in one buffer whose rows are `gap` elements apart."""
    tokens = [(torch.rand(num_tokens, generator=draw) < share).nonzero().squeeze(1) for _ in range(world)]
    numbers = torch.randn(world, num_tokens, hidden_size + gap, generator=draw)
    memory = (numbers * torch.exp(3 * torch.randn(numbers.shape, generator=draw))).to(dtype)
    if special:
        for value in SPECIAL:
            memory[torch.rand(memory.shape, generator=draw) < 0.02] = value
    return [memory[rank, : len(some), :hidden_size] for rank, some in enumerate(tokens)], tokens


def check_sum(rows, tokens, num_tokens, wire, *, in_place, dtype=None):
    hidden_size, dtype = rows[0].shape[1], dtype or DTYPES[wire]
    home = [
        EncodedRows(format=get(wire), hidden_size=hidden_size, payloads={"data": some_NH}) for some_NH in rows
    ]
    out_TH = torch.full((num_tokens, hidden_size), 7.0, dtype=dtype)
    assert (results._table_of(home, out_TH) is not None) == in_place
    results.sum_over_ranks(home, tokens, out_TH, ())
    twin = RankRows(
        rows_by_rank=tuple(some_NH.float() for some_NH in rows),
        tokens_by_rank=tuple(tokens),
        num_tokens=num_tokens,
        dtype=dtype,
    )
    right_TH = twin.reduce().y_TH
    nan_TH, as_bits = right_TH.isnan(), BITS[dtype.itemsize]
    assert torch.equal(out_TH.isnan(), nan_TH)
    assert torch.equal(
        out_TH.view(as_bits).masked_fill(nan_TH, 0), right_TH.view(as_bits).masked_fill(nan_TH, 0)
    )


@pytest.mark.parametrize("special", [False, True], ids=["numbers", "special"])
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
@pytest.mark.parametrize(
    ("world", "num_tokens", "hidden_size"), [(1, 3, 2048), (4, 300, 2048), (5, 17, 7168), (64, 33, 256)]
)
@pytest.mark.parametrize("wire", DTYPES)
def test_rows_are_summed_where_they_stand(wire, world, num_tokens, hidden_size, share, special):
    draw = torch.Generator().manual_seed(world + num_tokens)
    rows, tokens = rows_of_ranks(
        draw, world, num_tokens, hidden_size, DTYPES[wire], share=share, special=special
    )
    check_sum(rows, tokens, num_tokens, wire, in_place=True)


@pytest.mark.parametrize(("hidden_size", "gap", "lines"), [(1024, 512, 2), (768, 256, 3), (1536, 256, 6)])
def test_rows_of_several_lines_of_the_table(hidden_size, gap, lines):
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 4, 50, hidden_size, torch.bfloat16, share=0.8, gap=gap)
    home = [
        EncodedRows(format=get("bf16"), hidden_size=hidden_size, payloads={"data": some}) for some in rows
    ]
    table = results._table_of(home, torch.empty(50, hidden_size, dtype=torch.bfloat16))
    assert table.lines_per_row == lines
    # From the first row of any rank to the last one, and not a byte more.
    ends = [some.data_ptr() + ((len(some) - 1) * some.stride(0) + hidden_size) * 2 for some in rows]
    assert table.lines.data_ptr() == min(some.data_ptr() for some in rows)
    assert table.lines.nbytes == max(ends) - table.lines.data_ptr()
    check_sum(rows, tokens, 50, "bf16", in_place=True)


def test_rows_that_are_narrower_than_the_narrowest_line():
    """A line is a whole row there: no part of a row would be narrower still."""
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 3, 20, 64, torch.bfloat16, share=0.8)
    check_sum(rows, tokens, 20, "bf16", in_place=True)


@pytest.mark.parametrize(("hidden_size", "gap"), [(1536, 8), (1001, 3)])
def test_rows_without_common_lines_are_decoded(hidden_size, gap):
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 4, 50, hidden_size, torch.bfloat16, share=0.8, gap=gap)
    check_sum(rows, tokens, 50, "bf16", in_place=False)


def test_ranks_in_any_order_of_memory_and_one_without_rows():
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 4, 50, 512, torch.bfloat16, share=0.8)
    rows, tokens = [rows[2], rows[0][:0], rows[3], rows[1]], [tokens[2], tokens[0][:0], tokens[3], tokens[1]]
    check_sum(rows, tokens, 50, "bf16", in_place=True)


@pytest.mark.parametrize(("gap", "in_place"), [(0, True), (256, True), (8, False)])
def test_blocks_change_no_bit(gap, in_place, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 4, 50, 512, torch.bfloat16, share=0.5, gap=gap)
    monkeypatch.setattr(results, "TABLE_BLOCK", 7 * 512)
    monkeypatch.setattr(results, "BLOCK", 7 * 512)
    check_sum(rows, tokens, 50, "bf16", in_place=in_place)


@pytest.mark.parametrize(("gap", "in_place"), [(0, True), (8, False)])
def test_rows_that_are_wider_than_a_block(gap, in_place, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 3, 5, 512, torch.bfloat16, share=0.8, gap=gap)
    monkeypatch.setattr(results, "TABLE_BLOCK", 100)
    monkeypatch.setattr(results, "BLOCK", 100)
    check_sum(rows, tokens, 5, "bf16", in_place=in_place)


@pytest.mark.parametrize("share", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_another_dtype_than_the_sum(dtype, share):
    draw = torch.Generator().manual_seed(0)
    rows, tokens = rows_of_ranks(draw, 3, 20, 64, torch.float32, share=share)
    check_sum(rows, tokens, 20, "fp32", dtype=dtype, in_place=dtype == torch.float32 and share > 0)


# With one rank there is nothing to add, but the sum begins at +0 and is rounded afterwards all the same.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wire", [*DTYPES, "mxfp8", "fp8_block128", "nvfp4"])
def test_a_sum_of_zeros_is_plus_zero_and_a_tiny_negative_one_rounds_to_minus_zero(wire, world, dtype):
    numbers = torch.tensor([-0.0, 0.0, -1e-9, 1e-9, -1e-42, -(2.0**-25), -(2.0**-134), 1.0]).repeat(64)
    # Blocks of equal numbers: a quantized wire then keeps them.
    rows_NH = numbers.view(64, 8).t().reshape(1, -1).contiguous().to(DTYPES.get(wire, torch.float32))
    home, tokens = [get(wire).encode(rows_NH)] * world, [torch.tensor([0])] * world
    decoded = home[0].decode(torch.float32)
    due_TH = (torch.zeros_like(decoded) + decoded * world).to(dtype)
    out_TH = torch.full(due_TH.shape, 7.0, dtype=dtype)
    results.sum_over_ranks(home, tokens, out_TH, ())
    as_bits = BITS[dtype.itemsize]
    assert torch.equal(out_TH.view(as_bits), due_TH.view(as_bits))
    assert not out_TH[0, :128].signbit().any()


@pytest.mark.parametrize("world", [1, 2])
def test_rows_whose_columns_lie_one_behind_the_other(world):
    draw = torch.Generator().manual_seed(0)
    rows, tokens = [torch.randn(64, 3, generator=draw).t() for _ in range(world)], [torch.arange(3)] * world
    check_sum(rows, tokens, 3, "fp32", in_place=False)


def test_one_rank_with_as_many_rows_as_they_are_wide_and_not_all_tokens():
    rows_NH, tokens_N = torch.randn(4, 4), torch.tensor([0, 1, 3, 5])
    check_sum([rows_NH], [tokens_N], 6, "fp32", in_place=True)


@pytest.mark.parametrize("terms", [0, 1, 2])
@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_what_is_added_comes_behind_all_rows_and_before_the_rounding(wire, world, share, terms):
    draw = torch.Generator().manual_seed(world)
    rows, tokens = rows_of_ranks(draw, world, 9, 96, torch.bfloat16, share=share)
    home = [get(wire).encode(some_NH) for some_NH in rows]
    add = [torch.randn(9, 96, generator=draw).bfloat16().requires_grad_() for _ in range(terms)]
    sums_TH = RankRows(
        rows_by_rank=tuple(some.decode(torch.float32) for some in home),
        tokens_by_rank=tuple(tokens),
        num_tokens=9,
        dtype=torch.bfloat16,
    ).sum()
    for term_TH in add:
        sums_TH = sums_TH + term_TH.detach().float()
    out_TH = torch.full((9, 96), 7.0).bfloat16()
    assert results.sum_over_ranks(home, tokens, out_TH, add) is out_TH
    assert torch.equal(out_TH, sums_TH.bfloat16())


_WITHOUT_WARNINGS = """
import sys, warnings, torch
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from tokenyard.exchange import results
    from tokenyard.formats import Bf16
    home = [Bf16().encode(rows) for rows in torch.ones(2, 2, 512).bfloat16()]
    tokens, out = [torch.arange(2)] * 2, torch.empty(2, 512).bfloat16()
    assert results._table_of(home, out) is not None
    y = results.sum_over_ranks(home, tokens, out, ())
assert y.eq(2).all()
print([str(one.message) for one in told])
"""


def test_nobody_is_told_that_sparse_matrices_of_torch_are_young():
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_WARNINGS], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert "sparse" not in done.stderr.lower()
