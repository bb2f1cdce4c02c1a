"""Options of benchmarks whose defaults and allowed values depend on the place of the measurement.

A place is a device or, for `bench layer`, how the layer is given: by its shape, or by `--cells`. Options
are declared here and checked by `choose`. A value that was not given is None, or an empty list, or False.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokenyard.cli.options import option as declare
from tokenyard.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option in one place: its default, and which values it may have there."""

    default: Any = None
    shown: str | None = None  # the default as `--help` says it, where that is not the value
    allows: Callable[[Any], bool] = lambda _: True
    expected: str = ""
    fix: str = ""


def _default(value: Any, shown: str | None = None) -> Option:
    return Option(default=value, shown=shown)


def _defaults(**values: Any) -> dict[str, Option]:
    return {name: _default(value) for name, value in values.items()}


def _refused(expected: str, fix: str) -> Option:
    return Option(allows=_never, expected=expected, fix=fix)


def _never(_: Any) -> bool:
    return False


def _is_plain_or_quantized(names: list[str]) -> bool:
    from tokenyard.formats import weight_format

    return all(name == "bf16" or weight_format(name).quantized for name in names)


_GPU_CELLS = _refused("--cells for the shapes of a GPU", "add --device cuda, or leave it out")
_GPU_PICTURE = _refused("--plot for the figures of a GPU", "add --device cuda, or `bench show --plot`")
_SHAPE_OF_CELLS = _refused(
    "the shapes of the cells, which are those that figures are known for",
    "choose them with --cells and --weights",
)
_SHAPE_OF_MODELS = _refused("the shapes of --cells", "leave it out, or leave out --cells")

OPTIONS: dict[str, dict[str, dict[str, Option]]] = {
    "dispatch": {
        "cpu": {
            "ranks": Option(
                default=[4],
                allows=lambda ranks: len(ranks) == 1,
                expected="one number of processes; virtual ranks on a GPU may be several",
                fix="measure one after the other, or add --device cuda",
            ),
            **_defaults(tokens=[512], hidden_size=2048, num_experts=64, wire=["bf16", "mxfp8"], rounds=30),
            "exchange": _default(None, "all"),
            "quick": _refused("--quick for the grid of a GPU", "choose fewer --tokens, --wire and --rounds"),
            "paranoid": _default(False),
        },
        "cuda": {
            "ranks": _default([], "4 and 8"),
            "tokens": _default([], "16 to 4096"),
            **_defaults(hidden_size=7168, num_experts=256),
            "wire": _default([], "five"),
            "exchange": Option(
                allows=lambda names: set(names) == {"one_sided"},
                shown="one_sided",
                expected="one_sided, whose kernels are measured there",
                fix="leave out --exchange, or measure on the CPU",
            ),
            "rounds": _default(None, "15, with --quick 7"),
            "quick": _default(False),
            "paranoid": _refused(
                "exchanges that can watch themselves: the kernels of one_sided cannot", "measure on the CPU"
            ),
        },
    },
    "experts": {
        "cpu": {
            **_defaults(
                tokens=[512], hidden_size=2048, intermediate_size=1024, num_experts=64, top_k=8, rounds=7
            ),
            "weights": Option(
                default=["bf16"],
                allows=_is_plain_or_quantized,
                expected="bf16, or a quantized format",
                fix="measure bf16",
            ),
            "cells": _GPU_CELLS,
            "plot": _GPU_PICTURE,
        },
        "cuda": {
            **dict.fromkeys(
                ("tokens", "hidden_size", "intermediate_size", "num_experts", "top_k"), _SHAPE_OF_CELLS
            ),
            "rounds": Option(
                default=15,
                allows=lambda rounds: rounds >= 2,
                expected="at least 2, to have a spread",
                fix="pass --rounds 2",
            ),
            "weights": _default([], "all of the cells"),
            "cells": _default(None, "all"),
            "plot": _default(None),
        },
    },
    # A layer is measured on a GPU: with a given shape, or with the shapes of models.
    "layer": {
        "shape": {
            **_defaults(tokens=[128, 512, 4096], ranks=4, weights=["bf16"]),
            **_defaults(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8),
        },
        "cells": {
            "tokens": _default([], "8 to 8192"),
            "weights": _default([], "all of the cells"),
            **dict.fromkeys(
                ("ranks", "hidden_size", "intermediate_size", "num_experts", "top_k"), _SHAPE_OF_MODELS
            ),
        },
    },
}
# How an error names a place that is not a device.
_ASKED = {"shape": "without --cells", "cells": "with --cells"}


def choose(command: str, where: str, given: Mapping[str, Any]) -> SimpleNamespace:
    """The values of a command's options: those that were given, else the defaults. Raise where one may not be given.

    Options that do not depend on the place stay as they are. An option that the place refuses is left out.
    """
    known = OPTIONS[command]
    if where not in known:
        raise InputError(
            f"--device {where}", expected=" or ".join(known), fix="`tokenyard doctor` says what is here"
        )
    values = dict(given)
    for name, option in known[where].items():
        value = given[name]
        is_given = value not in (None, [], False)
        if is_given and not option.allows(value):
            flag = f"--{name.replace('_', '-')}"
            several = value if isinstance(value, list) else [value]
            said = flag if value is True else " ".join(f"{flag} {one}" for one in several)
            raise InputError(
                f"{said} {_ASKED.get(where, f'with --device {where}')}",
                expected=option.expected,
                fix=option.fix,
            )
        values[name] = value if is_given else option.default
        if option.allows is _never:
            del values[name]
    return SimpleNamespace(**values)


def default_of(command: str, name: str) -> str:
    """The defaults of an option in all places, for `--help`.

    >>> default_of("dispatch", "tokens"), default_of("experts", "top_k")
    ('512; cuda: 16 to 4096', '8')
    """
    shown: list[str] = []
    for where, options in OPTIONS[command].items():
        option = options[name]
        values = option.default if isinstance(option.default, list) else [option.default]
        if text := option.shown or " and ".join(str(value) for value in values if value):
            shown.append(f"{where}: {text}" if shown else text)
    return "; ".join(shown)


def dependent(
    command: str, name: str, help: str | None = None, *, min: int | None = 1, max: int | None = None
) -> Any:
    """Declare a command's option whose default depends on the place of the measurement."""
    return declare(None, help, shown=default_of(command, name), min=min, max=max)
