"""The fault campaign: faults on real processes, at random moments, under load.

    python -m tests.faults.campaign                        all of it: more than 500 faults, at least 30 of each kind
    python -m tests.faults.campaign --scale 0.1 --seed 7   a tenth of it, other cases

Sessions are dealt to a few launching processes side by side: most of a session is waiting. Each has a /dev/shm of its
own, where the kernel allows it. Prints a table, writes JSON with --write, and ends with 1 unless all was right.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path

from rich.console import Console

from tests.faults.namespaces import clocks_are_allowed, own_shared_memory

ROOT = Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(description="Inject faults, and see that every rank says what it must.")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of the whole campaign")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3, help="launching processes side by side")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="of the ranks and the judge, on a machine that does much else",
    )
    parser.add_argument("--kind", action="append", help="only these kinds")
    parser.add_argument("--write", type=Path, help="a file for the JSON")
    parser.add_argument("--page", type=Path, help="a page of the documentation, whose counts are renewed")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _work(options)
        return
    summary = conduct(options)
    Console().print(_report().table(summary))
    for complaint in summary["complaints"]:
        print(f"{complaint['kind']} / {complaint['variant']}: {'; '.join(complaint['complaints'])}"[:1000])
    for words in summary["left_behind"] + summary["stacks"] + summary["left_out"]:
        print(words)
    if options.write:
        options.write.write_text(json.dumps(_document(options, summary), indent=2) + "\n")
    if options.page and _report().is_good(summary):
        _report().rewrite(options.page, "campaign", _report().markdown(summary))
    sys.exit(0 if _report().is_good(summary) else 1)


def conduct(options):
    """Run the campaign in worker processes; return its summary."""
    command = [sys.executable, "-m", "tests.faults.campaign", "--seed", str(options.seed)]
    command += ["--scale", str(options.scale), "--workers", str(options.workers)]
    command += ["--patience", str(options.patience)]
    command += [word for kind in options.kind or () for word in ("--kind", kind)]
    quiet = {
        **os.environ,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # torch warns of waits that end, which is what they are for
    workers = [
        subprocess.Popen(
            [*command, "--worker", str(i)], cwd=ROOT, env=quiet, stdout=subprocess.PIPE, text=True
        )
        for i in range(options.workers)
    ]
    from tests.faults.judge import Finding
    from tests.faults.runner import Outcome

    outcomes, left_out = [], []
    with Console(stderr=True).status("starting") as status:
        for line in _lines(workers):
            entry = json.loads(line)
            if "left out" in entry:
                left_out.append(entry["left out"])
                continue
            entry["findings"] = [Finding(**finding) for finding in entry["findings"]]
            outcomes.append(Outcome(**entry))
            findings = [finding for outcome in outcomes for finding in outcome.findings]
            right = sum(finding.right for finding in findings)
            status.update(f"{len(findings)} faults so far, {right} right")
    summary = _report().summarize(outcomes)
    summary["deadline_s"] *= options.patience
    summary["slack_s"] *= options.patience
    summary["left_out"] = sorted(set(left_out))
    summary["stacks"] = [outcome.stacks for outcome in outcomes if outcome.hung]
    if any(worker.returncode for worker in workers):
        summary["complaints"].append(
            {"kind": "campaign", "variant": "worker", "complaints": ["a launching process ended early"]}
        )
        summary["hangs"] += 1
    return summary


def _lines(workers):
    """What the workers say, line by line, until all have ended. Who reads last is not kept waiting: a pipe holds it."""
    import selectors

    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()
                if line:
                    yield line
                else:
                    selector.unregister(key.fileobj)
    for worker in workers:
        worker.wait()
        worker.stdout.close()


def _work(options):
    """One launching process: every n-th session."""
    refused = own_shared_memory()  # before anything starts a thread
    no_clocks = clocks_are_allowed()
    if refused is None:
        os.environ["TOKENYARD_PRIVATE_SHM"] = "1"
    from tests.faults.runner import run_session, warm_up

    left_out = _refused(refused, no_clocks)
    for variant, why in left_out.items():
        print(json.dumps({"left out": f"left out: {variant} ({why})"}), flush=True)
    warm_up()
    for session in _sessions(options, left_out)[options.worker :: options.workers]:
        print(json.dumps(asdict(run_session(session))), flush=True)


def _refused(no_shared_memory, no_clocks):
    """Variants that the kernel does not allow here, and why."""
    refused = {"full /dev/shm": no_shared_memory, "another monotonic clock": no_clocks}
    return {variant: why for variant, why in refused.items() if why is not None}


def _sessions(options, without):
    from tests.faults.cases import draw_sessions
    from tests.faults.kinds import KINDS

    counts = {
        kind.name: ceil(kind.share * options.scale)
        for kind in KINDS
        if options.kind is None or kind.name in options.kind
    }
    drawn, patience = draw_sessions(options.seed, counts, without), options.patience
    return [replace(s, deadline=patience * s.deadline, slack=patience * s.slack) for s in drawn]


def _report():
    from tests.faults import report

    return report


def _document(options, summary):
    from tokenyard.cli.machine import provenance

    return {
        "benchmark": "faults",
        **provenance(),
        "seed": options.seed,
        "scale": options.scale,
        "results": summary,
    }


if __name__ == "__main__":
    main()
