"""The best rates of a machine, measured in the run that uses them: reading and copying, plain and fp8 products.

A rate is the fastest of several ways to do the same. All are per µs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenyard.machine_rates import SQUARE, Clock, Work, copy_rate, fastest, product_rate, square
from tokenyard_lab.bench.clock import REST, RESTED_ROUNDS, check_gpu, give_back_memory, graph_clock

ON_THE_CPU = "leave out --device to measure on the CPU"
# By kind of device: bytes that are read, far more than caches hold.
READ_BYTES = {"cuda": 4 * 2**30, "cpu": 64 * 2**20}


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
        read=READ_BYTES[device.type] / fastest(clock, _reads(device)),
        copy=copy_rate(device, clock),
        product=product_rate(device, clock),
        fp8=_fp8_rate(device, clock),
    )
    give_back_memory(device)
    return rates


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


def _fp8_rate(device: torch.device, clock: Clock) -> float | None:
    a = square(device, torch.bfloat16).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled_mm: Any = torch._scaled_mm

    def multiply() -> None:
        scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    if device.type == "cpu":  # it would be emulated
        return None
    try:
        return 2 * float(SQUARE[device.type]) ** 3 / fastest(clock, {"fp8": multiply})
    except (RuntimeError, NotImplementedError, ValueError):  # GPUs before Ada, and some builds of torch
        return None
