"""Weights in their formats: bitwise as the references have them, the corners, tiles, bytes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.formats.format_twins import (
    INF,
    NAN,
    blocks_of,
    e2m1_by_thresholds,
    magnitudes,
    same_bits,
    twin_mxfp8,
    twin_nvfp4,
)
from tokenyard.errors import InputError, UnknownName
from tokenyard.formats import WEIGHT_FORMATS, QuantizedMatrix, weight_format
from tokenyard.formats.weights import Mxfp4Weights

QUANTIZED = [name for name, kind in WEIGHT_FORMATS.items() if kind.quantized]
every_format = pytest.mark.parametrize("name", QUANTIZED)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
    return w.to(dtype)


def assert_same(matrix: QuantizedMatrix, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert same_bits(matrix.payloads[name], tensor.view(matrix.payloads[name].shape)), name


# -- As the references have them -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mx_formats_equal_torchao(dtype):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    # Rows whose scale is not byte 0, where torchao scales by 1; that corner has a test of its own.
    w = magnitudes(231, 1024, dtype=dtype)[12:]
    for name, element, rule in (
        ("mxfp8", torch.float8_e4m3fn, ScaleCalculationMode.RCEIL),
        ("mxfp4", torch.float4_e2m1fn_x2, ScaleCalculationMode.EVEN),
    ):
        scales, data = to_mx(w, element, 32, scaling_mode=rule)
        found = weight_format(name).quantize(w).payloads
        assert same_bits(found["scales"], scales.view(torch.uint8)), name
        assert same_bits(found["data"].view(torch.uint8), data.view(torch.uint8)), name


def compressed(name: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a checkpoint of compressed-tensors holds."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(name.upper(), ["Linear"])
    grouped = w.unflatten(1, (-1, scheme.weights.group_size))
    state = {"weight": w}
    if name == "nvfp4":
        state["weight_global_scale"] = (torch.tensor(2688.0) / w.abs().amax()).view(1)
    state["weight_scale"], _ = calculate_qparams(
        grouped.amin(-1), grouped.amax(-1), scheme.weights, global_scale=state.get("weight_global_scale")
    )
    compressor = BaseCompressor.get_value_from_registry(f"{name}-pack-quantized")
    held = compressor.compress(state, scheme)
    ours = {"data": held["weight_packed"], "scales": held["weight_scale"]}
    if name == "nvfp4":
        ours |= {"global_scale": held["weight_global_scale"].repeat(2), "global_factor": torch.ones(2)}
    return ours


@pytest.mark.parametrize("seed", range(3))
def test_four_bit_formats_equal_compressed_tensors(seed):
    for exponent in (-30, 0, 25):
        w = gaussian(3, 64, 512, seed=seed, dtype=torch.float32) * 2.0**exponent
        for name in ("nvfp4", "mxfp4"):
            matrix = weight_format(name).quantize(w)
            for expert in range(3):
                expected = compressed(name, w[expert])
                assert set(expected) == set(matrix.payloads)
                assert_same(matrix[expert], expected)


def plain_fp8_block128(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """A block at a time, as the formula says."""
    outputs, inputs = w.shape
    data = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            v = w[block].float()
            scales[i, j] = v.abs().amax().clamp(min=1e-10) / torch.tensor(448.0)
            data[block] = (v / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"data": data, "scales": scales}


def plain_mxint4(w: torch.Tensor) -> dict[str, torch.Tensor]:
    v = blocks_of(w, 32, 32)
    scale = torch.maximum(v.amax(-1) * 8 / torch.tensor(7.0), -v.amin(-1)) / 8
    scale = scale.bfloat16()
    steps = (v / scale.float().unsqueeze(-1)).nan_to_num(0.0).round().clamp(-8, 7)
    codes = (steps.to(torch.int16) & 15).flatten(1).to(torch.uint8)
    return {"data": codes[:, ::2] | (codes[:, 1::2] << 4), "scales": scale}


def plain_mxfp4(w: torch.Tensor) -> dict[str, torch.Tensor]:
    v = blocks_of(w, 32, 32).double()
    mantissa, exponent = torch.frexp(v.abs().amax(-1))  # 0.5 ≤ mantissa < 1
    byte = torch.where(mantissa >= 0.875, exponent + 1, exponent) - 1 - 2 + 127
    byte = torch.where(mantissa == 0, 0, byte.clamp(0, 254))
    codes = e2m1_by_thresholds((v * torch.exp2(127.0 - byte.double()).unsqueeze(-1)).float()).flatten(1)
    return {"data": codes[:, ::2] | (codes[:, 1::2] << 4), "scales": byte.to(torch.uint8)}


def plain_nvfp4(w: torch.Tensor) -> dict[str, torch.Tensor]:
    g = torch.tensor(2688.0) / w.float().abs().amax()
    twin = twin_nvfp4(w, g.expand(w.shape[0]))
    return {**twin, "global_scale": g.repeat(2), "global_factor": torch.ones(2)}


FORMULAS = {
    "fp8_block128": plain_fp8_block128,
    "mxfp8": twin_mxfp8,
    "nvfp4": plain_nvfp4,
    "mxfp4": plain_mxfp4,
    "mxint4": plain_mxint4,
}


def test_every_quantized_format_has_a_formula_here():
    assert set(FORMULAS) == set(QUANTIZED)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 33), (130, 100), (257, 300), (3, 2880)])
def test_codes_and_scales_equal_the_formula(name, dtype, outputs, inputs):
    w = gaussian(2, outputs, inputs, seed=outputs, dtype=torch.float32)
    w[:, :, ::7] *= 30  # blocks of different size
    w = w.to(dtype)
    matrix = weight_format(name).quantize(w)
    for expert in range(2):
        assert_same(matrix[expert], FORMULAS[name](w[expert]))


@every_format
def test_many_magnitudes(name):
    w = magnitudes(120, 256)[10:100]
    matrix = weight_format(name).quantize(w)
    assert_same(matrix, FORMULAS[name](w))


def test_the_rule_of_mxfp4_scales_is_a_parameter():
    w = torch.tensor([[6.5], [7.0], [6.0], [4.0]])
    assert weight_format("mxfp4").quantize(w).payloads["scales"].flatten().tolist() == [127, 128, 127, 127]
    ceil = Mxfp4Weights(scale_rule="ceil").quantize(w)
    assert ceil.payloads["scales"].flatten().tolist() == [128, 128, 127, 127]
    assert ceil.decode().flatten().tolist() == [6.0, 8.0, 6.0, 4.0]
    with pytest.raises(InputError, match="scale_rule='floor'; expected 'even' or 'ceil'"):
        Mxfp4Weights(scale_rule="floor")


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("many", [(0,), (2, 0)])
def test_no_matrices_are_quantized_to_none(name, many):
    """A rank may own no experts."""
    outputs, inputs = 200, 72
    matrix = weight_format(name).quantize(gaussian(*many, outputs, inputs))
    some = weight_format(name).quantize(gaussian(2, outputs, inputs))
    for payload, tensor in matrix.payloads.items():
        assert tuple(tensor.shape) == (*many, *some.payloads[payload].shape[1:])
        assert tensor.dtype == some.payloads[payload].dtype
    assert matrix.decode().shape == (*many, outputs, inputs)
    assert matrix.nbytes == weight_format(name).nbytes(*many, outputs, inputs) == 0
    assert some.select([]).shape == (0, outputs, inputs)


# -- What decoding gives -------------------------------------------------------------------------------------

LARGEST_ERROR = {"fp8_block128": 0.03, "mxfp8": 0.03, "nvfp4": 0.105, "mxfp4": 0.125, "mxint4": 0.105}


@every_format
def test_relative_error_on_gaussian_weights(name):
    w = gaussian(256, 7168, dtype=torch.float32)
    error = (weight_format(name).quantize(w).decode() - w).norm() / w.norm()
    assert 0.01 < error <= LARGEST_ERROR[name]


@every_format
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (130, 100), (300, 2880)])
def test_any_tile_is_a_part_of_the_whole(name, outputs, inputs):
    matrix = weight_format(name).quantize(gaussian(3, outputs, inputs))
    whole = matrix.decode()
    assert whole.shape == (3, outputs, inputs)
    assert whole.dtype == torch.float32
    assert same_bits(matrix.decode(torch.bfloat16), whole.bfloat16())
    for first, last in {
        (0, 1),
        (outputs // 3, outputs),
        (outputs - 1, outputs),
        (outputs // 2, outputs // 2),
    }:
        assert same_bits(matrix[2].tile(first, last), whole[2, first:last].contiguous())
    some = matrix.select([2, 0])
    assert same_bits(some.decode(), whole[[2, 0]])
    assert matrix.nbytes == weight_format(name).nbytes(3, outputs, inputs)


@every_format
def test_decoding_what_was_decoded_changes_nothing(name):
    """Weights that are on the format's grid stay there (but for the global scale of nvfp4, which moves)."""
    once = weight_format(name).quantize(gaussian(64, 256, dtype=torch.float32)).decode()
    again = weight_format(name).quantize(once).decode()
    assert ((again - once).norm() / once.norm()) < (0.08 if name in ("nvfp4", "mxint4") else 1e-6)


