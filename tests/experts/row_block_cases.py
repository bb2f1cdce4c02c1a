"""Rows of mxfp8 to be recoded, on any device: every code, and scales that are near, far apart, and none at all."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenyard import formats
from tokenyard.experts.fused.kernels import twins
from tokenyard.formats.base import EncodedRows

# Less than a span, no whole spans, no whole blocks, whole ones, and more than a block of threads takes.
WIDTHS = [1, 32, 33, 100, 128, 130, 300, 512, 1100]
SCALES = {
    "the same": [120],
    "near": [117, 118, 119, 120, 121],
    "far": [100, 110, 119, 120, 127],
    "at the ends": [0, 1, 2, 10, 20, 252, 253, 254],
    "with NaN": [0, 119, 120, 254, 255],
}
NAN_CODES = (0x7F, 0xFF)


def drawn_rows(
    width: int, scales: str, *, alignment: int = 32, rows: int = 9, nan: bool = False
) -> EncodedRows:
    """Random codes under scales of a kind; some spans, and one row, are all zero. Behind the width there is garbage."""
    draw = torch.Generator().manual_seed(width)
    format = formats.get(f"mxfp8(alignment={alignment})")
    padded = format.padded_size(width)
    codes = torch.randint(0, 256, (rows, padded), generator=draw, dtype=torch.uint8)
    if not nan:
        codes[(codes == NAN_CODES[0]) | (codes == NAN_CODES[1])] = 0
    zero = torch.rand(rows, padded // 32, generator=draw) < 0.2
    codes.masked_fill_(zero.repeat_interleave(32, 1), 0)
    codes[rows // 2] = 0x80  # minus zero
    choices = torch.tensor(SCALES[scales], dtype=torch.uint8)
    byte = choices[torch.randint(0, len(choices), (rows, padded // 32), generator=draw)]
    payloads = {"data": codes.view(torch.float8_e4m3fn), "scales": byte}
    return EncodedRows(format=format, hidden_size=width, payloads=payloads)


def all_codes() -> EncodedRows:
    """Every code, in a row for each distance of its scale to that of the block, which a span with a one in it has."""
    distances, blocks = 24, 3
    data = torch.zeros(distances, blocks, 128, dtype=torch.uint8)
    data[..., 0] = 0x38
    data[..., 32:] = (torch.arange(blocks * 96) % 256).view(blocks, 96)
    scales = torch.full((distances, blocks, 4), 127, dtype=torch.uint8)
    scales[..., 1:] -= torch.arange(distances, dtype=torch.uint8)[:, None, None]
    payloads = {"data": data.flatten(1).view(torch.float8_e4m3fn), "scales": scales.flatten(1)}
    return EncodedRows(format=formats.get("mxfp8"), hidden_size=blocks * 128, payloads=payloads)


def moved(rows: EncodedRows, device: str) -> EncodedRows:
    return replace(rows, payloads={name: payload.to(device) for name, payload in rows.payloads.items()})


def assert_recoded(found: EncodedRows, rows: EncodedRows) -> None:
    """Found is what the twin makes of the rows, bit by bit; NaN is NaN."""
    data, scales = twins.recode_rows(moved(rows, "cpu"))
    payloads = moved(found, "cpu").payloads
    is_nan, codes = data.float().isnan(), payloads["data"].view(torch.uint8)
    assert torch.equal(payloads["data"].float().isnan(), is_nan)
    assert torch.equal(codes[~is_nan], data.view(torch.uint8)[~is_nan])
    assert torch.equal(payloads["scales"].isnan(), scales.isnan())
    assert torch.equal(payloads["scales"].nan_to_num(), scales.nan_to_num())
