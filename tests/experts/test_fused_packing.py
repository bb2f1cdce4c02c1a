"""Packed weights: nothing is lost, and the kernels' instructions find in a word what was packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.experts.fused_cases import FusedCase, same_bits
from tests.experts.ptx import from_bf16, run_ptx
from tokenyard.errors import InputError
from tokenyard.experts import FusedExperts
from tokenyard.experts.fused import kernel_weights, packing
from tokenyard.formats import QuantizedMatrix, weight_format

FORMATS = list(packing.LARGEST_SCALE)
every_format = pytest.mark.parametrize("name", FORMATS)
LAYOUTS = [(False, False), (True, False), (True, True)]


def matrix_of(name: str, experts: int, outputs: int, inputs: int, seed: int = 0) -> QuantizedMatrix:
    draw = torch.Generator().manual_seed(seed)
    return weight_format(name).quantize(torch.randn(experts, outputs, inputs, generator=draw))


@every_format
@pytest.mark.parametrize(("gated", "interleaved"), LAYOUTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 1), (32, 24), (100, 40), (64, 128), (130, 257)])
def test_unpacking_gives_back_what_was_packed(name, gated, interleaved, outputs, inputs):
    matrix = matrix_of(name, 3, outputs, inputs)
    assert packing.can_pack(matrix)
    packed = packing.pack(matrix, gated=gated, interleaved=interleaved)
    found = packing.unpack(packed)
    assert torch.equal(found["data"], matrix.payloads["data"])
    scales = matrix.payloads["scales"]
    assert found["scales"].dtype == scales.dtype
    assert torch.equal(found["scales"].view(torch.uint8), scales.view(torch.uint8))
    if name == "nvfp4":
        assert same_bits(packed.global_scale, matrix.payloads["global_scale"])
        assert same_bits(packed.global_factor, matrix.payloads["global_factor"])


@every_format
def test_every_code_survives(name):
    """All 16 codes at all places of a word, minus zero included."""
    matrix = matrix_of(name, 1, 64, 128)
    matrix.payloads["data"].copy_(torch.arange(64 * 64).view(1, 64, 64) * 37 % 256)
    found = packing.unpack(packing.pack(matrix, gated=False, interleaved=False))
    assert torch.equal(found["data"], matrix.payloads["data"])


def decoded(packed: packing.PackedMatrix) -> np.ndarray:
    """What the instructions of the kernels make of all matrices, `[L, lines, width]`: each thread's, put in place."""
    pytest.importorskip("triton")
    from tokenyard.experts.fused.kernels import unpacking

    experts, outputs, inputs = packed.shape
    lines, width = packing.padded(outputs, 64), packing.padded(inputs, 128)
    blocks, steps = experts * lines // 64, width // 128
    words = packed.words[: experts * lines * width // 8].view(blocks, steps, 2, 128, 4)
    # As many registers as the scales of 128 inputs fill; four threads have the same. Integers get those of 64.
    registers = 2 if packed.format == "mxfp4" else 4
    scales = packed.scales.view(torch.int32)[: blocks * steps * 32 * registers]
    scales = scales.view(blocks, steps, 32, 1, registers).expand(-1, -1, -1, 4, -1)
    found = np.empty((blocks, steps, 2, 128, 4, 2, 2, 2))  # q, input + 8?, output + 8?, which of the two
    for half in range(2):
        if packed.format == "mxint4":
            text, used = unpacking.int4_instructions(), scales[..., 2 * half : 2 * half + 2]
        else:
            text, used = unpacking.e2m1_instructions(2 if packed.format == "mxfp4" else 4, half), scales
        given = [
            *words[:, :, half].reshape(-1, 4).T.numpy(),
            *used.reshape(-1, used.shape[-1]).T.numpy(),
        ]
        made = np.stack(run_ptx(text, given, 16), -1)
        pairs = np.stack([from_bf16(made), from_bf16(made >> 16)], -1)
        found[:, :, half] = pairs.reshape(blocks, steps, 128, 4, 2, 2, 2)
    # u step half w g c q kh h kl  →  u w h g | step half q kh c kl
    found = found.reshape(blocks, steps, 2, 4, 8, 4, 4, 2, 2, 2).transpose(0, 3, 8, 4, 1, 2, 6, 7, 5, 9)
    return found.reshape(experts, lines, width)


@every_format
@pytest.mark.parametrize(("gated", "interleaved"), LAYOUTS)
def test_instructions_find_the_weights_of_their_thread(name, gated, interleaved):
    outputs, inputs, experts = 100, 150, 2
    matrix = matrix_of(name, experts, outputs, inputs, seed=4)
    packed = packing.pack(matrix, gated=gated, interleaved=interleaved)
    found = torch.from_numpy(decoded(packed)) * packing.LEFT_OVER
    order = packing.output_order(outputs, gated=gated, interleaved=interleaved)
    assert sorted(order.tolist())[-outputs:] == list(range(outputs))
    assert not found[:, order < 0].any()
    assert not found[..., inputs:].any()
    by_output = torch.empty(experts, outputs, inputs, dtype=torch.float64)
    by_output[:, order[order >= 0]] = found[:, order >= 0, :inputs]
    if name == "nvfp4":
        factors = (packed.global_factor / packed.global_scale).double()
        by_output *= factors.repeat_interleave(outputs // 2, 1)[..., None]
    exact = matrix.decode(torch.float64)
    # A product of bf16 numbers is one where both have few bits.
    allowed = 2.0**-8 if name == "mxint4" else 1e-6
    torch.testing.assert_close(by_output, exact, rtol=allowed, atol=0.0)


@pytest.mark.parametrize(("gated", "interleaved"), LAYOUTS)
def test_instructions_find_the_codes_of_their_thread(gated, interleaved):
    """Numbers times rows of permuted inputs: exact, if no scale of a line is too small."""
    pytest.importorskip("triton")
    from tokenyard.experts.fused.kernels import unpacking

    outputs, inputs, experts = 100, 160, 2
    matrix = matrix_of("mxfp4", experts, outputs, inputs, seed=4)
    matrix.payloads["data"].copy_(torch.randint(0, 256, matrix.payloads["data"].shape, dtype=torch.uint8))
    matrix.payloads["scales"].copy_(torch.randint(60, 72, matrix.payloads["scales"].shape))
    packed = packing.pack(matrix, gated=gated, interleaved=interleaved)
    largest = packing.largest_scales(matrix, gated=gated, interleaved=interleaved)
    lines, width = packing.padded(outputs, 64), packing.padded(inputs, 128)
    blocks, steps = experts * lines // 64, width // 128
    words = packed.words[: experts * lines * width // 8].view(blocks, steps, 2, 128, 4)
    scales = packed.scales[: blocks * steps * 64].view(blocks, steps, 32, 1, 2).expand(-1, -1, -1, 4, -1)
    # Of outputs g and g + 8, of each thread.
    by_thread = largest[: experts * lines].view(blocks, 4, 2, 8).transpose(2, 3).to(torch.int64)
    offsets = torch.tensor(packing.LARGEST_CODES) - (
        by_thread[..., None] + packing.E2M1_POWER
    ) * torch.tensor(packing.CODE_FACTORS)
    offsets = offsets.reshape(blocks, 1, 32, 1, 4).expand(-1, steps, -1, 4, -1).reshape(-1, 4)
    found = torch.empty(blocks, steps, 2, 128, 2, 4, 4, dtype=torch.uint8)  # output + 8?, q, place
    for half in range(2):
        given = [*words[:, :, half].reshape(-1, 4).T, *scales.reshape(-1, 2).T, *offsets.T]
        made = np.stack(run_ptx(unpacking.code_instructions(half), [part.numpy() for part in given], 8), -1)
        found[:, :, half] = torch.from_numpy(made.astype(np.uint32).view(np.uint8)).view(
            blocks, steps, 128, 2, 4, 4
        )
    # u step half w g c h q j  →  u w h g | step half q c j
    found = found.view(blocks, steps, 2, 4, 8, 4, 2, 4, 4).permute(0, 3, 6, 4, 1, 2, 7, 5, 8)
    permuted = found.reshape(experts, lines, width).view(torch.float8_e4m3fn).double()
    numbers = torch.empty_like(permuted)
    numbers[..., packing.code_order(width)] = permuted
    numbers *= 2.0 ** (
        largest[: experts * lines].view(experts, lines, 1).double() - 127 - packing.CODES_RAISED
    )
    order = packing.output_order(outputs, gated=gated, interleaved=interleaved)
    assert not numbers[:, order < 0].any()
    assert not numbers[..., inputs:].any()
    assert torch.equal(numbers[:, order >= 0, :inputs], matrix.decode(torch.float64)[:, order[order >= 0]])


def test_codes_are_refused_where_a_scale_of_a_line_is_too_small():
    matrix = matrix_of("mxfp4", 1, 64, 128)
    matrix.payloads["data"].fill_(0x77)
    matrix.payloads["scales"].fill_(100)
    matrix.payloads["scales"][0, 3, 1] = 100 - packing.CODE_RANGE
    assert packing.largest_scales(matrix, gated=False, interleaved=False)[3] == 100
    matrix.payloads["scales"][0, 3, 1] -= 1
    assert packing.largest_scales(matrix, gated=False, interleaved=False) is None
    matrix.payloads["data"][0, 3, 16:32] = 0x80  # zeros, and so of no scale
    assert packing.largest_scales(matrix, gated=False, interleaved=False)[3] == 100


def every_scale(name: str) -> torch.Tensor:
    """All that can be held, of mxfp4 and nvfp4, in the dtype of the format."""
    if name == "mxfp4":
        return torch.arange(148, dtype=torch.uint8)
    return torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


def matrix_of_everything(name: str) -> QuantizedMatrix:
    """Every code with every scale, at every place of a word: an output for each scale, turned by its number."""
    scales, span = every_scale(name), weight_format(name).block
    matrix = matrix_of(name, 1, len(scales), 512)
    for output, scale in enumerate(scales.view(torch.uint8).tolist()):
        matrix.payloads["scales"].view(torch.uint8)[0, output] = scale
        codes = (torch.arange(512) * 5 + torch.arange(512) // 16 + output) % 16
        matrix.payloads["data"][0, output] = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)
    # And scales that differ from span to span.
    spans = torch.arange(512 // span)
    turned = (torch.arange(len(scales))[:, None] + spans * (spans % 2)) % len(scales)
    matrix.payloads["scales"].view(torch.uint8)[0] = scales.view(torch.uint8)[turned]
    return matrix


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("gated", "interleaved"), [(False, False), (True, True)])
def test_every_scale_survives(name, gated, interleaved):
    matrix = matrix_of_everything(name)
    outputs = matrix.shape[1] // 2 * 2  # gate and up
    matrix = QuantizedMatrix(
        format=matrix.format,
        shape=(1, outputs, 512),
        payloads={
            part: tensor[:, -outputs:] if part in ("data", "scales") else tensor
            for part, tensor in matrix.payloads.items()
        },
    )
    assert packing.can_pack(matrix)
    found = packing.unpack(packing.pack(matrix, gated=gated, interleaved=interleaved))
    scales = matrix.payloads["scales"]
    assert torch.equal(found["scales"].view(torch.uint8), scales.view(torch.uint8))
    is_zero = (
        (scales.view(torch.uint8) == 0) if name == "nvfp4" else torch.zeros_like(scales, dtype=torch.bool)
    )
    is_zero = is_zero.repeat_interleave(matrix.format.block // 2, -1)
    assert torch.equal(found["data"], matrix.payloads["data"].masked_fill(is_zero, 0))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_instructions_are_exact_for_every_code_and_scale(name):
    matrix = matrix_of_everything(name)
    if name == "nvfp4":
        matrix.payloads["global_scale"].fill_(1.0)
        matrix.payloads["global_factor"].fill_(1.0)
    outputs = matrix.shape[1]
    found = torch.from_numpy(decoded(packing.pack(matrix, gated=False, interleaved=False)))[:, :outputs]
    byte = matrix.payloads["data"].to(torch.int64)
    codes = torch.stack([byte & 15, byte >> 4], -1).flatten(-2)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
    scales = matrix.payloads["scales"]
    scales = 2.0 ** (scales.double() - 127) if name == "mxfp4" else scales.double()
    expected = values * scales.repeat_interleave(matrix.format.block, -1) / packing.LEFT_OVER
    # bf16 numbers are multiples of 2^-133: weights of scales below 2^-112 are rounded to them.
    unrounded = expected % 2.0**-133 == 0
    assert torch.equal(found[unrounded], expected[unrounded])
    assert ((found - expected).abs() <= 2.0**-134).all()
    if name == "nvfp4":
        assert torch.equal(found, expected)
        assert found[expected != 0].abs().min() >= 2.0**-126
    numbered = matrix.payloads["scales"].view(torch.uint8).to(torch.int64)
    assert len((numbered.repeat_interleave(matrix.format.block, -1) * 16 + codes).unique()) == 16 * outputs


def test_gate_and_up_of_a_column_stand_eight_lines_apart():
    for interleaved in (False, True):
        order = packing.output_order(96, gated=True, interleaved=interleaved).tolist()
        for line, output in enumerate(order):
            if output >= 0 and line % 16 < 8:
                assert order[line + 8] == output + (1 if interleaved else 48)


@every_format
def test_scales_beyond_the_limit_are_refused(name):
    matrix = matrix_of(name, 2, 32, 64)
    largest, scales = packing.LARGEST_SCALE[name], matrix.payloads["scales"]
    if name == "mxfp4":
        byte = 127 + int(torch.tensor(largest).log2())
        at, beyond = byte, byte + 1
    elif name == "mxint4":
        at, beyond = largest, 2 * largest
    else:  # e4m3 ends before the limit
        assert packing.can_pack(matrix)
        for bad in (0x7F, 0xFF, 0x80, 0x81, 0xB8, 0xFE):  # NaN, minus zero, and less
            scales.view(torch.uint8)[1, 3, 2] = bad
            assert not packing.can_pack(matrix), bad
        return
    scales[1, 3, 1] = at
    assert packing.can_pack(matrix)
    packed = packing.pack(matrix, gated=False, interleaved=False)
    assert np.isfinite(decoded(packed)).all()
    assert torch.equal(packing.unpack(packed)["scales"], scales)
    for bad in [beyond, 255] if name == "mxfp4" else [beyond, -beyond, torch.nan]:
        scales[1, 3, 1] = bad
        assert not packing.can_pack(matrix), bad


@pytest.mark.parametrize("name", ["mxint4", "mxfp4", "nvfp4"])
def test_experts_that_leave_the_gpu_hold_what_they_were_given(name, monkeypatch):
    """Packed on a CPU for once; moving them anywhere but to a GPU undoes it."""
    case = FusedCase(weights=name, H=64, I=32)
    monkeypatch.setattr(kernel_weights, "can_run_packed", lambda spec, weights: True)
    experts = FusedExperts(case.spec, case.held)
    assert {"w13_words", "w2_words"} <= set(dict(experts.named_buffers()))
    monkeypatch.undo()
    experts.to("cpu")
    held = case.held.by_name()
    assert set(dict(experts.named_buffers())) == set(held)
    for part, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), held[part].view(torch.uint8)), part


@pytest.fixture
def packed_on_a_cpu(monkeypatch):
    """Packed on a CPU, and staying so: as on a GPU."""
    monkeypatch.setattr(kernel_weights, "can_run_packed", lambda spec, weights: True)
    monkeypatch.setattr(FusedExperts, "_hold_as_given", lambda self: None)


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casts_leave_packed_weights_alone(name, dtype, packed_on_a_cpu):
    case = FusedCase(weights=name, H=64, I=32, bias=True)
    experts = FusedExperts(case.spec, case.held)
    assert experts.is_packed
    before = {buffer: (tensor, tensor.clone()) for buffer, tensor in experts.named_buffers()}
    torch.nn.Sequential(experts).to(dtype)
    for buffer, tensor in experts.named_buffers():
        held, copy = before[buffer]
        assert tensor is held
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)), buffer


