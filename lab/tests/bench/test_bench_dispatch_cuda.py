"""`bench dispatch --device cuda`, all but the clock: cells, bytes, floors, targets, checks, the picture, the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.runner import call
from tests.interpreted import run_interpreted
from tokenyard import machine_rates
from tokenyard.errors import InputError, UnknownName
from tokenyard.routing import Placement
from tokenyard_lab.bench import dispatch_cuda as bench
from tokenyard_lab.bench.clock import check_gpu
from tokenyard_lab.bench.dispatch_cells import (
    ALL_RANKS,
    EXTRA_WIRES,
    PER_RANK,
    TABLE_WIRES,
    TARGETS,
    DispatchCell,
    dispatch_record,
    traffic,
)
from tokenyard_lab.bench.dispatch_cells import dispatch_grid as grid
from tokenyard_lab.bench.records import Document, Record
from tokenyard_lab.bench.shapes import Shape
from tokenyard_lab.plots import draw_figures

ROOT = Path(__file__).resolve().parents[3]
H200 = "NVIDIA H200"
COPY = 4.24e6  # bytes per µs


def cell(operation="dispatch", ranks=4, tokens=4096, wire="bf16", launch=ALL_RANKS):
    return DispatchCell(operation=operation, ranks=ranks, tokens=tokens, wire=wire, launch=launch)


def rows_sent(world, tokens):
    """Of uniformly random routes, for the shape of the targets."""
    draw = torch.Generator().manual_seed(3)
    ids_TK = torch.rand(world * tokens, 256, generator=draw).topk(8).indices
    rank_TK, _ = Placement.contiguous(256, world).resolve(ids_TK, 0)
    return sum(int((rank_TK == rank).any(dim=1).sum()) for rank in range(world))


# -- Cells -------------------------------------------------------------------------------------------------


def test_the_grid_holds_every_target_and_the_extra_formats():
    cells = grid()
    for operation, world, tokens in TARGETS:
        for wire in (*TABLE_WIRES, *EXTRA_WIRES):
            assert cell(operation, world, tokens, wire) in cells
    assert [(c.ranks, c.tokens) for c in cells if c.operation == "combine"] == [
        (4, 1024),
        (4, 4096),
        (8, 1024),
        (8, 4096),
    ]
    apart = [c for c in cells if c.launch == PER_RANK]
    assert {(c.ranks, c.tokens) for c in apart} == {(4, 16)}
    assert len(apart) == 2 * len(TABLE_WIRES)
    assert len(set(cells)) == len(cells) == 6 * 5 + 5 + 4 + 6


def test_the_grid_follows_the_options():
    assert {(c.ranks, c.tokens, c.wire) for c in grid([2, 3], [70], ["mxfp8"])} == {
        (2, 70, "mxfp8"),
        (3, 70, "mxfp8"),
    }
    assert {c.ranks for c in grid(tokens=[128])} == {4, 8}
    assert {c.tokens for c in grid([5])} == {16, 128, 1024, 4096}
    assert len(grid(quick=True)) < len(grid()) / 2
    assert not [c for c in grid([8], [16]) if c.launch == PER_RANK]


# -- Bytes and floors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "tokens", "megabytes"),
    [
        (4, 1024, (213, 110, 60)),
        (4, 4096, (852, 441, 242)),
        (8, 1024, (625, 323, 178)),
        (8, 4096, (2498, 1293, 710)),
    ],
)
def test_bytes_are_those_that_were_counted_on_the_reference_gpu(world, tokens, megabytes):
    rows = rows_sent(world, tokens)
    for wire, expected in zip(TABLE_WIRES, megabytes, strict=True):
        written = traffic(cell(ranks=world, tokens=tokens, wire=wire), Shape(), rows).written
        assert written / 1e6 == pytest.approx(expected, rel=0.01, abs=1)


@pytest.mark.parametrize(("world", "floors"), [(4, (256, 159, 112)), (8, (700, 416, 278))])
def test_floors_are_bytes_over_the_bandwidth_of_a_copy(world, floors):
    rows = rows_sent(world, 4096)
    for wire, expected in zip(TABLE_WIRES, floors, strict=True):
        record = dispatch_record(
            cell(ranks=world, wire=wire),
            Shape(),
            H200,
            rows_sent=rows,
            copy_bytes_per_us=COPY,
            times=[500.0] * 3,
        )
        assert record.floor.median == pytest.approx(expected, rel=0.012)
        assert record.over(record.floor.median) == pytest.approx(500 / record.floor.median)


def test_a_round_trip_moves_what_its_halves_move():
    shape = Shape(hidden_size=256, combine_wire="mxfp8")
    out, back, both = (
        traffic(cell(operation, 2, 8, "bf16"), shape, 10)
        for operation in ("dispatch", "combine", "round trip")
    )
    assert (out.read, out.written) == (2 * 8 * 512, 10 * (512 + 64))
    assert (back.read, back.written) == (10 * (256 + 8), 2 * 8 * 512)
    assert both == out + back


# -- Rows --------------------------------------------------------------------------------------------------


def figures(which, *times, shape=None, gpu=H200):
    return dispatch_record(
        which, shape or Shape(), gpu, rows_sent=59_000, copy_bytes_per_us=COPY, times=times
    )


def peers_of(record):
    return {name: peer.median for name, peer in record.peers.items()}


def test_a_record_has_median_spread_target_and_peer():
    record = figures(cell(wire="mxfp8"), 182.0, 176.0, 178.0, 179.0, 190.0)
    assert (record.ours.median, record.ours.low, record.ours.high) == (179, 178, 182)
    assert (record.ours.least, record.ours.most) == (176, 190)
    assert (record.target, record.met) == (180, True)
    assert peers_of(record) == {"FlashInfer": 171, "FlashInfer + quantizer": 255}
    assert "stored" in record.details["peer_source"]
    assert figures(cell(wire="mxfp8"), 181.0, 182.0).met is False


def test_what_is_not_known_is_empty():
    assert peers_of(figures(cell(ranks=8, wire="mxfp8"), 400.0, 401.0)) == {"FlashInfer": 743}
    # Nobody quantizes bf16.
    assert peers_of(figures(cell(ranks=8), 700.0, 701.0))["FlashInfer + quantizer"] == 951
    for record in (
        figures(cell(), 1.0, 2.0, gpu="NVIDIA A100"),
        figures(cell(), 1.0, 2.0, shape=Shape(hidden_size=4096)),
        figures(cell(wire="fp8_block128"), 1.0, 2.0),
    ):
        assert (record.target, record.met, record.peers) == (None, None, {})
        assert "peer_source" not in record.details
    apart = figures(cell(tokens=16, launch=PER_RANK), 1.0, 2.0)
    assert (apart.target, apart.best_peer) == (None, 12.2)


def test_the_target_of_a_combine_is_a_multiple_of_its_floor():
    record = figures(cell("combine"), 1.0, 1.0)
    assert record.target == pytest.approx(1.08 * record.floor.median)
    assert figures(cell("combine"), *[record.floor.median * 1.09] * 2).met is False
    assert figures(cell("combine", tokens=1024), 1.0, 1.0).target is None


# -- A document, its tables and its picture ----------------------------------------------------------------


@pytest.fixture
def document():
    records = [figures(which, *(float(which.tokens + i) for i in range(3))) for which in grid()]
    records[1] = dispatch_record(
        grid()[1], Shape(), H200, rows_sent=None, copy_bytes_per_us=COPY, note="ContractError: other bits"
    )
    return Document(
        benchmark="dispatch-cuda",
        unit="µs",
        x="tokens",
        line="wire",
        setup={"gpu": H200, "hidden_size": 7168, "copy_TB_per_s": 4.24},
        notes=[bench.NOTE],
        provenance={"date": "2026-11-15T06:56:46+00:00"},
        results=records,
    )


def test_markdown_has_a_line_for_each_figure(document, tmp_path):
    file = tmp_path / "dispatch.json"
    file.write_text(json.dumps(document.as_dict()))
    lines = call("bench", "show", file, "--markdown").stdout.strip().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[0].startswith("| operation | ranks | tokens | wire | launch | ours, µs |")
    assert len(lines) == 2 + len(grid())
    (large,) = (line for line in lines if line.startswith("| dispatch | 8 | 4096 | bf16 |"))
    assert "| 4,097 | 4,096–4,098 |" in large
    assert "| 951 | 951 |" in large
    assert any("| round trip | 4 | 16 | bf16 | a stream per rank |" in line for line in lines)


def test_saved_figures_are_shown(document, tmp_path):
    file, picture = tmp_path / "dispatch.json", tmp_path / "dispatch.png"
    file.write_text(json.dumps(document.as_dict()))
    shown = call("bench", "show", file, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    for words in ("ours / floor", "+ quantizer", "TB/s 4.24", "not the speed of a link", "other bits"):
        assert words in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    "text", ["", "[]", '{"benchmark": "encode", "results": []}', '{"benchmark": "dispatch-cuda"}']
)
def test_other_files_are_refused(text, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(text)
    refused = call("bench", "show", file)
    assert refused.exit_code == 2
    assert "fix:" in refused.stderr


def test_a_picture_of_one_cell(document, tmp_path):
    document.results = document.results[:1]
    draw_figures(document, tmp_path / "one.svg")
    assert "<svg" in (tmp_path / "one.svg").read_text()


# -- Measuring, with a clock of our own --------------------------------------------------------------------


INTERPRETED = """
import json, numpy, torch
from tests.exchange import interpreter
interpreter.install()
numpy.seterr(all="ignore")
from dataclasses import asdict
from tokenyard_lab.bench import dispatch_cells
from tokenyard_lab.bench import dispatch_cuda as bench
from tokenyard_lab.bench.shapes import Shape
from tokenyard.exchange.transports.one_sided.cuda.launch import Launcher

