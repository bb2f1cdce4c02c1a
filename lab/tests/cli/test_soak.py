"""`tokenyard soak`: what it prints, JSON, the file, the picture, exit codes."""

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from lab.tests.soak import planted
from tests.cli.runner import call, call_json

SHORT = ("soak", "--threads", "--ranks", 2, "--no-losses", "--exchange", "two_sided")


def test_a_short_soak_with_its_file_and_its_picture(tmp_path):
    out, plot = tmp_path / "soak.json", tmp_path / "soak.png"
    result = call(*SHORT, "--episodes", 9, "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "9 episodes" in result.stdout
    assert "0 findings" in result.stdout
    assert "What grows, in MB per 10 minutes" in result.stdout
    document = json.loads(out.read_text())
    assert document["command"] == "soak"
    assert document["passed"]
    assert (document["ranks"], document["kind"], document["exchanges"]) == (2, "threads", ["two_sided"])
    assert document["counts"]["episodes"] == 9
    assert document["counts"]["checked"] > 9 * 20
    assert document["findings"] == []
    assert set(document["growth"]) == {"memory", "lasting_memory", "shared_memory"}
    assert len(document["samples"]) == 9
    assert {"seconds", "memory", "descriptors", "sockets", "threads", "round_trips_per_s"} <= set(
        document["samples"][0]
    )
    assert {"date", "hardware", "versions", "git_commit"} <= set(document)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_finding_is_exit_code_one(tmp_path):
    out = tmp_path / "soak.json"
    result = call(*SHORT[:-1], "lab.tests.soak.planted:FlipsABit", "--episodes", 1, "--out", out)
    assert result.exit_code == 1
    assert "✗ wrong result in episode 0, rank" in result.stdout
    document = json.loads(out.read_text())
    assert not document["passed"]
    assert document["exchanges"] == [planted.FlipsABit.name]
    assert {finding["kind"] for finding in document["findings"]} == {"wrong result"}
    assert document["growth"] == {}  # too few samples


def test_one_document_and_nothing_else():
    document = call_json(*SHORT, "--episodes", 1)
    assert document["passed"]
    assert len(document["samples"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exchange", "two_side"], "did you mean 'two_sided'"),
        (["--out", "nowhere/soak.json"], "nowhere/soak.json cannot be written"),
        (["--out", "s" * 300], "cannot be written (File name too long)"),
        (["--plot", "nowhere/soak.png"], "a picture cannot be written"),
        (["--plot", "soak.doc"], "a picture cannot be written"),
    ],
)
def test_wrong_options_are_exit_code_two(options, message, monkeypatch):
    monkeypatch.setattr(import_module("tokenyard_lab.soaking"), "soak", None)  # nothing is run
    result = call("soak", "--threads", "--episodes", 1, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.fixture
def out_that_goes_bad(tmp_path, monkeypatch):
    """A file that could be written when the soak began, and cannot when it ends."""
    out, module = tmp_path / "soak.json", import_module("tokenyard_lab.soaking")
    run_soak = module.soak

    def soak(*args):
        assert not out.exists()
        report = run_soak(*args)
        out.mkdir()
        return report

    monkeypatch.setattr(module, "soak", soak)
    return out


def test_what_was_found_is_printed_even_if_it_cannot_be_saved(out_that_goes_bad):
    result = call(*SHORT, "--episodes", 1, "--out", out_that_goes_bad)
    assert result.exit_code == 2
    assert "1 episode," in result.stdout
    assert "soak.json cannot be written" in result.stderr


def test_an_error_after_the_document_is_no_second_one(out_that_goes_bad):
    result = call(*SHORT, "--episodes", 1, "--out", out_that_goes_bad, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["passed"]
    assert "soak.json cannot be written" in result.stderr


def test_losses_on_a_gpu_are_refused(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr("tokenyard.group.thread_groups", lambda *_, **__: [on_gpu])
    refused = call("soak", "--threads", "--device", "cuda", "--losses", "--episodes", 1)
    assert refused.exit_code == 2
    assert "leave out --losses" in refused.stderr
