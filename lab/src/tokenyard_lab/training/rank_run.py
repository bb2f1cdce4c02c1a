"""The training run of one rank, whose results have the same bits on any number of ranks.

What depends on the number of ranks, and how it is kept out of the bits:

- *Batch shapes.* A product may round otherwise for another number of rows. Dense layers compute chunk by chunk, and
  chunks have one size; an expert has all its rows on one rank, in the order of tokens, however many ranks there are.
- *Sums over tokens.* Each chunk has leaves of its own for the dense parameters, which share their memory. The gradients
  of all chunks are gathered, and summed in the order of chunks. Experts' gradients are sums over all tokens already.
- *Sums of a token's experts.* `sum="choices"`: in the order of choices, at home.
- *Denominators* are counts of the whole batch; norms are sums of one number per parameter and expert, in a fixed order.
- *Random numbers* belong to chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tokenyard.errors import InputError
from tokenyard.group import Group
from tokenyard_lab.training.checkpoints import State, digest, load_state, newest, save_state
from tokenyard_lab.training.expert_layers import AllToAllExperts, ExpertLayers, How, YardExperts
from tokenyard_lab.training.network import (
    Parameters,
    attention_block,
    choose_experts,
    disturb,
    initialize,
    rms_norm,
    rotations,
    save,
)
from tokenyard_lab.training.recipe import Chunk, Recipe, draw_chunk

BETAS = (0.9, 0.98)


class RankRun:
    """The model on one rank: all dense parameters, and this rank's experts. All ranks make the same calls."""

    def __init__(
        self, group: Group, recipe: Recipe, how: How = "choices", state: State | None = None
    ) -> None:
        if recipe.chunks % group.size or recipe.shape.experts % group.size:
            raise InputError(
                f"{group.size} ranks for {recipe.chunks} chunks and {recipe.shape.experts} experts",
                expected="a number of ranks that divides both",
                fix="choose 1, 2, 4 or 8 ranks",
            )
        self._group, self._recipe, self._how = group, recipe, how
        here = recipe.chunks // group.size
        self._chunks = range(group.rank * here, (group.rank + 1) * here)
        shape = recipe.shape
        everything = state.parameters if state else initialize(shape, torch.device("cpu"), recipe.seed)
        everything = {name: value.detach() for name, value in everything.items()}
        self._experts: ExpertLayers
        if how == "all_to_all":
            self._experts = AllToAllExperts(group, shape, everything)
        else:
            tokens = here * recipe.batch // recipe.chunks * recipe.length
            self._experts = YardExperts(group, shape, everything, tokens, how=how)
        local = shape.experts // group.size
        self._owned = slice(group.rank * local, (group.rank + 1) * local)
        self._dense = {
            name: everything[name].clone() for name in sorted(everything.keys() - self._experts.parameters)
        }
        trained = {**self._dense, **self._experts.parameters}
        matrices = [value for value in trained.values() if value.dim() > 1]
        vectors = [value for value in trained.values() if value.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=BETAS, foreach=False, fused=False)
        self.step = 0
        if state is not None:
            self._restore(state)

    def train(self, until: int) -> Iterator[tuple[int, float]]:
        """Train up to a step; yields the number of each step and its loss."""
        while self.step < until:
            loss = self._train_step()
            self.step += 1
            yield self.step, loss

    def _train_step(self) -> float:
        recipe, group = self._recipe, self._group
        chunks = [draw_chunk(recipe, self.step, number) for number in self._chunks]
        wanted = sum(group.gather_json(int(sum(chunk.wanted.sum() for chunk in chunks)), phase="tokens"))
        # torch's usual way computes all sequences of a rank at once.
        pieces = [chunks] if self._how == "all_to_all" else [[chunk] for chunk in chunks]
        leaves = [{name: p.detach().requires_grad_() for name, p in self._dense.items()} for _ in pieces]
        losses, uneven = self._forward(leaves, pieces)
        mean = torch.cat(losses) / wanted
        (mean.sum() + recipe.balance / recipe.chunks * torch.cat(uneven).sum()).backward()
        self._set_dense_gradients(leaves)
        self._clip()
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = recipe.rate_at(self.step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        by_rank = group.gather_json(mean.tolist(), phase="losses")
        loss = float(sum(chain.from_iterable(by_rank)))
        if not math.isfinite(loss):
            raise ValueError(f"step {self.step}: the loss is {loss}")
        return loss

    def _forward(
        self, leaves: list[Parameters], pieces: list[list[Chunk]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The summed loss of each chunk, and how unevenly its tokens went to experts (1 is even)."""
        shape = self._recipe.shape
        tokens = [torch.cat([chunk.tokens_BS for chunk in piece]) for piece in pieces]
        noises = [torch.cat([chunk.noise_B for chunk in piece]) for piece in pieces]
        noises = [noise.repeat_interleave(self._recipe.length)[:, None] for noise in noises]
        turns = rotations(torch.arange(self._recipe.length), shape, torch.float32)
        rows = [
            weights["model.embed_tokens.weight"][ids] for weights, ids in zip(leaves, tokens, strict=True)
        ]
        uneven = [torch.zeros(len(piece)) for piece in pieces]
        for layer in range(shape.layers):
            at = f"model.layers.{layer}"
            seen, ids, top = [], [], []
            for index, (weights, piece) in enumerate(zip(leaves, pieces, strict=True)):
                rows[index] = attention_block(weights, at, rows[index], shape, turns)
                norm = weights[f"{at}.post_attention_layernorm.weight"]
                x_TH = rms_norm(rows[index], norm, shape.eps).flatten(0, 1)
                probabilities_TE, ids_TK, top_TK = choose_experts(weights, f"{at}.mlp", x_TH, shape)
                uneven[index] = (
                    uneven[index] + _unevenness(probabilities_TE, ids_TK, len(piece)) / shape.layers
                )
                drawn = [
                    torch.randn(len(x_TH) // len(piece), shape.hidden, generator=chunk.generator)
                    for chunk in piece
                ]
                seen.append(disturb(x_TH, noises[index], torch.cat(drawn)))
                ids.append(ids_TK)
                top.append(top_TK)
            # One call of the layer for all chunks of this rank: an expert's products have the rows of the whole batch.
            out_TH = self._experts(layer, torch.cat(seen), torch.cat(ids), torch.cat(top))
            sums = out_TH.split([len(x_TH) for x_TH in seen])
            rows = [x + out.view_as(x) for x, out in zip(rows, sums, strict=True)]
        losses = [
            _losses(rms_norm(x, weights["model.norm.weight"], shape.eps), weights, piece)
            for x, weights, piece in zip(rows, leaves, pieces, strict=True)
        ]
        return losses, uneven

    def _set_dense_gradients(self, leaves: list[Parameters]) -> None:
        """Sum the dense gradients of all chunks, in the order of chunks."""
        of_pieces = [[_gradient(piece[name]).flatten() for name in self._dense] for piece in leaves]
        flat = torch.stack([torch.cat(gradients) for gradients in of_pieces])
        if self._how == "all_to_all":
            (total,) = flat
            dist.all_reduce(total)
        else:
            by_rank = self._group.all_gather(flat.view(torch.uint8).flatten(), phase="dense gradients")
            total, *others = by_rank.view(torch.float32).view(self._recipe.chunks, -1)
            for gradient in others:
                total = total + gradient
        sizes = [value.numel() for value in self._dense.values()]
        for value, gradient in zip(self._dense.values(), total.split(sizes), strict=True):
            value.grad = gradient.view_as(value)

    def _clip(self) -> None:
        """Bound the norm of all gradients, of all ranks' experts too."""
        of_rank = [[_square(expert) for expert in _gradient(p)] for p in self._experts.parameters.values()]
        by_rank = self._group.gather_json(of_rank, phase="norms")
        squares = [square for of_ranks in zip(*by_rank, strict=True) for square in chain(*of_ranks)]
        squares += [_square(_gradient(value)) for value in self._dense.values()]
        norm = math.sqrt(sum(squares))
        if norm > self._recipe.clip:
            for value in (*self._dense.values(), *self._experts.parameters.values()):
                _gradient(value).mul_(self._recipe.clip / norm)

    def state(self) -> State:
        """All parameters, with their moments, on every rank. Collective."""
        kinds: tuple[Parameters, Parameters, Parameters] = ({}, {}, {})
        for name, value in {**self._dense, **self._experts.parameters}.items():
            moments = self._optimizer.state[value]
            for kind, tensor in zip(kinds, (value, moments["exp_avg"], moments["exp_avg_sq"]), strict=True):
                kind[name] = tensor.detach().clone()
                if name not in self._dense:
                    bytes_of_rank = kind[name].view(torch.uint8).flatten()
                    of_all = self._group.all_gather(bytes_of_rank, phase="checkpoint")
                    kind[name] = of_all.view(torch.float32).view(-1, *value.shape[1:])
        return State(self._recipe.as_json(), self.step, *kinds)

    def _restore(self, state: State) -> None:
        for name, value in {**self._dense, **self._experts.parameters}.items():
            part = slice(None) if name in self._dense else self._owned
            self._optimizer.state[value] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": state.first[name][part].clone(),
                "exp_avg_sq": state.second[name][part].clone(),
            }
        self.step = state.step


def train_rank(
    group: Group, recipe: Recipe, how: How, out: Path, until: int, every: int = 0, show: bool = False
) -> list[float]:
    """The job of a rank: go on from the newest checkpoint in `out` up to a step. Returns the losses.

    A checkpoint is written at the end, and every `every` steps. With `show`, rank 0 prints losses and checkpoints.
    """
    found = newest(out)
    run = RankRun(group, recipe, how, None if found is None else load_state(found, recipe))
    leads = group.rank == 0
    show = show and leads
    if show and found is not None:
        print(f"goes on from {found}", flush=True)
    losses = []
    for step, loss in run.train(until):
        losses.append(loss)
        if show:
            print(f"step {step}: loss {loss:.6f}", flush=True)
        if step == until or (every and step % every == 0):
            state = run.state()
            path = save_state(state, out) if leads else None
            if show and path is not None:
                print(f"{digest(path)}  {path}", flush=True)
            if leads and step == recipe.steps:
                save(state.parameters, recipe.shape, out / "model")
    return losses


def _losses(x_BSH: Tensor, weights: Parameters, piece: list[Chunk]) -> Tensor:
    """The sum of the losses of each chunk's tokens."""
    logits = functional.linear(x_BSH, weights["model.embed_tokens.weight"])[:, :-1]
    tokens_BS = torch.cat([chunk.tokens_BS for chunk in piece])
    wanted = torch.cat([chunk.wanted for chunk in piece])
    each = functional.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="none")
    return (each * wanted.flatten()).view(len(piece), -1).sum(1)


def _unevenness(probabilities_TE: Tensor, ids_TK: Tensor, chunks: int) -> Tensor:
    """The load-balancing loss of each chunk: 1 if its tokens are spread evenly over experts."""
    experts = probabilities_TE.shape[1]
    probability_CE = probabilities_TE.view(chunks, -1, experts).mean(1)
    counts = [ids.flatten().bincount(minlength=experts) for ids in ids_TK.chunk(chunks)]
    share_CE = torch.stack(counts).float() / (ids_TK.numel() // chunks)
    return experts * (share_CE * probability_CE).sum(1)


def _gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient; every parameter has one, of zeros if no token came to it."""
    assert parameter.grad is not None
    return parameter.grad


def _square(gradient: Tensor) -> float:
    return float(gradient.double().pow(2).sum())
