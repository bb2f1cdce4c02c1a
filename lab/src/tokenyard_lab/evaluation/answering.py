"""A sharded model answers questions, each rank its own; tokens are reported as they come.

A rank sends `{"number": 3, "text": "34 + 27 : 4"}` after every token of question 3, and the same with `"done": true` at
the end. Answers have different lengths, and no rank waits for the end of another rank's answer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tokenyard.balancing.recorded_routes import write_routes
from tokenyard.group import Group
from tokenyard_lab.evaluation.cells import MAX_TOKENS
from tokenyard_lab.evaluation.decoding import answer, pad_left
from tokenyard_lab.evaluation.models import load_language
from tokenyard_lab.evaluation.ranks import Send
from tokenyard_lab.evaluation.route_recorder import RouteRecorder


def answer_questions(
    group: Group,
    folder: str,
    prompts: list[str],
    sharding: dict[str, Any],
    most: int,
    record: str | None,
    send: Send,
) -> dict[str, Any]:
    """Answer this rank's share of the prompts, with at most `most` tokens each; return answers and layer reports.

    `sharding` are the options of `load_sharded`. `record` is the file that routes are written to.
    """
    from tokenyard.integrations.transformers import load_sharded

    language = load_language(Path(folder))
    sharded = load_sharded(folder, group, **sharding, max_tokens=MAX_TOKENS)
    end_ids = language.end_ids(sharded.model)
    found: list[tuple[int, str, int]] = []
    recorder = RouteRecorder([experts.layer for experts in sharded.experts] if record else [])
    try:
        group.barrier()
        started = time.perf_counter()
        with sharded.passes() as model:
            for number in range(group.rank, len(prompts), group.size):
                tokens: list[int] = []
                send({"number": number, "text": ""})

                def say(_: int, token: int, number: int = number, tokens: list[int] = tokens) -> None:
                    tokens.append(token)
                    send({"number": number, "text": language.text(tokens)})

                prompt = pad_left(language.encode([prompts[number]]), language.pad, group.device)
                answer(model, *prompt, end_ids=end_ids, most=most, on_token=say)
                send({"number": number, "text": language.text(tokens), "done": True})
                found.append((number, language.text(tokens), len(tokens)))
        seconds = time.perf_counter() - started
        recorded = recorder.gather(group)
        if record is not None and group.rank == 0:
            write_routes(Path(record), recorded)
        return {
            "answers": found,
            "seconds": seconds,
            "exchange": sharded.plan.draft.exchange.name,
            "layers": [report.as_dict() for report in sharded.report()],
        }
    finally:
        sharded.close()
