"""What `combine` of `MoeAlltoAll` writes: the sum itself, or the sum quantized for the kernel that reads it.

    output_dtype     output_scales       written                              value
    None             None                the payload's dtype
    float8_e4m3fn    uint8, per 32       mxfp8   [T, H]                       e4m3 · 2^(byte - 127)
    uint8            uint8, per 32       mxfp4   [T, H / 2], two a byte       e2m1 · 2^(byte - 127)
    uint8            float8_e4m3fn, 16   nvfp4   [T, H / 2], two a byte       e2m1 · scale / output_scalar_scale

The dtype of `output_scales` distinguishes mxfp4 from nvfp4, as in FlashInfer. The float32 sum is rounded once, to these
codes; FlashInfer rounds it to the payload's dtype first. The codes are those of `tokenyard.formats`; scales of mxfp4
are found by its rule "ceil", as FlashInfer finds them.

`use_low_precision` is another thing: each rank's results are cast to e4m3, without scales, before they are summed. They
travel as bf16, which holds every e4m3 number: the sum is the same, and no byte is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.errors import InputError
from tokenyard.formats import Format, Mxfp4Weights, Mxfp8, Nvfp4, swizzle_scales
from tokenyard.formats.base import dtype_name, is_tensor
from tokenyard.rows import describe

# The largest e4m3 number. What is above it saturates.
_E4M3_MAX = 448.0


class SfLayout(IntEnum):
    """How `output_scales` are laid out. Members of FlashInfer's class of this name are taken, too."""

    layout_128x4 = 0  # tiles of 128 rows × 4 scales
    layout_8x4 = 1  # tiles of 8 rows × 4 scales
    layout_linear = 2  # row by row


# The rows of a tile, where scales are laid out in tiles of 4 columns.
_TILE_ROWS = {SfLayout.layout_128x4: 128, SfLayout.layout_8x4: 8}


class OutputFormat(NamedTuple):
    """A format that a sum can be quantized to."""

    name: str
    block: int  # columns that share a scale
    per_byte: int  # codes in a byte


# By `output_dtype`, and the dtype of `output_scales`.
_OUTPUT_FORMATS = {
    (torch.float8_e4m3fn, torch.uint8): OutputFormat("mxfp8", 32, 1),
    (torch.uint8, torch.uint8): OutputFormat("mxfp4", 32, 2),
    (torch.uint8, torch.float8_e4m3fn): OutputFormat("nvfp4", 16, 2),
}


