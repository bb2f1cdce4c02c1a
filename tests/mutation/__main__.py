"""Random mutants of the core against the tests that run their lines.

    python -m tests.mutation --count 200 --seed 1 --write bench/results/mutants-cpu.json --page docs/guide/faults.md

First every test runs once, and which lines it runs is recorded (`--record` keeps that in a folder and takes it from
there the next time). Then each mutant meets the tests of its line, the quickest first, for `--limit` seconds of tests;
one that lives meets more of them, for five times as long.
"""

import argparse
import fnmatch
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.faults.report import rewrite
from tests.mutation import trial
from tests.mutation.mutants import draw, mutants_of
from tests.mutation.selection import Record, choose

ROOT = Path(__file__).parents[2]
# What a wrong number can come from, without what only runs on a GPU.
CORE = (
    "rows.py",
    "layer/*.py",
    "planning/*.py",
    "routing/*.py",
    "formats/*.py",
    "exchange/*.py",
    "group/*.py",
    "experts/*.py",
    "checkpoints/*.py",
)
ONLY_ON_A_GPU = (
    "*kernel*",
    "*cuda*",
    "*/fused/*",
    "*/one_sided/launches.py",
    "*/one_sided/graphs.py",
    "*/group/symmetric_memory.py",
)
# A mutant that lives meets so many times as many tests.
MORE = 5
# Tests of the core. What tests the commands, the site, models and benchmarks is slow, and meets the core from afar.
TESTS = (
    "tests/checkpoints",
    "tests/conformance",
    "tests/exchange",
    "tests/experts",
    "tests/formats",
    "tests/fuzz",
    "tests/group",
    "tests/paranoid",
    "tests/plan",
    "tests/reports",
    "tests/security",
    "tests/test_layer.py",
    "tests/test_placement.py",
    "tests/test_routing.py",
    "tests/test_workspace.py",
    "src/tokenyard/checkpoints",
    "src/tokenyard/exchange",
    "src/tokenyard/experts",
    "src/tokenyard/formats",
    "src/tokenyard/group",
    "src/tokenyard/routing",
)


def core_files():
    """The files that are mutated, as paths from the root."""
    package = ROOT / "src" / "tokenyard"
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        needs_a_gpu = any(fnmatch.fnmatch("/" + name, pattern) for pattern in ONLY_ON_A_GPU)
        if any(fnmatch.fnmatch(name, pattern) for pattern in CORE) and not needs_a_gpu:
            yield str(path.relative_to(ROOT))


def equivalent_mutants():
    """The mutants that change nothing: file, text of the line, text before and after."""
    entries = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text()).get("mutant", [])
    return {(entry["path"], entry["line"], entry["before"], entry["after"]) for entry in entries}


def identity(mutant):
    return (mutant.path, mutant.source_line, mutant.before, mutant.after)


def record_tests(folder):
    """Run the tests once, and keep which lines each of them runs."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-p",
        "tests.mutation.recorder",
    ]
    environment = os.environ | {"MUTATION_RECORD": str(folder.resolve())}
    subprocess.run([*command, *TESTS], cwd=ROOT, env=environment, check=False)


def sentence(summary):
    """For the documentation."""
    return (
        f"**{summary['mutants']} random mutants** (seed {summary['seed']}): {summary['killed']} killed, "
        f"{summary['equivalent']} change nothing, {len(summary['alive'])} live: "
        f"**{100 * summary['score']:.1f}%** of those that change something are killed."
    )


def summarize(outcomes, seed):
    """Plain values of a list of (mutant, outcome)."""
    same = equivalent_mutants()
    verdicts = Counter(outcome.verdict for _, outcome in outcomes)
    killed = verdicts["killed"] + verdicts["timed out"]
    living = [mutant for mutant, outcome in outcomes if outcome.verdict in ("alive", "met by no test")]
    alive = [str(mutant) for mutant in living if identity(mutant) not in same]
    return {
        "mutants": len(outcomes),
        "seed": seed,
        "killed": killed,
        "timed out": verdicts["timed out"],
        "equivalent": len(living) - len(alive),
        "score": killed / max(1, killed + len(alive)),
        "alive": alive,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of tests for one mutant")
    parser.add_argument("--workers", type=int, default=2, help="how many mutants at a time")
    parser.add_argument("--only", default="*", help="a pattern for the mutated files")
    parser.add_argument("--record", type=Path, help="a folder that keeps which test runs which line")
    parser.add_argument("--write", type=Path, help="a file for the JSON")
    parser.add_argument("--page", type=Path, help="a page of the documentation, whose score is renewed")
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mutation-record-") as temporary:
        folder = options.record or Path(temporary)
        if not list(folder.glob("tests.*.json")):
            console.print("recording which test runs which line")
            record_tests(folder)
        record = Record(folder)
    console.print(
        f"{len(record.tests)} tests recorded, {sum(not t['passed'] for t in record.tests.values())} failed"
    )
    files = [path for path in core_files() if fnmatch.fnmatch(path, options.only)]
    every = [mutant for path in files for mutant in mutants_of(path, (ROOT / path).read_text())]
    trials = [
        (
            mutant,
            choose(record, mutant, options.limit),
            choose(record, mutant, MORE * options.limit),
            options.limit,
        )
        for mutant in draw(every, options.count, options.seed)
    ]
    outcomes = []
    workers = multiprocessing.get_context("spawn").Pool(options.workers, trial.start_worker, (ROOT,))
    with workers, Progress(console=console) as progress:
        task = progress.add_task("mutants", total=len(trials))
        for mutant, outcome in workers.imap(trial.meet, trials):
            outcomes.append((mutant, outcome))
            met = f"{outcome.verdict:15} {outcome.seconds:6.1f} s {outcome.tests:4} tests"
            print(met, mutant, outcome.test or "", sep="  ", flush=True)
            progress.advance(task)
    summary = summarize(outcomes, options.seed)
    print(sentence(summary))
    for each in summary["alive"]:
        print(" ", each)
    if options.write:
        from tokenyard.cli.machine import provenance

        document = {"benchmark": "mutants", **provenance(), "results": summary}
        options.write.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    if options.page:
        rewrite(options.page, "mutants", sentence(summary))
    return 0 if summary["score"] >= 0.97 else 1


if __name__ == "__main__":
    raise SystemExit(main())
