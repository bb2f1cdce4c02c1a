"""`bench experts --device cuda` and `bench layer`, all but the clock: cells, floors, checks, tables, pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.cli.runner import call
from tests.interpreted import run_interpreted
from tokenyard.errors import ContractError, UnknownName
from tokenyard.experts import ExpertsSpec, ReferenceExperts, activation
from tokenyard.formats import get
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows
from tokenyard_lab.bench import experts
from tokenyard_lab.bench.clock import graph_clock
from tokenyard_lab.bench.drawn_experts import DrawnExperts, check_replayed, check_results
from tokenyard_lab.bench.experts import Load, draw_batch, draw_routes, experts_record, floor_of
from tokenyard_lab.bench.experts_peers import grouped_peer
from tokenyard_lab.bench.machine_rates import Rates
from tokenyard_lab.bench.records import Document, Spread
from tokenyard_lab.bench.shapes import BESIDE, CASES, LAYER_PEERS, MODELS, PEERS, TARGETS, Cell, grid

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
# The rates that the floors of the figures were computed with: 4.45 TB/s, 790 TFLOP/s, and as much as it takes in fp8.
RATES = Rates(read=4.45e6, copy=4.2e6, product=790e6, fp8=1400e6)
FORMATS = ("bf16", "fp8_block128", "mxfp8", "mxint4", "nvfp4", "mxfp4")


def cell(case="A", weights="bf16", size=256):
    return Cell(case=case, shape=CASES[case], weights=weights, size=size)


# -- Cells and batches -------------------------------------------------------------------------------------


def test_the_grid_holds_every_figure():
    cells = grid()
    assert len(set(cells)) == len(cells) == 3 * 4 + 2 * 4 + 3 + (1 + 3 + 3 + 1) * 4
    assert sum(len(figures) for figures in TARGETS.values()) == 15 + 7 * 4
    for key, figures in PEERS.items():
        assert len(figures) == len(TARGETS[key])
    for (case, weights), figures in LAYER_PEERS.items():
        assert weights in CASES[case].weights
        assert len(figures) == len(CASES[case].sizes)
    for case, weights in TARGETS:
        assert [c.size for c in cells if (c.case, c.weights) == (case, weights)] == list(CASES[case].sizes)
    # A format is measured after the one that it is held against.
    for weights, other in BESIDE.items():
        assert [c.weights for c in cells].index(weights) > [c.weights for c in cells].index(other)


def test_the_grid_follows_the_options():
    assert {(c.case, c.weights) for c in grid(["A", "C"], ["mxfp8", "mxfp4"])} == {
        ("A", "mxfp8"),
        ("C", "mxfp4"),
    }
    with pytest.raises(UnknownName, match="unknown case 'X'"):
        grid(["X"])
    with pytest.raises(UnknownName, match="mxint3"):
        grid(weights=["mxint3"])
    with pytest.raises(UnknownName, match="unknown case 'A'"):
        grid(["A"], known=tuple(MODELS))


@pytest.mark.parametrize(("case", "size"), [(name, size) for name in CASES for size in CASES[name].sizes])
def test_batches_have_exactly_as_many_pairs_as_the_cell_says(case, size):
    shape = CASES[case]
    ids_RK, weights_RK = draw_routes(shape, size, seed=3)
    assert ids_RK.dtype == torch.int32
    assert ids_RK.shape == weights_RK.shape == (ids_RK.shape[0], shape.top_k)
    assert int((ids_RK >= 0).sum()) == shape.pairs(size)
    assert bool((ids_RK >= 0).any(dim=1).all())
    assert int(ids_RK.max()) < shape.local_experts
    if shape.all_local:
        assert ids_RK.shape[0] == size
    other, _ = draw_routes(shape, size, seed=4)
    assert not torch.equal(other, ids_RK)


def test_rows_arrive_as_their_experts_take_them():
    batch = draw_batch(cell(weights="fp8_block128", size=32), CPU, seed=0)
    assert batch.rows.format == get("fp8_block128")
    assert batch.results.rows_SH.shape == (batch.num_rows, 7168)
    assert draw_batch(cell("B", "nvfp4", 8), CPU, seed=0).rows.format == get("bf16")


# -- Floors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "weights", "floors"),
    [
        ("A", "bf16", (409, 635, 642, 913)),
        ("A", "fp8_block128", (210, 318, 323, 515)),
        ("B", "mxint4", (40, 199, 272, 457)),
        ("C", "mxfp4", (157, 377, 397)),
    ],
)
def test_floors_are_those_that_the_figures_were_chosen_by(case, weights, floors):
    shape = CASES[case]
    share = {"bf16": 2, "fp8_block128": 1, "mxint4": 0.5 + 2 / 32, "mxfp4": 0.5 + 1 / 32}[weights]
    for size, expected in zip(shape.sizes, floors, strict=True):
        routes = [draw_routes(shape, size, seed)[0] for seed in range(8)]
        load = Load(
            rows=sum(ids.shape[0] for ids in routes) / 8,
            experts_hit=sum(ids[ids >= 0].unique().numel() for ids in routes) / 8,
            bytes_per_expert=3 * shape.hidden_size * shape.intermediate_size * share,
        )
        floor = floor_of(cell(case, weights, size), load, RATES)
        assert floor.us == pytest.approx(expected, rel=0.08)
        assert floor.us == max(floor.by_bytes, floor.by_flops)


def test_without_a_rate_of_fp8_the_floor_is_of_bytes():
    load = Load(rows=5000, experts_hit=32, bytes_per_expert=44e6)
    which = cell(weights="fp8_block128", size=8192)
    without = dataclasses.replace(RATES, fp8=None)
    assert floor_of(which, load, without).us == floor_of(which, load, RATES).by_bytes


# -- Rows --------------------------------------------------------------------------------------------------


def figures(which, *times, is_h200=True, **more):
    load = Load(rows=100, experts_hit=30, bytes_per_expert=88e6)
    floor = floor_of(which, load, RATES)
    return experts_record(which, is_h200=is_h200, load=load, floor=floor, times=times, error=0.003, **more)


def test_a_record_has_median_spread_target_and_peer():
    record = figures(cell(), 660.0, 640.0, 650.0, 645.0, 655.0)
    assert (record.ours.median, record.ours.low, record.ours.high) == (650, 645, 655)
    assert (record.ours.least, record.ours.most) == (640, 660)
    assert (record.target, record.met) == (650, True)
    assert "target_is" not in record.details
    assert record.peers == {"recorded": Spread(639)}
    assert record.over(record.best_peer) == pytest.approx(650 / 639)
    assert record.over(record.floor.median) == pytest.approx(650 / record.floor.median)
    assert figures(cell(), 651.0, 652.0).met is False


def test_the_best_peer_counts():
    record = figures(cell(), 600.0, 600.0)
    faster = dataclasses.replace(record, peers={"torch": Spread(620.0), **record.peers})
    assert faster.best_peer == 620
    slower = dataclasses.replace(record, peers={"torch": Spread(700.0), **record.peers})
    assert slower.best_peer == 639


def test_some_formats_are_held_against_others_of_the_same_run():
    record = figures(cell(weights="mxfp8"), 110.0, 110.0, beside=100.0)
    assert record.target == pytest.approx(115)
    assert (record.met, record.details["target_is"]) == (True, "1.15 × fp8_block128")
    alone = figures(cell(weights="mxfp8"), 110.0, 110.0)
    assert (alone.target, alone.met, alone.best_peer) == (None, None, None)
    assert "target_is" not in alone.details


def test_figures_of_one_gpu_are_left_out_on_others():
    record = figures(cell(), 1.0, 2.0, is_h200=False)
    assert (record.target, record.met, record.peers, record.best_peer) == (None, None, {}, None)


def summary_of(*records):
    return Document(benchmark="experts-cuda", unit="µs", x="size", results=list(records)).summary()


def test_the_summary_counts_and_names_what_is_slow():
    assert summary_of(
        figures(cell(size=32), 425.0, 425.0),
        figures(cell(), 800.0, 800.0),
        figures(cell(weights="mxfp8"), 100.0, 100.0, beside=50.0),
        experts_record(cell("C", "mxfp4", 16), is_h200=True, note="ContractError: differs"),
    ) == [
        "1 of 3 targets met",
        "0 of 2 at least as fast as the best peer, 1 slower than 1.15 × it: A, bf16, size 256",
        "failed: C, mxfp4, size 16: ContractError: differs",
    ]


def test_figures_after_a_rest_are_beside_the_others():
    records = [
        figures(cell(size=32), 500.0, 500.0, rested_times=(420.0, 424.0, 460.0)),
        figures(cell(), 600.0, 600.0, rested_times=(800.0,)),
    ]
    assert [record.met for record in records] == [False, True]
    assert [record.rested_met for record in records] == [True, False]
    assert records[0].rested.median == 424
    assert records[1].over(records[1].best_peer, rested=True) == pytest.approx(800 / 639)
    assert (
        summary_of(*records)[-1] == "after a rest 1 targets met, 1 slower than 1.15 × it: A, bf16, size 256"
    )


# -- Experts that are made in no time ----------------------------------------------------------------------


def small_spec(weights, experts=5):
    return ExpertsSpec(
        hidden_size=256,
        intermediate_size=64,
        num_local_experts=experts,
        top_k=2,
        activation=activation("swiglu"),
        weights=weights,
    )


@pytest.mark.parametrize("weights", FORMATS)
def test_drawn_experts_are_decoded_as_the_format_decodes_them_and_differ(weights):
    drawn = DrawnExperts.draw(small_spec(weights), CPU)
    decoded = drawn.weights.decode(torch.float32)
    for expert in range(5):
        w13, w2 = drawn.expert(expert)
        assert torch.equal(decoded.w13[expert], w13)
        assert torch.equal(decoded.w2[expert], w2)
    assert not torch.equal(decoded.w2[0], decoded.w2[1])
    assert drawn.bytes_per_expert * 5 == drawn.weights.nbytes


@pytest.mark.parametrize("weights", ["bf16", "mxint4"])
def test_the_reference_is_that_of_the_reference_experts(weights):
    draw = torch.Generator().manual_seed(5)
    drawn = DrawnExperts.draw(small_spec(weights), CPU)
    x_RH = torch.randn(9, 256, generator=draw)
    ids_RK = torch.rand(9, 5, generator=draw).topk(2).indices.int()
    ids_RK[3] = torch.tensor([-1, 2])
    routes = LocalRoutes(ids_RK=ids_RK, weights_RK=torch.rand(9, 2, generator=draw))
    received = ReceivedRows(rows=get("fp32").encode(x_RH), routes=routes, counts_W=(9,))
    expected = ReferenceExperts(small_spec(weights), drawn.weights)(received)
    assert isinstance(expected, ExpertRows)
    y_RH = torch.zeros_like(x_RH)
    drawn.add_results(x_RH, ids_RK, routes.weights_RK, y_RH)
    assert check_results(y_RH, expected.rows_RH, "the reference") < 1e-5


def test_a_wrong_result_is_an_error():
    right = torch.ones(4, 8)
    with pytest.raises(ContractError, match=r"cell differs from float32 by 1\.00e-02"):
        check_results(right * 1.01, right, "cell")
    with pytest.raises(ContractError, match="nan"):
        check_results(right * torch.nan, right, "cell")
    with pytest.raises(ContractError, match="other bits in a replayed graph"):
        check_replayed(right, right * (1 + 1e-6), "cell")
    check_replayed(right, right.clone(), "cell")


def test_torchs_products_compute_these_experts(monkeypatch):
    monkeypatch.setitem(CASES, "A", tiny_case("A"))
    which = cell(size=6)
    batch = draw_batch(which, CPU, seed=0)
    drawn = DrawnExperts.draw(which.spec, CPU)
    products = []
    grouped_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda *arguments, **named: products.append(grouped_mm(*arguments, **named)) or products[-1],
    )
    peer = grouped_peer(drawn, [batch])
    assert peer is not None
    peer.work()
    results_NH = products[-1].float()
    ids_RK, weights_RK = batch.routes.ids_RK, batch.routes.weights_RK
    row_N, choice_N = (ids_RK >= 0).nonzero(as_tuple=True)
    order_N = ids_RK[row_N, choice_N].sort(stable=True).indices
    y_RH = torch.zeros(batch.num_rows, 128)
    y_RH.index_add_(0, row_N[order_N], results_NH * weights_RK[row_N, choice_N][order_N].unsqueeze(1))
    expected = torch.zeros_like(y_RH)
    drawn.add_results(batch.rows.decode(torch.float32), ids_RK, weights_RK, expected)
    assert check_results(y_RH, expected, "torch's products") < 6e-3
    assert grouped_peer(DrawnExperts.draw(cell(weights="mxint4", size=6).spec, CPU), [batch]) is None


def tiny_case(name):
    """The case with few and small experts, for kernels that are interpreted."""
    experts = 4 if name == "C" else 3
    total = 4 if name == "C" else 6
    return dataclasses.replace(
        CASES[name],
        hidden_size=128,
        intermediate_size=64,
        local_experts=experts,
        num_experts=total,
        top_k=2,
        sizes=(6,),
    )


# -- Documents, tables and pictures ------------------------------------------------------------------------


@pytest.fixture
def document():
    records = [figures(which, *(float(which.size + i) for i in range(3))) for which in grid()]
    records[0] = dataclasses.replace(records[0], peers={"torch": Spread(500.0), **records[0].peers})
    records[1] = experts_record(cell(), is_h200=True, note="ContractError: A differs from float32")
    details = {**records[4].details, "peer_not_measured": "RuntimeError: no kernel"}
    records[4] = dataclasses.replace(records[4], details=details)
    return Document(
        benchmark="experts-cuda",
        unit="µs",
        x="size",
        line="weights",
        columns=experts.COLUMNS,
        setup={"gpu": "NVIDIA H200", **RATES.as_setup()},
        notes=list(experts.NOTES),
        results=records,
    )


def test_saved_figures_are_shown(document, tmp_path):
    file, picture = tmp_path / "experts.json", tmp_path / "experts.png"
    file.write_text(json.dumps(document.as_dict()))
    shown = call("bench", "show", file, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    for words in (
        "recorded, µs",
        "recorded: the best that was measured before",
        "TB/s 4.45",
        "torch: F.grouped_mm",
        "RuntimeError: no kernel",
        "targets met",
        "failed: A, bf16, size 256: ContractError",
    ):
        assert words in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    lines = call("bench", "show", file, "--markdown").stdout.strip().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + len(grid())
    assert lines[2].startswith("| A | bf16 | 32 | 33.0 | 32.5–33.5 |")
    assert lines[3].startswith("| A | bf16 | 256 | failed |")


# -- The clock of graphs, on a GPU that is made up ---------------------------------------------------------


def test_graphs_take_turns_and_short_ones_are_replayed_often(monkeypatch):
    now, replayed = [0.0], []

    class Graph:
        def __init__(self):
            self.work = None

        def replay(self):
            replayed.append(self.work)
            now[0] += {"short": 100.0, "long": 40_000.0}[self.work]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3

    captured = []

    @contextlib.contextmanager
    def capture(graph):
        yield
        graph.work = captured[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock = graph_clock(torch.device("cuda"), 3)
    times = clock({"short": lambda: captured.append("short"), "long": lambda: captured.append("long")})
    assert captured == ["short", "short", "long", "long"]  # once to compile, once to capture
    assert times == {"short": pytest.approx([100.0] * 3), "long": pytest.approx([40_000.0] * 3)}
    order = [name for name, _ in itertools.groupby(replayed[4:])]
    assert order == ["short", "long", "short", "long", "short"]  # neighbors of two rounds are one run
    assert replayed[4:].count("short") == 4 * 150
    assert replayed[4:].count("long") == 4


# -- Measuring, with a clock of our own --------------------------------------------------------------------


INTERPRETED = """
import json, numpy, torch
from tests.exchange import interpreter
interpreter.install()
numpy.seterr(all="ignore")
from dataclasses import asdict
from lab.tests.bench.test_bench_experts_cuda import CASES, tiny_case
for name in CASES:
    CASES[name] = tiny_case(name)
