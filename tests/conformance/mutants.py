"""Parts that are wrong on purpose. Each must be caught by the check that is named for its fault."""

import dataclasses
import threading
import typing
import weakref
from contextlib import nullcontext

import torch

from tokenyard.errors import GroupError, PeerFailed, PeerLost, PlanBroken, Reason
from tokenyard.exchange import (
    AllgatherTransport,
    Exchange,
    Pending,
    ResultsAtHome,
    SharedMemoryTransport,
    TwoSidedTransport,
)
from tokenyard.exchange import exchange as exchange_module
from tokenyard.exchange.stats import LayerStats
from tokenyard.experts import GroupedExperts, ReferenceExperts
from tokenyard.formats import Bf16, Mxfp8
from tokenyard.rows import CombinedRows, ExpertRows, LocalRoutes, UnfinalizedRows

# -- Transports --------------------------------------------------------------------------------------------------


def exchange_of(announcements):
    """The exchange that a transport works for, which is none of its business."""
    return announcements.ranks_parted.__self__


def rerouted(batch, routes):
    """A batch along other routes, and announced so."""
    mine = dataclasses.replace(batch.announcements.mine, counts=tuple(routes.counts))
    announcements = dataclasses.replace(batch.announcements, mine=mine)
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
            return dataclasses.replace(arrival, received=self.change(arrival.received))

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


# -- Transports that remember, or forget -----------------------------------------------------------------------


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

    def pack(self, batch):
        packed = super().pack(batch)
        left, self.left = self.__dict__.get("left", packed), packed
        count = min(len(left), len(packed)) if left.shape[1] == packed.shape[1] else 0
        return torch.cat([left[:count], packed[count:]])

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
                exchange = exchange_of(batch.announcements)
                exchange._round, exchange._meet = 0, lambda round: None

        return Pending(wait)

    def change(self, arrival, y_TH):
        return y_TH + 1 if arrival.round >= 60 else y_TH


class FailedRoundsDoNotCount(TwoSidedTransport):
    """A round in which a rank failed is made again under the same number."""

    name = "failed_rounds_do_not_count"

    def send(self, batch):
        exchange = exchange_of(batch.announcements)
        before, pending = exchange._round, super().send(batch)

        def wait():
            try:
                return pending.wait()
            except PeerFailed:
                exchange._round = before
                raise

        return Pending(wait)

    def fail(self, failure):
        exchange = exchange_of(failure.announcements)
        before = exchange._round
        super().fail(failure)
        exchange._round = before


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


# -- Transports that declare or count what is not so -----------------------------------------------------------


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
        return super().send_back(dataclasses.replace(results, before_telling=lambda: None))


# -- Transports that go on after a loss ------------------------------------------------------------------------


class GoesOn(TwoSidedTransport):
    """After a loss it takes the rows of the last good round for those that it did not get."""

    name = "goes_on"

    def send(self, batch):
        exchange_of(batch.announcements)._break = lambda cause: None
        if self.__dict__.get("losses", 0) > 1:
            return Pending(lambda: batch.arrived(*self.last))
        try:
            pending = super().send(batch)
        except GroupError:
            if self.__dict__.get("losses"):
                return Pending(lambda: batch.arrived(*self.last))
            raise

        def wait():
            try:
                arrival = pending.wait()
            except (PeerLost, GroupError):
                self.losses = self.__dict__.get("losses", 0) + 1
                if self.losses > 1:
                    return batch.arrived(*self.last)
                raise
            self.last = (arrival.received, arrival.counts_W)
            return arrival

        return Pending(wait)

    def send_back(self, results):
        if self.__dict__.get("losses"):
            return Pending(lambda: self.home)
        pending = super().send_back(results)

        def wait():
            try:
                self.home = pending.wait()
            except PeerLost:
                self.losses = 1
                raise
            return self.home

        return Pending(wait)


class IsNotBrokenForLong(SharedMemoryTransport):
    """Refuses one call after a loss, and then tries again."""

    name = "is_not_broken_for_long"

    def send(self, batch):
        exchange = exchange_of(batch.announcements)

        def check_usable(*, layer=None):
            try:
                type(exchange).check_usable(exchange, layer=layer)
            except PlanBroken:
                exchange._broken = None
                raise

        exchange.check_usable = check_usable
        return super().send(batch)


# -- An exchange that is wrong itself, whatever its transport --------------------------------------------------


