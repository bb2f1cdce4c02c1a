"""Which tile configurations of fused experts are fastest on this GPU, and how far from them is the table's choice?

For each cell every line of the table is tried, and around the fastest of them its neighbors: one stage more or less,
other warps, other outputs, other tails; first those of the first product, then those of the second. Each is compared
with float32 products before it is timed. What does not fit into the GPU, or is wrong, is noted and left.

The table of another GPU is found in this way: every configuration is compiled, so all cells take many minutes.

    python -m lab.tests.bench.tile_sweep --cells A --weights fp8_block128 --out tiles.json

`Clock` and `device` are arguments, as in `tokenyard_lab.bench.experts`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.cli.output import Output
from tokenyard.experts import FusedExperts
from tokenyard.experts.fused import tile_table
from tokenyard.experts.fused.tile_configs import (
    AnyTileConfig,
    CodesTileConfig,
    NumbersTileConfig,
    PackedTileConfig,
    TileConfig,
    TileConfigs,
    plain_lines,
)
from tokenyard.machine_rates import Clock
from tokenyard_lab.bench.clock import check_gpu, give_back_memory, graph_clock
from tokenyard_lab.bench.drawn_experts import DrawnExperts
from tokenyard_lab.bench.experts import check_batch, draw_batches, stage_of
from tokenyard_lab.bench.records import Document, Record, Spread
from tokenyard_lab.bench.runs import Run
from tokenyard_lab.bench.shapes import Cell, cases_of, grid
from tokenyard_lab.cli.bench_output import run_benchmark

NOTE = "ours: what the table chooses; floor: the fastest that was tried"
COLUMNS = ("first_product", "second_product")
_OUTPUTS = (64, 128, 256)
_WARPS = (4, 8)
# Rows of a tile from which some of them may be computed as narrow ones.
_LONG = 64


def neighbors(config: AnyTileConfig) -> list[AnyTileConfig]:
    """Tile configurations of as many rows that differ in one thing.

    >>> [found.stages for found in neighbors(TileConfig(128, 16, 128, 4, 3)) if found.stages != 3]
    [2, 4]
    """
    found: list[AnyTileConfig]
    if isinstance(config, CodesTileConfig | NumbersTileConfig):
        found = [replace(config, stages=stages) for stages in (config.stages - 1, config.stages + 1)]
    elif isinstance(config, PackedTileConfig):
        found = [
            *(replace(config, ahead=ahead) for ahead in (config.ahead - 1, config.ahead + 1) if ahead >= 1),
            *(replace(config, groups=groups) for groups in (1, 2)),
            *(replace(config, warps=warps) for warps in (*_WARPS, 16)),
            *(replace(config, registers=registers) for registers in (None, 128)),
        ]
    else:
        tails = (0, config.tile // 4, config.tile // 2) if config.tile >= _LONG else ()
        found = [
            *(
                replace(config, stages=stages)
                for stages in (config.stages - 1, config.stages + 1)
                if stages >= 2
            ),
            *(replace(config, out=out) for out in _OUTPUTS),
            *(replace(config, warps=warps) for warps in _WARPS),
            *(replace(config, tail=tail) for tail in tails),
            replace(config, rows_first=not config.rows_first),
            replace(config, tma=not config.tma),
        ]
    return [other for other in dict.fromkeys(found) if other != config]


def lines_of(weights: str, *, packed: bool) -> list[TileConfigs]:
    """Every line of the table for a format.

    >>> len(lines_of("bf16", packed=False)) == len(tile_table.PLAIN["bf16"])
    True
    """
    if packed:
        found: list[tuple[AnyTileConfig, AnyTileConfig]] = [
            (PackedTileConfig(*inner), PackedTileConfig(*result))
            for _, inner, result in tile_table.PACKED[weights]
        ]
        if weights in tile_table.NUMBERS:
            numbers = NumbersTileConfig(*tile_table.NUMBERS[weights][2])
            found.append((numbers, numbers))
        return [TileConfigs(*pair) for pair in found]
    return [TileConfigs(TileConfig(*inner), TileConfig(*result)) for _, inner, result in plain_lines(weights)]


def can_be(weights: str, config: TileConfigs) -> bool:
    """Whether experts with such weights can have this tile configuration."""
    return weights != "fp8_block128" or config.can_split


def search(
    lines: Iterable[TileConfigs], weights: str, time: Callable[[TileConfigs], float | None]
) -> TileConfigs | None:
    """Try the lines of a table, then the neighbors of the fastest; the fastest of all, if any has a time."""
    tried: dict[TileConfigs, float | None] = {}

    def fastest(candidates: Iterable[TileConfigs]) -> TileConfigs | None:
        for config in candidates:
            if config not in tried and can_be(weights, config):
                tried[config] = time(config)
        times = {config: us for config, us in tried.items() if us is not None}
        return min(times, key=times.__getitem__, default=None)

    if (best := fastest(lines)) is None:
        return None
    best = fastest(TileConfigs(inner, best.result) for inner in neighbors(best.inner)) or best
    return fastest(TileConfigs(best.inner, result) for result in neighbors(best.result))


class Trials:
    """One cell's experts and batches in any tile configuration, and what came of it."""

    def __init__(self, cell: Cell, device: torch.device, clock: Clock) -> None:
        self.cell, self._clock = cell, clock
        self._drawn = DrawnExperts.draw(cell.spec, device)
        self.experts = FusedExperts(cell.spec, self._drawn.weights)
        self._batches = draw_batches(cell, device)
        self.tried: dict[TileConfigs, tuple[float | None, str]] = {}  # µs, and what went wrong

    def __call__(self, config: TileConfigs) -> float | None:
        """The µs of the stage in this configuration; None, where it does not run or is wrong."""
        self.experts.tile_configs = config
        us, note = None, ""
        try:
            check_batch(self.experts, self._drawn, self._batches[0], str(self.cell))
            times = self._clock({"ours": stage_of(self.experts, self._batches)})["ours"]
            us = statistics.median(times) / len(self._batches)
        except Exception as trouble:  # ours, torch's, or Triton's: there may not be so many registers
            note = f"{type(trouble).__name__}: {str(trouble).splitlines()[0]}"
        self.tried[config] = us, note
        return us


