"""The kernels of `one_sided`, run by Triton's interpreter and compared bit for bit with their twins in plain torch."""

from dataclasses import replace

import pytest
import torch

from tests.exchange import interpreter
from tests.exchange.virtual_ranks import VirtualRanks, make_batch, make_exchange_spec
from tests.products import product
from tokenyard.conformance.cases import same_bits
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports.one_sided.cuda import launch, operands
from tokenyard.exchange.transports.one_sided.cuda.control import COMBINED, ROUND, STATUS, Trouble
from tokenyard.exchange.transports.one_sided.kernels.twins import place_twin, slots_twin
from tokenyard.formats import Payload
from tokenyard.routing import Placement

pytestmark = interpreter.only_without_gpu
interpreter.install()


WHOLE = {"whole": True, "assigned": False}


@pytest.fixture(params=WHOLE.values(), ids=WHOLE)
def whole(request, monkeypatch):
    """A batch in one launch, or with `assign` before it."""
    monkeypatch.setattr(launch, "LONGEST_WHOLE", 64 if request.param else -1)
    return request.param


def dispatched(yard, batches, *, rows=None, extra=None):
    """Dispatch by kernels and by twins; what was not the same, and the counts."""
    extra = extra or [{} for _ in batches]
    wrong = []
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        sent = batch.x_TH if rows is None else rows[rank]
        slots_TW = launcher.dispatch(
            yard.dispatch_slots, sent, batch.ids_TK, batch.weights_TK, extra[rank], waits=False
        )
        if not same_bits(slots_TW, slots_twin(yard.spec, batch.ids_TK, rank)):
            wrong.append(f"slots of rank {rank}")
    counts = yard.push_twins(batches, extra)
    if not yard.same_regions("dispatch"):
        wrong.append("regions")
    for rank, count in enumerate(counts):
        if yard.counts(rank) != [[n, yard.dispatch_slots.max_tokens] for n in count.tolist()]:
            wrong.append(f"mail of rank {rank}")
    return wrong, counts


# -- Dispatch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bf16", "nvfp4(global_scale=448.0)"])  # a row in one part, and in several
def test_choices_are_counted_on_the_way(whole, wire):
    spec = make_exchange_spec(2, wire=wire, hidden_size=2048, max_tokens=9)
    yard = VirtualRanks(spec)
    batch = make_batch(spec, 9, seed=4)
    batch.ids_TK[5] = torch.tensor([5, -7, 0])  # two that no expert has
    load = torch.zeros(6, dtype=torch.int64)
    for turn in (1, 2):
        yard.launchers[0].dispatch(
            yard.dispatch_slots,
            batch.x_TH,
            batch.ids_TK,
            batch.weights_TK,
            {},
            choice_counts=load,
            waits=False,
        )
        known_N = batch.ids_TK[(batch.ids_TK >= 0) & (batch.ids_TK < 5)]
        assert load.tolist() == [0, *(turn * known_N.bincount(minlength=5)).tolist()]


WIRES = [
    ("bf16", "bfloat16"),
    ("bf16", "float32"),
    ("fp16", "float16"),
    ("fp16", "bfloat16"),
    ("fp16", "float32"),
    ("fp32", "float32"),
    ("fp8_block128", "bfloat16"),
    ("fp8_block128(power_of_two_scales=True)", "float32"),
    ("mxfp8", "bfloat16"),
    ("mxfp8", "float32"),
    ("mxfp8(alignment=256)", "float16"),
    ("nvfp4", "bfloat16"),
    ("nvfp4", "float32"),
    ("nvfp4(global_scale=448.0)", "float16"),
    ("nvfp4(global_scale=1e+30)", "float32"),
    ("nvfp4(global_scale=1e-30)", "bfloat16"),
]