def takes_old_handles(patch):
    right = Exchange.combine

    def combine(self, arrival, result, **options):
        if arrival not in self._in_flight and self._round:
            return CombinedRows(y_TH=torch.zeros(arrival.routes.num_tokens, 1))
        return right(self, arrival, result, **options)

    patch.setattr(Exchange, "combine", combine)


def takes_handles_of_other_plans(patch):
    """Combines a handle of whatever plan, as zeros."""
    right = Exchange.combine

    def combine(self, arrival, result, **options):
        if arrival not in self._in_flight and arrival.round == 1 and self._round == 0:
            return CombinedRows(y_TH=torch.zeros(arrival.routes.num_tokens, 1))
        return right(self, arrival, result, **options)

    patch.setattr(Exchange, "combine", combine)


def no_limit(patch):
    """Takes more tokens than there is room for."""
    right = exchange_module.check_batch

    def check_batch(spec, *batch, **options):
        return right(dataclasses.replace(spec, max_tokens=10**6), *batch, **options)

    patch.setattr(exchange_module, "check_batch", check_batch)


def counts_once(patch):
    """Counts the first round of each layer, and no other."""
    right = LayerStats.count_dispatch

    def count_dispatch(self, *counted):
        if not self.rounds:
            right(self, *counted)

    patch.setattr(LayerStats, "count_dispatch", count_dispatch)


def never_waits(patch):
    """Does not count the seconds in which it waits."""
    patch.setattr(LayerStats, "waiting", lambda self, phase: nullcontext())


def drops_uncounted(patch):
    patch.setattr(LayerStats, "count_dropped", lambda self, dropped_TK: None)


