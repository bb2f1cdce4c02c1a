"""What the plugin for vLLM reads from the environment, and what it refuses."""

from __future__ import annotations

from tokenyard.integrations.vllm.refusals import EVERY_REFUSAL
from tokenyard.integrations.vllm.settings import VARIABLES
from tokenyard_lab.markdown import markdown_table


def settings_in_markdown() -> str:
    """The variables, and what each may be."""
    rows = [(f"`{one.name}`", one.values, one.default, one.meaning) for one in VARIABLES]
    return markdown_table(("variable", "may be", "without it", "what it does"), rows)


def refusals_in_markdown() -> str:
    """What is refused, why, and what to do."""
    rows = [(one.name, one.why, one.fix) for one in EVERY_REFUSAL]
    return markdown_table(("refused", "because", "what to do"), rows)
