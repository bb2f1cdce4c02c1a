"""Scales in the 128×4 layout that block-scaled matrix kernels read.

Linear scales are a matrix `[rows, columns]`. The swizzled layout cuts them into tiles of 128 rows × 4 columns, 512
scales each, which are stored one after the other, row of tiles by row of tiles. Inside a tile, the 4 scales of row r
(of 128) are stored together, from offset `16 · (r mod 32) + 4 · (r div 32)` on:

    [M/128, 4, 32, C/4, 4]  →  [M/128, C/4, 32, 4, 4]        M, C: rows and columns, padded with zeros

The scales of a row are spread over several tiles, and the pad depends on the number of rows. Swizzled scales can
therefore not travel row by row: swizzle after the exchange.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tokenyard.errors import ContractError
from tokenyard.formats.base import EncodedRows

TILE_ROWS = 128
TILE_COLUMNS = 4


def swizzle_scales(scales_RC: Tensor) -> Tensor:
    """Linear scales `[rows, columns]` → swizzled, `[rows padded to 128, columns padded to 4]`.

    Row 33, column 1 goes to offset 16 · (33 mod 32) + 4 · (33 div 32) + 1 = 21:

    >>> scales = torch.zeros(40, 3, dtype=torch.uint8)
    >>> scales[33, 1] = 7
    >>> swizzled = swizzle_scales(scales)
    >>> swizzled.shape, swizzled.flatten().nonzero().item()
    (torch.Size([128, 4]), 21)
    """
    plain_RC = _as_plain(scales_RC)
    rows, columns = plain_RC.shape
    shape = _padded_shape(rows, columns)
    padded = plain_RC.new_zeros(shape)
    padded[:rows, :columns] = plain_RC
    tiles = padded.view(shape[0] // TILE_ROWS, 4, 32, shape[1] // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape).view(scales_RC.dtype)


def unswizzle_scales(swizzled: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Swizzled scales → linear `[num_rows, num_columns]`, without the pad.

    >>> scales = torch.arange(40 * 3, dtype=torch.uint8).view(40, 3)
    >>> torch.equal(unswizzle_scales(swizzle_scales(scales), 40, 3), scales)
    True
    """
    shape = _padded_shape(num_rows, num_columns)
    if tuple(swizzled.shape) != shape:
        raise ContractError(
            f"swizzled scales have shape {list(swizzled.shape)}",
            expected=f"{list(shape)} for {num_rows} rows of {num_columns} scales",
            fix="take them from EncodedRows.swizzled()",
        )
    plain = _as_plain(swizzled)
    tiles = plain.reshape(shape[0] // TILE_ROWS, shape[1] // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(shape)
    return padded[:num_rows, :num_columns].contiguous().view(swizzled.dtype)


def swizzle_rows(rows: EncodedRows) -> EncodedRows:
    """Encoded rows with their payload `scales` swizzled. Raises if it is swizzled already."""
    if rows.scale_layout != "linear":
        raise ContractError(
            f"the scales of these {rows.format} rows are {rows.scale_layout} already",
            expected="linear scales",
            fix="swizzle once, after the exchange; `.linear()` brings linear scales back",
        )
    scales = swizzle_scales(rows.payloads["scales"])
    return dataclasses.replace(rows, payloads={**rows.payloads, "scales": scales}, scale_layout="swizzled")


def unswizzle_rows(rows: EncodedRows) -> EncodedRows:
    """Encoded rows with linear scales, from rows with swizzled ones."""
    declared = {payload.name: payload for payload in rows.format.payloads(rows.hidden_size)}
    scales = unswizzle_scales(rows.payloads["scales"], rows.num_rows, declared["scales"].width)
    return dataclasses.replace(rows, payloads={**rows.payloads, "scales": scales}, scale_layout="linear")


def _as_plain(scales: Tensor) -> Tensor:
    # torch cannot fill or copy every one-byte float dtype on every device, but it can copy uint8.
    return scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales


def _padded_shape(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS
