"""Weights of experts as DTensors on the mesh of their ranks, as trainers of several meshes want them.

A plan that is given a `DeviceMesh` has them: FSDP over another dimension of the mesh, optimizers, the norm of
gradients and distributed checkpoints then know that the experts of a rank are a part of a tensor `[E, …]`. What
computes takes the rank's own part (`local_part`). A plan that is given a group has plain parameters `[L, …]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tokenyard.experts import Experts


def hold_as_dtensors(experts: Experts, mesh: DeviceMesh, num_experts: int) -> None:
    """Make the parameters of a rank's experts DTensors that are sharded over the mesh."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = parameter.detach()
        shape = torch.Size((num_experts, *local.shape[1:]))
        made: Any = DTensor.from_local(
            local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=local.new_empty(shape, device="meta").stride(),
        )
        setattr(experts, name, nn.Parameter(made, requires_grad=parameter.requires_grad))
