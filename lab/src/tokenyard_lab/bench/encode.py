"""How fast one thread encodes rows, per format, beside the ceiling.

The unit is MB (10^6 bytes) of *bf16 input* per second, whatever the format writes, so that formats compare.
The ceiling is `x.clone()` of the same rows in the same run: reading and writing every byte once, which no
encoder that writes as much could beat, and which distinguishes a slow machine from a slow encoder. Rounds of all
formats and of the ceiling are interleaved, so that a busy neighbor slows down all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tokenyard.formats import FORMATS, Format
from tokenyard.machine_rates import host_clock
from tokenyard_lab.bench.records import Record, Spread

CEILING = "ceiling (clone)"
NOTE = "MB of bf16 rows per second, whatever the format writes; the ceiling is a copy of the same rows; one thread"


def measure_encode(num_tokens: int = 512, hidden_size: int = 7168, seconds: float = 1.0) -> list[Record]:
    """Encode bf16 rows in every quantized format on one thread, for about `seconds` per format: MB/s.

    >>> [record.parameters["format"] for record in measure_encode(num_tokens=4, hidden_size=256, seconds=0.01)]
    ['fp8_block128', 'mxfp8', 'nvfp4']
    """
    x_TH = torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    formats: list[Format] = [kind() for kind in FORMATS.values() if kind.quantized]
    calls: dict[str, Callable[[], object]] = {CEILING: x_TH.clone}
    calls |= {str(format): partial(format.encode, x_TH) for format in formats}
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = host_clock(5, seconds=seconds)(calls)
    finally:
        torch.set_num_threads(threads_before)
    rates = {name: Spread.of(x_TH.nbytes / us for us in found) for name, found in times.items()}
    return [
        Record(
            parameters={"tokens": num_tokens, "format": str(format)},
            ours=rates[str(format)],
            floor=rates[CEILING],
            details={"rounds": len(times[CEILING]), "threads": 1},
        )
        for format in formats
    ]
