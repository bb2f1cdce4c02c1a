"""Sizes and places in bytes, worked out by hand: of packets, slots, workspaces and control regions."""

from dataclasses import asdict, replace

import pytest
import torch

from tokenyard.errors import InputError
from tokenyard.exchange import AllgatherTransport, ExchangeSpec, SharedMemoryTransport, Transport
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch_maker import check_batch
from tokenyard.exchange.results import check_output, check_writable
from tokenyard.exchange.stats import LayerStats, LoadCounter, MoveStats
from tokenyard.exchange.transports.forwarding import inside_spec
from tokenyard.exchange.transports.hierarchical import DeviceHierarchicalTransport, HierarchicalTransport
from tokenyard.exchange.transports.host_map import HostMap
from tokenyard.exchange.transports.messages import Mailbox
from tokenyard.exchange.transports.one_sided.cpu.signals import Signals, control_bytes
from tokenyard.exchange.transports.one_sided.cuda.control import ControlLayout
from tokenyard.exchange.workspace import LayerBytes, Region, WorkspaceLayout, _copy_bytes, round_up
from tokenyard.formats import Payload, get
from tokenyard.group.threads import thread_groups
from tokenyard.routing import Placement, Routes

# A row has 32 bytes of data, 1 of scales, 12 of ids, 12 of weights, and payloads of 5 and 16; a result has 20.
ODD = ExchangeSpec(
    layer="odd",
    index=0,
    hidden_size=10,
    num_experts=6,
    top_k=3,
    max_tokens=5,
    dtype=torch.bfloat16,
    wire=get("mxfp8"),
    combine_wire=get("bf16"),
    placement=Placement.contiguous(6, 2),
    extra=(
        Payload(name="bytes", dtype=torch.uint8, width=5),
        Payload(name="words", dtype=torch.int64, width=2),
    ),
)


def test_a_packet_of_odd_widths():
    assert ODD.dispatch_layout.offsets == (0, 32, 48, 64, 80, 96)
    assert (ODD.dispatch_layout.stride, ODD.combine_layout.stride) == (112, 32)
    assert Transport.region_bytes(ODD) == LayerBytes(
        dispatch_row=112, combine_row=32, dispatch=1120, combine=320
    )


def test_slots_of_odd_widths():
    assert ODD.slots == 10
    assert ODD.dispatch_slots.offsets == (0, 384, 512, 640, 768, 896)
    assert (ODD.dispatch_slots.end, ODD.dispatch_slots.nbytes) == (1056, 1152)
    assert (ODD.combine_slots.end, ODD.combine_slots.nbytes) == (200, 256)
    assert SharedMemoryTransport.region_bytes(ODD) == LayerBytes(
        dispatch_row=78, combine_row=20, dispatch=1152, combine=256
    )


def test_messages_have_room_for_all_counts_and_all_rows():
    """An announcement of 5 counts has 560 bytes, of 10 counts 592: the place of 6 rows of 112 bytes, or 19 of 32."""
    mailbox = Mailbox(thread_groups(2)[0])
    assert (mailbox.most(112), mailbox.fits(0, 112), mailbox.fits(1, 112)) == (512, True, False)
    mailbox.serve([ODD], lambda spec: 5)
    assert (mailbox.head_bytes, mailbox.group.longest_message) == (560, (5 + 5) * 112)
    assert [mailbox.fits(count, 112) for count in (0, 5, 6)] == [True, True, False]
    assert [mailbox.most(stride) for stride in (112, 96, 2000)] == [1120, 1152, 2000]
    mailbox.serve([replace(ODD, max_tokens=50, max_rows=8), ODD], lambda spec: 5)
    assert (mailbox.head_bytes, mailbox.group.longest_message) == (592, (6 + 50) * 112)
    mailbox.serve([replace(ODD, max_tokens=50, top_k=6, sums_choices=True)], lambda spec: 10)
    assert mailbox.group.longest_message == (19 + 6 * 50) * 32


