"""Which kernels the fused experts of a layer can launch, found by recording their launches.

A launch depends on how the weights are held, on the form in which rows arrive, and on the number of rows; on the last
one only through a few choices (`steps`). For each combination `FusedExperts.launch` runs on tensors of the meta device,
inside of `gpu_kernels.recorded`. Nothing is listed by hand here, so a new kernel cannot be forgotten.

How weights will be held is not known before they are loaded: experts pack, recode or box them, if their values allow it
and they were not adopted. All forms that a layer's weights may have are recorded (`stand_ins`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor, nn

from tokenyard.experts.base import Experts
from tokenyard.experts.fused import kernel_choice, recoding
from tokenyard.experts.fused.launch import CHUNK, LONG_SUMS, MANY_ROWS
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import weight_format
from tokenyard.gpu_kernels import is_aligned, kernel_device
from tokenyard.rows import ReceivedRows

if TYPE_CHECKING:
    from tokenyard.experts.fused.experts import FusedExperts

# The most rows whose every number is looked at; above them, the numbers in steps of 1 / FINE.
EVERY_NUMBER, FINE = 64, 32


def record_launches(
    experts: FusedExperts, received: Callable[[int], ReceivedRows], most_rows: int, *, finalize: bool
) -> None:
    """Record what the experts launch for batches of up to `most_rows` rows, of the form that `received` makes."""
    sample = received(1)
    rows, _ = experts._rows(sample)

    def choices(num_rows: int) -> object:
        tiles = experts.tiles_for(num_rows, rows.format.name, may_be_empty=sample.may_be_empty)
        places = num_rows * experts.spec.top_k
        limits = (num_rows, LONG_SUMS), (num_rows, MANY_ROWS), (places, MANY_ROWS)
        one_chunk = num_rows <= CHUNK // triton.next_power_of_2(experts.spec.top_k)
        return tiles, one_chunk, *(number >= limit for number, limit in limits)

    for num_rows in steps(choices, most_rows):
        experts.launch(received(num_rows), finalize=finalize)


def steps(choices: Callable[[int], object], most: int) -> list[int]:
    """A number from 1 to `most` for each value that `choices` has there, if it changes rarely.

    >>> steps(lambda number: number > 100, 1000)
    [1, 101]
    """
    if most < 1:
        return []
    numbers, number = [], 1
    while number < most:
        numbers.append(number)
        number += max(1, number // FINE if number >= EVERY_NUMBER else 1)
    numbers.append(most)
    found = {choices(1): 1}
    for start, high in pairwise(numbers):
        low = start
        while choices(low) != choices(high):  # find all changes in between
            first, last = low, high
            while last - first > 1:
                middle = (first + last) // 2
                first, last = (middle, last) if choices(middle) == choices(low) else (first, middle)
            low = last
            found.setdefault(choices(low), low)
    return list(found.values())


def stand_ins(cls: type[FusedExperts], spec: ExpertsSpec) -> Iterator[FusedExperts]:
    """Experts without numbers, on the meta device: one for each form in which weights of this spec may be held."""
    device = kernel_device(torch.device("meta"))
    quantized = weight_format(spec.weights).quantized
    yield _stand_in(cls, spec, _given(spec))
    if cls.boxes and kernel_choice.can_run_boxed(spec, device):
        held = _given(spec)
        for name in ("w13", "w2"):
            held[f"{name}_boxes"] = held.pop(f"{name}_data" if quantized else name)
        yield _stand_in(cls, spec, held)
    if cls.recodes and spec.weights == "mxfp8" and kernel_choice.takes_e4m3(device):
        yield _stand_in(cls, spec, _recoded(spec))
    if kernel_choice.has_packed_kernels(spec, device):
        expandable = (
            cls.expands and spec.weights == "mxfp4" and kernel_choice.can_run_specialized(spec, device)
        )
        for codes in (False, True) if kernel_choice.can_run_codes(spec) else (False,):
            for bases in (False, True) if expandable else (False,):
                yield _stand_in(cls, spec, _packed(spec, codes=codes, bases=bases))


def stand_in_for(experts: Experts) -> FusedExperts:
    """Experts without numbers that hold their weights as these do."""
    buffers = dict(experts.named_buffers(recurse=False))
    return _stand_in(
        type(experts),  # type: ignore[arg-type]
        experts.spec,
        {name: _meta(buffer.shape, buffer.dtype, is_aligned(buffer)) for name, buffer in buffers.items()},
    )


def _stand_in(cls: type[FusedExperts], spec: ExpertsSpec, buffers: dict[str, Tensor]) -> FusedExperts:
    experts = cls.__new__(cls)
    nn.Module.__init__(experts)
    experts.spec = spec
    for name, buffer in buffers.items():
        experts.register_buffer(name, buffer)
    return experts


def _meta(shape: Sequence[int], dtype: torch.dtype, is_aligned: bool = True) -> Tensor:
    spare = 0 if is_aligned else 1
    return torch.empty(math.prod(shape) + spare, dtype=dtype, device="meta")[spare:].view(tuple(shape))


def _given(spec: ExpertsSpec) -> dict[str, Tensor]:
    """The weights as `Experts` holds them."""
    format, held = weight_format(spec.weights), {}
    for name, shape in spec.shapes().items():
        if name.startswith("b"):
            held[name] = _meta(shape, WEIGHT_DTYPES.get(spec.weights, torch.bfloat16))
            continue
        for payload, declared in format.payloads(*shape[1:]).items():
            full = f"{name}_{payload}" if format.quantized else name
            held[full] = _meta((shape[0], *declared.shape), declared.dtype)
    return held


def _recoded(spec: ExpertsSpec) -> dict[str, Tensor]:
    """mxfp8 weights as blocks of e4m3."""
    held = _given(spec)
    for name in ("w13", "w2"):
        blocks = recoding.empty_blocks(spec.shapes()[name], torch.device("meta")).payloads
        del held[f"{name}_data"], held[f"{name}_scales"]
        held |= {f"{name}_blocks": blocks["data"], f"{name}_block_scales": blocks["scales"]}
    return held


def _packed(spec: ExpertsSpec, *, codes: bool, bases: bool) -> dict[str, Tensor]:
    """Packed 4-bit weights. Kernels get their shapes as constants; the sizes of these buffers do not matter."""
    held = _given(spec)
    for name in ("w13", "w2"):
        del held[f"{name}_data"], held[f"{name}_scales"]
        held[f"{name}_words"] = _meta((1024,), torch.int32)
        held[f"{name}_word_scales"] = _meta(
            (1024,), torch.bfloat16 if spec.weights == "mxint4" else torch.int32
        )
        if codes:
            held[f"{name}_largest"] = _meta((1024,), torch.int32)
        if bases:
            held[f"{name}_bases"] = recoding.empty_blocks(spec.shapes()[name], torch.device("meta")).payloads[
                "scales"
            ]
    return held
