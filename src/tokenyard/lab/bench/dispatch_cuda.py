"""How fast do rows travel on a GPU? The kernels of `one_sided`, W virtual ranks on one GPU, beside floor and peer.

**What is timed.** A CUDA graph that holds a dispatch (encoding included), a combine of results that are ready in the
workspace, or both, of all ranks; it is replayed many times, and the median of several such repeats is the figure. Small
batches rotate: the graph holds four of them, so that none finds its own rows in the cache. From 2048 tokens on, one
batch is larger than the cache.

**What is not.** A link. All ranks share the memory of one GPU: this measures how well kernels use memory and how
quickly they are launched. It is never the bandwidth of NVLink, and not a promise for several GPUs.

**Why it can be trusted.** Before a cell is timed, its first batch is dispatched and combined and compared with the
kernels' twins, bit by bit; after it, no kernel may have reported trouble. A cell that fails is shown with the reason
and without a time.

`Timer` and `device` are arguments: all but the clock runs on a CPU, too, with Triton's interpreter.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from tokenyard.errors import InputError, TokenyardError
from tokenyard.formats import get
from tokenyard.lab.bench.cuda_figures import Cell, Shape, cell_of, result
from tokenyard.lab.bench.graph_clock import captured, replay

REPEATS = 15
REPLAYS = 50
QUICK_REPEATS = 7
QUICK_REPLAYS = 20
# Batches of fewer tokens rotate.
ROTATED_BELOW = 2048
ROTATION = 4
COPY_BYTES = 2**30


class Timer(Protocol):
    """Takes a piece of work on a device; returns µs that one run of it took, once for each repeat."""

    def __call__(self, work: Callable[[], None], /) -> list[float]: ...


def graph_timer(device: torch.device, repeats: int, replays: int) -> Timer:
    """Captures the work in a CUDA graph; one repeat is the mean of so many replays."""
    return partial(_graph_times, device, repeats, replays)


def _graph_times(
    device: torch.device, repeats: int, replays: int, work: Callable[[], None], /
) -> list[float]:
    graph = captured(device, work)
    times = [replay(graph, replays) for _ in range(1 + repeats)]
    return times[1:]  # the first one warms up


def check_gpu(otherwise: str) -> torch.device:
    """The current GPU, or an error that says what is here, and what to do otherwise."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise InputError(
            f"torch {torch.__version__} sees no GPU",
            expected="an NVIDIA GPU that torch sees",
            fix=f"{otherwise}, or see what `tokenyard doctor` says about CUDA",
        )
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


def check_cells(cells: Sequence[Cell], shape: Shape, repeats: int) -> None:
    """Raise if a cell cannot be measured. Asked before the time is spent."""
    if not 1 <= shape.top_k <= shape.num_experts:
        raise InputError(
            f"top_k is {shape.top_k}, of {shape.num_experts} experts",
            expected=f"a top_k from 1 to {shape.num_experts}: choices are drawn without repetition",
            fix="choose fewer experts per token, or more experts",
        )
    if repeats < 2:
        raise InputError(
            f"rounds is {repeats}", expected="at least 2, to have a spread", fix="pass --rounds 2"
        )
    for name in dict.fromkeys([*(cell.wire for cell in cells), shape.combine_wire]):
        get(name)


def measure_copy(device: torch.device, timer: Timer) -> float:
    """The bandwidth of a large copy, in bytes per µs: what it reads and what it writes."""
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        # By a kernel, as what it is compared with. In a graph `copy_` is left to the copy engines: 2.77 TB/s on an
        # H200, where this moves 4.25.
        torch.mul(source, 2.0, out=target)

    return 2 * COPY_BYTES / statistics.median(timer(copy))


def measure_cells(
    cells: Sequence[Cell],
    shape: Shape,
    *,
    device: torch.device,
    gpu: str,
    timer: Timer,
    copy_bytes_per_us: float,
) -> Iterator[dict[str, Any]]:
    """The figures of one cell after the other. What goes wrong in a cell is its note."""
    for cell in cells:
        rows_sent: int | None = None
        times: list[float] = []
        note = ""
        try:
            rows_sent, times = _measure(cell, shape, device, timer)
        except (TokenyardError, RuntimeError) as error:  # torch's own errors on a GPU are RuntimeErrors
            note = f"{type(error).__name__}: {error}"
        yield result(
            cell,
            shape,
            gpu,
            rows_sent=rows_sent,
            copy_bytes_per_us=copy_bytes_per_us,
            times=times,
            note=note,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(cell: Cell, shape: Shape, device: torch.device, timer: Timer) -> tuple[int, list[float]]:
    # It needs Triton, which a CPU's torch does not bring.
    room: Any = importlib.import_module("tokenyard.lab.bench.virtual_ranks")
    sets = ROTATION if cell.num_tokens < ROTATED_BELOW else 1
    batches = [room.Batch.draw(cell, shape, device, seed) for seed in range(sets)]
    ranks = room.VirtualRanks(cell, shape, batches, device)
    ranks.check()
    times = [us / sets for us in timer(ranks.run)]
    ranks.check_nobody_gave_up()
    return ranks.rows_sent(), times


def measure_peers(
    rows: Sequence[dict[str, Any]], shape: Shape, *, device: torch.device, timer: Timer
) -> str | None:
    """Put FlashInfer's own times of this GPU into the rows, where it is installed; returns what came of it.

    Asked after all of ours: a peer that breaks takes the GPU's context with it.
    """
    peer: Any = importlib.import_module("tokenyard.lab.bench.flashinfer_peer")
    if (version := peer.installed_version()) is None:
        return None
    measured = 0
    for row in rows:
        cell = cell_of(row)
        if peer.can_measure(cell):
            try:
                times = peer.measure(cell, shape, device=device, timer=timer)
            except Exception as error:  # whatever another version's interface answers
                return f"FlashInfer {version} could not be measured: {type(error).__name__}: {error}"
            row.update(peer.fields(cell, statistics.median(times), version))
            measured += 1
    return f"FlashInfer {version} measured in {measured} of {len(rows)} cells"


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells that failed, and why."""
    return [f"{cell_of(row)}: {row['note']}" for row in rows if row["note"]]
