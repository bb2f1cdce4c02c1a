"""The model that ships with tokenyard: a small Qwen3-MoE that solves arithmetic word problems, step by step.

The checkpoint lies in `model/`, and beside it the problems that it has never seen: `held_out.jsonl`.
`tokenyard_lab.training` has the code that made both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

# A word, a digit, or a sign. Capitals do not matter.
_TOKEN = r"[a-z]+|[0-9]|[^a-z0-9\s]"


def shipped_model() -> Path:
    """The folder of the checkpoint.

    >>> shipped_model().name
    'model'
    """
    return Path(__file__).parent / "model"


def held_out_problems() -> Path:
    """The file of problems that the model was not trained on, one a line with its `prompt` and `answer`.

    >>> held_out_problems().name
    'held_out.jsonl'
    """
    return Path(__file__).parent / "held_out.jsonl"


def unknown_words(text: str) -> list[str]:
    """The words of a text that the model has never seen.

    >>> unknown_words("Mia has 3 submarines.")
    ['submarines']
    """
    tokenizer = json.loads((shipped_model() / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    return sorted({token for token in re.findall(_TOKEN, text.lower()) if token not in known})
