"""FlashInfer's one-sided exchange, measured on the same GPU where it is installed.

It is run as its own tests run it on one GPU: a plain tensor as the workspace of all ranks, and a stream per rank. Rows
are encoded before the clock starts, and results of the way back are ready in its workspace.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from tokenyard.machine_rates import Clock
from tokenyard_lab.bench.dispatch_cells import MOST_STREAMS, PER_RANK, DispatchCell
from tokenyard_lab.bench.dispatch_cuda import ROTATED_BELOW, ROTATION
from tokenyard_lab.bench.shapes import Shape
from tokenyard_lab.bench.virtual_ranks import Batch, exchange_spec_of

_MODULE = "flashinfer.comm.trtllm_moe_alltoall"


def installed_version() -> str | None:
    """The version of FlashInfer; None if it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return "(unknown version)"


def can_measure(cell: DispatchCell) -> bool:
    """Whether a cell is safe to measure: kernels wait on a stream per rank, and many in one graph can hang."""
    return cell.ranks <= MOST_STREAMS and cell.operation != "combine" and cell.launch != PER_RANK


def measure(cell: DispatchCell, shape: Shape, *, device: torch.device, clock: Clock) -> list[float]:
    """µs of FlashInfer's dispatch, or of its round trip, once for each round."""
    peer: Any = importlib.import_module(_MODULE)
    world, tokens, hidden = cell.ranks, cell.tokens, shape.hidden_size
    exchange_spec = exchange_spec_of(cell, shape)
    sets = ROTATION if tokens < ROTATED_BELOW else 1
    row_bytes = exchange_spec.wire.bytes_per_row(hidden) + 8 * shape.top_k
    size = peer.moe_a2a_get_workspace_size_per_rank(world, tokens, row_bytes, 2 * hidden)
    workspace = torch.zeros(world, size, dtype=torch.uint8, device=device)
    metainfo = [peer.moe_a2a_initialize(workspace, rank, world, tokens) for rank in range(world)]
    streams = [torch.cuda.Stream(device) for _ in range(world)]
    calls: list[list[tuple[Tensor, list[Tensor]]]] = []
    for seed in range(sets):
        batch = Batch.draw(cell, shape, device, seed)
        parts = [batch.part(slice(rank * tokens, (rank + 1) * tokens)) for rank in range(world)]
        calls.append(
            [
                (
                    p.ids_TK,
                    [*_bytes(exchange_spec.wire.encode(p.x_TH).payloads.values()), p.ids_TK, p.weights_TK],
                )
                for p in parts
            ]
        )

    def run_rank(rank: int) -> None:
        for call in calls:
            ids_TK, payloads = call[rank]
            where = (workspace, metainfo[rank], tokens, rank, world, shape.top_k)
            _, offset, *_ = peer.moe_a2a_dispatch(ids_TK, payloads, *where, shape.num_experts)
            if cell.operation == "round trip":
                end = offset + world * tokens * hidden * 2
                ready = peer.moe_a2a_wrap_payload_tensor_in_workspace(
                    workspace[rank, :], [world, tokens], offset, end, torch.bfloat16
                )
                peer.moe_a2a_combine(ready, tokens, *where, offset, True)

    def run() -> None:
        current = torch.cuda.current_stream(device)
        for rank, stream in enumerate(streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run_rank(rank)
        for stream in streams:
            current.wait_stream(stream)

    return [us / sets for us in clock({"peer": run})["peer"]]


def _bytes(payloads: Any) -> list[Tensor]:
    """Payloads in a dtype that any version takes."""
    return [payload.contiguous().view(torch.uint8) for payload in payloads]
