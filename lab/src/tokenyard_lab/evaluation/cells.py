"""One cell: a model, sharded in one exchange × wire × weights (or whole), answers all questions.

Every rank answers its share of the questions, so attention is data-parallel and the experts serve all ranks. The first
questions are the *probes*. They are answered token by token, and timed, which gives tokens per second. Both models also
read the whole model's answers to them, which gives the error of the logits, and a digest that shows whether two
exchanges give the same bits. The other questions are answered with the whole model's answers as drafts, which is faster
and gives the same answers.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tokenyard.experts.spec import EXACT
from tokenyard.group import Group
from tokenyard_lab.evaluation.decoding import answer, answer_from_drafts, pad_left, read
from tokenyard_lab.evaluation.models import load_language, load_whole
from tokenyard_lab.evaluation.ranks import Send
from tokenyard_lab.unscaled_e4m3 import studied_format

# Tokens that a rank brings to one round trip; larger batches of prompts are split.
MAX_TOKENS = 1024
# Questions that tokens per second and the error of the logits are taken from.
PROBES = 64
# Drafts are read in smaller batches, because all their tokens are in one pass.
_DRAFTS_IN_A_BATCH = 32
# The combine wire of a cell whose results come home in the model's own dtype.
OWN_DTYPE = "own dtype"

# The number of a question, the tokens of the answer, and what they say.
Answer = tuple[int, list[int], str]


@dataclass(frozen=True)
class Wiring:
    """The exchange and the formats of a cell."""

    exchange: str
    wire: str
    weights: str
    inner: str = EXACT  # between an expert's two products
    combine_wire: str = OWN_DTYPE  # on the way back

    def __str__(self) -> str:
        inner = "" if self.inner == EXACT else f" × {self.inner} between products"
        back = "" if self.combine_wire == OWN_DTYPE else f" × {self.combine_wire} back"
        return f"{self.exchange} × {self.wire} × {self.weights}{inner}{back}"


@dataclass(frozen=True)
class Cell:
    """What the ranks of a cell need to know. It is pickled, and sent to their processes."""

    folder: str
    prompts: list[str]
    wiring: Wiring | None  # None: the whole model on every rank
    batch: int
    most: int
    drafts: list[list[int]] = field(default_factory=list)  # the whole model's answers, for all questions
    only_probes: bool = False


def measure(group: Group, cell: Cell, send: Send) -> dict[str, Any]:
    """Measure a cell on this rank, with its share of the questions."""
    whole = load_whole(Path(cell.folder), group.device)
    asked = _QuestionShare(whole, cell, group, send)
    if cell.wiring is None:
        size = sum(value.nbytes for name, value in whole.named_parameters() if ".experts." in name)
        return {**asked.answers(whole), "expert_bytes": size}
    from tokenyard.integrations.transformers import shard_experts

    theirs = asked.probe_logits(whole)
    back = cell.wiring.combine_wire
    sharded = shard_experts(
        whole,
        group,
        exchange=cell.wiring.exchange,
        wire=cell.wiring.wire,
        combine_wire=None if back == OWN_DTYPE else studied_format(back),
        weights=cell.wiring.weights,
        inner=cell.wiring.inner,
        max_tokens=MAX_TOKENS,
    )
    try:
        with sharded.passes() as model:
            ours = asked.probe_logits(model)
        with sharded.passes() as model:
            found = asked.answers(model)
        reports = sharded.report()
    finally:
        sharded.close()
    moved = sum(sum(report.dispatch_bytes) + sum(report.combine_bytes) for report in reports)
    return {
        **found,
        "squared_error": float((ours.double() - theirs.double()).square().sum()),
        "squared_size": float(theirs.double().square().sum()),
        "digest": hashlib.sha256(ours.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
        "expert_bytes": sum(experts.layer.experts.weights.nbytes for experts in sharded.experts),
        "bytes_per_token": moved / max(1, sum(reports[0].tokens)),
    }


class _QuestionShare:
    """This rank's share of the questions."""

    def __init__(self, model: Any, cell: Cell, group: Group, send: Send) -> None:
        self.cell, self.device, self.send = cell, group.device, send
        self.language = load_language(Path(cell.folder))
        self.end_ids = self.language.end_ids(model)
        mine = range(group.rank, len(cell.prompts), group.size)
        self.prompts = dict(zip(mine, self.language.encode([cell.prompts[n] for n in mine]), strict=True))
        self.probes = [number for number in mine if number < PROBES]
        # Prompts of one length are padded least.
        self.others = sorted((n for n in mine if n >= PROBES), key=lambda n: (len(self.prompts[n]), n))

    def probe_logits(self, model: Any) -> torch.Tensor:
        """Logits of all tokens of the whole model's answers to the probes, [tokens, vocabulary]."""
        if not self.probes:
            return torch.empty(0, 1)
        drafts = [self.cell.drafts[number] for number in self.probes]
        prompts = [self.prompts[number] for number in self.probes]
        return torch.cat(read(model, prompts, drafts, self.language.pad, self.device))

    def answers(self, model: Any) -> dict[str, Any]:
        """The answers, and how long the probes took."""
        started = time.perf_counter()
        found = self._answered(model, self.probes, from_drafts=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(ids) for _, ids, _ in found)
        if not self.cell.only_probes:
            found += self._answered(model, self.others, from_drafts=bool(self.cell.drafts))
        return {"answers": found, "probe_tokens": tokens, "probe_seconds": seconds}

    def _answered(self, model: Any, numbers: list[int], *, from_drafts: bool) -> list[Answer]:
        size = min(self.cell.batch, _DRAFTS_IN_A_BATCH) if from_drafts else self.cell.batch
        ends: dict[str, Any] = {"end_ids": self.end_ids, "most": self.cell.most}
        pad, device = self.language.pad, self.device
        found: list[Answer] = []
        for first in range(0, len(numbers), size):
            batch = numbers[first : first + size]
            prompts = [self.prompts[n] for n in batch]
            if from_drafts:
                drafts = [self.cell.drafts[n] for n in batch]
                written = answer_from_drafts(model, prompts, drafts, **ends, pad=pad, device=device)
            else:
                written = answer(model, *pad_left(prompts, pad, device), **ends)
            self.send({"answered": len(batch)})
            found += [
                (number, ids, self.language.text(ids)) for number, ids in zip(batch, written, strict=True)
            ]
        return found