from tokenyard_lab.bench import experts, layer_cuda, machine_rates, read_kernel
from tokenyard_lab.bench.shapes import MODELS, Case, cells_of, grid
from tokenyard.experts import FusedExperts

cpu = torch.device("cpu")
runs = []
def clock(works):
    for work in works.values():
        work()
    runs.append(list(works))
    return {name: [40.0, 44.0, 42.0] for name in works}
def rested(works):
    return {name: [30.0] for name in works}

machine_rates.READ_BYTES["cpu"] = 16 * 4 * read_kernel.BLOCK
machine_rates.SQUARE["cpu"] = 32
rates = machine_rates.measure_rates(cpu, clock)
sums = read_kernel.reading(torch.ones(3 * read_kernel.BLOCK))().tolist()
experts.ROTATION = 2
layer_cuda.ROTATION = 2
def measure(cells):
    machine = machine_rates.Machine(device=cpu, name="CPU", clock=clock, rates=rates)
    return [asdict(record) for record in experts.measure_experts(cells, kind=experts.FUSED, machine=machine)]
right = measure(grid({cases}))
shape = Case(hidden_size=128, intermediate_size=64, num_experts=4, local_experts=2, top_k=2,
             weights=("bf16", "fp8_block128"), sizes=(3,), tokens_a_rank=True)
