"""What the plugin for vLLM reads from the environment, and what it refuses."""

from __future__ import annotations

from tokenyard.experts import EXPERTS
from tokenyard.integrations.vllm import settings
from tokenyard.integrations.vllm.refusals import EVERY_REFUSAL
from tokenyard.planning.choosing import AUTO
from tokenyard_lab.markdown import markdown_table

# By variable: what it may be, what holds where it is not set, and what it does.
_VARIABLES = {
    settings.MODE: (
        " or ".join(f"`{mode}`" for mode in settings.MODES),
        "off",
        "turns the plugin on; " + "; ".join(f"`{mode}`: {means}" for mode, means in settings.MODES.items()),
    ),
    settings.EXCHANGE: (
        "a name of `tokenyard support`",
        f"`{AUTO}`",
        "the exchange that moves the rows, as everywhere in tokenyard",
    ),
    settings.WIRE: ("a format, say `mxfp8`", "the model's dtype", "the format in which rows travel out"),
    settings.EXPERTS_CLASS: (
        ", ".join(f"`{name}`" for name in EXPERTS),
        f"`{AUTO}`",
        "what computes the experts, with `TOKENYARD_VLLM=experts`",
    ),
    settings.DEADLINE: (
        "seconds",
        f"{settings.DEFAULT_DEADLINE:g}",
        "how long a MoE layer may wait for other ranks; after it, the layer raises `PeerLost`, and the engine ends",
    ),
}


def settings_in_markdown() -> str:
    """The variables, and what each may be."""
    rows = [(f"`{name}`", *columns) for name, columns in _VARIABLES.items()]
    return markdown_table(("variable", "may be", "without it", "what it does"), rows)


def refusals_in_markdown() -> str:
    """What is refused, why, and what to do."""
    rows = [(one.name, one.why, one.fix) for one in EVERY_REFUSAL]
    return markdown_table(("refused", "because", "what to do"), rows)
