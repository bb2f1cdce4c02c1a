"""Formats: how rows are encoded, and the registry that finds them by name.

    get("mxfp8")  get("mxfp8(alignment=256)")  get("nvfp4(global_scale=448.0)")  for_dtype(torch.bfloat16)

`get(str(format))` gives an equal format back. To add a format, add its class to `FORMATS`: the planner, the
errors and the support table read this registry.

Weights have formats of their own, in a registry of their own: `weight_format("mxfp4")`, see `weights.py`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from tokenyard.errors import InputError, shown, unknown_name
from tokenyard.formats.base import ROW_DTYPES, EncodedRows, Format, Payload, dtype_name
from tokenyard.formats.bits import e2m1_to_float32
from tokenyard.formats.fp8_block import Fp8Block128
from tokenyard.formats.matrix import QuantizedMatrix, WeightFormat
from tokenyard.formats.mxfp8 import Mxfp8
from tokenyard.formats.nvfp4 import Nvfp4
from tokenyard.formats.plain import Bf16, Fp16, Fp32, PlainFormat
from tokenyard.formats.swizzle import swizzle_scales
from tokenyard.formats.weights import WEIGHT_FORMATS, Mxfp4Weights, PlainWeights, weight_format

# The formats in which rows travel, by name.
FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (Bf16, Fp16, Fp32, Fp8Block128, Mxfp8, Nvfp4)}

_CALL = re.compile(r"[^()]*\(([^()]*)\)\s*")
_WORDS = {"True": True, "False": False, "None": None}


def get(spec: str | Format) -> Format:
    """The format that `spec` names, with its parameters; a format comes back as it is.

    >>> get("mxfp8(alignment=256)")
    Mxfp8(alignment=256)
    >>> get("mxpf8")
    Traceback (most recent call last):
    tokenyard.errors.UnknownName: unknown format 'mxpf8'; expected one of bf16, fp16, fp32, fp8_block128, \
mxfp8, nvfp4; fix: did you mean 'mxfp8'?
    """
    if isinstance(spec, Format):
        return spec
    if not isinstance(spec, str):
        raise InputError(
            f"a format was given as {type(spec).__name__}",
            expected="a name like 'mxfp8', or a Format",
            fix=f"pass one of {', '.join(FORMATS)}",
        )
    name, parenthesis, _ = spec.strip().partition("(")
    name = name.strip()
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    kind = FORMATS[name]
    parameters = _parameters(spec) if parenthesis else {}
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for parameter in parameters:
        if not known:
            raise InputError(
                f"{spec!r} sets {parameter!r}", expected=f"{name} without parameters", fix=f"write {name!r}"
            )
        if parameter not in known:
            raise unknown_name(f"parameter of {name}", parameter, known)
    return kind(**parameters)


def for_dtype(dtype: torch.dtype) -> Format:
    """The plain format of a row dtype, in which rows travel if a layer declares no wire.

    >>> print(for_dtype(torch.bfloat16))
    bf16
    """
    for kind in FORMATS.values():
        if issubclass(kind, PlainFormat) and kind.dtype == dtype:
            return kind()
    raise InputError(
        f"rows are {dtype_name(dtype)}",
        expected=" or ".join(map(dtype_name, ROW_DTYPES)),
        fix="convert the rows first, or quantize them through a format",
    )


def _parameters(spec: str) -> dict[str, Any]:
    """The parameters of `name(key=value, …)`, whose values are numbers, True, False or None.

    It does not use Python's parser (`ast`), which can fail when several threads parse, and on very deep brackets.
    """
    try:
        inside = _CALL.fullmatch(spec)
        if inside is None:
            raise ValueError("not of the form name(key=value)")
        found: dict[str, Any] = {}
        for part in inside[1].split(",") if inside[1].strip() else []:
            key, value = (word.strip() for word in part.split("="))
            if not key.isidentifier() or key in found:
                raise ValueError(f"a parameter {key!r}")
            found[key] = _WORDS[value] if value in _WORDS else _number(value)
        return found
    except ValueError as error:
        raise InputError(
            f"the format {shown(spec)} cannot be read",
            expected="name(key=value, …) with plain values, like mxfp8(alignment=256)",
            fix="write it as str(format) does",
        ) from error


def _number(text: str) -> int | float:
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


__all__ = [
    "FORMATS",
    "WEIGHT_FORMATS",
    "Bf16",
    "EncodedRows",
    "Format",
    "Fp8Block128",
    "Fp16",
    "Fp32",
    "Mxfp4Weights",
    "Mxfp8",
    "Nvfp4",
    "Payload",
    "PlainFormat",
    "PlainWeights",
    "QuantizedMatrix",
    "WeightFormat",
    "e2m1_to_float32",
    "for_dtype",
    "get",
    "swizzle_scales",
    "weight_format",
]
