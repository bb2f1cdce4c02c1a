"""The routers of the open models: logits in, routes out.

A router scores every expert, chooses k of them per token, and turns the scores of the chosen into weights. Each class
overrides the steps in which its family of models differs; the table in the package docstring compares them.

The choice is a stable sort of each row and not `torch.topk`: with equal scores `topk` promises no order, so
two devices, or two ranks that must agree, could choose different experts. Equal scores are common where
logits come in bf16. The price, on one CPU core for [4096, 256]: 44 ms, where `topk` takes 11. Everything but
the choice is differentiable with respect to the logits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tokenyard.duties import Duty, Party, acting, record
from tokenyard.errors import InputError, shown, unknown_name
from tokenyard.formats.base import ROW_DTYPES, dtype_name, is_matrix, is_tensor
from tokenyard.routing.routes import Routes, is_scaling
from tokenyard.rows import describe

SoftmaxOrder = Literal["softmax_topk", "topk_softmax"]


@dataclass(frozen=True, eq=False)
class Router(ABC):
    """Turns logits into routes. Subclasses are frozen dataclasses: score, choose, weigh.

    Routers without tensors compare by value; those that can hold a bias compare by identity, and their `fields()`
    compare by the values of the bias.
    """

    name: ClassVar[str]  # the name in `ROUTERS`

    top_k: int  # K, the experts that a token chooses
    _: KW_ONLY
    renormalize: bool = True  # whether the weights of a token are divided by their sum
    routed_scaling: float = 1.0  # the factor that the weights are multiplied by, after that

    def __post_init__(self) -> None:
        if not _is_whole(self.top_k):
            raise InputError(
                f"top_k={shown(self.top_k)}", expected="top_k ≥ 1", fix="choose at least one expert"
            )
        if not isinstance(self.renormalize, bool):
            raise InputError(
                f"renormalize={shown(self.renormalize)}",
                expected="True or False",
                fix="pass the model's norm_topk_prob",
            )
        if not is_scaling(self.routed_scaling):
            raise InputError(
                f"routed_scaling={shown(self.routed_scaling)}",
                expected="a positive number",
                fix="pass the model's routed_scaling_factor, or 1.0 where it has none",
            )
        if self._softmax_over_chosen and not self.renormalize:
            raise InputError(
                "renormalize=False with a softmax over the chosen",
                expected="renormalize=True: such weights sum to 1",
                fix="use SoftmaxRouter(order='softmax_topk') for weights that do not sum to 1",
            )

    def __call__(self, logits_TE: Tensor, *, valid_T: Tensor | None = None) -> Routes:
        """Routes for logits in bf16, fp16 or float32. Where `valid_T` is False, no expert takes the token."""
        scores_TE = self._scores(self._checked(logits_TE))
        topk_ids_TK = top_of_row(self._choice_scores(scores_TE), self.top_k)
        weights_TK = self._weights(scores_TE.gather(1, topk_ids_TK))
        if valid_T is not None:
            _check_valid(valid_T, scores_TE)
            padding_T1 = ~valid_T.unsqueeze(1)
            topk_ids_TK = topk_ids_TK.masked_fill(padding_T1, -1)
            weights_TK = weights_TK.masked_fill(padding_T1, 0.0)
        return self._routes(topk_ids_TK, weights_TK)

    def weigh(self, logits_TE: Tensor, topk_ids_TK: Tensor) -> Routes:
        """Routes to experts that were chosen elsewhere (DeepSeek-V4's hash layers look them up by token id).

        Ids may be -1: the weights of a token are renormalized over its other choices.

        >>> logits_TE = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
        >>> routes = SoftmaxRouter(2, renormalize=True).weigh(logits_TE, torch.tensor([[3, 0]]))
        >>> routes.topk_ids_TK.tolist(), [round(w, 3) for w in routes.topk_weights_TK[0].tolist()]
        ([[3, 0]], [0.269, 0.731])
        """
        scores_TE = self._scores(self._checked(logits_TE))
        num_tokens, num_experts = logits_TE.shape
        # The ids are checked before scores are gathered by them. `Routes` needs weights, too: these are placeholders.
        stand_in_TK = torch.empty(topk_ids_TK.shape, device=topk_ids_TK.device)
        Routes(topk_ids_TK=topk_ids_TK, topk_weights_TK=stand_in_TK).check(
            num_experts, top_k=self.top_k, num_tokens=num_tokens, device=logits_TE.device
        )
        chosen_TK = scores_TE.gather(1, topk_ids_TK.long().clamp(min=0))
        absent = -math.inf if self._softmax_over_chosen else 0.0
        return self._routes(topk_ids_TK, self._weights(chosen_TK.masked_fill(topk_ids_TK < 0, absent)))

    def check_experts(self, num_experts: int) -> None:
        """Raise `InputError` unless this router can choose among `num_experts`; needs no tokens."""
        if self.top_k > num_experts:
            raise InputError(
                f"top_k={self.top_k} of {num_experts} experts",
                expected=f"top_k from 1 to {num_experts}",
                fix="give router and layer the numbers of one config",
            )

    def fields(self) -> dict[str, Any]:
        """Plain values for a plan's fingerprint; a tensor is represented by its hash.

        >>> SoftmaxRouter(2, renormalize=True).fields()["order"]
        'softmax_topk'
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {
            key: _hash_of(value) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        return {"name": self.name, **plain}

    def __str__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        shown = [
            f"{name}={describe(value).removeprefix('a tensor ') if isinstance(value, Tensor) else value}"
            for name, value, default in values
            if isinstance(value, Tensor) or value != default
        ]
        return f"{self.name}({', '.join(shown)})"

    @abstractmethod
    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Each expert's score, in float32; the weights are made of these."""

    def _choice_scores(self, scores_TE: Tensor) -> Tensor:
        """The scores by which experts are chosen: those of `_scores`, unless the family has a bias or groups."""
        return scores_TE

    @property
    def _softmax_over_chosen(self) -> bool:
        """Whether the scores are the logits, and the weights are a softmax over those of the chosen experts."""
        return False

    def _weights(self, chosen_TK: Tensor) -> Tensor:
        """The routing weights, from the scores of the chosen experts."""
        if self._softmax_over_chosen:
            chosen_TK = chosen_TK.softmax(dim=1)
        elif self.renormalize:
            # Sigmoids of a row can all be 0 in float32: the tiny number avoids 0 / 0, and does not change any
            # other sum, where it is below the rounding error.
            chosen_TK = chosen_TK / (chosen_TK.sum(dim=1, keepdim=True) + 1e-20)
        if self.routed_scaling == 1.0:
            return chosen_TK
        with acting(Party.ROUTER):
            record(Duty.ROUTED_SCALING, chosen_TK.shape[0])
        return chosen_TK * self.routed_scaling

    def _routes(self, topk_ids_TK: Tensor, weights_TK: Tensor) -> Routes:
        ids_TK = topk_ids_TK.to(torch.int32)
        return Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, scaled_by=self.routed_scaling)

    def _checked(self, logits_TE: Tensor) -> Tensor:
        if not is_matrix(logits_TE) or logits_TE.dtype not in ROW_DTYPES:
            raise InputError(
                f"logits_TE is {describe(logits_TE)}",
                expected=f"a matrix [T, E] of {', '.join(map(dtype_name, ROW_DTYPES))}",
                fix="flatten the batch with logits.reshape(-1, num_experts), in one of these dtypes",
            )
        self.check_experts(logits_TE.shape[1])
        return logits_TE.float()


def rounded_once(function: Callable[[Tensor], Tensor], logits_TE: Tensor) -> Tensor:
    """Apply an elementwise function in float64 and round to float32, so that scores do not depend on the batch.

    In float32 the last bit would depend on it: on a CPU torch computes full vector registers with other instructions
    than the elements left over at the end. In float64 the last bit differs as well, but after rounding to float32 the
    difference is visible in only one number in 10^8.
    """
    return function(logits_TE.double()).float()


@dataclass(frozen=True)
class SoftmaxRouter(Router):
    """Mixtral, Qwen, OLMoE: softmax over all experts, the top k of it, renormalized to sum 1 or not.

    `order="topk_softmax"` takes the top k of the logits first and the softmax over these; the weights then
    sum to 1 by themselves, so `renormalize=False` is refused.

    >>> routes = SoftmaxRouter(2, renormalize=True)(torch.tensor([[0.0, 2.0, 1.0, -1.0]]))
    >>> routes.topk_ids_TK.tolist(), [round(w, 3) for w in routes.topk_weights_TK[0].tolist()]
    ([[1, 2]], [0.731, 0.269])
    >>> print(SoftmaxRouter(8, renormalize=False))
    softmax(top_k=8, renormalize=False)
    """

    name: ClassVar[str] = "softmax"

    # No default: models of this family differ, and a wrong value goes unnoticed, because tokens still look plausible.
    renormalize: bool = field(kw_only=True)
    # which comes first: the softmax over all experts, or the choice
    order: SoftmaxOrder = field(default="softmax_topk", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.order, str) or self.order not in get_args(SoftmaxOrder):
            raise unknown_name("order", self.order, get_args(SoftmaxOrder))
        super().__post_init__()

    @property
    def _softmax_over_chosen(self) -> bool:
        return self.order == "topk_softmax"

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE if self._softmax_over_chosen else logits_TE.softmax(dim=1)


@dataclass(frozen=True)
class TopLogitsRouter(Router):
    """gpt-oss: the top k of the logits, softmax over these.

    The bias of gpt-oss is part of the linear layer that makes the logits: it moves choice *and* weight, and
    is in the logits already when they arrive here.

    >>> routes = TopLogitsRouter(2)(torch.tensor([[0.0, 2.0, 1.0, -1.0]]))
    >>> routes.topk_ids_TK.tolist(), [round(w, 3) for w in routes.topk_weights_TK[0].tolist()]
    ([[1, 2]], [0.731, 0.269])
    """

    name: ClassVar[str] = "top_logits"

    @property
    def _softmax_over_chosen(self) -> bool:
        return True

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE


@dataclass(frozen=True, eq=False)
class BiasedRouter(Router):
    """Routers that choose experts by score + bias (DeepSeek's `e_score_correction_bias`), and weight by score alone."""

    # float32, added to the scores for the choice
    choice_bias_E: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        bias_E = self.choice_bias_E
        if bias_E is None:
            return
        if not is_tensor(bias_E, shape=(None,), dtypes=(torch.float32,)):
            raise InputError(
                f"choice_bias_E is {describe(bias_E)}",
                expected="None, or float32[E]: in fewer bits it would choose other experts",
                fix="pass the checkpoint's bias with .float()",
            )

    def check_experts(self, num_experts: int) -> None:
        super().check_experts(num_experts)
        if self.choice_bias_E is not None and self.choice_bias_E.shape[0] != num_experts:
            raise InputError(
                f"choice_bias_E holds {self.choice_bias_E.shape[0]} values for {num_experts} experts",
                expected=f"float32[{num_experts}], one value per expert",
                fix="pass the bias of this layer, for all experts and not only those of one rank",
            )

    def _choice_scores(self, scores_TE: Tensor) -> Tensor:
        if self.choice_bias_E is None:
            return scores_TE
        if self.choice_bias_E.device != scores_TE.device:
            raise InputError(
                f"choice_bias_E is on {self.choice_bias_E.device}, the logits are on {scores_TE.device}",
                expected="both on one device",
                fix="make the router with the bias on the device of the logits",
            )
        return scores_TE + self.choice_bias_E


@dataclass(frozen=True, eq=False)
class GroupedSigmoidRouter(BiasedRouter):
    """DeepSeek-V3: experts form groups; the best groups are chosen first, then experts within them.

    The score of a group is the sum of its two best biased scores. `num_groups=1` means no grouping.

    >>> router = GroupedSigmoidRouter(1, num_groups=2, topk_groups=1, routed_scaling=2.5)
    >>> routes = router(torch.tensor([[3.0, -9.0, 2.0, 2.0]]))  # expert 0 is the best, group 1 is better
    >>> routes.topk_ids_TK.tolist(), routes.topk_weights_TK.tolist(), routes.scaled_by
    ([[2]], [[2.5]], 2.5)
    """

    name: ClassVar[str] = "grouped_sigmoid"

    num_groups: int = field(default=1, kw_only=True)  # groups of experts, of one size; 1: no groups
    topk_groups: int = field(default=1, kw_only=True)  # groups that a token may choose experts from

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, chosen = self.num_groups, self.topk_groups
        if not (_is_whole(groups) and _is_whole(chosen) and chosen <= groups):
            raise InputError(
                f"topk_groups={shown(chosen)} of num_groups={shown(groups)}",
                expected="1 ≤ topk_groups ≤ num_groups",
                fix="pass the config's topk_group and n_group",
            )

    def check_experts(self, num_experts: int) -> None:
        super().check_experts(num_experts)
        if num_experts % self.num_groups:
            raise InputError(
                f"{num_experts} experts in {self.num_groups} groups",
                expected="groups of one size",
                fix="choose num_groups that divides the number of experts",
            )
        eligible = num_experts // self.num_groups * self.topk_groups
        if self.top_k > eligible:
            raise InputError(
                f"top_k={self.top_k} of the {eligible} experts in {self.topk_groups} chosen groups",
                expected=f"top_k from 1 to {eligible}",
                fix="choose more groups (topk_groups), or fewer experts",
            )

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return rounded_once(torch.sigmoid, logits_TE)

    def _choice_scores(self, scores_TE: Tensor) -> Tensor:
        biased_TE = super()._choice_scores(scores_TE)
        if self.topk_groups == self.num_groups:
            return biased_TE
        num_tokens, num_experts = biased_TE.shape
        members = num_experts // self.num_groups
        grouped_TGM = biased_TE.reshape(num_tokens, self.num_groups, members)  # G groups of M members
        group_score_TG = grouped_TGM.topk(min(2, members), dim=2).values.sum(dim=2)
        chosen_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
        chosen_TG = chosen_TG.scatter(1, top_of_row(group_score_TG, self.topk_groups), True)
        return grouped_TGM.masked_fill(~chosen_TG.unsqueeze(2), -math.inf).flatten(1)


@dataclass(frozen=True, eq=False)
class SqrtSoftplusRouter(BiasedRouter):
    """DeepSeek-V4: scores are √softplus(logit), where softplus(x) is x itself above 20.

    >>> routes = SqrtSoftplusRouter(2, routed_scaling=1.5)(torch.tensor([[25.0, 0.0, 36.0, -2.0]]))
    >>> routes.topk_ids_TK.tolist(), [round(w, 3) for w in routes.topk_weights_TK[0].tolist()]
    ([[2, 0]], [0.818, 0.682])
    """

    name: ClassVar[str] = "sqrt_softplus"

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return rounded_once(lambda exact_TE: softplus(exact_TE, threshold=20.0).sqrt(), logits_TE)


# The routers by name.
ROUTERS: dict[str, type[Router]] = {
    router.name: router
    for router in (SoftmaxRouter, TopLogitsRouter, GroupedSigmoidRouter, SqrtSoftplusRouter)
}


def router_class(name: str) -> type[Router]:
    """The router of that name.

    >>> router_class("top_logits")(top_k=4).top_k
    4
    """
    if not isinstance(name, str) or name not in ROUTERS:
        raise unknown_name("router", name, ROUTERS)
    return ROUTERS[name]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def top_of_row(scores_TE: Tensor, k: int) -> Tensor:
    """The columns of the k highest values of each row, highest first; equal values in column order.

    NaN counts as higher than any number.

    >>> top_of_row(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3).tolist()
    [[1, 2, 3]]
    """
    return scores_TE.sort(dim=1, descending=True, stable=True).indices[:, :k]


def _check_valid(valid_T: Tensor, scores_TE: Tensor) -> None:
    if not is_tensor(valid_T, shape=scores_TE.shape[:1], dtypes=(torch.bool,), device=scores_TE.device):
        raise InputError(
            f"valid_T is {describe(valid_T, device=True)}",
            expected=f"bool[{scores_TE.shape[0]}] on {scores_TE.device}: one value per token",
            fix="pass attention_mask.bool().reshape(-1), on the device of the logits",
        )


def _hash_of(tensor: Tensor) -> dict[str, Any]:
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}
