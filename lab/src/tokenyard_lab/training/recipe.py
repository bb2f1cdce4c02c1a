"""What a training run computes, and on which data: everything that the bits of a checkpoint depend on.

A step's batch is cut into a fixed number of chunks, whatever the number of ranks. Each chunk has problems and noise of
its own, drawn from the seed, the step and the number of the chunk: any rank can make any chunk, and a restarted run
needs no state of a generator.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard_lab.training.network import Shape
from tokenyard_lab.training.problems import stream
from tokenyard_lab.training.vocabulary import END, PAD, encode, vocabulary

PAD_ID, END_ID = vocabulary()[PAD], vocabulary()[END]
# The shipped model, smaller: for tests, and for runs on a few CPU cores.
SMALL = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=16, top_k=4, expert_width=32)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The model, the data and the optimizer of a run."""

    shape: Shape = SMALL
    seed: int = 6
    steps: int = 200  # of the whole run: the learning rate is zero after them
    batch: int = 16  # sequences of a step, on all ranks together
    chunks: int = 8  # pieces of a batch; a rank takes one or several whole ones
    length: int = 120  # tokens of a sequence; longer problems are left out
    rate: float = 4e-3
    warmup: int = 10  # steps
    balance: float = 0.01  # weight of the load-balancing loss
    noise: float = 0.1  # the most noise on experts' rows, as a share of a row's size
    decay: float = 0.05
    clip: float = 1.0  # the largest norm of all gradients

    def __post_init__(self) -> None:
        if self.batch % self.chunks:
            raise InputError(
                f"a batch of {self.batch} sequences in {self.chunks} chunks",
                expected="chunks of equal size",
                fix="choose a batch that is a multiple of the chunks",
            )

    def rate_at(self, step: int) -> float:
        """The learning rate: a short rise, full for a fifth of the run, then a cosine down to zero."""
        rise = min(1.0, (step + 1) / self.warmup)
        progress = step / self.steps
        return self.rate * rise * 0.5 * (1 + math.cos(math.pi * max(0.0, (progress - 0.2) / 0.8)))

    def as_json(self) -> str:
        """The same text for the same recipe."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A fixed piece of a step's batch: B sequences of S tokens."""

    tokens_BS: Tensor
    starts_B: Tensor  # where each solution starts: the loss counts solutions only
    noise_B: Tensor  # each sequence's noise
    generator: torch.Generator  # draws the noise of each layer, in the order of layers

    @property
    def wanted(self) -> Tensor:
        """Which tokens, but for the first, the loss counts."""
        places = torch.arange(1, self.tokens_BS.shape[1])
        return (places >= self.starts_B[:, None]) & (self.tokens_BS[:, 1:] != PAD_ID)


def draw_chunk(recipe: Recipe, step: int, chunk: int) -> Chunk:
    """The chunk of a step.

    >>> small = Recipe(batch=8, chunks=4)
    >>> chunk = draw_chunk(small, step=3, chunk=1)
    >>> tuple(chunk.tokens_BS.shape), torch.equal(chunk.tokens_BS, draw_chunk(small, step=3, chunk=1).tokens_BS)
    ((2, 120), True)
    """
    text = f"{recipe.seed} {step} {chunk}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    problems = stream("training", seed)
    rows = recipe.batch // recipe.chunks
    tokens_BS = torch.full((rows, recipe.length), PAD_ID)
    starts_B = torch.empty(rows, dtype=torch.int64)
    row = 0
    while row < rows:
        problem = next(problems)
        question = encode(problem.question)
        ids = [*question, *encode(problem.solution), END_ID]
        if len(ids) <= recipe.length:
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
            starts_B[row] = len(question)
            row += 1
    generator = torch.Generator().manual_seed(seed)
    noise_B = torch.rand(rows, generator=generator) * recipe.noise
    return Chunk(tokens_BS=tokens_BS, starts_B=starts_B, noise_B=noise_B, generator=generator)
