"""State dicts of experts have one layout on every device, whatever form the kernels of a GPU read."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from tests.experts.fused_cases import FusedCase
from tokenyard.experts import FusedExperts, GroupedExperts
from tokenyard.experts.fused import kernel_weights
from tokenyard.formats import WEIGHT_FORMATS

# The form in which an H200 holds each weight format, and the buffers of it. None: as given.
FORMS = {
    "bf16": "boxed",
    "fp16": "boxed",
    "fp32": None,
    "fp8_block128": "boxed",
    "mxfp8": "recoded",
    "nvfp4": "packed",
    "mxfp4": "packed",
    "mxint4": "packed",
}
BUFFERS = {"boxed": ["boxes"], "recoded": ["blocks", "block_scales"], "packed": ["words", "word_scales"]}
HELD = [name for name, form in FORMS.items() if form is not None]
every_format = pytest.mark.parametrize("weights", FORMS)
every_held = pytest.mark.parametrize("weights", HELD)


def case_of(weights: str, **changes) -> FusedCase:
    sizes = {"H": 256, "I": 128} if FORMS[weights] == "boxed" else {"H": 72, "I": 40}
    return FusedCase(weights=weights, **{"L": 3, "bias": True, **sizes, **changes})


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Experts that are made inside hold their weights as on an H200, though on a CPU."""
    monkeypatch.setattr(kernel_weights, "can_run_boxed", lambda spec, _: FORMS[spec.weights] == "boxed")
    monkeypatch.setattr(kernel_weights, "can_run_packed", lambda spec, _: FORMS[spec.weights] == "packed")
    monkeypatch.setattr(kernel_weights, "can_run_recoded", lambda spec, _: FORMS[spec.weights] == "recoded")


def gpu_like(case: FusedCase, **options) -> FusedExperts:
    experts = FusedExperts(case.spec, case.held, **options)
    form = FORMS[case.weights]
    assert form is None or getattr(experts, f"is_{form}")
    return experts


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name


def expected_of(case: FusedCase) -> dict[str, torch.Tensor]:
    """What a state dict holds: the given tensors; of recoded weights, tensors of the numbers that are computed with."""
    return FusedExperts(case.spec, case.held).weights.by_name()


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_weight_format_is_here():
    assert set(FORMS) == set(WEIGHT_FORMATS)


# -- One layout ----------------------------------------------------------------------------------------------


@every_format
def test_a_state_dict_has_the_layout_of_the_weights(weights, as_on_a_gpu):
    case = case_of(weights)
    state = gpu_like(case).state_dict()
    assert_same(state, expected_of(case))
    on_cpu = GroupedExperts(case.spec, case.held).state_dict()
    assert {n: (t.dtype, t.shape) for n, t in state.items()} == {
        n: (t.dtype, t.shape) for n, t in on_cpu.items()
    }
    if weights != "mxfp8":
        assert_same(state, on_cpu)


@every_format
@pytest.mark.parametrize("through", [dict, through_torch, lambda state: load(save(state))])
def test_what_a_gpu_saves_a_cpu_loads_and_the_other_way_round(weights, through, as_on_a_gpu):
    case, other = case_of(weights), case_of(weights, seed=1)
    gpu, cpu = gpu_like(case), GroupedExperts(case.spec, other.held)
    assert not cpu.load_state_dict(through(gpu.state_dict())).missing_keys
    assert_same(dict(cpu.named_buffers()), expected_of(case))
    cpu = GroupedExperts(case.spec, other.held)
    before = {name: tensor.data_ptr() for name, tensor in gpu.named_buffers()}
    gpu.load_state_dict(through(cpu.state_dict()))
    assert {name: tensor.data_ptr() for name, tensor in gpu.named_buffers()} == before
    assert_same(dict(gpu.named_buffers()), dict(gpu_like(other).named_buffers()))
    again = gpu_like(case)
    again.load_state_dict(through(gpu.state_dict()))
    assert_same(dict(again.named_buffers()), dict(gpu.named_buffers()))


@every_format
def test_distributed_checkpoints(weights, as_on_a_gpu, tmp_path):
    """By the modules themselves, and by the state dicts that torch gets of a model."""
    case, other = case_of(weights), case_of(weights, seed=1)
    gpu = nn.ModuleDict({"experts": gpu_like(case)})
    cpu = nn.ModuleDict({"experts": GroupedExperts(case.spec, other.held)})
    checkpoint.save({"model": gpu}, checkpoint_id=tmp_path / "modules", no_dist=True)
    checkpoint.load({"model": cpu}, checkpoint_id=tmp_path / "modules", no_dist=True)
    assert_same(dict(cpu["experts"].named_buffers()), expected_of(case))
    cpu["experts"].load_(other.held)
    checkpoint.save(get_model_state_dict(cpu), checkpoint_id=tmp_path / "states", no_dist=True)
    state = get_model_state_dict(gpu)
    checkpoint.load(state, checkpoint_id=tmp_path / "states", no_dist=True)
    set_model_state_dict(gpu, state)
    assert_same(dict(gpu["experts"].named_buffers()), dict(gpu_like(other).named_buffers()))


