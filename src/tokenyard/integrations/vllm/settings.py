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


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of the environment that the plugin reads."""

    name: str
    values: str  # what it may be, in words
    default: str  # what holds where it is not set
    meaning: str


# The modes, and what each means.
MODES: dict[str, str] = {
    "experts": "tokenyard moves the rows, and computes the experts",
    "exchange": "tokenyard moves the rows; vLLM's own experts compute",
}
MODE = Variable(
    name="TOKENYARD_VLLM",
    values=" or ".join(f"`{mode}`" for mode in MODES),
    default="off",
    meaning="turns the plugin on; " + "; ".join(f"`{mode}`: {meaning}" for mode, meaning in MODES.items()),
)
EXCHANGE = Variable(
    name="TOKENYARD_EXCHANGE",
    values="a name of `tokenyard support`",
    default=f"`{AUTO}`",
    meaning="the exchange that moves the rows, as everywhere in tokenyard",
)
WIRE = Variable(
    name="TOKENYARD_VLLM_WIRE",
    values="a format, say `mxfp8`",
    default="the model's dtype",
    meaning="the format in which rows travel out",
)
EXPERTS_CLASS = Variable(
    name="TOKENYARD_VLLM_EXPERTS",
    values=", ".join(f"`{name}`" for name in EXPERTS),
    default=f"`{AUTO}`",
    meaning="what computes the experts, with `TOKENYARD_VLLM=experts`",
)
DEADLINE = Variable(
    name="TOKENYARD_VLLM_DEADLINE",
    values="seconds",
    default="300",
    meaning="how long a MoE layer may wait for other ranks; after it, the layer raises `PeerLost`, and the engine ends",
)
VARIABLES = (MODE, EXCHANGE, WIRE, EXPERTS_CLASS, DEADLINE)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the plugin was asked for."""

    mode: Mode
    exchange: str = AUTO
    wire: str | None = None
    experts: str = AUTO
    deadline: float = float(DEADLINE.default)

    def __str__(self) -> str:
        experts = f", experts {self.experts}" if self.mode == "experts" else ""
        wire = f", wire {self.wire}" if self.wire else ""
        return (
            f"{MODE.name}={self.mode} ({MODES[self.mode]}): exchange {self.exchange}{wire}{experts}, "
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
    mode = environment.get(MODE.name, "")
    if mode == "":
        return None
    if mode not in MODES:
        raise InputError(
            f"{MODE.name} is {mode!r}",
            expected=" or ".join(f"{name!r} ({meaning})" for name, meaning in MODES.items()),
            fix="set it to one of these, or unset it: vLLM then runs without tokenyard",
        )
    asked = Settings(
        mode=cast(Mode, mode),
        exchange=environment.get(EXCHANGE.name) or AUTO,
        wire=environment.get(WIRE.name) or None,
        experts=environment.get(EXPERTS_CLASS.name) or AUTO,
        deadline=_seconds(environment.get(DEADLINE.name) or DEADLINE.default),
    )
    if asked.exchange not in (AUTO, *EXCHANGES):
        raise unknown_name(f"exchange in {EXCHANGE.name}", asked.exchange, EXCHANGES)
    if asked.experts not in (AUTO, *EXPERTS):
        raise unknown_name(f"experts in {EXPERTS_CLASS.name}", asked.experts, EXPERTS)
    if asked.wire is not None:
        format_named(asked.wire)  # raises, and names the nearest one that exists
    return asked


def _seconds(text: str) -> float:
    try:
        return check_deadline(float(text))
    except ValueError as error:
        raise InputError(
            f"{DEADLINE.name} is {text!r}",
            expected="seconds, above 0",
            fix=f"unset it, for {DEADLINE.default} s",
        ) from error
