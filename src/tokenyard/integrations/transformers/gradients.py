"""Sharded experts, like those of a layer, have no gradients: see `tokenyard.layer.gradients`."""

from __future__ import annotations

from tokenyard.errors import ContractError


def no_gradient() -> ContractError:
    """What `backward` through a model's experts raises."""
    return ContractError(
        "backward was called through tokenyard's experts",
        expected="inference: experts are not differentiated",
        fix="call the model under torch.no_grad()",
    )
