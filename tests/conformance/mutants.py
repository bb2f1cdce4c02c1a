"""Parts that are wrong on purpose. Each must be caught by the check that is named for its fault."""

import copy
import dataclasses
import threading
import typing
import weakref

import torch

from tokenyard.errors import PeerFailed, PeerLost, PlanBroken, Reason
from tokenyard.exchange import AllgatherExchange, OneSidedExchange, TwoSidedExchange
from tokenyard.exchange.watch import ParanoidWatch
from tokenyard.experts import GroupedExperts, ReferenceExperts
from tokenyard.formats import Bf16, Mxfp8
from tokenyard.rows import CombinedRows, ExpertRows, LocalRoutes, UnfinalizedRows

# -- Exchanges ---------------------------------------------------------------------------------------------------


class Renamed(TwoSidedExchange):
    """Right, under another name."""

    name = "renamed"


class ChangesReceived(TwoSidedExchange):
    """Hands out what `change` makes of the received rows."""

    def dispatch(self, exchange_spec, rows, routes, extra=None):
        dispatched = super().dispatch(exchange_spec, rows, routes, extra)
        changed = dataclasses.replace(dispatched, received=self.change(dispatched.received))
        return self._in_flight.replace_newest(changed)


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


class OneCopyPerExpert(AllgatherExchange):
    """Sends a row once per expert, not once per rank: rows that stand twice are summed twice."""

    name = "one_copy_per_expert"

    def _prepare(self, exchange_spec, rows, routes, extra):
        outgoing = super()._prepare(exchange_spec, rows, routes, extra)
        doubled = tuple(tokens.repeat_interleave(2) for tokens in outgoing.tokens_by_rank)
        return dataclasses.replace(outgoing, tokens_by_rank=doubled)

    def _move(self, exchange_spec, outgoing, packets, heard):
        received, counts = super()._move(exchange_spec, outgoing, packets, heard)
        order = torch.arange(received.num_rows).repeat_interleave(2)
        doubled = dataclasses.replace(
            received,
            rows=received.rows.select(order),
            routes=LocalRoutes(
                ids_RK=received.routes.ids_RK[order], weights_RK=received.routes.weights_RK[order]
            ),
            counts_W=tuple(2 * count for count in received.counts_W),
            extra={name: tensor[order] for name, tensor in received.extra.items()},
        )
        return doubled, counts  # as they were announced: doubled already


class NobodyToRankZero(TwoSidedExchange):
    """Sends tokens for nobody to rank 0."""

    name = "nobody_to_rank_zero"

    def _prepare(self, exchange_spec, rows, routes, extra):
        outgoing = super()._prepare(exchange_spec, rows, routes, extra)
        nobody = (routes.topk_ids_TK < 0).all(dim=1).nonzero().squeeze(1)
        first = torch.cat([outgoing.tokens_by_rank[0], nobody]).sort().values
        return dataclasses.replace(outgoing, tokens_by_rank=(first, *outgoing.tokens_by_rank[1:]))


class WritesIntoRows(TwoSidedExchange):
    """Uses the caller's routing weights as scratch."""

    name = "writes_into_rows"

    def dispatch(self, exchange_spec, rows, routes, extra=None):
        dispatched = super().dispatch(exchange_spec, rows, routes, extra)
        routes.topk_weights_TK.zero_()
        return dispatched


class ReducesTwice(TwoSidedExchange):
    name = "reduces_twice"

    def combine(self, dispatched, result, **options):
        y_TH = super().combine(dispatched, result, **options).y_TH
        return CombinedRows(y_TH=y_TH + y_TH)


class AlwaysFloat32(TwoSidedExchange):
    name = "always_float32"

    def combine(self, dispatched, result, **options):
        return CombinedRows(y_TH=super().combine(dispatched, result, **options).y_TH.float())


