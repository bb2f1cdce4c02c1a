"""Tables of what the way back costs: the error of random layers, and answers of the shipped model."""

from __future__ import annotations

import json
from typing import Any

from docs.generate.figures import RESULTS as FOLDER
from docs.generate.figures import measured
from tokenyard_lab.bench.combine_error import RESULTS
from tokenyard_lab.markdown import markdown_table

_RANKS_OF_ANSWERS = (2, 8)


def combine_error_in_markdown() -> str:
    """The error of a layer's output: a line for each kind of results and way back, a column for each W."""
    document = measured("combine-error-cpu")
    ranks = list(dict.fromkeys(record.parameters["ranks"] for record in document.results))
    wires = list(dict.fromkeys(record.parameters["combine_wire"] for record in document.results))
    lines = []
    for results in RESULTS:
        for wire in wires:
            found = [document.find(ranks=count, results=results, combine_wire=wire) for count in ranks]
            cells = []
            for record in found:
                assert record is not None
                assert record.ours is not None
                ordinary = record.details["ordinary"]
                cells.append(
                    _short(record.ours.median) + ("" if ordinary is None else f" ({_short(ordinary)})")
                )
            lines.append((results, f"`{wire}`", *cells))
    return markdown_table(("results", "way back", *(f"W={count}" for count in ranks)), lines)


def combine_answers_in_markdown() -> str:
    """What the shipped model answers: a line for each way back, two columns for each number of ranks."""
    documents = [_answers(ranks) for ranks in _RANKS_OF_ANSWERS]
    lines = []
    for rows in zip(*(document["results"][1:] for document in documents), strict=True):
        cells = []
        for row in rows:
            low, high = (100 * row["difference"][end] for end in ("low", "high"))
            right = row["questions"] - row["wrong"]
            cells += [f"{right} ({low:+.1f} to {high:+.1f})", f"{100 * row['logit_error']:.2f}"]
        size = rows[-1]["bytes_per_token"] / 1000
        lines.append((f"`{rows[0]['combine_wire']}`", *cells, f"{size:.1f}"))
    columns = [
        name for ranks in _RANKS_OF_ANSWERS for name in (f"W={ranks}: right (difference)", "logits, %")
    ]
    return markdown_table(("way back", *columns, f"KB per token, W={_RANKS_OF_ANSWERS[-1]}"), lines)


def _answers(ranks: int) -> Any:
    return json.loads((FOLDER / f"eval-combine-{ranks}-ranks-cpu.json").read_text())


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 1 else f"{number:.1f}"


COMBINE_TABLES = {
    "combine-error": combine_error_in_markdown,
    "combine-answers": combine_answers_in_markdown,
}
