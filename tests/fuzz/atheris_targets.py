"""The same targets, led by coverage: atheris changes bytes until they reach lines that none have reached before.

    python -m tests.fuzz.atheris_targets --runs 2000
    python -m tests.fuzz.atheris_targets --runs 100000 --target checkpoint_headers

Each target runs in a process of its own, with an end to its memory and to each run. What hypothesis would draw from
chance, it draws from the bytes. A crash, a hang, an error that is not ours: the report says which, and the exit code 1.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]

# Bytes of address space beyond those that the process starts with: garbage must not make it take more.
ROOM = 4 << 30
# Seconds after which one run counts as a hang: a thousand times what it takes.
SLOWEST_RUN = 120
SEEDS = 64
# The longest input. A draw takes some bytes; no target draws more.
LONGEST_INPUT = 4096
# Runs of targets that start ranks or commands cost thirty times as much.
DIVIDED_BY = {"layer_calls": 10, "command_lines": 10, "drafts": 4}


def fuzz(target: str, runs: int) -> None:
    """One target, in this process. Atheris ends the process when it is done."""
    import atheris

    with atheris.instrument_imports(include=["tokenyard"]):
        from tests.fuzz.targets import TARGETS
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options = [f"-runs={runs}", f"-timeout={SLOWEST_RUN}", f"-max_len={LONGEST_INPUT}", "-rss_limit_mb=0"]
    run = TARGETS[target].hypothesis.fuzz_one_input

    def run_and_count(data: bytes) -> None:
        if run(data) is not None:  # None: too few bytes for an example
            os.write(2, b"+")  # atheris ends the process without a word of ours

    with tempfile.TemporaryDirectory() as folder:
        # Long inputs to start from: those that atheris would begin with are too short to draw anything from.
        chance = random.Random(7)
        for number in range(SEEDS):
            (Path(folder) / f"seed-{number}").write_bytes(chance.randbytes(LONGEST_INPUT // 2))
        fixed = ["-seed=7", "-print_final_stats=1", f"-artifact_prefix={folder}/", folder]
        atheris.Setup([target, *options, *fixed], run_and_count)
        atheris.Fuzz()


def run_apart(target: str, runs: int) -> tuple[int, int, float, str]:
    """One target in a process of its own: exit code, examples that were drawn, seconds, what it said."""
    command = f"from tests.fuzz.atheris_targets import fuzz; fuzz({target!r}, {runs})"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    said = done.stdout + done.stderr
    return done.returncode, done.stderr.count("+"), time.monotonic() - started, said


def main(
    runs: Annotated[int, typer.Option(min=1, help="Runs of each target; slow ones make fewer.")] = 2000,
    target: Annotated[
        list[str] | None, typer.Option(help="Only this target; may be given several times.")
    ] = None,
) -> None:
    """Fuzz everything that takes something from outside, led by coverage."""
    try:
        import atheris  # noqa: F401
    except ImportError:
        typer.echo(
            "atheris is not installed, or not made for this Python: pip install 'tokenyard[fuzz]'", err=True
        )
        raise typer.Exit(2) from None
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in target or TARGETS:
        wanted = max(1, runs // DIVIDED_BY.get(name, 1))
        code, made, seconds, said = run_apart(name, wanted)
        # Without it a target that ended early, or never began, would pass.
        fine = code == 0 and made > wanted // 4
        verdict = "only errors of ours" if fine else f"FAILED ({code})"
        typer.echo(f"{name}: {wanted} runs, {made} examples in {seconds:.0f} s, {verdict}")
        if not fine:
            failed.append(name)
            typer.echo(said[-4000:], err=True)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
