"""Random mutants of the core against the tests that run their lines.

    python -m tests.mutation --count 200 --seed 1 --write bench/results/mutants-cpu.json --page docs/guide/faults.md

First every test runs once, and which lines it runs is recorded (`--record` keeps that in a folder and takes it from
there the next time). Then each mutant meets the tests of its line, the quickest first, for `--limit` seconds of tests;
one that lives meets more of them, for `--more` times as long. A test with ranks kills a mutant if it fails twice with
it, and passes without it; if the record was made `--elsewhere`, that is asked of every test. `--outcomes` keeps what
became of each mutant, so that a run that was cut off goes on; with `--again` those that lived meet their tests once
more. `--unseen` draws no mutant that earlier outcomes tell of: tests may have been written for it.
"""

import argparse
import dataclasses
import fnmatch
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.faults.report import rewrite
from tests.mutation import trial
from tests.mutation.mutants import draw, mutants_of
from tests.mutation.preloaded import is_in_a_function
from tests.mutation.selection import Record, choose

ROOT = Path(__file__).parents[2]
# What a wrong number can come from, without what only runs on a GPU.
CORE = (
    "rows.py",
    "layer/*.py",
    "planning/*.py",
    "elastic/*.py",
    "routing/*.py",
    "formats/*.py",
    "exchange/*.py",
    "group/*.py",
    "experts/*.py",
    "checkpoints/*.py",
)
# Files, and functions or classes of a file.
ONLY_ON_A_GPU = (
    "*kernel*",
    "*cuda*",
    "*/fused/*",
    "*/group/symmetric_memory.py",
    "*/group/devices.py::let_ranks_share_a_gpu",
    "*/group/devices.py::rank_on",
    "*/group/devices.py::reserve_memory",
    "*/exchange/batch.py::UnencodedRows",
    "*/exchange/transports/hierarchical.py::DeviceHierarchicalTransport",
)
# Seconds of tests that a mutant meets first, and their number. Most die there; few files of tests are imported for it.
_FIRST, _FIRST_TESTS = 2.0, 20
# Tests of the core. What tests the commands, the site, models and benchmarks is slow, and meets the core from afar.
TESTS = (
    "tests/balancing",
    "tests/checkpoints",
    "tests/cli/test_interrupts.py",
    "tests/conformance",
    "tests/exchange",
    "tests/experts",
    "tests/faults/test_loss.py",
    "tests/formats",
    "tests/fuzz",
    "tests/group",
    "tests/paranoid",
    "tests/plan",
    "tests/reports",
    "tests/security",
    "tests/test_compile.py",
    "tests/test_declarations.py",
    "tests/test_huggingface.py",
    "tests/test_layer.py",
    "tests/test_overlap.py",
    "tests/test_placement.py",
    "tests/test_reference.py",
    "tests/test_routing.py",
    "tests/test_rows.py",
    "tests/test_support.py",
    "tests/test_workspace.py",
    "src/tokenyard/checkpoints",
    "src/tokenyard/exchange",
    "src/tokenyard/experts",
    "src/tokenyard/formats",
    "src/tokenyard/group",
    "src/tokenyard/planning",
    "src/tokenyard/routing",
)
# Tests of kernels, which are not mutated.
LEFT_OUT = ("tests/experts/test_fused*", "tests/exchange/test_kernel*")


def core_files():
    """The files that are mutated, as paths from the root."""
    package = ROOT / "src" / "tokenyard"
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        needs_a_gpu = any(fnmatch.fnmatch("/" + name, pattern) for pattern in ONLY_ON_A_GPU)
        if any(fnmatch.fnmatch(name, pattern) for pattern in CORE) and not needs_a_gpu:
            yield str(path.relative_to(ROOT))


def core_mutants(path):
    """Every mutant of a file that runs without a GPU."""
    parts = [pattern.split("::") for pattern in ONLY_ON_A_GPU if "::" in pattern]
    without = [name for pattern, name in parts if fnmatch.fnmatch(path, pattern)]
    return mutants_of(path, (ROOT / path).read_text(), without)


