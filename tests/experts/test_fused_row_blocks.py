"""Rows of mxfp8 as blocks of e4m3: the kernel, interpreted, beside its twin; and how close the blocks are."""

from __future__ import annotations

import pytest
import torch

from tests.exchange.interpreter import install, only_without_gpu
from tests.experts.fused_cases import FusedCase, _scattered
from tests.experts.row_block_cases import SCALES, WIDTHS, all_codes, assert_recoded, drawn_rows
from tokenyard import formats
from tokenyard.experts.fused import launch, packing
from tokenyard.experts.fused.kernels import twins
from tokenyard.experts.fused.operands import Destination, Launch
from tokenyard.experts.fused.tile_configs import CodesTileConfig, TileConfigs
from tokenyard.formats.base import EncodedRows

pytestmark = only_without_gpu
install()


@pytest.fixture(autouse=True, params=[1, 4], ids=["one row at a time", "four"])
def at_a_time(request, monkeypatch):
    """The rows that a block recodes at a time: one in short batches, four in long ones."""
    monkeypatch.setattr(launch, "rows_at_a_time", lambda rows: request.param)


def recoded(
    rows: EncodedRows, slots_R: torch.Tensor | None = None, num_rows: int | None = None
) -> EncodedRows:
    num_rows = rows.num_rows if num_rows is None else num_rows
    with launch.on_device(rows.payloads["data"]):
        found = launch.launch_row_blocks(rows, slots_R, num_rows, early=False)
    found.check()
    return found


@pytest.mark.parametrize("scales", SCALES)
def test_rows_are_those_of_the_twin(scales):
    for width in WIDTHS:
        for alignment in (32, 256):
            rows = drawn_rows(width, scales, alignment=alignment)
            assert_recoded(recoded(rows), rows)


def test_every_code_at_every_distance():
    rows = all_codes()
    assert_recoded(recoded(rows), rows)


@pytest.mark.parametrize("width", [33, 300])
def test_rows_are_gathered_out_of_a_workspace(width):
    rows = drawn_rows(width, "near")
    slots_R = torch.randperm(30)[: rows.num_rows]
    payloads = {name: _scattered(payload, slots_R, 30) for name, payload in rows.payloads.items()}
    workspace = EncodedRows(format=rows.format, hidden_size=width, payloads=payloads)
    assert_recoded(recoded(workspace, slots_R, rows.num_rows), rows)


@pytest.mark.parametrize("width", [33, 300, 1100])
def test_rows_are_placed_for_packed_weights(width):
    """The row of every pair in the order of its expert, permuted, with its scales by block; in a workspace, too."""
    rows = drawn_rows(width, "far", rows=9)
    slots_R = torch.randperm(30)[: rows.num_rows]
    payloads = {name: _scattered(payload, slots_R, 30) for name, payload in rows.payloads.items()}
    workspace = EncodedRows(format=rows.format, hidden_size=width, payloads=payloads)
    ids_RK = torch.randint(-1, 4, (9, 3), dtype=torch.int32)
    spec = FusedCase(H=width, L=4, K=3, weights="mxfp4").spec
    tiles = TileConfigs(CodesTileConfig(1, 4), CodesTileConfig(1, 4))
    with launch.on_device(ids_RK):
        found = launch.sort_on_device(ids_RK, 4, 64, early=False)
        sums = torch.empty(27, width)
        call = Launch(spec, tiles, found, torch.ones(9, 3), Destination(sums, None, sums), False)
        codes, scales = launch.launch_placed_rows(call, workspace, slots_R)
    places = int((ids_RK >= 0).sum())
    pair = found.order_N[:places]
    row = torch.where(pair < 0, ~pair, pair).long() // 3
    straight = torch.empty_like(codes.view(torch.uint8))
    straight[:, packing.code_order(codes.shape[1])] = codes.view(torch.uint8)
    data, block_scales = twins.recode_rows(rows)
    assert torch.equal(straight[:places], data.view(torch.uint8)[row])
    assert torch.equal(scales.T[:places], block_scales[row])


@pytest.mark.parametrize("spread", [1.0, 2.0**6, 2.0**20])
def test_no_number_moves_far(spread):
    """By at most half of the smallest step, as a part of the largest code: 2^-10 / 224."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 384, generator=draw) * spread ** torch.rand(8, 384, generator=draw)
    rows = formats.get("mxfp8").encode(x)
    found = recoded(rows)
    exact, close = rows.decode(), found.decode()
    largest = exact.abs().unflatten(1, (-1, 128)).amax(2)
    moved = (close - exact).abs().unflatten(1, (-1, 128)).amax(2)
    assert (moved <= largest * (2.0**-10 / 224)).all()
    if spread == 1.0:
        assert (close != exact).float().mean() < 0.001


BAD = {
    "a scale of NaN": lambda data, scales: scales.__setitem__((2, 5), 255),
    "a scale of NaN, of zeros": lambda data, scales: (
        scales.__setitem__((2, 5), 255),
        data.view(torch.uint8)[2, 160:192].zero_(),
    ),
    "a code of NaN": lambda data, scales: data.view(torch.uint8).__setitem__((2, 170), 0xFF),
    "an infinity": lambda data, scales: (
        scales.__setitem__((2, 5), 254),
        data.__setitem__((2, 170), torch.tensor(448.0).to(data.dtype)),
    ),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_what_is_not_finite_makes_its_block_nan(spoil):
    rows = formats.get("mxfp8").encode(torch.ones(4, 300))
    good = recoded(rows).decode()
    spoil(rows.payloads["data"], rows.payloads["scales"])
    found = recoded(rows)
    assert_recoded(found, rows)
    is_nan = found.decode().isnan()
    assert is_nan[2, 128:256].all()
    assert is_nan.sum() == 128
    assert torch.equal(found.decode()[~is_nan], good[~is_nan])


def test_the_largest_number_is_no_infinity():
    rows = formats.get("mxfp8").encode(torch.full((1, 40), torch.finfo(torch.float32).max))
    rows.payloads["data"][:] = torch.tensor(1.875).to(torch.float8_e4m3fn)
    rows.payloads["scales"][:] = 254
    assert torch.equal(recoded(rows).decode(), torch.full((1, 40), 1.875 * 2.0**127))


def test_codes_of_nan_in_the_middle_of_random_ones():
    rows = drawn_rows(512, "far", nan=True, rows=4)
    found = recoded(rows)
    assert_recoded(found, rows)
    assert found.payloads["scales"].isnan().any()


@pytest.mark.parametrize("scales", SCALES)
def test_rows_are_decoded_exactly(scales):
    for width in WIDTHS:
        rows = drawn_rows(width, scales, alignment=256, nan=True)
        slots_R = torch.randperm(30)[: rows.num_rows]
        payloads = {name: _scattered(payload, slots_R, 30) for name, payload in rows.payloads.items()}
        workspace = EncodedRows(format=rows.format, hidden_size=width, payloads=payloads)
        for given, slots in ((rows, None), (workspace, slots_R)):
            with launch.on_device(slots_R):
                found = launch.launch_decoded_rows(given, slots, rows.num_rows, early=False)
            expected = rows.decode(torch.bfloat16)
            assert torch.equal(found.payloads["data"].isnan(), expected.isnan())
            assert torch.equal(found.payloads["data"].nan_to_num(0.5), expected.nan_to_num(0.5))
