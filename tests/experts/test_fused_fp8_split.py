"""Numbers as sums of two e4m3 numbers, between the products of experts: how close they are, and what NaN does.

Divided by their scale, the largest of 128 numbers is in (224, 448]. A bf16 number of at least 2^-2 is then a multiple
of 2^-9, the smallest step of e4m3, in 8 bits: the two hold all of it. That is so from a 896th of the largest on;
below, half a step is missing at most.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional

from tests.exchange.interpreter import install, only_without_gpu
from tokenyard.experts.fused import packing
from tokenyard.experts.fused.kernels import fp8_split
from tokenyard.formats import Fp8Block128

pytestmark = only_without_gpu
install()


@triton.jit
def split_lines(x, high, low, scales, N: tl.constexpr, AXIS: tl.constexpr):
    """Lines of 128 numbers split in two, along either axis."""
    line, column = tl.arange(0, N), tl.arange(0, 128)
    where = tl.expand_dims(line, AXIS) * 128 + tl.expand_dims(column, 1 - AXIS)
    above, below, scale = fp8_split.split(tl.load(x + where), AXIS)
    tl.store(high + where, above)
    tl.store(low + where, below)
    tl.store(scales + line, scale)


def split(x_NC: torch.Tensor, axis: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """High and low numbers, float64 `[N, 128]`, and scales `[N, 1]`."""
    lines = triton.next_power_of_2(len(x_NC))
    x = torch.zeros(lines, 128)
    x[: len(x_NC)] = x_NC
    high, low = (torch.empty(lines, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
    scales = torch.empty(lines)
    split_lines[(1,)](x, high, low, scales, lines, axis)
    return tuple(t[: len(x_NC)].double() for t in (high.float(), low.float(), scales.unsqueeze(1)))


def all_below(largest: float) -> torch.Tensor:
    """Every bf16 number from -largest to largest that is not far below it, in lines that begin with the largest."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[(numbers.abs() <= largest) & (numbers.abs() > largest * 2.0**-24)]
    lines = -(-len(numbers) // 127)
    padded = torch.cat([numbers, torch.zeros(127 * lines - len(numbers))]).view(lines, 127)
    return torch.cat([torch.full((lines, 1), largest), padded], 1)


LARGEST = [m * 2.0**e for m, e in itertools.product((1.0, 1.5, 1.75, 1.7578125, 1.9921875), (-70, 0, 9, 110))]


@pytest.mark.parametrize("largest", LARGEST)
def test_bf16_numbers_are_exact_unless_they_are_small(largest):
    x = all_below(largest)
    high, low, scales = split(x)
    assert (torch.frexp(scales)[0] == 0.5).all()
    assert ((largest / scales > 224) & (largest / scales <= 448)).all()
    error = (x.double() - scales * (high + low)).abs()
    assert (error[x.abs() >= largest / 896] == 0).all()
    assert error.amax() <= scales.amax() * 2.0**-10 < largest * 2.0**-17.8
    assert error.amax() > 0  # of the small ones


@pytest.mark.parametrize("axis", [0, 1])
def test_others_are_as_close_as_bf16(axis):
    draw = torch.Generator().manual_seed(axis)
    x = torch.randn(64, 128, generator=draw) * 2.0 ** torch.randint(-20, 20, (64, 128), generator=draw)
    high, low, scales = split(x, axis)
    half_a_step = 2.0 ** (torch.frexp(x)[1].double() - 1 - 8)  # of bf16
    error = (x.double() - scales * (high + low)).abs()
    assert (error <= torch.maximum(half_a_step, scales * 2.0**-10)).all()


def test_splitting_nothing_and_of_almost_nothing():
    x = torch.zeros(3, 128)
    x[1, 5], x[2, 7] = 2.0**-120, -(2.0**-140)
    high, low, scales = split(x)
    assert (scales == 2.0**-100).all()
    assert ((x.double() - scales * (high + low)).abs() <= 2.0**-110).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_scale_nan(bad):
    x = torch.ones(4, 128)
    x[2, 100] = bad
    _, _, scales = split(x)
    assert scales.squeeze(1).isnan().tolist() == [False, False, True, False]
    x[2, 100] = torch.finfo(torch.float32).max
    assert not split(x)[2].isnan().any()


@triton.jit
def quantize_lines(x, codes, scales, N: tl.constexpr, AXIS: tl.constexpr, POWERS: tl.constexpr):
    """Lines of 128 numbers in codes, along either axis."""
    line, column = tl.arange(0, N), tl.arange(0, 128)
    where = tl.expand_dims(line, AXIS) * 128 + tl.expand_dims(column, 1 - AXIS)
    code, scale = fp8_split.quantize(tl.load(x + where), AXIS, POWERS)
    tl.store(codes + where, code)
    tl.store(scales + line, scale)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("powers", [False, True])
def test_codes_are_those_of_the_format(axis, powers):
    """To the bit: zeros, NaN, infinities, numbers that vanish, and 60 lines of any size."""
    draw = torch.Generator().manual_seed(axis)
    x = torch.randn(64, 128, generator=draw) * 2.0 ** torch.randint(-60, 60, (64, 1), generator=draw)
    x *= 2.0 ** torch.randint(-12, 1, (64, 128), generator=draw)
    x[0], x[1, 5], x[2, 7], x[3] = 0.0, torch.nan, -torch.inf, 1e-12
    codes, scales = torch.empty(64, 128, dtype=torch.float8_e4m3fn), torch.empty(64)
    quantize_lines[(1,)](x, codes, scales, 64, axis, powers)
    expected = Fp8Block128(power_of_two_scales=powers).encode(x).payloads
    assert torch.equal(scales.isnan(), torch.arange(64) == 1)
    fine = ~scales.isnan()
    assert torch.equal(scales[fine], expected["scales"][fine, 0])
    assert torch.equal(codes.view(torch.uint8)[fine], expected["data"].view(torch.uint8)[fine])


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("columns", [1, 100, 128, 300, 1100])
@pytest.mark.parametrize("at_a_time", [1, 4])
def test_numbers_are_rounded_to_those_of_codes(columns, powers, at_a_time):
    """As far as there are places; nothing is written behind them."""
    draw = torch.Generator().manual_seed(columns)
    inner = torch.randn(9, columns, generator=draw) * 2.0 ** torch.randint(-30, 30, (9, 1), generator=draw)
    inner[3, columns // 2] = torch.nan
    inner[4] = 0.0
    given, inner = inner, torch.full_like(inner, 7.0)
    tiles, how_many = (
        torch.tensor([0, 2, 9, 0, 4, 9, 4, 3, 9, 0, 1, 9, 1, 1, 9], dtype=torch.int32),
        torch.tensor([2]),
    )
    wide = max(128, min(1024, triton.next_power_of_2(columns)))
    fp8_split.round_numbers[(2,)](
        given, inner, None, tiles, how_many.int(), 3, 9, columns, 6, 0, at_a_time, wide, powers, False
    )
    encoded = Fp8Block128(power_of_two_scales=powers).encode(given)
    expected = encoded.decode()
    assert torch.equal(inner[:7].isnan(), expected[:7].isnan())
    assert torch.equal(inner[:7].nan_to_num(), expected[:7].nan_to_num())
    assert (inner[7:] == 7.0).all()
    # The codes themselves, permuted, and their scales by block, as products with packed weights read them.
    blocks = -(-columns // 128)
    codes, scales = torch.zeros(9, 128 * blocks, dtype=torch.float8_e4m3fn), torch.full((blocks, 9), 7.0)
    fp8_split.round_numbers[(2,)](
        given, codes, scales, tiles, how_many.int(), 3, 9, columns, 6, 0, at_a_time, wide, powers, False
    )
    found = torch.empty_like(codes.view(torch.uint8))
    found[:, packing.code_order(128 * blocks)] = codes.view(torch.uint8)
    fine = ~encoded.payloads["scales"][:7].isnan()
    assert torch.equal(scales.T[:7].isnan(), ~fine)
    assert torch.equal(scales.T[:7][fine], encoded.payloads["scales"][:7][fine])
    wanted = encoded.payloads["data"].view(torch.uint8)
    wanted = functional.pad(wanted, (0, 128 * blocks - wanted.shape[1]))
    fine = fine.repeat_interleave(128, 1)
    assert torch.equal(found[:7][fine], wanted[:7][fine])
    assert not found[7:].any()
    assert (scales[:, 7:] == 7.0).all()
