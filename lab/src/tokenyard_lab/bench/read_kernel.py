"""A kernel that reads memory and does next to nothing else, to measure the best reading rate of a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.machine_rates import Work

BLOCK = 16 * 1024  # numbers that a block of the kernel reads


@triton.jit  # type: ignore[untyped-decorator]
def _read_blocks(data, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    found = tl.load(data + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + block, tl.sum(found))


def reading(data: Tensor) -> Work:
    """Work that reads a tensor once, and returns a sum for each block."""
    blocks = data.numel() // BLOCK
    sums = torch.empty(blocks, device=data.device)

    def read() -> Tensor:
        _read_blocks[(blocks,)](data, sums, BLOCK=BLOCK, num_warps=8)
        return sums

    return read
