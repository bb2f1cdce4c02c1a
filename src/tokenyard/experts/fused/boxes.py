"""Matrices held box by box, in the order in which the kernel with specialized warps loads them.

`kernels.specialized` loads weights by TMA, 128 bytes of each of 128 lines (outputs) at a time. In a matrix that is held
line by line, such a box is 128 pieces of memory, a line apart. Here it is 16 KB in a row.

    given    [L, N, K]                           a line has K inputs
    boxes    [L, N / 128, K / unit, 128, unit]   unit: the inputs in 128 bytes

Both have the same bytes and the same shape `[L, N, K]`. N and K must be multiples of 128. The number of line n and
input k is at this place of an expert's matrix, which kernels that do not use TMA compute (`kernels.decoding`):

    n // 128 · (128 · K) + n % 128 · unit  +  k // unit · (128 · unit) + k % unit
"""

from __future__ import annotations

import torch
from torch import Tensor

# Lines of a box.
LINES = 128
# The inputs in 128 bytes of a line, by the format of the weights. A cast of a buffer does not change its order.
UNITS = {"bf16": 64, "fp16": 64, "fp8_block128": 128}


def box(matrix: Tensor, unit: int, *, into: Tensor | None = None) -> Tensor:
    """Matrices `[L, N, K]` box by box: in new memory, or in `into`, which may be the matrices themselves.

    One expert is copied at a time, so that no further memory is needed.

    >>> matrix = torch.arange(128 * 128).view(1, 128, 128)
    >>> boxes = box(matrix, 64)
    >>> boxes.view(-1)[[0, 1, 63, 64, 65, 128 * 64]].tolist()
    [0, 1, 63, 128, 129, 64]
    >>> torch.equal(unbox(boxes, 64), matrix)
    True
    """
    into = torch.empty_like(matrix, memory_format=torch.contiguous_format) if into is None else into
    for given, boxes in zip(matrix, into, strict=True):
        parts = given.to(boxes.device).unflatten(1, (-1, unit)).unflatten(0, (-1, LINES))
        boxes.copy_(parts.transpose(1, 2).reshape(boxes.shape))
    return into


def unbox(boxes: Tensor, unit: int, *, into: Tensor | None = None) -> Tensor:
    """The matrices `[L, N, K]` that `box` was given: in new memory, or in `into`, which may be the boxes themselves."""
    into = torch.empty_like(boxes) if into is None else into
    _, lines, inputs = boxes.shape
    for held, given in zip(boxes, into, strict=True):
        parts = held.view(lines // LINES, inputs // unit, LINES, unit)
        given.copy_(parts.transpose(1, 2).reshape(given.shape))
    return into
