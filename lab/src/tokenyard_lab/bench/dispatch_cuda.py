"""How fast do rows travel on a GPU? The kernels of `one_sided`, W virtual ranks on one GPU, beside floor and peer.

**What is timed.** A CUDA graph that holds a dispatch (encoding included), a combine of results that are ready in the
workspace, or both, of all ranks; it is replayed many times, and the median over rounds is the figure. Small batches
rotate: the graph holds four of them, so that none finds its own rows in the cache. From 2048 tokens on, one batch is
larger than the cache.

**What is not.** A link. All ranks share the memory of one GPU: this measures how well kernels use memory and how
quickly they are launched. It is never the bandwidth of NVLink, and not a promise for several GPUs.

**Why it can be trusted.** Before a cell is timed, its first batch is dispatched and combined and compared with the
kernels' twins, bit by bit; after it, no kernel may have reported trouble. A cell that fails is shown with the reason
and without a time.

`Clock` and `device` are arguments: all but the clock runs on a CPU, too, with Triton's interpreter.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tokenyard.errors import TokenyardError
from tokenyard.formats import get
from tokenyard.machine_rates import Clock
from tokenyard_lab.bench.clock import give_back_memory
from tokenyard_lab.bench.dispatch_cells import DispatchCell, dispatch_record, with_peer
from tokenyard_lab.bench.records import Record
from tokenyard_lab.bench.shapes import Shape, check_rounds, check_top_k

ROUNDS = 15
QUICK_ROUNDS = 7
# Batches of fewer tokens rotate.
ROTATED_BELOW = 2048
ROTATION = 4
NOTE = "ours encode on the way; ranks share one GPU's memory: this is not the speed of a link"


def check_cells(cells: Sequence[DispatchCell], shape: Shape, rounds: int) -> None:
    """Raise if a cell cannot be measured. Called before anything is measured."""
    check_top_k(shape.top_k, shape.num_experts)
    check_rounds(rounds)
    for name in dict.fromkeys([*(cell.wire for cell in cells), shape.combine_wire]):
        get(name)


def measure_cells(
    cells: Sequence[DispatchCell],
    shape: Shape,
    *,
    device: torch.device,
    gpu: str,
    clock: Clock,
    copy_bytes_per_us: float,
) -> Iterator[Record]:
    """The records of the cells, one after the other. An error in a cell becomes the note of its record."""
    for cell in cells:
        found: dict[str, Any] = {"rows_sent": None}
        try:
            rows_sent, times = _measure(cell, shape, device, clock)
            found = {"rows_sent": rows_sent, "times": times}
        except (TokenyardError, RuntimeError) as error:  # torch's own errors on a GPU are RuntimeErrors
            found["note"] = f"{type(error).__name__}: {error}"
        yield dispatch_record(cell, shape, gpu, copy_bytes_per_us=copy_bytes_per_us, **found)
        give_back_memory(device)


def _measure(cell: DispatchCell, shape: Shape, device: torch.device, clock: Clock) -> tuple[int, list[float]]:
    # Imported here, because it needs Triton, which a CPU build of torch does not bring.
    virtual_ranks: Any = importlib.import_module("tokenyard_lab.bench.virtual_ranks")
    sets = ROTATION if cell.tokens < ROTATED_BELOW else 1
    batches = [virtual_ranks.Batch.draw(cell, shape, device, seed) for seed in range(sets)]
    ranks = virtual_ranks.VirtualRanks(cell, shape, batches, device)
    ranks.check()
    times = [us / sets for us in clock({"ours": ranks.run})["ours"]]
    ranks.check_no_rank_gave_up()
    return ranks.rows_sent(), times


def measure_peers(records: list[Record], shape: Shape, *, device: torch.device, clock: Clock) -> str | None:
    """Measure FlashInfer on this GPU, if it is installed, and put its times into the records; return a note.

    Called after all cells of ours: a peer that fails may leave the GPU's context unusable.
    """
    peer: Any = importlib.import_module("tokenyard_lab.bench.flashinfer_peer")
    if (version := peer.installed_version()) is None:
        return None
    measured = 0
    for number, record in enumerate(records):
        cell = DispatchCell(**record.parameters)
        if peer.can_measure(cell):
            try:
                times = peer.measure(cell, shape, device=device, clock=clock)
            except Exception as error:  # another version may have another interface
                return f"FlashInfer {version} could not be measured: {type(error).__name__}: {error}"
            source = f"FlashInfer {version}, measured"
            records[number] = with_peer(record, cell, statistics.median(times), source)
            measured += 1
    return f"FlashInfer {version} measured in {measured} of {len(records)} cells"