runs = []
def clock(works):
    for work in works.values():
        work()
    runs.append(1)
    return {name: [40.0, 44.0, 42.0] for name in works}

def measure(cells):
    shape = Shape(hidden_size=32, top_k=2, num_experts=5)
    cpu = torch.device("cpu")
    found = bench.measure_cells(cells, shape, device=cpu, gpu="CPU", clock=clock, copy_bytes_per_us=1e3)
    return [asdict(record) for record in found]

dispatch_cells.LARGE_BATCH = 3
grid = dispatch_cells.dispatch_grid([2], [3], ["bf16", "mxfp8"])
cells = [c for c in grid if c.launch == dispatch_cells.ALL_RANKS]
right = measure(cells)
pull = Launcher._pull
def wrong(self, layer, home_slots, out_TH, *rest, **more):
    pull(self, layer, home_slots, out_TH, *rest, **more)
    out_TH[0, 0] += 1
Launcher._pull = wrong
print(json.dumps([right, measure(cells), len(runs)]))
"""


def test_cells_are_checked_against_the_twins_before_they_are_timed():
    right, wrong, runs = run_interpreted(INTERPRETED)
    operations = [record["parameters"]["operation"] for record in right]
    assert operations == [*["dispatch"] * 2, *["round trip"] * 2, "combine"]
    for record in right:
        details = record["details"]
        assert (record["ours"]["median"], record["note"]) == (42 / bench.ROTATION, "")
        assert 6 <= details["rows_sent"] <= 12
        assert record["floor"]["median"] == (details["bytes_read"] + details["bytes_written"]) / 1e3
    # A kernel with wrong sums: dispatches are timed, nothing that combines is.
    assert [record["ours"] is None for record in wrong] == [False, False, True, True, True]
    assert "combine gave other bits than its twin" in wrong[-1]["note"]
    records = [Record(parameters=record["parameters"], note=record["note"]) for record in wrong]
    assert len(Document(benchmark="dispatch-cuda", unit="µs", x="tokens", results=records).failed()) == 3
    assert runs == 5 + 2


def test_a_copy_is_counted_both_ways(monkeypatch):
    monkeypatch.setitem(machine_rates.COPY_BYTES, "cpu", 4096)
    rate = machine_rates.copy_rate(torch.device("cpu"), lambda works: {"copy": [2.0, 4.0, 8.0]})
    assert rate == 2 * 4096 / 4


def no_clock(works):
    raise AssertionError("nothing is timed")


def test_without_flashinfer_stored_times_stay():
    pytest.importorskip("triton")
    if bench.importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("FlashInfer is installed here")
    records = [figures(cell(), 1.0, 2.0)]
    before = list(records)
    assert bench.measure_peers(records, Shape(), device=torch.device("cpu"), clock=no_clock) is None
    assert records == before


def test_a_peer_is_measured_where_it_is_installed_and_one_that_breaks_is_named(monkeypatch):
    pytest.importorskip("triton")
    from tokenyard_lab.bench import flashinfer_peer

    def measure(cell, shape, *, device, clock):
        if cell.operation == "round trip":
            raise AttributeError("no moe_a2a_combine")
        return [250.0, 260.0, 270.0]

    monkeypatch.setattr(flashinfer_peer, "installed_version", lambda: "9.9")
    monkeypatch.setattr(flashinfer_peer, "measure", measure)
    records = [figures(cell(wire="mxfp8"), 1.0, 2.0), figures(cell(ranks=8), 1.0, 2.0)]
    said = bench.measure_peers(records, Shape(), device=torch.device("cpu"), clock=no_clock)
    assert said == "FlashInfer 9.9 measured in 1 of 2 cells"
    assert peers_of(records[0]) == {"FlashInfer": 260, "FlashInfer + quantizer": 344}
    assert records[0].details["peer_source"] == "FlashInfer 9.9, measured"
    assert "stored" in records[1].details["peer_source"]  # eight streams can hang
    broken = [figures(cell("round trip", tokens=16), 1.0, 2.0)]
    said = bench.measure_peers(broken, Shape(), device=torch.device("cpu"), clock=no_clock)
    assert said == "FlashInfer 9.9 could not be measured: AttributeError: no moe_a2a_combine"


# -- Errors ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so():
    with pytest.raises(InputError, match=r"sees no GPU.*leave out --device"):
        check_gpu("leave out --device")
    refused = call("bench", "dispatch", "--device", "cuda")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "sees no GPU" in refused.stderr
    assert "leave out --device" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_for_gpus_only_advises_no_option_that_it_has_not():
    refused = call("bench", "layer")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "sees no GPU" in refused.stderr
    assert "--device" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "tpu"], "--device tpu"),
        (["--device", "cuda", "--exchange", "two_sided"], "one_sided, whose kernels"),
        (["--device", "cuda", "--top-k", 300], "top_k is 300"),
        (["--device", "cuda", "--wire", "bf61"], "bf61"),
        (["--device", "cuda", "--plot", "picture.bmp3"], ".png"),
        (["--quick"], "--quick with --device cpu"),
        (["--ranks", 2, "--ranks", 3], "--ranks 2 --ranks 3 with --device cpu"),
    ],
)
def test_options_are_checked_before_the_gpu_is_asked(options, words):
    refused = call("bench", "dispatch", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr


def test_cells_are_checked_before_any_is_measured():
    with pytest.raises(UnknownName):
        bench.check_cells(grid(wires=["bf61"]), Shape(), 7)
    with pytest.raises(InputError, match="at least 2"):
        bench.check_cells(grid(), Shape(), 1)
