"""Exchanges with a fault each, which a soak must find."""

import os
from typing import ClassVar

import torch

from tokenyard.exchange import Pending, RowsAtHome, TwoSidedTransport

LEAKED = 1_000_000  # bytes in every round trip


class KeepsEverything(TwoSidedTransport):
    """Remembers something of every round trip, and leaves something open after every plan."""

    name = "keeps_everything"
    kept: ClassVar[list[bytes]] = []
    left_open: ClassVar[list[int]] = []

    def send_back(self, results):
        self.kept.append(os.urandom(LEAKED))
        return super().send_back(results)

    def close(self):
        self.left_open.append(os.dup(0))
        super().close()

    @classmethod
    def let_go(cls):
        cls.kept.clear()
        while cls.left_open:
            os.close(cls.left_open.pop())


class FlipsABit(TwoSidedTransport):
    """Now and then a bit of a result is another one."""

    name = "flips_a_bit"

    def send_back(self, results):
        pending = super().send_back(results)
        if results.arrival.round % 5:
            return pending
        return Pending(lambda: Flipped(**vars(pending.wait())))


class Flipped(RowsAtHome):
    def sum_into(self, out_TH, add):
        y_TH = super().sum_into(out_TH, add).clone()
        if y_TH.numel():
            y_TH.view(torch.uint8)[0, 0] ^= 1
        return y_TH


class NeverComes(TwoSidedTransport):
    """In its third round trip, rank 1 waits for nobody knows what."""

    name = "never_comes"

    def send(self, batch):
        if batch.round == 3 and self.group.rank == 1:
            raise SystemExit  # no error of ours, and nobody is told
        return super().send(batch)


class Raises(TwoSidedTransport):
    """In its third round trip, rank 1 raises."""

    name = "raises"

    def send(self, batch):
        if batch.round == 3 and self.group.rank == 1:
            raise RuntimeError("a fault that was planted")
        return super().send(batch)
