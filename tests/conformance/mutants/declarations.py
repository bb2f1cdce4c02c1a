"""Transports that declare or count what is not so."""

import dataclasses

from tokenyard.exchange import SharedMemoryTransport, TwoSidedTransport


class CountsNoBytes(TwoSidedTransport):
    name = "counts_no_bytes"

    def bytes_sent(self, batch, rows):
        return [0] * self.group.size


class CountsNoBytesOneSided(SharedMemoryTransport):
    name = "counts_no_bytes_one_sided"

    def bytes_sent(self, batch, rows):
        return [0] * self.group.size


class CountsEveryToken(TwoSidedTransport):
    """Counts all tokens for all ranks, as if it gathered."""

    name = "counts_every_token"

    def bytes_sent(self, batch, rows):
        return [batch.num_tokens * batch.spec.dispatch_layout.stride] * self.group.size


class PlansHalf(TwoSidedTransport):
    """Says that it needs half of the memory that it takes."""

    name = "plans_half"

    @classmethod
    def region_bytes(cls, spec):
        whole = super().region_bytes(spec)
        return dataclasses.replace(whole, dispatch=whole.dispatch // 2)


class PlansNothingOneSided(SharedMemoryTransport):
    """Plans with one size of a workspace, and makes another."""

    name = "plans_nothing_one_sided"

    def layout_for(self, specs):
        needed = super().layout_for(specs)
        return dataclasses.replace(needed, dispatch=3 * needed.dispatch)


class SaysItCarriesLogits(TwoSidedTransport):
    """Declares that logits can travel, and has no way for them."""

    name = "says_it_carries_logits"
    carries_logits = True


class SaysItWatches(TwoSidedTransport):
    """Does not let anybody look at results before others are told of them."""

    name = "says_it_watches"

    def send_back(self, results):
        return super().send_back(dataclasses.replace(results, on_results_written=lambda: None))
