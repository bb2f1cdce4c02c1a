"""Transports that remember what they should forget, or forget what they should remember."""

import dataclasses
import threading
import typing
from types import MethodType

import torch

from tests.conformance.mutants.changing import ChangesReceived, ChangesResults, rerouted
from tokenyard.errors import PeerFailed
from tokenyard.exchange import Pending, SharedMemoryTransport, TwoSidedTransport
from tokenyard.rows import LocalRoutes


class KeepsTheCallBefore(ChangesReceived):
    """Hands out something of the call before, where it has the same shapes."""

    def remembered(self, now):
        before, self.kept = self.__dict__.get("kept", now), now
        alike = [
            t.shape == before[n].shape and t.dtype == before[n].dtype for n, t in now.items() if n in before
        ]
        return before if len(alike) == len(now) and all(alike) else now


class StaleRows(KeepsTheCallBefore):
    name = "stale_rows"

    def change(self, received):
        rows = received.dense()
        payloads = self.remembered({name: tensor.clone() for name, tensor in rows.payloads.items()})
        return dataclasses.replace(received, rows=dataclasses.replace(rows, payloads=payloads))


class StaleWeights(KeepsTheCallBefore):
    name = "stale_weights"

    def change(self, received):
        ids_RK, weights_RK = received.routes.ids_RK, received.routes.weights_RK
        weights_RK = self.remembered({"weights": weights_RK.clone()})["weights"]
        return dataclasses.replace(received, routes=LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK))


class StalePayloads(KeepsTheCallBefore):
    name = "stale_payloads"

    def change(self, received):
        return dataclasses.replace(received, extra=self.remembered(dict(received.extra)))


class StaleResults(ChangesResults):
    """Brings home what came home in the call before, where the shape is the same."""

    name = "stale_results"

    def change(self, arrival, y_TH):
        key = (arrival.spec.layer, tuple(y_TH.shape))
        kept = self.__dict__.setdefault("kept", {})
        before, kept[key] = kept.get(key, y_TH), y_TH.clone()
        return y_TH.copy_(before)


class SendsWhatWasLeft(TwoSidedTransport):
    """A round that failed leaves its packets behind, and the next one sends them."""

    name = "sends_what_was_left"

    def pack(self, batch, packets_by_rank):
        super().pack(batch, packets_by_rank)
        packed = [packets.clone() for packets in packets_by_rank]
        left, self.left = self.__dict__.get("left", packed), packed
        for packets, old in zip(packets_by_rank, left, strict=True):
            count = min(len(packets), len(old)) if packets.shape[1] == old.shape[1] else 0
            packets[:count] = old[:count]

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            arrival = pending.wait()
            del self.left
            return arrival

        return Pending(wait)


class WaitsForTheWorld(TwoSidedTransport):
    """A barrier over all ranks that there are, in every dispatch."""

    name = "waits_for_the_world"
    world = threading.local()  # the first group of each rank

    def __init__(self, group, **options):
        super().__init__(group, **options)
        if "/" not in group.name:  # no subgroup
            self.world.group = group

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            self.world.group.barrier()
            return pending.wait()

        return Pending(wait)


class RoundStandsStill(ChangesResults):
    """Every round is round 1; and what would be wrong from round 60 on is never seen."""

    name = "round_stands_still"

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            try:
                return pending.wait()
            finally:
                announcer = batch.announcements.announcer
                announcer.round = 0
                announcer.meet = MethodType(lambda announcer, round: None, announcer)

        return Pending(wait)

    def change(self, arrival, y_TH):
        return y_TH + 1 if arrival.round >= 60 else y_TH


class FailedRoundsDoNotCount(TwoSidedTransport):
    """A round in which a rank failed is made again under the same number."""

    name = "failed_rounds_do_not_count"

    def send(self, batch):
        announcer = batch.announcements.announcer
        before, pending = announcer.round, super().send(batch)

        def wait():
            try:
                return pending.wait()
            except PeerFailed:
                announcer.round = before
                raise

        return Pending(wait)

    def fail(self, failure):
        announcer = failure.announcements.announcer
        before = announcer.round
        super().fail(failure)
        announcer.round = before


class PlacesByShape(TwoSidedTransport):
    """Looks up where experts are once for layers of the same sizes, and not for each layer."""

    name = "places_by_shape"

    def placement(self, spec):
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((spec.num_experts, spec.hidden_size), spec.placement)

    def send(self, batch):
        placed = dataclasses.replace(batch.spec, placement=self.placement(batch.spec))
        return super().send(rerouted(batch, dataclasses.replace(batch.routes, spec=placed)))


class PlacesByName(PlacesByShape):
    """Looks up where experts are once for each name of a layer, in whatever plan of a group."""

    name = "places_by_name"
    known: typing.ClassVar = {}

    def placement(self, spec):
        return self.known.setdefault((id(self.group), spec.layer), spec.placement)

    def serve(self, specs):
        super().serve(specs)
        self.layers = [spec.layer for spec in specs]

    def close(self):
        super().close()
        for layer in self.layers:
            self.known.pop((id(self.group), layer), None)


class LayersByNumber(PlacesByShape):
    """Keeps what it knows of a layer under its number in the plan, which changes when the plan forgets others."""

    name = "layers_by_number"

    def placement(self, spec):
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((spec.index, spec.num_experts), spec.placement)


class OneBufferForTheRows(ChangesReceived):
    """Hands out received rows in one buffer per layer: a second dispatch in flight writes over the first."""

    name = "one_buffer_for_the_rows"

    def change(self, received):
        pools, rows = self.__dict__.setdefault("pools", {}), received.dense()
        payloads = {}
        for name, tensor in rows.payloads.items():
            key = (name, tensor.dtype, tensor.shape[1])
            pool = pools.setdefault(key, torch.empty(2000, tensor.shape[1], dtype=tensor.dtype))
            payloads[name] = pool[: len(tensor)].copy_(tensor)
        return dataclasses.replace(received, rows=dataclasses.replace(rows, payloads=payloads), slots_R=None)


class RowsComeHomeInOneBuffer(ChangesResults):
    """Unreduced rows are views of one buffer."""

    name = "rows_come_home_in_one_buffer"

    def change_rows(self, rows_by_rank):
        pool, start, views = self.__dict__.setdefault("pool", torch.empty(100_000)), 0, []
        for part in rows_by_rank:
            views.append(pool[start : start + part.numel()].view(part.shape).copy_(part))
            start += part.numel()
        return tuple(views)


class KeepsTheResidual(ChangesResults):
    """Adds the first residual that it was given to all later results that have one."""

    name = "keeps_the_residual"

    def change_terms(self, add):
        kept = self.__dict__.setdefault("kept", {})
        return tuple(kept.setdefault((n, tuple(t.shape)), t.clone()) for n, t in enumerate(add))


class KeepsTheWorkspace(SharedMemoryTransport):
    """Remembers every workspace, closed plans or not."""

    name = "keeps_the_workspace"
    all_of_them: typing.ClassVar = []

    def _make_workspace(self, layout):
        super()._make_workspace(layout)
        self.all_of_them.append(self._workspace.buffers)
