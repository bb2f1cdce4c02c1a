"""Routes, routers and placements: which experts take each token, and which ranks own them.

*Routes* say which experts take each token and with what weight: two tensors, which a layer checks. A router turns
logits into routes. A router of your own only has to return `Routes`. The routers here are those of the open models:

    router            score of an expert     chosen by                 weight
    softmax           softmax(logits)        score                     score, renormalized or not
      topk_softmax    logit                  logit                     softmax over the chosen
    top_logits        logit                  logit                     softmax over the chosen
    grouped_sigmoid   sigmoid(logits)        score + bias, in the      score, renormalized, × scaling
                                             best groups
    sqrt_softplus     √softplus(logits)      score + bias              score, renormalized, × scaling

Mixtral, Qwen and OLMoE are softmax; gpt-oss is top_logits (its bias belongs to the linear layer that makes
the logits); DeepSeek-V3 is grouped_sigmoid; DeepSeek-V4 is sqrt_softplus.

Rules that all of them keep:

- Everything is computed in float32, whatever the dtype of the logits. Ids come out as int32 (an expert id
  needs no more, and they travel), weights as float32.
- Ties go to the lowest expert id, on every device: the choice is a *stable* sort of each row, because
  `torch.topk` promises no order. Rows are short (E ≤ 512 in the models above).
- A bias changes which experts are chosen, never their weights.
- `Routes.scaled_by` says which routed scaling factor the weights hold, so that it is applied exactly once.
- A row of NaN (a padding token) gives ids in range and NaN weights, not a crash. `valid_T` turns the routes
  of padding tokens into id -1, weight 0: such a row is sent nowhere.

Whether the weight is applied on an expert's input or on its output is the experts' business.
"""

from tokenyard.routing.balancing import Move, balance, imbalance, moves, rank_loads
from tokenyard.routing.placement import PLACEMENTS, Placement, placement_for
from tokenyard.routing.routers import (
    ROUTERS,
    GroupedSigmoidRouter,
    Router,
    SoftmaxRouter,
    SqrtSoftplusRouter,
    TopLogitsRouter,
    router_class,
)
from tokenyard.routing.routes import Routes, is_scaling

__all__ = [
    "PLACEMENTS",
    "ROUTERS",
    "GroupedSigmoidRouter",
    "Move",
    "Placement",
    "Router",
    "Routes",
    "SoftmaxRouter",
    "SqrtSoftplusRouter",
    "TopLogitsRouter",
    "balance",
    "imbalance",
    "is_scaling",
    "moves",
    "placement_for",
    "rank_loads",
    "router_class",
]
