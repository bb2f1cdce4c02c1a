"""The arguments of kernels, in groups: rows, weights, routes and results.

Nothing here reads a value from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.experts.fused.kernels import arguments, decoding, epilogues, fp8_split
from tokenyard.experts.fused.tile_configs import SPLIT_BLOCK, TileConfigs
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.formats import Fp8Block128, QuantizedMatrix
from tokenyard.formats.base import EncodedRows

_FORMATS = {
    "fp8_block128": decoding.FP8_BLOCK,
    "mxfp8": decoding.MXFP8,
    "nvfp4": decoding.NVFP4,
    "mxfp4": decoding.MXFP4,
    "mxint4": decoding.MXINT4,
}
_ACTIVATIONS = {
    "swiglu": epilogues.SWIGLU,
    "gelu": epilogues.GELU,
    "gelu_tanh": epilogues.GELU_TANH,
    "relu2": epilogues.RELU2,
    "swiglu_clamped": epilogues.SWIGLU_CLAMPED,
}
_KINDS = {"fp16": tl.float16, "fp32": tl.float32}


def activation_constants(spec: ExpertsSpec) -> dict[str, Any]:
    """The activation's number and constants, by the names that kernels have for them."""
    given = dict(spec.activation.parameters)
    limit, alpha, shift = (given.get(name, 0.0) for name in ("limit", "alpha", "up_shift"))
    number = _ACTIVATIONS[spec.activation.name].value
    return {"activation": number, "limit": limit, "alpha": alpha, "shift": shift}


def launch_options(early: bool) -> dict[str, bool]:
    """The launch options; `early`: the kernel may start before its predecessor has ended."""
    return {"launch_pdl": True} if early else {}


class Matrices(NamedTuple):
    """The matrices of one product as the kernels take them."""

    format: int
    data: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    global_factor: Tensor | None
    stride: int  # elements of a line of `data`
    width: int  # inputs, with the pad
    scale_width: int

    @classmethod
    def of(cls, matrix: Tensor | QuantizedMatrix) -> Matrices:
        """From plain or quantized matrices."""
        if isinstance(matrix, Tensor):
            width = matrix.shape[-1]
            return cls(decoding.PLAIN.value, matrix, None, None, None, width, width, 1)
        data, scales = matrix.payloads["data"], matrix.payloads["scales"]
        format, stride = matrix.format, data.shape[-1]
        width = stride if format.name == "fp8_block128" else format.padded_size(matrix.shape[-1])
        global_scale, factor = (matrix.payloads.get(name) for name in ("global_scale", "global_factor"))
        return cls(
            _FORMATS[format.name].value, data, scales, global_scale, factor, stride, width, scales.shape[-1]
        )

    def given(self, bias: Tensor | None) -> arguments.Weights:
        """The kernel arguments for these matrices, with their bias."""
        return arguments.Weights(self.data, self.scales, self.global_scale, self.global_factor, bias)


class Rows(NamedTuple):
    """Rows as the kernels take them."""

    format: int
    data: Tensor
    scales: Tensor | None
    globals: Tensor | None
    width: int
    global_stride: int

    @classmethod
    def of(cls, rows: EncodedRows) -> Rows:
        """From encoded rows with linear scales."""
        payloads = rows.payloads
        data = payloads["data"]
        if not rows.format.quantized:
            return cls(decoding.PLAIN.value, data, None, None, data.shape[1], 0)
        width = rows.format.padded_size(rows.hidden_size)
        format, scales = _FORMATS[rows.format.name].value, payloads["scales"]
        if rows.format.name != "nvfp4":
            return cls(format, data, scales, None, width, 0)
        g = payloads.get("global_scale")
        stride = 0 if g is None else g.stride(0)
        if g is None:
            g = torch.full((1,), rows.format.global_scale, device=data.device)  # type: ignore[attr-defined]
        return cls(format, data, scales, g, width, stride)

    def given(self, slots_R: Tensor | None) -> arguments.Rows:
        """The kernel arguments for these rows, with the slot of each."""
        stride, scale_stride = self.data.stride(0), 0 if self.scales is None else self.scales.stride(0)
        return arguments.Rows(
            self.data, self.scales, self.globals, slots_R, stride, scale_stride, self.global_stride
        )


