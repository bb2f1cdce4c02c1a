"""Fused experts, their kernels run by Triton's interpreter: every declared pair of formats, any shape, every ending."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache

import pytest
import torch

import tokenyard as ty
from tests.exchange.interpreter import install, only_without_gpu
from tests.experts.fused_cases import FusedCase, check_case, declared_pairs, drawn, same_bits
from tests.models import batch, build, on_ranks, spec
from tests.products import product
from tokenyard.errors import InputError, PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import ExpertWeights, FusedExperts, ReferenceExperts
from tokenyard.experts.fused import launch
from tokenyard.experts.fused.tile_configs import SPLIT_OUT, TileConfig, TileConfigs
from tokenyard.formats import WEIGHT_FORMATS, QuantizedMatrix

pytestmark = only_without_gpu
install()


def run(case: FusedCase) -> torch.Tensor:
    return check_case(case, FusedExperts(case.spec, case.held))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("weights", "rows"), declared_pairs())
def test_any_shape_of_every_declared_pair(weights, rows, seed):
    run(drawn(weights, rows, seed))


CORNERS = {
    "one row": FusedCase(R=1, K=1, L=1),
    "no rows": FusedCase(R=0),
    "one expert has all rows, several tiles of them": FusedCase(R=40, K=2, L=3, routing="one expert"),
    "eight choices, all the same": FusedCase(weights="mxfp4", R=6, K=8, routing="duplicates"),
    "nobody": FusedCase(routing="nobody"),
    "an odd intermediate size": FusedCase(weights="nvfp4", H=24, I=7, R=4),
    "zeros times negative weights": FusedCase(R=12, K=3, L=4, routing="sparse", signed=True),
    "zeros times negative weights, bias": FusedCase(R=12, K=3, L=4, bias=True, signed=True),
    "zeros times negative weights, in blocks of eight": FusedCase(
        weights="fp8_block128", rows="fp8_block128", H=136, I=136, R=12, K=2, routing="sparse", signed=True
    ),
    "more than a block of scales": FusedCase(weights="fp8_block128", rows="fp8_block128", H=136, I=136, R=3),
    "gpt-oss": FusedCase(
        weights="mxfp4", rows="mxfp8(alignment=256)", activation="swiglu_clamped", bias=True
    ),
}


@pytest.mark.parametrize("case", CORNERS.values(), ids=CORNERS)
def test_corners(case):
    run(case)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_a_rank_without_experts(weights):
    """Rows for nobody are zero. (All experts of the layer live elsewhere.)"""
    rows = weights if weights in ("fp16", "fp32") else "bf16"
    for received in (0, 3):
        case = FusedCase(weights=weights, rows=rows, L=0, R=received, routing="nobody", bias=True)
        experts = FusedExperts(replace(case.spec, num_experts=2), case.held)
        check_case(case, experts)
        assert torch.equal(experts(case.received()).rows_RH, torch.zeros(received, case.H))


def test_the_bound_notices_a_wrong_layer():
    case = FusedCase(weights="mxint4")
    wrong = FusedExperts(case.spec, FusedCase(weights="mxint4", seed=1).held)
    with pytest.raises(AssertionError):
        check_case(case, wrong)


@pytest.mark.parametrize("rows", [1, 16, 35])
def test_long_batches_are_summed_with_the_same_bits(rows, monkeypatch):
    """Blocks of 16 rows, the last of them not full; a row may have no expert, one, or several."""
    case = FusedCase(R=rows, K=3, L=4, H=40)
    experts = FusedExperts(case.spec, case.held)
    expected = check_case(case, experts)
    monkeypatch.setattr(launch, "LONG_SUMS", 0)
    assert same_bits(check_case(case, experts), expected)


def test_a_tile_that_is_hardly_filled_may_be_computed_as_a_narrow_one():
    """`tail`: tiles of few rows, in a batch whose tiles are wide."""
    case = FusedCase(R=40, K=1, L=2, routing="one expert")
    experts = FusedExperts(case.spec, case.held)
    wide = TileConfig(64, 32, 64, 4, 3, 16)  # 40 rows: 32 and 8
    experts.tile_configs = TileConfigs(wide, wide)
    check_case(case, experts)


ROWS_FIRST = {
    "blocks that share a scale": {"H": 200, "I": 128},
    "blocks that do not": {"H": 256, "I": 100},
    "in a workspace": {"in_workspace": True},
    "interleaved, with biases": {"activation": "swiglu_oai", "bias": True, "I": 40},
    "weighted inputs": {"weight_on": "input", "I": 20},
    "codes between": {"inner": "fp8_block128", "I": 200},
}


@pytest.mark.parametrize("changes", ROWS_FIRST.values(), ids=ROWS_FIRST)
def test_many_rows_may_stand_first(changes):
    e4m3 = {"weights": "fp8_block128", "rows": "fp8_block128"}
    case = FusedCase(R=40, K=2, L=2, routing="any", **e4m3, **changes)
    experts = FusedExperts(case.spec, case.held)
    first = TileConfig(SPLIT_OUT, 32, 128, 4, 3, 16, rows_first=True)
    experts.tile_configs = TileConfigs(first, TileConfig(64, 32, 128, 4, 3, 16))
    check_case(case, experts)


TMA_LAYERS = {
    "several blocks each way": {"H": 200, "I": 72},
    "less than a block": {"H": 24, "I": 8},
    "interleaved, with biases": {"activation": "swiglu_oai", "bias": True, "I": 40},
    "biases, a limit": {"activation": "swiglu_clamped", "bias": True},
    "weighted inputs": {"weight_on": "input"},
    "in a workspace": {"in_workspace": True},
    "fp16": {"weights": "fp16", "rows": "fp16"},
    "a row, and experts without any": {"R": 1, "L": 5},
}
BY_TMA = TileConfigs(TileConfig(64, 32, 32, 4, 3, 16, tma=True), TileConfig(64, 32, 32, 4, 3, 16, tma=True))


@pytest.fixture
def tma_launches(monkeypatch):
    """The kernels with TMA that were launched."""
    launched, original = [], launch.launch_tiles

    def noting(call, compute, *arguments):
        if compute.__name__.startswith("tma_"):
            launched.append(compute.__name__)
        original(call, compute, *arguments)

    monkeypatch.setattr(launch, "launch_tiles", noting)
    return launched


def check_by_tma(changes):
    case = replace(FusedCase(R=40, K=2, L=2), **changes)
    experts = FusedExperts(case.spec, case.held)
    experts.tile_configs = BY_TMA
    check_case(case, experts)


@pytest.mark.parametrize("changes", TMA_LAYERS.values(), ids=TMA_LAYERS)
def test_matrices_may_come_by_tma(changes, tma_launches):
    check_by_tma(changes)
    assert set(tma_launches) == {"tma_inner_tile", "tma_result_tile"}


NOT_BY_TMA = {
    "lines that are no multiple of 16 bytes": {"H": 36},
    "no gate": {"activation": "relu2"},
    "rows of another type": {"rows": "fp32"},
    "weights of a format": {"weights": "mxint4"},
}


@pytest.mark.parametrize("changes", NOT_BY_TMA.values(), ids=NOT_BY_TMA)
def test_what_cannot_come_by_tma_comes_as_ever(changes, tma_launches):
    check_by_tma(changes)
    assert "tma_inner_tile" not in tma_launches


# Of the first product and of the second, whose rows are split in two e4m3 numbers.
SPLIT_CUTS = {
    "turned": TileConfigs(TileConfig(SPLIT_OUT, 16, 128, 4, 3), TileConfig(64, 16, 128, 4, 3)),
    "turned, two blocks a step": TileConfigs(
        TileConfig(SPLIT_OUT, 16, 256, 4, 3), TileConfig(64, 16, 128, 4, 3)
    ),
    "turned, with tails": TileConfigs(
        TileConfig(SPLIT_OUT, 32, 128, 4, 3, 16), TileConfig(128, 32, 128, 4, 3, 16)
    ),
    "turned, long": TileConfigs(TileConfig(SPLIT_OUT, 64, 64, 4, 3), TileConfig(256, 64, 128, 4, 3)),
    "rows first, with tails": TileConfigs(
        TileConfig(SPLIT_OUT, 32, 128, 4, 3, 16, rows_first=True),
        TileConfig(256, 32, 128, 4, 3, 16, rows_first=True),
    ),
    "rows first, long": TileConfigs(
        TileConfig(SPLIT_OUT, 64, 128, 4, 3, rows_first=True), TileConfig(256, 64, 128, 4, 3, rows_first=True)
    ),
}
SPLIT_LAYERS = {
    "hardly more than a block": {"rows": "fp8_block128", "H": 136, "I": 136, "bias": True},
    "less than a block, and more than two": {"rows": "fp8_block128", "H": 300, "I": 33, "in_workspace": True},
    "an even number of blocks": {"rows": "fp8_block128", "H": 512, "I": 72, "bias": True},
    "plain rows": {"H": 128, "I": 256, "weight_on": "input"},
    "no gate": {"rows": "fp8_block128", "H": 40, "I": 130, "activation": "relu2", "bias": True},
    "interleaved": {"rows": "fp8_block128", "H": 40, "I": 200, "activation": "swiglu_oai"},
}


def split_case(changes) -> FusedCase:
    return replace(FusedCase(weights="fp8_block128", R=23, K=2, L=2, routing="any"), **changes)


@pytest.mark.parametrize(("chosen", "changes"), product(SPLIT_CUTS, SPLIT_LAYERS))
def test_second_products_of_split_numbers(chosen, changes):
    case = split_case(changes)
    experts = FusedExperts(case.spec, case.held)
    experts.tile_configs = chosen
    check_case(case, experts)


CODED_LAYERS = {
    "hardly more than a block": {"rows": "fp8_block128", "H": 136, "I": 136, "bias": True},
    "plain rows, scales that are powers of two": {
        "H": 128,
        "I": 256,
        "weight_on": "input",
        "inner": "fp8_block128(power_of_two_scales=True)",
    },
    "no gate": {"rows": "fp8_block128", "H": 40, "I": 130, "activation": "relu2", "in_workspace": True},
}


@pytest.mark.parametrize(("chosen", "changes"), product(SPLIT_CUTS, CODED_LAYERS))
def test_second_products_of_codes(chosen, changes):
    """Quantized once between the products: the numbers of the reference, and not those of two e4m3 numbers."""
    case = split_case({"inner": "fp8_block128", **changes})
    experts = FusedExperts(case.spec, case.held)
    experts.tile_configs = chosen
    found = check_case(case, experts)
    quantized, exact = (
        ReferenceExperts(spec, case.held)(case.received()).rows_RH
        for spec in (case.spec, replace(case.spec, inner=None))
    )
    # Results are rounded to bf16; a code that falls to the other side of a middle is rare.
    assert (found - quantized).norm() < 2**-7 * quantized.norm()
    assert (exact - quantized).norm() > 2**-7 * quantized.norm()


@pytest.mark.parametrize(("chosen", "inner"), product(SPLIT_CUTS, [None, "fp8_block128"]))
def test_nan_stays_in_its_row(chosen, inner):
    case = split_case({"rows": "bf16", "H": 40, "I": 130, "inner": inner})
    experts = FusedExperts(case.spec, case.held)
    experts.tile_configs = chosen
    good = experts(case.received()).rows_RH
    case.routes.ids_RK[5] = torch.tensor([0, 1])
    case.routes.weights_RK[5] = 0.5
    case.x.payloads["data"][5, 3] = torch.nan
    found = experts(case.received()).rows_RH
    assert found[5].isnan().all()
    others = torch.arange(case.R) != 5
    assert same_bits(found[others], good[others])


def turned(tensor):
    """The same numbers, with the first dimension last in memory: a copy keeps that order, if it may."""
    return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)


def spread(tensor):
    """The same numbers, with a gap behind each."""
    view = tensor.new_empty(*tensor.shape, 2)[..., 0]
    return view.copy_(tensor)


def case_with_bias(weights) -> FusedCase:
    rows = weights if weights in ("fp16", "fp32") else "bf16"
    return FusedCase(weights=weights, rows=rows, H=136, I=72, bias=True, R=4)


@cache
def contiguous_result(weights):
    case = case_with_bias(weights)
    return FusedExperts(case.spec, case.held)(case.received()).rows_RH


@pytest.mark.parametrize(
    ("weights", "layout", "adopt"),
    product(WEIGHT_FORMATS.keys(), [turned, spread], {"copied": False, "adopted": True}),
)
def test_weights_that_are_not_contiguous(weights, layout, adopt):
    """Matrices, all that quantized ones are made of, and biases."""
    case = case_with_bias(weights)

    def view_of(part):
        if isinstance(part, QuantizedMatrix):
            return replace(part, payloads={name: layout(tensor) for name, tensor in part.payloads.items()})
        return layout(part)

    views = ExpertWeights(**{name: view_of(part) for name, part in case.held.parts().items()})
    assert not any(tensor.is_contiguous() for tensor in views.by_name().values())
    found = FusedExperts(case.spec, views, adopt=adopt)(case.received()).rows_RH
    assert same_bits(found, contiguous_result(weights))


def test_split_numbers_need_tiles_of_whole_blocks():
    case = split_case({})
    experts = FusedExperts(case.spec, case.held)
    tiles = TileConfig(64, 16, 128, 4, 3)
    experts.tile_configs = TileConfigs(tiles, tiles)
    with pytest.raises(AssertionError):
        experts(case.received())


def test_loading_is_in_place():
    case, other = FusedCase(weights="mxint4", bias=True), FusedCase(weights="mxint4", bias=True, seed=1)
    experts = FusedExperts(case.spec, case.held)
    pointers = {name: tensor.data_ptr() for name, tensor in experts.named_buffers()}
    experts.load_(other.held)
    assert {name: tensor.data_ptr() for name, tensor in experts.named_buffers()} == pointers
    expected = FusedExperts(case.spec, other.held)(case.received()).rows_RH
    assert same_bits(experts(case.received()).rows_RH, expected)


def layers(group, exchange):
    """The outputs of a layer with fused experts, and with the reference."""
    layer = spec(hidden_size=100, intermediate_size=20, wire="mxfp8", weights="mxfp4", bias=True)
    x_TH, routes = batch(layer, 3 + 2 * group.rank, seed=group.rank)
    outputs = []
    for experts in ("fused", "reference"):
        plan = ty.plan([replace(layer, experts=experts)], group, exchange=exchange)
        outputs.append(build(plan, "moe")(x_TH, routes).float())
        plan.close()
    return outputs


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_layers_agree_with_the_reference_through_every_exchange(exchange):
    for fused_TH, reference_TH in on_ranks(2, layers, exchange, deadline=120.0):
        # Both are rounded to bf16 at the end; fused experts round between their products, too.
        distance = (fused_TH - reference_TH).norm() / reference_TH.norm()
        assert reference_TH.norm() > 0
        assert distance < 2**-7


def more_ranks_than_experts(group, exchange, experts):
    layer = spec(hidden_size=24, intermediate_size=20, num_experts=2, top_k=2, experts=experts)
    x_TH, routes = batch(layer, 3, seed=group.rank)
    plan = ty.plan([layer], group, exchange=exchange)
    y_TH = build(plan, "moe")(x_TH, routes).float()
    local = len(plan.local_experts("moe"))
    plan.close()
    return local, y_TH


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_more_ranks_than_experts(exchange):
    fused, reference = (
        on_ranks(3, more_ranks_than_experts, exchange, experts, deadline=120.0)
        for experts in ("fused", "reference")
    )
    assert [local for local, _ in fused] == [1, 1, 0]
    for (_, fused_TH), (_, reference_TH) in zip(fused, reference, strict=True):
        assert (fused_TH - reference_TH).norm() < 2**-7 * reference_TH.norm()


# -- What is declared, and refused ---------------------------------------------------------------------------


def test_every_weight_format_is_declared():
    assert set(FusedExperts.weight_formats) == set(WEIGHT_FORMATS)
    assert {weights for weights, _ in declared_pairs()} == set(WEIGHT_FORMATS)


def test_rows_on_a_cpu_are_refused_where_kernels_are_compiled(monkeypatch):
    case = FusedCase()
    experts = FusedExperts(case.spec, case.held)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(
        InputError,
        # Nothing of Triton's interpreter, which runs these kernels only as `install` mends it.
        match=r"were given rows on cpu; expected rows on a GPU; fix: use experts='grouped', which run anywhere$",
    ):
        experts(case.received())


def planned(group):
    try:
        ty.plan([spec(experts="fused")], group)
    except PlanError as error:
        return str(error), [alternative.changes for alternative in error.alternatives]
    return None


def test_a_plan_on_cpus_refuses_them_and_names_experts_that_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    for message, alternatives in on_ranks(2, planned):
        assert "experts=fused: its kernels need a GPU, and rows are on cpu; expected" in message
        assert {"experts": "grouped"} in alternatives
        assert all(changes["experts"] != "fused" for changes in alternatives)
    ty.draft([spec(experts="fused")], 2)  # of which nobody knows where it will run


def test_without_triton_a_plan_says_so_and_a_draft_is_the_same(monkeypatch):
    whole = str(ty.draft([spec(experts="fused")], 2))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    for message, alternatives in on_ranks(2, planned):
        assert "experts=fused: Triton is not installed; expected" in message
        assert {"experts": "grouped"} in alternatives
    assert str(ty.draft([spec(experts="fused")], 2)) == whole  # it may run elsewhere
    assert "Triton is not installed" in str(FusedExperts.runs_on(torch.device("cuda")))


def test_tiles_are_chosen_for_the_rows_that_have_an_expert_here(monkeypatch):
    """Of 16 rows that arrived each has one of 4 of 32 experts here; of 16 slots of a workspace few do."""
    case = FusedCase(R=16, L=4, K=2)
    experts, found = FusedExperts(replace(case.spec, num_experts=32), case.held), []
    choose = experts.choose_tiles
    monkeypatch.setattr(
        experts, "choose_tiles", lambda pairs, rows: found.append(pairs) or choose(pairs, rows)
    )
    for may_be_empty in (False, True):
        experts(replace(case.received(), may_be_empty=may_be_empty))
    arrived, slots = found
    assert slots == 16 * 2 * 4 / 32
    assert arrived == pytest.approx(slots / (1 - (28 / 32) ** 2))


def test_routes_of_another_layer_are_refused():
    case = FusedCase(K=2)
    with pytest.raises(InputError, match="the routes have 3 choices a row; expected 2"):
        FusedExperts(case.spec, case.held)(FusedCase(K=3).received())
