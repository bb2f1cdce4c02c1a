"""What Inf and NaN become in every format of rows and of weights is what the format declares."""

from __future__ import annotations

import pytest
import torch

from docs.generate.inf_tables import SPELLINGS
from tokenyard import formats
from tokenyard.formats import WEIGHT_FORMATS, PlainFormat, weight_format
from tokenyard.formats.base import ROW_DTYPES

INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = torch.finfo(torch.float32).max
WIDTHS = [1, 40, 300]
signs = pytest.mark.parametrize("sign", [1.0, -1.0])


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected_of(
    inf: str, *, dtype: torch.dtype, kept: bool, finite: float, code: float
) -> tuple[float, float]:
    """The least and the largest magnitude that ±Inf may decode to."""
    largest = float(torch.finfo(dtype).max)
    return {
        "Inf": (INF, INF),
        "the largest number": (largest, largest),
        "Inf, or the largest number if cast": (INF, INF) if kept else (largest, largest),
        # An e4m3 scale is rounded by up to 1/16 of itself.
        "the largest of its row": (finite * 15 / 16, finite * 17 / 16),
        "the largest of its matrix": (finite * 15 / 16, finite * 17 / 16),
        "the largest code": (code, code),
    }[inf]


@signs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_inf_in_a_row_becomes_what_is_declared(name, dtype, width, sign):
    format = formats.get(name)
    x = gaussian(3, width).to(dtype)
    clean, at = format.encode(x).decode(), width // 2
    x[1, at] = sign * INF
    finite = x[1][x[1].isfinite()].abs().amax().item() if width > 1 else 2688.0
    decoded = format.encode(x).decode()
    held = format.dtype if isinstance(format, PlainFormat) else torch.float32
    least, most = expected_of(
        format.inf,
        dtype=held,
        kept=held == dtype,
        finite=finite,
        code=2688 / (getattr(format, "global_scale", None) or 1.0),
    )
    assert least <= sign * decoded[1, at].item() <= most
    assert not decoded.isnan().any()
    others = torch.ones_like(decoded, dtype=torch.bool)
    start = at // format.block * format.block
    others[1, start : start + format.block] = False
    assert decoded[others].isfinite().all()
    others[1] &= (
        name != "nvfp4"
    )  # whose scale of a row is that of its finite elements, of which there is one fewer
    assert torch.equal(decoded[others], clean[others])


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_nan_in_a_row_stays_and_takes_its_block_along(name, dtype, width):
    format = formats.get(name)
    x = gaussian(3, width).to(dtype)
    at = width // 2
    x[1, at] = NAN
    decoded = format.encode(x).decode()
    expected = torch.zeros_like(decoded, dtype=torch.bool)
    start = at // format.block * format.block
    expected[1, start : start + format.block] = True
    assert torch.equal(decoded.isnan(), expected)
    assert decoded[~expected].isfinite().all()


@signs
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_inf_among_weights_becomes_what_is_declared(name, sign):
    format = weight_format(name)
    w = gaussian(2, 140, 300)
    finite = w[1].abs().amax().item()
    w[1, 5, 150] = sign * INF
    decoded = format.quantize(w).decode()
    dtype = getattr(format, "dtype", torch.float32)
    least, most = expected_of(format.inf, dtype=dtype, kept=False, finite=finite, code=NAN)
    assert least <= sign * decoded[1, 5, 150].item() <= most
    assert not decoded.isnan().any()
    inside = shares_a_scale(name, decoded)
    assert decoded[~inside].isfinite().all()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_nan_among_weights_stays_and_takes_its_block_along(name):
    w = gaussian(2, 140, 300)
    w[1, 5, 150] = NAN
    decoded = weight_format(name).quantize(w).decode()
    assert torch.equal(decoded.isnan(), shares_a_scale(name, decoded))


def shares_a_scale(name: str, w: torch.Tensor) -> torch.Tensor:
    """The elements that share a scale with the one at [1, 5, 150]."""
    block = weight_format(name).block
    found, start = torch.zeros_like(w, dtype=torch.bool), 150 // block * block
    lines = slice(0, 128) if name == "fp8_block128" else slice(5, 6)
    found[1, lines, start : start + block] = True
    return found


def test_every_format_declares_it():
    assert all(formats.get(name).inf is not None for name in SPELLINGS)
    assert all(isinstance(kind.inf, str) for kind in WEIGHT_FORMATS.values())
