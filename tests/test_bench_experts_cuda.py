"""`bench experts --device cuda` and `bench layer`, all but the clock: cells, floors, checks, tables, pictures."""

from __future__ import annotations

import contextlib
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
from tokenyard.lab.bench import expert_figures, layer_figures
from tokenyard.lab.bench.drawn_experts import DrawnExperts, check_replayed, check_results
from tokenyard.lab.bench.expert_figures import (
    BESIDE,
    CASES,
    PEER,
    TARGETS,
    Cell,
    Load,
    floor_of,
    grid,
    result,
)
from tokenyard.lab.bench.experts_cuda import draw_batch, draw_routes, spec_of
from tokenyard.lab.bench.graph_clock import graph_clock
from tokenyard.lab.bench.grouped_peers import peer_of
from tokenyard.lab.bench.layer_figures import LayerTimes, layer_grid, layer_result
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows

ROOT = Path(__file__).resolve().parent.parent
H200 = "NVIDIA H200"
CPU = torch.device("cpu")
# The rates that the floors of the figures were computed with: 4.45 TB/s, 790 TFLOP/s, and as much as it takes in fp8.
RATES = {"read": 4.45e6, "bf16": 790e6, "fp8": 1400e6}
FORMATS = ("bf16", "fp8_block128", "mxfp8", "mxint4", "nvfp4", "mxfp4")


def cell(case="A", weights="bf16", size=256):
    return Cell(case=case, weights=weights, size=size)


# -- Cells and batches -------------------------------------------------------------------------------------


def test_the_grid_holds_every_figure():
    cells = grid()
    assert len(set(cells)) == len(cells) == 3 * 4 + 2 * 4 + 3 + (1 + 3 + 3 + 1) * 4
    assert sum(len(figures) for figures in TARGETS.values()) == 15 + 7 * 4
    for key, figures in PEER.items():
        assert len(figures) == len(TARGETS[key])
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
        floor = floor_of(cell(case, weights, size), load, **RATES)
        assert floor.us == pytest.approx(expected, rel=0.08)
        assert floor.us == max(floor.by_bytes, floor.by_flops)


def test_without_a_rate_of_fp8_the_floor_is_of_bytes():
    load = Load(rows=5000, experts_hit=32, bytes_per_expert=44e6)
    which = cell(weights="fp8_block128", size=8192)
    assert floor_of(which, load, **RATES | {"fp8": None}).us == floor_of(which, load, **RATES).by_bytes


# -- Rows --------------------------------------------------------------------------------------------------


def figures(which, *times, gpu=H200, **more):
    load = Load(rows=100, experts_hit=30, bytes_per_expert=88e6)
    floor = floor_of(which, load, **RATES)
    return result(which, gpu, load=load, floor=floor, times=times, error=0.003, **more)


def test_a_row_has_median_spread_figure_and_peer():
    row = figures(cell(), 660.0, 640.0, 650.0, 645.0, 655.0)
    assert (row["us"], row["us_low"], row["us_high"]) == (650, 645, 655)
    assert (row["us_min"], row["us_max"]) == (640, 660)
    assert (row["target_us"], row["met"], row["target_is"]) == (650, True, None)
    assert (row["recorded_peer_us"], row["best_peer_us"], row["peer_us"]) == (639, 639, None)
    assert row["peer_ratio"] == pytest.approx(650 / 639)
    assert row["floor_ratio"] == pytest.approx(650 / row["floor_us"])
    assert figures(cell(), 651.0, 652.0)["met"] is False


def test_the_best_peer_counts():
    row = figures(cell(), 600.0, 600.0)
    row |= expert_figures.peer_fields(row, 620.0, "F.grouped_mm")
    assert (row["peer_us"], row["best_peer_us"], row["peer"]) == (620, 620, "F.grouped_mm")
    slower = expert_figures.peer_fields(row, 700.0, "F.grouped_mm")
    assert (slower["peer_us"], slower["best_peer_us"]) == (700, 639)


