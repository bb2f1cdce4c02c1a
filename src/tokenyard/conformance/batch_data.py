"""The kinds of data that the rows and routes of a batch can have. Checks multiply them with what a user can do.

DATA["equal codes"].change(x_TH, ids_TK, weights_TK)   →  rows that are multiples of each other, with their routes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Change = Callable[[Tensor, torch.Generator], Tensor]
Tokens = Callable[[int, int], int]


def _any_number(rank: int, most: int) -> int:
    """One to four tokens, not the same number on each rank."""
    return min(most, rank % 4 + 1)


@dataclass(frozen=True, kw_only=True)
class DataKind:
    """How rows, weights and ids of a batch differ from random ones. Each change returns a tensor of the same shape."""

    rows: Change | None = None
    weights: Change | None = None
    ids: Change | None = None
    tokens: Tokens = _any_number  # the tokens of a rank, given the most that it may have
    is_bounded: bool = True  # whether results are finite, so that a bound on their error is known

    def change(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, ids and weights of this kind, made of ordinary ones; the same for the same seed."""
        draw = torch.Generator().manual_seed(seed)
        tensors = [
            tensor if change is None else change(tensor, draw)
            for change, tensor in ((self.rows, x_TH), (self.ids, ids_TK), (self.weights, weights_TK))
        ]
        return tensors[0], tensors[1], tensors[2]


def _some(x_TH: Tensor, draw: torch.Generator, numbers: list[float], share: float = 0.15) -> Tensor:
    """Rows of which every second has some of these numbers, the first of them in its first place."""
    chosen_TH = torch.rand(x_TH.shape, generator=draw) < share
    chosen_TH[1::2] = False
    chosen_TH[::2, :1] = True
    which_N = torch.arange(int(chosen_TH.sum())) % len(numbers)
    x_TH = x_TH.clone()
    x_TH[chosen_TH] = torch.tensor(numbers, dtype=x_TH.dtype)[which_N]
    return x_TH


def _nan_and_inf(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    return _some(x_TH, draw, [math.nan, math.inf, -math.inf])


def _zeros(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    x_TH = _some(x_TH, draw, [-0.0, 0.0], share=0.5)
    x_TH[1::3] *= 0.0
    return x_TH


def _huge(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    """A row of huge numbers, a row with a few of the largest, and ordinary ones."""
    kind = torch.finfo(x_TH.dtype)
    x_TH = _some(x_TH, draw, [kind.max, kind.min, kind.max / 2])
    x_TH[1::4] *= min(2.0**30, kind.max / 64)
    return x_TH


def large(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    """Numbers of some 10⁵ (in float16, some 10³), whose products a float32 can hold."""
    return x_TH * (64.0 if x_TH.dtype == torch.float16 else 2.0**18)


def _tiny(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    kind = torch.finfo(x_TH.dtype)
    subnormal = kind.smallest_normal * kind.eps
    return _some(x_TH * 2.0**-13, draw, [subnormal, -subnormal, kind.smallest_normal])


def _equal_rows(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    return x_TH[:1].expand_as(x_TH).contiguous()


def _equal_codes(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    """Rows that are multiples of the first one by powers of two: a code of numbers with a scale is the same for all."""
    powers_T = torch.arange(len(x_TH)) % 4
    return (x_TH[:1].float() * torch.exp2(powers_T.float()).unsqueeze(1)).to(x_TH.dtype)


def _strided(x_TH: Tensor, draw: torch.Generator) -> Tensor:
    return torch.stack([x_TH, x_TH + 1], dim=2)[:, :, 0]


def _signed(weights_TK: Tensor, draw: torch.Generator) -> Tensor:
    """Weights of which a third is negative, and a third zero."""
    signs_N = torch.arange(weights_TK.numel()) % 3 - 1
    return weights_TK * signs_N.view(weights_TK.shape)


def _repeated(ids_TK: Tensor, draw: torch.Generator) -> Tensor:
    return ids_TK[:, :1].expand_as(ids_TK).contiguous()


def _gaps(ids_TK: Tensor, draw: torch.Generator) -> Tensor:
    ids_TK = ids_TK.clone()
    ids_TK[::2, :1] = -1
    ids_TK[1::3] = -1
    return ids_TK


DATA: dict[str, DataKind] = {
    "ordinary numbers": DataKind(),
    "NaN and Inf": DataKind(rows=_nan_and_inf, is_bounded=False),
    "zeros of both signs": DataKind(rows=_zeros, weights=_signed),
    "huge numbers": DataKind(rows=_huge, is_bounded=False),
    "tiny numbers": DataKind(rows=_tiny),
    "equal rows": DataKind(rows=_equal_rows),
    "equal codes": DataKind(rows=_equal_codes),
    "negative and zero weights": DataKind(weights=_signed),
    "repeated experts": DataKind(ids=_repeated),
    "choices of nobody": DataKind(ids=_gaps),
    "strided rows": DataKind(rows=_strided, ids=_strided),
    "one row": DataKind(tokens=lambda rank, most: 1),
    "an odd number of rows": DataKind(tokens=lambda rank, most: min(most, 7 - 2 * (rank % 3))),
    "as many rows as may come": DataKind(tokens=lambda rank, most: most),
    "no rows on some ranks": DataKind(tokens=lambda rank, most: min(most, 3) * (rank % 2)),
}
