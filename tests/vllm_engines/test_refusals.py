"""What the plugin refuses in the real vLLM: when a layer is made, before any weight is loaded."""

import subprocess
import sys
from dataclasses import replace

import pytest
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from tests.integrations.vllm_kernel import moe_config
from tests.models import spec
from tests.vllm_engines.launching import run_engine
from tokenyard.errors import ContractError
from tokenyard.group import thread_groups
from tokenyard.integrations.vllm import plugin
from tokenyard.integrations.vllm.refusals import EVERY_REFUSAL
from tokenyard_lab.shipped import shipped_model


@pytest.fixture(params=["experts", "exchange"])
def registered(request, monkeypatch):
    """vLLM, with the plugin on."""
    before = dict(op_registry_oot)
    monkeypatch.setenv("TOKENYARD_VLLM", request.param)
    plugin.register()
    plugin.register()  # vLLM may call it more than once
    yield request.param
    op_registry_oot.clear()
    op_registry_oot.update(before)


def layer(**changes):
    """vLLM's configuration of a layer on one rank, with changes of the layer's and its ranks'."""
    known = moe_config(spec(hidden_size=64, intermediate_size=32, num_experts=4), thread_groups(1)[0])
    ranks = {name: changes.pop(name) for name in ("tp_size", "all2all_backend") if name in changes}
    known.moe_parallel_config = replace(known.moe_parallel_config, **ranks)
    for name, value in changes.items():
        assert hasattr(known, name)
        setattr(known, name, value)
    return known


def method_for(moe, **ranks):
    """The method that vLLM makes for an unquantized layer."""
    config = VllmConfig()
    for name, value in ranks.items():  # afterwards: on CPUs, vLLM itself refuses or undoes some of these
        assert hasattr(config.parallel_config, name)
        setattr(config.parallel_config, name, value)
    with set_current_vllm_config(config):
        return UnquantizedFusedMoEMethod(moe)


REFUSED = {
    "expert substitution": ({"num_experts": 3}, {}),
    "EPLB, redundant experts": ({}, {"enable_eplb": True}),
    "elastic EP": ({}, {"enable_elastic_ep": True}),
    "LoRA on experts": ({"is_lora_enabled": True}, {}),
    "dual-batch overlap": ({}, {"enable_dbo": True}),
    "`skip_final_all_reduce`": ({"skip_final_all_reduce": True}, {}),
    "experts split by TP": ({"tp_size": 2}, {}),
    "another all2all backend": ({"all2all_backend": "deepep_low_latency"}, {}),
}
BY_NAME = {refusal.name: refusal for refusal in EVERY_REFUSAL}


def test_what_is_served_is_taken(registered):
    method = method_for(layer())
    assert type(method).__module__ == "tokenyard.integrations.vllm.method"
    assert method.moe_kernel is None


@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_when_the_layer_is_made(registered, name):
    of_layer, of_ranks = REFUSED[name]
    with pytest.raises(ContractError) as caught:
        method_for(layer(**of_layer), **of_ranks)
    assert BY_NAME[name].why in str(caught.value)
    assert f"fix: {BY_NAME[name].fix}" in str(caught.value)


def test_monolithic_experts_are_refused_behind_our_exchange(registered, monkeypatch):
    class Monolithic(FusedMoEExpertsMonolithic):
        pass

    chosen = (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend"
    )
    monkeypatch.setattr(chosen, lambda moe_config: (None, Monolithic))
    if registered == "experts":  # they are not used
        assert method_for(layer()).experts_cls is Monolithic
        return
    with pytest.raises(ContractError, match="vLLM chose Monolithic: they route by themselves"):
        method_for(layer())


def test_a_version_that_was_not_compared_is_refused(monkeypatch):
    monkeypatch.setenv("TOKENYARD_VLLM", "experts")
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(ContractError, match=r"vLLM is 0\.34\.0.*fix: install vLLM 0\.32 or 0\.33"):
        plugin.register()


def test_the_plugin_is_found_and_is_inert_unless_asked_for():
    """vLLM finds it by its entry point, and it brings nothing of vLLM's with it."""
    assert plugin.is_found_by_vllm()
    assert plugin.installed_version() == vllm.__version__
    call = "from tokenyard.integrations.vllm.plugin import register; register(); import sys; "
    call += "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[]\n"


def test_an_engine_ends_with_the_refusal(tmp_path):
    """Two ranks that split each expert between them: the engine says what to do, and does not start."""
    options = {
        "model": str(shipped_model()),
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
    }
    ended = run_engine(tmp_path / "engine", {"options": options, "prompts": ["a"]}, TOKENYARD_VLLM="experts")
    assert ended.codes != [0]
    assert "each expert is split between 2 ranks: ranks hold whole experts" in ended.said[0]
    assert "fix: add --enable-expert-parallel" in ended.said[0]
    assert ended.answers == []