def test_allgather_tells_of_all_tokens_where_rows_have_a_bound():
    transport = AllgatherTransport(thread_groups(2)[0])
    assert [transport.num_counts(replace(ODD, max_rows=rows)) for rows in (None, 8)] == [2, 3]
    assert transport.loads(0, [1, 2, 3]) == [3]


def test_a_room_is_kept_as_long_as_it_suffices():
    mailbox = Mailbox(thread_groups(1)[0])
    with torch.inference_mode():
        first = mailbox.room("in", 10)
    first.fill_(1)  # outside of inference mode, too
    assert [mailbox.room("in", nbytes).data_ptr() for nbytes in (10, 4)] == [first.data_ptr()] * 2
    assert [len(mailbox.room(name, nbytes)) for name, nbytes in (("in", 4), ("out", 3), ("in", 11))] == [
        4,
        3,
        11,
    ]
    assert mailbox.room("in", 11).data_ptr() != first.data_ptr()
    mailbox.clear()
    assert len(mailbox.room("in", 2)) == 2
    assert mailbox.room("in", 2).untyped_storage().nbytes() == 2 + 4096
    assert mailbox.room("in", 2).data_ptr() % 4096 == 0


def test_rows_that_carry_checksums():
    """Three numbers of the head, one for each payload, and a copy of the routes or one for the logits."""
    paranoid = replace(ODD, checksummed=True)
    assert [(payload.name, payload.width) for payload in paranoid.further] == [
        ("bytes", 5),
        ("words", 2),
        ("checksums", 10),
    ]
    assert paranoid.dispatch_layout.stride == 112 + 80
    assert paranoid.combine_layout.stride == 32 + 32
    logits = replace(paranoid, carries_logits=True)
    assert [payload.width for payload in logits.further] == [5, 2, 8]
    assert [payload.name for payload in logits.dispatch_layout.payloads][2:4] == ["logits", "bytes"]
    assert logits.dispatch_layout.offsets == (0, 32, 48, 80, 96, 112)


@pytest.mark.parametrize(
    ("size", "alignment", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32), (129, 128, 256)]
)
def test_rounding_up(size, alignment, expected):
    assert round_up(size, alignment) == expected


def test_a_workspace_with_guards_for_three_in_flight():
    layout = WorkspaceLayout(control=100, dispatch=1000, combine=500, in_flight=3, guard=256)
    assert {name: (region.offset, region.nbytes) for name, region in layout.regions().items()} == {
        "control": (256, 100),
        "dispatch 0": (640, 1000),
        "dispatch 1": (1920, 1000),
        "dispatch 2": (3200, 1000),
        "combine 0": (4480, 500),
        "combine 1": (5248, 500),
        "combine 2": (6016, 500),
    }
    assert layout.nbytes == 6784
    assert layout.gaps()[0] == Region(offset=0, nbytes=256)
    assert layout.gaps()[-1] == Region(offset=6516, nbytes=268)
    assert len(layout.gaps()) == 8
    assert layout.regions()["combine 1"].of(torch.arange(6784))[[0, -1]].tolist() == [5248, 5747]


@pytest.mark.parametrize("field", ["control", "dispatch", "combine", "in_flight", "guard"])
def test_what_a_workspace_suffices_for(field):
    """What is as large suffices; a region that is larger by a byte, or other control, guards and flights do not."""
    small = WorkspaceLayout(control=10, dispatch=100, combine=50, in_flight=2, guard=128)
    large = replace(small, **{field: getattr(small, field) + 1})
    assert small.suffices_for(small)
    assert not small.suffices_for(large)
    assert large.suffices_for(small) == (field in ("dispatch", "combine"))
    assert small.union(large) == large.union(small) == large


@pytest.mark.parametrize(
    ("world", "nbytes"), [(1, 3200), (3, 8320), (4, 10880), (127, 329_600), (128, 332_160), (129, 335_104)]
)
def test_a_control_region_has_flags_a_verdict_mail_from_everybody_and_counts(world, nbytes):
    assert control_bytes(world) == nbytes


