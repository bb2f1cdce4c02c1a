"""`tokenyard eval`: how much accuracy a wiring costs.

Every exchange × wire × weights × combine wire answers the same questions as the whole model. The table has the share
that is right, the paired difference to the whole model, the error of the logits, tokens per second, and the bytes of
rows and experts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenyard.cli.machine import provenance
from tokenyard.cli.options import JSON_FLAG, option
from tokenyard.cli.output import Output, progress_bar, save_json
from tokenyard.cli.parts import refuse_override
from tokenyard.cli.tables import show_table
from tokenyard.errors import InputError
from tokenyard.units import size
from tokenyard_lab.cli.options import (
    LONGEST_ANSWER,
    MODEL_FOLDER,
    ONLY_EXCHANGES,
    OUT_FILE,
    PLOT_FILE,
    RANK_COUNT,
    RANK_KIND,
    STARTED_DEVICE,
)
from tokenyard_lab.cli.run import start_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard_lab.evaluation.table import Evaluation, Row

# The weight formats of an evaluation, if none are given.
_WEIGHTS = ("bf16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "mxint4")


def evaluate(
    model: Path | None = MODEL_FOLDER,
    data: Path | None = option(
        None, 'Your own questions: JSON lines with "prompt" and "answer".', shown="held-out word problems"
    ),
    problems: int | None = option(
        None, "How many questions.", shown="400 word problems, or all of --data", min=1
    ),
    ranks: int = RANK_COUNT,
    kind: str = RANK_KIND,
    device: str = STARTED_DEVICE,
    exchange: list[str] | None = ONLY_EXCHANGES,
    wire: list[str] | None = option(None, "Only this wire format; may be given several times."),
    weights: list[str] | None = option(None, "Only this format of weights; may be given several times."),
    inner: list[str] | None = option(
        None, "Only this format between an expert's two products, or `exact`; may be given several times."
    ),
    combine_wire: list[str] | None = option(
        None,
        "This format on the way back, or `all`; may be given several times. `e4m3_unscaled`: a cast without "
        "scales, the bad example of this study, which no plan takes.",
        shown="the model's own dtype",
    ),
    every: bool = option(
        False, "Let every exchange answer everything, even where the first gives the same bits.", "--every"
    ),
    batch: int = option(128, "Questions that a rank answers at a time.", min=1),
    max_new_tokens: int = LONGEST_ANSWER,
    plot: Path | None = PLOT_FILE,
    out: Path | None = OUT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """Measure how accurate a model is through every exchange, in every combination of formats.

    Formats are those of the rows on the way out and back, of the weights, and of the numbers between an expert's two
    products. Each combination answers the same questions as the whole model, and is compared with it.
    """
    where = start_ranks(ranks, kind, device)
    from tokenyard.exchange import EXCHANGES, resolve
    from tokenyard_lab.evaluation.models import check_model
    from tokenyard_lab.evaluation.questions import held_out_questions, read_questions
    from tokenyard_lab.evaluation.table import Evaluation
    from tokenyard_lab.plots import check_picture, draw_accuracy

    refuse_override()
    folder = check_model(model)
    output = Output(as_json, out if where.leads else None)
    check_picture(plot)
    evaluation = Evaluation(
        ranks=where,
        folder=folder,
        questions=held_out_questions(problems or 400) if data is None else read_questions(data, problems),
        exchanges=_distinct(resolve(name).name for name in exchange or _fastest_first(EXCHANGES)),
        wires=_wires(wire),
        weights=_weights(weights),
        inners=_inners(inner),
        combine_wires=_combine_wires(combine_wire),
        batch=batch,
        most=max_new_tokens,
        every=every,
    )
    started = time.monotonic()
    about = {
        "command": "eval",
        "model": "shipped" if model is None else str(folder),
        "data": "held-out word problems" if data is None else str(data),
        "questions": len(evaluation.questions),
        "ranks": where.size,
        "kind": kind,
        "cells": 1 + len(evaluation.exchanges) * len(evaluation.formats),
    }

    def document_of(rows: list[Row]) -> dict[str, Any]:
        seconds = round(time.monotonic() - started, 1)
        return {**about, "seconds": seconds, "results": [row.as_dict() for row in rows], **provenance()}

    def keep(rows: list[Row]) -> None:
        """Save a row as soon as it is measured. A file that cannot be written does not stop the evaluation."""
        if output.out is not None:
            with suppress(InputError):  # raised at the end, below the table
                save_json(document_of(rows), output.out)

    rows = _run(evaluation, keep, shows=where.leads)
    if not where.leads:
        return
    document, questions = document_of(rows), len(evaluation.questions)
    output.deliver(document, lambda: _show(rows, questions, where.size))
    if plot is not None:
        draw_accuracy(document, plot)


def _fastest_first(exchanges: dict[str, Any]) -> list[str]:
    """All exchanges, the fastest first: the first one answers all questions."""
    return sorted(exchanges, key=lambda name: name != "one_sided")


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _wires(chosen: Sequence[str] | None) -> list[str]:
    import torch

    from tokenyard.formats import FORMATS, get

    if chosen:
        return _distinct(str(get(name)) for name in chosen)
    return [name for name in FORMATS if get(name).carries(torch.bfloat16) is None]


def _weights(chosen: Sequence[str] | None) -> list[str]:
    from tokenyard.formats import weight_format

    return _distinct(weight_format(name).name for name in chosen or _WEIGHTS)


def _inners(chosen: Sequence[str] | None) -> list[str]:
    from tokenyard.experts.spec import EXACT
    from tokenyard.formats import WEIGHT_FORMATS, get

    every = [EXACT, *(name for kind in WEIGHT_FORMATS.values() for name in kind.inner_formats)]
    return _distinct(name if name == EXACT else str(get(name)) for name in chosen or every)


def _combine_wires(chosen: Sequence[str] | None) -> list[str]:
    from tokenyard_lab.evaluation.cells import OWN_DTYPE
    from tokenyard_lab.unscaled_e4m3 import studied_format, studied_ways_back

    if not chosen:
        return [OWN_DTYPE]
    every = studied_ways_back() if "all" in chosen else []
    return _distinct([*every, *(str(studied_format(name)) for name in chosen if name != "all")])


def _run(evaluation: Evaluation, keep: Callable[[list[Row]], None], *, shows: bool) -> list[Row]:
    """Run an evaluation, with progress on stderr; return all rows."""
    with progress_bar(disable=not shows) as progress:
        bar = progress.add_task("loading the model", total=evaluation.answers_expected)

        def on_message(message: dict[str, Any]) -> None:
            progress.update(bar, description=message["what"], advance=message.get("answered", 0))

        rows: list[Row] = []
        for row in evaluation.rows(on_message):
            rows = evaluation.in_order([*rows, row])
            keep(rows)
            if progress.console.is_terminal:
                right = f"{row.accuracy.value:.2%}"
                wiring = (row.exchange, row.wire, row.weights, row.inner, row.combine_wire)
                progress.console.print(" × ".join(filter(None, wiring)), right)
        progress.update(bar, description="done")
    return rows


def _show(rows: list[Row], questions: int, ranks: int) -> None:

    def cells(row: Row) -> list[str]:
        accuracy, difference = row.accuracy, row.difference
        right = f"{100 * accuracy.value:.2f}% ({100 * accuracy.low:.1f} to {100 * accuracy.high:.1f})"
        paired = (
            ""
            if difference is None
            else f"{100 * difference.value:+.2f} ({100 * difference.low:+.2f} to {100 * difference.high:+.2f})"
        )
        return [
            row.exchange,
            row.wire,
            row.weights,
            row.inner,
            row.combine_wire,
            right if row.same_bits_as is None else f"= {100 * accuracy.value:.2f}%",
            paired if row.same_bits_as is None else "=",
            "" if row.logit_error is None else f"{row.logit_error:.2%}",
            f"{row.tokens_per_s:,.0f}",
            size(row.bytes_per_token) if row.difference is not None else "",
            size(row.expert_bytes),
        ]

    figures = ("right", "minus the whole model's", "error of logits", "tokens/s", "a token", "experts")
    show_table(
        ("exchange", "wire", "weights", "between", "back", *figures),
        map(cells, rows),
        right=figures,
        less_needed=("error of logits", "tokens/s", "a token", "experts"),
        title=f"{questions} questions on {ranks} ranks, 95% intervals. =: the same bits as the first exchange, on "
        "the questions that tokens/s is taken from",
    )
