"""What a GPU can do at best, in the same run as what is held against it: reading memory, and plain matrix products.

Rates are the GPU's, so of several ways to reach one the fastest counts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.lab.bench.graph_clock import Clock, Work

READ_BYTES = 4 * 2**30
SQUARE = 8192  # the side of the product: 1.1 TFLOP
_BLOCK = 16 * 1024  # numbers that a block of the kernel reads


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one GPU: bytes read per µs, and operations per µs of a product of bf16 and of fp8 numbers."""

    read: float
    bf16: float
    fp8: float | None  # None: this torch has no such product here


@triton.jit  # type: ignore[untyped-decorator]
def _read_blocks(data, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    found = tl.load(data + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + block, tl.sum(found))


def measure_rates(device: torch.device, clock: Clock) -> Rates:
    """Measure all of them."""
    return Rates(
        read=READ_BYTES / _fastest(clock, _reads(device)),
        bf16=2 * SQUARE**3 / _fastest(clock, {"bf16": _bf16_product(device)}),
        fp8=_fp8_rate(device, clock),
    )


def _fastest(clock: Clock, works: dict[str, Work]) -> float:
    return min(statistics.median(times) for times in clock(works).values())


def _reads(device: torch.device) -> dict[str, Work]:
    data = torch.ones(READ_BYTES // 4, device=device)
    blocks = data.numel() // _BLOCK
    sums, total = torch.empty(blocks, device=device), torch.empty((), device=device)

    def by_kernel() -> None:
        _read_blocks[(blocks,)](data, sums, BLOCK=_BLOCK, num_warps=8)

    def by_torch() -> None:
        torch.sum(data, dim=0, out=total)

    return {"kernel": by_kernel, "torch": by_torch}


def _square(device: torch.device) -> Tensor:
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16, generator=draw)


def _bf16_product(device: torch.device) -> Work:
    a, out = _square(device), torch.empty(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)

    def multiply() -> None:
        torch.mm(a, a.t(), out=out)

    return multiply


def _fp8_rate(device: torch.device, clock: Clock) -> float | None:
    a = _square(device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def multiply() -> None:
        torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        return 2 * SQUARE**3 / _fastest(clock, {"fp8": multiply})
    except (RuntimeError, NotImplementedError, ValueError):  # GPUs before Ada, and some builds of torch
        return None