@pytest.mark.parametrize(
    ("weights", "name"), [("bf16", "swigluoai"), ("mxfp4", "swigluoai"), ("mxint4", "swigluoai")]
)
def test_interleaved_gates(weights, name, as_on_a_gpu):
    case = case_of(weights, activation=name)
    experts = FusedExperts(case.spec, case.held)
    assert_same(experts.state_dict(), case.held.by_name())
    experts.load_state_dict(case_of(weights, activation=name, seed=1).held.by_name())
    assert_same(experts.state_dict(), case_of(weights, activation=name, seed=1).held.by_name())


@every_held
def test_a_state_dict_is_a_copy_that_needs_no_memory_beside_it(weights, as_on_a_gpu):
    """It stays what it is when other weights are loaded; and tensors that are held as given are not copied."""
    case = case_of(weights)
    experts = gpu_like(case)
    state, expected = experts.state_dict(), expected_of(case)
    held = {name: tensor.data_ptr() for name, tensor in experts.named_buffers()}
    shared = {name for name, tensor in state.items() if tensor.data_ptr() in held.values()}
    assert shared == set(state) & set(held)
    experts.load_(case_of(weights, seed=1).held)
    made = set(state) - shared
    assert_same({name: state[name] for name in made}, {name: expected[name] for name in made})


@every_held
def test_tensors_are_found_by_the_names_of_the_state_dict(weights, as_on_a_gpu):
    experts = gpu_like(case_of(weights))
    for name, tensor in experts.state_dict().items():
        assert torch.equal(bytes_of(getattr(experts, name)), bytes_of(tensor)), name
    for name in ("w13_nothing", "w2_datas", "w3", "w13_words_"):
        with pytest.raises(AttributeError, match=name):
            getattr(experts, name)


# -- strict=True ---------------------------------------------------------------------------------------------


@every_format
def test_missing_and_unexpected_keys_have_their_names(weights, as_on_a_gpu):
    case = case_of(weights)
    model = nn.ModuleDict({"experts": gpu_like(case)})
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    for name in list(state):
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"\. $'):
            model.load_state_dict({key: tensor for key, tensor in state.items() if key != name})
        found = model.load_state_dict({key: state[key] for key in state if key != name}, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == ([name], [])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "experts.w3"\. $'):
        model.load_state_dict({**state, "experts.w3": torch.ones(1)})
    found = model.load_state_dict({}, strict=False)
    assert sorted(found.missing_keys) == sorted(state)
    assert_same(dict(model.named_buffers()), before)


@every_format
def test_a_part_of_a_state_dict_replaces_a_part_of_the_weights(weights, as_on_a_gpu):
    case, other = case_of(weights), case_of(weights, seed=1)
    new = other.held.by_name()
    for names in (["b2"], [name for name in new if name.startswith("w2")], [next(iter(new))]):
        experts, expected = gpu_like(case), expected_of(case)
        experts.load_state_dict({name: new[name] for name in names}, strict=False)
        given = {**expected, **{name: new[name] for name in names}}
        plain = GroupedExperts(case.spec, case.held)
        plain.load_state_dict(given)
        assert_same(
            dict(experts.named_buffers()), dict(FusedExperts(case.spec, plain.weights).named_buffers())
        )


@every_format
def test_wrong_shapes_are_errors_and_change_no_matrix(weights, as_on_a_gpu):
    case = case_of(weights)
    model = nn.ModuleDict({"experts": gpu_like(case)})
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    state = model.state_dict()
    for name, tensor in state.items():
        wrong = torch.cat([tensor, tensor])
        with pytest.raises(
            RuntimeError, match=rf"size mismatch for {name}: copying a param with shape"
        ) as error:
            model.load_state_dict({**state, name: wrong})
        assert str(list(wrong.shape)) in str(error.value)
        assert str(list(tensor.shape)) in str(error.value)
        assert_same(dict(model.named_buffers()), before)


@pytest.mark.parametrize("weights", [name for name in FORMS if name not in ("bf16", "fp16", "fp32")])
@pytest.mark.parametrize("held", ["as on a GPU", "as given"])
def test_codes_are_not_converted_as_if_they_were_numbers(weights, held, request):
    """A tool has viewed the codes as bytes: copying these would convert each byte to a number."""
    if held == "as on a GPU":
        request.getfixturevalue("as_on_a_gpu")
    case = case_of(weights)
    experts = (
        FusedExperts(case.spec, case.held) if held == "as on a GPU" else GroupedExperts(case.spec, case.held)
    )
    state = experts.state_dict()
    before = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    declared = state["w2_data"].dtype
    other = torch.int8 if declared == torch.uint8 else torch.uint8
    message = rf"dtype mismatch for w2_data: {other} in the state dict, {declared} in the layer.*tensor\.view"
    with pytest.raises(RuntimeError, match=message) as error:
        experts.load_state_dict({**state, "w2_data": state["w2_data"].view(other)})
    assert "Missing" not in str(error.value)
    assert_same(dict(experts.named_buffers()), before)


def test_plain_weights_are_cast_as_torch_does(as_on_a_gpu):
    case = case_of("bf16")
    experts, state = gpu_like(case), case_of("bf16", seed=1).held.by_name()
    experts.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    assert_same(experts.state_dict(), state)


# -- Weights that the present form cannot hold ---------------------------------------------------------------


def spoiled(case: FusedCase) -> FusedCase:
    """With a scale that a packed form cannot hold, or blocks cannot share."""
    scales = case.held.w2.payloads["scales"].view(torch.uint8)
    scales.view(-1)[5] = {"mxfp8": 1, "nvfp4": 0xB8, "mxfp4": 250, "mxint4": 0x47}[case.weights]
    if case.weights == "mxint4":
        case.held.w2.payloads["scales"].view(-1)[5] = 2.0**14
    return case


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "mxint4"])
def test_weights_that_do_not_fit_the_form_are_refused_or_assigned(weights, as_on_a_gpu, monkeypatch):
    case, other = case_of(weights), spoiled(case_of(weights, seed=1))
    model = nn.ModuleDict({"experts": gpu_like(case)})
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    state = {f"experts.{name}": tensor for name, tensor in other.held.by_name().items()}
    with pytest.raises(RuntimeError, match=r"experts: w2 has scales .*load_state_dict\(…, assign=True\)"):
        model.load_state_dict(state)
    assert_same(dict(model.named_buffers()), {**before, **{k: v for k, v in state.items() if ".b" in k}})
    monkeypatch.setattr(kernel_weights, "can_run_packed", lambda spec, weights: False)
    model.load_state_dict(state, assign=True)
    assert model["experts"].is_as_given
    assert_same(dict(model.named_buffers()), state)


