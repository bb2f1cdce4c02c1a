"""The twin: one process that computes what all ranks do, without a group, and must give **bitwise** the same.

It groups results by rank (or by choice, with `sum="choices"`), rounds as the wire does, and sums in the same order;
only the moving of bytes is left out. With the reference experts, whose result for a row does not depend on other rows,
any exchange on any kind of ranks must give exactly these bits, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tokenyard.experts import ExpertWeights
from tokenyard.formats import Format, for_dtype
from tokenyard.layer.building import build_experts
from tokenyard.layer.call import run_experts
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import ChoiceRows, ExpertResult, ExpertRows, LocalRoutes, ReceivedRows


def twin(wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes, source_rank: int) -> Tensor:
    """The output that rank `source_rank` must get for its tokens. `weights` are those of all E experts."""
    spec = wiring.exchange_spec
    if spec.sums_choices:
        return _sum_of_choices(wiring, weights, x_TH, routes, source_rank)
    sums = [_Sum(x_TH) for _ in range(max(spec.hosts, default=0) + 1)]  # one for each host
    for rank, here_TK, result in _results(wiring, weights, x_TH, routes, source_rank):
        assert isinstance(result, ExpertRows)  # there is no place to write them to
        goes_T = here_TK.any(dim=1)
        wire = for_dtype(spec.dtype) if spec.hosts else spec.combine_wire
        sums[spec.hosts[rank] if spec.hosts else 0].add(goes_T, result.rows_RH[goes_T], wire)
    if not spec.hosts:
        return sums[0].rows_TH.to(x_TH.dtype)
    over_hosts = _Sum(x_TH)
    for host in sums:
        over_hosts.add(host.there_T, host.rows_TH[host.there_T], spec.combine_wire)
    return over_hosts.rows_TH.to(x_TH.dtype)


def _sum_of_choices(
    wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes, source_rank: int
) -> Tensor:
    """The sum of each token's results, encoded in the combine wire one by one, in the order of choices."""
    results_TKH = torch.zeros(*routes.topk_ids_TK.shape, x_TH.shape[1])
    for _, here_TK, result in _results(wiring, weights, x_TH, routes, source_rank):
        assert isinstance(result, ChoiceRows)
        crossed = wiring.exchange_spec.combine_wire.encode(result.rows_NH)
        results_TKH[here_TK] = crossed.decode(torch.float32)
    y_TH = torch.zeros(x_TH.shape)
    for choice in range(results_TKH.shape[1]):
        y_TH += results_TKH[:, choice]
    return y_TH.to(x_TH.dtype)


def _results(
    wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes, source_rank: int
) -> Iterator[tuple[int, Tensor, ExpertResult]]:
    """For each rank that gets rows: the rank, which choices it owns, and what its experts return for all rows."""
    placement, rows = wiring.exchange_spec.placement, wiring.wire.encode(x_TH)
    rank_TK, local_TK = placement.resolve(routes.topk_ids_TK, source_rank)
    for rank in range(placement.world):
        here_TK = rank_TK == rank
        if bool(here_TK.any()):
            experts = build_experts(
                wiring, rank, weights.select(list(placement.local_experts(rank))), adopt=True
            )
            local = LocalRoutes(
                ids_RK=torch.where(here_TK, local_TK, -1),
                weights_RK=torch.where(here_TK, routes.topk_weights_TK.float(), 0.0),
            )
            received = ReceivedRows(rows=rows, routes=local, counts_W=(rows.num_rows,))
            yield rank, here_TK, run_experts(wiring, experts, received)


class _Sum:
    """A float32 sum, in the order of the additions, of rows that were encoded and decoded in a format."""

    def __init__(self, x_TH: Tensor) -> None:
        self.rows_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        self.there_T = torch.zeros(x_TH.shape[0], dtype=torch.bool)  # the tokens that have a row in it

    def add(self, goes_T: Tensor, rows_NH: Tensor, wire: Format) -> None:
        self.rows_TH[goes_T] += wire.encode(rows_NH).decode(torch.float32)
        self.there_T |= goes_T
