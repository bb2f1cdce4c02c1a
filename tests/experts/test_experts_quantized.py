"""Experts whose weights stay quantized: right for every format and shape, in little memory, as one type."""

from __future__ import annotations

import functools
import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, spec
from tests.products import product
from tokenyard import formats
from tokenyard.conformance.cases import Case, excess, random_weights, run_case, same_bits
from tokenyard.conformance.experts_bound import draw_batch, exact
from tokenyard.conformance.oracle import quantizing_error
from tokenyard.duties import Duty, Party
from tokenyard.errors import InputError, PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import ACTIVATIONS, EXPERTS, ExpertsSpec, ExpertWeights, activation, tiles
from tokenyard.experts.spec import takes_rows
from tokenyard.formats import FORMATS, WEIGHT_FORMATS, weight_format
from tokenyard.group import thread_groups
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, UnfinalizedRows

ROOT = Path(__file__).resolve().parents[2]
QUANTIZED = [name for name, kind in WEIGHT_FORMATS.items() if kind.quantized]
CLASSES = [EXPERTS["reference"], EXPERTS["grouped"]]
every_format = pytest.mark.parametrize("weights", QUANTIZED)
every_class = pytest.mark.parametrize("cls", CLASSES)


def drawn(seed: int, weights: str):
    """A spec and a batch of any shape. One in six rows' worth of corners: no rows, one row, one expert for all."""
    chance = random.Random(f"{seed} {weights}")
    drawn_spec = ExpertsSpec(
        hidden_size=chance.choice((1, 16, 31, 32, 33, 100, 128, 130, 257)),
        intermediate_size=chance.choice((1, 7, 16, 33, 40, 64, 129)),
        num_local_experts=chance.choice((1, 2, 5, 9)),
        top_k=chance.choice((1, 2, 3, 8)),
        activation=activation(chance.choice(sorted(ACTIVATIONS))),
        bias=chance.random() < 0.5,
        weights=weights,
        weight_on=chance.choice(("output", "input")),
        inner=chance.choice((None, *map(formats.get, weight_format(weights).inner_formats))),
    )
    case = draw_batch(drawn_spec, rows=chance.choice((0, 1, 1, 5, 17, 60)), seed=seed)
    routes = chance.choice(("any", "any", "one expert", "few experts"))
    if routes == "one expert":
        case.routes.ids_RK.fill_(drawn_spec.num_local_experts - 1)
    elif routes == "few experts":
        case.routes.ids_RK.clamp_(max=1)
    return case


@every_class
@every_format
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_any_shape_is_within_the_bound_of_a_bf16_product(cls, weights, part):
    """300 shapes for each class, and finishing by hand gives the bits of finalizing."""
    for seed in range(30 * part, 30 * part + 30):
        case = drawn(seed, weights)
        experts, received = case.build(cls), case.received(cls)
        finished, unfinished = experts(received, finalize=True), experts(received, finalize=False)
        assert type(finished) is ExpertRows
        assert type(unfinished) is UnfinalizedRows
        assert excess(finished.rows_RH, *exact(case)) <= 0, (seed, case.spec)
        assert same_bits(unfinished.finish().rows_RH, finished.rows_RH), (seed, case.spec)


@every_class
@pytest.mark.parametrize("inner", ["fp8_block128", "fp8_block128(power_of_two_scales=True)"])
def test_numbers_between_the_products_are_quantized_once_where_the_layer_says_so(cls, inner):
    quantized = ExpertsSpec(
        hidden_size=64,
        intermediate_size=200,
        num_local_experts=1,
        top_k=1,
        activation=activation("swiglu"),
        weights="fp8_block128",
        inner=formats.get(inner),
    )
    case = draw_batch(quantized, rows=9)
    case.routes.ids_RK.zero_()
    case.routes.weights_RK.fill_(1.0)
    (w13,), (w2,) = case.weights.decode().plain_matrices()
    hidden = quantized.activation.reproducible(case.x_RH.float() @ w13.T)
    expected = formats.get(inner).encode(hidden).decode(torch.float32) @ w2.T
    found = case.result(cls)
    assert (
        found - expected
    ).norm() < 2**-12 * expected.norm()  # but for a code on the other side of a middle
    exact_RH = replace(case, spec=replace(quantized, inner=None)).result(cls)
    assert 2**-7 * expected.norm() < (found - exact_RH).norm() < 2**-4 * expected.norm()