cells = cells_of(shape) + grid(known=tuple(MODELS))[:{models}]
def measure_layers(cells):
    machine = machine_rates.Machine(device=cpu, name="CPU", clock=clock, rates=rates, rested=rested)
    found = layer_cuda.measure_layer(cells, machine)
    return [[asdict(record) for record in records] for records in found]
layers = measure_layers(cells)

compute = FusedExperts.compute
def wrong(self, received, **more):
    result = compute(self, received, **more)
    received.results.rows_SH[0] += 1
    return result
FusedExperts.compute = wrong
bad = measure(grid(["C"])) + measure_layers(cells[:1])[0]
print(json.dumps([rates.read, rates.product, sums, right, layers, bad]))
"""


# All formats are in the first cases.
FEW_CASES, ALL_CASES = ["A", "B", "C"], list(CASES)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FEW_CASES, id="few cases"),
        pytest.param(ALL_CASES, id="all cases", marks=pytest.mark.long),
    ],
)
def interpreted(request):
    models = 0 if request.param == FEW_CASES else 2
    script = INTERPRETED.replace("{cases}", str(request.param)).replace("{models}", str(models))
    return request.param, run_interpreted(script)


def test_cells_are_checked_and_timed(interpreted):
    cases, (read, product, sums, right, *_) = interpreted
    assert read == 16 * 4 * 16 * 1024 / 42
    assert product == 2 * 32**3 / 42
    assert sums == [16 * 1024] * 3
    assert len(right) == (3 + 2 + 1 if cases == FEW_CASES else 3 + 2 + 1 + 1 + 3 + 3 + 1)
    for record in right:
        assert record["note"] == ""
        assert record["ours"]["median"] == 42 / 2
        assert 1e-6 < record["details"]["relative_error"] < 6e-3
        assert record["floor"]["median"] > 0
        assert 1 <= record["details"]["experts_hit"] <= 4
    by_format = {record["parameters"]["weights"]: record for record in right}
    # torch has grouped products of bf16 on CPUs, and none of fp8.
    assert by_format["bf16"]["details"]["peer"] == "F.grouped_mm"
    assert by_format["bf16"]["peers"]["torch"]["median"] == 42 / 2
    assert by_format["fp8_block128"]["peers"] == {}
    assert by_format["fp8_block128"]["details"]["peer_not_measured"]
    assert by_format["mxint4"]["peers"] == {}
    assert "peer_not_measured" not in by_format["mxint4"]["details"]
    # Beside those of the same run.
    assert by_format["mxfp8"]["target"] == pytest.approx(1.15 * 21)
    assert by_format["nvfp4"]["target"] == pytest.approx(1.15 * 21)


def test_layers_are_checked_and_timed(interpreted):
    cases, (*_, layers, _) = interpreted
    measured = 2 if cases == FEW_CASES else 4
    wholes, alone = ([pair[place] for pair in layers] for place in range(2))
    given = [(record["parameters"]["weights"], record["details"]["wire"]) for record in wholes]
    expected = [("bf16",) * 2, ("fp8_block128",) * 2, ("fp8_block128",) * 2, ("mxfp4", "mxfp8")]
    assert given == expected[:measured]
    names = [record["parameters"].get("case") for record in wholes]
    assert names == [None, None, "FLASH", "FLASH"][:measured]
    for whole, rows in zip(wholes, alone, strict=True):
        assert (whole["parameters"]["measured"], rows["parameters"]["measured"]) == (
            "whole layer",
            "rows alone",
        )
        for record in (whole, rows):
            assert record["note"] == ""
            # Two batches, and each of two ranks has its part of the time.
            assert record["ours"]["median"] == record["peers"]["allgather"]["median"] == 42 / 2 / 2
            assert record["ratios"]["ours / allgather"]["median"] == 1
        assert whole["rested"]["median"] == 30 / 2 / 2
        assert whole["floor"]["median"] > rows["floor"]["median"] > 0
        assert 1e-6 < whole["details"]["relative_error"] < 6e-3
        assert 1e-6 < whole["details"]["allgather_relative_error"] < 6e-3
    # The tiny case has a size that no figure is known for; the one of the model has one.
    assert all("DeepGEMM" not in record["peers"] for record in alone)


def test_a_layer_stands_beside_a_peer_with_links():
    records = [cell(name, "fp8_block128", 8).figure_of(LAYER_PEERS) for name in MODELS]
    assert records == [225, 637, 404]
    assert cell("FLASH", "mxfp4", 8).figure_of(LAYER_PEERS) is None


def test_a_wrong_kernel_has_no_speed(interpreted):
    bad = interpreted[1][-1]
    assert len(bad) == 2
    for record in bad:
        assert record["ours"] is None
        assert "differs from float32" in record["note"]


# -- Errors ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("command", "fix"), [("experts", "leave out --device"), ("layer", "measure the halves")]
)
def test_without_a_gpu_the_error_says_so(command, fix):
    refused = call("bench", command, "--device", "cuda")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "sees no GPU" in refused.stderr
    assert fix in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["experts", "--device", "cuda", "--cells", "X"], "unknown case 'X'"),
        (["experts", "--device", "cuda", "--weights", "fp64"], "fp64"),
        (["experts", "--device", "cuda", "--tokens", 5], "--tokens 5 with --device cuda"),
        (["experts", "--device", "cuda", "--rounds", 1], "at least 2"),
        (["experts", "--device", "cuda", "--plot", "picture.bmp3"], ".png"),
        (["experts", "--cells", "A"], "--cells A with --device cpu"),
        (["layer", "--device", "cpu"], "--device cpu"),
        (["layer", "--top-k", 300], "top_k is 300"),
        (["layer", "--ranks", 3], "256 experts on 3 ranks"),
        (["layer", "--weights", "bf61"], "bf61"),
        (["layer", "--cells", "A"], "unknown case 'A'"),
        (["layer", "--cells", "V3", "--top-k", 3], "--top-k 3 with --cells"),
    ],
)
def test_options_are_checked_before_the_gpu_is_asked(options, words):
    refused = call("bench", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr
