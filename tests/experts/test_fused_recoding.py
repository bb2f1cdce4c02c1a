"""mxfp8 and mxfp4 weights as blocks of e4m3: what is guaranteed holds, what is not is refused, nothing else is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.exchange.interpreter import install, only_without_gpu
from tests.experts.fused_cases import FusedCase, check_case, same_bits
from tokenyard.conformance.suites import EXPERTS_CHECKS
from tokenyard.errors import InputError
from tokenyard.experts import FusedExperts
from tokenyard.experts.fused import recoding
from tokenyard.formats import QuantizedMatrix, weight_format

pytestmark = only_without_gpu
install()

MXFP8 = weight_format("mxfp8")
SHAPES = [(1, 1), (32, 24), (100, 40), (128, 128), (130, 257), (257, 384)]
every_shape = pytest.mark.parametrize(("outputs", "inputs"), SHAPES)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def given_back(blocks: QuantizedMatrix, shape: tuple[int, ...]) -> QuantizedMatrix:
    return QuantizedMatrix(format=MXFP8, shape=shape, payloads=recoding.give_back(blocks))


def same_bytes(a: QuantizedMatrix, b: QuantizedMatrix) -> bool:
    return all(
        torch.equal(a.payloads[n].view(torch.uint8), b.payloads[n].view(torch.uint8)) for n in a.payloads
    )


def changes(matrix: QuantizedMatrix) -> torch.Tensor:
    """How much each line changes, as a part of its length, found in float64; 0 for a line of zeros."""
    exact = matrix.decode(torch.float64)
    found = recoding.recode(matrix).decode(torch.float64)[..., : matrix.shape[-1]]
    return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).nan_to_num(0.0)


# -- Matrices ------------------------------------------------------------------------------------------------


@every_shape
def test_nothing_is_lost_where_all_scales_are_the_same(outputs, inputs):
    draw = torch.Generator().manual_seed(outputs)
    matrix = MXFP8.quantize(normal(2, outputs, inputs))
    codes = torch.randint(0, 0x7F, (2, outputs, inputs), generator=draw, dtype=torch.uint8)
    matrix.payloads["data"].view(torch.uint8)[..., :inputs] = codes | 0x80 * (codes % 2)
    matrix.payloads["scales"].fill_(120)
    assert recoding.can_recode(matrix)
    blocks = recoding.recode(matrix)
    assert torch.equal(blocks.payloads["data"].view(torch.uint8), matrix.payloads["data"].view(torch.uint8))
    assert same_bits(blocks.decode()[..., :inputs], matrix.decode())


@every_shape
def test_gaussian_weights_hardly_change(outputs, inputs):
    matrix = MXFP8.quantize(normal(3, outputs, inputs, seed=inputs) * 0.02)
    assert recoding.can_recode(matrix)
    assert changes(matrix).amax() < 2.0**-16
    blocks = recoding.recode(matrix)
    scales = -(-outputs // 128) * -(-inputs // 128) * 3
    assert blocks.payloads["scales"].numel() == scales
    assert blocks.nbytes <= matrix.nbytes + 4 * scales
    assert (torch.frexp(blocks.payloads["scales"])[0] == 0.5).all()


MXFP4 = weight_format("mxfp4")


@every_shape
@pytest.mark.parametrize("spread", [0, 14])
def test_codes_of_four_bits_are_exact_up_to_a_spread_of_14(outputs, inputs, spread):
    """Every code, under scales that differ by up to 2^spread."""
    matrix = MXFP4.quantize(normal(2, outputs, inputs))
    draw = torch.Generator().manual_seed(inputs)
    for name, least, most in (("data", 0, 256), ("scales", 120, 121 + spread)):
        payload = matrix.payloads[name]
        payload.copy_(torch.randint(least, most, payload.shape, generator=draw, dtype=torch.uint8))
    assert recoding.can_recode(matrix)
    blocks = recoding.recode(matrix)
    assert same_bits(blocks.decode()[..., :inputs], matrix.decode())
    assert torch.equal(recoding.block_scales(matrix, matrix.device), blocks.payloads["scales"])


def test_scales_of_four_bits_that_are_too_far_apart_or_no_numbers_are_refused():
    for byte in (100, 255, 228):
        matrix = MXFP4.quantize(normal(1, 128, 256))
        assert recoding.can_recode(matrix)
        matrix.payloads["scales"][0, 5] = byte
        assert not recoding.can_recode(matrix), byte
    tiny = MXFP4.quantize(normal(1, 128, 256))
    tiny.payloads["scales"].fill_(30)  # below what 1 / scale can be found for
    assert not recoding.can_recode(tiny)
    nothing = MXFP4.quantize(torch.zeros(1, 128, 256))
    assert recoding.can_recode(nothing)
    assert not recoding.recode(nothing).decode().any()


@every_shape
def test_what_was_given_back_is_recoded_to_the_same_bits(outputs, inputs):
    matrix = MXFP8.quantize(normal(2, outputs, inputs) * 2.0 ** (3 * normal(2, outputs, 1, seed=1)))
    blocks = recoding.recode(matrix)
    given = given_back(blocks, matrix.shape)
    assert torch.equal(given.decode(), blocks.decode()[..., :inputs])
    assert recoding.can_recode(given)
    again = recoding.recode(given)
    assert same_bytes(again, blocks)
    assert same_bytes(given_back(again, matrix.shape), given)


def test_lines_with_outliers():
    """An input that is hundreds of times larger makes its lines longer, too."""
    w = normal(1, 140, 300)
    w[:, :, 7], w[:, 130:, 200] = 300.0, -1000.0
    matrix = MXFP8.quantize(w)
    assert recoding.can_recode(matrix)
    assert 0 < changes(matrix).amax() < 2.0**-12
    w[:, :, 7], w[:, 12, 7] = 10_000.0, 0.1  # and one line without it is short
    assert not recoding.can_recode(MXFP8.quantize(w))


def test_the_answer_is_that_of_float64():
    """Blocks in which some lines are smaller than others, by more and more: refused where one changes too much."""
    answers = []
    for seed in range(60):
        factor = 2.0 ** -(normal(1, 150, 1, seed=seed).abs() * (0.5 + seed / 12))
        matrix = MXFP8.quantize(normal(1, 150, 130, seed=seed) * factor)
        worst = float(changes(matrix).amax())
        answers.append(recoding.can_recode(matrix))
        assert answers[-1] == (worst <= 2.0**-12), (seed, worst)
    assert 10 < sum(answers) < 50


def test_only_one_line_of_one_expert_need_be_wrong():
    matrix = MXFP8.quantize(normal(3, 140, 96))
    assert recoding.can_recode(matrix)
    matrix.payloads["scales"][2, 133] -= 12
    assert recoding.can_recode(MXFP8.quantize(normal(3, 1, 96)))
    assert not recoding.can_recode(matrix)
    matrix.payloads["data"].view(torch.uint8)[2, 133] = 0  # nothing is left of that line
    assert recoding.can_recode(matrix)


NOT_NUMBERS = {
    "a scale of NaN": ("scales", 255, False),
    "a code of NaN": ("data", 0x7F, False),
    "another code of NaN": ("data", 0xFF, False),
    "an infinity": ("scales", 254, False),
    "a scale that is hardly too large": ("scales", recoding.LARGEST_BYTE + 1, False),
    "the largest scale": ("scales", recoding.LARGEST_BYTE, True),
}


@pytest.mark.parametrize(("payload", "byte", "fine"), NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_what_is_no_number_is_refused(payload, byte, fine):
    matrix = MXFP8.quantize(torch.ones(2, 1, 40))
    assert recoding.can_recode(matrix)
    if payload == "scales":
        matrix.payloads["scales"][1, 0] = byte
    else:
        matrix.payloads["data"].view(torch.uint8)[1, 0, 3] = byte
    assert recoding.can_recode(matrix) == fine


def test_zeros_need_no_scale():
    w = normal(2, 200, 200).sign()
    w[0], w[1, :, 128:], w[1, 5], w[1, 130:] = 0.0, 0.0, 0.0, 0.0
    matrix = MXFP8.quantize(w)
    matrix.payloads["scales"][0] = 254  # that of zeros means nothing
    matrix.payloads["data"][1, 130] = torch.tensor(-0.0).to(torch.float8_e4m3fn)
    assert recoding.can_recode(matrix)
    blocks = recoding.recode(matrix)
    assert same_bits(blocks.decode()[..., :200], matrix.decode())
    assert not blocks.payloads["scales"].isnan().any()
    matrix.payloads["scales"][0, 0, 0] = 255  # zero times NaN is NaN
    assert not recoding.can_recode(matrix)


def test_what_stands_behind_the_inputs_is_zero():
    matrix = MXFP8.quantize(normal(1, 3, 40))
    clean = recoding.recode(matrix)
    matrix.payloads["data"].view(torch.uint8)[..., 40:] = 0x7F
    assert recoding.can_recode(matrix)
    assert same_bytes(recoding.recode(matrix), clean)


# -- Experts -------------------------------------------------------------------------------------------------

LAYER = FusedCase(weights="mxfp8", rows="mxfp8", H=136, I=72, L=2, R=5, bias=True)
ROWS = ["bf16", "mxfp8", "mxfp8(alignment=256)"]


def spoiled(case: FusedCase) -> FusedCase:
    """A line so small that it cannot share a scale."""
    case.held.w2.payloads["scales"][1, 7] -= 14
    return case


@pytest.fixture
def held_as_given(monkeypatch):
    monkeypatch.setattr(FusedExperts, "recodes", False)


def test_weights_are_held_once_as_blocks():
    experts = FusedExperts(LAYER.spec, LAYER.held)
    assert experts.is_recoded
    assert experts.held_format == "fp8_block128"
    names = {f"{name}_{part}" for name in ("w13", "w2") for part in ("blocks", "block_scales")}
    assert set(dict(experts.named_buffers())) == names | {"b13", "b2"}
    given = experts.weights
    assert given.w13.format == MXFP8
    for name in ("w13", "w2"):
        exact, found = (getattr(weights, name).decode(torch.float64) for weights in (LAYER.held, given))
        assert ((found - exact).norm(dim=-1) <= 2.0**-12 * exact.norm(dim=-1)).all()
    again = FusedExperts(LAYER.spec, given)
    for name, tensor in experts.named_buffers():
        assert torch.equal(tensor.view(torch.uint8), again.get_buffer(name).view(torch.uint8)), name
    assert same_bits(again(LAYER.received()).rows_RH, experts(LAYER.received()).rows_RH)


@pytest.mark.parametrize("check", ["nothing_is_changed", "load_is_in_place", "rows_for_nobody_are_zero"])
def test_the_contract(check):
    class Recoded(FusedExperts):
        weight_formats = ("mxfp8",)

    EXPERTS_CHECKS[check](Recoded, torch.device("cpu"))


def test_weights_that_were_given_back_stay_what_they_are():
    """They are a copy: other weights may be loaded, and these again."""
    experts = FusedExperts(LAYER.spec, LAYER.held)
    before, given = experts(LAYER.received()).rows_RH, experts.weights
    experts.load_(replace(LAYER, seed=1).held)
    assert not torch.equal(experts(LAYER.received()).rows_RH, before)
    experts.load_(replace(given, b13=LAYER.held.b13, b2=LAYER.held.b2))
    assert same_bits(experts(LAYER.received()).rows_RH, before)


def test_adopted_weights_are_not_written_to():
    case = replace(LAYER, seed=3)
    before = {name: tensor.clone() for name, tensor in case.held.by_name().items()}
    experts = FusedExperts(case.spec, case.held, adopt=True)
    experts.load_(LAYER.held)
    for name, tensor in case.held.by_name().items():
        if name.startswith("w"):
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("rows", ROWS)
def test_weights_that_cannot_be_recoded_are_decoded(rows):
    case = spoiled(replace(LAYER, rows=rows, in_workspace=True))
    experts = FusedExperts(case.spec, case.held)
    assert not experts.is_recoded
    assert experts.held_format == "mxfp8"
    check_case(case, experts)
    for name, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), case.held.by_name()[name].view(torch.uint8)), name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("changes", [{}, {"activation": "relu2", "I": 33}, {"in_workspace": True, "H": 100}])
def test_weights_that_are_held_as_they_are(rows, changes, held_as_given):
    case = replace(LAYER, rows=rows, **changes)
    experts = FusedExperts(case.spec, case.held)
    assert not experts.is_recoded
    check_case(case, experts)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("pairs", [8, 24, 400])
def test_blocks_are_cut_as_those_of_fp8_block128(rows, pairs):
    experts = FusedExperts(LAYER.spec, LAYER.held)
    other = replace(LAYER, weights="fp8_block128")
    alike = FusedExperts(other.spec, other.held)
    assert experts.choose_tiles(pairs, rows) == alike.choose_tiles(
        pairs, "fp8_block128" if rows == "mxfp8" else "bf16"
    )


def test_products_are_those_of_fp8_block128():
    """Blocks with these scales, held by experts with such weights, give the same bits."""
    experts = FusedExperts(LAYER.spec, LAYER.held)
    other = replace(LAYER, weights="fp8_block128", rows="bf16")
    w13, w2 = (experts._blocks(name) for name in ("w13", "w2"))

    def cut(blocks: QuantizedMatrix, inputs: int) -> QuantizedMatrix:
        payloads = {**blocks.payloads, "data": blocks.payloads["data"][..., :inputs].contiguous()}
        return QuantizedMatrix(format=blocks.format, shape=(*blocks.shape[:2], inputs), payloads=payloads)

    weights = replace(LAYER.held, w13=cut(w13, LAYER.H), w2=cut(w2, LAYER.I))
    plain = replace(LAYER, rows="bf16").received()
    assert same_bits(FusedExperts(other.spec, weights)(plain).rows_RH, experts(plain).rows_RH)


def test_loading_is_in_place():
    other = replace(LAYER, seed=1)
    experts = FusedExperts(LAYER.spec, LAYER.held)
    pointers = {name: tensor.data_ptr() for name, tensor in experts.named_buffers()}
    experts.load_(other.held)
    assert {name: tensor.data_ptr() for name, tensor in experts.named_buffers()} == pointers
    expected = FusedExperts(LAYER.spec, other.held)
    for name, tensor in experts.named_buffers():
        assert torch.equal(tensor.view(torch.uint8), expected.get_buffer(name).view(torch.uint8)), name
    assert same_bits(experts(LAYER.received()).rows_RH, expected(LAYER.received()).rows_RH)


@pytest.mark.parametrize("broken", ["b2", "scales of w2", "a line of w2"])
def test_loading_changes_nothing_if_a_part_cannot_be_held(broken):
    other = replace(LAYER, seed=1)
    bad = other.held
    if broken == "a line of w2":
        bad = spoiled(other).held
        match = r"w2 has an output that would change by more than 2\^-12 .*fix: make new experts"
    elif broken == "b2":
        bad, match = replace(bad, b2=bad.b2.to("meta")), "is on the meta device"
    else:
        payloads = {**bad.w2.payloads, "scales": bad.w2.payloads["scales"].to("meta")}
        bad, match = replace(bad, w2=replace(bad.w2, payloads=payloads)), "is on the meta device"
    experts = FusedExperts(LAYER.spec, LAYER.held)
    before = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    with pytest.raises(InputError, match=match):
        experts.load_(bad)
    for name, tensor in experts.named_buffers():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def test_experts_that_leave_the_gpu_hold_mxfp8_again(monkeypatch):
    """Where nothing interprets the kernels, a CPU holds weights as their format has them; coming back, as blocks."""
    experts = FusedExperts(LAYER.spec, LAYER.held)
    blocks = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    given = experts.weights.by_name()
    monkeypatch.delenv("TRITON_INTERPRET")
    experts.to("cpu")
    assert set(dict(experts.named_buffers())) == set(LAYER.held.by_name())
    for name, tensor in experts.weights.by_name().items():
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8)), name
    monkeypatch.undo()
    experts.to("cpu")
    for name, tensor in experts.named_buffers():
        assert torch.equal(tensor.view(torch.uint8), blocks[name].view(torch.uint8)), name
    experts.to("meta")
    assert set(dict(experts.named_buffers())) == set(LAYER.held.by_name())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_casts_leave_blocks_alone(dtype):
    experts = FusedExperts(LAYER.spec, LAYER.held)
    before = dict(experts.named_buffers())
    torch.nn.Sequential(experts).to(dtype)
    assert experts.is_recoded
    assert all(tensor is before[name] for name, tensor in experts.named_buffers())


BAD_ROWS = {
    "a scale of NaN": ("scales", 1, 255),
    "a code of NaN": ("data", 40, 0x7F),
    "an infinity": ("scales", 1, 254),
}


@pytest.mark.parametrize(("payload", "at", "byte"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_nan_stays_in_its_row(payload, at, byte):
    case = replace(LAYER, seed=4, routing="one expert")
    experts = FusedExperts(case.spec, case.held)
    good = experts(case.received()).rows_RH
    case.x.payloads[payload].view(torch.uint8)[3, at] = byte
    found = experts(case.received()).rows_RH
    assert found[3].isnan().all()
    others = torch.arange(case.R) != 3
    assert same_bits(found[others], good[others])
