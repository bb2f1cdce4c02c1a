"""Fused experts on a GPU: every declared pair of formats, hundreds of batches, graphs, and a layer on several ranks.

A kernel is compiled for each format, shape and tile configuration, which takes seconds: the tests share a few shapes,
and vary what needs no other kernel. They do not depend on each other: `pytest -n 6` compiles side by side.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.experts.fused_cases import FusedCase, check_case, declared_pairs, exact, same_bits
from tests.experts.row_block_cases import SCALES, WIDTHS, all_codes, assert_recoded, drawn_rows, moved
from tests.gpu.test_one_sided_cuda import there
from tests.models import batch, build, on_ranks, spec
from tokenyard import formats
from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.suites import assert_passed, check_experts
from tokenyard.conformance.twin import twin
from tokenyard.experts import ExpertsSpec, ExpertWeights, FusedExperts, ReferenceExperts, activation
from tokenyard.experts.fused import kernel_weights, launch, launch_hopper, packing, recoding
from tokenyard.experts.fused.tile_configs import (
    SPECIALIZED_TILES,
    CodesTileConfig,
    NumbersTileConfig,
    TileConfig,
    TileConfigs,
    choose_packed_tiles,
)
from tokenyard.formats import QuantizedMatrix, weight_format
from tokenyard.rows import LocalRoutes, ReceivedRows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FOUR_BIT = list(packing.LARGEST_SCALE)
# Neither is a multiple of a tile; rows of both can be copied 16 bytes at a time.
BASE = FusedCase(H=544, I=272, L=8, K=4, R=16, device="cuda")


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def multiplies_e4m3() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def built(case: FusedCase) -> FusedExperts:
    return FusedExperts(case.spec, case.held)


def in_lines(case: FusedCase) -> FusedExperts:
    """Experts that hold bf16, fp16 and fp8_block128 weights line by line, as they do with adopted ones."""
    return FusedExperts(case.spec, case.held, adopt=True)


def within(case: FusedCase, experts: FusedExperts) -> torch.Tensor:
    """The result of a case, inside its bound."""
    y_RH, (exact_RH, bound_RH) = experts(case.received()).rows_RH, case.exact()
    over = float(((y_RH - exact_RH).abs() - bound_RH).amax()) if case.R else -1.0
    assert over <= 0, (case, over)
    return y_RH


# -- Formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "rows"), declared_pairs())
def test_every_declared_pair(weights, rows):
    case = replace(BASE, weights=weights, rows=rows)
    experts = built(case)
    assert experts.is_packed == (is_hopper() and weights in FOUR_BIT)
    assert experts.is_recoded == (multiplies_e4m3() and weights == "mxfp8")
    within(case, experts)


@pytest.mark.parametrize("rows", ["bf16", "mxfp8", "mxfp8(alignment=256)"])
def test_mxfp8_weights_that_are_decoded(rows, monkeypatch):
    """What runs where they cannot be recoded."""
    monkeypatch.setattr(FusedExperts, "recodes", False)
    case = replace(BASE, weights="mxfp8", rows=rows)
    experts = built(case)
    assert not experts.is_recoded
    within(case, experts)


@pytest.mark.parametrize(("weights", "rows"), [pair for pair in declared_pairs() if pair[0] in FOUR_BIT])
def test_four_bits_in_plain_triton(weights, rows, monkeypatch):
    """What runs where packed weights do not."""
    monkeypatch.setattr(kernel_weights, "can_run_packed", lambda spec, weights: False)
    case = replace(BASE, weights=weights, rows=rows)
    experts = built(case)
    assert not experts.is_packed
    within(case, experts)


FROM_A_WORKSPACE = [("bf16", "bf16"), ("fp8_block128", "bf16"), ("mxfp8", "mxfp8"), ("mxint4", "bf16")]


@pytest.mark.parametrize(("weights", "rows"), FROM_A_WORKSPACE)
def test_finished_by_hand_in_place_and_from_a_workspace(weights, rows):
    for in_workspace in (False, True):
        for routing in ("any", "duplicates", "sparse", "nobody"):
            case = replace(BASE, weights=weights, rows=rows, in_workspace=in_workspace, routing=routing)
            check_case(case, built(case))


OTHER_LAYERS = {
    "gpt-oss, rows padded to 3072": FusedCase(
        weights="mxfp4", rows="mxfp8(alignment=256)", H=2880, I=720, L=4, K=4, R=20,
        activation="swiglu_clamped", bias=True,
    ),
    "the weight on the input": FusedCase(weights="nvfp4", H=544, I=272, weight_on="input", bias=True),
    "no gate": FusedCase(weights="mxint4", H=264, I=136, activation="relu2"),
    "gelu, odd sizes": FusedCase(weights="mxfp4", H=100, I=33, activation="gelu"),
    "gelu by tanh, packed": FusedCase(weights="mxfp4", H=264, I=136, activation="gelu_tanh"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_LAYERS.values(), ids=OTHER_LAYERS)
def test_other_layers(case):
    case = replace(case, device="cuda")
    within(case, built(case))


TMA_LAYERS = {
    "interleaved, with biases": FusedCase(activation="swiglu_oai", bias=True, H=328, I=200, R=150),
    "the weight on the input": FusedCase(weight_on="input", H=264, I=72, R=40),
    "fp16, in a workspace": FusedCase(weights="fp16", rows="fp16", H=1024, I=256, in_workspace=True, R=300),
    "one expert has all rows": FusedCase(H=256, I=136, R=200, routing="one expert"),
}


@pytest.mark.parametrize("case", TMA_LAYERS.values(), ids=TMA_LAYERS)
def test_matrices_by_tma(case):
    case = replace(case, device="cuda")
    experts = in_lines(case)
    many = TileConfig(256, 128, 64, 8, 4, 64, tma=True)
    experts.tile_configs = TileConfigs(many, many)
    assert launch.can_use_tma(experts.weights.w13, case.spec) == (torch.cuda.get_device_capability()[0] >= 9)
    y_RH = within(case, experts)
    assert same_bits(experts(case.received()).rows_RH, y_RH)


MANY = TileConfig(256, 128, 128, 8, 3, 64, True, False, True)
CODES = FusedCase(
    weights="fp8_block128",
    rows="fp8_block128",
    inner="fp8_block128",
    H=512,
    I=256,
    L=4,
    K=2,
    R=700,
    device="cuda",
)
SPECIALIZED_LAYERS = {
    "several tiles": {},
    "biases, a limit": {"activation": replace(activation("swiglu_clamped"), interleaved=False), "bias": True},
    "gelu, the weight on the input": {"activation": "gelu", "weight_on": "input", "bias": True},
    "scales that are powers of two": {"inner": "fp8_block128(power_of_two_scales=True)"},
    "half a tile of outputs, and one block": {"H": 384, "I": 128},
    "in a workspace": {"in_workspace": True, "H": 1024, "activation": "gelu_tanh"},
    "one expert has all rows": {"routing": "one expert", "R": 333},
    "few rows, most experts have none": {"R": 3, "L": 16, "routing": "sparse"},
    "every row names an expert twice": {"routing": "duplicates", "R": 130, "K": 3},
    "nobody": {"routing": "nobody"},
}


@pytest.fixture
def specialized_launches(monkeypatch):
    """The layers whose products were launched as `kernels.specialized`."""
    launched, original = [], launch_hopper.launch_specialized

    def noting(call, *arguments, **options):
        launched.append(call.spec)
        original(call, *arguments, **options)

    monkeypatch.setattr(launch_hopper, "launch_specialized", noting)
    return launched


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


# More than one column of 256 outputs, and of several tiles the last has few rows.
NUMBERS = FusedCase(H=512, I=256, L=4, K=2, R=700, device="cuda")
SPECIALIZED_NUMBERS = {
    "several tiles": {},
    "no size is a multiple of 64": {"H": 328, "I": 200, "bias": True},
    "interleaved, with biases": {"activation": "swiglu_oai", "bias": True, "H": 320, "I": 200},
    "gelu, the weight on the input": {"activation": "gelu", "weight_on": "input", "bias": True},
    "fp16, in a workspace": {"weights": "fp16", "rows": "fp16", "H": 1024, "in_workspace": True},
    "half a tile of outputs, and one step": {"H": 128, "I": 64},
    "one expert has all rows": {"routing": "one expert", "R": 333},
    "few rows, most experts have none": {"R": 3, "L": 16, "routing": "sparse"},
    "every row names an expert twice": {"routing": "duplicates", "R": 130, "K": 3},
    "nobody": {"routing": "nobody"},
}


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


# -- Packed weights that become blocks of e4m3, where rows are many --------------------------------------------

EXPANDED = replace(CODES, weights="mxfp4", rows="mxfp8")
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
    with pytest.raises(ty.InputError, match=r"an output whose scales differ .*fix: make new experts"):
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
    with pytest.raises(ty.InputError, match=r"w2 has an output that would change .*fix: make new experts"):
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


# -- Batches -------------------------------------------------------------------------------------------------

# Experts of these sizes get batches of every size, so that every line of their table is used.
ANY_BATCH = [
    ("bf16", "bf16"),
    ("fp8_block128", "fp8_block128"),
    ("mxfp8", "mxfp8"),
    ("mxint4", "bf16"),
    ("mxfp4", "bf16"),
]
FEW_ROWS = [("nvfp4", "bf16")]
BATCHES = 50  # of each: 300 together


@pytest.mark.parametrize(("weights", "rows"), ANY_BATCH + FEW_ROWS)
def test_random_batches(weights, rows):
    """No rows, one row, empty experts, one expert with all rows: within the bound, the same bits when repeated."""
    experts = built(replace(BASE, weights=weights, rows=rows))
    chance = random.Random(weights)
    sizes = (0, 1, 1, 2, 7, 16, 24) + ((40, 64, 150, 333, 450) if (weights, rows) in ANY_BATCH else ())
    for seed in range(BATCHES):
        case = replace(
            BASE,
            weights=weights,
            rows=rows,
            R=chance.choice(sizes),
            routing=chance.choice(("any", "one expert", "few experts", "duplicates", "sparse", "nobody")),
            seed=seed,
        )
        experts.load_(case.held)
        y_RH = within(case, experts)
        assert same_bits(experts(case.received()).rows_RH, y_RH), case


@pytest.mark.parametrize(("weights", "rows_in"), [("mxint4", "bf16"), ("mxfp8", "mxfp8")])
def test_nothing_is_compiled_for_a_number_of_rows(weights, rows_in, monkeypatch):
    from triton import knobs

    case = replace(BASE, weights=weights, rows=rows_in)
    experts = built(case)
    for rows in (17, 400):  # one chunk of pairs, and several
        experts(replace(case, R=rows).received())
    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda *args, **named: compiled.append(named["repr"])
    )
    for rows in (16, 18, 19, 21, 24, 390, 401, 416):
        experts(replace(case, R=rows).received())
    assert not compiled


def test_the_contract():
    """The named checks of experts, with rows on the GPU; those that draw many shapes are left to `tokenyard check`."""
    few = [
        "one_type_returned",
        "rows_for_nobody_are_zero",
        "nan_stays_in_its_row",
        "empty_batches",
        "nothing_is_changed",
        "load_is_in_place",
        "computing_repeats",
    ]
    assert_passed(check_experts("fused", only=few, device="cuda"))


# -- #39315: mxint4, m 1 and 33, n 7168, k 512 both ways round, e 384, top-k 8 --------------------------------


def random_codes(shape: tuple[int, ...], draw: torch.Generator) -> QuantizedMatrix:
    """An mxint4 matrix of random codes, whose numbers are about as large as those of a trained layer."""
    format = weight_format("mxint4")
    declared = format.payloads(*shape[1:])
    data = torch.randint(
        0, 256, (shape[0], *declared["data"].shape), dtype=torch.uint8, device="cuda", generator=draw
    )
    scales = torch.rand((shape[0], *declared["scales"].shape), device="cuda", generator=draw) + 0.5
    scales = (scales * shape[-1] ** -0.5 / 4.6).bfloat16()
    return QuantizedMatrix(format=format, shape=shape, payloads={"data": data, "scales": scales})


def unpacked(matrix: QuantizedMatrix, expert: int) -> torch.Tensor:
    """A second decode, by hand: the low nibble first, signed, a scale for 32 inputs."""
    data = matrix.payloads["data"][expert].to(torch.int32)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    signed = torch.where(codes > 7, codes - 16, codes).float()
    scales = matrix.payloads["scales"][expert].float()
    return (signed.unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)).flatten(-2)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(512, 7168), (7168, 512)])
def test_39315_full_size_against_two_references(hidden_size, intermediate_size):
    layer = ExpertsSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=384,
        top_k=8,
        activation=activation("swiglu"),
        weights="mxint4",
    )
    draw = torch.Generator("cuda").manual_seed(hidden_size)
    shapes = layer.shapes()
    weights = ExpertWeights(w13=random_codes(shapes["w13"], draw), w2=random_codes(shapes["w2"], draw))
    kernel = FusedExperts(layer, weights, adopt=True)
    reference = ReferenceExperts(layer, weights, adopt=True)
    for tokens in (1, 33):
        x_TH = torch.randn(tokens, hidden_size, device="cuda", generator=draw).bfloat16()
        ids_TK = torch.rand(tokens, 384, device="cuda", generator=draw).argsort(1)[:, :8].int()
        weights_TK = torch.rand(tokens, 8, device="cuda", generator=draw)
        routes = LocalRoutes(ids_RK=ids_TK.contiguous(), weights_RK=weights_TK)
        rows = formats.get("bf16").encode(x_TH)
        received = ReceivedRows(rows=rows, routes=routes, counts_W=(tokens,))
        y_TH = kernel(received).rows_RH
        second_TH = torch.zeros(tokens, hidden_size, device="cuda")
        for expert in ids_TK.unique().tolist():
            token_N, choice_N = (ids_TK == expert).nonzero(as_tuple=True)
            gate, up = (x_TH[token_N].float() @ unpacked(weights.w13, expert).T).chunk(2, dim=1)
            result = (torch.nn.functional.silu(gate) * up) @ unpacked(weights.w2, expert).T
            second_TH.index_add_(0, token_N, result * weights_TK[token_N, choice_N].unsqueeze(1))
        first_TH = reference(received).rows_RH
        assert relative(first_TH, second_TH) < 1e-5
        # Between the products, and before they are summed, numbers are rounded to bf16.
        assert relative(y_TH, second_TH) < 2**-7
        exact_TH, bound_TH = exact(layer, weights, rows, routes, rounds_operands=True)
        assert ((y_TH - exact_TH).abs() <= bound_TH).all()
        unfinished = kernel(received, finalize=False)
        assert unfinished.rows_NH.shape == (8 * tokens, hidden_size)
        assert same_bits(unfinished.finish().rows_RH, y_TH)


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
    with pytest.raises(ty.InputError, match=r"w2 has scales (beyond|below) .*fix: make new experts"):
        experts.load_(other.held)
    refused = FusedExperts(other.spec, other.held)
    assert not refused.is_packed
    assert refused(case.received()).rows_RH.shape == (case.R, case.H)


FEW = NumbersTileConfig(2, 2, ((16, 0), (32, 0), (64, 0)), 4)
WIDE = NumbersTileConfig(2, 2, ((32, 0), (64, 0), (64, 32), (128, 0)), 3)
THREE = NumbersTileConfig(3, 2, ((16, 0), (32, 0), (64, 0)), 4)
PACKED_NUMBERS = replace(BASE, H=512, I=256, L=4, K=2, R=300)
# More than one item a tile, and tiles of every width; a last item with outputs for one group, or for all.
NUMBER_LAYERS = {
    "mxfp4": (FEW, {"weights": "mxfp4"}),
    "mxfp4, wide tiles": (WIDE, {"weights": "mxfp4", "R": 700}),
    "mxfp4, three groups": (THREE, {"weights": "mxfp4", "H": 1024, "I": 456}),
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
    "nvfp4, wide tiles": (WIDE, {"weights": "nvfp4", "R": 500, "I": 136}),
    "mxint4, few rows, most experts have none": (
        FEW,
        {"weights": "mxint4", "R": 3, "L": 16, "routing": "sparse"},
    ),
    "mxint4, wide tiles, twice an expert": (
        WIDE,
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


# -- Weights and rows in blocks of e4m3 ----------------------------------------------------------------------


@pytest.mark.skipif("not multiplies_e4m3()", reason="these tensor cores multiply no e4m3")
def test_recoded_weights_are_held_once_and_given_back():
    case, other = replace(BASE, weights="mxfp8"), replace(BASE, weights="mxfp8", seed=1)
    experts = built(case)
    assert sum(tensor.nbytes for tensor in experts.buffers()) < case.held.nbytes
    given = experts.weights
    for name in ("w13", "w2"):
        held, found = (getattr(weights, name).decode(torch.float64) for weights in (case.held, given))
        assert ((found - held).norm(dim=-1) <= 2.0**-12 * held.norm(dim=-1)).all()
    pointers = [tensor.data_ptr() for tensor in experts.buffers()]
    experts.load_(other.held)
    assert [tensor.data_ptr() for tensor in experts.buffers()] == pointers
    assert same_bits(experts(case.received()).rows_RH, built(other)(case.received()).rows_RH)
    experts.cpu()
    assert set(experts.state_dict()) == set(other.held.by_name())
    assert same_bits(experts.cuda()(case.received()).rows_RH, built(other)(case.received()).rows_RH)
    other.held.w2.payloads["scales"][3, 5] -= 14
    with pytest.raises(ty.InputError, match=r"w2 has an output that would change .*fix: make new experts"):
        experts.load_(other.held)
    refused = FusedExperts(other.spec, other.held)
    assert not refused.is_recoded
    within(other, refused)


def test_weights_are_recoded_as_on_a_cpu():
    held = replace(BASE, weights="mxfp8", device="cpu").held.w13
    there = replace(held, payloads={name: payload.cuda() for name, payload in held.payloads.items()})
    expected, found = recoding.recode(held), recoding.recode(there)
    for name, payload in expected.payloads.items():
        assert torch.equal(found.payloads[name].cpu().view(torch.uint8), payload.view(torch.uint8)), name


@pytest.mark.skipif("not multiplies_e4m3()", reason="e4m3 is not cast by this GPU")
@pytest.mark.parametrize("early", [False, True])
def test_rows_are_recoded_as_the_twin_does(early):
    if early and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no kernel starts early on this GPU")
    drawn = [drawn_rows(width, scales, nan=True) for width in WIDTHS for scales in SCALES]
    for rows in [all_codes(), *drawn, drawn_rows(544, "far", rows=5000)]:
        found = launch.launch_row_blocks(moved(rows, "cuda"), None, rows.num_rows, early=early)
        assert_recoded(found, rows)


# -- CUDA graphs ---------------------------------------------------------------------------------------------


def captured(experts: FusedExperts, received: ReceivedRows) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one call, and where it leaves its result."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        experts(received)  # compiled, loaded
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y_RH = experts(received).rows_RH
    return graph, y_RH


IN_GRAPHS = {
    "bf16": BASE,
    "mxint4": replace(BASE, weights="mxint4"),
    "mxfp8": replace(BASE, weights="mxfp8", rows="mxfp8"),
    "bf16, boxed on Hopper": NUMBERS,
    "fp8_block128, boxed on Hopper": CODES,
}


@pytest.mark.parametrize("case", IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_a_graph_sees_new_rows_new_routes_and_new_weights(case):
    for rows in (16, 450):
        case = replace(case, R=rows)
        experts, received = built(case), case.received()
        graph, y_RH = captured(experts, received)
        for seed, routing in enumerate(("any", "one expert", "few experts", "sparse", "nobody", "any")):
            fresh = replace(case, seed=seed + 1, routing=routing)
            for name, payload in received.rows.payloads.items():
                payload.copy_(fresh.x.payloads[name])
            received.routes.ids_RK.copy_(fresh.routes.ids_RK)
            received.routes.weights_RK.copy_(fresh.routes.weights_RK)
            experts.load_(fresh.held)
            graph.replay()
            exact_RH, bound_RH = fresh.exact()
            assert ((y_RH - exact_RH).abs() <= bound_RH).all(), fresh
            assert same_bits(experts(fresh.received()).rows_RH, y_RH), fresh


def test_what_has_no_fixed_shape_is_not_captured():
    case = BASE
    experts, received = built(case), case.received()
    experts(received, finalize=False)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ty.ContractError, match="captured without finalizing"), torch.cuda.graph(graph):
        experts(received, finalize=False)


# -- A layer -------------------------------------------------------------------------------------------------


def layer_of(weights: str, wire: str, world: int) -> ty.LayerSpec:
    """A layer whose experts on a rank have the sizes of the other tests."""
    return spec(
        hidden_size=BASE.H,
        intermediate_size=BASE.I,
        num_experts=BASE.L * world,
        top_k=BASE.K,
        weights=weights,
        wire=wire,
        max_tokens=24,
        experts="fused",
    )


def warmed(layer: ty.LayerSpec) -> None:
    """Compile what a layer needs before its ranks wait for each other."""
    for rows in (5, 16):  # few enough to be summed inside the product, and more
        for in_workspace in (True, False):
            case = replace(BASE, weights=layer.weights, rows=layer.wire, R=rows, in_workspace=in_workspace)
            built(case)(case.received(results=True))


def run_layer(group, layer, tokens):
    """The outputs with fused experts, twice, and those of the reference."""
    x_TH, routes = batch(layer, tokens[group.rank], seed=group.rank)
    x_TH, routes = x_TH.cuda(), there(routes)
    outputs = []
    for experts in ("fused", "reference"):
        plan = ty.plan([replace(layer, experts=experts)], group, exchange="one_sided")
        moe = build(plan, layer.name).to(group.device)
        outputs += [moe(x_TH, routes).cpu() for _ in range(2)]
        plan.close()
    return outputs


@pytest.mark.parametrize(("weights", "wire"), [("bf16", "bf16"), ("mxint4", "bf16"), ("mxfp8", "mxfp8")])
@pytest.mark.parametrize("tokens", [(16, 5), (3, 0, 24, 9)], ids=["2 ranks", "4 ranks"])
def test_a_layer_on_one_sided(weights, wire, tokens):
    layer = layer_of(weights, wire, len(tokens))
    warmed(layer)
    answers = on_ranks(len(tokens), run_layer, layer, tokens, device="cuda", deadline=120.0)
    for count, (first, second, expected, _) in zip(tokens, answers, strict=True):
        assert first.shape == (count, BASE.H)
        assert same_bits(first, second)
        if count:
            assert relative(first.float(), expected.float()) < 2**-6


def run_captured(group, layer, tokens):
    """A whole layer in a graph, replayed with other rows and routes: how far it is from the reference's twin."""
    (wiring,) = ty.draft([replace(layer, experts="reference")], group.size).wirings
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    x_TH, routes = batch(layer, tokens, seed=group.rank)
    x_TH, routes = x_TH.cuda(), there(routes)
    with plan.fixed_shapes(max_tokens=tokens):
        moe(x_TH, routes)
        plan.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        for rank in range(group.size):  # threads of one process capture one after the other
            if rank == group.rank:
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    y_TH = moe(x_TH, routes)
            group.barrier()
    worst = 0.0
    for seed in range(4):
        fresh_TH, other = batch(layer, tokens, seed=100 * seed + group.rank)
        x_TH.copy_(fresh_TH)
        routes.topk_ids_TK.copy_(other.topk_ids_TK)
        routes.topk_weights_TK.copy_(other.topk_weights_TK)
        graph.replay()
        plan.synchronize()
        expected = twin(wiring, random_weights(layer, 0), fresh_TH, other, group.rank)
        worst = max(worst, relative(y_TH.float().cpu(), expected.float()))
    del graph
    plan.close()
    return worst


def test_a_captured_layer_on_one_sided():
    layer = layer_of("mxint4", "bf16", 2)
    warmed(layer)
    assert max(on_ranks(2, run_captured, layer, 16, device="cuda", deadline=120.0)) < 2**-6
