"""The model that ships with tokenyard: a small Qwen3-MoE that solves arithmetic word problems, step by step.

`problems` makes the problems, `stories` and `arithmetic` are what they are made of, `vocabulary` is what the model
reads and writes. The checkpoint lies in `model/`; `training/` in the repository says how it came to be.
"""

from __future__ import annotations

from pathlib import Path


def shipped_model() -> Path:
    """The folder of the checkpoint.

    >>> shipped_model().name
    'model'
    """
    return Path(__file__).parent / "model"
