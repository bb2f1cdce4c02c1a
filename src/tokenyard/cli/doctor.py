"""`tokenyard doctor`: what this machine can do, and why not the rest. Everything marked ✓ was really run.

Something that the machine does not have (a GPU, an optional library) is not a failure. Something that was run and did
not work is: the last line names it, and the exit code is 1. The core job is a layer on two ranks in one process;
without it, nothing works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import typer

from tokenyard.cli.machine import hardware, shared_memory_bytes, versions
from tokenyard.cli.options import JSON_FLAG, option
from tokenyard.cli.output import Output, console, say
from tokenyard.cli.parts import refuse_override
from tokenyard.cli.tables import show_table
from tokenyard.errors import TokenyardError
from tokenyard.units import size

if TYPE_CHECKING:
    from tokenyard.group import Group

# Seconds, by device, after which a tiny round trip counts as hanging. On a GPU, kernels are compiled first.
_DEADLINE = {"cpu": 20.0, "cuda": 120.0}
_START_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    ok: bool | None  # None: a fact, or something that is not here
    detail: str
    core: bool = False  # nothing works without it
    absent: bool = False  # the machine does not have it, so it was not tried


def doctor(
    hosts: bool = option(False, "Under torchrun: whether its hosts can work together.", "--hosts"),
    as_json: bool = JSON_FLAG,
) -> None:
    """Show what this machine can do, and why not the rest."""
    refuse_override()
    findings = []
    if hosts:
        from tokenyard.cli.doctor_hosts import examine_hosts, join

        group = join()
        findings = examine_hosts(group)
        if group.rank != 0:
            return
    else:
        status = console(stderr=True).status("examining this machine …")
        with status:
            for finding in examine():
                status.update(f"examined: {finding.section}, {finding.name} …")
                findings.append(finding)
    failed = [finding for finding in findings if finding.ok is False]
    document = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
    Output(as_json).deliver(document, lambda: _show(findings))
    if failed:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, one by one as they are made."""
    yield from _machine()
    yield from _formats()
    yield from _exchanges()
    yield from _start_of_processes()
    yield from _vllm()


def _machine() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    reasons = {
        "triton": "not installed (a CPU build of torch brings none): GPU kernels cannot be compiled",
        "transformers": "not installed: `run` and `eval` need it, and `bench experts` compares with it",
    }
    for name, version in versions().items():
        yield _here_or_absent("versions", name, version, reasons.get(name, "not installed"))
    found = hardware()
    facts = {
        "processor": found["cpu"],
        "cores": str(found["cores"]),
        "memory": "unknown" if found["memory_bytes"] is None else size(found["memory_bytes"]),
    }
    for name, fact in facts.items():
        yield Finding(section="machine", name=name, ok=None, detail=fact)
    shared = shared_memory_bytes()
    yield _here_or_absent("machine", "/dev/shm", None if shared is None else size(shared), "there is none")
    yield _here_or_absent("machine", "GPUs", ", ".join(found["gpus"]), _no_gpu())
    available = dist.is_available()
    backends = {
        "gloo": (available and dist.is_gloo_available(), "between CPU processes and hosts"),
        "nccl": (available and dist.is_nccl_available(), "between GPUs"),
    }
    for name, (here, purpose) in backends.items():
        why_not = f"not in this build of torch ({torch.__version__})"
        yield _here_or_absent("torch.distributed", name, purpose if here else None, why_not)


def _here_or_absent(section: str, name: str, detail: str | None, why_not: str) -> Finding:
    """The finding for something optional: `detail` if the machine has it, else absent, with `why_not`."""
    here = True if detail else None
    return Finding(section=section, name=name, ok=here, detail=detail or why_not, absent=not detail)


def _formats() -> Iterator[Finding]:
    """Encode and decode a few rows in every format."""
    import torch

    from tokenyard.formats import FORMATS

    x_TH = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    for name, kind in FORMATS.items():
        format = kind()
        try:
            decoded_TH = format.encode(x_TH).decode(torch.float32)
            error = float((decoded_TH - x_TH).norm() / x_TH.norm())
            # The worst format of four bits is off by 12% on such rows.
            ok, detail = error < 0.15, f"round trip, {error:.1%} off"
        except Exception as raised:
            ok, detail = False, _in_one_line(raised)
        yield Finding(section="formats", name=name, ok=ok, detail=detail)


def _exchanges() -> Iterator[Finding]:
    """Run a tiny layer through every exchange, on every kind of ranks that this machine can start."""
    from tokenyard.exchange import EXCHANGES

    ranks: tuple[Literal["threads", "processes"], ...] = ("threads", "processes")
    for name in EXCHANGES:
        for kind in ranks:
            if kind == "processes" and (why := _no_processes()):
                yield Finding(section="exchanges", name=f"{name} on {kind}", ok=None, detail=why, absent=True)
                continue
            ok, detail = _tried(name, kind)
            core = kind == "threads"
            yield Finding(section="exchanges", name=f"{name} on {kind}", ok=ok, detail=detail, core=core)
        here, detail = _on_gpus(name)
        on_gpus, absent = f"{name} on GPUs", here is None
        yield Finding(section="exchanges", name=on_gpus, ok=here, detail=detail, absent=absent)


