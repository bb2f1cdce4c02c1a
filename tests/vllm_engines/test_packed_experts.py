"""The method of quantized MoE layers, with vLLM's classes and without an engine: what it loads, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)

from tests.checkpoints import references
from tokenyard.errors import CheckpointError, ContractError
from tokenyard.integrations.vllm.quantized import CONFIGS

EXPERTS, HIDDEN, INNER = 8, 128, 256
PROJECTIONS = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
NAME = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    monkeypatch.setenv("TOKENYARD_VLLM", "experts")
    with set_current_vllm_config(VllmConfig()):
        yield


class SmallRoutedExperts(RoutedExperts):
    """Experts of a layer, by a name in which vLLM finds its own. This rank, the second of two, has experts 4 to 7."""

    def __init__(self):
        nn.Module.__init__(self)
        ranks = FusedMoEParallelConfig(
            tp_size=1,
            tp_rank=0,
            pcp_size=1,
            pcp_rank=0,
            dp_size=2,
            dp_rank=1,
            ep_size=2,
            ep_rank=1,
            sp_size=1,
            use_ep=True,
            all2all_backend="allgather_reducescatter",
            enable_eplb=False,
        )
        self.moe_config = FusedMoEConfig(
            num_experts=EXPERTS,
            experts_per_token=2,
            hidden_dim=HIDDEN,
            intermediate_size=INNER,
            num_local_experts=EXPERTS // 2,
            num_logical_experts=EXPERTS,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=ranks,
            in_dtype=torch.float32,
            max_num_tokens=64,
        )
        self.layer_name = NAME
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name = "gate_proj", "up_proj"
        self.ckpt_down_proj_name = "down_proj"
        self.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: max(expert - 4, -1))


def made(quantization, name="compressed-tensors"):
    """A layer, and its method, with parameters."""
    layer = SmallRoutedExperts()
    method = CONFIGS[name].from_config(quantization).get_quant_method(layer, NAME)
    method.create_weights(layer, EXPERTS // 2, HIDDEN, INNER, torch.float32)
    return layer, method


def load(layer, expert, shard, written):
    """Pass the tensors of a projection as vLLM's loader does."""
    matrix = "w2" if shard == "w2" else "w13"
    done = []
    for suffix, tensor in written.items():
        parameter = getattr(layer, f"{matrix}_{suffix}")
        name = f"{NAME}.{matrix}_{suffix}"
        done.append(parameter.weight_loader(parameter, tensor, name, shard, expert, return_success=True))
    return set(done)


def linear(expert, shard):
    generator = torch.Generator().manual_seed(10 * expert + int(shard[1]))
    return torch.randn(PROJECTIONS[shard], generator=generator)


@pytest.mark.parametrize("weights", references.FORMATS)
def test_experts_of_this_rank_are_held_as_the_library_wrote_them(weights):
    layer, method = made(references.compressed_config(weights))
    for expert in reversed(range(EXPERTS)):
        for shard in PROJECTIONS:
            written = references.compress(weights, linear(expert, shard))
            assert load(layer, expert, shard, written) == {expert >= 4}
    held = method.held_weights(layer)
    assert held.format == weights
    found = held.read()
    for place, expert in enumerate(range(4, EXPERTS)):
        gate, up = found.w13[place].decode().chunk(2)
        for shard, ours in (("w1", gate), ("w3", up), ("w2", found.w2[place].decode())):
            theirs = references.decompress(weights, references.compress(weights, linear(expert, shard)))
            assert torch.equal(ours.to(theirs.dtype), theirs)


def test_a_tensor_that_does_not_come_is_named():
    layer, method = made(references.compressed_config("mxfp4"))
    for expert in range(4, EXPERTS):
        for shard in PROJECTIONS:
            written = references.compress("mxfp4", linear(expert, shard))
            if (expert, shard) == (6, "w3"):
                del written["weight_scale"]
            load(layer, expert, shard, written)
    missing = "1 tensors of this rank's experts are missing, w13_weight_scale of its expert 2"
    with pytest.raises(CheckpointError, match=missing):
        method.held_weights(layer).read()


def test_a_tensor_that_is_not_what_the_config_says():
    layer, _ = made(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "fp8"
    )
    plain = {"weight": linear(5, "w1").bfloat16()}
    with pytest.raises(
        CheckpointError, match=r"w13_weight is a tensor bfloat16.*expected F8_E4M3\[256, 128\]"
    ):
        load(layer, 5, "w1", plain)


def test_scales_that_are_no_numbers():
    layer, _ = made(references.compressed_config("mxfp4"))
    written = references.compress("mxfp4", linear(5, "w2"))
    written["weight_scale"][3, 1] = 255
    with pytest.raises(CheckpointError, match=r"w2_weight_scale, of expert 1 of this rank, is NaN"):
        load(layer, 5, "w2", written)


def int4_in_groups_of_128():
    config = references.compressed_config("mxint4")
    config["config_groups"]["group_0"]["weights"]["group_size"] = 128
    return config


REFUSED = {
    "a scale per tensor": (
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "weight_block_size None",
    ),
    "larger groups": ("compressed-tensors", int4_in_groups_of_128(), "group_size 128 where 32 can be held"),
}


@pytest.mark.parametrize(("name", "quantization", "found"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_is_refused(name, quantization, found):
    with pytest.raises(ContractError, match=f"the experts are quantized with {found}"):
        made(quantization, name)


def test_experts_of_vllm_do_not_read_them(monkeypatch):
    monkeypatch.setenv("TOKENYARD_VLLM", "exchange")
    with pytest.raises(ContractError, match="which experts of vLLM's own would have to read"):
        made(references.compressed_config("nvfp4"))


def test_ignored_experts_are_plain():
    config = references.compressed_config("nvfp4") | {"ignore": ["re:.*experts.*"]}
    method = CONFIGS["compressed-tensors"].from_config(config).get_quant_method(SmallRoutedExperts(), NAME)
    assert type(method).__name__ in ("UnquantizedFusedMoEMethod", "TokenyardMethod")
