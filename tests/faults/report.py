"""What came of a campaign: counts by kind, as a table for people and as JSON."""

import re
import statistics
from collections import Counter
from dataclasses import asdict

from rich.table import Table

from tests.faults.cases import DEADLINE, SLACK
from tests.faults.kinds import KINDS


def summarize(outcomes):
    """Plain values: the whole, and a row for each kind."""
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    rows = [_row(kind, [f for f in findings if f.kind == kind.name]) for kind in KINDS]
    return {
        "faults": sum(row["faults"] for row in rows),
        "right": sum(row["right"] for row in rows),
        "hangs": sum(outcome.hung for outcome in outcomes),
        "leaks": sum(bool(outcome.leaks) for outcome in outcomes),
        "not_struck": sum(not finding.struck for finding in findings),
        "groups": len(outcomes),
        "deadline_s": DEADLINE,
        "slack_s": SLACK,
        "kinds": [row for row in rows if row["faults"]],
        "complaints": [asdict(finding) for finding in findings if not finding.right],
        "left_behind": [words for outcome in outcomes for words in outcome.leaks],
    }


def _row(kind, findings):
    struck = [finding for finding in findings if finding.struck]
    seconds = [finding.seconds for finding in struck if finding.seconds is not None]
    return {
        "kind": kind.name,
        "title": kind.title,
        "faults": len(struck),
        "right": sum(finding.right for finding in struck),
        "variants": dict(sorted(Counter(finding.variant for finding in struck).items())),
        "median_s": round(statistics.median(seconds), 2) if seconds else None,
        "worst_s": round(max(seconds), 2) if seconds else None,
    }


def is_good(summary):
    """Whether every fault struck, every rank said what it had to, and nothing hung or was left behind."""
    wrong = summary["faults"] - summary["right"] + summary["hangs"] + summary["leaks"] + summary["not_struck"]
    return summary["faults"] > 0 and wrong == 0


def table(summary):
    """For the terminal."""
    title = (
        f"{summary['faults']} faults on {summary['groups']} groups of processes: {summary['right']} right, "
        f"{summary['hangs']} hangs, {summary['leaks']} leaks"
    )
    made = Table(title=title, title_justify="left")
    for name, justify in (
        ("fault", "left"),
        ("injected", "right"),
        ("right", "right"),
        ("to the error", "left"),
    ):
        made.add_column(name, justify=justify)
    for row in summary["kinds"]:
        times = "" if row["median_s"] is None else f"median {row['median_s']} s, worst {row['worst_s']} s"
        made.add_row(row["title"], str(row["faults"]), str(row["right"]), times)
    made.caption = f"deadline of every wait {summary['deadline_s']} s, slack {summary['slack_s']} s"
    return made


def markdown(summary):
    """For the documentation."""
    lines = [
        "| fault | injected | right on every rank | to the error: median, worst |",
        "| --- | --- | --- | --- |",
    ]
    for row in summary["kinds"]:
        times = "no error" if row["median_s"] is None else f"{row['median_s']:.2f} s, {row['worst_s']:.2f} s"
        lines.append(f"| {row['title']} | {row['faults']} | {row['right']} | {times} |")
    whole = (
        f"**{summary['faults']} faults** on {summary['groups']} groups: errors and results right after "
        f"**{summary['right']}**, hangs **{summary['hangs']}**, leaks **{summary['leaks']}**. "
        f"The deadline of every wait is {summary['deadline_s']} s, the slack {summary['slack_s']} s."
    )
    return "\n".join([whole, "", *lines])


def rewrite(page, name, text):
    """Put a text between the marks of that name in a page of the documentation."""
    between = re.compile(rf"(<!-- {name} -->).*(<!-- /{name} -->)", re.DOTALL)
    page.write_text(between.sub(lambda marks: f"{marks[1]}\n{text}\n\n{marks[2]}", page.read_text()))