def test_the_bound_around_quantized_numbers_is_no_wider_than_it_must_be():
    """Numbers in the middle between two codes, all moved in one direction: the bound is reached by more than a half."""
    inner = formats.get("fp8_block128")
    numbers = torch.full((1, 128), 1.0 + 2.0**-4 + 2.0**-12)
    numbers[0, 0] = 448.0  # the scale is 1
    moved = (inner.encode(numbers).decode(torch.float32) - numbers).double().abs()
    bound = quantizing_error(inner, numbers.double())
    assert (moved <= bound).all()
    assert (moved[0, 1:] > bound[0, 1:] / 2).all()


def test_the_bound_notices_weights_that_were_not_decoded():
    case = drawn(3, "mxint4")
    wrong = replace(
        case, weights=case.weights.select([0] * case.spec.num_local_experts).decode().quantize("mxfp4")
    )
    spec_of = replace(case.spec, weights="mxfp4")
    assert excess(replace(wrong, spec=spec_of).result(CLASSES[1]), *exact(case)) > 0


# -- Rows in every format that is declared -------------------------------------------------------------------

ROWS = {
    "fp8_block128": ["bf16", "fp8_block128"],
    "mxfp8": ["bf16", "mxfp8", "mxfp8(alignment=256)"],
    "nvfp4": ["bf16", "nvfp4"],
    "mxfp4": ["bf16", "mxfp8", "mxfp8(alignment=256)"],
    "mxint4": ["bf16"],
}


@every_format
def test_which_rows_are_taken_is_declared(weights):
    taken = {rows for rows in FORMATS if takes_rows(weights, formats.get(rows))}
    plain = {"bf16", "fp16", "fp32"}
    assert taken - plain == {rows.partition("(")[0] for rows in ROWS[weights]} - plain
    for cls in CLASSES:
        for rows in FORMATS:
            asked = spec(weights=weights, expert_rows=rows, dtype=torch.float32, experts=cls)
            if rows in taken:
                ty.draft([asked], 2)
            else:
                with pytest.raises(PlanError, match=f"experts with {weights} weights compute on plain rows"):
                    ty.draft([asked], 2)


@every_format
def test_layers_match_the_oracle_through_every_exchange(weights):
    # nvfp4 rows are decoded by experts that do not compute on them.
    wires = list(dict.fromkeys([*ROWS[weights], "nvfp4"]))
    for number, (exchange, wire) in enumerate(itertools.product(EXCHANGES, wires)):
        case = Case(
            tokens=(3, 5),
            hidden_size=2880 if "alignment" in wire else 100,
            intermediate_size=33,
            wire=wire,
            exchange=exchange,
            experts=("reference", "grouped")[number % 2],
            weights=weights,
            bias=number % 3 == 0,
            seed=number,
        )
        for outcome in on_ranks(2, run_case, case):
            # Grouped experts may sum in another order than their twin in one process.
            off = [c for c in outcome.complaints() if case.experts == "reference" or "twin" not in c]
            assert not off, (case, off)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_mxfp4_weights_with_aligned_mxfp8_rows(exchange):
    """The case of #40960: H 2880, rows padded to 3072, weights padded to nothing."""
    outputs = on_ranks(2, aligned, exchange)
    for found, expected, duties in outputs:
        assert found.shape == (4, 2880)
        assert same_bits(found, expected)
        assert duties[Duty.QUANTIZE] is duties[Duty.PAD] is Party.SENDER


def aligned(group, exchange):
    layer = spec(
        hidden_size=2880,
        intermediate_size=96,
        activation="gpt_oss",
        bias=True,
        wire="mxfp8(alignment=256)",
        expert_rows="mxfp8(alignment=256)",
        weights="mxfp4",
        experts="reference",
    )
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, 4, seed=group.rank)
    found = build(plan, "moe")(x_TH, routes)
    # The same layer with the decoded weights in float32: decoding is all that the format adds.
    plain = replace(layer, weights="fp32")
    wide = ty.plan([plain], group, exchange=exchange)
    decoded = random_weights(layer, 0).select(plan.local_experts("moe")).decode()
    decoded = replace(decoded, b13=decoded.b13.float(), b2=decoded.b2.float())
    return found, ty.MoELayer(wide, "moe", decoded)(x_TH, routes), plan.wiring("moe").duties


