"""What a relay forwards inside its host: its own tokens and those that came from other hosts, as one batch.

Inside the host each expert of each rank has an id of its own, and so has each replica: which replica serves a row
depends on the row's source rank, and is decided before the row is forwarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.exchange.announcement import Announcement, Announcements
from tokenyard.exchange.batch import Batch, BatchRoutes, tokens_by_rank
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transports.host_map import HostMap
from tokenyard.exchange.transports.one_sided.inside_host import InsideHost
from tokenyard.formats.base import as_bytes
from tokenyard.routing import Placement, Routes


@dataclass(frozen=True, kw_only=True, eq=False)
class Forwarding:
    """How the ranks of one host exchange a layer."""

    spec: ExchangeSpec  # the layer inside the host
    ranks: Sequence[int]  # the ranks of the host, as the group numbers them
    inside_rank: Tensor  # of each rank of the group: its number in the host, or -1; then -1 for nobody
    first_id: Tensor  # of each rank of the host: the id of its first expert
    choice_counts: Tensor  # counts that nobody reads: only kernels that count choices are loaded

    @classmethod
    def of(cls, spec: ExchangeSpec, hosts: HostMap, host: int, device: torch.device) -> Forwarding:
        """The forwarding of a layer inside one host."""
        ranks, inside = hosts.ranks[host], inside_spec(spec, hosts, host)
        numbers = [*(ranks.index(rank) if rank in ranks else -1 for rank in range(spec.placement.world)), -1]
        firsts = [min(experts, default=0) for experts in inside.placement.table]
        return cls(
            spec=inside,
            ranks=ranks,
            inside_rank=torch.tensor(numbers, device=device),
            first_id=torch.tensor(firsts, dtype=torch.int32, device=device),
            choice_counts=torch.zeros(inside.num_experts + 1, dtype=torch.int64, device=device),
        )

    def make_batch(
        self,
        batch: Batch,
        packets_by_rank: Sequence[Tensor],
        heard: Sequence[Announcement],
        inside: InsideHost,
    ) -> tuple[Batch, dict[int, int]]:
        """Join a rank's own batch and the packets that came to it; also return how many rows each source has."""
        spec, routes = batch.spec, batch.routes.routes
        assert isinstance(routes, Routes)
        own = {**batch.payloads, "weights": routes.topk_weights_TK.float()}
        parts: list[Mapping[str, Tensor]] = []
        resolved: list[tuple[Tensor, Tensor]] = []
        counts: dict[int, int] = {}
        for source, packets in enumerate(packets_by_rank):
            if source == batch.routes.rank:
                parts.append(own)
                resolved.append(batch.routes.resolved)
                counts[source] = batch.num_tokens
            elif len(packets):
                tensors = spec.dispatch_layout.unpack(packets)
                # An id that no expert has was damaged on the way: its row will be missing where it should have gone.
                unknown_NK = (tensors["ids"] < 0) | (tensors["ids"] >= spec.num_experts)
                rank_NK, local_NK = spec.placement.resolve(tensors["ids"].masked_fill(unknown_NK, -1), source)
                if spec.max_rows is not None and not self._are_announced(rank_NK, heard[source]):
                    rank_NK = torch.full_like(rank_NK, -1)  # there is room for announced rows only
                parts.append(tensors)
                resolved.append((rank_NK, local_NK))
                counts[source] = len(packets)
        together = {name: _joined([part[name] for part in parts]) for name in own}
        rank_TK = self.inside_rank[_joined([rank_TK for rank_TK, _ in resolved])]
        local_TK = _joined([local_TK for _, local_TK in resolved])
        forwarded_routes = BatchRoutes(
            spec=self.spec,
            routes=Routes(
                topk_ids_TK=self._ids(rank_TK, local_TK) if inside.looks_up_ids else local_TK,
                topk_weights_TK=together.pop("weights"),
            ),
            num_tokens=sum(counts.values()),
            rank=inside.group.rank,
            choices=(rank_TK, local_TK),
        )
        forwarded = Batch(
            spec=self.spec,
            round=batch.round,
            region=batch.region,
            forward=batch.forward,
            rows=spec.rows(together),
            extra={name: together[name] for name in batch.extra},
            routes=forwarded_routes,
            announcements=_inside_announcements(batch.announcements, forwarded_routes, inside),
            choice_counts=self.choice_counts if inside.counts_choices else None,
        )
        return forwarded, counts

    def _ids(self, rank_TK: Tensor, local_TK: Tensor) -> Tensor:
        """The ids that experts have inside the host, by rank and number there; -1 for nobody."""
        return torch.where(rank_TK >= 0, self.first_id[rank_TK] + local_TK, -1)

    def _are_announced(self, rank_NK: Tensor, announced: Announcement) -> bool:
        """Whether a source's rows go to the ranks of this host in the numbers that it announced."""
        rows = [tokens.numel() for tokens in tokens_by_rank(rank_NK, len(self.inside_rank) - 1)]
        return all(rows[rank] == announced.counts[rank] for rank in self.ranks)


def _inside_announcements(
    announcements: Announcements, routes: BatchRoutes, inside: InsideHost
) -> Announcements:
    return replace(
        announcements,
        announcer=announcements.announcer.once_more(inside.group),
        say=lambda: replace(announcements.mine, tokens=routes.num_tokens, counts=tuple(routes.counts)),
        spec=routes.spec,
        bound=None,
    )


def host_map(spec: ExchangeSpec) -> HostMap:
    """The hosts of a layer's ranks; all on one host, if the spec does not say."""
    return HostMap(spec.hosts or (0,) * spec.placement.world)


def inside_spec(spec: ExchangeSpec, hosts: HostMap, host: int) -> ExchangeSpec:
    """A layer as the ranks of one host exchange it: with the experts of the host, and all tokens that relays bring."""
    ends = list(accumulate(len(spec.placement.table[rank]) for rank in hosts.ranks[host]))
    placement = Placement(
        num_experts=max(1, ends[-1]),
        table=tuple(tuple(range(first, end)) for first, end in pairwise([0, *ends])),
        allow_lost=True,  # a host may have no expert
    )
    tokens = hosts.most_sources(host) * spec.max_tokens
    slots = len(hosts.ranks[host]) * tokens
    # If results cross in the layer's own dtype, the sum is rounded to it at once; else it is float32 until encoded.
    plain = [payload.dtype for payload in spec.combine_wire.payloads(spec.hidden_size)] == [spec.dtype]
    return replace(
        spec,
        num_experts=placement.num_experts,
        placement=placement,
        movable=False,  # another placement has other ids
        max_tokens=tokens,
        max_rows=None if spec.max_rows is None or spec.max_rows >= slots else spec.max_rows,
        combine_wire=formats.for_dtype(spec.dtype),
        sum_dtype=spec.dtype if plain else torch.float32,
        hosts=(),
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices by rows. As bytes: torch does not concatenate every dtype that a payload may have."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([as_bytes(part) for part in parts]).view(parts[0].dtype)
