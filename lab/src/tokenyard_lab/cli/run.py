"""`tokenyard run`: a model whose experts live on several ranks answers, with its tokens streaming to the screen.

The model is the one that ships with the package, or any checkpoint of a known family. Every rank answers questions of
its own; at the end a table shows the rows and bytes that moved in each layer. Under `torchrun` each process is a rank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenyard.cli.machine import provenance, under_torchrun
from tokenyard.cli.options import JSON_FLAG, option
from tokenyard.cli.output import check_out, console, print_json, say
from tokenyard.cli.tables import show_table
from tokenyard.errors import InputError, shown
from tokenyard.units import size
from tokenyard_lab.cli.options import LONGEST_ANSWER, MODEL_FOLDER, RANK_COUNT, RANK_KIND, STARTED_DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from tokenyard_lab.evaluation.questions import Question
    from tokenyard_lab.evaluation.ranks import Ranks

EXIT_WRONG = 1
# The share of the problems that must be right: 19 of 20.
ENOUGH = 0.95
# A problem that the shipped model solves.
_EXAMPLE = "Mia has 34 pens. Tom gives her 27 more. How many pens does Mia have now?"
# Modules that the ranks' processes need, imported once in the forkserver that starts them.
PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tokenyard.integrations.transformers",
    "tokenyard_lab.evaluation.answering",
)


def run(
    model: Path | None = MODEL_FOLDER,
    prompt: list[str] | None = option(
        None,
        "Answer this; may be given several times. The model that ships answers word problems only.",
        shown=False,
    ),
    problems: int = option(20, "Held-out word problems to answer, without --prompt.", min=1),
    ranks: int = RANK_COUNT,
    kind: str = RANK_KIND,
    device: str = STARTED_DEVICE,
    exchange: str = option("auto", "How rows move."),
    wire: str | None = option(None, "Format of rows on the way.", shown="the model's dtype"),
    weights: str | None = option(None, "Format that holds the experts.", shown="as they are stored"),
    inner: str | None = option(
        None, "Format between an expert's two products, or `exact`.", shown="as the checkpoint says"
    ),
    max_new_tokens: int = LONGEST_ANSWER,
    record: Path | None = option(
        None, "Write the routes of all layers to this safetensors file.", shown=False
    ),
    as_json: bool = JSON_FLAG,
) -> None:
    """Shard a model's experts over ranks, and let it answer."""
    where = start_ranks(ranks, kind, device)
    from tokenyard.exchange import resolve
    from tokenyard.experts.spec import EXACT
    from tokenyard.formats import get, weight_format
    from tokenyard.planning.choosing import AUTO
    from tokenyard_lab.evaluation.answering import answer_questions
    from tokenyard_lab.evaluation.models import check_model
    from tokenyard_lab.evaluation.questions import Question, held_out_questions

    _check_prompts(prompt or (), shipped=model is None)
    check_out(record)
    folder = check_model(model)
    asked = [Question(text, "") for text in prompt] if prompt else held_out_questions(problems)
    prompts = [question.prompt for question in asked]
    sharding = {
        "exchange": exchange if exchange == AUTO else resolve(exchange).name,
        "wire": None if wire is None else str(get(wire)),
        "weights": None if weights is None else weight_format(weights).name,
        "inner": inner if inner in (None, EXACT) else str(get(inner)),
    }
    file = None if record is None else str(record)
    shows = where.leads and not as_json
    if shows and prompt and model is None:
        say("The model that ships solves arithmetic word problems, and can do nothing else.", style="dim")
    with _LiveAnswers(asked, judged=not prompt, shows=shows) as live:
        work = (str(folder), prompts, sharding, max_new_tokens, file)
        by_rank = where.call(answer_questions, *work, on_message=live.on_message)
        live.finish(by_rank)
    if not where.leads:
        return
    answers = [_judged(asked[number], text, bool(prompt)) for number, text, _ in _in_order(by_rank)]
    right = None if prompt else sum(answer["right"] for answer in answers)
    passed = right is None or right >= enough_of(len(asked))
    tokens = sum(count for _, _, count in _in_order(by_rank))
    seconds = max(rank["seconds"] for rank in by_rank)
    if as_json:
        print_json(
            {
                "command": "run",
                "model": str(folder),
                "ranks": where.size,
                "kind": kind,
                # A variable may override the exchange that was asked for.
                **sharding | {"exchange": by_rank[0]["exchange"]},
                "passed": passed,
                "right": right,
                "answers": answers,
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "layers": by_rank[0]["layers"],
                **provenance(),
            }
        )
    else:
        out = console()
        _show_layers(by_rank[0]["layers"], where.size, by_rank[0]["exchange"])
        out.print(
            f"{tokens} tokens in {seconds:.1f} s on {where.size} ranks, {tokens / seconds:,.0f} a second"
        )
        if right is not None:
            wanted = "" if passed else f"; {enough_of(len(asked))} must be ({ENOUGH:.0%})"
            out.print(
                f"{right} of {len(asked)} problems are right{wanted}", style="green" if passed else "red"
            )
    if not passed:
        raise typer.Exit(EXIT_WRONG)


def enough_of(problems: int) -> int:
    """How many of this number of problems must be right."""
    return math.ceil(ENOUGH * problems - 1e-9)


