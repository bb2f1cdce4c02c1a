"""Exchanges with a fault each, which a soak must find."""

import os
from typing import ClassVar

import torch

from tokenyard.exchange import TwoSidedExchange
from tokenyard.rows import CombinedRows

LEAKED = 200_000  # bytes in every round trip


class KeepsBytes(TwoSidedExchange):
    """Remembers something of every round trip."""

    name = "keeps_bytes"
    kept: ClassVar[list[bytes]] = []

    def combine(self, dispatched, result, **options):
        self.kept.append(os.urandom(LEAKED))
        return super().combine(dispatched, result, **options)


class KeepsDescriptors(TwoSidedExchange):
    """Opens something in every plan, and never closes it."""

    name = "keeps_descriptors"
    kept: ClassVar[list[int]] = []

    def close(self):
        self.kept.append(os.dup(0))
        super().close()


class FlipsABit(TwoSidedExchange):
    """Now and then a bit of a result is another one."""

    name = "flips_a_bit"

    def combine(self, dispatched, result, **options):
        combined = super().combine(dispatched, result, **options)
        y_TH = combined.y_TH
        if dispatched.round % 5 or not y_TH.numel():
            return combined
        flipped_TH = y_TH.clone()
        flipped_TH.view(torch.uint8)[0, 0] ^= 1
        return CombinedRows(y_TH=flipped_TH)


class NeverComes(TwoSidedExchange):
    """In its third round trip, rank 1 waits for nobody knows what."""

    name = "never_comes"

    def _load_out(self, cargo, round, outgoing):
        if round == 3 and self.group.rank == 1:
            raise SystemExit  # no error of ours, and nobody is told
        return super()._load_out(cargo, round, outgoing)


class Raises(TwoSidedExchange):
    """In its third round trip, rank 1 raises."""

    name = "raises"

    def _load_out(self, cargo, round, outgoing):
        if round == 3 and self.group.rank == 1:
            raise RuntimeError("a fault that was planted")
        return super()._load_out(cargo, round, outgoing)
