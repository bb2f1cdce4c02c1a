"""Changes that make the exchange itself wrong, whatever its transport."""

import dataclasses
from contextlib import nullcontext

import torch

from tokenyard.exchange import Arrival, RoundTrip, batch_maker
from tokenyard.exchange.passes import RowBound
from tokenyard.exchange.stats import LayerStats
from tokenyard.rows import CombinedRows


def takes_old_handles(patch):
    right = RoundTrip.combine

    def combine(self, result, **options):
        if self.arrival not in self._trips.in_flight and self._exchange.rounds:
            return CombinedRows(y_TH=torch.zeros(self.arrival.routes.num_tokens, 1))
        return right(self, result, **options)

    patch.setattr(RoundTrip, "combine", combine)


def no_limit(patch):
    """Takes more tokens than there is room for."""
    right = batch_maker.check_batch

    def check_batch(spec, *batch, **options):
        return right(dataclasses.replace(spec, max_tokens=10**6), *batch, **options)

    patch.setattr(batch_maker, "check_batch", check_batch)


def counts_once(patch):
    """Counts the first round of each layer, and no other."""
    right = LayerStats.count_dispatch

    def count_dispatch(self, *counted, **kind):
        if not self.rounds:
            right(self, *counted, **kind)

    patch.setattr(LayerStats, "count_dispatch", count_dispatch)


def ignores_the_bound(patch):
    """Sends all rows of a batch, however many come to a rank."""
    patch.setattr(RowBound, "hear", lambda self, counts_by_rank: None)


def forgets_later_passes(patch):
    """Ends with the first pass of a batch."""
    patch.setattr(Arrival, "has_more", False)


def never_waits(patch):
    """Does not count the seconds in which it waits."""
    patch.setattr(LayerStats, "waiting", lambda self, phase: nullcontext())


def drops_uncounted(patch):
    patch.setattr(LayerStats, "count_dropped", lambda self, dropped_TK: None)
