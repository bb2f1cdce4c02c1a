"""Experts are for inference: gradients through them do not exist, and are not silently zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from tokenyard.errors import TokenyardError


def without_gradient(
    y_TH: Tensor, inputs: Iterable[Tensor | None], error: Callable[[], TokenyardError]
) -> Tensor:
    """`y_TH`, computed without gradients: where one of its inputs wants one, `backward` raises this error."""
    if not torch.is_grad_enabled():
        return y_TH
    wanting = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    return cast(Tensor, cast(Any, _NoGradient).apply(error, y_TH, *wanting)) if wanting else y_TH


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: Callable[[], TokenyardError], y_TH: Tensor, *wanting: Tensor) -> Tensor:
        ctx.error = error
        return y_TH.view_as(y_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error()
