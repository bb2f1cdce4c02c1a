"""Transports that are right in a plain call, and wrong in what else a user can do, or with other data."""

import dataclasses
import typing

import torch

from tests.conformance.mutants.changing import ChangesReceived, ChangesResults
from tokenyard.errors import PeerFailed
from tokenyard.exchange import Pending, TwoSidedTransport, received_rows
from tokenyard.rows import LocalRoutes


def with_rows(received, change):
    """Received rows whose payloads are what `change(name, payload)` gives."""
    rows = received.rows
    payloads = {name: change(name, payload.clone()) for name, payload in rows.payloads.items()}
    return dataclasses.replace(received, rows=dataclasses.replace(rows, payloads=payloads))


def flipped(name, payload):
    if len(payload):
        payload.view(torch.uint8)[0, 0] ^= 1
    return payload


class FlipsAheadOnly(ChangesReceived):
    """Flips a bit of batches that were started, and of no others."""

    name = "flips_ahead_only"

    def send(self, batch):
        self.ahead = batch.ahead
        return super().send(batch)

    def change(self, received):
        return with_rows(received, flipped) if self.ahead else received


class OneBufferForTwo(ChangesReceived):
    """One buffer for received rows, in plans with two batches in flight only."""

    name = "one_buffer_for_two"

    def change(self, received):
        if self.in_flight != 2:
            return received
        pools = self.__dict__.setdefault("pools", {})

        def pooled(name, payload):
            key = (name, payload.dtype, payload.shape[1])
            pool = pools.setdefault(key, torch.zeros(500, payload.shape[1], dtype=payload.dtype))
            return pool[: len(payload)].copy_(payload)

        return with_rows(received, pooled)


class FirstPlacement(ChangesReceived):
    """Hands out ids of the placement that a layer had first."""

    name = "first_placement"

    def serve(self, specs):
        super().serve(specs)
        self.first = {spec.index: spec.placement for spec in specs} | self.__dict__.get("first", {})

    def send(self, batch):
        self.index, self.now = batch.spec.index, batch.spec.placement
        return super().send(batch)

    def change(self, received):
        then, mine = (
            self.first[self.index].local_experts(self.group.rank),
            self.now.local_experts(self.group.rank),
        )
        table = torch.tensor([then.index(e) if e in then else 0 for e in mine] + [-1], dtype=torch.int32)
        ids_RK = table[received.routes.ids_RK.long()]
        return dataclasses.replace(received, routes=dataclasses.replace(received.routes, ids_RK=ids_RK))


class HidesNanOfRows(ChangesReceived):
    name = "hides_nan_of_rows"

    def change(self, received):
        return with_rows(
            received, lambda name, payload: payload.nan_to_num() if payload.dtype.itemsize > 1 else payload
        )


class HidesNanOfResults(ChangesResults):
    name = "hides_nan_of_results"

    def change(self, arrival, y_TH):
        return y_TH.nan_to_num_()


class SharesScales(ChangesReceived):
    """Rows with equal data get the scales of the first of them."""

    name = "shares_scales"

    def change(self, received):
        payloads = received.rows.payloads
        if "scales" not in payloads or not received.num_rows:
            return received
        data = payloads["data"].contiguous().view(torch.uint8)
        same_RR = (data.unsqueeze(1) == data.unsqueeze(0)).all(dim=2)
        first_R = same_RR.int().argmax(dim=1)
        return with_rows(received, lambda name, payload: payload[first_R] if name == "scales" else payload)


class ZeroesAfterIdleCalls(ChangesResults):
    """From the third call without rows on, the last result that had some is zeroed."""

    name = "zeroes_after_idle_calls"

    def change(self, arrival, y_TH):
        if len(y_TH):
            self.last, self.idle = y_TH, 0
        else:
            self.idle = self.__dict__.get("idle", 0) + 1
            if self.idle >= 3 and "last" in self.__dict__:
                self.last.zero_()
        return y_TH


class LosesTheSignOfZeros(ChangesReceived):
    name = "loses_the_sign_of_zeros"

    def change(self, received):
        return with_rows(
            received, lambda name, payload: payload + 0 if payload.dtype.itemsize > 1 else payload
        )


class LeaksPlans(TwoSidedTransport):
    """Memory for each plan stays for ever."""

    name = "leaks_plans"
    kept: typing.ClassVar = []

    def serve(self, specs):
        super().serve(specs)
        self.kept.append(torch.empty(100_000))


class KeepsAFailure(ChangesResults):
    """After a round that failed on some rank, the next results have one more."""

    name = "keeps_a_failure"

    def fail(self, failure):
        self.failed = True
        super().fail(failure)

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            try:
                return pending.wait()
            except PeerFailed:
                self.failed = True
                raise

        return Pending(wait)

    def change(self, arrival, y_TH):
        return y_TH.add_(self.__dict__.pop("failed", False))


class WrongFromRound(ChangesResults):
    first: typing.ClassVar[int]

    def change(self, arrival, y_TH):
        return y_TH.add_(arrival.round >= self.first)


class WrongFromRound100(WrongFromRound):
    name, first = "wrong_from_round_100", 100


class WrongFromRound4096(WrongFromRound):
    name, first = "wrong_from_round_4096", 4096