def test_some_formats_are_held_against_others_of_the_same_run():
    row = figures(cell(weights="mxfp8"), 110.0, 110.0, beside_us=100.0)
    assert row["target_us"] == pytest.approx(115)
    assert (row["met"], row["target_is"]) == (True, "1.15 × fp8_block128")
    alone = figures(cell(weights="mxfp8"), 110.0, 110.0)
    assert [alone[name] for name in ("target_us", "met", "target_is", "best_peer_us")] == [None] * 4


def test_figures_of_one_gpu_are_left_out_on_others():
    row = figures(cell(), 1.0, 2.0, gpu="NVIDIA A100")
    names = ("target_us", "met", "recorded_peer_us", "best_peer_us", "peer_ratio")
    assert [row[name] for name in names] == [None] * 5


def test_the_summary_counts_and_names_what_is_slow():
    rows = [
        figures(cell(size=32), 425.0, 425.0),
        figures(cell(), 800.0, 800.0),
        figures(cell(weights="mxfp8"), 100.0, 100.0, beside_us=50.0),
        result(cell("C", "mxfp4", 16), H200, note="ContractError: differs"),
    ]
    assert expert_figures.summary(rows) == [
        "1 of 2 figures reached",
        "0 of 1 within 1.15 × (mxfp8 of fp8_block128 and nvfp4 of mxint4)",
        "0 of 2 at least as fast as the best peer, 1 slower than 1.15 × it: A, bf16, 256 rows",
    ]
    assert expert_figures.missed(rows) == ["C, mxfp4, 16 tokens: ContractError: differs"]


def test_figures_after_a_rest_are_beside_the_others():
    rows = [
        figures(cell(size=32), 500.0, 500.0, rested_times=(420.0, 424.0, 460.0)),
        figures(cell(), 600.0, 600.0, rested_times=(800.0,)),
    ]
    assert [row["met"] for row in rows] == [False, True]
    assert [row["rested_met"] for row in rows] == [True, False]
    assert rows[0]["rested_us"] == 424
    assert rows[1]["rested_peer_ratio"] == pytest.approx(800 / 639)
    assert expert_figures.summary(rows)[-1] == (
        "after a rest 1 figures reached, 1 slower than 1.15 × the best peer: A, bf16, 256 rows"
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
    drawn = DrawnExperts.draw(spec_of(CASES["A"], "bf16"), CPU)
    products = []
    grouped_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda *arguments, **named: products.append(grouped_mm(*arguments, **named)) or products[-1],
    )
    work = peer_of(drawn.weights, [batch])
    assert work is not None
    work()
    results_NH = products[-1].float()
    ids_RK, weights_RK = batch.routes.ids_RK, batch.routes.weights_RK
    row_N, choice_N = (ids_RK >= 0).nonzero(as_tuple=True)
    order_N = ids_RK[row_N, choice_N].sort(stable=True).indices
    y_RH = torch.zeros(batch.num_rows, 128)
    y_RH.index_add_(0, row_N[order_N], results_NH * weights_RK[row_N, choice_N][order_N].unsqueeze(1))
    expected = torch.zeros_like(y_RH)
    drawn.add_results(batch.rows.decode(torch.float32), ids_RK, weights_RK, expected)
    assert check_results(y_RH, expected, "torch's products") < 6e-3
    assert peer_of(DrawnExperts.draw(spec_of(CASES["A"], "mxint4"), CPU).weights, [batch]) is None


def tiny_case(name):
    """The case with few and small experts, for kernels that are interpreted."""
    import dataclasses

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
    rows = [figures(which, *(float(which.size + i) for i in range(3))) for which in grid()]
    rows[0] |= expert_figures.peer_fields(rows[0], 500.0, "F.grouped_mm")
    rows[1] = result(cell(), H200, note="ContractError: A differs from float32")
    return {
        "benchmark": "experts-cuda",
        "date": "2026-11-15T06:56:46+00:00",
        "gpu": H200,
        "rounds": 15,
        "read_TB_per_s": 4.45,
        "bf16_TFLOP_per_s": 790.0,
        "fp8_TFLOP_per_s": None,
        "peers_not_measured": {"A, fp8_block128, 32 rows": "RuntimeError: no kernel"},
        "results": rows,
    }


