"""Random trials, one after the other, from the command line: what was wrong in each, a sentence, JSON and a page."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from tests.faults.report import rewrite
from tokenyard.cli.machine import provenance


def run_trials(about, judge, sentence, *, trials, summary, benchmark, mark):
    """Make as many trials as the command line says; returns the summary, in which `off` has those that went wrong.

    `judge(seed, summary)` makes a trial, counts what it likes, and returns the trial and its complaints. The sentence
    of a summary goes between the marks of a page.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a file for the JSON")
    parser.add_argument("--page", type=Path, help="a page of the documentation, whose counts are renewed")
    options = parser.parse_args()
    summary = {"trials": options.trials, **summary, "off": []}
    with Console(stderr=True).status("starting") as status:
        for number in range(options.trials):
            trial, complaints = judge(options.seed + number, summary)
            if complaints:
                summary["off"].append({"trial": vars(trial), "complaints": complaints})
                print(trial, complaints, flush=True)
            status.update(f"{number + 1} of {options.trials}: {sentence(summary)}")
    print(sentence(summary))
    if options.write:
        document = {"benchmark": benchmark, **provenance(), "seed": options.seed, "results": summary}
        options.write.write_text(json.dumps(document, indent=2) + "\n")
    if options.page:
        rewrite(options.page, mark, sentence(summary))
    return summary
