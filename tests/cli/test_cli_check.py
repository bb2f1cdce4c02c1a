"""`tokenyard check`: the grid, the histogram, JSON, exit codes; on registered parts and on somebody else's."""

from importlib import import_module

import pytest
import torch
from rich.progress import Progress

from tests.cli.runner import call, call_json, leave_few_checks
from tokenyard.cli import check
from tokenyard.conformance import suites
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.formats import FORMATS

MUTANTS = "tests.conformance.mutants"
BRIEF = ("--ranks", "threads", "--rounds", 1)


def test_everything_on_threads(monkeypatch):
    leave_few_checks(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as on a user's machine
    document = call_json("check", "--cases", 36, "--ranks", "threads", "--rounds", 5)
    assert document["passed"]
    assert document["device"] == "cpu"
    assert document["cases"] == 36
    assert document["large_share"] >= 0.25
    cells = {(cell["exchange"], cell["wire"]): cell for cell in document["cells"]}
    assert set(cells) == {(exchange, wire) for exchange in EXCHANGES for wire in FORMATS}
    assert all(cell["passed"] == cell["total"] > 0 for cell in cells.values())
    assert sum(document["histogram"]["W"].values()) == 36
    checked = {(entry["kind"], entry["name"]) for entry in document["checks"]}
    assert checked == {
        *(("exchange", name) for name in EXCHANGES),
        *(("format", name) for name in FORMATS),
        *(("experts", name) for name in EXPERTS if name != "fused"),
    }
    # What does not run here is not checked, and that is said.
    assert set(document["skipped"]) == {"fused"}
    assert "its kernels need a GPU, and rows are on cpu" in document["skipped"]["fused"]
    assert all(entry["finding"] is None and entry["what"] for entry in document["checks"])


def test_exchanges_that_move_no_rows_on_a_gpu_are_left_out_there_and_named(monkeypatch):
    not_running = import_module("tokenyard.cli.check")._not_running
    assert not_running(list(EXCHANGES.values()), "cuda") == {}
    monkeypatch.setattr(EXCHANGES["hierarchical"], "devices", ("cpu",))
    skipped = not_running(list(EXCHANGES.values()), "cuda")
    assert set(skipped) == {"hierarchical"}
    assert "hierarchical serves rows on cpu, and rows are on cuda" in skipped["hierarchical"]


def test_processes_and_the_grid(monkeypatch):
    leave_few_checks(monkeypatch)
    result = call(
        "check",
        "--cases",
        12,
        "--ranks",
        "processes",
        "--exchange",
        "two_sided",
        "--format",
        "nvfp4",
    )
    assert result.exit_code == 0
    assert "two_sided │ processes" in result.stdout
    assert "Cases passed on cpu, by the rows' wire" in result.stdout
    assert "12/12" in result.stdout
    assert "12 cases, 25% of them large" in result.stdout
    assert "12 of 12 cases" in result.stdout


def test_a_wrong_exchange_is_exit_code_one_with_its_findings(monkeypatch):
    leave_few_checks(monkeypatch)
    result = call(
        "check",
        *(
            "--cases",
            20,
            "--ranks",
            "threads",
            "--exchange",
            f"{MUTANTS}.rows:ReducesTwice",
            "--format",
            "bf16",
        ),
    )
    assert result.exit_code == 1
    assert (
        "✗ reduces_twice on threads, bitwise_movement: rank 0: token 0 of rank 0 came home as"
        in result.stdout
    )
    assert "other bits than the twin" in result.stdout
    assert "Case(tokens=" in result.stdout


def test_experts_that_do_not_run_here_are_refused_by_name(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = call("check", "--experts", "fused")
    assert result.exit_code != 0
    assert "experts=fused: its kernels need a GPU" in " ".join(result.output.split())


def test_progress_names_what_is_checked_and_counts_all_of_it(monkeypatch):
    monkeypatch.setattr(suites, "EXCHANGE_CHECKS", {"empty_ranks": suites.EXCHANGE_CHECKS["empty_ranks"]})
    told, totals = [], []

    def update(bar, task, *, description, advance):
        told.append((description, advance))
        totals.append(bar.tasks[task].total)

    monkeypatch.setattr(Progress, "update", update)
    call("check", "--cases", 4, "--exchange", "two_sided", "--format", "mxfp8", "--format", "fp32", *BRIEF)
    assert told[:2] == [("format mxfp8", 0), ("format mxfp8", 1)]
    assert told[-1][0].startswith("two_sided on ")
    told.clear()
    call("check", "--cases", 4, "--exchange", "two_sided", *BRIEF)
    assert told[0] == ("two_sided on threads: named checks", 0)
    assert not any("format" in what or "experts" in what for what, _ in told)
    assert sum(steps for _, steps in told) == totals[-1]


def test_experts_alone_need_no_exchange():
    document = call_json("check", "--experts", f"{MUTANTS}.experts:WeighsTwice", exit_code=1)
    assert document["cells"] == []
    assert {entry["name"] for entry in document["checks"]} == {"weighs_twice"}
    findings = {entry["check"]: entry["finding"] for entry in document["checks"] if entry["finding"]}
    assert "beyond the bound" in findings["within_the_bound"]


def test_a_group_that_breaks_again_and_again_is_given_up(monkeypatch):
    monkeypatch.setattr(suites, "EXCHANGE_CHECKS", {"empty_ranks": suites.EXCHANGE_CHECKS["empty_ranks"]})
    from tokenyard.conformance import campaign
    from tokenyard.conformance.runner import Verdict

    monkeypatch.setattr(campaign, "PORTION", 4)
    monkeypatch.setattr(
        campaign,
        "check_cases",
        lambda cases, **_: [Verdict(finding="gone", broke_group=True) for _ in cases],
    )
    document = call_json(
        *("check", "--cases", 40, "--ranks", "threads", "--exchange", "two_sided", "--format", "bf16"),
        *("--rounds", 1),
        exit_code=1,
    )
    (cell,) = document["cells"]
    assert cell["passed"] == 0
    assert 0 < cell["not_run"] == cell["total"] - len(cell["findings"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exchange", "two_side"], "did you mean 'two_sided'"),
        (["--format", "mxpf8"], "did you mean 'mxfp8'"),
        (["--experts", "refrence"], "did you mean 'reference'"),
        (["--ranks", "fibers"], "threads, processes or both"),
        (["--exchange", "tokenyard.nowhere:Exchange"], "cannot be loaded"),
    ],
)
def test_wrong_options_are_exit_code_two(options, message):
    result = call("check", "--cases", 0, *options)
    assert result.exit_code == 2
    assert message in result.stderr


PARTS = "tests.cli.unfinished"


@pytest.mark.parametrize(
    ("options", "found", "expected", "fix"),
    [
        (
            ["--exchange", f"{PARTS}:Nameless"],
            "the exchange Nameless has no name",
            "a class attribute `name`, a string",
            'write `name = "nameless"` in the class',
        ),
        (
            ["--exchange", f"{PARTS}:Unfinished"],
            "the exchange Unfinished is abstract: it lacks fail, send, send_back",
            "a class that has every method",
            "define them, or derive from a class that has them",
        ),
        (
            ["--exchange", f"{PARTS}:Inherits"],
            "the exchange Inherits is called 'two_sided', as TwoSidedTransport is",
            "a name of its own",
            "change the `name` of the class",
        ),
        (
            ["--exchange", "tokenyard.formats:Bf16"],
            "the exchange is <class 'tokenyard.formats.plain.Bf16'>",
            "a name, or a class that derives from Transport",
            "derive Bf16 from Transport",
        ),
        (
            ["--exchange", f"{PARTS}:an_object"],
            "the exchange is [1, 2]",
            "a name, or a class that derives from Transport",
            "pass the class itself",
        ),
        (
            ["--experts", f"{PARTS}:Idle"],
            "the experts Idle is abstract: it lacks compute",
            "a class that has every method",
            "define them, or derive from a class that has them",
        ),
        (
            ["--experts", "tokenyard.exchange:TwoSidedTransport"],
            "the experts is <class 'tokenyard.exchange.transports.two_sided.TwoSidedTransport'>",
            "a name, or a class that derives from Experts",
            "derive TwoSidedTransport from Experts",
        ),
        (
            ["--format", "tokenyard.exchange:Exchange"],
            "the format is <class 'tokenyard.exchange.exchange.Exchange'>",
            "a name, or a class that derives from Format",
            "derive Exchange from Format",
        ),
        (
            ["--format", "tokenyard.formats:Format"],
            "the format Format is abstract: it lacks decode, encode, payloads",
            "a class that has every method",
            "define them, or derive from a class that has them",
        ),
    ],
)
def test_classes_that_are_no_parts_are_refused_at_once(options, found, expected, fix, monkeypatch):
    monkeypatch.setattr(check, "progress_bar", lambda: pytest.fail("something was checked"))
    error = call_json("check", *options, exit_code=2)["error"]
    assert (error["found"], error["expected"], error["fix"]) == (found, expected, fix)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_exit_code_two():
    error = call_json("check", "--device", "cuda", exit_code=2)["error"]
    assert "sees no GPU" in error["found"]
    assert error["expected"] == "a GPU that torch sees"
