"""The workspace: regions never overlap and never overrun, whatever layers share them, and the size is the formula."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenyard as ty
from tests.models import spec
from tokenyard.errors import ContractError, InputError
from tokenyard.exchange import SharedMemoryTransport
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports.one_sided.cpu.signals import control_bytes, flag
from tokenyard.exchange.workspace import (
    REGION_ALIGNMENT,
    RowLayout,
    SlotLayout,
    WorkspaceLayout,
    as_bytes,
    round_up,
)
from tokenyard.formats import Payload
from tokenyard.group import thread_groups


@st.composite
def layers(draw, name):
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    plain = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return spec(
        name,
        hidden_size=draw(st.sampled_from([1, 7, 100, 128, 2880, 7168])),
        num_experts=draw(st.integers(1, 384)),
        top_k=draw(st.integers(1, 32)),
        max_tokens=draw(st.sampled_from([1, 3, 64, 500, 4096])),
        dtype=dtype,
        wire=draw(st.sampled_from([plain, "fp8_block128", "mxfp8", "mxfp8(alignment=256)", "nvfp4"])),
        combine_wire=draw(st.sampled_from([plain, "fp8_block128", "mxfp8", "nvfp4"])),
        payloads=tuple(
            Payload(name=f"extra{n}", dtype=draw(st.sampled_from([torch.uint8, torch.int64])), width=width)
            for n, width in enumerate(draw(st.lists(st.integers(1, 40), max_size=3)))
        ),
    )


@st.composite
def plans(draw):
    count = draw(st.integers(1, 5))
    specs = [draw(layers(f"layer {n}")) for n in range(count)]
    return specs, draw(st.sampled_from([1, 2, 3, 4, 8, 64])), draw(st.integers(1, 3))


@settings(max_examples=300)
@given(plan=plans())
def test_no_region_overlaps_or_overruns_and_the_size_is_the_formula(plan):
    specs, world, in_flight = plan
    drafted = ty.draft(specs, world, exchange="one_sided", in_flight=in_flight)
    exchange_specs = [wiring.exchange_spec for wiring in drafted.wirings]
    group = thread_groups(world)[0]
    layout = SharedMemoryTransport(group, in_flight=in_flight).layout_for(exchange_specs)

    regions = [layout.control_region()]
    regions += [layout.dispatch_region(n) for n in range(in_flight)]
    regions += [layout.combine_region(n) for n in range(in_flight)]
    for before, after in itertools.pairwise(regions):
        assert before.end <= after.offset
        assert after.offset % REGION_ALIGNMENT == 0
    assert regions[-1].end <= layout.nbytes

    dispatch = max(exchange_spec.dispatch_slots.nbytes for exchange_spec in exchange_specs)
    combine = max(exchange_spec.combine_slots.nbytes for exchange_spec in exchange_specs)
    control = round_up(control_bytes(world), REGION_ALIGNMENT)
    assert layout.nbytes == control + in_flight * (dispatch + combine)
    assert (drafted.dispatch_bytes, drafted.combine_bytes) == (dispatch, combine)

    for exchange_spec in exchange_specs:
        for slots, region in (
            (exchange_spec.dispatch_slots, dispatch),
            (exchange_spec.combine_slots, combine),
        ):
            assert slots.slots == world * exchange_spec.max_tokens
            ends = [0]
            for payload, offset in zip(slots.payloads, slots.offsets, strict=True):
                assert offset >= ends[-1]  # no payload lies over another
                assert offset % REGION_ALIGNMENT == 0
                ends.append(offset + slots.slots * payload.nbytes)
            assert ends[-1] <= slots.nbytes <= region  # no layer leaves its region


def test_views_of_slots_are_disjoint_and_cover_what_they_declare():
    payloads = [
        Payload(name="a", dtype=torch.bfloat16, width=5),
        Payload(name="b", dtype=torch.float32, width=1),
        Payload(name="c", dtype=torch.uint8, width=3),
    ]
    layout = SlotLayout.of(payloads, slots=7)
    region = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(region)
    for number, (payload, view) in enumerate(zip(payloads, views.values(), strict=True), start=1):
        assert view.shape == (7, payload.width)
        assert view.dtype == payload.dtype
        view.view(torch.uint8).fill_(number)
    assert [int((region == n).sum()) for n in (1, 2, 3)] == [7 * 10, 7 * 4, 7 * 3]


def test_a_region_that_is_too_small_by_a_byte_is_refused():
    layout = SlotLayout.of([Payload(name="a", dtype=torch.uint8, width=5)], slots=7)
    assert layout.views(torch.zeros(layout.end, dtype=torch.uint8))["a"].shape == (7, 5)
    with pytest.raises(
        ContractError, match=f"has {layout.end - 1} bytes; expected at least {layout.end}: 7 slots"
    ):
        layout.views(torch.zeros(layout.end - 1, dtype=torch.uint8))


@pytest.mark.parametrize("width", [1, 3, 8, 33])
def test_packets_come_back_as_they_went(width):
    payloads = [
        Payload(name="data", dtype=torch.bfloat16, width=width),
        Payload(name="scales", dtype=torch.uint8, width=1),
        Payload(name="ids", dtype=torch.int32, width=3),
    ]
    tensors = {
        "data": torch.randn(4, width).bfloat16(),
        "scales": torch.randint(0, 256, (4, 1), dtype=torch.uint8),
        "ids": torch.randint(-1, 9, (4, 3), dtype=torch.int32),
    }
    layout = RowLayout.of(payloads)
    packets = layout.pack(tensors, 4, torch.device("cpu"))
    assert packets.shape == (4, layout.stride)
    for name, tensor in layout.unpack(packets).items():
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(packets, layout.pack(tensors, 4, torch.device("cpu")))  # gaps are zero, not chance


def test_bytes_of_a_column_that_torch_calls_contiguous():
    column = torch.arange(6, dtype=torch.int32).view(2, 3)[:, 1:2].expand(2, 1)
    assert as_bytes(column).view(torch.int32).flatten().tolist() == [1, 4]


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_bytes_of_a_slice_whose_rows_are_far_apart(tokens):
    wide = torch.arange(2 * 35, dtype=torch.int32).view(2, 35)
    assert torch.equal(as_bytes(wide[:tokens, :32]).view(torch.int64).view(torch.int32), wide[:tokens, :32])


def test_bytes_of_rows_that_lie_one_behind_the_other_are_no_copy():
    rows = torch.arange(12, dtype=torch.int16).view(4, 3)
    assert as_bytes(rows).data_ptr() == rows.data_ptr()
    assert as_bytes(rows[1:]).data_ptr() == rows[1:].data_ptr()


def test_a_layout_serves_another_or_says_that_it_does_not():
    small = WorkspaceLayout(control=10, dispatch=100, combine=900)
    large = WorkspaceLayout(control=10, dispatch=200, combine=300)
    assert not small.suffices_for(large)
    assert not large.suffices_for(small)  # larger in sum, too small in one region
    union = small.union(large)
    assert union.suffices_for(small)
    assert union.suffices_for(large)
    assert (union.dispatch, union.combine) == (200, 900)


def test_flags_order_by_round_and_tell_layers_and_phases_apart():
    seen = {flag(layer, phase, round) for layer in range(200) for phase in Phase for round in range(5)}
    assert len(seen) == 200 * 2 * 5
    assert flag(10_000, Phase.COMBINE, 4) < flag(0, Phase.DISPATCH, 5)


def test_a_region_that_ends_with_its_last_slot_suffices():
    layout = SlotLayout.of([Payload(name="data", dtype=torch.uint8, width=50)], slots=3)
    assert layout.views(torch.zeros(150, dtype=torch.uint8))["data"].shape == (3, 50)
    with pytest.raises(ContractError, match="has 149 bytes; expected at least 150"):
        layout.views(torch.zeros(149, dtype=torch.uint8))


def test_gaps_of_packets_are_zero():
    payloads = [
        Payload(name="data", dtype=torch.uint8, width=50),
        Payload(name="ids", dtype=torch.int32, width=4),
    ]
    layout = RowLayout.of(payloads)
    tensors = {"data": torch.full((2, 50), 7, dtype=torch.uint8), "ids": torch.ones(2, 4, dtype=torch.int32)}
    packets = layout.pack(tensors, 2, torch.device("cpu"))
    assert not packets[:, 50:64].any()


@pytest.mark.parametrize("wrong", [torch.ones(2, 4), torch.ones(3, 4).int(), torch.ones(2, 1).int()])
def test_only_what_a_payload_declares_is_packed(wrong):
    layout = RowLayout.of([Payload(name="ids", dtype=torch.int32, width=4)])
    with pytest.raises(InputError, match="'ids'"):
        layout.pack({"ids": wrong}, 2, torch.device("cpu"))


def test_the_bytes_of_a_matrix_are_its_own_where_they_lie_side_by_side():
    rows = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert as_bytes(rows).data_ptr() == rows.data_ptr()
    assert as_bytes(rows).shape == (3, 8)
    for spread in (rows.t(), rows[:, ::2], rows[:, 1:2], rows[::2], rows[:1].t()[:1].t()):
        found = as_bytes(spread)
        assert found.is_contiguous()
        assert torch.equal(found.view(torch.int16), spread)
    column = torch.arange(6, dtype=torch.int16).as_strided((3, 1), (1, 5))  # counts as contiguous
    assert torch.equal(as_bytes(column).view(torch.int16), column)


def test_a_row_without_payloads_takes_no_bytes():
    assert (RowLayout.of([]).stride, SlotLayout.of([], 4).end, SlotLayout.of([], 4).nbytes) == (0, 0, 0)


@pytest.mark.parametrize("width", [3, 16, 20])
def test_gaps_of_packets_are_zero_whatever_stood_there(width):
    """Behind a payload that is shorter than its alignment, as long, and longer."""
    layout = RowLayout.of([Payload(name="data", dtype=torch.uint8, width=width)])
    packets = torch.full((2, layout.stride), 0x41, dtype=torch.uint8)
    layout.write(packets, {"data": torch.ones(2, width, dtype=torch.uint8)})
    assert (packets[:, :width] == 1).all()
    assert (packets[:, width:] == 0).all()
