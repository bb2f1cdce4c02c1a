"""Packed weights: nothing is lost, and a word means what the bit rules say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.experts.fused_cases import FusedCase, same_bits
from tokenyard.errors import InputError
from tokenyard.experts import FusedExperts
from tokenyard.experts.fused import experts as fused_experts
from tokenyard.experts.fused import packing
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


def bf16(bits: int) -> float:
    """The number of 16 bits."""
    sign, exponent, fraction = bits >> 15, bits >> 7 & 0xFF, bits & 0x7F
    value = fraction * 2.0**-133 if exponent == 0 else (128 + fraction) * 2.0 ** (exponent - 134)
    return -value if sign else value


def weight_of(name: str, half: int, place: int) -> float:
    """One of the four weights in a half of a word, as the kernel reads it: masked, and taken for a bf16 number."""
    if name == "mxint4":
        byte = half >> 8 * (place // 2)  # later inputs in the upper byte
        mask, eight = (0x00F0, 0x0080) if place % 2 else (0x000F, 0x0008)
        return bf16(byte & mask) - bf16(eight)
    if place < 3:
        return bf16(half << 3 * place & 0x81C0)
    return bf16(half << 1 & 0x8000 | half >> 3 & 0x0180 | half >> 7 & 0x0040)


@every_format
@pytest.mark.parametrize(("gated", "interleaved"), LAYOUTS)
def test_words_and_scales_stand_where_a_thread_looks_for_them(name, gated, interleaved):
    outputs, inputs, experts = 100, 150, 2
    matrix = matrix_of(name, experts, outputs, inputs, seed=4)
    packed = packing.pack(matrix, gated=gated, interleaved=interleaved)
    lines, width, span = 128, 256, matrix.format.block
    words = packed.words[: experts * lines * width // 8].view(experts, lines // 64, width // 64, 128, 4)
    scales = packed.scales[: experts * lines * width // span].view(
        experts, lines // 64, width // 128, 32, 128 // span, 2
    )
    exact = matrix.decode(torch.float64)
    order = packing.output_order(outputs, gated=gated, interleaved=interleaved).tolist()
    assert sorted(order)[-outputs:] == list(range(outputs))
    factors = torch.ones(experts, 2, dtype=torch.float64)
    if name == "nvfp4":
        factors = (packed.global_factor / packed.global_scale).double()
    for expert in range(experts):
        for line in range(0, lines, 3):
            for column in range(0, width, 7):
                warp, eight, g = line % 64 // 16, line % 16 // 8, line % 8
                later, pair, which = column % 16 // 8, column % 8 // 2, column % 2
                thread = 32 * warp + 4 * g + pair
                word = int(words[expert, line // 64, column // 64, thread, column % 64 // 16])
                half = word >> 16 * which & 0xFFFF
                scale = scales[expert, line // 64, column // 128, 8 * warp + g, column % 128 // span, eight]
                found = weight_of(name, half, 2 * later + eight) * float(scale) * packing.LEFT_OVER
                if order[line] < 0 or column >= inputs:
                    assert found == 0.0  # the pad
                    continue
                found *= float(factors[expert, int(order[line] >= outputs / 2)])
                expected = float(exact[expert, order[line], column])
                assert found == pytest.approx(expected, rel=1e-6, abs=0.0), (expert, line, column)


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
        scales.view(torch.uint8)[1, 3, 2] = 0x7F  # NaN
        assert not packing.can_pack(matrix)
        return
    scales[1, 3, 1] = at
    assert packing.can_pack(matrix)
    packed = packing.pack(matrix, gated=False, interleaved=False)
    assert packed.scales.isfinite().all()
    assert torch.equal(packing.unpack(packed)["scales"], scales)
    scales[1, 3, 1] = beyond
    assert not packing.can_pack(matrix)


@pytest.mark.parametrize("name", ["mxint4", "mxfp4", "nvfp4"])
def test_experts_that_leave_the_gpu_hold_what_they_were_given(name, monkeypatch):
    """Packed on a CPU for once; moving them anywhere but to a GPU undoes it."""
    case = FusedCase(weights=name, H=64, I=32)
    monkeypatch.setattr(fused_experts, "can_run_packed", lambda spec, weights: True)
    experts = FusedExperts(case.spec, case.held)
    assert {"w13_words", "w2_words"} <= set(experts.state_dict())
    monkeypatch.undo()
    experts.to("cpu")
    held = case.held.by_name()
    assert set(experts.state_dict()) == set(held)
    for part, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), held[part].view(torch.uint8)), part


@pytest.fixture
def packed_on_a_cpu(monkeypatch):
    """Packed on a CPU, and staying so: as on a GPU."""
    monkeypatch.setattr(fused_experts, "can_run_packed", lambda spec, weights: True)
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