@pytest.mark.parametrize("outputs", [6, 7])
def test_each_half_of_an_nvfp4_matrix_has_its_own_global_scale_and_factor(outputs):
    """Gate and up of one expert, quantized by themselves, are one matrix, to the bit."""
    half = -(-outputs // 2)
    matrix = weight_format("nvfp4").quantize(gaussian(2, outputs, 40, dtype=torch.float32))
    matrix.payloads["global_scale"].copy_(torch.tensor([[3.0, 448.5], [1.0, 1.0]]))
    matrix.payloads["global_factor"].copy_(torch.tensor([[1.0, 1.0], [0.1, 0.7]]))
    from tokenyard.formats import bits

    for expert, (above, below) in enumerate([(lambda s: s / 3, lambda s: s / 448.5),
                                             (lambda s: s * 0.1, lambda s: s * 0.7)]):  # fmt: skip
        scales = matrix[expert].payloads["scales"].float()
        scales = torch.cat([above(scales[:half]), below(scales[half:])]).repeat_interleave(16, dim=1)
        expected = bits.e2m1_to_float32(matrix[expert].payloads["data"]) * scales
        assert same_bits(matrix[expert].decode(), expected[:, :40].contiguous())
        assert same_bits(
            matrix[expert].tile(half - 1, half + 1), expected[half - 1 : half + 1, :40].contiguous()
        )


def test_bytes():
    shape = (2, 4096, 7168)
    elements = 2 * 4096 * 7168
    assert weight_format("mxint4").nbytes(*shape) == elements // 2 + elements // 16
    assert weight_format("mxfp4").nbytes(*shape) == elements // 2 + elements // 32
    assert weight_format("nvfp4").nbytes(*shape) == elements // 2 + elements // 16 + 2 * 16
    assert weight_format("mxfp8").nbytes(*shape) == elements + elements // 32
    assert weight_format("fp8_block128").nbytes(*shape) == elements + elements // 128**2 * 4
    assert weight_format("bf16").nbytes(*shape) == 2 * elements


# -- Corners -------------------------------------------------------------------------------------------------


@every_format
def test_zero_weights(name):
    matrix = weight_format(name).quantize(torch.zeros(2, 40, 70))
    assert not matrix.decode().any()
    assert not matrix.payloads["data"].view(torch.uint8).any()
    if name != "fp8_block128":  # whose scale is that of 1e-10
        assert not matrix.payloads["scales"].view(torch.uint8).any()


@every_format
@pytest.mark.parametrize("wrong", [INF, -INF, NAN])
def test_inf_and_nan_stay_in_their_block(name, wrong):
    block = weight_format(name).block
    w = gaussian(140, 4 * block, dtype=torch.float32)
    w[3, block + 1] = wrong
    matrix = weight_format(name).quantize(w)
    decoded = matrix.decode()
    rows = slice(0, 128) if name == "fp8_block128" else slice(3, 4)
    inside = torch.zeros(w.shape, dtype=torch.bool)
    inside[rows, block : 2 * block] = True
    if math.isnan(wrong):
        assert decoded[inside].isnan().all()
    else:
        assert decoded[3, block + 1] * wrong > 0
        assert not decoded[inside].isnan().any()
    assert decoded[~inside].isfinite().all()
    assert ((decoded - w)[~inside].norm() / w[~inside].norm()) < 0.13
    if name.startswith("mxf"):
        assert matrix.payloads["scales"][3, 1] == (255 if math.isnan(wrong) else 254)
    if math.isnan(wrong) and matrix.payloads["data"].dtype == torch.uint8:  # codes of 4 bits
        assert not matrix.payloads["data"][3, block // 2 : block].any()


def test_blocks_too_small_for_a_scale():
    w = torch.full((1, 32), 2.0**-130)
    matrix = weight_format("mxfp4").quantize(w)
    assert matrix.payloads["scales"].tolist() == [[0]]
    assert not matrix.decode().any()  # 1/8 of the scale 2^-127 rounds to zero
    w = torch.full((1, 32), 2.0**-126)
    assert same_bits(weight_format("mxfp4").quantize(w).decode(), w)
    tiny = torch.full((1, 32), 2.0**-149)
    assert not weight_format("mxint4").quantize(tiny).decode().any()


def test_quantizing_leaves_its_input_alone():
    for name in WEIGHT_FORMATS:
        for number in (0.5, torch.inf):
            w = gaussian(2, 50, 70, dtype=torch.float32)
            w[1, 3, 4] = number
            before = w.clone()
            matrix = weight_format(name).quantize(w.requires_grad_())
            assert not matrix.decode().requires_grad
            assert not any(payload.requires_grad for payload in matrix.payloads.values())
            assert same_bits(w.detach(), before)


def test_a_block_with_nan_is_nan_and_its_neighbors_are_not():
    w = torch.ones(2, 96)
    w[1, 40] = torch.nan
    matrix = weight_format("mxfp4").quantize(w)
    assert matrix.payloads["scales"][1].tolist() == [125, 255, 125]
    assert not matrix.payloads["data"][1, 16:32].any()
    decoded = matrix.decode()
    assert decoded.isnan().nonzero().tolist() == [[1, column] for column in range(32, 64)]
    assert decoded.nan_to_num(nan=1.0).eq(1.0).all()


# -- Errors --------------------------------------------------------------------------------------------------


def test_messages():
    with pytest.raises(UnknownName, match=r"unknown weight format 'mxpf4'.*did you mean 'mxfp4'"):
        weight_format("mxpf4")
    with pytest.raises(InputError, match=r"the weights to quantize are int64\[3, 4\]; expected matrices"):
        weight_format("mxfp4").quantize(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(InputError, match=r"float32\[7\].*fix: pass plain weights"):
        weight_format("mxint4").quantize(torch.zeros(7))
    for name in WEIGHT_FORMATS:
        for wrong in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(7), torch.zeros(0, 4), None):
            with pytest.raises(InputError, match="the weights to quantize are"):
                weight_format(name).quantize(wrong)
    payloads = dict(weight_format("mxfp4").quantize(torch.ones(4, 64)).payloads)
    with pytest.raises(
        InputError,
        match=r"a mxfp4 matrix \[4, 64\] is held in data uint8\[4, 32\], scales float32\[4, 2\]; "
        r"expected data uint8\[4, 32\], scales uint8\[4, 2\]",
    ):
        QuantizedMatrix(
            format=weight_format("mxfp4"),
            shape=(4, 64),
            payloads={**payloads, "scales": payloads["scales"].float()},
        )