class ReusesOutput(TwoSidedExchange):
    """Hands out one buffer again and again."""

    name = "reuses_output"

    def combine(self, dispatched, result, **options):
        y_TH = super().combine(dispatched, result, **options).y_TH
        pool = self.__dict__.setdefault("pool", torch.zeros(100_000))
        kept = pool[: y_TH.numel()].view(y_TH.shape).to(y_TH.dtype)
        if y_TH.dtype == torch.bfloat16:
            kept = pool.view(torch.bfloat16)[: y_TH.numel()].view(y_TH.shape)
        return CombinedRows(y_TH=kept.copy_(y_TH))


class TakesOldHandles(TwoSidedExchange):
    name = "takes_old_handles"

    def combine(self, dispatched, result, **options):
        if dispatched not in self._in_flight and self._round:
            return CombinedRows(y_TH=torch.zeros(dispatched.return_path.num_tokens, 1))
        return super().combine(dispatched, result, **options)


class NoLimit(TwoSidedExchange):
    """Takes more tokens than there is room for."""

    name = "no_limit"

    def _prepare(self, exchange_spec, rows, routes, extra):
        return super()._prepare(dataclasses.replace(exchange_spec, max_tokens=10**6), rows, routes, extra)


class ForgetsToTell(TwoSidedExchange):
    """Keeps an error to itself: the others wait for this rank."""

    name = "forgets_to_tell"

    def _prepare(self, exchange_spec, rows, routes, extra):
        try:
            return super()._prepare(exchange_spec, rows, routes, extra)
        except Exception as error:
            self._fail_out = lambda *_: None
            raise error


class DriftsLater(TwoSidedExchange):
    """Right in the first rounds, and not in the 31st."""

    name = "drifts_later"

    def combine(self, dispatched, result, **options):
        y_TH = super().combine(dispatched, result, **options).y_TH
        return CombinedRows(y_TH=y_TH + 1 if dispatched.round > 30 else y_TH)


# -- Exchanges that remember, or forget ------------------------------------------------------------------------


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


class StaleResults(TwoSidedExchange):
    """Brings home what came home in the call before, where the shape is the same."""

    name = "stale_results"

    def combine(self, dispatched, result, **options):
        y_TH = super().combine(dispatched, result, **options).y_TH
        key = (dispatched.spec.layer, tuple(y_TH.shape))
        kept = self.__dict__.setdefault("kept", {})
        before, kept[key] = kept.get(key, y_TH), y_TH.clone()
        return CombinedRows(y_TH=y_TH.copy_(before))


class SendsWhatWasLeft(TwoSidedExchange):
    """A round that failed leaves its packets behind, and the next one sends them."""

    name = "sends_what_was_left"

    def _send_out(self, exchange_spec, round, outgoing, loaded):
        left = self.__dict__.pop("left", loaded)
        count = min(len(left), len(loaded)) if left.shape[1] == loaded.shape[1] else 0
        self.left = loaded
        sent = super()._send_out(exchange_spec, round, outgoing, torch.cat([left[:count], loaded[count:]]))
        del self.left
        return sent


class WaitsForTheWorld(TwoSidedExchange):
    """A barrier over all ranks that there are, in every dispatch."""

    name = "waits_for_the_world"
    world = threading.local()  # the first group of each rank

    def __init__(self, group, **options):
        super().__init__(group, **options)
        if "/" not in group.name:  # no subgroup
            self.world.group = group

    def dispatch(self, exchange_spec, rows, routes, extra=None):
        self.check_usable()
        self.world.group.barrier()
        return super().dispatch(exchange_spec, rows, routes, extra)


class RoundStandsStill(TwoSidedExchange):
    """Every round is round 1; and what would be wrong from round 60 on is never seen."""

    name = "round_stands_still"

    def _announce(self, mine):
        try:
            return super()._announce(mine)
        finally:
            self._round = 0

    def combine(self, dispatched, result, **options):
        y_TH = super().combine(dispatched, result, **options).y_TH
        return CombinedRows(y_TH=y_TH + 1 if dispatched.round >= 60 else y_TH)


