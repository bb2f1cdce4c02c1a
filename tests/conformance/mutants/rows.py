"""Transports that move rows wrongly."""

import dataclasses

import torch

from tests.conformance.mutants.changing import ChangesReceived, ChangesResults, rerouted, to_ranks
from tokenyard.exchange import AllgatherTransport, Pending, TwoSidedTransport
from tokenyard.rows import LocalRoutes


class SwapsRows(ChangesReceived):
    name = "swaps_rows"

    def change(self, received):
        order = torch.arange(received.num_rows)
        if len(order) > 1:
            order[[0, 1]] = order[[1, 0]]
        return dataclasses.replace(
            received,
            rows=received.rows.select(order),
            routes=LocalRoutes(
                ids_RK=received.routes.ids_RK[order], weights_RK=received.routes.weights_RK[order]
            ),
            extra={name: tensor[order] for name, tensor in received.extra.items()},
        )


class FlipsABit(ChangesReceived):
    name = "flips_a_bit"

    def change(self, received):
        payloads = {name: tensor.clone() for name, tensor in received.rows.payloads.items()}
        data = next(iter(payloads.values()))
        if data.shape[0]:
            data.view(torch.uint8)[-1, 0] ^= 1
        return dataclasses.replace(received, rows=dataclasses.replace(received.rows, payloads=payloads))


class GlobalIds(ChangesReceived):
    """Experts elsewhere keep an id: a row would be computed twice."""

    name = "global_ids"

    def change(self, received):
        ids_RK = received.routes.ids_RK.clamp(min=0)
        return dataclasses.replace(
            received, routes=LocalRoutes(ids_RK=ids_RK, weights_RK=received.routes.weights_RK)
        )


class OneCopyPerExpert(AllgatherTransport):
    """Sends a row once per expert, not once per rank: rows that stand twice are summed twice."""

    name = "one_copy_per_expert"

    def send(self, batch):
        doubled = [tokens.repeat_interleave(2) for tokens in batch.routes.tokens_by_rank]
        pending = super().send(rerouted(batch, to_ranks(batch.routes, doubled)))

        def wait():
            arrival = pending.wait()
            received = arrival.received
            order = torch.arange(received.num_rows).repeat_interleave(2)
            twice = dataclasses.replace(
                received,
                rows=received.rows.select(order),
                routes=LocalRoutes(
                    ids_RK=received.routes.ids_RK[order], weights_RK=received.routes.weights_RK[order]
                ),
                counts_W=tuple(2 * count for count in received.counts_W),
                extra={name: tensor[order] for name, tensor in received.extra.items()},
            )
            return dataclasses.replace(arrival, received=twice)

        return Pending(wait)


class NobodyToRankZero(TwoSidedTransport):
    """Sends tokens for nobody to rank 0."""

    name = "nobody_to_rank_zero"

    def send(self, batch):
        nobody = (batch.routes.routes.topk_ids_TK < 0).all(dim=1).nonzero().squeeze(1)
        first, *others = batch.routes.tokens_by_rank
        first = torch.cat([first, nobody]).sort().values
        return super().send(rerouted(batch, to_ranks(batch.routes, [first, *others])))


class WritesIntoRows(TwoSidedTransport):
    """Uses the caller's routing weights as scratch."""

    name = "writes_into_rows"

    def send(self, batch):
        pending = super().send(batch)
        batch.routes.routes.topk_weights_TK.zero_()
        return pending


class ReducesTwice(ChangesResults):
    name = "reduces_twice"

    def change(self, arrival, y_TH):
        return y_TH + y_TH


class AlwaysFloat32(ChangesResults):
    name = "always_float32"

    def change(self, arrival, y_TH):
        return y_TH.float()


class ReusesOutput(ChangesResults):
    """Hands out one buffer again and again."""

    name = "reuses_output"

    def change(self, arrival, y_TH):
        pool = self.__dict__.setdefault("pool", torch.zeros(100_000))
        kept = pool[: y_TH.numel()].view(y_TH.shape).to(y_TH.dtype)
        if y_TH.dtype == torch.bfloat16:
            kept = pool.view(torch.bfloat16)[: y_TH.numel()].view(y_TH.shape)
        return kept.copy_(y_TH)


class ForgetsToTell(TwoSidedTransport):
    """Keeps an error of its own input to itself: the others wait for this rank."""

    name = "forgets_to_tell"

    def fail(self, failure):
        if failure.arrival is not None or "InputError" not in failure.announcements.mine.error:
            super().fail(failure)


class DriftsLater(ChangesResults):
    """Right in the first rounds, and not in the 31st."""

    name = "drifts_later"

    def change(self, arrival, y_TH):
        return y_TH + 1 if arrival.round > 30 else y_TH
