"""Formats that are wrong on purpose."""

import dataclasses

import torch

from tokenyard.formats import Bf16, Mxfp8


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
