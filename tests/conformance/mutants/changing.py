"""What transports that are wrong on purpose share: they change what a right one hands out."""

import dataclasses

import torch

from tokenyard.exchange import Pending, ResultsAtHome, TwoSidedTransport


def rerouted(batch, routes):
    """A batch along other routes, and announced so."""
    mine = dataclasses.replace(batch.announcements.mine, counts=tuple(routes.counts))
    announcements = dataclasses.replace(batch.announcements, say=lambda: mine)
    return dataclasses.replace(batch, routes=routes, announcements=announcements)


def to_ranks(routes, tokens_by_rank):
    """Routes that send these tokens to each rank."""
    changed = dataclasses.replace(routes)
    ranks = [torch.full_like(tokens, rank) for rank, tokens in enumerate(tokens_by_rank)]
    changed.__dict__["rows_out"] = torch.cat(ranks), torch.cat(list(tokens_by_rank))
    return changed


class Renamed(TwoSidedTransport):
    """Right, under another name."""

    name = "renamed"


class ChangesReceived(TwoSidedTransport):
    """Hands out what `change` makes of the received rows."""

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            arrival = pending.wait()
            dense = dataclasses.replace(arrival.received, rows=arrival.received.dense(), slots_R=None)
            return dataclasses.replace(arrival, received=self.change(dense))

        return Pending(wait)


class ChangesResults(TwoSidedTransport):
    """Hands out what `change` makes of the sum of a round; `change_terms` may take other terms to add."""

    def send_back(self, results):
        pending = super().send_back(results)
        return Pending(lambda: Changed(self, results.arrival, pending.wait()))

    def change_terms(self, add):
        return add

    def change_rows(self, rows_by_rank):
        return rows_by_rank

    def change(self, arrival, y_TH):
        return y_TH


class Changed(ResultsAtHome):
    def __init__(self, transport, arrival, home):
        self.transport, self.arrival, self.home = transport, arrival, home

    def sum_into(self, out_TH, add):
        y_TH = self.home.sum_into(out_TH, self.transport.change_terms(add))
        return self.transport.change(self.arrival, y_TH)

    def by_rank(self):
        rows_by_rank, tokens_by_rank = self.home.by_rank()
        return self.transport.change_rows(rows_by_rank), tokens_by_rank
