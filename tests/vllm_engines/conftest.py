"""Engines of the real vLLM. `make test-vllm` runs these tests, in an environment of its own."""

import pytest

from tests.vllm_engines.launching import run_engine
from tokenyard_lab.evaluation.questions import held_out_questions
from tokenyard_lab.shipped import shipped_model

PROMPTS = [question.prompt for question in held_out_questions(4)] + ["3 + 4 :", "a"]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """What vLLM answers by itself, in one process: by prompt."""
    job = {"options": {"model": str(shipped_model())}, "prompts": PROMPTS}
    ended = run_engine(tmp_path_factory.mktemp("plain") / "engine", job, ranks=1)
    assert ended.codes == [0], ended.said[0][-3000:]
    assert "tokenyard:" not in ended.said[0]  # the plugin is installed, and off
    return {answer["prompt"]: answer for answer in ended.answers[0]["auto"]}
