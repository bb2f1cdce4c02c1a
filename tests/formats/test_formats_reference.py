"""Codes and scales, bitwise, against the references and against plain formulas."""

from __future__ import annotations

import pytest
import torch

from tests.formats.format_twins import (
    INF,
    e2m1_by_thresholds,
    magnitudes,
    same_bits,
    twin_fp8_block128,
    twin_mxfp8,
    twin_nvfp4,
)
from tokenyard.formats import Bf16, Fp8Block128, Fp16, Fp32, Mxfp8, Nvfp4, bits, blocks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_same(found, expected):
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8_equals_torchao(dtype):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    # Within torchao's reach: it scales blocks of byte 0 by 1 instead of 2^127, and its log2 is off just
    # above 448·2^k; both are corners with tests of their own.
    x = magnitudes(231, 1024, dtype=dtype)[12:]
    scales, data = to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    assert_same(Mxfp8().encode(x).payloads, {"data": data, "scales": scales.view(torch.uint8)})


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_equals_compressed_tensors(seed):
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights
    for x in magnitudes(60, 2048, seed=seed).view(60, 4, 512)[5:]:
        # One tensor, one static g: what a checkpoint would hold.
        g = (torch.tensor(2688.0) / x.abs().amax()).clamp(max=torch.finfo(torch.float32).max)
        if g < 7.9e-36:
            continue
        grouped = x.unflatten(1, (-1, 16))
        scales, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=g)
        packed = quantize_and_pack_fp4(x, scales, global_scale=g)
        found = Nvfp4(global_scale=g.item()).encode(x).payloads
        assert_same(found, {"data": packed, "scales": scales.to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 2880])
def test_formats_equal_their_formulas(dtype, width):
    x = magnitudes(70, width, seed=width, dtype=dtype)
    assert_same(Mxfp8().encode(x).payloads, twin_mxfp8(x))
    assert_same(Mxfp8(alignment=256).encode(x).payloads, twin_mxfp8(x, 256))
    assert_same(Fp8Block128().encode(x).payloads, twin_fp8_block128(x))
    power_of_two = Fp8Block128(power_of_two_scales=True)
    assert_same(power_of_two.encode(x).payloads, twin_fp8_block128(x, True))
    rows = Nvfp4().encode(x)
    assert_same(rows.payloads, twin_nvfp4(x, rows.payloads["global_scale"]))
    given_T = torch.linspace(0.5, 5e3, 70)
    assert_same(Nvfp4().encode(x, global_scale_T=given_T).payloads, twin_nvfp4(x, given_T))
    assert_same(Nvfp4(global_scale=3.0).encode(x).payloads, twin_nvfp4(x, torch.full((70,), 3.0)))


def test_chunks_change_nothing():
    """A batch of several chunks, whole and ragged, has the codes of the plain formula."""
    x = torch.randn(50, 7168, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_same(Mxfp8().encode(x).payloads, twin_mxfp8(x))
    rows = Nvfp4().encode(x)
    assert_same(rows.payloads, twin_nvfp4(x, rows.payloads["global_scale"]))
    assert same_bits(rows.payloads["global_scale"], torch.tensor(2688.0) / x.float().abs().amax(1, True))


def test_how_many_rows_are_taken_at_a_time():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    chunk = 1 << 17
    widths = (1, chunk // 2, chunk // 2 + 1, chunk, chunk + 1, 10 * chunk)
    assert [blocks.rows_per_chunk(100, width, cpu) for width in widths] == [chunk, 2, 1, 1, 1, 1]
    assert [blocks.rows_per_chunk(rows, 64, gpu) for rows in (0, 1, 2, 100)] == [1, 1, 2, 100]


def test_e8m0_is_right_just_above_a_power_of_two():
    exponents = torch.arange(-100, 100)
    edges = torch.tensor(448.0) * torch.exp2(exponents.float())
    above = torch.nextafter(edges, torch.tensor(INF))
    below = torch.nextafter(edges, torch.tensor(0.0))
    assert bits.e8m0_from_amax(edges).int().tolist() == (exponents + 127).tolist()
    assert bits.e8m0_from_amax(below).int().tolist() == (exponents + 127).tolist()
    # 448·(1 + 2^-23 · 8/7) / 448 rounds to the next float32 above a power of two: one step up.
    assert bits.e8m0_from_amax(above).int().tolist() == (exponents + 128).tolist()


def test_e8m0_of_all_float32_exponents():
    """The smallest power of two that serves, from the smallest subnormal to the largest float32."""
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF], dtype=torch.int32)
    amax = ((torch.arange(255, dtype=torch.int32) << 23).unsqueeze(1) + mantissas).view(torch.float32)
    byte = bits.e8m0_from_amax(amax)
    wanted = amax / torch.tensor(448.0)
    assert bool((wanted <= bits.e8m0_to_float32(byte)).all())
    smaller = bits.e8m0_to_float32((byte.int() - 1).clamp(min=0).to(torch.uint8))
    assert bool(((wanted > smaller) | (byte == 0)).all())


def test_e8m0_bytes_decode_to_their_powers():
    byte = torch.arange(255, dtype=torch.uint8)
    powers = torch.exp2(torch.arange(255).double() - 127)
    assert torch.equal(bits.e8m0_to_float32(byte).double(), powers)
    assert torch.equal(bits.e8m0_reciprocal(byte).double(), 1 / powers)


def test_e2m1_ties_and_their_neighbors():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, 0.5, 1.0, 2.0, 4.0])
    up, down = torch.nextafter(middles, torch.tensor(9.0)), torch.nextafter(middles, torch.tensor(-9.0))
    tiny = torch.tensor([1e-45, 1e-38, 1e38, INF])
    v = torch.cat([middles, up, down, tiny])
    v = torch.cat([v, -v]).unsqueeze(0)
    expected = e2m1_by_thresholds(v)
    assert expected[0, :7].tolist() == [0, 2, 2, 4, 4, 6, 6]
    found = bits.e2m1_codes_(v.clone(), torch.empty_like(v), torch.empty_like(v))
    assert found.tolist() == expected.tolist()


def test_e2m1_of_random_numbers():
    v = torch.randn(64, 4096, generator=torch.Generator().manual_seed(3)) * 3
    v.view(torch.int32)[1::2] &= ~0x3FFFF  # few mantissa bits: many exact ties
    found = bits.e2m1_codes_(v.clone(), torch.empty_like(v), torch.empty_like(v))
    assert torch.equal(found.to(torch.uint8), e2m1_by_thresholds(v))


def test_small_floats_decode_like_their_types():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    import numpy as np

    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.view(torch.float8_e4m3fn)
    assert torch.equal(bits.e4m3_to_float32(e4m3).nan_to_num(9e9), e4m3.float().nan_to_num(9e9))
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    packed = codes[:16] | (codes[:16] << 4)
    assert same_bits(bits.e2m1_to_float32(packed.unsqueeze(1))[:, 0], torch.from_numpy(nibbles))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("format", [Bf16(), Fp16(), Fp32()], ids=str)
def test_plain_formats_are_torch_casts(format, source):
    x = torch.randn(20, 33, generator=torch.Generator().manual_seed(0)).to(source)
    data = format.encode(x).payloads["data"]
    assert same_bits(data, x.to(format.dtype))
    assert (data is x) == (format.dtype == source)
