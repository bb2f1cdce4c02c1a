"""What a format can be given, times what data can be: every width, number of rows, dtype and kind of numbers.

The checks beside those of `format_suite`, of the same form: each takes a format object.
"""

from __future__ import annotations

import torch

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import same_numbers
from tokenyard.conformance.format_suite import (
    dtypes_of,
    expect_same_alone,
    expect_same_code,
    gaussian_rows,
    relative_error_of,
)
from tokenyard.conformance.runner import expect, expect_same, unchanged
from tokenyard.formats import Format
from tokenyard.formats.base import ROW_DTYPES, dtype_name, saturated

# Odd ones, and those at both sides of the blocks that formats have.
EVERY_WIDTH = (2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300)
EVERY_COUNT = (1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 65, 301)


def every_width(format: Format) -> None:
    """Rows of every width are encoded one by one, and decode to what is near them."""
    bound = relative_error_of(format)
    for width in EVERY_WIDTH:
        x_TH = gaussian_rows(3, width, seed=width)
        together, own = format.encode(x_TH), format.payloads(width)[0].dtype
        decoded = together.decode(torch.float32)
        shape = tuple(decoded.shape)
        expect(shape == (3, width), f"3 rows of width {width} decode to {shape}", (3, width))
        for row in range(3):
            found = f"row {row} of width {width} has another {{}} in a batch than alone"
            expect_same_alone(x_TH, together, row, found)
        if not format.quantized:
            back, found = (
                format.encode(x_TH.to(own)).decode(own),
                f"rows of width {width} came back with other bits",
            )
            expect_same(back, x_TH.to(own), found, "every bit: nothing is rounded")
        if bound is not None:
            # A short row may lose more than a long one.
            off = float(((decoded - x_TH).norm(dim=1) / x_TH.norm(dim=1)).max())
            found = f"rows of width {width} are off by {off:.4f}, relative"
            expect(off <= 2.5 * bound, found, f"at most 2.5 times {bound:g}, which is declared of wide rows")


def every_number_of_rows(format: Format) -> None:
    """A row has the same code alone and in batches of every number of rows, at their beginning and at their end."""
    whole = gaussian_rows(max(EVERY_COUNT), 72, seed=3)
    for count in EVERY_COUNT:
        some = format.encode(whole[:count].clone())
        for row in {0, count // 2, count - 1}:
            expect_same_alone(whole, some, row, f"row {row} of {count} has another {{}} than alone")
        for name, payload in some.payloads.items():
            expect(len(payload) == count, f"payload {name!r} of {count} rows has {len(payload)}", count)


def every_dtype(format: Format) -> None:
    """Rows of every dtype that the format takes have the code of their numbers; they decode to every dtype alike."""
    for dtype in dtypes_of(format):
        x_TH = gaussian_rows(5, 160, dtype, seed=5)
        encoded = format.encode(x_TH)
        exact = encoded.decode(torch.float32)
        if torch.float32 in dtypes_of(format):
            found = f"{dtype_name(dtype)} rows have another {{}} than the same numbers in float32"
            expect_same_code(encoded, format.encode(x_TH.float()), found)
        for other in ROW_DTYPES:
            found = f"decoding to {dtype_name(other)} differs from rounding what decodes to float32"
            due = saturated(exact, other)
            expect_same(encoded.decode(other), due, found, "the same numbers, rounded once", same_numbers)


def every_size_of_numbers(format: Format) -> None:
    """Small and large numbers are as near as those of usual size, and as near as declared; signs change nothing."""
    bound, usual = relative_error_of(format), 0.0
    x_TH = gaussian_rows(4, 1024, seed=11)
    x_TH = x_TH / x_TH.norm(dim=1, keepdim=True) * 32
    for power in (0, -4, -1, 1, 3):
        scaled = x_TH * 2.0**power
        decoded, negated = (format.encode(rows).decode(torch.float32) for rows in (scaled, -scaled))
        fine = torch.equal(decoded, -negated)
        expect(fine, f"rows times -1 decode to other sizes (of 2^{power})", "the same, with other signs")
        off = float(((decoded - scaled).norm(dim=1) / scaled.norm(dim=1)).max())
        usual = usual or off
        most = 2 * usual + 1e-6 if bound is None else min(2 * usual + 1e-6, 1.2 * bound)
        found = f"numbers of 2^{power} are off by {off:.4f}, relative"
        expect(off <= most, found, f"at most {most:.4f}: as declared, and about as those of 2^0")


def every_kind_of_numbers(format: Format) -> None:
    """Every kind of numbers: finite ones stay finite, NaN stays NaN, zeros stay zeros, signs stay; rows stay apart."""
    for number, (kind, data) in enumerate(DATA.items()):
        for dtype in dtypes_of(format):
            plain = gaussian_rows(6, 90, dtype, seed=number)
            x_TH = plain if data.rows is None else data.rows(plain, torch.Generator().manual_seed(number))
            encoded = format.encode(x_TH)
            decoded, where = encoded.decode(torch.float32), f"of {dtype_name(dtype)} rows with {kind}"
            for row in range(len(x_TH)):
                found = f"row {row} {where} has another {{}} in its batch than alone"
                expect_same_alone(x_TH, encoded, row, found)
            # Not at the end of float32, which a scale that is a power of two may round past.
            clean_T = (x_TH.float().abs() < 2.0**127).all(dim=1)
            expect(
                bool(decoded[clean_T].isfinite().all()),
                f"finite rows {where} decode to NaN or Inf",
                "numbers",
            )
            expect(bool(decoded[x_TH.isnan()].isnan().all()), f"NaN {where} decodes to a number", "NaN")
            zero = clean_T.unsqueeze(1) & (x_TH == 0)
            expect(not bool(decoded[zero].any()), f"zeros {where} decode to something else", "zeros")
            flipped = clean_T.unsqueeze(1) & (decoded * x_TH.float().sign() < 0)
            expect(not bool(flipped.any()), f"numbers {where} have turned their sign", "the same signs")
            if not format.quantized and format.payloads(1)[0].dtype == dtype:
                found = f"{where} came back with other bits"
                expect_same(encoded.decode(dtype), x_TH.contiguous(), found, "every bit: nothing is rounded")


def codes_are_kept(format: Format) -> None:
    """What was encoded and decoded is not overwritten by later batches."""
    x_TH = gaussian_rows(4, 100)
    encoded = format.encode(x_TH)
    kept = {f"payload {name!r}": payload for name, payload in encoded.payloads.items()}
    kept["what was decoded"] = encoded.decode(torch.float32)
    with unchanged(kept, " by a later batch", "memory of its own"):
        format.encode(gaussian_rows(4, 100, seed=1)).decode(torch.float32)