@pytest.fixture
def layer_document():
    times = LayerTimes(
        layer=[90.0, 91.0, 92.0],
        allgather_layer=[100.0] * 3,
        exchange=[8.0] * 3,
        allgather=[16.0, 16.0, 20.0],
    )
    rows = [layer_result(which, times=times, errors=(0.003, 0.004)) for which in layer_grid()]
    rows[1] = layer_result(layer_grid()[1], note="ContractError: differs")
    return {
        "benchmark": "layer-cuda",
        "date": "2026-11-15T06:56:46+00:00",
        "gpu": H200,
        "shape": {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8},
        "rounds": 15,
        "reported": {"by": "#40960", "on": "8 B200", "ms": [35.0, 40.0], "ratio": 0.875},
        "results": rows,
    }


def test_markdown_has_a_table_for_each_case(document):
    tables = expert_figures.render_markdown(document).split("\n\n")
    assert len(tables) == len(CASES)
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    first = tables[0].splitlines()
    title = "| A: H 7168, I 2048, 32 of 256 experts, K 8; rows | 32 | 256 | 1,024 | 8,192 |"
    assert first[0] == title
    assert first[2].startswith("| `bf16` | 33.0 (")
    assert "[417] | – |" in first[2]
    assert len(first) == 2 + 3


