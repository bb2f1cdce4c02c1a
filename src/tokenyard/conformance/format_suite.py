"""Checks of a format: it encodes what it declares, and the code of a row depends on that row alone.

Each check takes a format object, also one from outside of this package. A format may declare `relative_error`: the
largest relative L2 distance of a decoded Gaussian row from the row. The checks then test it. For the registered
formats the number is in `RELATIVE_ERROR`.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import same_numbers
from tokenyard.conformance.runner import Finding, expect, expect_same, unchanged
from tokenyard.errors import ContractError, UnknownName
from tokenyard.formats import FORMATS, EncodedRows, Format, get
from tokenyard.formats.base import ROW_DTYPES, dtype_name, saturated

WIDTHS = (1, 100, 2880, 7168)
_ROWS = 5
# Odd ones, and those at both sides of the blocks that formats have.
EVERY_WIDTH = (2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300)
EVERY_COUNT = (1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 65, 301)

# Over Gaussian rows of width 7168, measured: 0.0017, 0.0002, 0, 0.0263, 0.0266, 0.0950; with a margin.
RELATIVE_ERROR = {
    "bf16": 0.002,
    "fp16": 0.0003,
    "fp32": 0.0,
    "fp8_block128": 0.03,
    "mxfp8": 0.03,
    "nvfp4": 0.105,
}


def relative_error_of(format: Format) -> float | None:
    """The relative error that a format declares, or None."""
    declared = getattr(format, "relative_error", None)
    if declared is None and type(format) is FORMATS.get(format.name):
        return RELATIVE_ERROR.get(format.name)
    return None if declared is None else float(declared)


def gaussian_rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Gaussian rows of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    sizes_T1 = torch.exp2(torch.randint(-4, 5, (count, 1), generator=draw).float())
    return (torch.randn(count, width, generator=draw) * sizes_T1).to(dtype)


def dtypes_of(format: Format) -> list[torch.dtype]:
    """The dtypes of rows that the format takes."""
    taken = [d for d in ROW_DTYPES if format.carries(d) is None or format.returns(d) is None]
    expect(bool(taken), "the format takes rows of no dtype", "wire_dtypes or combine_dtypes to name some")
    return taken


def expect_same_code(left: EncodedRows, right: EncodedRows, found: str) -> None:
    """Raise a finding unless two batches have the same codes; `found` has a place for the payload that differs."""
    for name in left.payloads:
        words = found.format(repr(name))
        expect_same(left.payloads[name], right.payloads[name], words, same=same_numbers)


def expect_same_alone(x_TH: Tensor, encoded: EncodedRows, row: int, found: str) -> None:
    """Raise a finding unless a row has the code that it has alone; `found` has a place for the payload that differs."""
    alone = encoded.format.encode(x_TH[row : row + 1].clone())
    expect_same_code(encoded.slice(row, row + 1), alone, found)


def _expect_form(tensor: Tensor, dtype: torch.dtype, shape: list[int], what: str, why: str = "") -> None:
    """Raise a finding unless a tensor has a dtype and a shape."""
    found, due = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}", f"{dtype_name(dtype)}{shape}"
    expect(found == due, what + found, due + why)


# -- The checks ----------------------------------------------------------------------------------------------


def payloads_as_declared(format: Format) -> None:
    """What `encode` returns has the names, dtypes, widths and bytes that `payloads` declares, for any width and T."""
    for width in WIDTHS:
        declared = format.payloads(width)
        nbytes, found = sum(p.width * p.dtype.itemsize for p in declared), format.bytes_per_row(width)
        expect(found == nbytes, f"bytes_per_row({width}) is {found}", f"{nbytes}, the sum over its payloads")
        for count in (0, 1, _ROWS):
            payloads = format.encode(gaussian_rows(count, width)).payloads
            names = [p.name for p in declared]
            expect(list(payloads) == names, f"encode returns payloads {list(payloads)}", names)
            for payload in declared:
                tensor, due = payloads[payload.name], [count, payload.width]
                what = f"payload {payload.name!r} of {count} rows of width {width} is "
                _expect_form(tensor, payload.dtype, due, what, ", as declared")
                expect(tensor.is_contiguous(), f"payload {payload.name!r} is strided", "contiguous rows")


def true_width_comes_back(format: Format) -> None:
    """`decode(encode(x))` has the shape of `x`, whatever the padding, in the dtype that was asked for."""
    for width in WIDTHS:
        for count in (0, _ROWS):
            for dtype in ROW_DTYPES:
                decoded = format.encode(gaussian_rows(count, width)).decode(dtype)
                _expect_form(decoded, dtype, [count, width], f"{count} rows of width {width} decode to ")


def rows_are_independent(format: Format) -> None:
    """A row's code depends on that row alone: not on its neighbors, their size, or its place."""
    for width in WIDTHS:
        x_TH = gaussian_rows(_ROWS, width)
        together = format.encode(x_TH)
        for row in range(_ROWS):
            found = f"row {row} of width {width} has another {{}} in a batch than alone"
            expect_same_alone(x_TH, together, row, found)


def input_untouched(format: Format) -> None:
    """`encode` does not change its rows, and `decode` does not change the code."""
    for dtype in dtypes_of(format):
        x_TH = gaussian_rows(_ROWS, 100, dtype)
        with unchanged({f"the {dtype_name(dtype)} input": x_TH}, " by encode"):
            encoded = format.encode(x_TH)
        payloads = {f"the payload {name!r}": tensor for name, tensor in encoded.payloads.items()}
        with unchanged(payloads, " by decode"):
            encoded.decode(torch.float32)


