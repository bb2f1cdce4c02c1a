"""Combine with a quantized output, and in low precision: FlashInfer's own cases, with narrower rows.

Each rank knows what all ranks bring, so it can say what must come home: the float32 sum over ranks, in rank order, and
its codes. Where a scale stands is said by the formulas of FlashInfer's kernels, element by element.
"""

import itertools

import pytest
import torch

import tokenyard as ty
from tests.integrations.flashinfer.round_trips import make
from tests.models import on_ranks, raised
from tokenyard.conformance.cases import same_bits
from tokenyard.formats import Mxfp4Weights, Mxfp8, Nvfp4
from tokenyard.integrations.flashinfer import SfLayout

LINEAR, TILES_128X4, TILES_8X4 = SfLayout.layout_linear, SfLayout.layout_128x4, SfLayout.layout_8x4
# World, H and top_k, as models have them there, with H / 32.
SHAPES = [
    (4, 128, 2),
    (4, 96, 4),  # 3 scales a row: none of the tiles is full
    (8, 160, 6),
    (8, 224, 8),
    (8, 128, 8),
    (8, 128, 10),
    (8, 128, 16),
    (8, 128, 22),
]
OUTPUTS = [
    ("mxfp8", LINEAR),
    ("mxfp8", TILES_128X4),
    ("mxfp8", TILES_8X4),
    ("mxfp4", TILES_128X4),
    ("nvfp4", TILES_128X4),
    ("mxfp4", LINEAR),
    ("nvfp4", LINEAR),
    ("nvfp4", TILES_8X4),
]
DTYPES = {
    "mxfp8": (torch.float8_e4m3fn, torch.uint8),
    "mxfp4": (torch.uint8, torch.uint8),
    "nvfp4": (torch.uint8, torch.float8_e4m3fn),
}
TOKENS, G = 5, 2.5


