"""Experts of torchtitan's models by tokenyard: an override of its routed experts, which needs no change in torchtitan.

    torchrun … -m torchtitan.train --module deepseek_v3 --config deepseek_v3_debugmodel \\
        --override.imports tokenyard.integrations.torchtitan.routed_experts

torchtitan's `RoutedExperts` is a token dispatcher, which moves rows, around grouped experts, which multiply them. The
override replaces it as a whole: a dispatcher alone returns every choice's row to be weighted and summed by its caller,
and leaves the products to a module that does not know where rows came from. One plan serves all layers of a model.

Parameters stay torchtitan's own, `w1_EFD`, `w2_EDF` and `w3_EFD` of `inner_experts`: sharding, initialization,
optimizer and checkpoints are as without the override. Only this module's forward differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module

from tokenyard import ExpertWeights, LayerSpec, MoELayer, Plan, Routes, plan
from tokenyard.errors import InputError
from tokenyard.formats import for_dtype
from tokenyard.group import thread_groups


class TokenyardExperts(RoutedExperts):  # type: ignore[misc]
    """The routed experts of one layer: dispatch, products and combine of a layer of a training plan."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """What torchtitan says of its routed experts, and what `routed_experts` adds."""

        exchange: str = "auto"
        sum: Literal["ranks", "choices"] = "ranks"
        keep: Literal["products", "rows", "nothing"] = "products"
        max_tokens: int | None = None

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # without a token dispatcher, which may allocate buffers
        self.inner_experts = config.inner_experts.build()
        self._settings = config
        self._model = _ModelLayers(None)

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the experts as torchtitan does, and join the layers that share the ranks of expert parallelism."""
        Module.parallelize(self, parallel_dims)
        if parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
            raise InputError(
                f"tensor parallelism over {parallel_dims.tp} ranks cuts each expert in parts",
                expected="whole experts on each rank",
                fix="set --parallelism.expert_parallel_degree to a multiple of the tensor parallel degree",
            )
        self._model = _ModelLayers.of(parallel_dims.get_optional_mesh("ep"))
        self._model.modules.append(self)

    # The call is collective, and has its own backward: a compiled model calls it between two graphs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """The weighted sum of each token's experts."""
        x_TD = x_BLD.flatten(0, 1)
        w1, w2, w3 = (_local(getattr(self.inner_experts, name)) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
        layer = self._model.layer(self, x_TD, w2)
        routes = Routes(
            topk_ids_TK=topk_expert_ids_BLK.flatten(0, 1),
            topk_weights_TK=topk_scores_BLK.float().flatten(0, 1),
        )
        weights = {"experts.w13": torch.cat([w1, w3], dim=1), "experts.w2": w2}
        y_TD: Tensor = functional_call(layer, weights, (x_TD, routes))
        return y_TD.view_as(x_BLD)

    def spec(self, name: str, x_TD: Tensor, w2_EDF: Tensor) -> LayerSpec:
        """The layer as tokenyard describes it."""
        config, inner = self._settings, self._settings.inner_experts
        return LayerSpec(
            name=name,
            hidden_size=inner.dim,
            intermediate_size=inner.hidden_dim,
            num_experts=inner.num_experts,
            top_k=config.token_dispatcher.top_k,
            dtype=x_TD.dtype,
            weights=for_dtype(w2_EDF.dtype).name,
            sum=config.sum,
            keep=config.keep,
            max_tokens=config.max_tokens or len(x_TD),
        )


class _ModelLayers:
    """The layers that share a group of ranks; their plan is made at the first call, when dtypes are known."""

    _open: dict[DeviceMesh, _ModelLayers] = {}  # noqa: RUF012 (those that have no plan yet)

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self.modules: list[TokenyardExperts] = []
        self._plan: Plan | None = None
        self._layers: dict[int, MoELayer] = {}

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> _ModelLayers:
        """The layers on the ranks of a mesh to which one more may be added; without a mesh, a layer is alone."""
        return cls(None) if mesh is None else cls._open.setdefault(mesh, cls(mesh))

    def layer(self, module: TokenyardExperts, x_TD: Tensor, w2_EDF: Tensor) -> MoELayer:
        """The layer of a module; at the first call, of all of them."""
        if self._plan is None:
            self._make(module, x_TD, w2_EDF)
        return self._layers[id(module)]

    def _make(self, caller: TokenyardExperts, x_TD: Tensor, w2_EDF: Tensor) -> None:
        if self._mesh is not None:
            del self._open[self._mesh]
        # torchtitan shards a model from its last layer to its first.
        named = {
            f"experts.{index}": module for index, module in enumerate(reversed(self.modules or [caller]))
        }
        specs = [module.spec(name, x_TD, w2_EDF) for name, module in named.items()]
        group = thread_groups(1, device=x_TD.device)[0] if self._mesh is None else self._mesh.get_group()
        self._plan = plan(specs, group, exchange=caller._settings.exchange, training=True)
        for spec, (name, module) in zip(specs, named.items(), strict=True):
            local = len(self._plan.local_experts(name))
            w13 = w2_EDF.new_empty(local, 2 * spec.intermediate_size, spec.hidden_size, device="meta")
            w2 = w2_EDF.new_empty(local, spec.hidden_size, spec.intermediate_size, device="meta")
            # The parameters are torchtitan's: each call brings them.
            self._layers[id(module)] = self._plan.layer(name, ExpertWeights(w13=w13, w2=w2), adopt=True)


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, which is a DTensor where torchtitan's ranks share experts."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@override(target=RoutedExperts.Config, description="Dispatch, experts and combine by tokenyard.")  # type: ignore[untyped-decorator]
def routed_experts(
    cfg: Any,
    *,
    exchange: str = "auto",
    sum: Literal["ranks", "choices"] = "ranks",
    keep: Literal["products", "rows", "nothing"] = "products",
    max_tokens: int | None = None,
) -> TokenyardExperts.Config:
    """The override: list it in `--override.imports`, with options as JSON after an `=`.

    `exchange`, `sum` and `keep` are those of tokenyard's `plan` and `LayerSpec`. `max_tokens` is the most tokens of a
    rank in one call; without it, those of the first call, which suits training.
    """
    if type(cfg.inner_experts) is not GroupedExperts.Config:
        raise InputError(
            f"the experts are {type(cfg.inner_experts).__qualname__}",
            expected="torchtitan's GroupedExperts: three matrices, SwiGLU, no biases, not quantized",
            fix="leave this override, or the one that replaced the experts, out of --override.imports",
        )
    return derive(cfg, TokenyardExperts.Config, exchange=exchange, sum=sum, keep=keep, max_tokens=max_tokens)  # type: ignore[no-any-return]