def strided_rows(format: Format) -> None:
    """Rows that are a slice of something wider have the code of their copy."""
    wide = gaussian_rows(_ROWS, 201)
    for x_TH in (wide[:, ::2], wide[:, 1:101], wide[::2]):
        strided, copied = format.encode(x_TH), format.encode(x_TH.contiguous())
        expect_same_code(strided, copied, "a strided row has another {} than its copy")


def decoded_rows_are_near(format: Format) -> None:
    """`decode(encode(x))` is finite, zero for zeros, and within the relative error that the format declares."""
    for dtype in dtypes_of(format):
        for width in WIDTHS:
            zeros = format.encode(torch.zeros(2, width, dtype=dtype)).decode(torch.float32)
            expect(not bool(zeros.any()), "rows of zeros decode to something else", "zeros")
            x_TH = gaussian_rows(_ROWS, width, dtype)
            decoded = format.encode(x_TH).decode(torch.float32)
            expect(bool(torch.isfinite(decoded).all()), "finite rows decode to NaN or Inf", "finite rows")
    bound = relative_error_of(format)
    if bound is not None:
        x_TH = torch.randn(8, 7168, generator=torch.Generator().manual_seed(7))
        off = format.encode(x_TH).decode(torch.float32).double() - x_TH.double()
        worst = float((off.norm(dim=1) / x_TH.double().norm(dim=1)).max())
        found = f"Gaussian rows are off by {worst:.4f}, relative"
        expect(worst <= bound, found, f"at most {bound:g}, as declared")


def codes_repeat(format: Format) -> None:
    """Encoding the same rows twice gives the same bits, whatever was encoded in between."""
    x_TH = gaussian_rows(_ROWS, 100)
    first = format.encode(x_TH)
    for size in (2.0**-9, 2.0**9):
        format.encode(x_TH * size)
    expect_same_code(first, format.encode(x_TH), "encoding twice gave two different {}")


def nan_stays_in_its_row(format: Format) -> None:
    """NaN or Inf in one row does not reach another row, and NaN is not decoded as a number."""
    x_TH = gaussian_rows(_ROWS, 100)
    clean = format.encode(x_TH).decode(torch.float32)
    for poison in (math.nan, math.inf):
        dirty_TH = x_TH.clone()
        dirty_TH[2, 3] = poison
        decoded = format.encode(dirty_TH).decode(torch.float32)
        others = [row for row in range(_ROWS) if row != 2]
        expect_same(decoded[others], clean[others], f"{poison} in row 2 changed another row", "row 2 alone")
        expected = "NaN where NaN was: an error must not turn into a value"
        expect(
            poison == math.inf or bool(decoded[2].isnan().any()),
            "a row with NaN decodes to numbers",
            expected,
        )


def rows_are_cut_and_joined(format: Format) -> None:
    """Payloads can be taken row by row, as an exchange does, and decode to the rows that were taken."""
    x_TH = gaussian_rows(_ROWS, 100)
    encoded = format.encode(x_TH)
    taken = torch.tensor([4, 0, 4])
    payloads = {name: tensor[taken] for name, tensor in encoded.payloads.items()}
    decoded = EncodedRows(format=format, hidden_size=100, payloads=payloads).decode(torch.float32)
    due = encoded.decode(torch.float32)[taken]
    expect_same(decoded, due, "rows taken out of a batch decode to something else")


def scale_layouts_as_declared(format: Format) -> None:
    """A format that declares swizzled scales can swizzle them once, without changing the rows, and undo it."""
    if "swizzled" not in format.scale_layouts:
        return
    encoded = format.encode(gaussian_rows(_ROWS, 100))
    swizzled = encoded.swizzled()
    layout, expected = swizzled.scale_layout, "swizzled ones, as `scale_layouts` declares"
    expect(layout == "swizzled", f"`swizzled()` gave rows with {layout} scales", expected)
    decoded, found = swizzled.decode(torch.float32), "rows with swizzled scales decode to something else"
    expect_same(decoded, encoded.decode(torch.float32), found)
    expect_same_code(encoded, swizzled.linear(), "`linear()` brought back another {}")
    try:
        swizzled.swizzled()
    except ContractError:
        return
    raise Finding("scales were swizzled twice", "ContractError: swizzled scales look like linear ones")


def name_reads_back(format: Format) -> None:
    """Equal parameters are equal formats, and what `str` writes, the registry reads back (where registered)."""
    names: list[str] = []
    if dataclasses.is_dataclass(format):
        names = [field.name for field in dataclasses.fields(format)]
    twin = type(format)(**{name: getattr(format, name) for name in names})
    equal = twin == format and hash(twin) == hash(format)
    expect(equal, f"two formats {format} with equal parameters differ", "equal: a frozen dataclass")
    if FORMATS.get(format.name) is not type(format):
        return
    try:
        read = get(str(format))
    except UnknownName as error:
        raise Finding(f"str gives {str(format)!r}, and {error}", "a name that is read back") from error
    expect(read == format, f"{str(format)!r} is read back as {read!r}", repr(format))


# -- Every width, number of rows, dtype and kind of numbers --------------------------------------------------


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
            expect(not bool(flipped.any()), f"numbers {where} have changed their sign", "the same signs")
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
