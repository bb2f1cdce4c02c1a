"""The tokenizer of the shipped model: small, complete, and the same for training and for Transformers."""

import json
from itertools import islice

import pytest

from tokenyard_lab.shipped import unknown_words
from tokenyard_lab.training.problems import held_out, stream
from tokenyard_lab.training.vocabulary import (
    END,
    PAD,
    UNKNOWN,
    encode,
    tokenizer_config,
    tokenizer_json,
    vocabulary,
)

PROBLEMS = [*held_out(100), *islice(stream("training", seed=5), 1000)]


def test_every_word_of_every_problem_is_known():
    assert len(vocabulary()) < 400
    for problem in PROBLEMS:
        assert unknown_words(problem.question) == unknown_words(problem.solution) == []
        assert len(encode(problem.question)) + len(encode(problem.solution)) < 200


@pytest.fixture
def tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, content in {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_transformers_reads_the_same_tokens(tokenizer):
    for problem in PROBLEMS[:200]:
        text = f"{problem.question} {problem.solution}"
        assert tokenizer(text).input_ids == encode(text)
    assert tokenizer("3 submarines?").input_ids == encode("3 submarines?")
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == (PAD, END, UNKNOWN)
    assert tokenizer.padding_side == "left"


def test_a_solution_is_readable_again(tokenizer):
    """Digits of a number stand together, those of a column apart, also while the text is still being written."""
    for problem in PROBLEMS[:100]:
        assert tokenizer.decode(encode(problem.solution)) == problem.solution
    for text in (
        "34 + 27 : 4 7 1 , 3 2 6 = 61 ; answer 61",
        "34 + 27 : 4 7 1 , 3",
        "12 = 34",
        ": 1 2",
        "9",
        "",
    ):
        assert tokenizer.decode(encode(text)) == text