class FailedRoundsDoNotCount(TwoSidedExchange):
    """A round in which a rank failed is made again under the same number."""

    name = "failed_rounds_do_not_count"

    def _announce(self, mine):
        before = self._round
        try:
            heard = super()._announce(mine)
        except PeerFailed:
            self._round = before
            raise
        self._round = before if mine.error else self._round
        return heard


class PlacesByShape(TwoSidedExchange):
    """Looks up where experts are once for layers of the same sizes, and not for each layer."""

    name = "places_by_shape"

    def _prepare(self, exchange_spec, rows, routes, extra):
        known = self.__dict__.setdefault("known", {})
        placement = known.setdefault(
            (exchange_spec.num_experts, exchange_spec.hidden_size), exchange_spec.placement
        )
        return super()._prepare(dataclasses.replace(exchange_spec, placement=placement), rows, routes, extra)


class PlacesByName(TwoSidedExchange):
    """Looks up where experts are once for each name of a layer, in whatever plan of a group."""

    name = "places_by_name"
    known: typing.ClassVar = {}

    def _prepare(self, exchange_spec, rows, routes, extra):
        placement = self.known.setdefault((id(self.group), exchange_spec.layer), exchange_spec.placement)
        return super()._prepare(dataclasses.replace(exchange_spec, placement=placement), rows, routes, extra)

    def close(self):
        super().close()
        for layer in self.stats:
            self.known.pop((id(self.group), layer), None)


class LayersByNumber(TwoSidedExchange):
    """Keeps what it knows of a layer under its number in the plan, which changes when the plan forgets others."""

    name = "layers_by_number"

    def _prepare(self, exchange_spec, rows, routes, extra):
        known = self.__dict__.setdefault("known", {})
        placement = known.setdefault(
            (exchange_spec.index, exchange_spec.num_experts), exchange_spec.placement
        )
        return super()._prepare(dataclasses.replace(exchange_spec, placement=placement), rows, routes, extra)


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


class RowsComeHomeInOneBuffer(TwoSidedExchange):
    """Unreduced rows are views of one buffer."""

    name = "rows_come_home_in_one_buffer"

    def combine_unreduced(self, dispatched, result):
        rows = super().combine_unreduced(dispatched, result)
        pool, start, views = self.__dict__.setdefault("pool", torch.empty(100_000)), 0, []
        for part in rows.rows_by_rank:
            views.append(pool[start : start + part.numel()].view(part.shape).copy_(part))
            start += part.numel()
        return dataclasses.replace(rows, rows_by_rank=tuple(views))


class KeepsTheResidual(TwoSidedExchange):
    """Adds the first residual that it was given to all later results that have one."""

    name = "keeps_the_residual"

    def combine(self, dispatched, result, *, out=None, add=()):
        kept = self.__dict__.setdefault("kept", {})
        add = tuple(kept.setdefault((n, tuple(t.shape)), t.clone()) for n, t in enumerate(add))
        return super().combine(dispatched, result, out=out, add=add)


class KeepsTheWorkspace(OneSidedExchange):
    """Remembers every workspace, closed plans or not."""

    name = "keeps_the_workspace"
    all_of_them: typing.ClassVar = []

    def _make_workspace(self, layout):
        super()._make_workspace(layout)
        self.all_of_them.append(self._workspace.buffers)


class TakesHandlesOfOtherPlans(TwoSidedExchange):
    """Combines a handle of whatever plan, as zeros."""

    name = "takes_handles_of_other_plans"

    def combine(self, dispatched, result, **options):
        if dispatched not in self._in_flight and dispatched.round == 1 and self._round == 0:
            return CombinedRows(y_TH=torch.zeros(dispatched.return_path.num_tokens, 1))
        return super().combine(dispatched, result, **options)


# -- Exchanges that declare or count what is not so ------------------------------------------------------------