class Equivalents:
    """The mutants that change nothing, as `equivalent.toml` has them."""

    def __init__(self):
        entries = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())
        self.mutants = {(e["path"], e["line"], e["before"], e["after"]) for e in entries["mutant"]}
        self.constants = {(e["path"], e["name"]) for e in entries["constant"]}

    def entry(self, mutant):
        """The entry of a mutant; None if it has none."""
        whole = (mutant.path, mutant.source_line, mutant.before, mutant.after)
        constant = (mutant.path, mutant.source_line.split(" = ")[0])
        return whole if whole in self.mutants else constant if constant in self.constants else None


def record_tests(folder, workers):
    """Run the tests once, and keep which lines each of them runs."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal"]
    environment = os.environ | {"MUTATION_RECORD": str(folder.resolve())}
    recorder = ["-p", "tests.mutation.recorder"]
    subprocess.run([*command, *recorder, *tests_of_the_core()], cwd=ROOT, env=environment, check=False)


def tests_of_the_core():
    """Arguments for pytest."""
    return [*(f"--ignore-glob={pattern}" for pattern in LEFT_OUT), *TESTS]


def ways_to_meet(record, mutant):
    """With tests that were imported before the mutant came, where that shows it; in fresh processes otherwise."""
    if not is_in_a_function(mutant, (ROOT / mutant.path).read_text()):
        return ("anew",)
    last = mutant.line + mutant.before.count("\n")
    imported = record.runs_while_imported(mutant.path, mutant.line, last)
    return ("preloaded", "anew") if imported else ("preloaded",)


def stages(record, mutant, limits, declares=True):
    """The tests of a mutant, in parts that take so long, each with a time that they surely end in."""
    met, parts = set(), []
    for limit in limits:
        chosen = [test for test in choose(record, mutant, limit, declares) if test not in met]
        chosen = chosen if parts else chosen[:_FIRST_TESTS]
        met.update(chosen)
        parts.append((chosen, 60 + 5 * limit))
    return parts


def known_outcomes(path, again):
    """By mutant: what became of it before, the last time it was tried. Of those that lived nothing, `again`."""
    if path is None or not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    outcomes = {entry.pop("mutant"): trial.Outcome(**entry) for entry in entries}
    return {mutant: outcome for mutant, outcome in outcomes.items() if not (again and outcome.lives)}


def wherever_it_stands(mutant):
    """A mutant in words, without the number of its line, which changes when others do."""
    return re.sub(r":\d+: ", ": ", str(mutant), count=1)


def unseen(mutants, paths):
    """The mutants of which no file of outcomes tells."""
    tried = {
        wherever_it_stands(json.loads(line)["mutant"])
        for path in paths
        for line in path.read_text().splitlines()
    }
    return [mutant for mutant in mutants if wherever_it_stands(mutant) not in tried]


def start_workers(number, start, *arguments):
    """Processes in which `trial.meet` is called. Those of a `multiprocessing.Pool` may start none, as tests do."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), start, arguments)


def meet_in_turn(workers, number, trials, until):
    """Each mutant and what became of it, as it is found out, of those that are begun before a time.

    The order is that of a draw: those that were begun are a random choice, too. `number` are tried at a time.
    """
    left, running = iter(trials), set()
    while True:
        while len(running) < number and time.monotonic() < until and (each := next(left, None)) is not None:
            running.add(workers.submit(trial.meet, each))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (one.result() for one in done)


def sentence(summary):
    """For the documentation."""
    return (
        f"**{summary['mutants']} random mutants** (seed {summary['seed']}): {summary['killed']} killed, "
        f"{summary['equivalent']} change nothing, {len(summary['alive'])} live: "
        f"**{100 * summary['score']:.1f}%** of those that change something are killed."
    )


def paragraph(document):
    """What the page says: of mutants that tests were written for, and of those that were drawn after that."""
    fresh = document.get("fresh")
    return sentence(document["results"]) + (f"\n\nDrawn after that: {sentence(fresh)}" if fresh else "")


