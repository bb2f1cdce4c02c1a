"""Losses that spread tokens over experts, and biases that do so without a loss.

The losses are those of a whole batch, whatever ranks hold its tokens:

    balance loss    E · Σ_e (C_e / T) · (Σ_t p_te / T)        C_e  choices that fell on expert e
    z loss          Σ_t logsumexp(logits_t)² / T              p_te the token's probability for it, T tokens

Only the sums over tokens t have gradients. Their terms belong to the rank that holds the token, and C and T are
integers that all ranks know (`batch_load`). A rank's share of a loss is therefore computed without further
communication, the shares of all ranks add up to the loss, and the gradient of a token's logits has the same bits on any
number of ranks.

A token all of whose ids are -1 is padding. It counts nowhere, and its logits may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.errors import InputError, shown, unknown_name
from tokenyard.formats.base import ROW_DTYPES, is_matrix, is_tensor
from tokenyard.group import Group
from tokenyard.routing import Routes
from tokenyard.rows import describe

Scores = Literal["softmax", "sigmoid", "sqrt_softplus"]

# The scores of routers by name, which are divided by their sum to become probabilities.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.softmax(dim=1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits_TE: functional.softplus(logits_TE).sqrt(),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLoad:
    """How many choices of a batch fell on each expert, and its number of tokens. Padding counts nowhere.

    Loads of micro batches can be added: `first + second` is the load of both together.
    """

    choices_E: Tensor  # int64[E], the choices that fell on each expert
    tokens: Tensor  # int64[], the tokens that are no padding

    def __add__(self, other: BatchLoad) -> BatchLoad:
        return BatchLoad(choices_E=self.choices_E + other.choices_E, tokens=self.tokens + other.tokens)


def batch_load(routes: Routes, num_experts: int, group: Group | None = None) -> BatchLoad:
    """The load of a batch whose tokens the ranks of `group` hold, or this rank alone. Collective over the group.

    Where data-parallel ranks outside of the plan's group hold tokens of the batch, pass a group of all of them.

    >>> routes = Routes(topk_ids_TK=torch.tensor([[0, 2], [2, 1], [-1, -1]]), topk_weights_TK=torch.ones(3, 2))
    >>> load = batch_load(routes, 4)
    >>> load.choices_E.tolist(), int(load.tokens)
    ([1, 1, 2, 0], 2)
    """
    if not (group is None or isinstance(group, Group)):
        raise InputError(
            f"the group is {shown(group)}",
            expected="a Group of the ranks that hold tokens of the batch, or None for this rank alone",
            fix="pass plan.group; of a process group make DistributedGroup(process_group) once, before the first step",
        )
    # On GPUs the host would have to wait for the ids; the layer checks them there.
    routes.check(num_experts, scaled_by=routes.scaled_by, values=not routes.topk_ids_TK.is_cuda)
    ids_TK = routes.topk_ids_TK
    # One more place takes the choices of nobody.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    flat = ids_TK.reshape(-1).long()
    counts.scatter_add_(0, torch.where(flat < 0, num_experts, flat), torch.ones_like(flat))
    counts[-1] = _is_token(ids_TK).sum()
    if group is not None:
        gathered = group.all_gather(counts.view(torch.uint8), phase="adding up the load of a batch")
        counts = gathered.view(torch.int64).sum(dim=0)
    return BatchLoad(choices_E=counts[:-1], tokens=counts[-1])


def balance_loss(logits_TE: Tensor, routes: Routes, load: BatchLoad, *, scores: Scores = "softmax") -> Tensor:
    """This rank's share of the load-balancing loss of a batch, float32: the loss of Switch and GShard.

    The loss is E · Σ_e (choices of e / tokens) · (mean probability of e), as Transformers' `router_aux_loss_coef`
    multiplies it: K if choices and probabilities are even. `load` is the batch's: its denominators make a rank's value
    the share of a sum, and never a mean of means. `scores` is what the router makes of its logits; they are divided by
    their sum to become probabilities. The loss is returned, and nothing is attached to the layer.

    >>> logits_TE = torch.zeros(2, 4)
    >>> routes = Routes(topk_ids_TK=torch.tensor([[0, 1], [2, 3]]), topk_weights_TK=torch.ones(2, 2))
    >>> balance_loss(logits_TE, routes, batch_load(routes, 4))
    tensor(2.)
    """
    if not isinstance(scores, str) or scores not in _SCORES:
        raise unknown_name("scores", scores, _SCORES)
    is_token_T = _check(logits_TE, routes, load)
    scores_TE = _SCORES[scores](_without_padding(logits_TE, is_token_T))
    probabilities_TE = scores_TE / scores_TE.sum(dim=1, keepdim=True)
    tokens = load.tokens.clamp(min=1).double()  # of no tokens, the loss is 0
    weight_E = load.choices_E.double() * logits_TE.shape[1] / (tokens * tokens)
    return _sum((probabilities_TE * weight_E.float()).sum(dim=1), is_token_T)


def z_loss(logits_TE: Tensor, routes: Routes, load: BatchLoad) -> Tensor:
    """This rank's share of the batch's mean of logsumexp(logits)², float32: it keeps logits small (ST-MoE).

    >>> logits_TE = torch.zeros(2, 4)
    >>> routes = Routes(topk_ids_TK=torch.tensor([[0], [-1]]), topk_weights_TK=torch.ones(2, 1))
    >>> round(float(z_loss(logits_TE, routes, batch_load(routes, 4))), 4)  # of one token: log(4)²
    1.9218
    """
    is_token_T = _check(logits_TE, routes, load)
    squares_T = _without_padding(logits_TE, is_token_T).logsumexp(dim=1).square()
    return _sum(squares_T / load.tokens.clamp(min=1).float(), is_token_T)


@torch.no_grad()
def update_bias(bias_E: Tensor | None, choices_E: Tensor | Sequence[int], rate: float) -> None:
    """Move a router's bias, in place, so that idle experts are chosen more often: DeepSeek-V3's balance without a loss.

    The bias of an expert with fewer choices than the mean rises by `rate`, that of one with more falls by it. Call it
    after the optimizer's step, on every rank, with the choices of the whole batch (`BatchLoad.choices_E`,
    `plan.load()`): all ranks then hold the same bits.

    >>> bias_E = torch.zeros(3)
    >>> update_bias(bias_E, [4, 1, 1], rate=0.5)
    >>> bias_E
    tensor([-0.5000,  0.5000,  0.5000])
    """
    if bias_E is None or not is_tensor(bias_E, shape=(None,), dtypes=(torch.float32,)):
        raise InputError(
            f"bias_E is {describe(bias_E)}",
            expected="float32[E]: the router's choice_bias_E, which is changed in place",
            fix="give the router one: GroupedSigmoidRouter(k, choice_bias_E=torch.zeros(num_experts))",
        )
    found_E = torch.as_tensor(choices_E, device=bias_E.device)
    if found_E.shape != bias_E.shape or found_E.is_floating_point():
        raise InputError(
            f"the choices are {describe(found_E)}",
            expected=f"{bias_E.shape[0]} whole numbers: the choices of the batch that fell on each expert",
            fix="pass batch_load(...).choices_E, or plan.load()[layer]",
        )
    # Integers: the sign of (mean - choices) is exact, and the same on every rank.
    bias_E += rate * torch.sign(found_E.sum() - found_E.long() * len(found_E)).float()


def _is_token(ids_TK: Tensor) -> Tensor:
    """Which rows are tokens: those of padding have ids of -1 only."""
    return (ids_TK >= 0).any(dim=1)


def _without_padding(logits_TE: Tensor, is_token_T: Tensor) -> Tensor:
    """The logits in float32, zeros for padding: a NaN there reaches neither the loss nor a gradient."""
    return logits_TE.float().masked_fill(~is_token_T.unsqueeze(1), 0.0)


def _sum(terms_T: Tensor, is_token_T: Tensor) -> Tensor:
    # In float64: the share of a rank with many tokens is as exact as that of one with few.
    return terms_T.masked_fill(~is_token_T, 0.0).double().sum().float()


def _check(logits_TE: Tensor, routes: Routes, load: BatchLoad) -> Tensor:
    """Which rows are tokens; raises unless logits, routes and load are those of one batch."""
    if not is_matrix(logits_TE) or logits_TE.dtype not in ROW_DTYPES:
        raise InputError(
            f"logits_TE is {describe(logits_TE)}",
            expected="a matrix [T, E] of the router's logits, in float32, bf16 or fp16",
            fix="flatten the batch with logits.reshape(-1, num_experts); pass logits, and no probabilities",
        )
    num_tokens, num_experts = logits_TE.shape
    routes.check(
        num_experts,
        num_tokens=num_tokens,
        scaled_by=routes.scaled_by,
        device=logits_TE.device,
        values=not logits_TE.is_cuda,
    )
    if not isinstance(load, BatchLoad) or len(load.choices_E) != num_experts:
        raise InputError(
            f"the load is {shown(load) if not isinstance(load, BatchLoad) else describe(load.choices_E)}",
            expected=f"the load of the batch that these routes belong to, over {num_experts} experts",
            fix="pass load=batch_load(routes, num_experts, group), with a group of all ranks that hold tokens of it",
        )
    is_token_T = _is_token(routes.topk_ids_TK)
    # On GPUs the host would have to wait for the numbers.
    if not logits_TE.is_cuda and int(is_token_T.sum()) > int(load.tokens):
        raise InputError(
            f"the load is of {int(load.tokens)} tokens, and this rank has {int(is_token_T.sum())}",
            expected="the load of a batch that holds the tokens of this rank",
            fix="compute the load from the routes of the same batch",
        )
    return is_token_T