@pytest.mark.parametrize(("wire_and_dtype", "hidden_size"), product(WIRES, [1, 33, 200]))
def test_rows_arrive_in_every_wire(wire_and_dtype, hidden_size, monkeypatch):
    wire, dtype = wire_and_dtype
    monkeypatch.setattr(launch, "LONGEST_WHOLE", -1 if hidden_size == 33 else 64)
    spec = make_exchange_spec(2, wire=wire, dtype=getattr(torch, dtype), hidden_size=hidden_size)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in (3, 1)]
    wrong, _ = dispatched(VirtualRanks(spec), batches)
    assert wrong == []


SHAPES = {
    "one rank": {"world": 1},
    "three ranks": {"world": 3, "experts": 7},
    "nine ranks": {"world": 9, "experts": 11, "tokens": 2},
    "fewer experts than ranks": {"world": 3, "experts": 2},
    "more choices than experts": {"world": 2, "experts": 5, "top_k": 32},
    "one choice": {"world": 2, "top_k": 1},
    "round robin": {"world": 2, "placement": Placement.round_robin(5, 2)},
    "replicas": {
        "world": 3,
        "tokens": 4,
        "placement": Placement.replicated(Placement.contiguous(5, 3), {0: [1, 2], 4: [0]}),
    },
    "lost experts": {
        "world": 2,
        "placement": Placement(num_experts=5, table=((0, 3), (1,)), allow_lost=True),
    },
    "no tokens": {"world": 2, "tokens": 0},
    "a full window": {"world": 2, "tokens": 3, "max_tokens": 3},
    "a window of two chunks": {"world": 2, "tokens": 2, "max_tokens": 70},
}


@pytest.mark.parametrize(("shape", "whole"), product(SHAPES.keys(), WHOLE), indirect=["whole"])
def test_rows_arrive_for_every_shape(shape, whole):
    sizes = {"tokens": 3} | SHAPES[shape]
    world, tokens = sizes.pop("world"), sizes.pop("tokens")
    spec = make_exchange_spec(world, hidden_size=8, **sizes)
    batches = [make_batch(spec, max(0, tokens - rank % 2), seed=rank) for rank in range(world)]
    wrong, _ = dispatched(VirtualRanks(spec), batches)
    assert wrong == []


# Rows of several tiles; a row that several blocks share; and the cuts of long batches, which only these have.
LONG_ROWS = [
    ("bf16", 8200, 64, 2048),
    ("fp16", 2100, 64, 2048),
    ("mxfp8", 4200, 64, 2048),
    ("mxfp8", 8300, 0, 0),
    ("fp8_block128", 2200, 64, 2048),
    ("nvfp4", 8300, 64, 2048),
    ("nvfp4(global_scale=448.0)", 2048, 64, 2048),
    ("nvfp4(global_scale=448.0)", 2048, 0, 2048),
    ("nvfp4(global_scale=1e-30)", 3000, 64, 2048),
]


@pytest.mark.parametrize(("wire", "hidden_size", "few_rows", "many_rows"), LONG_ROWS)
def test_long_rows_are_cut_and_arrive_whole(wire, hidden_size, few_rows, many_rows, monkeypatch):
    monkeypatch.setattr(operands, "FEW_ROWS", few_rows)
    monkeypatch.setattr(operands, "MANY_ROWS", many_rows)
    spec = make_exchange_spec(1, wire=wire, hidden_size=hidden_size, max_tokens=3)
    wrong, _ = dispatched(VirtualRanks(spec), [make_batch(spec, 3)])
    assert wrong == []


