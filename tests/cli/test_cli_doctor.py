"""`tokenyard doctor`."""

from __future__ import annotations

import pytest
import torch

from tests.cli.runner import call, call_json
from tokenyard.cli import doctor as module
from tokenyard.exchange import EXCHANGES
from tokenyard.formats import FORMATS


def test_this_machine_is_fit():
    found = call_json("doctor")
    assert found["ok"]
    by_name = {(f["section"], f["name"]): f for f in found["findings"]}
    assert by_name["versions", "torch"]["detail"].startswith(torch.__version__.split("+")[0])
    for name in FORMATS:
        assert by_name["formats", name]["ok"]
    for name in EXCHANGES:
        assert by_name["exchanges", f"{name} on threads"]["ok"]
        assert by_name["exchanges", f"{name} on processes"]["ok"]
        if not torch.cuda.is_available():
            on_gpus = by_name["exchanges", f"{name} on GPUs"]
            assert (on_gpus["ok"], on_gpus["absent"]) == (None, True)
            assert on_gpus["detail"].startswith("none")
    assert by_name["start", "4 process ranks"]["detail"].endswith("s to start, meet and end")


@pytest.fixture
def no_ranks(monkeypatch):
    """A machine on which no ranks start; so nothing is started here either."""
    from tokenyard import group

    def launch(*_args, **_kwargs):
        raise OSError("[Errno 12] no memory [for] ranks\nsecond line")

    monkeypatch.setattr(group, "launch", launch)


def test_a_machine_that_cannot_run_the_core_job(no_ranks):
    found = call_json("doctor", exit_code=1)
    assert not found["ok"]
    broken = [f["name"] for f in found["findings"] if f["core"] and not f["ok"]]
    assert broken == [f"{name} on threads" for name in EXCHANGES]
    result = call("doctor")
    assert result.exit_code == 1
    failed = [f["name"] for f in found["findings"] if f["ok"] is False]
    assert result.stdout.split()[-len(" ".join(failed).split()) :] == (", ".join(failed) + ".").split()
    assert "tokenyard does not run here. These failed: allgather on threads," in result.stdout
    assert "OSError: [Errno 12] no memory [for] ranks" in result.stdout
    assert "second line" not in result.stdout


def test_what_failed_is_said_in_the_end(monkeypatch):
    """Without processes, tokenyard runs in part."""
    monkeypatch.setattr(module, "_tried", lambda exchange, ranks, **_: (ranks == "threads", "told so"))
    monkeypatch.setattr(module, "_start_of_processes", lambda: iter(()))
    assert not call_json("doctor", exit_code=1)["ok"]
    result = call("doctor")
    assert result.exit_code == 1
    names = ", ".join(f"{name} on processes" for name in EXCHANGES)
    told = " ".join(result.stdout.split())  # on as many lines as it takes
    assert told.endswith(f"tokenyard runs here in part. These failed: {names}.")
    assert result.stdout.count("✗") == len(EXCHANGES)
    assert "told so" in result.stdout


def test_what_a_machine_has_not_is_no_failure(monkeypatch):
    def findings():
        yield module.Finding(section="formats", name="bf16", ok=True, detail="fine")
        yield module._here_or_absent("versions", "triton", None, "not installed")

    monkeypatch.setattr(module, "examine", findings)
    assert call_json("doctor")["ok"]
    result = call("doctor")
    assert "✗" not in result.stdout
    assert result.stdout.endswith("tokenyard runs here. Not here, and not tried: triton.\n")


@pytest.mark.parametrize(
    ("count", "works", "detail"),
    [
        (1, True, "2 ranks on one GPU"),
        (8, True, "2 ranks on one GPU; between the 8 here: try torchrun"),
        (8, False, "2 ranks"),
    ],
)
def test_exchanges_are_tried_on_a_gpu_where_there_is_one(monkeypatch, count, works, detail):
    tried = []

    def try_it(exchange, ranks, device):
        tried.append((exchange, ranks, device))
        return works, "2 ranks"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(module, "_tried", try_it)
    assert module._on_gpus("one_sided") == (works, detail)
    assert tried == [("one_sided", "threads", "cuda")]
    monkeypatch.setattr(EXCHANGES["hierarchical"], "devices", ("cpu",))
    assert module._on_gpus("hierarchical") == (
        None,
        "not supported: hierarchical serves rows on cpu, and rows are on cuda",
    )
    assert len(tried) == 1


def test_a_format_that_raises_is_a_finding(monkeypatch):
    def encode(_self, _x):
        raise NotImplementedError("no such cast")

    monkeypatch.setattr(FORMATS["mxfp8"], "encode", encode)
    findings = {finding.name: finding for finding in module._formats()}
    assert findings["mxfp8"].ok is False
    assert findings["mxfp8"].detail == "NotImplementedError: no such cast"
    assert findings["nvfp4"].ok
