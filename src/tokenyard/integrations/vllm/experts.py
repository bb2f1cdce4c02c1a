"""Experts, as vLLM's modular kernel calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenyard.duties import Duty, Party
from tokenyard.errors import ContractError
from tokenyard.experts import Experts, ExpertWeights
from tokenyard.formats import EncodedRows, for_dtype
from tokenyard.integrations.vllm.interface import (
    VLLM_ACTIVATIONS,
    ActivationFormat,
    ExpertsOfVllm,
    ExpertTables,
    Finished,
    activation_of,
    check_layer,
    check_weight_on,
    declared_quantization,
    same_formula,
)
from tokenyard.layer.building import build_experts
from tokenyard.layer.call import run_experts
from tokenyard.planning.planner import Plan
from tokenyard.planning.wiring import Wiring
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, describe


class TokenyardExperts(ExpertsOfVllm):
    """The experts of one layer of a plan, on this rank. `apply` weights their results, and sums them per row.

    `weights` are those of this rank's experts, in the layer's format. Without them, `apply` uses the plain weights that
    vLLM passes to it, and the biases in `quant_config`, without a copy. The class of experts is the one that the
    layer was planned with. vLLM's kernel reads `moe_config`, its own configuration of the layer.
    """

    plan: Plan  # the plan that all ranks agreed on
    layer: str  # the name of the layer in the plan
    moe_config: Any  # vLLM's own configuration of the layer
    quant_config: Any  # vLLM's own, with the rows quantized as the layer declares

    def __init__(
        self,
        plan: Plan,
        layer: str,
        *,
        moe_config: Any,
        quant_config: Any = None,
        weights: ExpertWeights | None = None,
    ) -> None:
        check_layer(plan, layer)
        self.plan, self.layer = plan, layer
        super().__init__(moe_config, declared_quantization(self.wiring, quant_config))
        # Called with an error, to report it to the other ranks.
        self.on_error: Callable[[Exception], None] | None = None
        self._tables = ExpertTables.of(plan, layer)
        self._built: tuple[object, Experts] | None = None
        self._loaded: Experts | None = None
        if weights is not None:
            self.load(weights)

    def load(self, weights: ExpertWeights) -> None:
        """Compute with these weights from now on, whatever `apply` is given."""
        self._loaded = build_experts(self.wiring, self.plan.group.rank, weights, adopt=True)

    @property
    def wiring(self) -> Wiring:
        """The layer's wiring, as the plan has it now."""
        return self.plan.wiring(self.layer)

    # -- What vLLM asks before the first token -------------------------------------------------------------

    @staticmethod
    def is_monolithic() -> bool:
        """False: these experts are given routes, and do not route by themselves."""
        return False

    @staticmethod
    def activation_format() -> Any:
        """One row per token and rank, not a batch per expert."""
        return ActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether quantizing the rows is the duty of these experts, and not of `prepare`."""
        return self.wiring.duties[Duty.QUANTIZE] is Party.EXPERTS

    @property
    def a2_scale(self) -> Tensor | None:
        """The static scale of the activation between the two products. `apply` refuses any but None."""
        scale: Tensor | None = getattr(self.quant_config, "a2_scale", None)
        return scale

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return getattr(activation, "value", activation) in VLLM_ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return bool(moe_parallel_config.tp_size == 1)  # an expert is never split

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Says that results are weighted and summed over the experts of this rank, and must not be again."""
        return Finished()

    def moe_problem_size(
        self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        """Experts here, rows, width of the first product, hidden size (without a pad), choices."""
        return w1.shape[0], a1.shape[0], w1.shape[1], self.wiring.spec.hidden_size, topk_ids.shape[1]

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """The dtype of results: the layer's, where they travel back in it; else float32, to be rounded once."""
        spec = self.wiring.spec
        return (
            spec.dtype if self.wiring.exchange_spec.combine_wire == for_dtype(spec.dtype) else torch.float32
        )

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch of vLLM's is used; results are one row per received row, of the layer's true width."""
        return (0,), (0,), (M, self.wiring.spec.hidden_size)

    # -- Computing -----------------------------------------------------------------------------------------

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor | None,
        workspace2: Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the results of the received rows into `output`. An error reaches the ranks that wait for them."""
        try:
            self._check_call(activation, a2_scale, apply_router_weight_on_input)
            received = self._received(hidden_states, a1q_scale, topk_ids, topk_weights, expert_map)
            result = run_experts(self.wiring, self._experts_with(w1, w2), received)
            assert isinstance(result, ExpertRows)  # `received` names no place to write them to
            if output.shape != result.rows_RH.shape or not output.is_floating_point():
                raise ContractError(
                    f"output is {describe(output)}",
                    expected=f"floating-point {list(result.rows_RH.shape)}: one row per received row",
                    fix="allocate it as workspace_shapes and workspace_dtype say",
                )
            output.copy_(result.rows_RH)
        except Exception as error:
            if self.on_error is not None:
                self.on_error(error)
            raise

    def _check_call(self, activation: Any, a2_scale: Tensor | None, on_input: bool) -> None:
        spec = self.wiring.experts_spec(self.plan.group.rank)
        named = getattr(activation, "value", activation)
        limit = getattr(self.quant_config, "gemm1_clamp_limit", None)
        meant = {name: activation_of(name, limit=limit) for name in VLLM_ACTIVATIONS}
        known = [name for name, ours in meant.items() if same_formula(ours, spec.activation)]
        if named not in known:
            raise ContractError(
                f"activation is {named!r}, and the layer has {spec.activation}",
                expected=f"{' or '.join(map(repr, known)) or 'an activation that vLLM has, too'}",
                fix="plan the layer with the model's activation",
            )
        check_weight_on(self.wiring, on_input)
        # An attribute of vLLM's experts since 0.33: who sets it weights and sums in their place.
        if getattr(self, "post_gemm2_hook", None) is not None:
            raise ContractError(
                "post_gemm2_hook is set, and these experts weight and sum their results",
                expected="None: the hook would never be called",
                fix="leave it unset, or unset TOKENYARD_VLLM for this model",
            )
        if a2_scale is not None:
            raise ContractError(
                f"a2_scale is {describe(a2_scale)}",
                expected="None: these experts do not quantize between their two products",
                fix="leave a2_scale out of the quantization",
            )

    def _received(
        self,
        data: Tensor,
        scales: Tensor | None,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
    ) -> ReceivedRows:
        """The batch that `prepare` received, from the tensors that vLLM passes on."""
        wire, hidden_size = self.wiring.wire, self.wiring.spec.hidden_size
        declared = [payload.name for payload in wire.payloads(hidden_size)]
        given = [data] if scales is None else [data, scales]
        if len(given) != len(declared):
            raise ContractError(
                f"the rows came {'without' if scales is None else 'with'} scales",
                expected=f"{' and '.join(declared)}, as rows in {wire} have",
                fix="let TokenyardPrepareAndFinalize of the same layer prepare them",
            )
        rows = EncodedRows(
            format=wire, hidden_size=hidden_size, payloads=dict(zip(declared, given, strict=True))
        )
        rows.check()
        self._tables = ExpertTables.of(self.plan, self.layer, self._tables)
        local_E = self._tables.local_E if expert_map is None else expert_map
        ids_RK = torch.where(topk_ids < 0, -1, local_E[topk_ids.long().clamp(min=0)]).int()
        routes = LocalRoutes(ids_RK=ids_RK, weights_RK=topk_weights.float())
        return ReceivedRows(rows=rows, routes=routes, counts_W=(rows.num_rows,), may_be_empty=True)

    def _experts_with(self, w1: Tensor, w2: Tensor) -> Experts:
        """The loaded experts; if there are none, experts that hold these tensors, built again if these change."""
        if self._loaded is not None:
            return self._loaded
        weights = ExpertWeights(
            w13=w1,
            w2=w2,
            b13=getattr(self.quant_config, "w1_bias", None),
            b2=getattr(self.quant_config, "w2_bias", None),
        )
        held = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in weights.by_name().values()]
        if self._built is None or self._built[0] != held:
            self._built = held, build_experts(self.wiring, self.plan.group.rank, weights, adopt=True)
        return self._built[1]
