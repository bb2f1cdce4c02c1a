"""Experts that are wrong on purpose."""

import dataclasses
import typing
import weakref

import torch

from tokenyard.errors import Reason
from tokenyard.experts import GroupedExperts, ReferenceExperts
from tokenyard.rows import ExpertRows, LocalRoutes, UnfinalizedRows


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