def position(layout, token, column, columns):
    """The offset of a scale, as FlashInfer's kernels find it; `columns` scales a row, without the pad."""
    padded = -(-columns // 4) * 4
    if layout == TILES_128X4:
        inside = token % 32 * 16 + token % 128 // 32 * 4 + column % 4
        return inside + column // 4 * 512 + token // 128 * 128 * padded
    if layout == TILES_8X4:
        return token // 8 * padded * 8 + column // 4 * 32 + token % 8 * 4 + column % 4
    return token * columns + column


def number_of_scales(layout, tokens, columns):
    tile = {LINEAR: 1, TILES_128X4: 128, TILES_8X4: 8}[layout]
    wide = columns if layout == LINEAR else -(-columns // 4) * 4
    return -(-tokens // tile) * tile * wide


def encoded(name, y_TH):
    """Codes, and linear scales as bytes."""
    if name == "mxfp4":
        held = Mxfp4Weights(scale_rule="ceil").quantize(y_TH).payloads
        return held["data"], held["scales"]
    format = Mxfp8() if name == "mxfp8" else Nvfp4(global_scale=G)
    rows = format.encode(y_TH).payloads
    return rows["data"], rows["scales"].view(torch.uint8)


def results_of_rank(rank, world, hidden, dtype):
    """What the stand-ins for experts of one rank return, for the slots from each rank."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(world, TOKENS, hidden, generator=draw).mul_(3).to(dtype)


def one_shape(group, hidden, top_k, dtype):
    """Every output, with results in the workspace and outside; the names of what was not as the twin says."""
    world, wrong = group.size, []
    a2a = make(group, top_k=top_k, num_experts=world * top_k)
    draw = torch.Generator().manual_seed(100 + group.rank)
    ids_TK = torch.stack([torch.randperm(world * top_k, generator=draw)[:top_k] for _ in range(TOKENS)]).int()
    mine = results_of_rank(group.rank, world, hidden, dtype)
    sums_TH = torch.zeros(TOKENS, hidden)
    low_TH = torch.zeros(TOKENS, hidden)
    for rank in range(world):
        here = [t for t, ids in enumerate(ids_TK.tolist()) if any(i // top_k == rank for i in ids)]
        rows = results_of_rank(rank, world, hidden, dtype)[group.rank, : len(here)].float()
        sums_TH[here] += rows
        low_TH[here] += rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def trip(in_workspace, **options):
        a2a.dispatch(ids_TK, [ids_TK], TOKENS)
        payload = mine
        if in_workspace:
            payload = a2a.get_combine_payload_tensor_in_workspace(TOKENS, hidden, dtype).copy_(mine)
        return a2a.combine(payload, TOKENS, in_workspace, **options)

    for number, (name, layout) in enumerate(OUTPUTS):
        code_dtype, scale_dtype = DTYPES[name]
        expected, scales_TC = encoded(name, sums_TH)
        columns = scales_TC.shape[1]
        scales = torch.full((number_of_scales(layout, TOKENS, columns),), 7, dtype=torch.uint8).view(
            scale_dtype
        )
        output = torch.empty_like(expected) if number % 2 else None
        codes = trip(
            number % 3 == 0,
            output_dtype=code_dtype,
            output_scales=scales,
            output_scalar_scale=G,
            sf_layout=layout,
            output=output,
        )
        if codes.dtype != code_dtype or not same_bits(codes, expected):
            wrong.append(f"codes of {name}")
        if output is not None and codes is not output:
            wrong.append(f"output of {name}")
        there = torch.zeros_like(scales.view(torch.uint8))
        for token, column in itertools.product(range(TOKENS), range(columns)):
            there[position(layout, token, column, columns)] = scales_TC[token, column]
        if not torch.equal(scales.view(torch.uint8), there):
            wrong.append(f"scales of {name}, {layout.name}")
    for in_workspace in (False, True):
        output = torch.empty(TOKENS, hidden, dtype=torch.bfloat16) if in_workspace else None
        y_TH = trip(in_workspace, use_low_precision=True, output=output)
        if not same_bits(y_TH, low_TH.bfloat16()):
            wrong.append("low precision")
    if not same_bits(trip(False, output_dtype=dtype), sums_TH.to(dtype)):
        wrong.append("the plain sum")
    return wrong


@pytest.mark.parametrize(("world", "hidden", "top_k"), SHAPES)
def test_outputs_are_the_codes_of_the_float32_sum(world, hidden, top_k):
    dtype = torch.float16 if top_k == 10 else torch.bfloat16
    assert on_ranks(world, one_shape, hidden, top_k, dtype) == [[]] * world


def test_ranks_as_processes():
    assert on_ranks(2, one_shape, 96, 3, torch.float32, ranks="processes") == [[], []]


def odd_sizes(group):
    """A rank without tokens, a width that is no multiple of a block, and outputs that differ between ranks."""
    a2a = make(group, num_experts=2, top_k=1)
    tokens = 3 * group.rank
    ids_TK = torch.ones(tokens, 1, dtype=torch.int32)
    results = torch.arange(2 * 3 * 40).view(2, 3, 40).float()
    found = []
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        a2a.dispatch(ids_TK, [ids_TK], 3)
        code_dtype, scale_dtype = DTYPES[name]
        scales = torch.zeros(tokens * (3 if name == "nvfp4" else 2), dtype=scale_dtype)
        options = {"output_dtype": code_dtype, "output_scales": scales, "output_scalar_scale": G}
        y_TH = a2a.combine(results, 3, **(options if group.rank or name == "mxfp4" else {}))
        found.append((tuple(y_TH.shape), y_TH.dtype))
        if group.rank:
            codes, scales_TC = encoded(name, results[1])
            assert torch.equal(scales.view(torch.uint8), scales_TC.flatten())
            assert same_bits(y_TH, codes[:, : y_TH.shape[1]].contiguous())
    return found


def test_any_width_and_each_rank_for_itself():
    first, second = on_ranks(2, odd_sizes)
    assert first == [((0, 40), torch.float32), ((0, 20), torch.uint8), ((0, 40), torch.float32)]
    assert second == [((3, 40), torch.float8_e4m3fn), ((3, 20), torch.uint8), ((3, 20), torch.uint8)]


SCALES = torch.zeros(2 * 4, dtype=torch.uint8)
REFUSED = {
    "a dtype without scales": ({"output_dtype": torch.float8_e4m3fn}, "there are no output_scales"),
    "another dtype in low precision": (
        {"output_dtype": torch.float16, "use_low_precision": True},
        "expected bfloat16, of a use_low_precision combine",
    ),
    "scales without a dtype": (
        {"output_scales": SCALES},
        "output_dtype is None and output_scales is a tensor uint8[8]",
    ),
    "mxfp8 with scales of nvfp4": (
        {"output_dtype": torch.float8_e4m3fn, "output_scales": SCALES.view(torch.float8_e4m3fn)},
        "expected float8_e4m3fn with uint8 scales (mxfp8)",
    ),
    "scales in low precision": (
        {"output_dtype": torch.uint8, "output_scales": SCALES, "use_low_precision": True},
        "use_low_precision is True, and output_scales are given",
    ),
    "too few scales": (
        {"output_dtype": torch.uint8, "output_scales": SCALES[:7]},
        "expected 2 × 4 contiguous scales on cpu: mxfp4 of [2, 128], layout_linear",
    ),
    "scales of another layout": (
        {"output_dtype": torch.uint8, "output_scales": SCALES, "sf_layout": 0},
        "expected 128 × 4 contiguous scales",
    ),
    "an unknown layout": ({"sf_layout": 5}, "sf_layout is 5; expected a member of SfLayout"),
    "a scale of zero": (
        {
            "output_dtype": torch.uint8,
            "output_scales": torch.zeros(16, dtype=torch.float8_e4m3fn),
            "output_scalar_scale": 0.0,
        },
        "global_scale=0.0",
    ),
    "an output of another shape": (
        {
            "output_dtype": torch.uint8,
            "output_scales": SCALES,
            "output": torch.zeros(2, 128, dtype=torch.uint8),
        },
        "output is a tensor uint8[2, 128]; expected uint8[2, 64], contiguous, on cpu: codes of mxfp4",
    ),
}


def refused(group):
    """`options` on rank 1; a good combine after each."""
    a2a, ids, rows, errors = make(group, num_experts=2), torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 4), {}
    results = torch.ones(group.size, 2, 128)
    for name, (options, _) in REFUSED.items():
        a2a.dispatch(ids, [rows], 2)
        error = raised(a2a.combine, results, 2, **(options if group.rank else {}))
        errors[name] = f"{type(error).__name__}: {error}"
    a2a.dispatch(ids, [rows], 2)
    odd = {"output_dtype": torch.uint8, "output_scales": SCALES[:2]} if group.rank else {}
    errors["odd"] = str(raised(a2a.combine, torch.ones(group.size, 2, 5), 2, **odd))
    a2a.dispatch(ids, [rows], 2)
    return errors, a2a.combine(results, 2)[:, 0].tolist()


def test_what_does_not_fit_is_refused_on_all_ranks_and_the_next_round_trip_works():
    for rank, (errors, y_T) in enumerate(on_ranks(2, refused)):
        assert y_T == [2.0, 1.0]
        for name, (_, expected) in REFUSED.items():
            assert expected in errors[name], (name, errors[name])
            assert errors[name].startswith("InputError" if rank else "PeerFailed"), name
        assert "results of 5 columns and a mxfp4 output" in errors["odd"]


def test_the_sum_is_rounded_once():
    def once(group):
        a2a = make(group, num_experts=2)
        a2a.dispatch(torch.tensor([[0, 1]]), [torch.ones(1, 1)], 1)
        results = torch.tensor([448.0, 0.5][group.rank]).expand(2, 1, 32).bfloat16()
        scales = torch.zeros(1, dtype=torch.uint8)
        a2a.combine(results, 1, output_dtype=torch.float8_e4m3fn, output_scales=scales)
        return scales.item()

    # 448.5 is 448 in bf16, which needs a scale of 1; the sum itself needs 2.
    assert on_ranks(2, once) == [128, 128]


def test_low_precision_saturates():
    def once(group):
        a2a = make(group, num_experts=2)
        a2a.dispatch(torch.tensor([[0, 1]]), [torch.ones(1, 1)], 1)
        results = torch.tensor([1e4, -torch.inf, torch.nan, 0.3]).expand(2, 1, 4).half()
        return a2a.combine(results, 1, use_low_precision=True)

    for y_TH in ty.launch(2, once):
        assert torch.equal(y_TH[0, [0, 1, 3]], torch.tensor([896.0, -896.0, 0.625]).bfloat16())
        assert y_TH[0, 2].isnan()
