"""Exchanges with a fault each, which a soak must find."""

import os
from typing import ClassVar

import torch

from tokenyard.exchange import TwoSidedExchange
from tokenyard.rows import CombinedRows

LEAKED = 1_000_000  # bytes in every round trip


class KeepsEverything(TwoSidedExchange):
    """Remembers something of every round trip, and leaves something open after every plan."""

    name = "keeps_everything"
    kept: ClassVar[list[bytes]] = []
    left_open: ClassVar[list[int]] = []

    def combine(self, dispatched, result, **options):
        self.kept.append(os.urandom(LEAKED))
        return super().combine(dispatched, result, **options)

    def close(self):
        self.left_open.append(os.dup(0))
        super().close()

    @classmethod
    def let_go(cls):
        cls.kept.clear()
        while cls.left_open:
            os.close(cls.left_open.pop())


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

    def _load_out(self, exchange_spec, round, outgoing):
        if round == 3 and self.group.rank == 1:
            raise SystemExit  # no error of ours, and nobody is told
        return super()._load_out(exchange_spec, round, outgoing)


class Raises(TwoSidedExchange):
    """In its third round trip, rank 1 raises."""

    name = "raises"

    def _load_out(self, exchange_spec, round, outgoing):
        if round == 3 and self.group.rank == 1:
            raise RuntimeError("a fault that was planted")
        return super()._load_out(exchange_spec, round, outgoing)