def test_mail_of_every_turn_phase_and_source_has_its_own_place():
    controls = [torch.zeros(control_bytes(3), dtype=torch.uint8) for _ in range(3)]
    signals = Signals(controls, thread_groups(3)[1])
    places = [
        signals._mail_offset(phase, turn, source)
        for turn in range(2)
        for phase in Phase
        for source in range(3)
    ]
    assert places == [384 + 640 * number for number in range(12)]
    behind = (384 + 640 * 12) // 8  # in words: the counts of one turn, then those of the other
    assert [signals._counts_at(turn) for turn in (-1, 0, 1, 2)] == [behind + 16, behind, behind + 16, behind]


@pytest.mark.parametrize(
    ("world", "in_flight", "counts", "text", "nbytes"),
    [
        (3, 1, (224, 248), 256, 2048),
        (3, 2, (272, 296, 320), 320, 2048),
        (63, 3, (4160, 4664, 5168, 5672), 5680, 7168),
        (1, 1, (160, 168), 176, 2048),
    ],
)
def test_the_control_region_of_a_gpu(world, in_flight, counts, text, nbytes):
    layout = ControlLayout(world=world, in_flight=in_flight)
    assert tuple(layout.counts(region) for region in range(in_flight + 1)) == counts
    assert [layout.text(phase) for phase in (0, 1)] == [
        Region(offset=text + at, nbytes=512) for at in (0, 512)
    ]
    assert layout.nbytes == nbytes
    assert layout.turns == in_flight + 1
    flags = [layout.flags(phase, round) for round in range(layout.turns) for phase in (0, 1)]
    assert flags == [slice(16 + n * world, 16 + n * world + world) for n in range(2 * layout.turns)]
    assert layout.flags(1, layout.turns) == layout.flags(1, 0)


# -- What can be written into --------------------------------------------------------------------------------

MEMORY = torch.zeros(40)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),  # columns one behind the other
        ((3, 4), (9, 2), False),
        ((3, 4), (3, 1), True),  # the last of a row is the first of the next
        ((3, 4), (1, 2), True),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),  # a row alone lies over no other
        ((3, 1), (1, 0), False),
        ((2, 4), (4, 1), False),
        ((2, 4), (3, 1), True),
        ((0, 4), (0, 0), False),  # there is nothing to lie over
    ],
)
def test_elements_that_share_memory(shape, strides, overlaps):
    out = MEMORY.as_strided(shape, strides)
    if overlaps:
        with pytest.raises(InputError, match="whose elements share memory"):
            check_writable(out)
    else:
        check_writable(out)


def test_a_tensor_that_was_made_in_inference_mode_is_written_there_alone():
    with torch.inference_mode():
        out = torch.empty(2, 3)
        check_writable(out)
    with pytest.raises(InputError, match="made in inference mode"):
        check_writable(out)


def meta(tensor):
    return torch.empty_like(tensor, device="meta")


