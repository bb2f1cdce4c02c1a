"""`tokenyard check`: every exchange × wire format × kind of ranks, random layers and named checks, as a grid.

A random case that is not bitwise equal to the twin, or not within the bound around the oracle, is a finding. A case
shows that something is wrong; a named check also says what. Both also run on classes from outside of this package:

    tokenyard check --exchange package.module:Class
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import typer

from tokenyard.cli.machine import provenance
from tokenyard.cli.options import JSON_FLAG, LOADED_EXCHANGES, ROWS_DEVICE, option
from tokenyard.cli.output import Output, console, progress_bar, say
from tokenyard.cli.parts import load_object, load_part, refuse_override
from tokenyard.cli.tables import show_table
from tokenyard.errors import InputError, check_part

if TYPE_CHECKING:
    from rich.console import Console

    from tokenyard.conformance.campaign import Cell, CheckedPart
    from tokenyard.conformance.cases import Case
    from tokenyard.conformance.draws import RankKind
    from tokenyard.exchange import Transport
    from tokenyard.experts import Experts
    from tokenyard.formats import Format

EXIT_FAILED = 1
# Findings shown below the grid; `--json` has all.
_MOST_SHOWN = 12
_MOST_NAMED = 5


def check(
    cases: int = option(2000, "Random cases, over all cells of the grid.", min=0),
    seed: int = option(0, "The seed of the random cases."),
    exchange: list[str] | None = LOADED_EXCHANGES,
    format_: list[str] | None = option(
        None, "Only this format: a name, or package.module:Class. May be given several times.", "--format"
    ),
    experts: list[str] | None = option(
        None, "Only these experts: a name, or package.module:Class. May be given several times."
    ),
    ranks: str = option("both", "Ranks as `threads`, `processes` or `both`."),
    device: str = ROWS_DEVICE,
    rounds: int | None = option(
        None, "Rounds of the check `many_rounds`.", shown="50; 1000 where memory is shared", min=1
    ),
    as_json: bool = JSON_FLAG,
) -> None:
    """Check that exchanges, formats and experts keep their contract: also classes of your own."""
    from tokenyard.group.forkserver import start_forkserver

    if ranks in ("processes", "both"):
        start_forkserver()  # it loads torch while this process does
    from tokenyard.conformance.campaign import Campaign, check_parts, share_of_large
    from tokenyard.conformance.draws import histogram
    from tokenyard.exchange import EXCHANGES
    from tokenyard.exchange import resolve as resolve_exchange
    from tokenyard.experts import EXPERTS
    from tokenyard.experts import get as get_experts
    from tokenyard.formats import FORMATS
    from tokenyard.group import thread_groups

    refuse_override()
    thread_groups(1, device=device)  # raises where there is no such device
    kinds = _kinds(ranks)
    everything = not (exchange or format_ or experts)
    # Experts alone need no exchange. A given exchange is tried with all formats, and a given format with all exchanges.
    moves = everything or bool(exchange or format_)
    exchanges = [load_part(name, resolve_exchange) for name in exchange or EXCHANGES] if moves else []
    chosen_formats = [_format(name) for name in format_ or FORMATS]
    chosen_experts = [load_part(name, get_experts) for name in experts or (EXPERTS if everything else ())]
    _check_names("exchange", exchanges, EXCHANGES)
    _check_names("experts", chosen_experts, EXPERTS)
    # A part that was named and does not run on the device is an error; otherwise, parts that do not are skipped.
    skipped = {} if experts else _not_running(chosen_experts, device)
    skipped |= {} if exchange else _not_running(exchanges, device)
    chosen_experts = [one for one in chosen_experts if one.name not in skipped]
    exchanges = [one for one in exchanges if one.name not in skipped]
    wires = chosen_formats if moves else []
    campaign = Campaign(
        exchanges=exchanges, formats=wires, ranks=kinds, cases=cases, seed=seed, device=device
    )
    started = time.monotonic()
    drawn = campaign.draw()
    lone_formats = chosen_formats if everything or format_ else []
    steps = len(drawn) + len(exchanges) * len(kinds)
    with progress_bar() as bar:
        task = bar.add_task("starting", total=steps + len(lone_formats) + len(chosen_experts))

        def progress(what: str, steps: int) -> None:
            bar.update(task, description=what, advance=steps)

        alone = check_parts(lone_formats, chosen_experts, device, progress)
        moving, cells = campaign.run(drawn, progress, rounds)
    seconds = time.monotonic() - started
    only_cases, parts = [case for _, case in drawn], [*moving, *alone]
    named = [result for part in parts for result in part.results]
    passed = all(cell.ok for cell in cells) and all(result.passed for result in named)
    document = {
        "command": "check",
        "passed": passed,
        "seed": seed,
        "device": device,
        "cases": len(drawn),
        "large_share": share_of_large(only_cases),
        "seconds": round(seconds, 1),
        "cells": [_cell_fields(cell) for cell in cells],
        "checks": _check_fields(parts),
        "skipped": skipped,
        "histogram": histogram(only_cases),
        **provenance(),
    }

    def show() -> None:
        _show(console(), device, parts, cells, only_cases)
        for why in skipped.values():
            say(f"not checked: {why}", style="yellow")
        count = sum(cell.passed for cell in cells)
        checks = sum(result.passed for result in named)
        say(
            f"{count} of {len(drawn)} cases and {checks} of {len(named)} checks passed, in {seconds:.0f} s",
            style="green" if passed else "red",
        )

    Output(as_json).deliver(document, show)
    if not passed:
        raise typer.Exit(EXIT_FAILED)


# -- Options -------------------------------------------------------------------------------------------------


def _kinds(ranks: str) -> list[RankKind]:
    from tokenyard.conformance.draws import RankKind

    chosen = [kind for kind in get_args(RankKind) if ranks in (kind, "both")]
    if not chosen:
        raise InputError(f"--ranks {ranks}", expected="threads, processes or both", fix="choose one of them")
    return chosen


def _not_running(parts: Sequence[type[Experts] | type[Transport]], device: str) -> dict[str, str]:
    """The experts or exchanges that do not run on a device, by name, and why: as they declare it."""
    import torch

    reasons = {one.name: one.runs_on(torch.device(device)) for one in parts}
    return {name: str(reason) for name, reason in reasons.items() if reason is not None}


def _format(name: str) -> str | Format:
    """The name of a registered format, or an object of a class given as `package.module:Class`."""
    from tokenyard.formats import FORMATS, Format, get

    if ":" not in name:
        get(name)  # raises where there is none
        return name
    loaded = load_object(name)
    if not isinstance(loaded, Format):
        check_part("format", loaded, Format)
        try:
            loaded = loaded()
        except TypeError as error:
            raise InputError(
                f"the format {name} cannot be made without parameters ({error})",
                expected="a class whose parameters all have defaults, or an object",
                fix="name an object of the class: package.module:my_format",
            ) from error
    _check_names("format", [type(loaded)], FORMATS)
    return get(loaded)


def _check_names(kind: str, chosen: Sequence[Any], registered: Mapping[str, Any]) -> None:
    """Raise if two classes have the same name: they would share a line of the grid."""
    known = dict(registered)
    for cls in chosen:
        if known.setdefault(cls.name, cls) is not cls:
            raise InputError(
                f"the {kind} {cls.__name__} is called {cls.name!r}, as {known[cls.name].__name__} is",
                expected="a name of its own",
                fix="change the `name` of the class",
            )


# -- What was found ------------------------------------------------------------------------------------------


def _cell_fields(cell: Cell) -> dict[str, Any]:
    findings = [{"case": str(case), "finding": finding} for case, finding in cell.findings]
    return vars(cell) | {"findings": findings}


def _check_fields(parts: list[CheckedPart]) -> list[dict[str, Any]]:
    """One entry per named check of each part."""
    fields = []
    for part in parts:
        about = {"kind": part.kind, "name": part.name} | ({"ranks": part.ranks} if part.ranks else {})
        fields += [about | vars(result) for result in part.results]
    return fields


def _show(out: Console, device: str, parts: list[CheckedPart], cells: list[Cell], cases: list[Case]) -> None:
    findings: list[str] = []
    if moving := [part for part in parts if part.kind == "exchange"]:
        _show_grid(device, moving, cells, findings)
    for kind, title in (("format", "Named checks of formats"), ("experts", "Named checks of experts")):
        if alone := [part for part in parts if part.kind == kind]:
            names, marks = [part.name for part in alone], [_mark_of(part) for part in alone]
            show_table(names, [marks], right=names, title=title, min_width=len(title))
            for part in alone:
                findings += _first(part)
    for finding in findings[:_MOST_SHOWN]:
        say(f"✗ {finding}", style="red", on=out)
    if len(findings) > _MOST_SHOWN:
        say(f"and {len(findings) - _MOST_SHOWN} more: --json has them all", style="red", on=out)
    if cases:
        _show_histogram(cases)


def _mark_of(part: CheckedPart) -> str:
    return _mark(sum(result.passed for result in part.results), len(part.results))


def _mark(passed: int, total: int) -> str:
    if total == 0:
        return "–"
    return f"[green]{passed}/{total}" if passed == total else f"[red]✗ {passed}/{total}"


def _show_grid(device: str, parts: list[CheckedPart], cells: list[Cell], findings: list[str]) -> None:
    """Exchange × kind of ranks by wire format; the first finding of each cell is added to `findings`."""
    wires = list(dict.fromkeys(cell.wire for cell in cells))
    lines = []
    for part in parts:
        findings += _first(part)
        marks = [_mark_of(part)]
        for wire in wires:
            mine = [c for c in cells if (c.exchange, c.ranks, c.wire) == (part.name, part.ranks, wire)]
            marks.append(_mark(sum(c.passed for c in mine), sum(c.total for c in mine)))
            for cell in mine:
                if cell.findings:
                    case, finding = cell.findings[0]
                    findings.append(f"{part} × {wire}: {finding}\n  {case}")
                if cell.not_run:
                    findings.append(f"{part} × {wire}: {cell.not_run} not run: the group broke too often")
        lines.append((part.name, str(part.ranks), *marks))
    figures = ("named checks", *wires)
    title = f"Cases passed on {device}, by the rows' wire"
    show_table(("exchange", "ranks", *figures), lines, right=figures, title=title)


def _first(part: CheckedPart) -> list[str]:
    """The first finding of a part, and the names of the other checks that found something."""
    failed = [result for result in part.results if not result.passed]
    if not failed:
        return []
    others = ", ".join(result.check for result in failed[1 : 1 + _MOST_NAMED])
    if len(failed) > 1 + _MOST_NAMED:
        others += f" and {len(failed) - 1 - _MOST_NAMED} more"
    return [f"{part}, {failed[0].check}: {failed[0].finding}" + (f"\n  also: {others}" if others else "")]


def _show_histogram(cases: list[Case]) -> None:
    from tokenyard.conformance.campaign import share_of_large
    from tokenyard.conformance.draws import histogram

    rows = [
        (name, "   ".join(f"{label}: {count}" for label, count in counts.items()))
        for name, counts in histogram(cases).items()
    ]
    large = f"{share_of_large(cases):.0%} of them large (W ≥ 4, H ≥ 2048, uneven T)"
    show_table(("", ""), rows, title=f"What was drawn: {len(cases)} cases, {large}", show_header=False)
