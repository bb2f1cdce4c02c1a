"""The torch twins of the sort and of `row_blocks`.

The twins of the products are `ReferenceExperts`; the twin of the sum is `UnfinalizedRows.finish`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.formats.base import EncodedRows


def sort_pairs(ids_RK: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """The pairs of `order_N`, and the tiles `[n, 5]`.

    A tile has its expert, first place, number of pairs, and the first tile and number of tiles of its expert.

    >>> ids_RK = torch.tensor([[1, -1], [0, 1], [1, -1]])  # row 1 has two experts, the others have one
    >>> order_N, tiles = sort_pairs(ids_RK, experts=2, tile=2)
    >>> order_N.tolist(), tiles.tolist()
    ([-3, 0, -4, 4], [[0, 0, 1, 0, 1], [1, 1, 2, 1, 2], [1, 3, 1, 1, 2]])
    """
    is_here_RK = (ids_RK >= 0) & (ids_RK < experts)
    pairs_N = is_here_RK.flatten().nonzero().squeeze(1)
    expert_N = ids_RK.flatten()[pairs_N]
    alone_N = (is_here_RK.sum(1) == 1)[pairs_N // ids_RK.shape[1]]
    by_expert = torch.argsort(expert_N, stable=True)
    order_N = torch.where(alone_N, pairs_N, ~pairs_N)[by_expert]
    counts = torch.bincount(expert_N, minlength=experts).tolist()
    tiles: list[tuple[int, ...]] = []
    start = 0
    for expert, count in enumerate(counts):
        own = (len(tiles), -(-count // tile))
        tiles += [(expert, start + first, min(tile, count - first), *own) for first in range(0, count, tile)]
        start += count
    return order_N.int(), torch.tensor(tiles, dtype=torch.int32).view(-1, 5)


def recode_rows(rows: EncodedRows) -> tuple[Tensor, Tensor]:
    """Rows of mxfp8 as rows of fp8_block128: data `[R, width]` and scales `[R, width / 128]`.

    >>> from tokenyard.formats import get
    >>> rows = get("mxfp8").encode(torch.tensor([[448.0] * 32 + [0.3]]))
    >>> data, scales = recode_rows(rows)
    >>> rows.payloads["scales"].tolist(), scales.tolist(), data[0, 30:34].float().tolist()
    ([[127, 117]], [[1.0]], [448.0, 448.0, 0.3125, 0.0])
    """
    inputs, pad = rows.hidden_size, -rows.hidden_size % 128
    values = functional.pad(rows.payloads["data"].float()[:, :inputs], (0, pad)).unflatten(1, (-1, 4, 32))
    byte = rows.payloads["scales"][:, : -(-inputs // 32)].to(torch.int32)
    byte = functional.pad(byte, (0, pad // 32)).unflatten(1, (-1, 4))
    block_byte = torch.where((values != 0).any(3), byte, 0).amax(2)
    numbers = torch.ldexp(values.double(), (byte - block_byte.unsqueeze(2)).unsqueeze(3)).float()
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(numbers.isnan(), 0x7F)
    is_finite = functional.pad(rows.decode(), (0, pad)).isfinite().unflatten(1, (-1, 128)).all(2)
    scales = torch.ldexp(torch.ones_like(block_byte, dtype=torch.float64), block_byte - 127).float()
    return codes.view(torch.float8_e4m3fn).flatten(1), scales.masked_fill(~is_finite, torch.nan)