# -- #39315: mxint4, m 1 and 33, n 7168, k 512 both ways round, top-k 8 ---------------------------------------


@functools.cache
def mxint4_experts(hidden_size: int, intermediate_size: int) -> tuple[ExpertsSpec, ExpertWeights]:
    """Nine experts where the report has 384."""
    layer = ExpertsSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=9,
        top_k=8,
        activation=activation("swiglu"),
        weights="mxint4",
    )
    plain = ExpertWeights(
        **{
            name: torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(shape[-1] ** -0.5)
            for name, shape in layer.shapes().items()
        }
    )
    return layer, plain.quantize("mxint4")


@pytest.mark.parametrize(("tokens", "sizes"), product([1, 33], [(512, 7168), (7168, 512)]))
def test_39315_mxint4_kernel_against_reference_against_float32(tokens, sizes):
    hidden_size, intermediate_size = sizes
    draw = torch.Generator().manual_seed(tokens)
    layer, weights = mxint4_experts(hidden_size, intermediate_size)
    x_TH = torch.randn(tokens, hidden_size, generator=draw).bfloat16()
    ids_TK = torch.rand(tokens, 9, generator=draw).argsort(1)[:, :8].int()
    # The reference writes every product out: it gets one token, and of many tokens one choice.
    few = slice(0, 1)
    routes = LocalRoutes(ids_RK=ids_TK, weights_RK=torch.rand(tokens, 8, generator=draw))

    def received(rows: slice, choices: slice = slice(None)) -> ReceivedRows:
        some = LocalRoutes(ids_RK=routes.ids_RK[rows, choices], weights_RK=routes.weights_RK[rows, choices])
        x = x_TH[rows]
        return ReceivedRows(rows=formats.get("bf16").encode(x), routes=some, counts_W=(x.shape[0],))

    kernel = EXPERTS["grouped"](layer, weights, adopt=True)
    y_TH = kernel(received(slice(None))).rows_RH
    # A second reference, independent of ours: unpack by hand, then plain float32 products.
    w13, w2 = (unpacked(part.payloads) for part in (weights.w13, weights.w2))
    expected_TH = torch.zeros(tokens, hidden_size)
    for expert in range(9):
        token_N, choice_N = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up = (x_TH[token_N].float() @ w13[expert].T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        expected_TH.index_add_(0, token_N, rows * routes.weights_RK[token_N, choice_N].unsqueeze(1))
    assert relative(y_TH, expected_TH) < 1e-5
    one = slice(0, 1) if tokens > 1 else slice(None)
    reference = replace(layer, top_k=1)
    slow = EXPERTS["reference"](reference, weights, adopt=True)(received(few, one)).rows_RH
    fast = EXPERTS["grouped"](reference, weights, adopt=True)(received(few, one)).rows_RH
    assert relative(fast, slow) < 1e-5
    if tokens == 1:
        assert relative(slow, expected_TH) < 1e-5


def unpacked(payloads) -> torch.Tensor:
    data = payloads["data"].to(torch.int32)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    signed = torch.where(codes > 7, codes - 16, codes).float()
    return (signed.unflatten(-1, (-1, 32)) * payloads["scales"].float().unsqueeze(-1)).flatten(-2)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- Weights: selected, replaced in place, refused -----------------------------------------------------------


@every_class
@every_format
def test_loading_is_in_place(cls, weights):
    case, other = draw_batch(drawn(1, weights).spec, seed=1), draw_batch(drawn(1, weights).spec, seed=2)
    experts = case.build(cls)
    pointers = [tensor.data_ptr() for tensor in experts.weights.by_name().values()]
    before = case.weights.decode()
    experts.load_(other.weights)
    assert [tensor.data_ptr() for tensor in experts.weights.by_name().values()] == pointers
    assert same_bits(experts.weights.w13.decode(), other.weights.w13.decode())
    assert same_bits(case.weights.w13.decode(), before.w13)  # the caller's are a copy
    assert same_bits(experts(case.received(cls)).rows_RH, replace(case, weights=other.weights).result(cls))


@every_format
def test_weights_know_their_bytes_and_their_parts(weights):
    plain = random_weights(spec(bias=True, weights="bf16", hidden_size=256, intermediate_size=128), 0)
    held = plain.quantize(weights)
    matrices = weight_format(weights).nbytes(5, 256, 256) + weight_format(weights).nbytes(5, 256, 128)
    assert held.nbytes == matrices + plain.b13.nbytes + plain.b2.nbytes
    assert held.select([4, 1]).nbytes * 5 == held.nbytes * 2
    assert same_bits(held.select([4, 1]).w2.decode(), held.w2.decode()[[4, 1]])
    assert held.b13 is plain.b13
    if weights in ("mxint4", "mxfp4"):
        assert matrices <= 0.29 * (plain.w13.nbytes + plain.w2.nbytes)
    none = held.select([])
    assert none.w13.shape == (0, 256, 256)
    assert none.w13.decode().shape == (0, 256, 256)


def test_plain_weights_for_a_quantized_layer_are_refused_and_the_fix_is_named():
    layer = spec(weights="mxfp4")
    (group,) = thread_groups(1)
    plan = ty.plan([layer], group)
    plain = random_weights(replace(layer, weights="bf16"), 0)
    with pytest.raises(
        InputError,
        match=r"layer 'moe', rank 0: w13 is a tensor bfloat16\[5, 16, 32\]; expected a mxfp4 matrix "
        r"\[5, 16, 32\].*fix: quantize plain weights first, `weights.quantize\('mxfp4'\)`",
    ):
        ty.MoELayer(plan, "moe", plain)
    with pytest.raises(InputError, match=r"w13 is a mxint4 matrix \[5, 16, 32\]; expected a mxfp4 matrix"):
        ty.MoELayer(plan, "moe", plain.quantize("mxint4"))
    with pytest.raises(InputError, match=r"w13 is a mxfp4 matrix \[3, 16, 32\]; expected .*\[5, 16, 32\]"):
        ty.MoELayer(plan, "moe", replace(plain.quantize("mxfp4").select([0, 1, 2]), experts=None))
    with pytest.raises(InputError, match="quantizing twice loses twice"):
        plain.quantize("mxfp4").quantize("mxint4")
    layer = ty.MoELayer(plan, "moe", plain.quantize("mxfp4"))
    with pytest.raises(InputError, match=r"w2 is a tensor bfloat16.*expected a mxfp4 matrix"):
        layer.experts.load_(replace(plain.quantize("mxfp4"), w2=plain.w2))
    wide = ty.plan([replace(spec("wide"), weights="bf16")], group)
    with pytest.raises(InputError, match=r"w13 is a mxfp4 matrix.*expected bfloat16\[5, 16, 32\]"):
        ty.MoELayer(wide, "wide", plain.quantize("mxfp4"))


@every_class
@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casts_of_a_model_leave_quantized_weights_alone(cls, weights, dtype):
    """`model.half()` is for what is plain. Codes and scales rounded to another dtype would be other weights."""
    case = drawn(3, weights)
    experts, received = case.build(cls), case.received(cls)
    expected = experts(received).rows_RH
    for cast in (lambda model: model.to(dtype), lambda model: model.to("cpu", dtype)):
        cast(torch.nn.Sequential(experts))
        for name, tensor in case.weights.by_name().items():
            assert experts.get_buffer(name).dtype == tensor.dtype
        assert same_bits(experts(received).rows_RH, expected)
    experts.to("meta", dtype)  # moved, and nothing else
    assert all(tensor.is_meta for tensor in experts.buffers())
    for name, tensor in case.weights.by_name().items():
        assert experts.get_buffer(name).dtype == tensor.dtype


def test_a_buffer_of_another_dtype_is_found():
    """However it got there: found, not computed with."""
    case = drawn(0, "fp8_block128")
    experts = case.build(CLASSES[1])
    experts.w13_data = experts.w13_data.half()
    with pytest.raises(InputError, match=r"a fp8_block128 matrix .* is held in data float16"):
        experts(case.received(CLASSES[1]))


# -- Memory and threads --------------------------------------------------------------------------------------


def test_tiles_cover_every_output_once():
    for outputs, inputs in [(1, 1), (300, 2048), (7, 10**7), (4096, 7168)]:
        found = tiles.tiles([(0, slice(0, 2)), (3, slice(2, 9))], outputs, inputs)
        for expert in (0, 3):
            mine = [tile for tile in found if tile.expert == expert]
            assert mine[0].first == 0
            assert mine[-1].last == outputs
            assert all(a.last == b.first for a, b in itertools.pairwise(mine))
        assert all((tile.last - tile.first) * inputs <= max(tiles.TILE_ELEMENTS, inputs) for tile in found)


def test_rows_that_are_wider_than_a_tile():
    assert [
        tile[2:] for tile in tiles.tiles([(0, slice(0, 2))], outputs=2, inputs=tiles.TILE_ELEMENTS + 1)
    ] == [
        (0, 1),
        (1, 2),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_one_expert_with_all_rows_is_shared_by_the_threads(threads, monkeypatch):
    """A thread computes tiles, so one expert keeps all of them busy; their number changes no bit."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 512)
    case = drawn(1, "mxfp4")
    case.routes.ids_RK.fill_(0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = case.result(CLASSES[1])
        torch.set_num_threads(1)
        assert same_bits(found, case.result(CLASSES[1]))
    finally:
        torch.set_num_threads(before)


PEAK = """
import torch
from tests.memory import resident
from tokenyard.experts import EXPERTS, ExpertsSpec, ExpertWeights, activation
from tokenyard.formats import QuantizedMatrix, get, weight_format
from tokenyard.rows import LocalRoutes, ReceivedRows

def run(L, H, I):
    spec = ExpertsSpec(hidden_size=H, intermediate_size=I, num_local_experts=L, top_k=2,
                       activation=activation("swiglu"), weights="{weights}")
    format = weight_format(spec.weights)
    def held(*shape):
        payloads = {{
            name: torch.ones((shape[0], *p.shape), dtype=torch.uint8).to(p.dtype)
            for name, p in format.payloads(*shape[1:]).items()
        }}
        return QuantizedMatrix(format=format, shape=shape, payloads=payloads)
    shapes = spec.shapes()
    weights = ExpertWeights(w13=held(*shapes["w13"]), w2=held(*shapes["w2"]))
    experts = EXPERTS["grouped"](spec, weights, adopt=True)
    ids = torch.arange(2 * L).view(L, 2) % L
    rows = get("bf16").encode(torch.ones(L, H, dtype=torch.bfloat16))
    experts(ReceivedRows(rows=rows, routes=LocalRoutes(ids_RK=ids.int(), weights_RK=torch.ones(L, 2)), counts_W=(L,)))
    return weights.nbytes

run(2, 1024, 1024)  # threads, tables, tiles
before = resident("VmHWM")
nbytes = run(24, 4096, 1024)
print((resident("VmHWM") - before) / nbytes)
"""


@pytest.mark.parametrize("weights", ["mxint4"])
def test_memory_stays_near_the_quantized_bytes(weights):
    """Beside the weights: the rows (under 1% here) and a tile per thread. In bf16: 3.6 times as much."""
    command = [sys.executable, "-c", PEAK.format(weights=weights)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.9 <= float(done.stdout) <= 1.25


@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4", "mxint4", "fp8_block128"])
def test_a_tile_is_in_memory_of_its_own_row_by_row(weights):
    """Also where codes are padded: what is multiplied does not depend on what stood beside it."""
    matrix = WEIGHT_FORMATS[weights]().quantize(torch.randn(6, 40))
    tile = tiles._tile(matrix, tiles.Tile(0, slice(0, 1), 1, 5))
    assert tile.is_contiguous()
    assert torch.equal(tile, matrix.decode()[1:5])
    plain_OD = torch.randn(6, 40)
    tile = tiles._tile(plain_OD, tiles.Tile(0, slice(0, 1), 1, 5))
    tile.zero_()
    assert (plain_OD != 0).all()
