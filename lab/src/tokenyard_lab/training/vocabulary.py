"""The words that the shipped model knows: one token per word, per digit, per sign.

`tokenizer.json` of the checkpoint says the same to Transformers; `encode` is what training uses.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tokenyard_lab.training.arithmetic import DIVIDED, MINUS, PLUS, TIMES
from tokenyard_lab.training.problems import ANSWER
from tokenyard_lab.training.stories import BOXES, EVENTS, MEN, OPENINGS, PLACES, QUESTIONS, THINGS, WOMEN

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
# A word, a digit, or a sign. Capitals do not matter.
_TOKEN = r"[a-z]+|[0-9]|[^a-z0-9\s]"


@cache
def vocabulary() -> dict[str, int]:
    """Every token and its id.

    >>> vocabulary()["<pad>"], len(vocabulary()) < 400
    (0, True)
    """
    sentences = " ".join(re.sub(r"\{\w+\}", " ", s.text) for s in OPENINGS + EVENTS + QUESTIONS)
    words = {*split(sentences), *split(" ".join((*WOMEN, *MEN, *THINGS, *PLACES, "he she him her", ANSWER)))}
    words |= {word for pair in BOXES for word in pair}
    signs = [PLUS, MINUS, TIMES, DIVIDED, ":", ",", "=", ";", ".", "?"]
    tokens = [PAD, END, UNKNOWN, *"0123456789", *signs, *sorted(words - set(signs))]
    return {token: index for index, token in enumerate(tokens)}


def split(text: str) -> list[str]:
    """A text's tokens.

    >>> split("Mia has 34 pens.")
    ['mia', 'has', '3', '4', 'pens', '.']
    """
    return re.findall(_TOKEN, text.lower())


def encode(text: str) -> list[int]:
    """The ids of a text's tokens."""
    known = vocabulary()
    return [known.get(token, known[UNKNOWN]) for token in split(text)]


def tokenizer_json() -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary()[token], "content": token, **special} for token in (PAD, END, UNKNOWN)
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": _TOKEN},
            "behavior": "Removed",
            "invert": True,
        },
        "post_processor": None,
        # A space between tokens, but none between the digits of a number; those of a column, from ":" to "=", keep it.
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "^"}, "content": " "},
                {"type": "Fuse"},
                {
                    "type": "Replace",
                    "pattern": {"Regex": "^ |(?<=[0-9]) (?=[0-9])(?<!:[^=]*)"},
                    "content": "",
                },
            ],
        },
        "model": {"type": "WordLevel", "vocab": vocabulary(), "unk_token": UNKNOWN},
    }


def tokenizer_config() -> dict[str, Any]:
    """What Transformers reads beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