class RaisesLater(TwoSidedTransport):
    """Hands out no rows when a rank has failed, and raises in the combine."""

    name = "raises_later"

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            try:
                return pending.wait()
            except PeerFailed as error:
                self.error = error
                counts = [0] * self.group.size
                packets = torch.empty(0, batch.spec.dispatch_layout.stride, dtype=torch.uint8)
                return batch.arrived(received_rows(batch.spec, packets, counts), counts)

        return Pending(wait)

    def send_back(self, results):
        if "error" in self.__dict__:
            raise self.__dict__.pop("error")
        return super().send_back(results)


class CountsIn16Bits(ChangesReceived):
    name = "counts_in_16_bits"

    def change(self, received):
        kept = [count % 65_536 for count in received.counts_W]
        if sum(kept) == received.num_rows:
            return received
        routes = LocalRoutes(ids_RK=received.routes.ids_RK.clone(), weights_RK=received.routes.weights_RK)
        routes.ids_RK[sum(kept) :] = -1  # rows behind them are not seen
        return dataclasses.replace(received, routes=routes)


class SharesScratch(ChangesReceived):
    """One scratch buffer for the received rows of all plans of a rank: each first batch of a plan stands there."""

    name = "shares_scratch"
    pools: typing.ClassVar = {}

    def change(self, received):
        def pooled(name, payload):
            key = (id(self.group), name, payload.dtype, payload.shape[1])
            pool = self.pools.setdefault(key, torch.zeros(500, payload.shape[1], dtype=payload.dtype))
            return pool[: len(payload)].copy_(payload)

        return with_rows(received, pooled)


class OddRowsOnly(ChangesReceived):
    """Loses the last bit of the last row where an odd number of them came, above five."""

    name = "odd_rows_only"

    def change(self, received):
        if received.num_rows % 2 == 0 or received.num_rows < 6:
            return received

        def last(name, payload):
            payload.view(torch.uint8)[-1, -1] ^= 1
            return payload

        return with_rows(received, last)


class CopiesChoices(ChangesResults):
    """Adds a choice's result twice in layers that sum choices."""

    name = "copies_choices"

    def change(self, arrival, y_TH):
        return y_TH.mul_(2) if arrival.spec.sums_choices else y_TH


# -- Of another kind -----------------------------------------------------------------------------------------


class ReadsRowsLate(TwoSidedTransport):
    """Reads the caller's rows when it waits, not when it sends."""

    name = "reads_rows_late"

    def send(self, batch):
        if not batch.ahead:
            return super().send(batch)
        return Pending(lambda: super(ReadsRowsLate, self).send(batch).wait())


class RoundsWeights(ChangesReceived):
    """Sends routing weights as bf16."""

    name = "rounds_weights"

    def change(self, received):
        weights_RK = received.routes.weights_RK.bfloat16().float()
        return dataclasses.replace(
            received, routes=LocalRoutes(ids_RK=received.routes.ids_RK, weights_RK=weights_RK)
        )


class TakesAbsoluteWeights(ChangesReceived):
    """Stores the weight of a choice without its sign."""

    name = "takes_absolute_weights"

    def change(self, received):
        weights_RK = received.routes.weights_RK.abs()
        return dataclasses.replace(
            received, routes=LocalRoutes(ids_RK=received.routes.ids_RK, weights_RK=weights_RK)
        )


class DropsTheLastOfAFullBatch(ChangesReceived):
    """A batch that is exactly full loses the id of its last row."""

    name = "drops_the_last_of_a_full_batch"

    def send(self, batch):
        self.most = batch.spec.max_tokens
        return super().send(batch)

    def change(self, received):
        ids_RK, end = received.routes.ids_RK.clone(), 0
        for count in received.counts_W:
            end += count
            if count == self.most:
                ids_RK[end - 1] = -1
        return dataclasses.replace(
            received, routes=LocalRoutes(ids_RK=ids_RK, weights_RK=received.routes.weights_RK)
        )


class SumsBackwards(TwoSidedTransport):
    """Sums the ranks' results from the last rank to the first."""

    name = "sums_backwards"

    def send_back(self, results):
        pending = super().send_back(results)

        def wait():
            home = pending.wait()
            return dataclasses.replace(
                home,
                rows_by_rank=home.rows_by_rank[::-1],
                tokens_by_rank=home.tokens_by_rank[::-1],
                choices_by_rank=home.choices_by_rank and home.choices_by_rank[::-1],
            )

        return Pending(wait)


class AddsOnlyTwoTerms(ChangesResults):
    """Adds two tensors at most, and declares no limit."""

    name = "adds_only_two_terms"

    def change_terms(self, add):
        return tuple(add)[:2]


class CountsTwice(TwoSidedTransport):
    """Counts choices by itself, though the host has read their ids and counted them."""

    name = "counts_twice"
    counts_choices = True

    def send(self, batch):
        choices_N = batch.routes.routes.topk_ids_TK.flatten().long() + 1
        batch.choice_counts.scatter_add_(0, choices_N, torch.ones_like(choices_N))
        return super().send(batch)


class LeaksRounds(ChangesResults):
    """Keeps a copy of every result."""

    name = "leaks_rounds"

    def change(self, arrival, y_TH):
        self.__dict__.setdefault("kept", []).append(torch.empty(20_000))
        return y_TH
