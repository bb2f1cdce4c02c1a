"""How far a decoded row may be from the row: per element, and over a Gaussian row.

Each bound is shown to be able to fail: with scales one step off, the same check must reject the rows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.formats.format_twins import e2m1_by_thresholds, magnitudes, same_bits, twin_mxfp8, twin_nvfp4
from tokenyard.formats import EncodedRows, Format, Fp8Block128, Mxfp8, Nvfp4

FORMATS = [Fp8Block128(), Fp8Block128(power_of_two_scales=True), Mxfp8(), Nvfp4()]
RELATIVE_L2 = {"fp8_block128": 0.03, "mxfp8": 0.03, "nvfp4": 0.105}


def gaussian(rows: int = 8, width: int = 7168) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7))


def per_element(scales: Tensor, width: int) -> Tensor:
    return scales.double().repeat_interleave(width // scales.shape[1], dim=1)


def element_bound(rows: EncodedRows, x: Tensor) -> Tensor:
    """Half a step of the element type at |x|, in units of the scale; and nothing more.

    e4m3 has 3 mantissa bits, so half a step is 2^-4 of the number, and at least 2^-10 scales. e2m1 has 1: 2^-2
    of the number, and at least a quarter of a scale; its largest step is at 6, which the block's amax may pass
    by the rounding of the scale to e4m3 (2^-4).
    """
    magnitude = x.double().abs()
    slack = 1 + 2.0**-20  # float32 roundings of scale and product
    if rows.format.name == "mxfp8":
        scale = per_element(torch.exp2(rows.payloads["scales"].double() - 127), x.shape[1])
        return torch.maximum(magnitude * 2.0**-4, scale * 2.0**-10) * slack
    if rows.format.name == "fp8_block128":
        scale = per_element(rows.payloads["scales"], x.shape[1])
        return torch.maximum(magnitude * 2.0**-4, scale * 2.0**-10) * slack
    scale = per_element(rows.payloads["scales"].double() / rows.payloads["global_scale"], x.shape[1])
    half_step = torch.where(magnitude > 4 * scale, 1.0, torch.where(magnitude > 2 * scale, 0.5, 0.25))
    return half_step * scale * slack


def within_bounds(rows: EncodedRows, x: Tensor) -> bool:
    error = (rows.decode().double() - x.double()).abs()
    return bool((error <= element_bound(rows, x)).all())


def relative_l2(rows: EncodedRows, x: Tensor) -> float:
    return float(((rows.decode().double() - x.double()).norm(dim=1) / x.double().norm(dim=1)).max())


def encode_with_scales(format: Format, x: Tensor, steps: int) -> EncodedRows:
    """What an encoder would send whose scales are `steps` codes off: a wrong rule, with elements to match."""
    rows = format.encode(x)
    payloads = dict(rows.payloads)
    blocks = x.unflatten(1, (-1, format.block))
    if format.name == "mxfp8":
        payloads["scales"] = (payloads["scales"].int() + steps).to(torch.uint8)
        scale = torch.exp2(payloads["scales"].float() - 127)
    elif format.name == "fp8_block128":
        payloads["scales"] = payloads["scales"] * 2.0**steps
        scale = payloads["scales"]
    else:
        code = payloads["scales"].view(torch.uint8).int() + steps
        payloads["scales"] = code.clamp(0, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
        step = (payloads["scales"].float() / payloads["global_scale"]).unsqueeze(-1)
        codes = e2m1_by_thresholds(blocks / step).flatten(1)
        payloads["data"] = codes[:, ::2] | (codes[:, 1::2] << 4)
        return dataclasses.replace(rows, payloads=payloads)
    data = (blocks / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    payloads["data"] = data.flatten(1)
    return dataclasses.replace(rows, payloads=payloads)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_relative_l2_of_gaussian_rows(format):
    x = gaussian()
    assert relative_l2(format.encode(x), x) <= RELATIVE_L2[format.name]
    assert relative_l2(format.encode(x.bfloat16()), x.bfloat16()) <= RELATIVE_L2[format.name]


@pytest.mark.parametrize("format", [Fp8Block128(), Mxfp8()], ids=str)
def test_every_element_is_within_half_a_step(format):
    assert within_bounds(format.encode(gaussian()), gaussian())
    x = magnitudes(60, 1024)[30:]  # normal scales for fp8_block128, whose smallest is 1e-10/448
    assert within_bounds(format.encode(x), x)


def test_every_nvfp4_element_is_within_half_a_step_or_saturated():
    x = gaussian()
    rows = Nvfp4().encode(x)
    scale = per_element(rows.payloads["scales"].double() / rows.payloads["global_scale"], 7168)
    # Rounding amax/6 to e4m3 may leave the largest element of a block up to 2^-4 above 6 scales.
    assert bool((x.double().abs() <= 6 * scale * (1 + 2.0**-4)).all())
    assert within_bounds(rows, x.double().clamp(-6 * scale, 6 * scale))


@pytest.mark.parametrize("format", [Fp8Block128(), Mxfp8()], ids=str)
def test_scales_a_step_too_small_break_the_element_bound(format):
    x = gaussian()
    assert within_bounds(encode_with_scales(format, x, 0), x)  # the mutation machinery itself is sound
    assert not within_bounds(encode_with_scales(format, x, -1), x)


@pytest.mark.parametrize("steps", [-1, 1])
def test_scales_a_step_off_are_not_the_reference(steps):
    """A scale one step too large costs range, not correctness: the bitwise check is what rejects it."""
    x = gaussian()
    mx = Mxfp8()
    assert same_bits(mx.encode(x).payloads["scales"], twin_mxfp8(x)["scales"])
    assert not same_bits(encode_with_scales(mx, x, steps).payloads["scales"], twin_mxfp8(x)["scales"])
    assert not same_bits(encode_with_scales(mx, x, steps).payloads["data"], twin_mxfp8(x)["data"])
    nv = Nvfp4()
    expected = twin_nvfp4(x, nv.encode(x).payloads["global_scale"])
    assert same_bits(encode_with_scales(nv, x, 0).payloads["data"], expected["data"])
    assert not same_bits(encode_with_scales(nv, x, steps).payloads["scales"], expected["scales"])
    assert not same_bits(encode_with_scales(nv, x, steps).payloads["data"], expected["data"])


@pytest.mark.parametrize("steps", [-2, 2])
def test_nvfp4_scales_two_steps_off_break_the_l2_bound(steps):
    x = gaussian()
    assert relative_l2(encode_with_scales(Nvfp4(), x, 0), x) <= RELATIVE_L2["nvfp4"]
    assert relative_l2(encode_with_scales(Nvfp4(), x, steps), x) > RELATIVE_L2["nvfp4"]