# What a row with a scale of its own can hold: scales that need divisions, and numbers that its scale does not see.
ODD_ROWS = {
    "scales beyond 2^60": lambda x_TH: x_TH * 1e-30,
    "scales below 2^-60": lambda x_TH: x_TH * 1e30,
    "infinite numbers": lambda x_TH: x_TH.index_fill(1, torch.tensor([7, 1900]), torch.inf),
    "no numbers": lambda x_TH: x_TH.index_fill(1, torch.tensor([2047]), torch.nan),
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_odd_rows_have_scales_of_their_own(odd):
    spec = make_exchange_spec(1, wire="nvfp4", combine_wire="nvfp4", hidden_size=2500, max_tokens=2)
    yard = VirtualRanks(spec)
    batch = make_batch(spec, 2)
    x_TH = ODD_ROWS[odd](batch.x_TH)
    wrong, (count,) = dispatched(yard, [replace(batch, x_TH=x_TH)])
    assert wrong == []
    rows_RH = x_TH[: int(count.sum())].float()
    yard.place_twins([rows_RH], [count])
    yard.launchers[0].place(yard.dispatch_slots, rows_RH, dense=True)
    assert yard.same_regions("combine")


def test_narrower_windows_are_written_where_the_round_wants_them(whole):
    spec = make_exchange_spec(2, max_tokens=9)
    wrong, _ = dispatched(VirtualRanks(spec, max_tokens=4), [make_batch(spec, n, seed=n) for n in (4, 2)])
    assert wrong == []


def test_a_second_batch_does_not_meet_the_first_one(whole):
    spec = make_exchange_spec(2, max_tokens=70, hidden_size=2)
    yard = VirtualRanks(spec)
    for turn, sizes in enumerate([(66, 2), (1, 65), (2, 0)]):
        wrong, _ = dispatched(
            yard, [make_batch(spec, n, seed=turn) for n in (sizes if not whole else (2, 1))]
        )
        assert wrong == []
        assert yard.words(0)[ROUND] == turn + 1
    assert yard.flags(1, round=3).tolist() == [3 << 24 | yard.dispatch_slots.layer << 2] * 2


def test_experts_that_moved_are_found_by_the_same_table(whole):
    """A captured kernel reads the table where it stood: another placement, with copies, is written there."""
    spec = make_exchange_spec(3, hidden_size=8, movable=True)
    yard = VirtualRanks(spec)
    batches = [make_batch(spec, 3, seed=rank) for rank in range(3)]
    before = [launcher.table(spec) for launcher in yard.launchers]
    copied = Placement.replicated(Placement.round_robin(5, 3), {0: [1, 2], 4: [0]})
    for placement in (spec.placement, copied, Placement.round_robin(5, 3)):
        yard.spec = replace(spec, placement=placement)
        yard.dispatch_slots = replace(yard.dispatch_slots, spec=yard.spec)
        wrong, _ = dispatched(yard, batches)
        assert wrong == []
        for launcher, tables in zip(yard.launchers, before, strict=True):
            found = launcher.table(yard.spec)
            assert [t.data_ptr() for t in found] == [t.data_ptr() for t in tables]


def test_several_ranks_may_share_a_launch(whole):
    spec = make_exchange_spec(3, experts=7, hidden_size=8)
    yard = VirtualRanks(spec, together=True)
    batches = [make_batch(spec, 3, seed=rank) for rank in range(3)]
    x_TH, ids_TK, weights_TK = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("x_TH", "ids_TK", "weights_TK")
    )
    slots_TW = yard.launchers[0].dispatch(yard.dispatch_slots, x_TH, ids_TK, weights_TK, {}, waits=False)
    counts = yard.push_twins(batches)
    assert same_bits(slots_TW, torch.cat([slots_twin(spec, b.ids_TK, r) for r, b in enumerate(batches)]))
    assert yard.same_regions("dispatch")
    results = [torch.randn(3 * spec.max_tokens, 8) for _ in range(3)]
    yard.place_twins([rows_SH[taken(yard, c)] for rows_SH, c in zip(results, counts, strict=True)], counts)
    yard.launchers[0].place(yard.dispatch_slots, torch.cat(results), dense=False)
    assert yard.same_regions("combine")
    out_TH = torch.empty(9, 8, dtype=torch.bfloat16)
    yard.launchers[0].sum(yard.dispatch_slots, slots_TW, out_TH, just_placed=False, waits=False)
    expected = [yard.pulled_by_twin(rank, batch.ids_TK) for rank, batch in enumerate(batches)]
    assert same_bits(out_TH, torch.cat(expected))


