"""`tokenyard eval`: every cell is measured, the table says so, and files of one's own are read."""

import json
from importlib import import_module

import pytest

pytest.importorskip("transformers")

from lab.tests.evaluation.checkpoints import save_random_model
from tests.cli.runner import call, call_json

THREADS = ("--kind", "threads", "--ranks", 2)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def own_questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "mine.jsonl"
    questions = [{"prompt": f"Mia has {n} pens. How many pens?", "answer": n} for n in range(2, 7)]
    file.write_text("\n".join(map(json.dumps, questions)))
    return file


@pytest.fixture(scope="module")
def document(random_model, own_questions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    found = call_json(
        *("eval", *THREADS, "--model", random_model, "--data", own_questions, "--max-new-tokens", 4),
        *("--wire", "bf16", "--wire", "nvfp4", "--weights", "bf16", "--weights", "mxfp4"),
        *("--exchange", "one_sided", "--exchange", "two_sided"),
        *("--out", folder / "eval.json", "--plot", folder / "eval.png"),
    )
    assert json.loads((folder / "eval.json").read_text())["results"] == found["results"]
    assert (folder / "eval.png").stat().st_size > 10_000
    return found


def test_the_whole_model_comes_first_and_every_cell_has_a_row(document):
    whole, *rows = document["results"]
    assert whole["exchange"] == "whole model"
    assert whole["difference"] is None
    assert {(row["wire"], row["weights"], row["exchange"]) for row in rows} == {
        (wire, weights, exchange)
        for wire in ("bf16", "nvfp4")
        for weights in ("bf16", "mxfp4")
        for exchange in ("one_sided", "two_sided")
    }
    assert document["questions"] == whole["questions"] == 5


def test_rows_say_what_they_cost(document):
    rows = {(row["exchange"], row["wire"], row["weights"]): row for row in document["results"]}
    plain = rows["one_sided", "bf16", "bf16"]
    assert rows["one_sided", "nvfp4", "bf16"]["bytes_per_token"] < 0.8 * plain["bytes_per_token"]
    assert rows["one_sided", "bf16", "mxfp4"]["expert_bytes"] < 0.3 * plain["expert_bytes"]
    assert plain["expert_bytes"] == document["results"][0]["expert_bytes"]
    error = {key: row["logit_error"] for key, row in rows.items() if row["difference"]}
    assert error["one_sided", "bf16", "bf16"] < 0.02
    assert error["one_sided", "bf16", "bf16"] < error["one_sided", "nvfp4", "bf16"] < 0.5
    assert error["one_sided", "bf16", "bf16"] < error["one_sided", "bf16", "mxfp4"] < 0.5
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    for row in document["results"]:
        assert row["accuracy"]["low"] <= row["accuracy"]["value"] <= row["accuracy"]["high"]


def test_the_second_exchange_has_the_bits_of_the_first(document):
    for row in document["results"][1:]:
        assert row["same_bits_as"] == (None if row["exchange"] == "one_sided" else "one_sided")


def test_the_table(random_model, own_questions):
    result = call(
        *("eval", *THREADS, "--model", random_model, "--data", own_questions, "--problems", 3, "--every"),
        *("--max-new-tokens", 2, "--wire", "mxfp8", "--weights", "bf16"),
    )
    assert result.exit_code == 0, result.output
    assert "3 questions on 2 ranks" in result.stdout
    for name in ("whole model", "one_sided", "two_sided", "allgather", "mxfp8"):
        assert name in result.stdout
    assert "=" not in result.stdout.split("tokens/s is taken from")[1]  # every exchange answered by itself


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wire", "mxpf8"], "did you mean 'mxfp8'"),
        (["--exchange", "two_side"], "did you mean 'two_sided'"),
        (["--weights", "mxint5"], "did you mean 'mxint4'"),
        (["--kind", "fibers"], "processes or threads"),
        (["--device", "abacus"], "abacus"),
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--plot", "picture.txt"], "ending in .png"),
        (["--out", "nowhere/eval.json"], "nowhere/eval.json cannot be written"),
    ],
)
def test_wrong_options_are_exit_code_two(options, message, random_model, monkeypatch):
    monkeypatch.delattr("tokenyard_lab.evaluation.table.Evaluation.rows")  # nothing is run
    default = [] if "--model" in options else ["--model", random_model]
    result = call("eval", *default, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_that_goes_bad_costs_no_figures(random_model, own_questions, tmp_path, monkeypatch):
    out, module = tmp_path / "eval.json", import_module("tokenyard_lab.evaluation.table")
    measured = module.Evaluation.rows

    def rows(evaluation, on_message):
        out.mkdir()  # it could be written before the first row
        return measured(evaluation, on_message)

    monkeypatch.setattr(module.Evaluation, "rows", rows)
    result = call(
        *("eval", *THREADS, "--model", random_model, "--data", own_questions, "--problems", 1, "--json"),
        *("--max-new-tokens", 1, "--wire", "bf16", "--weights", "bf16", "--exchange", "two_sided"),
        *("--out", out),
    )
    assert result.exit_code == 2
    assert len(json.loads(result.stdout)["results"]) == 2
    assert "eval.json cannot be written" in result.stderr


def test_every_way_back_is_a_cell_of_its_own(random_model, own_questions, tmp_path):
    found = call_json(
        *("eval", *THREADS, "--model", random_model, "--data", own_questions, "--problems", 2),
        *("--max-new-tokens", 2, "--exchange", "one_sided", "--wire", "bf16", "--weights", "bf16"),
        *("--inner", "exact", "--combine-wire", "all", "--plot", tmp_path / "ways.svg"),
    )
    assert "<!-- bf16, nvfp4 back -->" in (tmp_path / "ways.svg").read_text()  # a point of its own
    whole, *rows = found["results"]
    assert whole["combine_wire"] == ""
    by_wire = {row["combine_wire"]: row for row in rows}
    assert list(by_wire) == ["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4", "e4m3_unscaled"]
    moved = {wire: row["bytes_per_token"] for wire, row in by_wire.items()}
    assert moved["nvfp4"] < moved["mxfp8"] < moved["bf16"] == moved["fp16"]
    error = {wire: row["logit_error"] for wire, row in by_wire.items()}
    assert error["bf16"] < error["mxfp8"] < error["nvfp4"]
    assert error["bf16"] < error["e4m3_unscaled"]


def test_an_unknown_way_back_is_refused(random_model):
    refused = call("eval", *THREADS, "--model", random_model, "--combine-wire", "e4m3")
    assert refused.exit_code == 2
    assert "unknown format 'e4m3'" in refused.stderr
