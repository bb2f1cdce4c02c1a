"""What the sort does, in torch. (The twins of the products are `ReferenceExperts`, that of the sum `finish`.)"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_pairs(ids_RK: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """`order_N`, as far as it is written, and the tiles `[n, 3]`: expert, first place, pairs.

    >>> ids_RK = torch.tensor([[1, -1], [0, 1], [1, -1]])  # row 1 has two experts, the others have one
    >>> order_N, tiles = sort_pairs(ids_RK, experts=2, tile=2)
    >>> order_N.tolist(), tiles.tolist()
    ([-3, 0, -4, 4], [[0, 0, 1], [1, 1, 2], [1, 3, 1]])
    """
    is_here_RK = (ids_RK >= 0) & (ids_RK < experts)
    pairs_N = is_here_RK.flatten().nonzero().squeeze(1)
    expert_N = ids_RK.flatten()[pairs_N]
    alone_N = (is_here_RK.sum(1) == 1)[pairs_N // ids_RK.shape[1]]
    by_expert = torch.argsort(expert_N, stable=True)
    order_N = torch.where(alone_N, pairs_N, ~pairs_N)[by_expert]
    counts = torch.bincount(expert_N, minlength=experts).tolist()
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, start + first, min(tile, count - first)) for first in range(0, count, tile)]
        start += count
    return order_N.int(), torch.tensor(tiles, dtype=torch.int32).view(-1, 3)