@pytest.mark.parametrize(("sms", "whole"), product([1, 3], WHOLE), indirect=["whole"])
def test_few_multiprocessors_move_the_same_bytes(sms, whole, monkeypatch):
    """Fewer blocks than rows, chunks, results and tiles: each of them does several."""
    grids = []
    for module, name in ((launch.push_kernels, "assign"), (launch.push_kernels, "push"), (launch.pull_kernels, "place"),
                         (launch.pull_kernels, "pull")):  # fmt: skip
        monkeypatch.setattr(module, name, _Recorded(getattr(module, name), grids))
    spec = make_exchange_spec(2, hidden_size=1500, max_tokens=200)
    yard = VirtualRanks(spec, sms=sms)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in ((4, 2) if whole else (130, 66))]
    for turn in range(2):  # what blocks count is as it was
        wrong, counts = dispatched(yard, batches)
        assert wrong == []
        assert yard.words(0)[ROUND] == turn + 1
    draw = torch.Generator().manual_seed(7)
    rows = [torch.randn(int(count.sum()), 1500, generator=draw) for count in counts]
    yard.place_twins(rows, counts)
    for launcher, rows_RH in zip(yard.launchers, rows, strict=True):
        launcher.place(yard.dispatch_slots, rows_RH, dense=True)
    assert yard.same_regions("combine")
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        out_TH = torch.full_like(batch.x_TH, 5.0)
        slots_TW = slots_twin(spec, batch.ids_TK, rank)
        launcher.sum(yard.dispatch_slots, slots_TW, out_TH, just_placed=True, waits=False)
        assert same_bits(out_TH, yard.pulled_by_twin(rank, batch.ids_TK))
    assert len(grids) >= 8
    assert max(grids) == (sms,)


class _Recorded:
    """A kernel that notes the grids that it is launched with."""

    def __init__(self, kernel, grids):
        self._kernel, self._grids = kernel, grids

    def __getitem__(self, grid):
        self._grids.append(grid)
        return self._kernel[grid]


EXTRA = (
    Payload(name="bytes", dtype=torch.uint8, width=5),
    Payload(name="halves", dtype=torch.float16, width=3),
    Payload(name="wide", dtype=torch.int64, width=2),
    Payload(name="codes", dtype=torch.float8_e4m3fn, width=1),
)


def test_further_payloads_of_any_width_travel_along():
    spec = make_exchange_spec(2, wire="mxfp8", extra=EXTRA)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in (3, 2)]
    extra = [
        {
            p.name: torch.randint(0, 256, (len(batch.ids_TK), p.nbytes), dtype=torch.uint8).view(p.dtype)
            for p in EXTRA
        }
        for batch in batches
    ]
    wrong, _ = dispatched(VirtualRanks(spec), batches, extra=extra)
    assert wrong == []


@pytest.mark.parametrize("wire", ["bf16", "mxfp8", "fp8_block128", "nvfp4", "nvfp4(global_scale=448.0)"])
def test_rows_may_come_encoded(wire):
    spec = make_exchange_spec(2, wire=wire, hidden_size=40)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in (3, 2)]
    rows = [spec.wire.encode(batch.x_TH) for batch in batches]
    wrong, _ = dispatched(VirtualRanks(spec), batches, rows=rows)
    assert wrong == []


