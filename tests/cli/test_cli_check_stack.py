"""The stack of layers in `tokenyard check`: the table is right, the exit code says so, and it can be wrong."""

import dataclasses

import pytest

from tests.cli.runner import call, call_json
from tokenyard.conformance import stack, suites
from tokenyard.exchange import EXCHANGES

TRAVEL = ["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4"]
# No cases, and one named check: what is left is the stack.
QUICK = ("check", "--cases", 0, "--ranks", "threads", "--tokens", 8)
ONE_CELL = (*QUICK, "--exchange", "allgather", "--format", "bf16", "--rounds", 1)


@pytest.fixture(autouse=True)
def one_named_check(monkeypatch):
    monkeypatch.setattr(suites, "EXCHANGE_CHECKS", {"empty_ranks": suites.EXCHANGE_CHECKS["empty_ranks"]})


def test_every_exchange_and_format_is_a_cell_and_all_are_right():
    cells = stack.check_stack(list(EXCHANGES.values()), TRAVEL, tokens=8, ranks="threads")
    assert {(cell.exchange, cell.wire) for cell in cells} == {(e, wire) for e in EXCHANGES for wire in TRAVEL}
    apart = stack.check_stack(list(EXCHANGES.values()), ["nvfp4"], tokens=8, ranks="processes")
    assert len(apart) == len(EXCHANGES)
    cells += apart
    for cell in cells:
        assert cell.passed, cell.off
        assert 0 < cell.oracle_error <= stack.TOLERANCE
        assert cell.tokens == 8 + 0 + 12 + 14
        assert cell.tokens_per_s > 0
        assert cell.bytes_per_token > 0
    by_wire = {wire: {cell.digest for cell in cells if cell.wire == wire} for wire in TRAVEL}
    assert all(len(digests) == 1 for digests in by_wire.values())  # all exchanges give the same bits
    cost = {cell.wire: cell.end_to_end_error for cell in cells}
    assert cost["bf16"] < cost["mxfp8"] < cost["nvfp4"] < 0.2


def test_the_command_shows_the_stack():
    result = call(*ONE_CELL)
    assert result.exit_code == 0
    assert "A body of two layers" in result.stdout
    assert "1 of 1 stacks passed" in result.stdout


def test_formats_that_carry_no_bf16_rows_have_no_cell():
    document = call_json(*QUICK, "--exchange", "allgather", "--format", "fp32", "--rounds", 1)
    assert document["stack"] == []


def test_no_tokens_leave_the_stack_out():
    assert call_json(*ONE_CELL, "--tokens", 0)["stack"] == []


def test_a_wrong_result_is_exit_code_one(monkeypatch):
    monkeypatch.setattr(stack, "TOLERANCE", 1e-9)
    result = call(*ONE_CELL)
    assert result.exit_code == 1
    assert "the stack, allgather × bf16: error" in result.stdout
    assert "against the oracle, more than" in result.stdout
    assert "0 of 1 stacks passed" in result.stdout


def test_other_bits_are_exit_code_one(monkeypatch):
    original = stack.run_stack

    def other_bits(group, wire, exchange, tokens):
        return dataclasses.replace(original(group, wire, exchange, tokens), digest=exchange.name)

    monkeypatch.setattr(stack, "run_stack", other_bits)
    document = call_json(*ONE_CELL, "--exchange", "two_sided", exit_code=1)
    assert [cell["off"] for cell in document["stack"]] == [[], ["other bits than allgather"]]


def test_a_cell_that_raises_is_exit_code_one(monkeypatch):
    def broken(group, wire, exchange, tokens):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(stack, "run_stack", broken)
    result = call(*ONE_CELL)
    assert result.exit_code == 1
    assert "ZeroDivisionError: broken" in result.stdout


@pytest.mark.parametrize("mutant", ["rows:ReducesTwice", "remembering:StaleResults"])
def test_a_wrong_exchange_of_ones_own_fails_in_the_stack(mutant):
    document = call_json(
        *QUICK,
        "--exchange",
        f"tests.conformance.mutants.{mutant}",
        "--format",
        "bf16",
        "--rounds",
        1,
        exit_code=1,
    )
    assert "against the oracle" in document["stack"][0]["off"][0]