@dataclass(frozen=True)
class SortedOnDevice:
    """The pairs of a batch, sorted by expert, and their tiles, on the device (see `kernels.sorting`)."""

    order_N: Tensor
    tiles: Tensor
    how_many: Tensor
    max_tiles: int
    # Kept until the call ends: if it were freed, kernels that start early could overwrite it while the sort reads it.
    counts: Tensor | None


def product_kind(weights: str, device: torch.device) -> Any:
    """The type in which numbers are multiplied. (The interpreter multiplies in float32 only.)"""
    return tl.float32 if device.type == "cpu" else _KINDS.get(weights, tl.bfloat16)


class Destination(NamedTuple):
    """Where results are written: rows `[S, H]`, the slot of each received row in them, and the results by pair."""

    out: Tensor
    slots_R: Tensor | None
    partial_sums: Tensor  # results by pair, not weighted and not summed


class Launch(NamedTuple):
    """The arguments that both products of one call share."""

    spec: ExpertsSpec
    tile_configs: TileConfigs
    sorted: SortedOnDevice
    weights_RK: Tensor
    to: Destination
    early: bool
    finalize: bool = True
    unit: int = 0  # inputs of a line that a box of weights holds (`boxes`); 0: they are held line by line

    @property
    def options(self) -> Mapping[str, bool]:
        """The launch options of this call's kernels."""
        return launch_options(self.early)

    @property
    def routes(self) -> arguments.Routes:
        """The kernel arguments for the routes."""
        found = self.sorted
        return arguments.Routes(found.order_N, found.tiles, found.how_many, found.max_tiles, self.weights_RK)

    def layer(self, rows: int, weights: int, inner: Inner) -> arguments.Layer:
        """The compile-time constants of products of rows and weights in these formats."""
        spec, activation = self.spec, self.spec.activation
        return arguments.Layer(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            top_k=spec.top_k,
            experts=spec.num_local_experts,
            rows=rows,
            weights=weights,
            kind=product_kind(spec.weights, inner.data.device),
            weight_on_input=spec.weight_on == "input",
            finalize=self.finalize,
            gated=activation.gated,
            interleaved=activation.interleaved,
            inner=inner.held.value,
            **activation_constants(spec),
        )


class Inner(NamedTuple):
    """The activation between the products, by place: numbers `[pairs, I]`, or e4m3 (`kernels.fp8_split`).

    Numbers split in two are e4m3 `[pairs, 2, width]`, high and low parts. Codes are e4m3 `[pairs, width]`. Both have
    float32 scales `[pairs, width / 128]`; width is I rounded up to a multiple of 128.
    """

    data: Tensor
    scales: Tensor
    held: Any  # one of the constants of `kernels.fp8_split`

    @classmethod
    def empty(cls, call: Launch, *, held: str) -> Inner:
        """Uninitialized memory for the pairs of a call: of the dtype of its results, or e4m3 if `held` is."""
        spec, partial_sums = call.spec, call.to.partial_sums
        pairs, columns = partial_sums.shape[0], spec.intermediate_size
        if held != "fp8_block128":
            data = partial_sums.new_empty(pairs, columns)
            return cls(data, data, fp8_split.NUMBERS)
        assert call.tile_configs.can_split, call.tile_configs
        blocks = triton.cdiv(columns, SPLIT_BLOCK)
        scales = partial_sums.new_empty(pairs, blocks, dtype=torch.float32)
        if spec.inner is None:
            data = partial_sums.new_empty(pairs, 2, blocks * SPLIT_BLOCK, dtype=torch.float8_e4m3fn)
            return cls(data, scales, fp8_split.FP8_SPLIT)
        assert isinstance(spec.inner, Fp8Block128), spec.inner
        data = partial_sums.new_empty(pairs, blocks * SPLIT_BLOCK, dtype=torch.float8_e4m3fn)
        return cls(data, scales, fp8_split.POWER_CODES if spec.inner.power_of_two_scales else fp8_split.CODES)

    @property
    def is_numbers(self) -> bool:
        """Whether the activation is held as numbers of 16 or 32 bits, not as e4m3."""
        return bool(self.held == fp8_split.NUMBERS)

    def given(self, to: Destination | None = None) -> arguments.Results:
        """The kernel arguments for this buffer and, for the second product, for the destination of its results."""
        scales = None if self.is_numbers else self.scales
        if to is None:
            return arguments.Results(self.data, scales, None, None, None, 0)
        return arguments.Results(self.data, scales, to.partial_sums, to.out, to.slots_R, to.out.stride(0))
