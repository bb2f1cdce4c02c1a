"""Experts are for inference: gradients through them do not exist, and are not silently zero."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tokenyard.errors import ContractError


def without_gradient(x_TH: Tensor, y_TH: Tensor) -> Tensor:
    """`y_TH`, computed from `x_TH` without gradients: where somebody calls `backward`, it raises."""
    if torch.is_grad_enabled() and x_TH.requires_grad:
        return cast(Tensor, cast(Any, _NoGradient).apply(x_TH, y_TH))
    return y_TH


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, y_TH: Tensor) -> Tensor:
        return y_TH.view_as(y_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ContractError(
            "backward was called through tokenyard's experts",
            expected="inference: experts are not differentiated",
            fix="call the model under torch.no_grad()",
        )