@pytest.mark.parametrize(("bad", "whole"), product([5, 1000, -2, 2**31 - 1], WHOLE), indirect=["whole"])
def test_ids_that_no_expert_has_go_nowhere_and_are_reported(bad, whole):
    spec = make_exchange_spec(2, hidden_size=4)
    batches = [make_batch(spec, 3, seed=rank) for rank in range(2)]
    batches[1].ids_TK[1, 2] = bad
    yard = VirtualRanks(spec)
    wrong, _ = dispatched(yard, batches)
    assert wrong == []
    assert yard.status(0) == [0, 0, 0, 0]
    assert yard.status(1) == [Trouble.BAD_IDS, 1 if whole else 0, bad, 0]
    assert yard.launchers[1].host_status[0].tolist() == yard.status(1)
    assert yard.words(1)[ROUND] == 1  # the round goes on


@pytest.mark.parametrize(("bad", "told"), [(2**32 + 3, 2**31 - 1), (-(2**40), -(2**31))])
def test_ids_that_have_no_room_in_32_bits_are_no_others(bad, told, whole):
    spec = make_exchange_spec(2, hidden_size=4)
    batch, yard = make_batch(spec, 3), VirtualRanks(spec)
    ids_TK = batch.ids_TK.long()
    ids_TK[1, 2] = bad
    slots_TW = yard.launchers[0].dispatch(
        yard.dispatch_slots, batch.x_TH, ids_TK, batch.weights_TK, {}, waits=False
    )
    assert yard.status(0)[0] == Trouble.BAD_IDS
    assert yard.status(0)[2] == told
    ids_TK[1, 2] = -1
    assert torch.equal(slots_TW, slots_twin(spec, ids_TK.int(), 0))


ASSIGNED = [(130, 200, 3), (64, 64, 2), (65, 130, 1), (0, 70, 2), (3, 5, 9)]


@pytest.mark.parametrize(("tokens", "max_tokens", "world"), ASSIGNED)
def test_slots_and_routes_of_many_chunks(tokens, max_tokens, world):
    spec = make_exchange_spec(world, experts=11, hidden_size=1, max_tokens=max_tokens)
    yard = VirtualRanks(spec)
    batches = [make_batch(spec, tokens, seed=rank) for rank in range(world)]
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        slots_TW = torch.empty(tokens, world, dtype=torch.int32)
        layer = launcher.layer(yard.dispatch_slots)
        sent = launch.push_kernels.Batch(batch.ids_TK, batch.weights_TK, *layer.tables, slots_TW)
        launcher._assign(layer, sent, tokens, None)
        assert same_bits(slots_TW, slots_twin(spec, batch.ids_TK, rank))
    counts = yard.push_twins(batches)
    assert [[n for n, _ in yard.counts(rank)] for rank in range(world)] == [c.tolist() for c in counts]
    mine, twins = yard.slots(yard.buffers, "dispatch"), yard.slots(yard.twins, "dispatch")
    for rank in range(world):
        assert same_bits(mine[rank]["ids"], twins[rank]["ids"])
        assert same_bits(mine[rank]["weights"], twins[rank]["weights"])


# -- Combine -----------------------------------------------------------------------------------------------

COMBINES = [
    ("bf16", "bfloat16", "float32", 0),
    ("bf16", "bfloat16", "bfloat16", 1),
    ("fp16", "float16", "float32", 2),
    ("fp16", "bfloat16", "float32", 1),
    ("fp32", "float32", "float32", 1),
    ("fp8_block128", "bfloat16", "float32", 1),
    ("fp8_block128(power_of_two_scales=True)", "float16", "float16", 0),
    ("mxfp8", "bfloat16", "bfloat16", 2),
    ("mxfp8(alignment=256)", "float32", "float32", 0),
    ("nvfp4", "bfloat16", "float32", 1),
    ("nvfp4", "float32", "float32", 0),
    ("nvfp4(global_scale=448.0)", "float16", "float16", 2),
    ("nvfp4(global_scale=1e+30)", "bfloat16", "bfloat16", 0),
]


def taken(yard, counts):
    """The slots of a rank that hold rows."""
    most = yard.dispatch_slots.max_tokens
    return torch.cat([torch.arange(n) + source * most for source, n in enumerate(counts.tolist())])


