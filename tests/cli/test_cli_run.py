"""`tokenyard run`: answers are judged, what moved is told, and the exit code says whether enough are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.cli.runner import call, call_json
from tests.evaluation.checkpoints import save_random_model
from tokenyard.cli.run import enough_of

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
    assert "34 + 27 : 4 7 1 , 3 2 6 = 61 ;" in result.stdout
    assert "answer 50" in result.stdout
    assert "What moved between 2 ranks" in result.stdout
    assert "right" not in result.stdout  # nobody knows


def test_words_that_the_shipped_model_does_not_know_are_named():
    result = call("run", *THREADS, "--prompt", "Mia sees 3 submarines.", "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert "has never seen: sees, submarines" in result.stderr


def test_wrong_answers_are_exit_code_one(random_model):
    result = call("run", *THREADS, "--model", random_model, "--problems", 3, "--max-new-tokens", 4)
    assert result.exit_code == 1
    assert "0 of 3 problems are right" in result.stdout
    assert result.stdout.count("✗") == 3


@pytest.mark.parametrize(("problems", "enough"), [(20, 19), (40, 38), (1, 0), (100, 95), (19, 18)])
def test_how_many_must_be_right(problems, enough):
    assert enough_of(problems) == enough


def test_formats_and_exchange_can_be_chosen(random_model):
    document = call_json(
        *("run", *THREADS, "--model", random_model, "--prompt", "Mia has 3 pens.", "--max-new-tokens", 2),
        *("--exchange", "allgather", "--wire", "mxfp8", "--weights", "mxint4"),
    )
    assert (document["exchange"], document["wire"], document["weights"]) == ("allgather", "mxfp8", "mxint4")
    assert document["right"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wire", "mxpf8"], "did you mean 'mxfp8'"),
        (["--exchange", "two_side"], "did you mean 'two_sided'"),
        (["--weights", "mxint5"], "did you mean 'mxint4'"),
        (["--kind", "fibers"], "processes or threads"),
        (["--device", "abacus"], "abacus"),
        (["--model", "nowhere"], "nowhere has no config.json"),
    ],
)
def test_wrong_options_are_exit_code_two(options, message):
    result = call("run", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_that_was_cut_off_is_named(tmp_path):
    folder = save_random_model(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    error = call_json("run", *THREADS, "--model", folder, exit_code=2)["error"]
    assert "model.safetensors" in error["message"]
    assert "cut off" in error["message"]


def test_under_torchrun_each_process_is_a_rank(random_model):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [str(Path(sys.executable).parent / "tokenyard"), "run", "--json", "--model", str(random_model)]
    done = subprocess.run(
        [*command, "--problems", "3", "--max-new-tokens", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    document = json.loads(done.stdout)  # one document, from rank 0
    assert document["ranks"] == 2
    assert len(document["answers"]) == 3
    assert document["right"] == 0
    assert done.returncode != 0
