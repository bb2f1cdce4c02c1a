"""A table of what Inf becomes in each format, from what formats declare."""

from __future__ import annotations

from tokenyard import formats
from tokenyard.formats import FORMATS, WEIGHT_FORMATS
from tokenyard_lab.markdown import markdown_table

# Spellings of row formats whose parameters change it.
SPELLINGS = (*FORMATS, "fp8_block128(power_of_two_scales=True)", "nvfp4(global_scale=448.0)")


def inf_in_markdown() -> str:
    """A line for all formats of rows, and for all of weights, in which Inf becomes the same."""
    of = [("rows", name, formats.get(name).inf) for name in SPELLINGS]
    of += [("weights", name, kind.inf) for name, kind in WEIGHT_FORMATS.items()]
    names: dict[tuple[str, str], list[str]] = {}
    for what, name, becomes in of:
        names.setdefault((what, _told(becomes)), []).append(f"`{name}`")
    lines = [(what, ", ".join(alike), told) for (what, told), alike in names.items()]
    return markdown_table(("of", "formats", "±Inf decodes to"), lines)


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
