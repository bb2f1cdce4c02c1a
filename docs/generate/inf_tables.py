"""A table of what Inf becomes in each format, from what formats declare."""

from __future__ import annotations

from tokenyard import formats
from tokenyard.formats import FORMATS, WEIGHT_FORMATS
from tokenyard_lab.markdown import markdown_table

# Spellings of row formats whose parameters change it.
SPELLINGS = (*FORMATS, "fp8_block128(power_of_two_scales=True)", "nvfp4(global_scale=448.0)")


def inf_in_markdown() -> str:
    """A line for each format of rows, and for each of weights."""
    rows = [("rows", f"`{name}`", _told(formats.get(name).inf)) for name in SPELLINGS]
    weights = [("weights", f"`{name}`", _told(kind.inf)) for name, kind in WEIGHT_FORMATS.items()]
    return markdown_table(("of", "format", "±Inf decodes to"), [*rows, *weights])


def _told(becomes: formats.base.InfBecomes | None) -> str:
    assert becomes is not None, "a format of this package declares what Inf becomes"
    return {
        "Inf": "±Inf",
        "the largest number": "± the largest number that it can hold",
        "Inf, or the largest number if cast": "±Inf in rows of this dtype; else ± its largest number",
        "the largest of its row": "± the largest finite magnitude of its row",
        "the largest of its matrix": "± the largest finite magnitude of its matrix",
        "the largest code": "± the largest code, 2688 / g",
    }[becomes]
