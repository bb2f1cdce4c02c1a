"""Parts that are wrong on purpose. Each must be caught by the check that is named for its fault."""

import dataclasses

import torch

from tokenyard.exchange import AllgatherExchange, TwoSidedExchange
from tokenyard.experts import GroupedExperts, ReferenceExperts
from tokenyard.formats import Bf16, Mxfp8
from tokenyard.rows import CombinedRows, ExpertRows, LocalRoutes, UnfinalizedRows

# -- Exchanges ---------------------------------------------------------------------------------------------------


class Renamed(TwoSidedExchange):
    """Right, under another name."""

    name = "renamed"


class ChangesReceived(TwoSidedExchange):
    """Hands out what `change` makes of the received rows."""

    def dispatch(self, cargo, rows, routes, extra=None):
        dispatched = super().dispatch(cargo, rows, routes, extra)
        changed = dataclasses.replace(dispatched, received=self.change(dispatched.received))
        return self._flights.replace_newest(changed)


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

    def _prepare(self, cargo, rows, routes, extra):
        outgoing = super()._prepare(cargo, rows, routes, extra)
        doubled = tuple(tokens.repeat_interleave(2) for tokens in outgoing.tokens_by_rank)
        return dataclasses.replace(outgoing, tokens_by_rank=doubled)

    def _move(self, cargo, outgoing, packets, heard):
        received, counts = super()._move(cargo, outgoing, packets, heard)
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

    def _prepare(self, cargo, rows, routes, extra):
        outgoing = super()._prepare(cargo, rows, routes, extra)
        nobody = (routes.topk_ids_TK < 0).all(dim=1).nonzero().squeeze(1)
        first = torch.cat([outgoing.tokens_by_rank[0], nobody]).sort().values
        return dataclasses.replace(outgoing, tokens_by_rank=(first, *outgoing.tokens_by_rank[1:]))


class WritesIntoRows(TwoSidedExchange):
    """Uses the caller's routing weights as scratch."""

    name = "writes_into_rows"

    def dispatch(self, cargo, rows, routes, extra=None):
        dispatched = super().dispatch(cargo, rows, routes, extra)
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
        if dispatched not in self._flights:
            return CombinedRows(y_TH=torch.zeros(dispatched.return_path.num_tokens, 1))
        return super().combine(dispatched, result, **options)


class NoLimit(TwoSidedExchange):
    """Takes more tokens than there is room for."""

    name = "no_limit"

    def _prepare(self, cargo, rows, routes, extra):
        return super()._prepare(dataclasses.replace(cargo, max_tokens=10**6), rows, routes, extra)


class ForgetsToTell(TwoSidedExchange):
    """Keeps an error to itself: the others wait for this rank."""

    name = "forgets_to_tell"

    def _prepare(self, cargo, rows, routes, extra):
        try:
            return super()._prepare(cargo, rows, routes, extra)
        except Exception as error:
            self._fail_out = lambda *_: None
            raise error


class DriftsLater(TwoSidedExchange):
    """Right in the first rounds, and not in the 31st."""

    name = "drifts_later"

    def combine(self, dispatched, result, **options):
        y_TH = super().combine(dispatched, result, **options).y_TH
        return CombinedRows(y_TH=y_TH + 1 if dispatched.round > 30 else y_TH)


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
