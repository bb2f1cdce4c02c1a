"""`tokenyard run`: answers are judged, what moved is told, and the exit code says whether enough are right."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("transformers")

from lab.tests.evaluation.checkpoints import save_random_model
from tests.cli.runner import call, call_json
from tokenyard_lab.cli.run import enough_of
from tokenyard_lab.shipped import unknown_words

THREADS = ("--kind", "threads", "--ranks", 2)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("random"))


def test_the_shipped_model_answers_on_two_ranks():
    document = call_json("run", *THREADS, "--problems", 2)
    assert document["passed"]
    assert document["right"] == 2
    for answer in document["answers"]:
        assert answer["text"].endswith(f"answer {answer['wanted']}")
    assert document["tokens"] > 2 * 20
    assert [layer["layer"] for layer in document["layers"]] == [f"model.layers.{n}.mlp" for n in range(4)]
    for layer in document["layers"]:
        assert len(layer["rows_sent"]) == len(layer["dispatch_bytes"]) == 2
        assert all(sent > 0 for sent in layer["rows_sent"] + layer["dispatch_bytes"] + layer["combine_bytes"])
        assert all(seconds > 0 for seconds in layer["dispatch_s"] + layer["experts_s"] + layer["combine_s"])


def test_a_question_of_ones_own():
    result = call(
        "run", *THREADS, "--prompt", "Mia has 34 pens. Tom gives her 27 more. She sells 11 of the pens at the shop. "
        "How many pens does Mia have now?",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "The model that ships solves arithmetic word problems, and can do nothing else.\n"
    )
    assert "34 + 27 : 4 7 1 , 3 2 6 = 61 ;" in result.stdout
    assert "answer 50" in result.stdout
    assert "What moved between 2 ranks" in result.stdout
    assert "right" not in result.stdout  # nobody knows


def test_words_that_the_shipped_model_does_not_know_are_refused_before_ranks_start(monkeypatch):
    monkeypatch.delattr("tokenyard_lab.evaluation.ranks.StartedRanks.call")
    result = call("run", *THREADS, "--prompt", "Mia has 3 pens.", "--prompt", "Mia sees 3 submarines.")
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "--prompt 'Mia sees 3 submarines.', with words that the model that ships has never seen"
        in result.stderr
    )
    assert ": sees, submarines\n  expected: an arithmetic word problem" in result.stderr
    example = re.search(r'fix: ask it, for example, "(.*)", or pass --model', result.stderr)[1]
    assert not unknown_words(example)


def test_another_model_is_asked_in_any_words(random_model):
    assert call_json(
        *("run", *THREADS, "--model", random_model, "--prompt", "Mia sees 3 submarines."),
        *("--max-new-tokens", 1),
    )["passed"]


def test_one_problem_that_is_wrong_is_exit_code_one():
    document = call_json("run", *THREADS, "--problems", 1, "--max-new-tokens", 2, exit_code=1)
    assert (document["right"], document["passed"]) == (0, False)


def test_wrong_answers_are_exit_code_one(random_model):
    result = call("run", *THREADS, "--model", random_model, "--problems", 3, "--max-new-tokens", 4)
    assert result.exit_code == 1
    assert "0 of 3 problems are right; 3 must be (95%)" in result.stdout
    assert result.stdout.count("✗") == 3


@pytest.mark.parametrize(("problems", "enough"), [(20, 19), (40, 38), (1, 1), (100, 95), (19, 19), (21, 20)])
def test_how_many_must_be_right(problems, enough):
    assert enough_of(problems) == enough


def test_formats_and_exchange_can_be_chosen(random_model):
    document = call_json(
        *("run", *THREADS, "--model", random_model, "--prompt", "Mia has 3 pens.", "--max-new-tokens", 2),
        *("--exchange", "allgather", "--wire", "mxfp8", "--weights", "mxint4"),
    )
    assert (document["exchange"], document["wire"], document["weights"]) == ("allgather", "mxfp8", "mxint4")
    assert document["right"] is None


def test_the_exchange_that_is_told_is_the_one_that_ran(random_model, monkeypatch):
    monkeypatch.setenv("TOKENYARD_EXCHANGE", "allgather")
    asked = ("run", *THREADS, "--model", random_model, "--prompt", "Mia has 3 pens.", "--max-new-tokens", 1)
    asked += ("--exchange", "two_sided")
    assert call_json(*asked)["exchange"] == "allgather"
    assert "What moved between 2 ranks through allgather" in call(*asked).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wire", "mxpf8"], "did you mean 'mxfp8'"),
        (["--exchange", "two_side"], "did you mean 'two_sided'"),
        (["--weights", "mxint5"], "did you mean 'mxint4'"),
        (["--kind", "fibers"], "processes or threads"),
        (["--device", "abacus"], "abacus"),
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--prompt", ""], "--prompt ''"),
        (["--prompt", "Mia has 3 pens.", "--prompt", " "], "a text to answer"),
    ],
)
def test_wrong_options_are_exit_code_two(options, message, monkeypatch):
    monkeypatch.delattr("tokenyard_lab.evaluation.ranks.StartedRanks.call")  # no rank is started
    result = call("run", *options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("command", ["run", "eval"])
@pytest.mark.parametrize(
    ("there", "message"),
    [
        (None, "transformers is not installed"),
        (ModuleType("transformers"), "transformers is not installed"),  # a folder that was left behind
        (SimpleNamespace(__version__="5.16.1"), "transformers is 5.16.1"),
    ],
)
def test_transformers_that_is_missing_is_said_before_ranks_start(command, there, message, monkeypatch):
    monkeypatch.delattr("tokenyard_lab.evaluation.ranks.StartedRanks.call")
    monkeypatch.setitem(sys.modules, "transformers", there)
    result = call(command, *THREADS)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "fix: pip install 'tokenyard[transformers]'" in result.stderr


def test_a_file_that_was_cut_off_is_named(tmp_path):
    folder = save_random_model(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    error = call_json("run", *THREADS, "--model", folder, exit_code=2)["error"]
    assert "model.safetensors" in error["message"]
    assert "cut off" in error["message"]


def under_torchrun(*arguments):
    """`tokenyard run --json` on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [str(Path(sys.executable).parent / "tokenyard"), "run", "--json"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_an_error_under_torchrun_is_one_document():
    done = under_torchrun("--max-new-tokens", 0)  # found out before torch is loaded
    assert "--max-new-tokens" in json.loads(done.stdout)["error"]["found"]  # from rank 0, and nobody else's
    assert done.returncode != 0


@pytest.mark.long  # the README's example is the short one
def test_under_torchrun_each_process_is_a_rank(random_model):
    done = under_torchrun("--model", random_model, "--problems", 3, "--max-new-tokens", 3)
    document = json.loads(done.stdout)  # one document, from rank 0
    assert document["ranks"] == 2
    assert len(document["answers"]) == 3
    assert document["right"] == 0
    assert done.returncode != 0
