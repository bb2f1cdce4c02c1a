"""Zero, underflow, Inf, NaN: where the references disagree, the values are written out here."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from tests.formats.format_twins import INF, NAN, QUANTIZED, same_bits
from tokenyard.errors import InputError
from tokenyard.formats import Bf16, Fp8Block128, Fp16, Fp32, Mxfp8, Nvfp4, bits

FLOAT32_MAX = torch.finfo(torch.float32).max


def one_row(*values: float, width: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    row = torch.zeros(1, width)
    row[0, : len(values)] = torch.tensor(values)
    return row.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zero_blocks(dtype):
    zeros = torch.zeros(2, 32, dtype=dtype)
    mx = Mxfp8().encode(zeros).payloads
    assert mx["scales"].tolist() == [[0], [0]]
    nv = Nvfp4().encode(zeros).payloads
    assert nv["scales"].float().tolist() == [[0, 0], [0, 0]]
    assert nv["global_scale"].tolist() == [[1.0], [1.0]]
    fp8 = Fp8Block128().encode(zeros).payloads
    assert same_bits(fp8["scales"], (torch.tensor(1e-10) / torch.tensor(448.0)).expand(2, 1))
    for payloads in (mx, nv, fp8):
        assert not payloads["data"].view(torch.uint8).any()


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_every_nan_is_written_alike(format):
    """NaN has many spellings; what is sent has one, on every device."""
    spelled = torch.tensor([0x7FC00000, 0x7FC12345, -0x3EDCBB], dtype=torch.int32).view(torch.float32)
    assert spelled.isnan().all()
    x = torch.ones(3, 128)
    x[:, 5] = spelled
    for name, payload in format.encode(x).payloads.items():
        assert same_bits(payload, payload[:1].expand_as(payload)), name


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_minus_zero_decodes_to_zero(format):
    decoded = format.encode(-torch.zeros(1, 40)).decode()
    assert torch.equal(decoded, torch.zeros(1, 40))


def test_mxfp8_underflow_is_byte_0_and_still_decodes():
    # 448·2^-127 is the largest amax of byte 0; its neighbor above needs byte 1 (2^-126).
    largest = 448 * 2.0**-127
    rows = Mxfp8().encode(one_row(largest, -(2.0**-127), 2.0**-130))
    assert rows.payloads["scales"].tolist() == [[0]]
    assert rows.payloads["data"][0, :3].float().tolist() == [448.0, -1.0, 0.125]
    assert rows.decode()[0, :3].tolist() == [largest, -(2.0**-127), 2.0**-130]
    assert Mxfp8().encode(one_row(largest * 1.01)).payloads["scales"].tolist() == [[1]]
    assert Mxfp8().encode(one_row(1e-45)).payloads["scales"].tolist() == [[0]]


def test_mxfp8_inf_is_byte_254_and_saturates():
    rows = Mxfp8().encode(one_row(INF, -INF, 1.0, 3e38))
    assert rows.payloads["scales"].tolist() == [[254]]
    # 3e38 is 1.76 · 2^127; scaled by 2^-127 it rounds to 1.75.
    assert rows.payloads["data"][0, :5].float().tolist() == [448.0, -448.0, 0.0, 1.75, 0.0]


@pytest.mark.parametrize("bad", [NAN, -NAN])
def test_nan_fills_its_block_and_no_other(bad):
    x = torch.ones(2, 256)
    x[0, 130] = bad
    for format in QUANTIZED:
        rows = format.encode(x)
        decoded = rows.decode()
        start = 130 // format.block * format.block
        expected = torch.ones(2, 256)
        expected[0, start : start + format.block] = NAN
        assert torch.equal(decoded.isnan(), expected.isnan()), format
        assert torch.equal(decoded[1].round(decimals=1), torch.ones(256)), format
    mx = Mxfp8().encode(x).payloads
    assert mx["scales"].tolist()[0] == [119, 119, 119, 119, 255, 119, 119, 119]
    assert (mx["data"].view(torch.uint8)[0, 128:160] == 0x7F).all()
    nv = Nvfp4().encode(x).payloads
    assert nv["scales"].view(torch.uint8)[0, 8] == 0x7F
    assert not nv["data"][0, 64:72].any()
    assert nv["global_scale"].tolist() == [[2688.0], [2688.0]]
    fp8 = Fp8Block128().encode(x).payloads
    assert fp8["scales"].isnan().tolist() == [[False, True], [False, False]]
    assert (fp8["data"].view(torch.uint8)[0, 128:] == 0x7F).all()


def test_nvfp4_inf_saturates_and_does_not_move_the_global_scale():
    rows = Nvfp4().encode(one_row(INF, -INF, 6.0, -0.1, 2.0, width=16))
    assert rows.payloads["global_scale"].tolist() == [[448.0]]  # 2688 / 6
    assert rows.payloads["scales"].float().tolist() == [[448.0]]
    assert rows.decode()[0, :6].tolist() == [6.0, -6.0, 6.0, -0.0, 2.0, 0.0]
    assert Nvfp4().encode(one_row(INF, NAN)).payloads["global_scale"].tolist() == [[1.0]]


def test_nvfp4_minus_zero_codes():
    """A negative number that rounds to zero is code 8; an exact minus zero is code 0."""
    data = Nvfp4(global_scale=448.0).encode(one_row(6.0, -0.1, -0.0, 0.1, width=16)).payloads["data"]
    assert data[0, :2].tolist() == [0x87, 0x00]


def test_nvfp4_block_far_below_its_row_is_zero():
    """Its scale rounds to zero in e4m3, and so do its codes, signs included."""
    x = one_row(1e4, width=32)
    x[0, 16:] = torch.tensor([1e-4, -1e-4]).repeat(8)
    rows = Nvfp4().encode(x)
    assert rows.payloads["scales"].float()[0, 1] == 0
    assert not rows.payloads["data"][0, 8:].any()
    assert not rows.decode()[0, 16:].any()


@pytest.mark.parametrize("amax", [FLOAT32_MAX, 1e-36, 1e-38, 1e-44])
def test_nvfp4_global_scale_stays_finite(amax):
    rows = Nvfp4().encode(one_row(amax, -amax / 2))
    g = rows.payloads["global_scale"]
    assert bool(g.isfinite().all())
    assert bool((g > 0).all())
    decoded = rows.decode()
    assert bool(decoded.isfinite().all())
    if amax >= 1e-36:
        assert decoded[0, 0].item() == pytest.approx(amax, rel=0.1)


def test_fp8_block128_inf_saturates_at_a_finite_scale():
    rows = Fp8Block128().encode(one_row(INF, -INF, 1.0, width=128))
    assert rows.payloads["scales"].item() == pytest.approx(FLOAT32_MAX / 448)
    assert rows.payloads["data"][0, :3].float().tolist() == [448.0, -448.0, 0.0]


def test_plain_formats_saturate_when_they_convert():
    x = one_row(1e5, -1e39, INF, NAN, 65519.0, width=5)
    assert Fp16().encode(x).decode()[0].tolist()[:3] == [65504.0, -65504.0, 65504.0]
    assert Fp16().encode(x).decode()[0, 4] == 65504.0
    assert Fp16().encode(x).decode()[0, 3].isnan()
    largest = torch.finfo(torch.bfloat16).max
    assert Bf16().encode(x).decode()[0, 1:3].tolist() == [-largest, largest]
    assert Fp32().encode(x.bfloat16()).decode()[0, 2] == FLOAT32_MAX
    own = one_row(INF, NAN, width=2, dtype=torch.bfloat16)
    assert Bf16().encode(own).payloads["data"] is own


@pytest.mark.parametrize("bad", [0.0, -1.0, INF, NAN, 1e39, 1e-44, True, "2"])
def test_nvfp4_refuses_a_global_scale(bad):
    with pytest.raises(InputError, match="nvfp4 was given global_scale="):
        Nvfp4(global_scale=bad)
    if not isinstance(bad, (bool, str)):
        with pytest.raises(InputError, match=r"global_scale_T holds .* at row 1; expected finite"):
            Nvfp4().encode(torch.ones(2, 16), global_scale_T=torch.tensor([1.0, bad]))


def test_nvfp4_refuses_what_is_not_one_scale_per_row():
    x = torch.ones(2, 16)
    with pytest.raises(InputError, match=r"global_scale_T is float32\[3\]; expected a float tensor \[2\]"):
        Nvfp4().encode(x, global_scale_T=torch.ones(3))
    with pytest.raises(InputError, match=r"global_scale_T is float32\[2, 1, 1\]"):
        Nvfp4().encode(x, global_scale_T=torch.ones(2, 1, 1))
    with pytest.raises(InputError, match="global_scale_T is int64"):
        Nvfp4().encode(x, global_scale_T=torch.ones(2, dtype=torch.int64))
    with pytest.raises(InputError, match=r"nvfp4\(global_scale=2.0\), whose global scale is static"):
        Nvfp4(global_scale=2).encode(x, global_scale_T=torch.ones(2))
    rows = Nvfp4().encode(x, global_scale_T=torch.tensor([[3.0], [4.0]]))
    assert rows.payloads["global_scale"].tolist() == [[3.0], [4.0]]


@pytest.mark.parametrize("shape", [(256,), (16, 16), (2, 4, 32), (3, 0)])
def test_four_bit_numbers_are_the_same_by_table_and_by_bits(shape):
    """CPUs look them up; GPUs compute them."""
    packed = torch.arange(256).repeat(2)[: math.prod(shape)].to(torch.uint8).view(shape)
    for by_table, by_bits in (
        (bits.e2m1_to_float32, bits._e2m1_by_bits),
        (bits.int4_to_float32, bits._int4_by_bits),
    ):
        found = by_bits(packed)
        assert found.shape == (*shape[:-1], 2 * shape[-1])
        assert torch.equal(found.view(torch.int32), by_table(packed).view(torch.int32))


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_each_payload_is_compared_with_its_declaration(format):
    rows = format.encode(torch.randn(3, 256))
    rows.check()
    for name, tensor in rows.payloads.items():
        for wrong in (tensor[:, :-1], tensor.view(torch.uint8).to(torch.int64)):
            with pytest.raises(InputError, match=name):
                replace(rows, payloads={**rows.payloads, name: wrong}).check()


def test_global_scales_up_to_the_limits_are_taken():
    x, smallest = one_row(1.0), torch.tensor([2.0**-117])
    for scale in (smallest, torch.tensor([FLOAT32_MAX])):
        assert Nvfp4().encode(x, global_scale_T=scale).payloads["global_scale"].item() == scale.item()
    for scale in (torch.nextafter(smallest, torch.zeros(1)), torch.tensor([INF]), torch.tensor([NAN])):
        with pytest.raises(InputError, match="global_scale_T holds"):
            Nvfp4().encode(x, global_scale_T=scale)


@pytest.mark.parametrize("format", [*QUANTIZED, Bf16(), Fp16(), Fp32()], ids=str)
def test_payloads_have_no_gradient_and_are_contiguous(format):
    """Rows that lie in every second column of a tensor, and want a gradient."""
    both = torch.randn(3, 2, 64)[:, 0].requires_grad_() * 1.0
    for x in (both, torch.randn(64, 3, requires_grad=True).t()):
        rows = format.encode(x)
        for name, payload in rows.payloads.items():
            assert payload.is_contiguous(), name
            assert not payload.requires_grad or not format.quantized, name
        if format.scale_layouts == ("linear", "swizzled"):
            assert rows.swizzled().linear().payloads["scales"].is_contiguous()


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_rows_that_are_wider_than_a_chunk_are_encoded_one_by_one(format):
    x = torch.randn(3, 132_000, dtype=torch.bfloat16)
    together = format.encode(x)
    for row in range(3):
        alone = format.encode(x[row : row + 1])
        for name, payload in together.slice(row, row + 1).payloads.items():
            assert same_bits(payload, alone.payloads[name]), name
        assert torch.equal(together.decode()[row], alone.decode()[0])


def test_what_payloads_are_is_said_without_the_layout_that_all_have():
    rows = Bf16().encode(torch.ones(2, 4).bfloat16())
    found = {
        "float32[2, 4]; expected": torch.ones(2, 4),
        "bfloat16[2, 4], sparse_coo; expected": torch.ones(2, 4).bfloat16().to_sparse(),
    }
    for words, payload in found.items():
        with pytest.raises(InputError, match=re.escape(f"payload 'data' is {words}")):
            replace(rows, payloads={"data": payload}).check()


def test_a_given_scale_that_wants_a_gradient_gets_none():
    scale_T = torch.full((2,), 3.0, requires_grad=True)
    payloads = Nvfp4().encode(torch.ones(2, 16), global_scale_T=scale_T).payloads
    assert not any(payload.requires_grad for payload in payloads.values())
