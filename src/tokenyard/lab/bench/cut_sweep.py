"""Which cuts of fused experts are fastest on this GPU, and how far from them are those that the table chooses?

For each cell every line of the table is tried, and around the fastest of them its neighbors: one stage more or less,
other warps, other outputs, other tails; first those of the first product, then those of the second. Each is compared
with float32 products before it is timed. What does not fit into the GPU, or is wrong, is noted and left.

The table of another GPU is found in this way; `Clock` and `device` are arguments, as in `experts_cuda`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from tokenyard.experts import FusedExperts
from tokenyard.experts.fused import cut_table
from tokenyard.experts.fused.cuts import Cut, Cuts, PackedCut, plain_lines
from tokenyard.lab.bench.drawn_experts import DrawnExperts
from tokenyard.lab.bench.expert_figures import CASES, Cell
from tokenyard.lab.bench.experts_cuda import check_batch, draw_batches, spec_of, stage_of
from tokenyard.lab.bench.graph_clock import Clock

BENCHMARK = "cuts-cuda"
_OUTPUTS = (64, 128, 256)
_WARPS = (4, 8)
# Rows of a tile from which some of them may be computed as narrow ones.
_LONG = 64


def neighbors(cut: Cut | PackedCut) -> list[Cut | PackedCut]:
    """Cuts of as many rows that differ in one thing.

    >>> [found.stages for found in neighbors(Cut(128, 16, 128, 4, 3)) if found.stages != 3]
    [2, 4]
    """
    found: list[Cut | PackedCut]
    if isinstance(cut, PackedCut):
        found = [
            *(replace(cut, ahead=ahead) for ahead in (cut.ahead - 1, cut.ahead + 1) if ahead >= 1),
            *(replace(cut, groups=groups) for groups in (1, 2)),
            *(replace(cut, warps=warps) for warps in (*_WARPS, 16)),
            *(replace(cut, registers=registers) for registers in (None, 128)),
        ]
    else:
        tails = (0, cut.tile // 4, cut.tile // 2) if cut.tile >= _LONG else ()
        found = [
            *(replace(cut, stages=stages) for stages in (cut.stages - 1, cut.stages + 1) if stages >= 2),
            *(replace(cut, out=out) for out in _OUTPUTS),
            *(replace(cut, warps=warps) for warps in _WARPS),
            *(replace(cut, tail=tail) for tail in tails),
            replace(cut, rows_first=not cut.rows_first),
            replace(cut, boxes=not cut.boxes),
        ]
    return [other for other in dict.fromkeys(found) if other != cut]


def lines_of(weights: str, *, packed: bool) -> list[Cuts]:
    """Every line of the table for a format.

    >>> len(lines_of("bf16", packed=False)) == len(cut_table.PLAIN["bf16"])
    True
    """
    if packed:
        return [Cuts(PackedCut(*inner), PackedCut(*result)) for _, inner, result in cut_table.PACKED[weights]]
    return [Cuts(Cut(*inner), Cut(*result)) for _, inner, result in plain_lines(weights)]


def can_be(weights: str, cuts: Cuts) -> bool:
    """Whether experts with such weights can be cut so."""
    return weights != "fp8_block128" or cuts.can_split


def search(lines: Iterable[Cuts], weights: str, time: Callable[[Cuts], float | None]) -> Cuts | None:
    """Try the lines of a table, then the neighbors of the fastest; the fastest of all, if any has a time."""
    tried: dict[Cuts, float | None] = {}

    def fastest(candidates: Iterable[Cuts]) -> Cuts | None:
        for cuts in candidates:
            if cuts not in tried and can_be(weights, cuts):
                tried[cuts] = time(cuts)
        times = {cuts: us for cuts, us in tried.items() if us is not None}
        return min(times, key=times.__getitem__, default=None)

    if (best := fastest(lines)) is None:
        return None
    best = fastest(Cuts(inner, best.result) for inner in neighbors(best.inner)) or best
    return fastest(Cuts(best.inner, result) for result in neighbors(best.result))


class Trials:
    """One cell's experts and batches, cut in any way, and what came of it."""

    def __init__(self, cell: Cell, device: torch.device, clock: Clock) -> None:
        self.cell, self._clock = cell, clock
        self.spec = spec_of(CASES[cell.case], cell.weights)
        self._drawn = DrawnExperts.draw(self.spec, device)
        self.experts = FusedExperts(self.spec, self._drawn.weights, adopt=True)
        self._batches = draw_batches(cell, device)
        self.tried: dict[Cuts, dict[str, Any]] = {}

    def __call__(self, cuts: Cuts) -> float | None:
        """The µs of the stage, cut so; None, where it does not run or is wrong."""
        self.experts.cuts = cuts
        us, note = None, ""
        try:
            check_batch(self.experts, self._drawn, self._batches[0], str(self.cell))
            times = self._clock({"ours": stage_of(self.experts, self._batches)})["ours"]
            us = statistics.median(times) / len(self._batches)
        except Exception as trouble:  # ours, torch's, or Triton's: there may not be so many registers
            note = f"{type(trouble).__name__}: {str(trouble).splitlines()[0]}"
        self.tried[cuts] = {"us": us, "note": note}
        return us


def sweep(cells: Sequence[Cell], *, device: torch.device, clock: Clock) -> Iterator[dict[str, Any]]:
    """What was tried for one cell after the other, which was fastest, and what the table chooses."""
    for cell in cells:
        trials = Trials(cell, device, clock)
        packed, held = trials.experts.is_packed, trials.experts.held_format
        chosen = trials.experts.choose_cuts(CASES[cell.case].pairs(cell.size), cell.rows_format)
        best = search([chosen, *lines_of(held, packed=packed)], held, trials)
        yield _row(cell, chosen, best, trials.tried)
        del trials
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(cell: Cell, chosen: Cuts, best: Cuts | None, tried: dict[Cuts, dict[str, Any]]) -> dict[str, Any]:
    chosen_us = tried[chosen]["us"]
    best_us = None if best is None else tried[best]["us"]
    return {
        **asdict(cell),
        "chosen": asdict(chosen),
        "chosen_us": chosen_us,
        "fastest": None if best is None else asdict(best),
        "fastest_us": best_us,
        "ratio": chosen_us / best_us if chosen_us is not None and best_us is not None else None,
        "tried": [{**asdict(cuts), **found} for cuts, found in tried.items()],
    }
