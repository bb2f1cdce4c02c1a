"""Bugs of quantizing, padding and swizzling: done twice, or never."""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from tests.known_bugs.known_bug import (
    AlwaysOn,
    BugKind,
    ExchangeCheck,
    ExpertsCheck,
    FormatCheck,
    KnownBug,
    batches,
)
from tests.models import spec
from tokenyard.exchange import Exchange
from tokenyard.experts import Experts, GroupedExperts, ReferenceExperts
from tokenyard.formats import EncodedRows, Mxfp8, for_dtype
from tokenyard.rows import ExpertRows


def quantized_twice(patch):
    right = Experts.incoming

    def incoming(self, received, dtype):
        x_RH = right(self, received, dtype)
        if not received.rows.format.quantized:
            return x_RH
        return Mxfp8().encode(x_RH).decode(dtype)  # the kernel quantizes its input, as it always did

    patch.setattr(Experts, "incoming", incoming)


def never_quantized(patch):
    def encode(self, exchange_spec, x_TH):
        return for_dtype(x_TH.dtype).encode(x_TH)  # the experts will quantize, won't they?

    patch.setattr(Exchange, "encode", encode)


def swizzled_before_the_wire(patch):
    right = Exchange.encode

    def encode(self, exchange_spec, x_TH):
        return right(self, exchange_spec, x_TH).swizzled()  # the kernel wants it so

    patch.setattr(Exchange, "encode", encode)


def swizzled_twice(patch):
    def swizzled(self):
        return self.format.swizzle(self.format.swizzle(self))

    patch.setattr(EncodedRows, "swizzled", swizzled)


def padded_width_leaks(patch):
    right = GroupedExperts.compute

    def compute(self, received, *, finalize):
        rows_RH = right(self, replace(received, place=None), finalize=finalize).rows_RH
        width = received.rows.format.padded_size(self.spec.hidden_size)
        return ExpertRows(rows_RH=pad(rows_RH, (0, width - self.spec.hidden_size)))  # as wide as they came

    patch.setattr(GroupedExperts, "compute", compute)


class SwizzledExperts(ReferenceExperts):
    """Experts that want swizzled scales, as block-scaled kernels do."""

    name = "swizzled"
    scale_layout = "swizzled"


def inner_format_in_blocks_of_64(patch):
    right = Experts.between

    def between(self, hidden_nI):
        return torch.cat(
            [right(self, half) for half in hidden_nI.split(64, dim=1)], dim=1
        )  # half a block is at hand

    patch.setattr(Experts, "between", between)


KIND = BugKind(
    name="Who quantizes",
    about="The sender or the experts can quantize a row, and kernels differ in the layout of scales and the "
    "width of rows that they read. If two parties quantize, or none, the result is wrong numbers without "
    "an error.",
    bugs=(
        KnownBug(
            name="Quantized twice",
            seen="vLLM #40960",
            story="A kernel quantized its input, and a property said so. When the sender began to quantize, "
            "that property had to be inverted in every class. A class that was missed quantizes a second "
            "time, without an error.",
            mutate=quantized_twice,
            caught_by=ExpertsCheck(name="rows_are_quantized_once"),
            says="rows that arrive in nvfp4(global_scale=8.0)",
        ),
        KnownBug(
            name="Not quantized at all",
            seen="vLLM #40960",
            story="The sender leaves quantizing to the experts, and they leave it to the sender. Rows travel in "
            "bf16 in slots of another format, and a kernel reads the two bytes of a number as two "
            "numbers.",
            mutate=never_quantized,
            in_check=ExchangeCheck(name="bitwise_movement"),
            caught_by=AlwaysOn(
                name="InputError",
                when="in the first batch of a layer on the mxfp8 wire",
                run=batches(spec(wire="mxfp8"), 5),
            ),
            says="the rows are bf16 of width 32; expected mxfp8 of width 32",
        ),
        KnownBug(
            name="Scales swizzled before the wire",
            story="Block-scaled kernels read scales in tiles of 128 × 4, in which the scales of neighboring "
            "rows are mixed. A row that is sent to one rank would take its neighbors' scales along. Only "
            "linear scales can travel; the receiver swizzles.",
            mutate=swizzled_before_the_wire,
            in_check=ExchangeCheck(name="bitwise_movement"),
            caught_by=AlwaysOn(
                name="InputError",
                when="in the first batch of a layer on the nvfp4 wire",
                run=batches(spec(wire="nvfp4"), 5),
            ),
            says="the rows carry swizzled scales; expected linear scales: only these can travel row by row",
        ),
        KnownBug(
            name="Swizzled twice",
            story="The engine of the reports swizzles nvfp4 scales again after the exchange. Swizzled scales "
            "are bytes of the same number, so this cannot be seen from the tensor. Here the rows carry "
            "their layout, and refuse the second time.",
            mutate=swizzled_twice,
            in_check=FormatCheck(name="scale_layouts_as_declared", format="nvfp4"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="in the first batch of experts that want swizzled scales",
                run=batches(spec(wire="nvfp4", experts=SwizzledExperts), 5),
            ),
            says="the scales of these nvfp4 rows are swizzled already; expected linear scales",
        ),
        KnownBug(
            name="The padded width leaks into the output",
            seen="vLLM #40960",
            story="Kernels for mxfp8 wanted widths that are multiples of 256, so 2880 traveled as 3072, and the "
            "output was allocated as wide as the input. The fix kept the true width in a second field, "
            "`hidden_dim_unpadded`.",
            mutate=padded_width_leaks,
            in_check=ExpertsCheck(name="one_type_returned"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="in the first batch of a layer whose wire pads to 256",
                run=batches(spec(wire="mxfp8(alignment=256)"), 5),
            ),
            says=", 32]: one row per received row, without padding",
        ),
        KnownBug(
            name="The inner format in blocks of 64",
            seen="DeepGEMM #360",
            story="Between the two products of an expert, numbers are quantized with a scale for each 128 of them: "
            "the format says so, and a model was evaluated with it. A fused kernel that has half a block at hand takes "
            "the largest of 64. Its result is even nearer to the exact one, so that no bound notices; it is not the "
            "declared one.",
            mutate=inner_format_in_blocks_of_64,
            caught_by=ExpertsCheck(name="inner_format_as_declared"),
            says="tiny numbers in a block with large ones come to",
            also_alive=batches(spec(weights="fp8_block128", inner="fp8_block128", intermediate_size=256), 5),
        ),
    ),
)