@pytest.mark.parametrize(("combine", "dense"), product(COMBINES, {"dense": True, "by slot": False}))
def test_results_come_home_in_every_wire(combine, dense):
    wire, dtype, result, terms = combine
    hidden_size = 33 if dense else 130
    spec = make_exchange_spec(
        2, combine_wire=wire, dtype=getattr(torch, dtype), wire=short(dtype), hidden_size=hidden_size
    )
    yard = VirtualRanks(spec)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in (3, 2)]
    _, counts = dispatched(yard, batches)
    draw = torch.Generator().manual_seed(7)
    results = []
    for rank in range(2):
        rows_SH = torch.randn(2 * spec.max_tokens, hidden_size, generator=draw) * 10.0
        rows_SH[:, 0] = torch.tensor([torch.inf, -0.0, 1e-42, torch.nan])[rank::2].repeat(spec.max_tokens)
        results.append(rows_SH.to(getattr(torch, result)))
    rows = [rows_SH[taken(yard, counts[rank])] for rank, rows_SH in enumerate(results)]
    yard.place_twins(rows, counts)
    for rank, launcher in enumerate(yard.launchers):
        launcher.place(yard.dispatch_slots, rows[rank] if dense else results[rank], dense=dense)
    assert yard.same_regions("combine")
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        add = [make_batch(spec, len(batch.ids_TK), seed=9 + term).x_TH for term in range(terms)]
        out_TH = add[-1].clone() if terms == 1 else torch.full_like(batch.x_TH, 5.0)
        given = [out_TH] if terms == 1 else add  # what is there may be what is added
        slots_TW = slots_twin(spec, batch.ids_TK, rank)
        launcher._pull(
            launcher.layer(yard.dispatch_slots),
            slots_TW,
            out_TH,
            given,
            len(out_TH),
            meets=False,
        )
        assert same_numbers(out_TH, yard.pulled_by_twin(rank, batch.ids_TK, add))