def test_saved_figures_are_shown(document, tmp_path):
    file, picture = tmp_path / "experts.json", tmp_path / "experts.png"
    file.write_text(json.dumps(document))
    shown = call("bench", "show", file, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    for words in (
        "recorded",
        "recorded: the best that was measured before",
        "4.45 TB/s",
        "F.grouped_mm; rows sorted beforehand",
        "torch's products were not measured, A, fp8_block128, 32 rows: RuntimeError: no kernel",
        "figures reached",
        "failed: A, bf16, 256 rows: ContractError",
    ):
        assert words in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    shown = call("bench", "show", file, "--markdown")
    assert shown.stdout.strip() == expert_figures.render_markdown(document)


def test_a_layer_is_shown_beside_the_reported_ratio(layer_document, tmp_path):
    file, picture = tmp_path / "layer.json", tmp_path / "layer.png"
    file.write_text(json.dumps(layer_document))
    shown = call("bench", "show", file, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    for words in (
        "0.910 (0.900–0.920)",
        "0.50 (0.40–0.50)",
        "0.875",
        "35 against 40 ms on 8 B200",
        "2 of 2 faster",
        "failed",
    ):
        assert words in shown.stdout
    assert picture.stat().st_size > 10_000
    lines = call("bench", "show", file, "--markdown").stdout.strip().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| `bf16`, W=4, T=128 | 91.0 | 100 | 0.910 | 8.0 | 16.0 | 0.50 |"
    assert lines[3] == "| `bf16`, W=4, T=512 | – | – | – | – | – | – |"


def test_ratios_are_taken_round_by_round():
    times = LayerTimes(
        layer=[10.0, 30.0], allgather_layer=[20.0, 15.0], exchange=[1.0] * 2, allgather=[2.0] * 2
    )
    row = layer_result(layer_grid()[0], times=times)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (1.25, 0.5, 2.0)
    assert row["faster"] is False
    assert layer_figures.REPORTED_RATIO == 0.875


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
from tests.test_bench_experts_cuda import CASES, tiny_case
for name in CASES:
    CASES[name] = tiny_case(name)
from tokenyard.lab.bench import experts_cuda, layer_cuda, machine_rates
from tokenyard.lab.bench.expert_figures import grid
from tokenyard.lab.bench.layer_figures import LayerShape, layer_grid
from tokenyard.experts import FusedExperts

cpu = torch.device("cpu")
runs = []
def clock(works):
    for work in works.values():
        work()
    runs.append(list(works))
    return {name: [40.0, 44.0, 42.0] for name in works}

machine_rates.READ_BYTES = 16 * 4 * machine_rates._BLOCK
machine_rates.SQUARE = 32
rates = machine_rates.measure_rates(cpu, clock)
experts_cuda.ROTATION = 2
layer_cuda.ROTATION = 2
def measure(cells):
    return list(experts_cuda.measure_cells(cells, device=cpu, gpu="CPU", clock=clock, rates=rates))
right = measure(grid())
shape = LayerShape(hidden_size=128, intermediate_size=64, num_experts=4, top_k=2)
cells = layer_grid(2, [3], ["bf16", "fp8_block128"])
layers = list(layer_cuda.measure_layer(cells, shape, device=cpu, clock=clock))

compute = FusedExperts.compute
def wrong(self, received, **more):
    result = compute(self, received, **more)
    received.results.rows_SH[0] += 1
    return result
FusedExperts.compute = wrong
bad = measure(grid(["C"]))
bad_layers = list(layer_cuda.measure_layer(cells[:1], shape, device=cpu, clock=clock))
print(json.dumps([rates.read, rates.bf16, right, layers, bad, bad_layers]))
"""


@pytest.fixture(scope="module")
def interpreted():
    return run_interpreted(INTERPRETED)


def test_cells_are_checked_and_timed(interpreted):
    read, bf16, right, *_ = interpreted
    assert read == 16 * 4 * 16 * 1024 / 42
    assert bf16 == 2 * 32**3 / 42
    assert len(right) == 3 + 2 + 1 + 1 + 3 + 3 + 1
    for row, _ in right:
        assert row["note"] == ""
        assert row["us"] == 42 / 2
        assert 1e-6 < row["relative_error"] < 6e-3
        assert row["floor_us"] > 0
        assert 1 <= row["experts_hit"] <= 4
    by_format = {row["weights"]: (row, why) for row, why in right}
    # torch has grouped products of bf16 on CPUs, and none of fp8.
    assert by_format["bf16"][0]["peer"] == "F.grouped_mm"
    assert by_format["bf16"][0]["peer_us"] == 42 / 2
    assert by_format["fp8_block128"][0]["peer_us"] is None
    assert by_format["fp8_block128"][1]
    assert by_format["mxint4"] == (by_format["mxint4"][0], None)
    # Beside those of the same run.
    assert by_format["mxfp8"][0]["target_us"] == pytest.approx(1.15 * 21)
    assert by_format["nvfp4"][0]["target_us"] == pytest.approx(1.15 * 21)


def test_layers_are_checked_and_timed(interpreted):
    *_, layers, _, _ = interpreted
    assert [(row["weights"], row["wire"]) for row in layers] == [("bf16",) * 2, ("fp8_block128",) * 2]
    for row in layers:
        assert row["note"] == ""
        assert row["us"] == row["allgather_us"] == row["exchange_us"] == 21
        assert 1e-6 < row["relative_error"] < 6e-3
        assert 1e-6 < row["allgather_relative_error"] < 6e-3


def test_a_wrong_kernel_has_no_speed(interpreted):
    *_, bad, bad_layers = interpreted
    for row in [row for row, _ in bad] + bad_layers:
        assert row["us"] is None
        assert "differs from float32" in row["note"]


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
        (["experts", "--device", "cuda", "--tokens", 5], "--tokens with --device cuda"),
        (["experts", "--device", "cuda", "--rounds", 1], "at least 2"),
        (["experts", "--device", "cuda", "--plot", "picture.bmp3"], ".png"),
        (["experts", "--cells", "A"], "--cells without --device cuda"),
        (["layer", "--device", "cpu"], "--device cpu"),
        (["layer", "--top-k", 300], "top_k is 300"),
        (["layer", "--ranks", 3], "256 experts on 3 ranks"),
        (["layer", "--weights", "bf61"], "bf61"),
    ],
)
def test_options_are_checked_before_the_gpu_is_asked(options, words):
    refused = call("bench", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr
