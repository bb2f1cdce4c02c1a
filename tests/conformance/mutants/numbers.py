"""Experts and formats that are right for ordinary numbers and batches only, or do not keep what they declare."""

import dataclasses

import torch

from tokenyard.experts import GroupedExperts, ReferenceExperts
from tokenyard.formats import Bf16, Mxfp8
from tokenyard.rows import ExpertRows


def ended(result, finalize):
    return result.finish() if finalize else result


class KeepsCopies(ReferenceExperts):
    """Prepares copies of its weights, and again only when they are loaded."""

    name = "keeps_copies"

    def load_(self, weights):
        super().load_(weights)
        self.__dict__.pop("prepared", None)

    def compute(self, received, *, finalize):
        mine = {name: tensor.clone() for name, tensor in self.weights.by_name().items()}
        for name, tensor in self.__dict__.setdefault("prepared", mine).items():
            self.get_buffer(name).copy_(tensor)
        result = super().compute(received, finalize=finalize)
        for name, tensor in mine.items():
            self.get_buffer(name).copy_(tensor)
        return result


class Variant(ReferenceExperts):
    batch_invariant = ("cpu",)

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=False)
        if len(result.rows_NH):
            result = dataclasses.replace(
                result, rows_NH=result.rows_NH * (1 + 2.0**-20 * self.part(received, result))
            )
        return ended(result, finalize)


class DependsOnTheNumberOfRows(Variant):
    """Declares the same bits in any batch; batches of one row take another path."""

    name = "depends_on_the_number_of_rows"
    batch_invariant = ("cpu",)

    def part(self, received, result):
        return float(received.num_rows > 1)


class DependsOnThePlace(Variant):
    """Declares the same bits in any batch; rows behind the 32nd take another tile."""

    name = "depends_on_the_place"
    batch_invariant = ("cpu",)

    def part(self, received, result):
        return (result.index_N // result.top_k >= 32).float().unsqueeze(1)


class Clamps(ReferenceExperts):
    name = "clamps"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=False)
        return ended(dataclasses.replace(result, rows_NH=result.rows_NH.clamp(-1e4, 1e4)), finalize)


class NoNegativeWeights(ReferenceExperts):
    name = "no_negative_weights"

    def compute(self, received, *, finalize):
        routes = dataclasses.replace(received.routes, weights_RK=received.routes.weights_RK.clamp(min=0))
        return super().compute(dataclasses.replace(received, routes=routes), finalize=finalize)


# -- Of another kind -----------------------------------------------------------------------------------------


class IgnoresSlots(ReferenceExperts):
    """Takes the first rows of a buffer for those that came."""

    name = "ignores_slots"

    def compute(self, received, *, finalize):
        rows = received.rows.slice(0, received.num_rows)
        return super().compute(dataclasses.replace(received, rows=rows, slots_R=None), finalize=finalize)


class PlacesInOrder(ReferenceExperts):
    """Writes results into the first slots of the exchange's buffer."""

    name = "places_in_order"
    places_results = True

    def compute(self, received, *, finalize):
        place = received.place and dataclasses.replace(received.place, slots_R=None)
        result = super().compute(dataclasses.replace(received, place=place), finalize=finalize)
        return received.place.placed() if place is not None else result


class CountsNoDuties(ReferenceExperts):
    """Says that it records what it does, and records twice."""

    name = "counts_no_duties"
    counts_duties = True

    def compute(self, received, *, finalize):
        super().compute(received, finalize=finalize)
        return super().compute(received, finalize=finalize)


class DrawsNumbers(ReferenceExperts):
    name = "draws_numbers"

    def compute(self, received, *, finalize):
        torch.rand(3)
        return super().compute(received, finalize=finalize)


class FewExperts(ReferenceExperts):
    """Holds the number of an expert in a byte."""

    name = "few_experts"

    def compute(self, received, *, finalize):
        ids_RK = torch.where(received.routes.ids_RK < 0, -1, received.routes.ids_RK % 256)
        routes = dataclasses.replace(received.routes, ids_RK=ids_RK)
        return super().compute(dataclasses.replace(received, routes=routes), finalize=finalize)


class LosesTheLastOfATile(ReferenceExperts):
    """Leaves out the 16th row of a batch of 16."""

    name = "loses_the_last_of_a_tile"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        if received.num_rows == 16 and isinstance(result, ExpertRows):
            result.rows_RH[15] = 0
        return result


class MisreadsStrides(GroupedExperts):
    """Says that it reads weights of any strides, and reads them as if they had none."""

    name = "misreads_strides"
    any_strides = True

    def __init__(self, spec, weights, *, adopt=False):
        super().__init__(spec, weights, adopt=adopt)
        for name, tensor in list(self.named_buffers()):
            if not tensor.is_contiguous():
                setattr(self, name, tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride()))


# -- Formats -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddWidths(Bf16):
    """Loses the last column of an odd width above one."""

    name = "odd_widths"

    def encode(self, x_TH):
        x_TH = x_TH.clone()
        if x_TH.shape[1] % 2 and x_TH.shape[1] > 1:
            x_TH[:, -1] = 0
        return super().encode(x_TH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyRows(Mxfp8):
    """From the 65th row on, a row gets the code of the one before."""

    name = "many_rows"

    def encode(self, x_TH):
        x_TH = x_TH.clone()
        x_TH[64:] = x_TH[63:-1].clone()
        return super().encode(x_TH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfOfFloat16(Mxfp8):
    """Decodes to float16 by way of bf16."""

    name = "half_of_float16"

    def decode(self, rows, dtype=torch.float32):
        if dtype == torch.float16:
            return super().decode(rows, torch.float32).to(torch.float8_e5m2).to(dtype)
        return super().decode(rows, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSmallNumbers(Mxfp8):
    """Takes rows of numbers below a quarter for zeros."""

    name = "no_small_numbers"

    def encode(self, x_TH):
        small_T1 = x_TH.abs().amax(dim=1, keepdim=True).float() < 2.0**-2 if x_TH.numel() else x_TH[:, :1] > 0
        return super().encode(x_TH.masked_fill(small_T1, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LosesSigns(Bf16):
    name = "loses_signs"

    def encode(self, x_TH):
        return super().encode(x_TH + 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReusesCodes(Bf16):
    """Encodes every batch of a shape into the same memory."""

    name = "reuses_codes"

    def encode(self, x_TH):
        rows = super().encode(x_TH)
        pool = _pools.setdefault(tuple(x_TH.shape), torch.empty_like(rows.payloads["data"]))
        return dataclasses.replace(rows, payloads={"data": pool.copy_(rows.payloads["data"])})


_pools: dict = {}