@pytest.mark.parametrize(
    ("terms_and_ends", "wire"), product([(1, False), (2, False), (2, True)], ["bf16", "mxfp8"])
)
def test_few_multiprocessors_sum_while_what_is_added_is_computed(terms_and_ends, wire, monkeypatch):
    """They sum in float32, until the terms are there; then all of them finish. The same bits come of it."""
    terms, ends = terms_and_ends
    spec = make_exchange_spec(2, hidden_size=2200, combine_wire=wire, max_tokens=80)
    yard = VirtualRanks(spec, sms=2)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in (66, 23)]
    _, counts = dispatched(yard, batches)
    rows = [torch.randn(int(count.sum()), 2200).bfloat16() for count in counts]
    yard.place_twins(rows, counts)
    for rank, launcher in enumerate(yard.launchers):
        launcher.place(yard.dispatch_slots, rows[rank], dense=True)
    grids = []
    monkeypatch.setattr(launch.pull_kernels, "pull", _Recorded(launch.pull_kernels.pull, grids))
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        computed = [make_batch(spec, len(batch.ids_TK), seed=9 + term).x_TH for term in range(terms)]
        add = [torch.full_like(term_TH, torch.nan) for term_TH in computed]
        out_TH, begun = torch.full_like(batch.x_TH, torch.nan), []
        monkeypatch.setattr(launcher, "_begun", _Kept(launcher._begun, begun))

        def compute(add=add, computed=computed, begun=begun):
            (sums,), tokens = begun, len(add[0])
            # Where what is computed ends meanwhile, each block has summed one tile.
            rows, parts = (1 if wire == "mxfp8" else 4 if tokens > 64 else 8), (2 if tokens > 64 else 3)
            tiles = -(-tokens // rows) * parts
            assert sums.tiles.tolist() == ([1, 1] if ends else [-(-tiles // 2), tiles // 2])
            for term_TH, found_TH in zip(add, computed, strict=True):
                term_TH.copy_(found_TH)

        slots_TW = slots_twin(spec, batch.ids_TK, rank)
        ended = torch.tensor([int(ends)], dtype=torch.int32)
        launcher.sum(
            yard.dispatch_slots, slots_TW, out_TH, add, just_placed=True, waits=False, before_adding=compute,
            ended=ended,
        )  # fmt: skip
        assert same_numbers(out_TH, yard.pulled_by_twin(rank, batch.ids_TK, computed))
    assert grids == [(2,), (2 * 66,), (2,), (3 * 23,)]


class _Kept:
    """A function whose results are kept."""

    def __init__(self, made, kept):
        self._made, self._kept = made, kept

    def __call__(self, *arguments):
        self._kept.append(self._made(*arguments))
        return self._kept[-1]


@pytest.mark.parametrize("wire", ["bf16", "mxfp8", "fp8_block128", "nvfp4"])
def test_the_results_of_choices_come_home(wire):
    base = Placement.contiguous(5, 3)
    spec = make_exchange_spec(
        3,
        combine_wire=wire,
        hidden_size=130,
        sums_choices=True,
        placement=Placement.replicated(base, {0: [2], 3: [0, 2]}),
    )
    yard = VirtualRanks(spec)
    batches = [make_batch(spec, tokens, seed=tokens) for tokens in (5, 0, 4)]
    _, counts = dispatched(yard, batches)
    draw = torch.Generator().manual_seed(3)
    for rank, launcher in enumerate(yard.launchers):
        slots_R = taken(yard, counts[rank])
        ids_RK = yard.slots(yard.buffers, "dispatch")[rank]["ids"][slots_R]
        row_N, choice_N = (ids_RK >= 0).nonzero().unbind(1)
        places_N = slots_R[row_N] * spec.top_k + choice_N
        rows_NH = torch.randn(len(places_N), 130, generator=draw)
        region = yard.slots(yard.twins, "combine")[rank]
        place_twin(spec, rows_NH, counts[rank], region, spec.max_tokens, places_N)
        launcher.place(yard.dispatch_slots, rows_NH, dense=True, places_N=places_N)
    assert yard.same_regions("combine")
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        add = [make_batch(spec, len(batch.ids_TK), seed=9).x_TH.nan_to_num(1.0, 1.0, 1.0)]
        out_TH = torch.full_like(batch.x_TH, 5.0)
        slots_TK, owners_TK = launcher.choices_at_home(
            spec, slots_twin(spec, batch.ids_TK, rank), batch.ids_TK
        )
        launcher._pull(
            launcher.layer(yard.dispatch_slots),
            slots_TK,
            out_TH,
            add,
            len(out_TH),
            owners_TK=owners_TK,
            meets=False,
        )
        assert same_bits(out_TH, yard.pulled_by_twin(rank, batch.ids_TK, add))


def short(dtype):
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]


def same_numbers(a, b):
    """The same bits, but for those of NaN: which NaN comes out of a sum or a cast differs between devices."""
    return same_bits(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(), b.nan_to_num())


# Rows of several tiles, both where they are encoded and where they are read.
@pytest.mark.parametrize(
    ("wire", "hidden_size"), [("mxfp8", 2100), ("nvfp4(global_scale=448.0)", 2100), ("nvfp4", 8300)]
)
def test_a_long_row_comes_home_in_parts(wire, hidden_size):
    spec = make_exchange_spec(2, combine_wire=wire, hidden_size=hidden_size, max_tokens=2, top_k=2)
    yard = VirtualRanks(spec)
    batches = [make_batch(spec, 2, seed=rank) for rank in range(2)]
    counts = yard.push_twins(batches)
    for rank in range(2):
        yard.buffers[rank][yard.control.counts(0) : yard.control.counts(1)].view(torch.int32)[::2] = counts[
            rank
        ]
    results = [torch.randn(int(count.sum()), hidden_size) for count in counts]
    yard.place_twins(results, counts)
    for launcher, rows_RH in zip(yard.launchers, results, strict=True):
        launcher.place(yard.dispatch_slots, rows_RH, dense=True)
    assert yard.same_regions("combine")
    for rank, (launcher, batch) in enumerate(zip(yard.launchers, batches, strict=True)):
        out_TH = torch.empty(2, hidden_size, dtype=torch.bfloat16)
        layer, slots_TW = launcher.layer(yard.dispatch_slots), slots_twin(spec, batch.ids_TK, rank)
        assert layer.home.tiles(2).parts == -(-hidden_size // 1024)
        launcher._pull(layer, slots_TW, out_TH, (), 2, meets=False)
        assert same_bits(out_TH, yard.pulled_by_twin(rank, batch.ids_TK))


def test_a_round_that_failed_comes_home_as_nan():
    spec = make_exchange_spec(1, hidden_size=4)
    yard = VirtualRanks(spec)
    batch = make_batch(spec, 2)
    dispatched(yard, [batch])
    yard.words(0)[STATUS] = int(Trouble.FAILED)
    for placed in (torch.zeros(2, 4), None):
        out_TH = torch.zeros(2, 4, dtype=torch.bfloat16)
        if placed is not None:
            yard.launchers[0].place(yard.dispatch_slots, placed, dense=True)
        slots_TW, just_placed = slots_twin(spec, batch.ids_TK, 0), placed is not None
        yard.launchers[0].sum(yard.dispatch_slots, slots_TW, out_TH, just_placed=just_placed)
        assert bool(out_TH.isnan().all())
    assert yard.words(0)[COMBINED] == 0
    assert yard.flags(0, phase=1).tolist() == [0]
    yard.words(0)[STATUS] = int(Trouble.BAD_IDS)  # which ends nothing
    yard.launchers[0].sum(yard.dispatch_slots, slots_twin(spec, batch.ids_TK, 0), out_TH, just_placed=False)
    assert not bool(out_TH.isnan().any())
    assert yard.words(0)[COMBINED] == 1


def test_a_small_combine_meets_the_others_itself():
    spec = make_exchange_spec(2, hidden_size=4, dtype=torch.float32, wire="fp32", combine_wire="fp32")
    yard = VirtualRanks(spec)
    batches = [make_batch(spec, 2, seed=rank) for rank in range(2)]
    for turn in range(2):
        _, counts = dispatched(yard, batches)
        results = [torch.randn(int(count.sum()), 4) for count in counts]
        yard.place_twins(results, counts)
        for launcher, rows_RH in zip(yard.launchers, results, strict=True):
            launcher.place(yard.dispatch_slots, rows_RH, dense=True)
        yard.launchers[0].signal_and_wait(yard.dispatch_slots.layer, Phase.COMBINE, waits=False)
        out_TH = torch.empty(2, 4)
        yard.launchers[1].sum(
            yard.dispatch_slots, slots_twin(spec, batches[1].ids_TK, 1), out_TH, just_placed=False
        )
        assert same_bits(out_TH, yard.pulled_by_twin(1, batches[1].ids_TK))
        assert yard.words(1)[COMBINED] == turn + 1
        assert (
            yard.flags(0, phase=1, round=turn + 1).tolist()
            == [turn + 1 << 24 | yard.dispatch_slots.layer << 2 | 1] * 2
        )
        assert yard.words(1)[:9].tolist()[4:] == [0] * 5  # it has cleaned up, and nothing went wrong


def test_a_rehearsal_changes_nothing():
    yard = VirtualRanks(make_exchange_spec(2, extra=EXTRA, wire="mxfp8", combine_wire="fp8_block128"))
    before = [buffer.clone() for buffer in yard.buffers]
    yard.launchers[0].launch_each_kernel(yard.spec)
    assert all(map(torch.equal, before, yard.buffers))