def start_ranks(ranks: int, kind: str, device: str) -> Ranks:
    """The ranks of `torchrun`, if this process is one of them, or ranks that this command will start."""
    from tokenyard.group.forkserver import start_forkserver

    if kind == "processes":
        start_forkserver(*PRELOAD)  # it loads torch and Transformers while this process does
    from tokenyard_lab.evaluation.ranks import StartedRanks, TorchrunRanks

    return TorchrunRanks() if under_torchrun() else StartedRanks(ranks, kind, device=device)


def _check_prompts(prompts: Sequence[str], *, shipped: bool) -> None:
    from tokenyard_lab.shipped import unknown_words

    for text in prompts:
        if not text.strip():
            raise InputError(
                f"--prompt {text!r}",
                expected="a text to answer",
                fix="write one, or leave out --prompt: word problems are answered then",
            )
        if shipped and (unknown := unknown_words(text)):
            raise InputError(
                f"--prompt {shown(text)}, with words that the model that ships has never seen: {', '.join(unknown)}",
                expected="an arithmetic word problem, in words that it knows: it can do nothing else",
                fix=f'ask it, for example, "{_EXAMPLE}", or pass --model',
            )


def _in_order(by_rank: list[dict[str, Any]]) -> list[tuple[int, str, int]]:
    return sorted((number, text, count) for rank in by_rank for number, text, count in rank["answers"])


def _judged(question: Question, text: str, free: bool) -> dict[str, Any]:
    from tokenyard_lab.evaluation.questions import is_right

    found = {"prompt": question.prompt, "text": text}
    return found if free else found | {"wanted": question.answer, "right": is_right(text, question.answer)}


class _LiveAnswers:
    """Answers on the screen: finished ones, and below them, in a terminal, those that ranks are writing."""

    def __init__(self, asked: Sequence[Question], *, judged: bool, shows: bool) -> None:
        from rich.live import Live

        self.asked, self.judged, self.shows = asked, judged, shows
        self.done: set[int] = set()
        self.at: dict[int, tuple[int, str]] = {}  # by rank: which question, and the text so far
        self.out: Console = console()
        self.live = Live(console=self.out, refresh_per_second=12, transient=True, get_renderable=self._now)
        self.live_here = shows and self.out.is_terminal

    def __enter__(self) -> _LiveAnswers:
        if self.shows:
            self.out.print("loading and sharding the model …", style="dim")
        if self.live_here:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live_here:
            self.live.stop()

    def on_message(self, message: dict[str, Any]) -> None:
        """Show a message of a rank: one more token, or a finished answer."""
        rank, number, text = message.get("rank", 0), message["number"], message["text"]
        self.at[rank] = (number, text)
        if message.get("done"):
            del self.at[rank]
            self._show(number, text, rank)

    def finish(self, by_rank: list[dict[str, Any]]) -> None:
        """Show the answers that were not shown yet: under `torchrun` only those of rank 0 arrive one by one."""
        for rank, found in enumerate(by_rank):
            for number, text, _ in found["answers"]:
                if number not in self.done:
                    self._show(number, text, rank)

    def _show(self, number: int, text: str, rank: int) -> None:
        from rich.text import Text

        from tokenyard_lab.evaluation.questions import is_right

        self.done.add(number)
        if not self.shows:
            return
        question = self.asked[number]
        line = Text.assemble((question.prompt, "bold"), (f"\n  rank {rank}: ", "dim"), _colored(text))
        if self.judged:
            right = is_right(text, question.answer)
            line.append("  ✓" if right else f"  ✗ {question.answer} is right", "green" if right else "red")
        say(line, on=self.out)

    def _now(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines: list[RenderableType] = []
        for rank, (number, text) in sorted(self.at.copy().items()):
            lines.append(Text(self.asked[number].prompt, style="dim bold", no_wrap=True, overflow="ellipsis"))
            lines.append(Text.assemble((f"  rank {rank}: ", "dim"), _colored(text), "▌"))
        return Group(*lines)


def _colored(text: str) -> Any:
    """The text of a solution, with columns of digits dimmed and the answer in bold."""
    from rich.text import Text

    colored = Text(text)
    colored.highlight_regex(r":[\d ,]*", "dim")
    colored.highlight_regex(r"answer \d+", "bold")
    return colored


def _show_layers(layers: list[dict[str, Any]], ranks: int, exchange: str) -> None:

    def times(layer: dict[str, Any]) -> list[str]:
        rounds = max(1, layer["rounds"])
        names = ("dispatch_s", "experts_s", "combine_s")
        return [f"{1e3 * sum(layer[name]) / ranks / rounds:.2f}" for name in names]

    rows = [
        (
            layer["layer"],
            f"{layer['rounds']:,}",
            f"{sum(layer['rows_sent']):,}",
            size(sum(layer["dispatch_bytes"])),
            size(sum(layer["combine_bytes"])),
            f"{layer['busiest_rank']} ({layer['imbalance']:.2f}×)",
            *times(layer),
        )
        for layer in layers
    ]
    figures = ("round trips", "rows", "out", "back", "busiest rank", "dispatch", "experts", "combine")
    show_table(
        ("layer", *figures),
        rows,
        right=figures,
        less_needed=("round trips", "rows", "busiest rank"),
        title=f"What moved between {ranks} ranks through {exchange} (times: ms of a round trip, mean of the ranks, "
        "waiting included)",
    )