def test_what_is_elsewhere_is_refused_and_named():
    cpu, x_TH = torch.device("cpu"), torch.ones(3, 10).bfloat16()
    rows = ODD.wire.encode(x_TH)
    routes = Routes(topk_ids_TK=torch.zeros(3, 3, dtype=torch.int64), topk_weights_TK=torch.ones(3, 3))
    extra = {"bytes": torch.zeros(3, 5, dtype=torch.uint8), "words": torch.zeros(3, 2, dtype=torch.int64)}
    assert check_batch(ODD, rows, routes, extra, cpu) is routes
    check_output(ODD, x_TH, 3, cpu)
    away = replace(rows, payloads={name: meta(payload) for name, payload in rows.payloads.items()})
    for call, what in (
        (lambda: check_batch(ODD, away, routes, extra, cpu), "x_TH"),
        (
            lambda: check_batch(ODD, rows, routes, extra | {"words": meta(extra["words"])}, cpu),
            "payload 'words'",
        ),
        (lambda: check_output(ODD, meta(x_TH), 3, cpu), "a tensor to write into or to add"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert f"{what} is on meta; expected cpu; fix: move it there first" in str(caught.value)


# -- Inside a host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_rows", "inside"), [(None, None), (19, 19), (20, None), (21, None)])
def test_a_layer_inside_a_host_has_its_experts_and_the_tokens_that_its_relays_bring(max_rows, inside):
    placement = Placement(num_experts=3, table=((0, 1), (2,), ()))
    layer, hosts = replace(ODD, placement=placement, num_experts=3, movable=True), HostMap((0, 0, 1))
    first, second = (inside_spec(replace(layer, max_rows=max_rows), hosts, host) for host in (0, 1))
    assert (first.num_experts, first.placement.table) == (3, ((0, 1), (2,)))
    assert (second.num_experts, second.placement.table) == (1, ((),))  # a host without experts
    assert (first.max_tokens, first.max_rows) == (10, inside)  # rank 0 relays the tokens of rank 2
    assert second.max_tokens == 15
    assert not first.movable
    assert not second.movable


def test_between_gpus_the_class_that_waits_for_kernels_takes_the_place_of_hierarchical_alone():
    class Own(HierarchicalTransport):
        pass

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [HierarchicalTransport.for_device(cpu), Own.for_device(cpu), Own.for_device(gpu)] == [
        HierarchicalTransport,
        Own,
        Own,
    ]
    assert HierarchicalTransport.for_device(gpu) is DeviceHierarchicalTransport


# -- Counters ------------------------------------------------------------------------------------------------


def test_counters_add_up_rank_by_rank(monkeypatch):
    stats = LayerStats(2)
    stats.count_dispatch(3, [1, 2], [4, 5], [100, 200])
    stats.count_dispatch(4, [10, 20], [40, 50], [1000, 2000], is_next=True)
    stats.count_combine([7, 8])
    stats.count_combine([70, 80])
    stats.count_dropped(torch.tensor([[True, False], [True, True]]))
    stats.count_dropped(torch.tensor([[True, False]]))
    times = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr("tokenyard.exchange.stats.time.monotonic", lambda: next(times))
    for _ in range(2):
        with stats.waiting("combine"):
            pass
    assert stats.as_dict() == {
        "world": 2,
        "rounds": 1,
        "passes": 2,
        "tokens": 7,
        "dropped": 4,
        "rows_sent": [11, 22],
        "rows_received": [44, 55],
        "dispatch_bytes": [1100, 2200],
        "combine_bytes": [77, 88],
        "lost": [],
        "moves": asdict(MoveStats()),
        "wait_s": {"dispatch": 0.0, "combine": 3.5},
    }


def test_moves_and_looks_add_up_and_the_last_ones_are_kept():
    moves = MoveStats()
    moves.count_switch(came=2, seconds=0.5, nbytes=100, copying=3.0)
    moves.count_switch(came=3, seconds=0.25, nbytes=10, copying=4.0)
    moves.count_look(1.5)
    moves.count_look(1.25)
    assert (moves.switches, moves.experts, moves.nbytes) == (2, 5, 110)
    assert (moves.switch_s, moves.copy_s) == (0.25, 4.0)
    assert (moves.looks, moves.imbalance, moves.imbalance_before) == (2, 1.25, 1.5)


def test_few_and_many_choices_are_counted_together_until_a_layer_has_other_experts():
    counter = LoadCounter(torch.device("cpu"))
    counter.serve({"same": 3, "other": 2})
    for layer in ("same", "other"):
        counter.count(layer, torch.tensor([[0, 1], [1, -1]]))
        counter.count(layer, torch.ones(50, 2, dtype=torch.int32))
    counter.serve({"same": 3, "other": 4})
    assert counter.of("same") == [1, 102, 0]
    assert counter.of("other") == [0] * 4
    counter.reset()
    assert counter.of("same") == [0] * 3


# -- Bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 8, 9])
def test_bytes_of_any_width_are_copied_to_any_place(start):
    for width in (1, 7, 8, 9, 16, 18, 72):
        rows = torch.arange(3 * width + start, dtype=torch.uint8)[start:].view(3, width)
        for offset in (0, 1, 8, 9):
            packets = torch.zeros(3, 96, dtype=torch.uint8)
            _copy_bytes(packets[:, offset : offset + width], rows)
            assert torch.equal(packets[:, offset : offset + width], rows)
            assert packets.count_nonzero() == rows.count_nonzero()