@every_format
def test_assigned_tensors_are_brought_into_the_form_of_the_kernels(weights, as_on_a_gpu):
    """Not into boxes, though: the tensors belong to the caller."""
    case, other = case_of(weights), case_of(weights, seed=1)
    experts, state = gpu_like(case), case_of(weights, seed=1).held.by_name()
    experts.load_state_dict(state, assign=True)
    assert_same(state, other.held.by_name())
    form = FORMS[weights]
    if form == "boxed":
        assert_same(dict(experts.named_buffers()), state)
        assert experts.is_as_given
    else:
        assert_same(dict(experts.named_buffers()), dict(gpu_like(other).named_buffers()))


@every_format
def test_experts_on_the_meta_device_are_assigned_a_state_dict(weights, as_on_a_gpu, monkeypatch):
    case = case_of(weights)
    state = gpu_like(case).state_dict()
    monkeypatch.undo()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which would recode on a CPU, too
    experts = FusedExperts(case.spec, case.held).to("meta")
    experts.load_state_dict(state, assign=True)
    assert_same(dict(experts.named_buffers()), state)


# -- Older files ---------------------------------------------------------------------------------------------


def old_file(experts: FusedExperts) -> dict[str, torch.Tensor]:
    """A state dict as experts gave it until they had one layout: the persistent buffers, as they are held."""
    derived = ("w13_bases", "w2_bases", "w13_largest", "w2_largest")
    return {name: tensor.clone() for name, tensor in experts.named_buffers() if name not in derived}


@every_held
@pytest.mark.parametrize("onto", ["a GPU", "a CPU"])
def test_older_files_load(weights, onto, as_on_a_gpu):
    case, other = case_of(weights), case_of(weights, seed=1)
    old = old_file(gpu_like(case))
    assert {f"{name}_{part}" for name in ("w13", "w2") for part in BUFFERS[FORMS[weights]]} <= set(old)
    experts = gpu_like(other) if onto == "a GPU" else GroupedExperts(case.spec, other.held)
    model = nn.ModuleDict({"experts": experts})
    model.load_state_dict({f"experts.{name}": tensor for name, tensor in through_torch(old).items()})
    assert_same(experts.state_dict(), expected_of(case))


@every_held
@pytest.mark.parametrize("onto", ["a GPU", "a CPU"])
def test_older_files_of_other_layers_are_refused(weights, onto, as_on_a_gpu):
    case = case_of(weights)
    experts = gpu_like(case) if onto == "a GPU" else GroupedExperts(case.spec, case.held)
    before = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    fewer = old_file(gpu_like(case_of(weights, L=2)))
    with pytest.raises(RuntimeError, match=r"size mismatch for|Unexpected key.*w13_words.*w2_words"):
        experts.load_state_dict(fewer)
    of_another = old_file(gpu_like(case_of("mxfp4" if FORMS[weights] == "boxed" else "bf16")))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*w13_(boxes|words)"):
        experts.load_state_dict(of_another)
    for name in [name for name in before if name.startswith("w")]:
        assert torch.equal(bytes_of(before[name]), bytes_of(experts.get_buffer(name))), name