def sweep(cells: Sequence[Cell], *, device: torch.device, clock: Clock) -> Iterator[Record]:
    """What was tried for one cell after the other, which was fastest, and what the table chooses."""
    for cell in cells:
        trials = Trials(cell, device, clock)
        packed, held = trials.experts.is_packed, trials.experts.held_format
        chosen = trials.experts.choose_tiles(cell.shape.pairs(cell.size), cell.rows_format)
        best = search([chosen, *lines_of(held, packed=packed)], held, trials)
        yield _record(cell, chosen, best, trials.tried)
        del trials
        give_back_memory(device)


def _record(
    cell: Cell,
    chosen: TileConfigs,
    best: TileConfigs | None,
    tried: dict[TileConfigs, tuple[float | None, str]],
) -> Record:
    us, note = tried[chosen]
    best_us = None if best is None else tried[best][0]
    found: dict[str, Any] = {"chosen": asdict(chosen)}
    if best is not None:
        found |= {"fastest": asdict(best), "first_product": in_words(best.inner)}
        found["second_product"] = in_words(best.result)
    found["tried"] = [{**asdict(config), "us": time, "note": why} for config, (time, why) in tried.items()]
    return Record(
        parameters=cell.parameters(),
        ours=Spread(us) if us is not None else None,
        floor=Spread(best_us) if best_us is not None else None,
        details=found,
        note=note,
    )


def in_words(config: AnyTileConfig) -> str:
    """A tile configuration as a line of the table has it, with names; what is left out is zero, no, or any.

    >>> in_words(TileConfig(64, 16, 128, 4, 3))
    'out 64, tile 16, block 128, warps 4, stages 3'
    """
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(config).items() if value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep on the current GPU, and save and print what was found."""
    parser = argparse.ArgumentParser(description="Which tile configurations are fastest on this GPU?")
    parser.add_argument("--cells", help="cases of `bench experts`, with commas; all if left out")
    parser.add_argument("--weights", action="append", default=[], help="formats; all if left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    cells = grid(cases_of(given.cells), given.weights)
    device = check_gpu("measure on a machine that has one")
    document = Document(
        benchmark="tiles-cuda",
        unit="µs",
        x="size",
        line="weights",
        columns=COLUMNS,
        setup={"gpu": torch.cuda.get_device_name(device), "rounds": given.rounds},
        notes=[NOTE],
    )
    found = sweep(cells, device=device, clock=graph_clock(device, given.rounds))
    run = Run(document=document, steps=[str(cell) for cell in cells], figures=([record] for record in found))
    run_benchmark(run, Output(as_json=False, out=given.out))


if __name__ == "__main__":
    main()