# -- Formats -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneScaleForAll(Bf16):
    """Scales every row by the largest of the batch."""

    name = "one_scale_for_all"

    def encode(self, x_TH):
        largest = x_TH.abs().amax() if x_TH.numel() else 1.0
        return dataclasses.replace(super().encode(x_TH / largest), format=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiesAboutWidth(Bf16):
    name = "lies_about_width"

    def payloads(self, hidden_size):
        (data,) = super().payloads(hidden_size)
        return (dataclasses.replace(data, width=data.width + 8),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepsThePad(Mxfp8):
    name = "keeps_the_pad"

    def decode(self, rows, dtype=torch.float32):
        return super().decode(
            dataclasses.replace(rows, hidden_size=self.padded_size(rows.hidden_size)), dtype
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampsInPlace(Bf16):
    name = "clamps_in_place"

    def encode(self, x_TH):
        return super().encode(x_TH.clamp_(-1, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotAsNear(Mxfp8):
    name = "not_as_near"
    relative_error = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class HidesNan(Bf16):
    name = "hides_nan"

    def encode(self, x_TH):
        return super().encode(x_TH.nan_to_num())


_seen = [1.0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemembersTheLargest(Bf16):
    """Scales by the largest number that it has ever seen."""

    name = "remembers_the_largest"

    def encode(self, x_TH):
        _seen.append(
            max(_seen[-1], float(x_TH.nan_to_num(posinf=0, neginf=0).abs().max()) if x_TH.numel() else 0.0)
        )
        coarse = _seen[-1] / 2**10
        return dataclasses.replace(super().encode((x_TH / coarse).round() * coarse), format=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwizzlesNothing(Mxfp8):
    """Says that scales are swizzled, and leaves them as they are."""

    name = "swizzles_nothing"

    def swizzle(self, rows):
        return dataclasses.replace(rows, scale_layout="swizzled")


# -- Experts -----------------------------------------------------------------------------------------------------


class ReturnsATuple(ReferenceExperts):
    name = "returns_a_tuple"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        return (result.rows_RH, None) if finalize else result


class WeighsTwice(ReferenceExperts):
    name = "weighs_twice"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=False)
        twice = dataclasses.replace(result, weights_N=result.weights_N * result.weights_N)
        return twice.finish() if finalize else twice


class FinalizesOtherwise(GroupedExperts):
    name = "finalizes_otherwise"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        return ExpertRows(rows_RH=result.rows_RH.bfloat16().float()) if finalize else result


class ComputesForNobody(ReferenceExperts):
    """Takes -1 for the first expert."""

    name = "computes_for_nobody"

    def compute(self, received, *, finalize):
        ids_RK = received.routes.ids_RK.clamp(min=0)
        routes = LocalRoutes(ids_RK=ids_RK, weights_RK=received.routes.weights_RK.nan_to_num())
        return super().compute(dataclasses.replace(received, routes=routes), finalize=finalize)


class ClampsNan(ReferenceExperts):
    """Takes the smaller of NaN and a limit for the limit."""

    name = "clamps_nan"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=False)
        if self.spec.activation.parameters:
            result = dataclasses.replace(result, rows_NH=result.rows_NH.nan_to_num())
        return result.finish() if finalize else result


class DropsDuplicates(ReferenceExperts):
    name = "drops_duplicates"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=False)
        assert isinstance(result, UnfinalizedRows)
        ids_RK = received.routes.ids_RK
        weights_N = result.weights_N.clone()
        for n, index in enumerate(result.index_N.tolist()):
            row, choice = divmod(index, result.top_k)
            if ids_RK[row, choice] in ids_RK[row, :choice]:
                weights_N[n] = 0
        kept = dataclasses.replace(result, weights_N=weights_N)
        return kept.finish() if finalize else kept


class NormalizesWeights(ReferenceExperts):
    """Changes its weights while it computes."""

    name = "normalizes_weights"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        next(iter(self.weights.by_name().values())).view(torch.uint8).add_(1)
        return result


class HoldsOthers(ReferenceExperts):
    name = "holds others"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options | {"adopt": False})
        for name, buffer in self.named_buffers():
            if name in ("w2", "w2_data"):
                buffer.view(torch.uint8).bitwise_xor_(8)


class LoadsElsewhere(ReferenceExperts):
    name = "loads_elsewhere"

    def load_(self, weights):
        for name, tensor in weights.by_name().items():
            setattr(self, name, tensor.clone())


class CachesWeights(ReferenceExperts):
    """Prepares its weights once, and never again."""

    name = "caches_weights"

    def compute(self, received, *, finalize):
        if "prepared" not in self.__dict__:
            self.__dict__["prepared"] = {name: t.clone() for name, t in self.weights.by_name().items()}
        held = {name: self.get_buffer(name).clone() for name in self.prepared}
        for name, tensor in self.prepared.items():
            self.get_buffer(name).copy_(tensor)
        result = super().compute(received, finalize=finalize)
        for name, tensor in held.items():
            self.get_buffer(name).copy_(tensor)
        return result


class ReusesItsBuffer(ReferenceExperts):
    """Writes every finished result into one buffer."""

    name = "reuses_its_buffer"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        if not finalize:
            return result
        pool = self.__dict__.setdefault("pool", torch.empty(100_000))
        return ExpertRows(
            rows_RH=pool[: result.rows_RH.numel()].view(result.rows_RH.shape).copy_(result.rows_RH)
        )


class SharesItsBuffer(ReusesItsBuffer):
    """Every object writes its first result into a buffer of the class, and later ones elsewhere."""

    name = "shares_its_buffer"
    shared = torch.empty(100_000)

    def compute(self, received, *, finalize):
        first = "pool" not in self.__dict__
        self.__dict__["pool"] = self.shared if first else torch.empty(100_000)
        return super().compute(received, finalize=finalize)


class SortsOnce(ReferenceExperts):
    """Keeps the routes of the first batch with so many rows."""

    name = "sorts_once"

    def compute(self, received, *, finalize):
        routes = self.__dict__.setdefault("routes", {}).setdefault(received.num_rows, received.routes)
        return super().compute(dataclasses.replace(received, routes=routes), finalize=finalize)


class SharesItsWeights(ReferenceExperts):
    """Prepares weights once for all objects of one spec."""

    name = "shares_its_weights"
    prepared: typing.ClassVar = {}

    def compute(self, received, *, finalize):
        mine = {name: tensor.clone() for name, tensor in self.weights.by_name().items()}
        known = self.prepared.get(self.spec)
        if known is None or known[0]() is None:
            self.prepared[self.spec] = known = (weakref.ref(self), mine)
        if known[0]() is not self:
            for name, tensor in known[1].items():
                self.get_buffer(name).copy_(tensor)
        result = super().compute(received, finalize=finalize)
        for name, tensor in mine.items():
            self.get_buffer(name).copy_(tensor)
        return result


class DeclaresTooMuch(ReferenceExperts):
    """Declares a weight format, and refuses every layer that has it."""

    name = "declares_too_much"

    @classmethod
    def supports(cls, spec):
        if spec.weights == "mxfp4":
            return Reason(field="weights", value=spec.weights, why="not yet")
        return super().supports(spec)
