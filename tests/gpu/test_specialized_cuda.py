"""Fused experts whose warps share the work on Hopper: some load, others multiply. And weights in boxes for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.experts.fused_cases import check_case, same_bits
from tests.gpu.fused_on_gpu import (
    CODES,
    MANY,
    NUMBERS,
    built,
    in_lines,
    is_hopper,
    within,
)
from tokenyard.experts import activation
from tokenyard.experts.fused.tile_configs import (
    SPECIALIZED_TILES,
    TileConfig,
    TileConfigs,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# How rows fall on experts, for layers of e4m3 and of 16-bit numbers.
UNEVEN = {
    "one expert has all rows": {"routing": "one expert", "R": 333},
    "few rows, most experts have none": {"R": 3, "L": 16, "routing": "sparse"},
    "every row names an expert twice": {"routing": "duplicates", "R": 130, "K": 3},
    "nobody": {"routing": "nobody"},
}
SPECIALIZED_LAYERS = {
    "several tiles": {},
    "biases, a limit": {"activation": replace(activation("swiglu_clamped"), interleaved=False), "bias": True},
    "gelu, the weight on the input": {"activation": "gelu", "weight_on": "input", "bias": True},
    "scales that are powers of two": {"inner": "fp8_block128(power_of_two_scales=True)"},
    "half a tile of outputs, and one block": {"H": 384, "I": 128},
    "in a workspace": {"in_workspace": True, "H": 1024, "activation": "gelu_tanh"},
} | UNEVEN


@pytest.mark.parametrize("tile", SPECIALIZED_TILES)
@pytest.mark.parametrize("changes", SPECIALIZED_LAYERS.values(), ids=SPECIALIZED_LAYERS)
def test_warps_that_load_and_warps_that_multiply(changes, tile, specialized_launches):
    case = replace(CODES, **changes)
    experts = built(case)
    experts.tile_configs = TileConfigs(replace(MANY, tile=tile), replace(MANY, tile=tile))
    y_RH = check_case(case, experts)
    assert len(specialized_launches) == (3 if is_hopper() else 0)
    for _ in range(20):  # what races is not the same twice
        assert same_bits(experts(case.received()).rows_RH, y_RH)
    plain = in_lines(case)
    assert (experts.is_boxed, plain.is_boxed) == (is_hopper(), False)
    plain.tile_configs = experts.tile_configs
    assert same_bits(plain(case.received()).rows_RH, y_RH)
    experts.tile_configs = TileConfigs(replace(MANY, specialized=False), replace(MANY, specialized=False))
    plain_RH = within(case, experts)
    assert len(specialized_launches) == (24 if is_hopper() else 0)
    # The same codes, but for those in the middle between two, and sums in another order.
    assert (plain_RH - y_RH).norm() <= 2**-7 * y_RH.norm()


SPECIALIZED_NUMBERS = {
    "several tiles": {},
    "no size is a multiple of 64": {"H": 328, "I": 200, "bias": True},
    "interleaved, with biases": {"activation": "swiglu_oai", "bias": True, "H": 320, "I": 200},
    "gelu, the weight on the input": {"activation": "gelu", "weight_on": "input", "bias": True},
    "fp16, in a workspace": {"weights": "fp16", "rows": "fp16", "H": 1024, "in_workspace": True},
    "half a tile of outputs, and one step": {"H": 128, "I": 64},
} | UNEVEN


@pytest.mark.parametrize("tile", SPECIALIZED_TILES)
@pytest.mark.parametrize("changes", SPECIALIZED_NUMBERS.values(), ids=SPECIALIZED_NUMBERS)
def test_warps_that_load_and_warps_that_multiply_numbers(changes, tile, specialized_launches):
    case = replace(NUMBERS, **changes)
    experts = built(case)
    many = TileConfig(256, 128, 64, 8, 4, 64, tma=True, specialized=True)
    experts.tile_configs = TileConfigs(replace(many, tile=tile), replace(many, tile=tile))
    y_RH = check_case(case, experts)
    assert len(specialized_launches) == (3 if is_hopper() else 0)
    for _ in range(20):  # what races is not the same twice
        assert same_bits(experts(case.received()).rows_RH, y_RH)
    plain = in_lines(case)
    assert not plain.is_boxed
    plain.tile_configs = experts.tile_configs
    assert same_bits(plain(case.received()).rows_RH, y_RH)
    plain.tile_configs = TileConfigs(replace(many, specialized=False), replace(many, specialized=False))
    assert same_bits(within(case, plain), y_RH)
    assert len(specialized_launches) == (24 if is_hopper() else 0)


# -- Weights in boxes ----------------------------------------------------------------------------------------

hopper_boxes = pytest.mark.skipif("not is_hopper()", reason="boxes are for the kernel with specialized warps")


@hopper_boxes
@pytest.mark.parametrize("case", [NUMBERS, CODES], ids=["bf16", "fp8_block128"])
def test_boxed_weights_are_held_once_and_given_back(case):
    other, held = replace(case, seed=1), case.held.by_name()
    experts = built(case)
    assert experts.is_boxed
    assert sum(buffer.nbytes for buffer in experts.buffers()) == case.held.nbytes
    for name, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), held[name].view(torch.uint8)), name
    pointers = [tensor.data_ptr() for tensor in experts.buffers()]
    experts.load_(other.held)
    assert [tensor.data_ptr() for tensor in experts.buffers()] == pointers
    y_RH = built(other)(case.received()).rows_RH
    assert same_bits(experts(case.received()).rows_RH, y_RH)
    experts.cpu()
    assert set(experts.state_dict()) == set(held)
    for name, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), other.held.by_name()[name].cpu().view(torch.uint8)), name
    assert experts.cuda().is_boxed
    assert same_bits(experts(case.received()).rows_RH, y_RH)
    assert not in_lines(case).cpu().cuda().is_boxed


# Rows of mxfp8 are decoded for weights of bf16. Experts with rows in another format that differs from the weights', or
# that cannot be copied 16 bytes at a time, have kernels in plain Triton.
OTHER_ROWS = {
    "bf16, rows of fp8_block128": (replace(NUMBERS, rows="fp8_block128"), False),
    "bf16, rows of mxfp8": (replace(NUMBERS, rows="mxfp8", R=20), True),
    "fp8_block128, rows of bf16": (replace(CODES, rows="bf16", R=20), False),
}


@hopper_boxes
@pytest.mark.parametrize(("case", "specialized"), OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_boxed_weights_with_rows_of_other_formats(case, specialized, specialized_launches):
    experts = built(case)
    assert experts.is_boxed
    within(case, experts)
    assert bool(specialized_launches) == specialized


@hopper_boxes
def test_boxed_weights_with_rows_that_are_not_aligned(specialized_launches):
    for rows in (20, 700):
        case = replace(NUMBERS, R=rows)
        experts, received = built(case), case.received()
        assert experts.is_boxed
        data = received.rows.payloads["data"]
        shifted = torch.empty(rows, case.H + 1, dtype=data.dtype, device="cuda")[:, : case.H].copy_(data)
        y_RH = experts(replace(received, rows=replace(received.rows, payloads={"data": shifted}))).rows_RH
        exact_RH, bound_RH = case.exact()
        assert ((y_RH - exact_RH).abs() <= bound_RH).all()
    assert not specialized_launches


@hopper_boxes
def test_nan_of_a_weight_stays_in_its_output():
    """The second product loads two boxes of inputs at a time. Here it has one; the next in memory has other outputs."""
    case = replace(CODES, H=384, I=128, R=20, seed=5)
    case.held.w2.payloads["data"].view(torch.uint8)[:, 200, 5] = 0x7F
    experts = built(case)
    few = TileConfigs(replace(MANY, tile=16), replace(MANY, tile=16))
    experts.tile_configs = few
    y_RH, taken_R = experts(case.received()).rows_RH, (case.routes.ids_RK >= 0).any(1)
    assert y_RH[taken_R][:, 200].isnan().all()
    assert not y_RH[:, torch.arange(case.H, device="cuda") != 200].isnan().any()


@hopper_boxes
@pytest.mark.parametrize("case", [NUMBERS, CODES], ids=["bf16", "fp8_block128"])
def test_random_batches_of_boxed_weights(case, specialized_launches):
    """Batches of all sizes have specialized warps, few rows included."""
    experts, chance = built(case), random.Random(case.weights)
    for seed in range(24):
        routing = chance.choice(("any", "one expert", "few experts", "duplicates", "sparse"))
        batch_of = replace(case, R=chance.choice((1, 2, 7, 16, 40, 150, 450)), routing=routing, seed=seed)
        experts.load_(batch_of.held)
        y_RH = within(batch_of, experts)
        assert same_bits(experts(batch_of.received()).rows_RH, y_RH), batch_of
    assert len(specialized_launches) == 48


# -- What they cannot compute --------------------------------------------------------------------------------

NOT_SPECIALIZED = {
    "exact between the products": {"inner": None},
    "exact between the products, packed": {"inner": None, "weights": "mxfp4", "rows": "mxfp8"},
    "plain rows, packed": {"rows": "bf16", "weights": "mxfp4"},
    "plain rows": {"rows": "bf16"},
    "interleaved": {"activation": "swiglu_oai"},
    "no gate": {"activation": "relu2"},
    "a size that is no multiple of 128": {"H": 528},
}


@pytest.mark.parametrize("changes", NOT_SPECIALIZED.values(), ids=NOT_SPECIALIZED)
def test_what_cannot_be_specialized_is_computed_as_ever(changes, specialized_launches):
    case = replace(CODES, **changes)
    experts = built(case)
    if not experts.is_packed:
        experts.tile_configs = TileConfigs(MANY, MANY)
    within(case, experts)
    assert not specialized_launches
