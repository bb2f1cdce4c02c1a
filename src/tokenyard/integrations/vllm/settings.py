"""The environment variables of the plugin for vLLM. All are declared here; nothing of vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from tokenyard.errors import InputError, unknown_name
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.formats import get as format_named
from tokenyard.group.base import check_deadline
from tokenyard.planning.choosing import AUTO

Mode = Literal["experts", "exchange"]


# The variables; docs/guide/vllm.md says what each may be.
MODE = "TOKENYARD_VLLM"
EXCHANGE = "TOKENYARD_EXCHANGE"
WIRE = "TOKENYARD_VLLM_WIRE"
EXPERTS_CLASS = "TOKENYARD_VLLM_EXPERTS"
DEADLINE = "TOKENYARD_VLLM_DEADLINE"
# The modes, and what each means.
MODES: dict[str, str] = {
    "experts": "tokenyard moves the rows, and computes the experts",
    "exchange": "tokenyard moves the rows; vLLM's own experts compute",
}
# Seconds that a layer may wait for other ranks, where `DEADLINE` is not set.
DEFAULT_DEADLINE = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the plugin was asked for."""

    mode: Mode
    exchange: str = AUTO
    wire: str | None = None
    experts: str = AUTO
    deadline: float = DEFAULT_DEADLINE

    def __str__(self) -> str:
        experts = f", experts {self.experts}" if self.mode == "experts" else ""
        wire = f", wire {self.wire}" if self.wire else ""
        return (
            f"{MODE}={self.mode} ({MODES[self.mode]}): exchange {self.exchange}{wire}{experts}, "
            f"deadline {self.deadline:g} s"
        )


def settings(environment: Mapping[str, str] | None = None) -> Settings | None:
    """What the environment asks for; None where the plugin is off.

    >>> print(settings({"TOKENYARD_VLLM": "experts", "TOKENYARD_VLLM_WIRE": "mxfp8"}))
    TOKENYARD_VLLM=experts (tokenyard moves the rows, and computes the experts): exchange auto, wire mxfp8, experts auto, deadline 300 s
    >>> settings({}) is None
    True
    """  # noqa: E501 - one line of output
    environment = os.environ if environment is None else environment
    mode = environment.get(MODE, "")
    if mode == "":
        return None
    if mode not in MODES:
        raise InputError(
            f"{MODE} is {mode!r}",
            expected=" or ".join(f"{name!r} ({meaning})" for name, meaning in MODES.items()),
            fix="set it to one of these, or unset it: vLLM then runs without tokenyard",
        )
    asked = Settings(
        mode=cast(Mode, mode),
        exchange=environment.get(EXCHANGE) or AUTO,
        wire=environment.get(WIRE) or None,
        experts=environment.get(EXPERTS_CLASS) or AUTO,
        deadline=_seconds(environment.get(DEADLINE) or str(DEFAULT_DEADLINE)),
    )
    if asked.exchange not in (AUTO, *EXCHANGES):
        raise unknown_name(f"exchange in {EXCHANGE}", asked.exchange, EXCHANGES)
    if asked.experts not in (AUTO, *EXPERTS):
        raise unknown_name(f"experts in {EXPERTS_CLASS}", asked.experts, EXPERTS)
    if asked.wire is not None:
        format_named(asked.wire)  # raises, and names the nearest one that exists
    return asked


def _seconds(text: str) -> float:
    try:
        return check_deadline(float(text))
    except ValueError as error:
        raise InputError(
            f"{DEADLINE} is {text!r}",
            expected="seconds, above 0",
            fix=f"unset it, for {DEFAULT_DEADLINE:g} s",
        ) from error
