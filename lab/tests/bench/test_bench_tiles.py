"""The sweep over tile configurations, all but its clock: which are tried and chosen, and that it runs, interpreted."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lab.tests.bench.tile_sweep import COLUMNS, can_be, lines_of, main, neighbors, search
from tests.interpreted import run_interpreted
from tokenyard.errors import InputError
from tokenyard.experts.fused import tile_table
from tokenyard.experts.fused.tile_configs import PackedTileConfig, TileConfig, TileConfigs, expected_pairs
from tokenyard_lab.bench.experts import draw_routes
from tokenyard_lab.bench.records import Document
from tokenyard_lab.bench.shapes import CASES
from tokenyard_lab.cli.bench_output import print_document

ROOT = Path(__file__).resolve().parents[3]
SOME = [
    TileConfig(128, 16, 128, 4, 3),
    TileConfig(256, 128, 64, 8, 4, 64),
    PackedTileConfig(((8, 0), (16, 0)), 1, 4, 4, 4, 128),
]


@pytest.mark.parametrize("config", SOME, ids=str)
def test_neighbors_differ_in_one_thing_and_never_in_rows(config):
    found = neighbors(config)
    assert len(set(found)) == len(found) >= 5
    for other in found:
        differ = {name for name, value in asdict(other).items() if value != asdict(config)[name]}
        assert len(differ) == 1
        assert other.tile == config.tile


def test_every_line_of_the_table_is_tried():
    for weights in tile_table.PLAIN:
        assert all(can_be(weights, tiles) for tiles in lines_of(weights, packed=False))
    for weights, lines in tile_table.PACKED.items():
        assert len(lines_of(weights, packed=True)) == len(lines) + (weights in tile_table.NUMBERS)


def test_the_search_goes_from_the_fastest_line_to_its_neighbors_in_both_products():
    far, near = (
        TileConfigs(TileConfig(64, tile, 64, 4, 3), TileConfig(64, tile, 64, 4, 3)) for tile in (16, 64)
    )
    tried = []

    def time(tiles):
        tried.append(tiles)
        if tiles.inner.stages == 2:
            return None  # it does not run
        return 100.0 * (tiles.inner.tile == 16) + abs(tiles.inner.out - 128) + abs(tiles.result.warps - 8)

    best = search([far, near], "bf16", time)
    assert (best.inner.out, best.inner.tile, best.result.warps) == (128, 64, 8)
    assert len(set(tried)) == len(tried)
    assert sum(tiles.inner.tile == 16 for tiles in tried) == 1
    failed = []
    assert search([far, near, far], "bf16", failed.append) is None
    assert failed == [far, near]  # what does not run is not compiled again


def test_tiles_whose_e4m3_would_have_no_scale_are_not_tried():
    good = lines_of("fp8_block128", packed=False)[0]
    counter = itertools.count(1)
    tried = []

    def time(tiles):
        tried.append(tiles)
        return float(next(counter))

    search([good], "fp8_block128", time)
    assert len(tried) > 5
    assert all(tiles.can_split for tiles in tried)


INTERPRETED = """
import json, numpy, torch
from tests.exchange import interpreter
interpreter.install()
numpy.seterr(all="ignore")
from lab.tests.bench.test_bench_experts_cuda import CASES, tiny_case
CASES["A"] = tiny_case("A")
from lab.tests.bench import tile_sweep
from tokenyard_lab.bench import experts
from tokenyard_lab.bench.records import Document
from tokenyard_lab.bench.shapes import grid
from tokenyard.experts.fused.tile_configs import TileConfig, TileConfigs
experts.ROTATION = 1
first, second = (TileConfig(out, 32, 128, 4, 3) for out in (256, 128))
tile_sweep.lines_of = lambda weights, packed: [TileConfigs(first, second)]
tile_sweep.neighbors = lambda config: [TileConfig(config.out, config.tile, 64, 4, 3)]

def clock(works):
    for work in works.values():
        work()
    return {name: [40.0, 44.0, 42.0] for name in works}

cells = grid(["A"], ["fp8_block128"])
found = list(tile_sweep.sweep(cells, device=torch.device("cpu"), clock=clock))
print(json.dumps(Document(benchmark="tiles-cuda", unit="µs", x="size", results=found).as_dict()))
"""


def test_a_sweep_runs_compares_and_times(capsys):
    document = Document.from_dict(run_interpreted(INTERPRETED), "the sweep")
    (record,) = document.results
    assert record.parameters == {"case": "A", "weights": "fp8_block128", "size": 6}
    assert record.ours.median == record.floor.median == 42.0
    assert record.over(record.floor.median) == 1.0
    # The table's, the line, and another block of the first product; the second's must be whole.
    assert [tried["us"] for tried in record.details["tried"]] == [42.0] * 3
    assert not any(tried["note"] for tried in record.details["tried"])
    document.columns = COLUMNS
    document.results.append(replace(record, ours=None, floor=None, details={}, note="none runs"))
    print_document(document)
    shown = capsys.readouterr().out
    assert "fp8_block128" in shown
    assert "none runs" in shown


def test_without_a_gpu_it_says_so():
    with pytest.raises(InputError, match="sees no GPU") as refused:
        main(["--cells", "A", "--weights", "bf16"])
    assert "--device" not in str(refused.value)


@pytest.mark.parametrize("name", ["A", "B", "FLASH", "PRO", "V3"])
def test_rows_that_arrive_and_all_slots_of_a_workspace_promise_the_same_pairs(name):
    """So a layer has the tiles that were measured, however its rows are handed to the experts."""
    case = CASES[name]
    for size in case.sizes[1:3]:
        ids_RK, _ = draw_routes(case, size, seed=1)
        pairs, shares = int((ids_RK >= 0).sum()), (case.top_k, case.local_experts, case.num_experts)
        slots = round(pairs * case.ranks / case.top_k)  # of which all ranks' experts get as many pairs
        assert expected_pairs(len(ids_RK), *shares, may_be_empty=False) == pytest.approx(pairs, rel=0.15)
        assert expected_pairs(slots, *shares, may_be_empty=True) == pytest.approx(pairs, rel=0.02)
