"""State dicts between a GPU and a CPU: one layout, whatever form the GPU's kernels read, and little memory beside."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.distributed import checkpoint

from tests.experts.fused_cases import FusedCase, same_bits
from tests.experts.test_state_dicts import FORMS, assert_same, case_of
from tests.gpu.fused_on_gpu import is_hopper
from tokenyard.experts import FusedExperts, GroupedExperts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

every_format = pytest.mark.parametrize("weights", FORMS)


def case_on(device: str, weights: str, **changes) -> FusedCase:
    # Blocks of fp8 need an inner format to be multiplied by the kernel that reads boxes.
    inner = {"inner": "fp8_block128"} if weights == "fp8_block128" else {}
    return replace(case_of(weights, **inner, **changes), device=device)


def built(case: FusedCase) -> tuple[FusedExperts, dict[str, torch.Tensor]]:
    """Experts on the GPU with weights that were drawn on a CPU, and these weights."""
    held = replace(case, device="cpu").held
    experts = FusedExperts(case.spec, held).to("cuda")
    form = FORMS[case.weights]
    if is_hopper():
        assert form is None or getattr(experts, f"is_{form}"), form
    return experts, held.by_name()


def on_cpu(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def through_torch(state):
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


@every_format
@pytest.mark.parametrize("through", [dict, through_torch, lambda state: load(save(state))])
def test_what_a_gpu_saves_a_cpu_loads_and_the_other_way_round(weights, through):
    case, other = case_on("cuda", weights), case_on("cuda", weights, seed=1)
    gpu, given = built(case)
    second, others = built(other)
    state = gpu.state_dict()
    if weights != "mxfp8":
        assert_same(on_cpu(state), given)
    cpu = GroupedExperts(case.spec, replace(other, device="cpu").held)
    cpu.load_state_dict(through(state))
    assert_same(dict(cpu.named_buffers()), on_cpu(state))
    cpu.load_state_dict(others)
    before = {name: tensor.data_ptr() for name, tensor in gpu.named_buffers()}
    gpu.load_state_dict(through(cpu.state_dict()))
    assert {name: tensor.data_ptr() for name, tensor in gpu.named_buffers()} == before
    assert_same(dict(gpu.named_buffers()), dict(second.named_buffers()))
    assert same_bits(gpu(case.received()).rows_RH, second(case.received()).rows_RH)


@every_format
def test_distributed_checkpoints(weights, tmp_path):
    case, other = case_on("cuda", weights), case_on("cuda", weights, seed=1)
    gpu, _ = built(case)
    cpu = GroupedExperts(case.spec, replace(other, device="cpu").held)
    checkpoint.save({"model": nn.ModuleDict({"experts": gpu})}, checkpoint_id=tmp_path / "gpu", no_dist=True)
    checkpoint.load({"model": nn.ModuleDict({"experts": cpu})}, checkpoint_id=tmp_path / "gpu", no_dist=True)
    assert_same(dict(cpu.named_buffers()), on_cpu(gpu.state_dict()))
    cpu.load_state_dict(replace(other, device="cpu").held.by_name())
    checkpoint.save({"model": nn.ModuleDict({"experts": cpu})}, checkpoint_id=tmp_path / "cpu", no_dist=True)
    checkpoint.load({"model": nn.ModuleDict({"experts": gpu})}, checkpoint_id=tmp_path / "cpu", no_dist=True)
    assert_same(dict(gpu.named_buffers()), dict(built(other)[0].named_buffers()))


@every_format
def test_older_files_load(weights):
    case, other = case_on("cuda", weights), case_on("cuda", weights, seed=1)
    gpu, _ = built(case)
    derived = ("_bases", "_largest")
    old = {name: tensor.cpu() for name, tensor in gpu.named_buffers() if not name.endswith(derived)}
    for experts in (built(other)[0], GroupedExperts(case.spec, replace(other, device="cpu").held)):
        experts.load_state_dict(old)
        assert_same(on_cpu(experts.state_dict()), on_cpu(gpu.state_dict()))


@pytest.mark.skipif("not is_hopper()", reason="weights are packed and boxed on Hopper")
@pytest.mark.parametrize("weights", [name for name, form in FORMS.items() if form is not None])
def test_the_gpu_needs_memory_for_one_expert_more(weights):
    """Of 32 experts. What is made of one expert on the way (its codes, one a byte, and integers of these) counts."""
    experts, _ = built(case_on("cuda", weights, H=1024, I=1024, L=32, bias=False))
    held = sum(buffer.nbytes for buffer in experts.buffers())
    one = 3 * 1024 * 1024  # weights
    state = experts.state_dict()
    for step in (experts.state_dict, lambda: experts.load_state_dict(state)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        beside = torch.cuda.max_memory_allocated() - before
        assert beside <= 16 * one, (beside / one, beside / held)