@every_format
@pytest.mark.parametrize("broken", ["b13", "b2", "scales of w2"])
def test_loading_into_packed_weights_changes_nothing_if_a_part_has_no_numbers(name, broken, packed_on_a_cpu):
    case, other = (FusedCase(weights=name, H=64, I=32, bias=True, seed=seed) for seed in (0, 1))
    experts = FusedExperts(case.spec, case.held)
    before = {buffer: tensor.clone() for buffer, tensor in experts.named_buffers()}
    if broken == "scales of w2":
        payloads = {**other.held.w2.payloads, "scales": other.held.w2.payloads["scales"].to("meta")}
        bad = replace(other.held, w2=replace(other.held.w2, payloads=payloads))
    else:
        bad = replace(other.held, **{broken: getattr(other.held, broken).to("meta")})
    with pytest.raises(InputError, match="is on the meta device"):
        experts.load_(bad)
    for buffer, tensor in experts.named_buffers():
        assert torch.equal(tensor.view(torch.uint8), before[buffer].view(torch.uint8)), buffer


@every_format
def test_packed_matrices_stand_one_behind_the_other(name):
    """An expert that moves takes its words and scales along as they are."""
    matrix = matrix_of(name, 3, 70, 192)
    packed = packing.pack(matrix, gated=False, interleaved=False)
    for part in ("words", "scales"):
        held = getattr(packed, part)
        each = packing.per_matrix(held, 3, 70)
        for expert in range(3):
            alone = packing.pack(matrix.select([expert]), gated=False, interleaved=False)
            assert torch.equal(held[expert * each : (expert + 1) * each], getattr(alone, part)[:each])
