"""Random trials, one after the other, from the command line: what was wrong in each, a sentence, JSON and a page."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from rich.console import Console

from tests.faults.report import rewrite
from tokenyard.cli.machine import provenance


def run_trials(about, judge, sentence, *, trials, summary, benchmark, mark, text=None, jobs=None):
    """Make as many trials as the command line says; returns the summary, in which `off` has those that went wrong.

    `judge(seed, summary)` makes a trial, counts what it likes, and returns the trial and its complaints. The sentence
    of a summary, or the `text` of it, goes between the marks of a page. If trials are of several `jobs`, a judge gets
    those that the command line asks for, too.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="trials side by side")
    if jobs is not None:
        parser.add_argument("--only", action="append", choices=jobs, help="trials of these jobs only")
    parser.add_argument("--write", type=Path, help="a file for the JSON")
    parser.add_argument("--page", type=Path, help="a page of the documentation, whose counts are renewed")
    options = parser.parse_args()
    if jobs is not None:
        judge = partial(judge, jobs=options.only or jobs)
    summary = {"trials": 0, **summary, "off": []}
    document = {"benchmark": benchmark, **provenance(), "seed": options.seed, "results": summary}
    with Console(stderr=True).status("starting") as status:
        seeds = range(options.seed, options.seed + options.trials)
        for trial, complaints in _outcomes(judge, seeds, summary, options.workers):
            summary["trials"] += 1
            if complaints:
                summary["off"].append({"trial": vars(trial), "complaints": complaints})
                print(trial, complaints, flush=True)
            status.update(f"{summary['trials']} of {options.trials}: {sentence(summary)}")
            if options.write:  # after each one: trials that are ended early have been made, too
                options.write.write_text(json.dumps(document, indent=2) + "\n")
    print(sentence(summary))
    if options.page:
        rewrite(options.page, mark, (text or sentence)(summary))
    return summary


def _outcomes(judge, seeds, summary, workers):
    """What the judge says of each seed, `workers` of them at a time."""
    with ThreadPoolExecutor(workers) as pool:
        trials = [pool.submit(judge, seed, summary) for seed in seeds]
        yield from (trial.result() for trial in as_completed(trials))
