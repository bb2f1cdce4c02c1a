"""Fused experts on a GPU: every declared pair of formats, hundreds of batches, graphs, and a layer on several ranks.

A kernel is compiled for each format, shape and tile configuration, which takes seconds: the tests share a few shapes,
and vary what needs no other kernel. They do not depend on each other: `pytest -n 6` compiles side by side.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.experts.fused_cases import FusedCase, check_case, declared_pairs, exact, same_bits
from tests.experts.row_block_cases import SCALES, WIDTHS, all_codes, assert_recoded, drawn_rows, moved
from tests.gpu.fused_on_gpu import (
    BASE,
    CODES,
    NUMBERS,
    built,
    in_lines,
    is_hopper,
    multiplies_e4m3,
    relative,
    within,
)
from tests.gpu.test_one_sided_cuda import there
from tests.models import batch, build, on_ranks, spec
from tokenyard import formats
from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.suites import assert_passed, check_experts
from tokenyard.conformance.twin import twin
from tokenyard.errors import ContractError, InputError
from tokenyard.experts import ExpertsSpec, ExpertWeights, FusedExperts, ReferenceExperts, activation
from tokenyard.experts.fused import kernel_weights, launch, packing, recoding
from tokenyard.experts.fused.tile_configs import (
    TileConfig,
    TileConfigs,
)
from tokenyard.formats import QuantizedMatrix, weight_format
from tokenyard.rows import LocalRoutes, ReceivedRows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FOUR_BIT = list(packing.LARGEST_SCALE)


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
    with pytest.raises(InputError, match=r"w2 has an output that would change .*fix: make new experts"):
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
    with pytest.raises(ContractError, match="captured without finalizing"), torch.cuda.graph(graph):
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
    assert max(on_ranks(2, run_captured, layer, 16, device="cuda", deadline=120.0)) < 2**-6
