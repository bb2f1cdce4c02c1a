"""Routes: which experts take each token, with what weight, and the check that they fit a layer.

A wrong id reads beyond a table, a wrong K shifts a payload, and a scaling factor that is applied twice only lowers the
accuracy. Such mistakes show up far from where they were made, so all are checked before anything is moved. The check is
one pass over the ids (a minimum and a maximum) and comparisons of shapes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenyard.errors import InputError, shown
from tokenyard.formats.base import dtype_name, is_matrix, same_device
from tokenyard.rows import describe

ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


# The most ids whose range is computed in Python: for so few, an operation of torch takes longer.
_FEW_IDS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Which experts take each token, and with what weight.

    `topk_ids_TK` (int32 or int64) holds global expert ids; -1 is no expert, and the weight beside it means
    nothing (it may be NaN). `topk_weights_TK` is float32 or bf16. `scaled_by` is the routed scaling factor
    that the weights hold *already*.

    >>> routes = Routes(topk_ids_TK=torch.tensor([[5, 2], [0, -1]]), topk_weights_TK=torch.ones(2, 2))
    >>> routes.num_tokens, routes.top_k
    (2, 2)
    >>> routes.check(num_experts=8, top_k=2)
    >>> routes.check(num_experts=4)
    Traceback (most recent call last):
    ...
    tokenyard.errors.InputError: topk_ids_TK holds id 5 (token 0, choice 0); expected ids from 0 to 3, or -1 \
for no expert; fix: pass global expert ids of this layer, and -1 for padding
    """

    topk_ids_TK: Tensor  # int32 or int64: global ids of experts; -1 is no expert
    topk_weights_TK: Tensor  # float32 or bf16: the routing weights
    scaled_by: float = 1.0  # the routed scaling factor that the weights hold already

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return self.topk_ids_TK.shape[0]

    @property
    def top_k(self) -> int:
        """K, the number of choices per token."""
        return self.topk_ids_TK.shape[1]

    def to(self, device: torch.device | str) -> Routes:
        """These routes on a device."""
        return replace(
            self, topk_ids_TK=self.topk_ids_TK.to(device), topk_weights_TK=self.topk_weights_TK.to(device)
        )

    def of_tokens(self, tokens: slice) -> Routes:
        """The routes of some of the tokens, as views."""
        ids_TK, weights_TK = self.topk_ids_TK[tokens], self.topk_weights_TK[tokens]
        return replace(self, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)

    def without(self, dropped_TK: Tensor, *, renormalize: bool) -> Routes:
        """These routes with the choices in `dropped_TK` set to -1, so that no expert takes them.

        With `renormalize`, a token's remaining weights are scaled up to the sum that all its weights had.
        """
        ids_TK = self.topk_ids_TK.masked_fill(dropped_TK, -1)
        weights_TK = self.topk_weights_TK
        if renormalize:
            there = weights_TK.float().masked_fill(self.topk_ids_TK < 0, 0.0)
            left = there.masked_fill(dropped_TK, 0.0).sum(dim=1, keepdim=True)
            scale = torch.where(left > 0, there.sum(dim=1, keepdim=True) / left, 1.0)
            weights_TK = (weights_TK.float() * scale).to(weights_TK.dtype)
        return replace(self, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)

    def check(
        self,
        num_experts: int,
        *,
        top_k: int | None = None,
        num_tokens: int | None = None,
        scaled_by: float = 1.0,
        device: torch.device | str | None = None,
        values: bool = True,
    ) -> None:
        """Raise `InputError` unless these routes fit a layer of `num_experts` experts.

        `scaled_by` is the factor that the layer expects in the weights. `values=False` skips the range of the
        ids, the only check for which the host waits for a GPU (and which cannot be part of a CUDA graph).
        """
        self._check_tensors()
        tokens, choices = self.topk_ids_TK.shape
        if top_k is not None and choices != top_k:
            raise InputError(
                f"the routes hold {choices} choices per token",
                expected=f"{top_k}, as the layer declares",
                fix="give router and layer the same top_k; fill unused choices with id -1",
            )
        if num_tokens is not None and tokens != num_tokens:
            raise InputError(
                f"the routes hold {tokens} tokens",
                expected=f"{num_tokens}, one row of routes per row of x_TH",
                fix="route the same batch that is passed to the layer; padding rows get id -1",
            )
        if device is not None and not same_device(self.topk_ids_TK.device, torch.device(device)):
            raise InputError(
                f"the routes are on {self.topk_ids_TK.device}",
                expected=f"{device}, where the rows are",
                fix="run the router on the device of the rows",
            )
        if not (type(self.scaled_by) is float and self.scaled_by == scaled_by == 1.0):
            self._check_scaling(scaled_by)
        if values:
            self._check_ids(num_experts)

    def id_range(self) -> tuple[int, int]:
        """The lowest and the highest id; there must be at least one."""
        ids = self.topk_ids_TK
        if ids.is_cpu and ids.numel() <= _FEW_IDS:
            rows = ids.tolist()
            return min(map(min, rows)), max(map(max, rows))
        # Stacked: one wait for the GPU, not two.
        lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
        return lowest, highest

    def _check_tensors(self) -> None:
        ids, weights = self.topk_ids_TK, self.topk_weights_TK
        for name, tensor, dtypes in (
            ("topk_ids_TK", ids, ID_DTYPES),
            ("topk_weights_TK", weights, WEIGHT_DTYPES),
        ):
            if not is_matrix(tensor) or tensor.dtype not in dtypes:
                allowed = " or ".join(map(dtype_name, dtypes))
                raise InputError(
                    f"{name} is {describe(tensor)}",
                    expected=f"a matrix [T, K] of {allowed}",
                    fix=f"pass one row per token, K choices each, as torch.{dtype_name(dtypes[0])}",
                )
        if ids.shape != weights.shape:
            raise InputError(
                f"topk_ids_TK is {list(ids.shape)} and topk_weights_TK is {list(weights.shape)}",
                expected="one weight per id: the same [T, K]",
                fix="take ids and weights from one call of the router",
            )
        if ids.device != weights.device:
            raise InputError(
                f"topk_ids_TK is on {ids.device} and topk_weights_TK is on {weights.device}",
                expected="ids and weights on one device",
                fix="take ids and weights from one call of the router",
            )

    def _check_scaling(self, scaled_by: float) -> None:
        if not is_scaling(self.scaled_by):
            raise InputError(
                f"the weights hold the routed scaling factor {shown(self.scaled_by)} (Routes.scaled_by)",
                expected="a positive number, 1.0 where nothing was scaled",
                fix="pass the router's routed_scaling",
            )
        # A factor that went through float32 on one of the two sides is still the same factor.
        if math.isclose(self.scaled_by, scaled_by, rel_tol=1e-6):
            return
        if scaled_by == 1.0:
            happens = "the layer scales by itself or not at all, so routed scaling would be applied twice"
        elif self.scaled_by == 1.0:
            happens = "the layer leaves it to the router, so routed scaling would never be applied"
        else:
            happens = "router and layer mean different factors"
        raise InputError(
            f"the weights hold the routed scaling factor {self.scaled_by} (Routes.scaled_by): {happens}",
            expected=f"weights that hold {scaled_by}, as the layer declares",
            fix=f"make the router with routed_scaling={scaled_by}, or declare {self.scaled_by} in the layer",
        )

    def _check_ids(self, num_experts: int) -> None:
        ids = self.topk_ids_TK
        if ids.numel() == 0:
            return
        if ids.device.type == "meta":
            raise InputError(
                "topk_ids_TK is on meta, where tensors hold nothing",
                expected="ids that can be read",
                fix="make the routes on the device of the rows",
            )
        lowest, highest = self.id_range()
        if lowest >= -1 and highest < num_experts:
            return
        token, choice = ((ids < -1) | (ids >= num_experts)).nonzero()[0].tolist()
        raise InputError(
            f"topk_ids_TK holds id {int(ids[token, choice])} (token {token}, choice {choice})",
            expected=f"ids from 0 to {num_experts - 1}, or -1 for no expert",
            fix="pass global expert ids of this layer, and -1 for padding",
        )


def is_scaling(value: object) -> bool:
    """Whether `value` may be a routed scaling factor: a finite number above 0.

    >>> is_scaling(2.5), is_scaling(float("nan")), is_scaling(True)
    (True, False, False)
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 < value <= sys.float_info.max