def interleave_8x4(scales_RC: Tensor) -> Tensor:
    """Linear scales in tiles of 8 rows × 4 scales, one tile after the other along a row of tiles; the pad is zero.

    >>> scales = torch.arange(12, dtype=torch.uint8).view(2, 6)
    >>> interleave_8x4(scales).shape, interleave_8x4(scales).flatten()[:36].nonzero().flatten().tolist()
    (torch.Size([8, 8]), [1, 2, 3, 4, 5, 6, 7, 32, 33])
    """
    padded = functional.pad(scales_RC, (0, -scales_RC.shape[1] % 4, 0, -scales_RC.shape[0] % 8))
    rows, columns = padded.shape
    return padded.view(rows // 8, 8, columns // 4, 4).transpose(1, 2).reshape(rows, columns)


@dataclass(frozen=True, kw_only=True)
class QuantizedOutput:
    """The format of a quantized sum of `[T, H]`, and the tensors that it is written into."""

    format: OutputFormat
    width: int  # of a row of codes
    scales: Tensor
    layout: SfLayout
    scalar_scale: float

    def write(self, y_TH: Tensor, output: Tensor | None) -> Tensor:
        """Quantize a float32 sum: its scales go into `scales`; its codes are returned, in `output` if given."""
        data, scales_TC = self._encoded(y_TH)
        if self.layout is SfLayout.layout_128x4:
            scales_TC = swizzle_scales(scales_TC)
        elif self.layout is SfLayout.layout_8x4:
            scales_TC = interleave_8x4(scales_TC)
        self.scales.view(torch.uint8).view(-1).copy_(scales_TC.reshape(-1))
        codes = data[:, : self.width]
        if output is None:
            return codes.contiguous()
        output.view(torch.uint8).copy_(codes.view(torch.uint8))
        return output

    def _encoded(self, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, `[T, at least width]`, and linear scales as bytes."""
        if self.format.name == "mxfp4":
            # The weight format cannot hold a matrix without rows.
            rows_TH = y_TH if len(y_TH) else y_TH.new_zeros(1, y_TH.shape[1])
            held = Mxfp4Weights(scale_rule="ceil").quantize(rows_TH).payloads
            return held["data"][: len(y_TH)], held["scales"][: len(y_TH)]
        wire: Format = Mxfp8() if self.format.name == "mxfp8" else Nvfp4(global_scale=self.scalar_scale)
        rows = wire.encode(y_TH).payloads
        return rows["data"], rows["scales"].view(torch.uint8)


def check_output_format(
    payload: Tensor,
    num_tokens: int,
    output_dtype: torch.dtype | None,
    output_scales: Tensor | None,
    output_scalar_scale: float,
    sf_layout: int,
    use_low_precision: bool,
    output: Tensor | None,
) -> QuantizedOutput | None:
    """The quantized output of a combine of this payload; None for the plain sum. Raise if arguments do not fit."""
    layout = _layout(sf_layout)
    if output_scales is None:
        plain = torch.bfloat16 if use_low_precision else payload.dtype
        if output_dtype not in (None, plain):
            raise InputError(
                f"output_dtype is {_dtype_text(output_dtype)}, and there are no output_scales",
                expected=f"{dtype_name(plain)}, "
                + ("of a use_low_precision combine" if use_low_precision else "as the payload"),
                fix="pass output_scales for a quantized output, or convert the output afterwards",
            )
        return None
    if use_low_precision:
        raise InputError(
            "use_low_precision is True, and output_scales are given",
            expected="one of the two, as in FlashInfer",
            fix="pass use_low_precision=False: the quantized output is then rounded once",
        )
    format = _format(output_dtype, output_scales)
    hidden = payload.shape[2]
    if hidden % format.per_byte:
        raise InputError(
            f"results of {hidden} columns and a {format.name} output",
            expected="an even number: a byte holds two codes",
            fix="pad the results by a column",
        )
    if format.name == "nvfp4":
        Nvfp4(global_scale=output_scalar_scale)  # raises unless it is a valid scale
    rows, columns = num_tokens, -(-hidden // format.block)
    if tile := _TILE_ROWS.get(layout):
        rows, columns = -(-rows // tile) * tile, -(-columns // 4) * 4
    fits = output_scales.is_contiguous() and output_scales.device == payload.device
    if not fits or output_scales.numel() != rows * columns:
        raise InputError(
            f"output_scales is {describe(output_scales)} on {output_scales.device}",
            expected=f"{rows} × {columns} contiguous scales on {payload.device}: "
            f"{format.name} of [{num_tokens}, {hidden}], {layout.name}",
            fix=f"allocate them with torch.empty({rows * columns}, dtype=torch.{dtype_name(output_scales.dtype)})",
        )
    width = hidden // format.per_byte
    if output is not None and not (
        is_tensor(output, shape=(num_tokens, width), dtypes=(output_dtype,), device=payload.device)
        and output.is_contiguous()
    ):
        raise InputError(
            f"output is {describe(output)}",
            expected=f"{_dtype_text(output_dtype)}{[num_tokens, width]}, contiguous, on {payload.device}: "
            f"codes of {format.name}",
            fix="allocate it with torch.empty",
        )
    return QuantizedOutput(
        format=format, width=width, scales=output_scales, layout=layout, scalar_scale=output_scalar_scale
    )


def through_e4m3(payload: Tensor) -> Tensor:
    """Results cast to e4m3 without scales, saturating, as bf16: what a low-precision combine sums.

    >>> through_e4m3(torch.tensor([0.3, 17.0, -1e4])).tolist()
    [0.3125, 16.0, -448.0]
    """
    clamped = payload.detach().float().clamp(-_E4M3_MAX, _E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).to(torch.bfloat16)


def _layout(sf_layout: int) -> SfLayout:
    try:
        return SfLayout(sf_layout)
    except ValueError:
        raise InputError(
            f"sf_layout is {sf_layout!r}",
            expected="a member of SfLayout: " + ", ".join(layout.name for layout in SfLayout),
            fix="pass SfLayout.layout_linear",
        ) from None


def _format(output_dtype: object, output_scales: object) -> OutputFormat:
    scales = output_scales.dtype if isinstance(output_scales, Tensor) else None
    for dtypes, format in _OUTPUT_FORMATS.items():
        if dtypes == (output_dtype, scales):
            return format
    raise InputError(
        f"output_dtype is {_dtype_text(output_dtype)} and output_scales is {describe(output_scales)}",
        expected="float8_e4m3fn with uint8 scales (mxfp8), uint8 with uint8 scales (mxfp4), "
        "or uint8 with float8_e4m3fn scales (nvfp4)",
        fix="pass one of these pairs, or neither",
    )


def _dtype_text(dtype: object) -> str:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
