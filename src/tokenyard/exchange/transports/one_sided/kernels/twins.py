"""What the kernels compute, in plain torch: rows, routes and counts as they must lie in memory, bit for bit.

Twins see all ranks at once: they take every rank's batch and write every rank's region, or read it. They run on any
device that torch has, and know neither chunks nor tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.exchange.batch import tokens_by_rank
from tokenyard.exchange.results import sum_over_ranks
from tokenyard.exchange.spec import ExchangeSpec


@dataclass(frozen=True, kw_only=True)
class SentBatch:
    """What one rank dispatches."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


def slots_twin(spec: ExchangeSpec, ids_TK: Tensor, rank: int) -> Tensor:
    """What `assign` computes: the slot of each token on each rank, `[T, W]`, -1 where it does not go."""
    rank_TK, _ = spec.placement.resolve(_known(spec, ids_TK), rank)
    world = torch.arange(spec.placement.world, device=ids_TK.device)
    goes_TW = (rank_TK.unsqueeze(2) == world).any(dim=1)
    return torch.where(goes_TW, goes_TW.int().cumsum(0, dtype=torch.int32) - 1, -1).int()


def push_twin(
    spec: ExchangeSpec,
    batches: Sequence[SentBatch],
    regions: Sequence[Mapping[str, Tensor]],
    max_tokens: int,
) -> list[Tensor]:
    """What a dispatch of all ranks writes into their regions (views by payload); returns the counts `[W]` of each."""
    world = spec.placement.world
    counts = [torch.zeros(world, dtype=torch.int32) for _ in range(world)]
    for source, batch in enumerate(batches):
        ids_TK = _known(spec, batch.ids_TK)
        rank_TK, local_TK = spec.placement.resolve(ids_TK, source)
        encoded = spec.wire.encode(batch.x_TH)
        for target, token_N in enumerate(tokens_by_rank(rank_TK, world)):
            region, here_NK = regions[target], rank_TK[token_N] == target
            first, last = source * max_tokens, source * max_tokens + len(token_N)
            for name, payload in encoded.select(token_N).payloads.items():
                region[name][first:last] = payload
            region["ids"][first:last] = torch.where(here_NK, local_TK[token_N], -1)
            region["ids"][last : first + max_tokens] = -1
            region["weights"][first:last] = torch.where(here_NK, batch.weights_TK[token_N].float(), 0.0)
            counts[target][source] = len(token_N)
    return counts


def place_twin(
    spec: ExchangeSpec,
    rows_RH: Tensor,
    counts: Tensor,
    region: Mapping[str, Tensor],
    max_tokens: int,
    places_N: Tensor | None = None,
) -> None:
    """What a rank's results, one for each row that it received, look like in its combine region.

    Where rows have results for each of their choices, `places_N` says where each is.
    """
    encoded, start = spec.combine_wire.encode(rows_RH), 0
    if places_N is not None:
        for name, payload in encoded.payloads.items():
            region[name][places_N] = payload
        return
    for source, count in enumerate(counts.tolist()):
        for name, payload in encoded.slice(start, start + count).payloads.items():
            region[name][source * max_tokens : source * max_tokens + count] = payload
        start += count


def pull_twin(
    spec: ExchangeSpec,
    ids_TK: Tensor,
    rank: int,
    regions: Sequence[Mapping[str, Tensor]],
    max_tokens: int,
    out_TH: Tensor,
    add: Sequence[Tensor] = (),
) -> Tensor:
    """What a rank pulls: the sum over ranks (or choices) of its tokens' results, in their order, in float32."""
    rank_TK, _ = spec.placement.resolve(_known(spec, ids_TK), rank)
    if spec.sums_choices:
        return _pull_choices_twin(spec, ids_TK, rank, regions, max_tokens, out_TH, add)
    tokens = tokens_by_rank(rank_TK, spec.placement.world)
    home = [
        spec.results(regions[w]).slice(rank * max_tokens, rank * max_tokens + len(token_N))
        for w, token_N in enumerate(tokens)
    ]
    return sum_over_ranks(home, tokens, out_TH, add)


def _pull_choices_twin(
    spec: ExchangeSpec,
    ids_TK: Tensor,
    rank: int,
    regions: Sequence[Mapping[str, Tensor]],
    max_tokens: int,
    out_TH: Tensor,
    add: Sequence[Tensor],
) -> Tensor:
    rank_TK, _ = spec.placement.resolve(_known(spec, ids_TK), rank)
    slots_TW = slots_twin(spec, ids_TK, rank)
    tokens, home = [], []
    for choice, owner_T in enumerate(rank_TK.unbind(dim=1)):
        token_N = (owner_T >= 0).nonzero().squeeze(1)
        owner_N = owner_T[token_N].tolist()
        places_N = (rank * max_tokens + slots_TW[token_N, owner_N]) * spec.top_k + choice
        payloads = {
            name: torch.stack([regions[w][name][place] for w, place in zip(owner_N, places_N, strict=True)])
            if owner_N
            else empty[:0]
            for name, empty in regions[0].items()
        }
        home.append(spec.results(payloads))
        tokens.append(token_N)
    return sum_over_ranks(home, tokens, out_TH, add)


def _known(spec: ExchangeSpec, ids_TK: Tensor) -> Tensor:
    """The ids, with -1 in place of those that no expert has, because such choices go nowhere."""
    return torch.where((ids_TK >= 0) & (ids_TK < spec.num_experts), ids_TK, -1)