def _tried(exchange: str, ranks: Literal["threads", "processes"], device: str = "cpu") -> tuple[bool, str]:
    from tokenyard.group import launch

    try:
        errors = launch(2, tiny_layer, exchange, ranks=ranks, device=device, deadline=_DEADLINE[device])
    except Exception as raised:
        return False, _in_one_line(raised.__cause__ or raised)
    # bf16 rounds to 8 bits, a few times over.
    return max(errors) < 0.02, f"2 ranks, {max(errors):.2%} off the float64 result"


def tiny_layer(group: Group, exchange: str) -> float:
    """Run a tiny layer on this rank; return the relative error of its result."""
    from tokenyard.conformance.cases import Case, run_case

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_experts": 6}
    case = Case(tokens=(8,) * group.size, **sizes, experts="grouped", exchange=exchange)
    return run_case(group, case).end_to_end_error


def _no_processes() -> str | None:
    """None, or why ranks cannot be processes here."""
    from tokenyard.group.hosts import lacking_for_processes

    lacking = lacking_for_processes()
    return lacking and f"this system has no {lacking}, which ranks as processes need: that is Linux"


def _on_gpus(exchange: str) -> tuple[bool | None, str]:
    import torch

    from tokenyard.exchange import EXCHANGES

    count = torch.cuda.device_count()
    if count == 0:
        return None, _no_gpu()
    if (refused := EXCHANGES[exchange].runs_on(torch.device("cuda"))) is not None:
        return None, f"not supported: {refused.why}"
    ok, detail = _tried(exchange, "threads", device="cuda")
    if ok:
        detail += " on one GPU" if count == 1 else f" on one GPU; between the {count} here: try torchrun"
    return ok, detail


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"none: torch {torch.__version__} is a CPU build"
    return "none that torch can see: look at the driver and at CUDA_VISIBLE_DEVICES"


def _start_of_processes() -> Iterator[Finding]:
    """How long ranks take to start as processes, from a forkserver that is warm."""
    from tokenyard.group import launch

    name = f"{_START_RANKS} process ranks"
    if why := _no_processes():
        yield Finding(section="start", name=name, ok=None, detail=why, absent=True)
        return
    try:
        launch(_START_RANKS, _say_rank, ranks="processes", deadline=_DEADLINE["cpu"])  # warms the forkserver
        start = time.perf_counter()
        launch(_START_RANKS, _say_rank, ranks="processes", deadline=_DEADLINE["cpu"])
        ok, detail = True, f"{time.perf_counter() - start:.2f} s to start, meet and end"
    except Exception as raised:
        ok, detail = False, _in_one_line(raised.__cause__ or raised)
    yield Finding(section="start", name=name, ok=ok, detail=detail)


def _vllm() -> Iterator[Finding]:
    """Whether vLLM is installed, and what the plugin would do in it. vLLM is not imported."""
    from tokenyard.integrations.vllm.plugin import installed_version

    version = installed_version()
    why_not = "not installed: pip install '.[vllm]' in a clone of tokenyard"
    yield _here_or_absent("vLLM", "vllm", version, why_not)
    if version is None:
        return
    ok, detail = _plugin(version)
    yield Finding(section="vLLM", name="plugin", ok=ok, detail=detail)


def _plugin(version: str) -> tuple[bool | None, str]:
    """Whether the plugin would serve this version of vLLM, as the environment asks for it."""
    from tokenyard.integrations.vllm.plugin import is_found_by_vllm
    from tokenyard.integrations.vllm.refusals import VERSIONS, is_taken
    from tokenyard.integrations.vllm.settings import MODE, MODES, settings

    try:
        asked = settings()
    except TokenyardError as raised:
        return False, _in_one_line(raised)
    if asked is None:
        return None, f"off; {MODE} turns it on: {' or '.join(MODES)}"
    if not is_found_by_vllm():
        why = "install tokenyard with pip, and let VLLM_PLUGINS have tokenyard if it is set"
        return False, f"vLLM does not find it: {why}"
    if not is_taken(version):
        return False, f"it refuses to run: it takes vLLM {' and '.join(VERSIONS)}, and here is {version}"
    return True, f"on; {asked}"


def _say_rank(group: Group) -> int:
    return group.rank


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_SIGNS: dict[bool | None, tuple[str, str]] = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "")}
_ABSENT = ("–", "yellow")


def _show(findings: list[Finding]) -> None:
    from rich.text import Text

    rows, before = [], ""
    for finding in findings:
        sign, style = _ABSENT if finding.absent else _SIGNS[finding.ok]
        section = "" if finding.section == before else finding.section
        before = finding.section
        # Text, not str: a bracket in an error's message is no markup.
        what = (Text(finding.name), Text(finding.detail))
        rows.append((Text(section, style="bold"), Text(sign, style=style), *what))
    show_table([""] * 4, rows, show_header=False, box=None)
    verdict, style = _verdict(findings)
    say(verdict, style=style)


def _verdict(findings: list[Finding]) -> tuple[str, str]:
    """The last line, and its color."""
    failed = [finding for finding in findings if finding.ok is False]
    names = ", ".join(finding.name for finding in failed)
    if any(finding.core for finding in failed):
        return f"tokenyard does not run here. These failed: {names}.", "red"
    if failed:
        return f"tokenyard runs here in part. These failed: {names}.", "red"
    absent = [finding.name for finding in findings if finding.absent]
    not_tried = f" Not here, and not tried: {', '.join(absent)}." if absent else ""
    return f"tokenyard runs here.{not_tried}", "green"
