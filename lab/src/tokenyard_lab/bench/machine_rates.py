"""The best rates of a machine, measured in the run that uses them: moving bytes, and plain matrix products.

A rate is the fastest of several ways to do the same. All are per µs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenyard_lab.bench.clock import (
    REST,
    RESTED_ROUNDS,
    Clock,
    Work,
    check_gpu,
    give_back_memory,
    graph_clock,
)

ON_THE_CPU = "leave out --device to measure on the CPU"
# By kind of device: bytes that are read and copied, far more than caches hold, and the side of the product.
READ_BYTES = {"cuda": 4 * 2**30, "cpu": 64 * 2**20}
COPY_BYTES = {"cuda": 2**30, "cpu": 256 * 2**20}
SQUARE = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes read and bytes copied per µs, and operations per µs of a product of plain and of fp8 numbers."""

    read: float
    copy: float  # bytes read plus bytes written
    product: float  # bf16 on a GPU, the faster of bf16 and float32 on a CPU
    fp8: float | None  # None: this torch has no such product here

    def as_setup(self) -> dict[str, float]:
        """The rates as a document of a benchmark has them, in TB/s and TFLOP/s."""
        fp8 = {"fp8_TFLOP_per_s": self.fp8 / 1e6} if self.fp8 is not None else {}
        plain = {"copy_TB_per_s": self.copy / 1e6, "plain_TFLOP_per_s": self.product / 1e6}
        return {"read_TB_per_s": self.read / 1e6, **plain, **fp8}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device that something is measured on, its clocks and its rates."""

    device: torch.device
    name: str
    clock: Clock  # of rounds without a pause
    rested: Clock | None = None  # of rounds with a rest before each
    rates: Rates

    @classmethod
    def gpu(cls, rounds: int, otherwise: str = ON_THE_CPU) -> Machine:
        """The current GPU. Without one, raise an error with `otherwise`, which says what to do instead."""
        device = check_gpu(otherwise)
        clock = graph_clock(device, rounds)
        return cls(
            device=device,
            name=torch.cuda.get_device_name(device),
            clock=clock,
            rested=graph_clock(device, min(rounds, RESTED_ROUNDS), rest=REST),
            rates=measure_rates(device, clock),
        )

    def rested_note(self) -> str:
        """The note of a document on rounds after a rest."""
        assert self.rested is not None
        product = measure_rates(self.device, self.rested).product / 1e6
        return f"rested: after {REST} s without work before each round; bf16 products reach {product:.0f} TFLOP/s"


def measure_rates(device: torch.device, clock: Clock) -> Rates:
    """Measure all rates of a machine."""
    rates = Rates(
        read=READ_BYTES[device.type] / _fastest(clock, _reads(device)),
        copy=copy_rate(device, clock),
        product=product_rate(device, clock),
        fp8=_fp8_rate(device, clock),
    )
    give_back_memory(device)
    return rates


def copy_rate(device: torch.device, clock: Clock) -> float:
    """The bandwidth of a large copy: bytes read plus bytes written, per µs."""
    nbytes = COPY_BYTES[device.type]
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        # By a kernel, as in what it is compared with. In a graph, `copy_` runs on the copy engines: 2.77 TB/s on an
        # H200, where this kernel reaches 4.25.
        torch.mul(source, 2.0, out=target)

    return 2 * nbytes / _fastest(clock, {"copy": copy})


def product_rate(device: torch.device, clock: Clock) -> float:
    """Operations per µs of a plain square product, in the faster dtype."""
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.bfloat16, torch.float32]
    works = {str(dtype): _product(device, dtype) for dtype in dtypes}
    return 2 * float(SQUARE[device.type]) ** 3 / _fastest(clock, works)


def _fastest(clock: Clock, works: dict[str, Work]) -> float:
    return min(statistics.median(times) for times in clock(works).values())


def _reads(device: torch.device) -> dict[str, Work]:
    data = torch.ones(READ_BYTES[device.type] // 4, device=device)
    total = torch.empty((), device=device)

    def by_torch() -> None:
        torch.sum(data, dim=0, out=total)

    works: dict[str, Work] = {"torch": by_torch}
    if device.type == "cuda":
        from tokenyard_lab.bench.read_kernel import reading

        works["kernel"] = reading(data)
    return works


def _square(device: torch.device, dtype: torch.dtype) -> Tensor:
    side, draw = SQUARE[device.type], torch.Generator(device).manual_seed(0)
    return torch.randn(side, side, device=device, generator=draw).to(dtype)


def _product(device: torch.device, dtype: torch.dtype) -> Work:
    a = _square(device, dtype)
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, a.t(), out=out)

    return multiply


def _fp8_rate(device: torch.device, clock: Clock) -> float | None:
    a = _square(device, torch.bfloat16).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled_mm: Any = torch._scaled_mm

    def multiply() -> None:
        scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    if device.type == "cpu":  # it would be emulated
        return None
    try:
        return 2 * float(SQUARE[device.type]) ** 3 / _fastest(clock, {"fp8": multiply})
    except (RuntimeError, NotImplementedError, ValueError):  # GPUs before Ada, and some builds of torch
        return None
