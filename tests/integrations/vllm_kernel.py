"""What vLLM does with the two objects, in few words: the order of its calls, and what it hands from one to the next."""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tokenyard.rows import LocalRoutes, ReceivedRows

STUBS = Path(__file__).parent / "stubs"
OURS = "tokenyard.integrations.vllm"
# Whether the real vLLM is there. It is asked before any stub is.
INSTALLED = importlib.util.find_spec("vllm") is not None


def install_stub(folder: Path, version: str) -> None:
    """Put a package `vllm` into a folder that has nothing but the signatures of one version."""
    modules = (
        (version, "modular_kernel"),
        (version, "config"),
        ("weight_and_reduce", "topk_weight_and_reduce"),
    )
    room = folder / "vllm" / "model_executor" / "layers" / "fused_moe"
    room.mkdir(parents=True)
    for package in (room, *room.parents[:3]):
        (package / "__init__.py").touch()
    for stub, module in modules:
        (room / f"{module}.py").write_text((STUBS / f"{stub}.py").read_text())


def import_afresh():
    """The integration, as it is after a look at whether vLLM is there."""
    forget("vllm", OURS)
    importlib.invalidate_caches()
    importlib.import_module(f"{OURS}.prepare_finalize")  # its classes are imported when they are asked for
    return importlib.import_module(OURS)


def forget(*packages: str) -> None:
    for name in list(sys.modules):
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            del sys.modules[name]


class Kernel:
    """`prepare`, `apply` if there are rows, `finalize`; memory for results is the caller's output where that fits."""

    def __init__(self, prepare_finalize, experts):
        self.prepare_finalize, self.experts = prepare_finalize, experts
        prepare_finalize.post_init_setup(experts)
        assert prepare_finalize.activation_format == experts.activation_format()

    def __call__(
        self, x, w1, w2, weights, ids, *, num_experts, activation="silu", expert_map=None, on_input=False
    ):
        output = torch.empty_like(x)
        a1q, scale, meta, ids, weights = self.prepare_finalize.prepare(
            x,
            weights,
            ids,
            num_experts,
            expert_map,
            on_input,
            self.experts.quant_config,
            defer_input_quant=self.experts.expects_unquantized_inputs,
        )
        results = self.run_experts(
            x.dtype,
            a1q,
            scale,
            meta,
            ids,
            weights,
            w1,
            w2,
            num_experts,
            activation,
            expert_map,
            on_input,
            output,
        )
        self.prepare_finalize.finalize(
            output, results, weights, ids, on_input, self.experts.finalize_weight_and_reduce_impl()
        )
        return output

    def run_experts(
        self,
        dtype,
        a1q,
        scale,
        meta,
        ids,
        weights,
        w1,
        w2,
        num_experts,
        activation,
        expert_map,
        on_input,
        output,
    ):
        num_local, rows, wide, hidden, top_k = self.experts.moe_problem_size(a1q, w1, w2, ids)
        if rows == 0:
            return torch.empty_like(a1q, dtype=dtype)
        shapes = self.experts.workspace_shapes(
            rows, wide, hidden, top_k, num_experts, num_local, meta, activation
        )
        held = self.experts.workspace_dtype(dtype)
        workspace13, workspace2, results = (torch.full(shape, torch.nan, dtype=held) for shape in shapes)
        if output.shape == results.shape and output.dtype == results.dtype:
            results = output
        self.experts.apply(
            output=results,
            hidden_states=a1q,
            w1=w1,
            w2=w2,
            topk_weights=weights,
            topk_ids=ids,
            activation=activation,
            global_num_experts=num_experts,
            expert_map=expert_map,
            a1q_scale=scale,
            a2_scale=self.experts.a2_scale,
            workspace13=workspace13,
            workspace2=workspace2,
            expert_tokens_meta=meta,
            apply_router_weight_on_input=on_input,
        )
        return results


class InstalledKernel:
    """The kernel of the vLLM that is installed, called as `Kernel` is."""

    def __init__(self, prepare_finalize, experts):
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular, FusedMoEKernel

        FusedMoEExpertsModular.register(UnfinishedExperts)
        self.kernel = FusedMoEKernel(prepare_finalize, experts)

    def __call__(
        self, x, w1, w2, weights, ids, *, num_experts, activation="silu", expert_map=None, on_input=False
    ):
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        return self.kernel.apply(
            hidden_states=x,
            w1=w1,
            w2=w2,
            topk_weights=weights,
            topk_ids=ids,
            activation=MoEActivation.from_str(getattr(activation, "value", activation)),
            global_num_experts=num_experts,
            expert_map=expert_map,
            apply_router_weight_on_input=on_input,
        )


def moe_config(spec, group):
    """vLLM's configuration of a layer, where vLLM is installed."""
    if not INSTALLED:
        return None
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    ranks = replace(
        config.FusedMoEParallelConfig.make_no_parallel(),
        dp_size=group.size,
        dp_rank=group.rank,
        ep_size=group.size,
        ep_rank=group.rank,
        use_ep=group.size > 1,
    )
    return config.FusedMoEConfig(
        num_experts=spec.num_experts,
        experts_per_token=spec.top_k,
        hidden_dim=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_local_experts=spec.num_experts,
        num_logical_experts=spec.num_experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=ranks,
        in_dtype=spec.dtype,
        max_num_tokens=64,
    )


def make_kernel(prepare_finalize, experts):
    """vLLM's own kernel, where vLLM is installed."""
    return (InstalledKernel if INSTALLED else Kernel)(prepare_finalize, experts)


class UnfinishedExperts:
    """Experts of somebody else's: one row per choice, not weighted; beside a choice for another rank stands NaN."""

    expects_unquantized_inputs = False
    quant_config = a2_scale = None

    def __init__(self, layer, finalizer, *, shape="[R, K, H]"):
        self.layer, self.finalizer, self.shape = layer, finalizer, shape

    def activation_format(self):
        return self.format

    def finalize_weight_and_reduce_impl(self):
        return self.finalizer

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        return w1.shape[0], *a1.shape[:1], w1.shape[1], a1.shape[1], topk_ids.shape[1]

    def workspace_dtype(self, dtype):
        return torch.float32

    def output_hidden_dim(self, hidden_dim):
        return hidden_dim

    def workspace_shapes(self, rows, wide, hidden, top_k, *_):
        shapes = {
            "[R, K, H]": (rows, top_k, hidden),
            "[R·K, H]": (rows * top_k, hidden),
            "[R, H]": (rows, hidden),
        }
        return (0,), (0,), shapes[self.shape]

    def apply(self, *, output, hidden_states, topk_weights, topk_ids, expert_map, **_):
        ids_RK = torch.where(topk_ids < 0, -1, expert_map[topk_ids.long()]).int()
        received = ReceivedRows(
            rows=self.layer.wiring.wire.encode(hidden_states),
            routes=LocalRoutes(ids_RK=ids_RK, weights_RK=topk_weights),
            counts_W=(len(hidden_states),),
        )
        result = self.layer.experts(received, finalize=self.shape == "[R, H]")
        if self.shape == "[R, H]":
            output.copy_(result.rows_RH)
        else:
            output.fill_(torch.nan).view(-1, output.shape[-1])[result.index_N] = result.rows_NH
