"""Weights held box by box: the order, the kernels that read it, and how experts hold and give back such weights.

Boxes are for Hopper. Here they are forced, so that Triton's interpreter runs the kernels that do not use TMA.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.exchange.interpreter import install, only_without_gpu
from tests.experts.fused_cases import FusedCase, check_case, same_bits
from tokenyard.errors import InputError
from tokenyard.experts import FusedExperts, activation
from tokenyard.experts.fused import boxes, kernel_choice, kernel_weights, launch
from tokenyard.experts.fused.tile_configs import SPLIT_OUT, TileConfig, TileConfigs, choose_tiles

pytestmark = only_without_gpu
install()

NUMBERS = FusedCase(H=256, I=128, L=2, R=20)
CODES = replace(NUMBERS, weights="fp8_block128", rows="fp8_block128", inner="fp8_block128")
LAYERS = {"bf16": NUMBERS, "fp16": replace(NUMBERS, weights="fp16", rows="fp16"), "fp8_block128": CODES}
every_format = pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)


@pytest.fixture
def boxed_on_a_cpu(monkeypatch):
    """What experts hold on Hopper."""
    monkeypatch.setattr(kernel_weights, "can_run_boxed", lambda spec, device: device.type == "cpu")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def in_lines(case: FusedCase) -> FusedExperts:
    """Experts that hold their weights in the given order."""
    return FusedExperts(case.spec, case.held, adopt=True)


# -- The order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 64), (torch.float8_e4m3fn, 128)])
@pytest.mark.parametrize(("lines", "inputs"), [(128, 128), (128, 384), (384, 128), (256, 640)])
def test_every_number_is_in_its_box(lines, inputs, dtype, unit):
    drawn = torch.randint(0, 256, (3, lines, inputs * dtype.itemsize), dtype=torch.uint8)
    matrix, expected = drawn.view(dtype), drawn.view(dtype).clone()
    found = boxes.box(matrix, unit)
    line, column = torch.arange(lines)[:, None], torch.arange(inputs)[None, :]
    place = line // 128 * (128 * inputs) + line % 128 * unit + column // unit * (128 * unit) + column % unit
    for expert in range(3):
        numbers = found[expert].flatten()[place.flatten()].view(lines, inputs)
        assert torch.equal(bytes_of(numbers), bytes_of(expected[expert]))
    assert torch.equal(bytes_of(matrix), bytes_of(expected))
    assert torch.equal(bytes_of(boxes.unbox(found, unit)), bytes_of(expected))
    assert boxes.box(matrix, unit, into=matrix) is matrix
    assert torch.equal(bytes_of(matrix), bytes_of(found))
    assert boxes.unbox(matrix, unit, into=matrix) is matrix
    assert torch.equal(bytes_of(matrix), bytes_of(expected))


def test_matrices_with_strides_and_without_experts():
    wide = torch.randn(2, 128, 512)
    assert torch.equal(boxes.box(wide[..., ::2], 64), boxes.box(wide[..., ::2].contiguous(), 64))
    assert boxes.unbox(boxes.box(torch.empty(0, 128, 128), 64), 64).shape == (0, 128, 128)


def test_a_box_is_128_bytes_wide():
    for weights, unit in boxes.UNITS.items():
        held = LAYERS[weights].held.w13
        data = held if isinstance(held, torch.Tensor) else held.payloads["data"]
        assert unit * data.element_size() == 128


CHOSEN = {
    "bf16": (NUMBERS, {}, True),
    "fp16": (LAYERS["fp16"], {}, True),
    "fp8_block128": (CODES, {}, True),
    "exact between the products": (CODES, {"inner": None}, False),
    "no gate": (NUMBERS, {"activation": "relu2"}, False),
    "interleaved": (NUMBERS, {"activation": "swiglu_oai"}, False),
    "a hidden size that is no multiple of 128": (NUMBERS, {"H": 320}, False),
    "an intermediate size that is no multiple of 128": (NUMBERS, {"I": 192}, False),
    "fp32": (NUMBERS, {"weights": "fp32", "rows": "fp32"}, False),
    "mxfp8": (CODES, {"weights": "mxfp8", "rows": "mxfp8", "inner": None}, False),
    "mxfp4": (CODES, {"weights": "mxfp4", "rows": "mxfp8"}, False),
}


@pytest.mark.parametrize(("case", "changes", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_which_weights_are_boxed(case, changes, expected, monkeypatch):
    spec, device = replace(case, **changes).spec, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernel_choice.can_run_boxed(spec, device) == expected
    assert not kernel_choice.can_run_boxed(spec, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not kernel_choice.can_run_boxed(spec, device)


# -- Kernels -------------------------------------------------------------------------------------------------

LIMITED = replace(activation("swiglu_clamped"), interleaved=False)
WIDE = TileConfig(64, 32, 64, 4, 3, 16)
SPLIT = TileConfig(SPLIT_OUT, 32, 128, 4, 3, 16)
BY_ROWS = replace(SPLIT, rows_first=True)
READ = {
    "bf16, as the table says": (NUMBERS, {}, None),
    "bf16, tails": (NUMBERS, {"I": 256, "bias": True, "activation": LIMITED}, TileConfigs(WIDE, WIDE)),
    "bf16, several boxes of inputs a step": (
        NUMBERS,
        {"H": 128, "weight_on": "input"},
        TileConfigs(replace(WIDE, block=128), replace(WIDE, block=128)),
    ),
    "bf16, for which rows first was chosen": (
        NUMBERS,
        {},
        TileConfigs(replace(WIDE, rows_first=True), WIDE),
    ),
    "bf16, for which TMA was chosen": (
        NUMBERS,
        {},
        TileConfigs(replace(WIDE, tma=True), replace(WIDE, tma=True)),
    ),
    "fp16, in a workspace": (LAYERS["fp16"], {"in_workspace": True}, None),
    "bf16, rows of fp8": (NUMBERS, {"rows": "fp8_block128"}, None),
    "bf16, rows of nvfp4": (NUMBERS, {"rows": "nvfp4", "H": 128}, None),
    "fp8, two blocks a step": (CODES, {"bias": True}, None),
    "fp8, one block a step": (CODES, {"H": 384}, None),
    "fp8, tails": (CODES, {"L": 1}, TileConfigs(SPLIT, SPLIT)),
    "fp8, rows first": (CODES, {}, TileConfigs(BY_ROWS, BY_ROWS)),
    "fp8, rows of bf16": (CODES, {"rows": "bf16"}, None),
    "fp8, split in two": (CODES, {"inner": None}, TileConfigs(SPLIT, SPLIT)),
    "fp8, split in two, rows first": (CODES, {"inner": None}, TileConfigs(BY_ROWS, BY_ROWS)),
}


@pytest.mark.parametrize(("case", "changes", "tiles"), READ.values(), ids=READ)
def test_kernels_read_boxes_with_the_same_bits(case, changes, tiles, boxed_on_a_cpu, monkeypatch):
    case = replace(case, **changes)
    experts, plain = FusedExperts(case.spec, case.held), in_lines(case)
    assert experts.is_boxed
    assert not plain.is_boxed
    experts.tile_configs = plain.tile_configs = tiles
    if tiles is not None and tiles.inner.tma:
        plain.tile_configs = TileConfigs(replace(tiles.inner, tma=False), replace(tiles.result, tma=False))
        monkeypatch.setattr(launch, "tma_kernels", None)  # which no product of boxes may use
    assert same_bits(check_case(case, experts), plain(case.received()).rows_RH)


@pytest.mark.parametrize(
    ("case", "rows", "decodes"),
    [(NUMBERS, "mxfp8", True), (NUMBERS, "fp8_block128", False), (LAYERS["fp16"], "mxfp8", False)],
    ids=["bf16, rows of mxfp8", "bf16, rows of fp8", "fp16, rows of mxfp8"],
)
def test_rows_of_mxfp8_are_decoded_for_boxes_of_bf16(case, rows, decodes, boxed_on_a_cpu, monkeypatch):
    """So that specialized warps can multiply them, with the numbers that the kernels for lines decode."""
    case, decoded, decode = replace(case, rows=rows, R=30), [], launch.launch_decoded_rows

    def noted(*given, **options):
        decoded.append(decode(*given, **options))
        return decoded[-1]

    monkeypatch.setattr(launch, "launch_decoded_rows", noted)
    experts, plain = FusedExperts(case.spec, case.held), in_lines(case)
    y_RH = check_case(case, experts)
    assert same_bits(y_RH, plain(case.received()).rows_RH)
    assert bool(decoded) == decodes
    if decodes:
        assert torch.equal(decoded[0].payloads["data"], case.received().rows.decode(torch.bfloat16))
    monkeypatch.setattr("tokenyard.experts.fused.experts.can_run_specialized", lambda *_: True)
    assert experts.choose_tiles(100, rows).specialized == decodes
    assert not plain.choose_tiles(100, rows).specialized


def test_few_rows_of_boxed_numbers_take_specialized_warps():
    for weights in ("bf16", "fp16", "fp8_block128"):
        for pairs in (1, 8, 12):
            tiles = choose_tiles(pairs, 1, weights, specialized=True, boxed=True)
            assert tiles.specialized
            assert tiles.inner.tile == 16
            # Rows that these warps cannot load have the plain tiles.
            plain = choose_tiles(pairs, 1, weights, specialized=weights == "fp8_block128")
            if weights != "fp8_block128":
                inner, result = (replace(config, specialized=False) for config in (tiles.inner, tiles.result))
                assert TileConfigs(inner, result) == plain
            assert choose_tiles(pairs, 1, weights, boxed=True) == choose_tiles(pairs, 1, weights)
            other = {"rows": "mxfp8", "specialized": True}
            assert choose_tiles(pairs, 1, weights, boxed=True, **other) == choose_tiles(
                pairs, 1, weights, **other
            )
        for pairs in (13, 100, 10_000):
            assert choose_tiles(pairs, 1, weights, specialized=True, boxed=True) == choose_tiles(
                pairs, 1, weights, specialized=True
            )


# -- How they are held ---------------------------------------------------------------------------------------


@every_format
def test_weights_are_held_once_and_given_back(case, boxed_on_a_cpu):
    experts = FusedExperts(case.spec, case.held)
    scales = {"w13_scales", "w2_scales"} if case.weights == "fp8_block128" else set()
    assert set(dict(experts.named_buffers())) == {"w13_boxes", "w2_boxes"} | scales
    assert sum(buffer.nbytes for buffer in experts.buffers()) == case.held.nbytes
    held = case.held.by_name()
    for name, tensor in experts.weights.by_name().items():
        assert torch.equal(bytes_of(tensor), bytes_of(held[name])), name


@every_format
def test_weights_that_were_given_back_stay_what_they_are(case, boxed_on_a_cpu):
    experts = FusedExperts(case.spec, case.held)
    before, given = experts(case.received()).rows_RH, experts.weights
    experts.load_(replace(case, seed=1).held)
    assert not torch.equal(experts(case.received()).rows_RH, before)
    experts.load_(given)
    assert same_bits(experts(case.received()).rows_RH, before)


@every_format
def test_loading_is_in_place(case, boxed_on_a_cpu):
    case, other = replace(case, bias=True), replace(case, bias=True, seed=1)
    experts, expected = FusedExperts(case.spec, case.held), FusedExperts(case.spec, other.held)
    pointers = {name: tensor.data_ptr() for name, tensor in experts.named_buffers()}
    experts.load_(other.held)
    assert {name: tensor.data_ptr() for name, tensor in experts.named_buffers()} == pointers
    for name, tensor in experts.named_buffers():
        assert torch.equal(bytes_of(tensor), bytes_of(expected.get_buffer(name))), name


def test_loading_changes_nothing_if_a_part_has_no_numbers(boxed_on_a_cpu):
    case, other = replace(NUMBERS, bias=True), replace(NUMBERS, bias=True, seed=1)
    experts = FusedExperts(case.spec, case.held)
    before = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    with pytest.raises(InputError, match="is on the meta device"):
        experts.load_(replace(other.held, b2=other.held.b2.to("meta")))
    for name, tensor in experts.named_buffers():
        assert torch.equal(tensor, before[name]), name


@every_format
def test_what_is_given_is_not_changed_and_what_is_adopted_not_boxed(case, boxed_on_a_cpu):
    case = replace(case, seed=2)
    before = {name: tensor.clone() for name, tensor in case.held.by_name().items()}
    copied, adopted = FusedExperts(case.spec, case.held), FusedExperts(case.spec, case.held, adopt=True)
    assert copied.is_boxed
    for experts in (adopted, adopted.to("cpu")):
        assert not experts.is_boxed
        assert set(dict(experts.named_buffers())) == set(before)
    for name, tensor in case.held.by_name().items():
        assert torch.equal(bytes_of(tensor), bytes_of(before[name])), name
        assert adopted.get_buffer(name).data_ptr() == tensor.data_ptr()


def test_a_class_can_decline_boxes(boxed_on_a_cpu):
    class InLines(FusedExperts):
        boxes = False

    assert not InLines(NUMBERS.spec, NUMBERS.held).is_boxed


@every_format
def test_experts_move_with_their_boxes(case, boxed_on_a_cpu):
    """Between ranks: a row of each tensor is an expert, as the rank that takes it would hold it."""
    experts = FusedExperts(case.spec, case.held)
    movable = experts.movable()
    assert {name: tensor.data_ptr() for name, tensor in movable.items()} == {
        name: tensor.data_ptr() for name, tensor in experts.named_buffers()
    }
    alone = FusedExperts(replace(case.spec, num_local_experts=1), case.held.select([1]))
    for name, tensor in alone.movable().items():
        assert torch.equal(bytes_of(tensor[0]), bytes_of(movable[name][1])), name


@every_format
def test_experts_that_leave_the_gpu_hold_what_they_were_given(case, monkeypatch):
    """As do those that come to a GPU whose kernels load other boxes, or none; coming back, they have boxes again."""
    experts = FusedExperts(case.spec, case.held)
    held = case.held.by_name()
    assert set(dict(experts.named_buffers())) == set(held)
    monkeypatch.setattr(kernel_weights, "can_run_boxed", lambda spec, device: device.type == "cpu")
    experts.to("cpu")
    assert experts.is_boxed
    boxed = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    monkeypatch.undo()
    experts.to("cpu")
    assert set(dict(experts.named_buffers())) == set(held)
    for name, tensor in experts.named_buffers():
        assert torch.equal(bytes_of(tensor), bytes_of(held[name])), name
    monkeypatch.setattr(kernel_weights, "can_run_boxed", lambda spec, device: device.type == "cpu")
    for name, tensor in experts.to("cpu").named_buffers():
        assert torch.equal(bytes_of(tensor), bytes_of(boxed[name])), name
    assert set(dict(experts.to("meta").named_buffers())) == set(held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_boxes_that_were_cast_are_refused_until_they_are_cast_back(dtype, boxed_on_a_cpu):
    experts = FusedExperts(NUMBERS.spec, NUMBERS.held).to(dtype)
    assert experts.is_boxed
    with pytest.raises(InputError, match=r"w13 is .*expected bfloat16, as the layer was planned; fix: cast"):
        experts(NUMBERS.received())
    experts.to(torch.bfloat16)
    if dtype != torch.float16:
        assert torch.equal(experts.weights.w13, NUMBERS.held.w13)
        assert same_bits(experts(NUMBERS.received()).rows_RH, in_lines(NUMBERS)(NUMBERS.received()).rows_RH)


def test_the_order_of_weights_that_were_cast_is_that_of_their_format(boxed_on_a_cpu, monkeypatch):
    experts = FusedExperts(NUMBERS.spec, NUMBERS.held).to(torch.float32)
    assert torch.equal(experts.weights.w13, NUMBERS.held.w13.float())
    monkeypatch.undo()
    assert torch.equal(experts.to("cpu").get_buffer("w13"), NUMBERS.held.w13.float())


def test_casts_leave_boxes_of_e4m3_alone(boxed_on_a_cpu):
    experts = FusedExperts(CODES.spec, CODES.held)
    before = dict(experts.named_buffers())
    torch.nn.Sequential(experts).to(torch.float16)
    assert all(tensor is before[name] for name, tensor in experts.named_buffers())
