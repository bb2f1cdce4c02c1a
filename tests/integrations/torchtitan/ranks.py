"""What ranks do in these tests: torchtitan's debug model, with its own dispatcher or with tokenyard's experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.integrations.torchtitan import cpus  # before anything else of torchtitan

# isort: split
from torchtitan.config import (
    CompileConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
    apply_overrides,
    derive,
    override,
)
from torchtitan.config.override import parse_cli_imports
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config

from tokenyard.group import Group

OURS = "tokenyard.integrations.torchtitan.routed_experts"
BACKEND = "partial_dtensor"  # the others need a newer FSDP than that of torch 2.13


@override(target=FlexAttention.Config)
def plain_attention(cfg: Any) -> Any:
    """Attention whose backward runs on CPUs."""
    return derive(cfg, ScaledDotProductAttention.Config)


def model_config(imports: list[str], *, expert_parallel: bool = True) -> Any:
    """The config of the debug model with three of its layers, two of which have experts."""
    config = model_registry("debugmodel").model
    config.layers = config.layers[:3]
    set_deepseek_v3_sharding_config(config, enable_sp=True, enable_ep=expert_parallel)
    apply_overrides(OverrideConfig(imports=parse_cli_imports(imports)), config)
    return config


def dims(world: int, expert_parallel: int) -> ParallelDims:
    """The meshes of torchtitan: FSDP over all ranks, and over what expert parallelism leaves."""
    set_spmd_backend(BACKEND)
    return ParallelDims(
        dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=expert_parallel, world_size=world, spmd_backend=BACKEND
    )  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Rows and routes of all ranks, in the order of ranks."""

    x_BLD: Tensor
    scores_BLK: Tensor
    ids_BLK: Tensor
    dy_BLD: Tensor
    weights: dict[str, Tensor]

    @classmethod
    def drawn(cls, seed: int, dtype: torch.dtype = torch.bfloat16) -> Batch:
        """A batch for the experts of the debug model, whose parameters are drawn, too."""
        generator = torch.Generator().manual_seed(seed)
        inner = model_config([]).layers[1].moe.routed_experts.inner_experts
        shape = (4, 16)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        logits = normal(*shape, inner.num_experts)
        scores_BLK, ids_BLK = logits.softmax(-1).topk(3)
        wide = (inner.num_experts, inner.hidden_dim, inner.dim)
        narrow = (inner.num_experts, inner.dim, inner.hidden_dim)
        return cls(
            x_BLD=normal(*shape, inner.dim).to(dtype),
            scores_BLK=scores_BLK,
            ids_BLK=ids_BLK,
            dy_BLD=normal(*shape, inner.dim).to(dtype),
            weights={
                "w1_EFD": (normal(*wide) / 16).to(dtype),
                "w2_EDF": (normal(*narrow) / 16).to(dtype),
                "w3_EFD": (normal(*wide) / 16).to(dtype),
            },
        )


def run(group: Group, jobs: list[tuple[Any, ...]]) -> list[Any]:
    """The results of several jobs of a rank, each a function and what it takes beside the group."""
    if group.size > 1:  # a process of its own
        cpus.use_gloo()
    return [job(group, *arguments) for job, *arguments in jobs]


def differentiate(group: Group, imports: list[str], seed: int) -> dict[str, Tensor]:
    """Result and gradients of one module of routed experts; rows of this rank, whole gradients of parameters."""
    batch = Batch.drawn(seed)
    parallel = dims(group.size, group.size)
    module = model_config(imports, expert_parallel=group.size > 1).layers[1].moe.routed_experts.build()
    for name, value in batch.weights.items():
        setattr(module.inner_experts, name, torch.nn.Parameter(value.clone()))
    if group.size > 1:
        module.parallelize(parallel)
    mine = slice(group.rank * 4 // group.size, (group.rank + 1) * 4 // group.size)
    x_BLD = batch.x_BLD[mine].clone().requires_grad_()
    scores_BLK = batch.scores_BLK[mine].clone().requires_grad_()
    ids_BLK = batch.ids_BLK[mine]
    counts_E = ids_BLK.flatten().bincount(minlength=8)
    y_BLD = module(x_BLD, scores_BLK, ids_BLK, counts_E)
    y_BLD.backward(batch.dy_BLD[mine])
    gradients = {name: value.grad for name, value in module.inner_experts.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    return {"y": y_BLD.detach(), "x": x_BLD.grad, "scores": scores_BLK.grad, **whole}


def train_step(group: Group, imports: list[str], expert_parallel: int) -> tuple[float, dict[str, Tensor]]:
    """The loss of the debug model on one batch, and all gradients, with FSDP and recomputed activations."""
    parallel = dims(group.size, expert_parallel)
    spec = model_registry("debugmodel")
    config = model_config(
        [*imports, "tests.integrations.torchtitan.ranks.plain_attention"], expert_parallel=expert_parallel > 1
    )
    torch.manual_seed(5)
    with torch.device("meta"):
        model = config.build()
    parallelism = ParallelismConfig(expert_parallel_degree=expert_parallel, spmd_backend=BACKEND)
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel,
        training=TrainingConfig(),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=SelectiveAC.Config(),
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for number, value in enumerate(model.parameters()):
            draw(value, number)
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(2048, (4, 17), generator=generator).tensor_split(group.size)[group.rank]
    positions = torch.arange(16).expand(len(tokens), -1)
    logits = model(tokens[:, :-1], positions=positions)
    each = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    (each / 64).backward()
    gradients = {name: value.grad.full_tensor() for name, value in model.named_parameters()}
    return float(sum(group.gather_json(each.item()))) / 64, gradients


def draw(parameter: Tensor, number: int) -> None:
    """Give a parameter, however it is sharded, the same numbers."""
    if parameter.dim() > 1:
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(parameter.shape, generator=generator) * 0.05
        parameter.copy_(
            torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        )
