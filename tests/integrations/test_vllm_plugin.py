"""The plugin for vLLM, as far as it does not need vLLM: its settings, what it refuses, what `doctor` says of it."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from tests.cli.runner import call
from tokenyard.cli import doctor
from tokenyard.errors import ContractError, InputError, TokenyardError
from tokenyard.integrations.vllm import plugin
from tokenyard.integrations.vllm.prepare_finalize import TokenSlices
from tokenyard.integrations.vllm.refusals import REFUSALS, check_supported
from tokenyard.integrations.vllm.settings import Settings, settings

# -- Settings ------------------------------------------------------------------------------------------------


def test_settings_are_read_from_the_environment():
    assert settings({"TOKENYARD_EXCHANGE": "two_sided"}) is None
    assert settings({"TOKENYARD_VLLM": "exchange"}) == Settings(mode="exchange", deadline=300.0)
    said = {
        "TOKENYARD_VLLM": "experts",
        "TOKENYARD_EXCHANGE": "two_sided",
        "TOKENYARD_VLLM_WIRE": "mxfp8",
        "TOKENYARD_VLLM_EXPERTS": "reference",
        "TOKENYARD_VLLM_DEADLINE": "7.5",
    }
    wanted = Settings(mode="experts", exchange="two_sided", wire="mxfp8", experts="reference", deadline=7.5)
    assert settings(said) == wanted


WRONG = {
    "TOKENYARD_VLLM": ("1", "TOKENYARD_VLLM is '1'; expected 'experts' .* or 'exchange' .* or unset it"),
    "TOKENYARD_EXCHANGE": ("onesided", "unknown exchange in TOKENYARD_EXCHANGE 'onesided'.*'one_sided'"),
    "TOKENYARD_VLLM_WIRE": ("mxpf8", "unknown format 'mxpf8'.*did you mean 'mxfp8'"),
    "TOKENYARD_VLLM_EXPERTS": ("grouped_", "unknown experts in TOKENYARD_VLLM_EXPERTS .*'grouped'"),
    "TOKENYARD_VLLM_DEADLINE": ("soon", "TOKENYARD_VLLM_DEADLINE is 'soon'; expected seconds"),
}


@pytest.mark.parametrize(("variable", "value", "message"), [(name, *case) for name, case in WRONG.items()])
def test_a_wrong_setting_is_said_by_name(variable, value, message):
    with pytest.raises(TokenyardError, match=message):
        settings({"TOKENYARD_VLLM": "experts", variable: value})


def test_a_wrong_mode_stops_vllm_from_starting(monkeypatch):
    monkeypatch.setenv("TOKENYARD_VLLM", "expert")
    with pytest.raises(InputError, match="TOKENYARD_VLLM is 'expert'"):
        plugin.register()


# -- Refusals ------------------------------------------------------------------------------------------------


def configurations(**changes):
    """Of a layer and of its ranks, as far as they are looked at."""
    ranks = {"enable_eplb": False, "enable_elastic_ep": False, "use_ubatching": False}
    of_ranks = {"tp_size": 1, "all2all_backend": "allgather_reducescatter"}
    layer = {
        "num_experts": 8,
        "num_logical_experts": 8,
        "is_lora_enabled": False,
        "skip_final_all_reduce": False,
    }
    for known in (ranks, of_ranks, layer):
        known.update((name, changes.pop(name)) for name in list(changes) if name in known)
    assert not changes
    return SimpleNamespace(**layer, moe_parallel_config=SimpleNamespace(**of_ranks)), SimpleNamespace(**ranks)


REFUSED = {
    "expert substitution": ({"num_experts": 6}, "unset TOKENYARD_VLLM"),
    "EPLB, redundant experts": ({"enable_eplb": True}, "leave --enable-eplb out"),
    "elastic EP": ({"enable_elastic_ep": True}, "leave --enable-elastic-ep out"),
    "LoRA on experts": ({"is_lora_enabled": True}, "leave --enable-lora out"),
    "dual-batch overlap": ({"use_ubatching": True}, "leave --enable-dbo"),
    "`skip_final_all_reduce`": ({"skip_final_all_reduce": True}, "unset TOKENYARD_VLLM"),
    "experts split by TP": ({"tp_size": 2}, "add --enable-expert-parallel"),
    "another all2all backend": ({"all2all_backend": "deepep_v2"}, "leave --all2all-backend out"),
}


def test_what_is_served_is_not_refused():
    check_supported(*configurations())


def test_redundant_experts_are_refused_like_eplb():
    with pytest.raises(ContractError, match=r"EPLB.*fix: leave --enable-eplb out"):
        check_supported(*configurations(num_experts=10))


@pytest.mark.parametrize("refusal", REFUSALS, ids=[refusal.name for refusal in REFUSALS])
def test_each_refusal_names_the_layer_and_the_option(refusal):
    changes, fix = REFUSED[refusal.name]
    with pytest.raises(ContractError) as caught:
        check_supported(*configurations(**changes), layer="model.layers.3.mlp.experts")
    assert str(caught.value).startswith("layer 'model.layers.3.mlp.experts': ")
    assert f"; fix: {fix}" in str(caught.value)
    assert refusal.why in str(caught.value)


# -- Ranks that hold the same tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5, 6])
def test_slices_are_each_token_once_and_gathered_in_order(tokens):
    x_TH = torch.arange(2.0 * tokens).view(tokens, 2)
    parts: list[torch.Tensor] = []

    def keep(part):
        parts.append(part)
        return part.new_zeros(3 * len(part), 2)

    for rank in range(3):
        slices = TokenSlices(rank=rank, size=3, all_gather=keep)
        (mine,) = slices.mine(x_TH)
        slices.gather(torch.empty_like(x_TH), lambda out, mine=mine: out.copy_(mine))
    together = torch.cat(parts)
    assert torch.equal(together[:tokens], x_TH)

    output = torch.empty_like(x_TH)
    TokenSlices(rank=0, size=3, all_gather=lambda _: together).gather(output, lambda _: None)
    assert torch.equal(output, x_TH)


# -- What doctor says ----------------------------------------------------------------------------------------


@pytest.fixture
def vllm_finding(monkeypatch):
    """What `doctor` finds of vLLM, of the version that is said to be installed."""

    # Other tests import the integration afresh: `doctor` asks the modules that are there now.
    plugin = import_module("tokenyard.integrations.vllm.plugin")

    def found(version, **environment):
        monkeypatch.setattr(plugin, "installed_version", lambda: version)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return {finding.name: finding for finding in doctor._vllm()}

    monkeypatch.setattr(plugin, "is_found_by_vllm", lambda: True)
    monkeypatch.delenv("TOKENYARD_VLLM", raising=False)
    return found


def test_doctor_where_there_is_no_vllm(vllm_finding):
    (finding,) = vllm_finding(None).values()
    assert finding.absent
    assert "pip install '.[vllm]'" in finding.detail


def test_doctor_says_what_the_plugin_would_do(vllm_finding):
    assert vllm_finding("0.32.0")["vllm"].detail == "0.32.0"
    assert vllm_finding("0.32.0")["plugin"].detail == "off; TOKENYARD_VLLM turns it on: experts or exchange"
    on = vllm_finding("0.32.0", TOKENYARD_VLLM="exchange")["plugin"]
    assert on.ok
    assert on.detail.startswith(
        "on; TOKENYARD_VLLM=exchange (tokenyard moves the rows; vLLM's own experts compute)"
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1+cpu"])
def test_doctor_says_that_these_versions_are_taken(vllm_finding, version):
    assert vllm_finding(version, TOKENYARD_VLLM="experts")["plugin"].ok


def test_doctor_says_what_is_wrong(vllm_finding, monkeypatch):
    for version in ("0.26.0", "0.34.0"):
        found = vllm_finding(version, TOKENYARD_VLLM="experts")["plugin"]
        assert found.ok is False
        assert found.detail == f"it refuses to run: it takes vLLM 0.32 and 0.33, and here is {version}"
    wrong = vllm_finding("0.32.0", TOKENYARD_VLLM="yes")["plugin"]
    assert wrong.ok is False
    assert "TOKENYARD_VLLM is 'yes'" in wrong.detail
    monkeypatch.setattr(import_module(plugin.__name__), "is_found_by_vllm", lambda: False)
    assert vllm_finding("0.32.0", TOKENYARD_VLLM="experts")["plugin"].ok is False


def test_doctor_shows_vllm(monkeypatch, vllm_finding):
    monkeypatch.setattr(doctor, "examine", doctor._vllm)
    vllm_finding("0.32.0")
    assert "off; TOKENYARD_VLLM turns it on: experts or exchange" in " ".join(call("doctor").stdout.split())


def test_the_plugin_can_be_left_out_by_vllms_own_list(monkeypatch):
    entry = SimpleNamespace(name="tokenyard")
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda group: [entry] if "general" in group else [])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugin.is_found_by_vllm()
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert not plugin.is_found_by_vllm()
