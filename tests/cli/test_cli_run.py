"""`tokenyard run`: the table is right, the exit code says so, and it can be wrong."""

import json

import pytest
from typer.testing import CliRunner

from tokenyard.cli import app
from tokenyard.conformance import stack
from tokenyard.exchange import EXCHANGES

TRAVEL = ["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4"]


def run(*options):
    return CliRunner().invoke(app, ["run", "--tokens", "8", *options])


def test_every_exchange_and_format_is_a_cell_and_all_are_right():
    result = run("--json", "--ranks", "4")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["passed"]
    assert {(c["exchange"], c["wire"]) for c in document["cells"]} == {
        (exchange, wire) for exchange in EXCHANGES for wire in TRAVEL
    }
    for cell in document["cells"]:
        assert cell["passed"]
        assert 0 < cell["oracle_error"] <= stack.TOLERANCE
        assert cell["tokens"] == 8 + 0 + 12 + 14
        assert cell["tokens_per_s"] > 0
        assert cell["bytes_per_token"] > 0
    by_wire = {wire: {c["digest"] for c in document["cells"] if c["wire"] == wire} for wire in TRAVEL}
    assert all(len(digests) == 1 for digests in by_wire.values())  # all exchanges give the same bits
    cost = {c["wire"]: c["end_to_end_error"] for c in document["cells"]}
    assert cost["bf16"] < cost["mxfp8"] < cost["nvfp4"] < 0.2


def test_threads_and_a_choice_of_cells():
    result = run(
        "--kind", "threads", "--ranks", "2", "--exchange", "allgather_reducescatter", "--wire", "mxfp8"
    )
    assert result.exit_code == 0
    assert "all 1 cells are right" in result.stdout
    assert "allgather" in result.stdout


def test_a_wrong_result_is_exit_code_one(monkeypatch):
    monkeypatch.setattr(stack, "TOLERANCE", 1e-9)
    result = run("--kind", "threads", "--ranks", "2", "--wire", "bf16")
    assert result.exit_code == 1
    assert "against the oracle, more than" in result.stdout
    assert f"0 of {len(EXCHANGES)} cells are right" in result.stdout


def test_other_bits_are_exit_code_one(monkeypatch):
    original = stack.run_stack

    def other_bits(group, wire, exchange, tokens):
        import dataclasses

        return dataclasses.replace(original(group, wire, exchange, tokens), digest=exchange)

    monkeypatch.setattr(stack, "run_stack", other_bits)
    result = run("--kind", "threads", "--ranks", "2", "--wire", "bf16", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["cells"][1]["off"] == ["other bits than allgather"]


def test_a_cell_that_raises_is_exit_code_one(monkeypatch):
    def broken(group, wire, exchange, tokens):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(stack, "run_stack", broken)
    result = run("--kind", "threads", "--ranks", "2", "--wire", "bf16")
    assert result.exit_code == 1
    assert "ZeroDivisionError: broken" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wire", "mxpf8"], "did you mean 'mxfp8'"),
        (["--exchange", "two_side"], "did you mean 'two_sided'"),
        (["--kind", "fibers"], "processes or threads"),
    ],
)
def test_wrong_options_are_exit_code_two(options, message):
    result = run(*options)
    assert result.exit_code == 2
    assert message in result.stderr