def summarize(outcomes, seed):
    """Plain values of a list of (mutant, outcome)."""
    same = Equivalents()
    verdicts = Counter(outcome.verdict for _, outcome in outcomes)
    killed = verdicts["killed"] + verdicts["timed out"]
    living = [mutant for mutant, outcome in outcomes if outcome.lives]
    alive = [str(mutant) for mutant in living if same.entry(mutant) is None]
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
    parser.add_argument("--more", type=float, default=5, help="how many times as long for one that lives")
    parser.add_argument(
        "--workers", type=int, default=2, help="how many mutants, or tests to record, at a time"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after these, no further mutant is tried"
    )
    parser.add_argument("--only", default="*", help="a pattern for the mutated files")
    parser.add_argument("--record", type=Path, help="a folder that keeps which test runs which line")
    parser.add_argument(
        "--elsewhere", action="store_true", help="the record is of another machine: tests may fail here"
    )
    parser.add_argument("--outcomes", type=Path, help="a file that keeps what became of each mutant")
    parser.add_argument(
        "--again", action="store_true", help="let those that lived meet their tests once more"
    )
    parser.add_argument(
        "--unseen",
        type=Path,
        nargs="*",
        default=[],
        help="outcomes of other runs, whose mutants are left out",
    )
    parser.add_argument("--write", type=Path, help="a file for the JSON")
    parser.add_argument("--fresh", action="store_true", help="no test was written for these mutants: say so")
    parser.add_argument("--page", type=Path, help="a page of the documentation, whose score is renewed")
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mutation-record-") as temporary:
        folder = options.record or Path(temporary)
        if not list(folder.glob("tests.*.json")):
            console.print("recording which test runs which line")
            record_tests(folder, options.workers)
        record = Record(folder)
    console.print(
        f"{len(record.tests)} tests recorded, {sum(not t['passed'] for t in record.tests.values())} failed"
    )
    files = [path for path in core_files() if fnmatch.fnmatch(path, options.only)]
    every = unseen([mutant for path in files for mutant in core_mutants(path)], options.unseen)
    limits = (_FIRST, options.limit, options.more * options.limit)
    doubtful, same = record.may_fail_by_itself(), Equivalents()
    drawn = draw(every, options.count, options.seed)
    known, outcomes, left = known_outcomes(options.outcomes, options.again), [], []
    for mutant in drawn:
        if same.entry(mutant) or str(mutant) in known:
            outcomes.append((mutant, known.get(str(mutant), trial.Outcome("alive"))))
        else:
            left.append(mutant)

    def trial_of(mutant):
        ways = ways_to_meet(record, mutant)
        parts = stages(record, mutant, limits, declares=ways == ("anew",))
        reliable = set() if options.elsewhere else {test for tests, _ in parts for test in tests} - doubtful
        return mutant, parts, reliable, ways

    until = time.monotonic() + 60 * options.minutes
    with (
        start_workers(options.workers, trial.start_worker, ROOT, tests_of_the_core()) as workers,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("mutants", total=len(left))
        # Each trial is made when its turn comes: choosing the tests of thousands takes minutes.
        for mutant, outcome in meet_in_turn(workers, options.workers, map(trial_of, left), until):
            outcomes.append((mutant, outcome))
            if options.outcomes:
                with options.outcomes.open("a") as file:
                    file.write(json.dumps({"mutant": str(mutant), **dataclasses.asdict(outcome)}) + "\n")
            met = f"{outcome.verdict:15} {outcome.seconds:6.1f} s {outcome.tests:4} tests"
            print(met, mutant, outcome.test or "", sep="  ", flush=True)
            progress.advance(task)
    tried = {mutant for mutant, _ in outcomes}
    last = max(
        (place for place, mutant in enumerate(drawn) if mutant in tried and not same.entry(mutant)),
        default=-1,
    )
    # Those that change nothing need no trial: they count as far as the others were tried.
    begun = set(drawn[: last + 1]) if len(tried) < len(drawn) else set(drawn)
    summary = summarize([(mutant, outcome) for mutant, outcome in outcomes if mutant in begun], options.seed)
    print(sentence(summary))
    for each in summary["alive"]:
        print(" ", each)
    if options.write:
        from tokenyard.cli.machine import provenance

        if options.fresh:  # they stand beside the others
            when = {key: value for key, value in provenance().items() if key in ("date", "git_commit")}
            document = json.loads(options.write.read_text()) | {"fresh": {**when, **summary}}
        else:
            document = {"benchmark": "mutants", **provenance(), "results": summary}
        options.write.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        if options.page:
            rewrite(options.page, "mutants", paragraph(document))
    return 0 if summary["score"] >= 0.97 else 1


if __name__ == "__main__":
    raise SystemExit(main())
