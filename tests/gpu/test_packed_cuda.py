"""Fused experts with packed 4-bit weights on a GPU, and such weights as e4m3."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.experts.fused_cases import check_case, same_bits
from tests.gpu.fused_on_gpu import (
    BASE,
    EXPANDED,
    built,
    is_hopper,  # noqa: F401 (in the conditions of marks)
    relative,
    within,
)
from tokenyard.errors import InputError
from tokenyard.experts import FusedExperts, ReferenceExperts, activation
from tokenyard.experts.fused import kernel_weights, packing, recoding
from tokenyard.experts.fused.tile_configs import (
    CodesTileConfig,
    NumbersTileConfig,
    TileConfigs,
    choose_packed_tiles,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FOUR_BIT = list(packing.LARGEST_SCALE)

# -- Packed weights ------------------------------------------------------------------------------------------


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
@pytest.mark.parametrize("weights", FOUR_BIT)
def test_packed_weights_are_held_once_and_given_back(weights):
    case, other = replace(BASE, weights=weights), replace(BASE, weights=weights, seed=1)
    experts = built(case)
    held = sum(tensor.nbytes for tensor in experts.buffers())
    # Inputs are padded to 128 and outputs to 64: here by no more than half.
    assert held < 1.6 * case.held.nbytes
    for name, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), case.held.by_name()[name].view(torch.uint8)), name
    pointers = [tensor.data_ptr() for tensor in experts.buffers()]
    experts.load_(other.held)
    assert [tensor.data_ptr() for tensor in experts.buffers()] == pointers
    assert same_bits(experts(case.received()).rows_RH, built(other)(case.received()).rows_RH)
    scales = other.held.w2.payloads["scales"]
    scales[3, 5, 1] = {"mxint4": 2.0**14, "mxfp4": 250, "nvfp4": -1.0}[weights]
    with pytest.raises(InputError, match=r"w2 has scales (beyond|below) .*fix: make new experts"):
        experts.load_(other.held)
    refused = FusedExperts(other.spec, other.held)
    assert not refused.is_packed
    assert refused(case.received()).rows_RH.shape == (case.R, case.H)


FEW = NumbersTileConfig(2, (16, 32, 64), 4)
NARROW = NumbersTileConfig(1, (16, 32, 64), 5)
PACKED_NUMBERS = replace(BASE, H=512, I=256, L=4, K=2, R=300)
# More than one item a tile, and tiles of every width; a last item with outputs for one group, or for all.
NUMBER_LAYERS = {
    "mxfp4": (FEW, {"weights": "mxfp4"}),
    "mxfp4, many tiles": (FEW, {"weights": "mxfp4", "R": 700}),
    "mxfp4, a last item for one group": (NARROW, {"weights": "mxfp4", "H": 1024, "I": 456}),
    "mxfp4, taking turns, in a workspace": (
        FEW,
        {
            "weights": "mxfp4",
            "activation": "swiglu_oai",
            "bias": True,
            "H": 712,
            "I": 200,
            "in_workspace": True,
        },
    ),
    "mxfp4, a limit, one expert has all rows": (
        FEW,
        {
            "weights": "mxfp4",
            "activation": "swiglu_clamped",
            "bias": True,
            "routing": "one expert",
            "H": 2880,
        },
    ),
    "mxfp4, rows of mxfp8 and codes between": (
        FEW,
        {"weights": "mxfp4", "rows": "mxfp8", "inner": "fp8_block128", "R": 120},
    ),
    "nvfp4, the weight on the input": (
        FEW,
        {"weights": "nvfp4", "weight_on": "input", "bias": True, "activation": "gelu", "H": 544, "I": 272},
    ),
    "nvfp4, one unit a group": (NARROW, {"weights": "nvfp4", "R": 500, "I": 136}),
    "mxint4, few rows, most experts have none": (
        FEW,
        {"weights": "mxint4", "R": 3, "L": 16, "routing": "sparse"},
    ),
    "mxint4, twice an expert": (
        FEW,
        {"weights": "mxint4", "routing": "duplicates", "R": 130, "K": 3, "H": 328, "I": 200},
    ),
    "mxint4, one step": (FEW, {"weights": "mxint4", "H": 128, "I": 64}),
    "nobody": (FEW, {"weights": "mxfp4", "routing": "nobody"}),
}


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
@pytest.mark.parametrize(("config", "changes"), NUMBER_LAYERS.values(), ids=NUMBER_LAYERS)
def test_packed_weights_by_warps_that_load_and_warps_that_multiply(config, changes):
    case = replace(PACKED_NUMBERS, **changes)
    experts = built(case)
    assert experts.is_packed
    experts.tile_configs = TileConfigs(config, config)
    y_RH = check_case(case, experts)
    for _ in range(20):  # what races is not the same twice
        assert same_bits(experts(case.received()).rows_RH, y_RH)
    experts.tile_configs = choose_packed_tiles(math.inf, 1, case.weights)
    # The same products in the same order, by blocks that wait for each other's copies; but few rows by other ones.
    assert (within(case, experts) - y_RH).norm() <= 2**-8 * y_RH.norm()


# Layers whose second product has a launch of its own, each by another kernel, or with a rounding between.
SEQUENCES = {
    "tiles": (None, {"rows": "mxfp8", "inner": "fp8_block128"}),
    "tiles, no codes between": (None, {"weights": "mxint4"}),
    "warps that load": (FEW, {"rows": "mxfp8", "inner": "fp8_block128"}),
    "codes": (CodesTileConfig(4, 4), {"rows": "mxfp8", "inner": "fp8_block128"}),
}


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
@pytest.mark.parametrize(("config", "changes"), SEQUENCES.values(), ids=SEQUENCES)
def test_batches_without_a_wait_between_them_have_the_bits_of_batches_alone(config, changes):
    """Rounding, second product and sums start while the first product runs; nothing is read or freed too early.

    Batches have few rows, many, or none. Memory that one frees is taken by the next; before the first it holds NaN.
    """
    base = replace(PACKED_NUMBERS, **{"weights": "mxfp4", "H": 1024, "I": 768, "L": 32, "K": 4, **changes})
    experts = built(base)
    if config is not None:
        experts.tile_configs = TileConfigs(config, config)
    routings = {700: "any", 40: "sparse", 300: "nobody", 1: "any", 900: "few experts", 64: "any"}
    batches = [replace(base, R=R, seed=R, routing=routing).received() for R, routing in routings.items()]
    alone = []
    for batch in batches:
        alone.append(experts(batch).rows_RH.clone())
        torch.cuda.synchronize()
    torch.full((2**26,), torch.nan, device="cuda")  # memory that the batches get next
    for _ in range(30):  # what races is not the same twice
        found = [experts(batch).rows_RH for batch in batches]
        assert all(same_bits(y_RH, expected) for y_RH, expected in zip(found, alone, strict=True))


# -- Packed weights that become blocks of e4m3, where rows are many --------------------------------------------

EXPANDED_LAYERS = {
    "several tiles": {},
    "biases, a limit": {"activation": replace(activation("swiglu_clamped"), interleaved=False), "bias": True},
    "gelu, the weight on the input": {"activation": "gelu", "weight_on": "input", "bias": True},
    "scales that are powers of two": {"inner": "fp8_block128(power_of_two_scales=True)"},
    "half a tile of outputs, and one block": {"H": 384, "I": 128},
    "in a workspace, rows padded": {"in_workspace": True, "H": 1024, "rows": "mxfp8(alignment=256)"},
    "one expert has all rows": {"routing": "one expert"},
}


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
@pytest.mark.parametrize("changes", EXPANDED_LAYERS.values(), ids=EXPANDED_LAYERS)
def test_packed_weights_become_blocks_where_rows_are_many(changes, specialized_launches):
    case = replace(EXPANDED, **changes)
    experts = built(case)
    assert experts.is_packed
    assert experts.is_expandable
    experts.tile_configs = choose_packed_tiles(math.inf, 1, "mxfp4", expands=True)
    y_RH = check_case(case, experts)
    assert len(specialized_launches) == 3
    for _ in range(20):  # what races is not the same twice
        assert same_bits(experts(case.received()).rows_RH, y_RH)
    del specialized_launches[:]
    experts.tile_configs = choose_packed_tiles(case.R, case.L, "mxfp4")
    packed_RH = within(case, experts)
    assert not specialized_launches
    # The same codes between the products, but for those in the middle between two, and sums in another order.
    assert (packed_RH - y_RH).norm() <= 2**-6 * y_RH.norm()


# Of sizes that need no blocks, and of gates and ups that take turns, too.
CODE_LAYERS = {
    name: (runs, EXPANDED_LAYERS.get(name, {}) | changes)
    for runs, (name, changes) in enumerate(
        {
            "several tiles": {},
            "biases, a limit": {"activation": "swiglu_clamped", "H": 712, "I": 200},
            "gelu, the weight on the input": {},
            "scales that are powers of two": {},
            "in a workspace, rows padded": {"H": 2880, "I": 136},
            "one expert has all rows": {},
            "taking turns": {"activation": "swiglu_oai", "bias": True, "H": 264, "I": 72},
            "nobody": {"routing": "nobody"},
        }.items()
    )
}


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
@pytest.mark.parametrize(("number", "changes"), CODE_LAYERS.values(), ids=CODE_LAYERS)
def test_packed_weights_become_codes_as_they_are_multiplied(number, changes):
    case = replace(EXPANDED, **changes)
    experts = built(case)
    assert experts.has_codes
    config = CodesTileConfig(1 + number % 4, 4)
    experts.tile_configs = TileConfigs(config, config)
    y_RH = check_case(case, experts)
    for _ in range(20):  # what races is not the same twice
        assert same_bits(experts(case.received()).rows_RH, y_RH)
    experts.tile_configs = choose_packed_tiles(case.R, case.L, "mxfp4")
    packed_RH = within(case, experts)
    assert (packed_RH - y_RH).norm() <= 2**-6 * y_RH.norm()


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
def test_weights_that_codes_would_round_are_not_made_codes():
    case = replace(EXPANDED, seed=1)
    experts = built(EXPANDED)
    assert isinstance(experts.choose_tiles(100 * case.L, "mxfp8").inner, CodesTileConfig)
    case.held.w2.payloads["scales"][3, 5, 0] = (
        case.held.w2.payloads["scales"][3, 5, 1] - packing.CODE_RANGE - 1
    )
    with pytest.raises(InputError, match=r"an output whose scales differ .*fix: make new experts"):
        experts.load_(case.held)
    other = built(case)
    assert other.is_packed
    assert not other.has_codes
    assert not isinstance(other.choose_tiles(100 * case.L, "mxfp8").inner, CodesTileConfig)


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
def test_packed_weights_are_expanded_as_they_are_recoded():
    case = replace(EXPANDED, H=640, I=384)
    draw = torch.Generator("cuda").manual_seed(0)
    for name in ("w13", "w2"):
        payloads = getattr(case.held, name).payloads
        for payload, least, most in (("data", 0, 256), ("scales", 110, 125)):
            shape = payloads[payload].shape
            drawn = torch.randint(least, most, shape, generator=draw, device="cuda", dtype=torch.uint8)
            payloads[payload].copy_(drawn)
    experts = built(case)
    expanded = experts._expanded(early=True)
    for name in ("w13", "w2"):
        found, expected = getattr(expanded, name), recoding.recode(getattr(case.held, name))
        for payload in ("data", "scales"):
            a, b = (matrix.payloads[payload].view(torch.uint8) for matrix in (found, expected))
            assert torch.equal(a, b), (name, payload)


@pytest.mark.skipif("not is_hopper()", reason="packed weights are for Hopper's tensor cores")
def test_expandable_weights_are_replaced_in_place_moved_and_refused():
    case, other = EXPANDED, replace(EXPANDED, seed=1)
    experts, fresh = built(case), built(other)
    pointers = [tensor.data_ptr() for tensor in experts.buffers()]
    experts.load_(other.held)
    assert [tensor.data_ptr() for tensor in experts.buffers()] == pointers
    assert same_bits(experts(case.received()).rows_RH, fresh(case.received()).rows_RH)
    experts.cpu()
    assert set(experts.state_dict()) == set(other.held.by_name())
    experts.cuda()
    assert same_bits(experts(case.received()).rows_RH, fresh(case.received()).rows_RH)
    other.held.w2.payloads["scales"][3, 5] -= 25
    with pytest.raises(InputError, match=r"w2 has an output that would change .*fix: make new experts"):
        experts.load_(other.held)
    refused = FusedExperts(other.spec, other.held)
    assert refused.is_packed
    assert not refused.is_expandable
    within(other, refused)


@pytest.mark.parametrize("packed", [True, False])
def test_numbers_between_products_of_few_rows_are_rounded(packed, monkeypatch):
    """As the layer says, whatever multiplies: the result is close to one that has codes there, not to an exact one."""
    if not packed:
        monkeypatch.setattr(kernel_weights, "can_run_packed", lambda spec, weights: False)
    case = replace(EXPANDED, R=20)
    y_RH = within(case, built(case))
    close_RH, exact_RH = (
        ReferenceExperts(spec, case.held)(case.received()).rows_RH
        for spec in (case.spec, replace(case.spec, inner=None))
    )
    assert relative(y_RH, close_RH) < 2**-7 < relative(close_RH, exact_RH)