class CountsNoBytes(TwoSidedExchange):
    name = "counts_no_bytes"

    def bytes_sent(self, exchange_spec, outgoing):
        return [0] * self.group.size


class CountsNoBytesOneSided(OneSidedExchange):
    name = "counts_no_bytes_one_sided"

    def bytes_sent(self, exchange_spec, outgoing):
        return [0] * self.group.size


class CountsEveryToken(TwoSidedExchange):
    """Counts all tokens for all ranks, as if it gathered."""

    name = "counts_every_token"

    def bytes_sent(self, exchange_spec, outgoing):
        return [outgoing.num_tokens * exchange_spec.dispatch_layout.stride] * self.group.size


class CountsOnce(TwoSidedExchange):
    """Counts the first round of each layer, and no other."""

    name = "counts_once"

    def dispatch(self, exchange_spec, rows, routes, extra=None):
        stats = self.stats[exchange_spec.layer]
        known = copy.deepcopy(stats) if stats.rounds else None
        dispatched = super().dispatch(exchange_spec, rows, routes, extra)
        if known is not None:
            self.stats[exchange_spec.layer] = known
        return dispatched


class NeverWaits(TwoSidedExchange):
    """Does not count the seconds in which it waits."""

    name = "never_waits"

    def dispatch(self, exchange_spec, rows, routes, extra=None):
        dispatched = super().dispatch(exchange_spec, rows, routes, extra)
        self.stats[exchange_spec.layer].wait_s["dispatch"] = 0.0
        return dispatched


class DropsUncounted(TwoSidedExchange):
    name = "drops_uncounted"

    def _drop_lost(self, exchange_spec, routes):
        kept = super()._drop_lost(exchange_spec, routes)
        self.stats[exchange_spec.layer].dropped = 0
        return kept


class PlansHalf(TwoSidedExchange):
    """Says that it needs half of the memory that it takes."""

    name = "plans_half"

    @classmethod
    def region_bytes(cls, exchange_spec):
        whole = super().region_bytes(exchange_spec)
        return dataclasses.replace(whole, dispatch=whole.dispatch // 2)


class PlansNothingOneSided(OneSidedExchange):
    """Plans with one size of a workspace, and makes another."""

    name = "plans_nothing_one_sided"

    def layout_for(self, exchange_specs):
        needed = super().layout_for(exchange_specs)
        return dataclasses.replace(needed, dispatch=3 * needed.dispatch)


class SaysItCarriesLogits(TwoSidedExchange):
    """Declares that logits can travel, and has no way for them."""

    name = "says_it_carries_logits"
    carries_logits = True


class SaysItWatches(TwoSidedExchange):
    """Takes a plan that watches itself, and does not look."""

    name = "says_it_watches"

    @classmethod
    def _paranoid_watch(cls, group, in_flight):
        class Blind(ParanoidWatch):
            def leaving(self, dispatched, *, placed):
                pass

        return Blind(group)


# -- Exchanges that go on after a loss -------------------------------------------------------------------------


class GoesOn(TwoSidedExchange):
    """After a loss it takes the rows of the last good round for those that it did not get."""

    name = "goes_on"

    def _break(self, cause):
        pass

    def _send_out(self, exchange_spec, round, outgoing, loaded):
        try:
            self.last = super()._send_out(exchange_spec, round, outgoing, loaded)
        except PeerLost:
            if self.__dict__.setdefault("losses", 0):
                return self.last
            self.losses += 1
            raise
        return self.last

    def _send_back(self, dispatched, loaded):
        if self.__dict__.get("losses"):
            return self.home
        try:
            self.home = super()._send_back(dispatched, loaded)
        except PeerLost:
            self.losses = 1
            raise
        return self.home


class IsNotBrokenForLong(OneSidedExchange):
    """Refuses one call after a loss, and then tries again."""

    name = "is_not_broken_for_long"

    def check_usable(self, *, layer=None):
        try:
            super().check_usable(layer=layer)
        except PlanBroken:
            self._broken = None
            raise


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
