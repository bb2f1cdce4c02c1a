"""Bytes that belong to nobody, and slots that hold no row: who writes there is found out."""

from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import WATCHED, batch, build, on_ranks, raised, spec
from tests.paranoid.tampering import (
    DAMAGED_ROUND,
    SOURCE,
    VICTIM,
    check_alarm,
    damaging,
    layer_spec,
    three_rounds,
    told,
)
from tokenyard.errors import Corrupted
from tokenyard.exchange import SharedMemoryTransport
from tokenyard.exchange.integrity import workspace_guards
from tokenyard.exchange.integrity.workspace_guards import WorkspaceGuards
from tokenyard.experts import ReferenceExperts
from tokenyard.group import thread_groups
from tokenyard.rows import ExpertRows

# Where one byte is written, as (region, bytes from its end, or from its start if negative), and what is told.
BYTES = {
    "behind the rows that arrive": ("dispatch 0", 0, "byte 1 behind region 'dispatch 0'"),
    "far behind them": ("dispatch 0", 200, "byte 201 behind region 'dispatch 0'"),
    "in front of them": ("dispatch 0", -1, "byte 1 in front of region 'dispatch 0'"),
    "behind the results": ("combine 0", 5, "byte 6 behind region 'combine 0'"),
    "in front of the results": ("combine 0", -3, "byte 3 in front of region 'combine 0'"),
    "in front of everything": ("control", -2, "byte 2 in front of region 'control'"),
    "behind flags and mail": ("control", 0, "byte 1 behind region 'control'"),
}


def writes_beyond(group, where):
    region_name, offset, _ = BYTES[where]

    class Beyond(SharedMemoryTransport):
        name = "beyond"

        def push(self, batch, firsts):
            super().push(batch, firsts)
            if self.group.rank == SOURCE and batch.round == DAMAGED_ROUND:
                region = self.workspace.layout.regions()[region_name]
                at = region.end + offset if offset >= 0 else region.offset + offset
                self.workspace.buffers[VICTIM][at] = 0x41

    return three_rounds(group, Beyond)


@pytest.mark.parametrize("where", BYTES)
def test_a_byte_beyond_a_region(where):
    region, _, words = BYTES[where]
    check_alarm(
        on_ranks(3, writes_beyond, where),
        [VICTIM],
        place=region,
        source=None,
        token=None,
        words=[words, "0x41"],
    )


def test_bytes_are_looked_at_as_soon_as_rows_have_come():
    """Before experts run: what was written beyond a region may be what they read."""
    guards, calls = WorkspaceGuards.__new__(WorkspaceGuards), []
    guards._open = set()
    for name in ("_poison_results", "_check_guards", "_check_dispatch_region", "round_failed"):
        setattr(guards, name, lambda *_, name=name: calls.append(name))
    once = ["_poison_results", "_check_guards", "_check_dispatch_region"]
    guards.check_arrival(SimpleNamespace(region=1))
    assert calls == once
    guards.check_arrival(SimpleNamespace(region=1))  # the arrival before was never combined
    assert calls == [*once, "round_failed", *once]


@pytest.mark.parametrize("finds", ["_check_guards", "_check_dispatch_region"])
def test_bytes_are_looked_at_again_before_results_are_told(finds):
    """Experts may have written where they may not."""
    guards = WorkspaceGuards.__new__(WorkspaceGuards)

    def find(*_):
        raise Corrupted("a byte was written", expected="none", place="control")

    guards._check_guards = guards._check_dispatch_region = lambda *_: None
    setattr(guards, finds, find)
    with pytest.raises(Corrupted, match="a byte was written"):
        guards.check_results(SimpleNamespace(spec=None, region=0, results_due=()))


def unused(group, payload):
    def write(rows):
        rows[payload].view(torch.uint8)[-1, 0] = 0

    return three_rounds(group, damaging("one_sided", out=write))


@pytest.mark.parametrize("payload", ["data", "scales", "ids", "weights", "tag", "checksums"])
def test_a_slot_that_holds_no_row(payload):
    words = [f"slot 15 for rank {SOURCE} of region 'dispatch' holds no row", f"payload {payload!r}"]
    check_alarm(on_ranks(3, unused, payload), [VICTIM], place="dispatch", token=None, words=words)


def unused_result(group):
    def write(rows):
        rows["data"].view(torch.uint8)[-1, 0] = 0

    return three_rounds(group, damaging("one_sided", back=write))


def test_a_slot_that_holds_no_result():
    words = [f"slot 15 for rank {SOURCE} of region 'combine' holds no row"]
    check_alarm(on_ranks(3, unused_result), [VICTIM], place="combine", token=None, words=words)


def writes_results_of_others(group):
    class Meddles(SharedMemoryTransport):
        name = "meddles"

        def at_home(self, arrival):
            home = super().at_home(arrival)
            if self.group.rank == SOURCE and arrival.round == DAMAGED_ROUND - 1:
                region = self.workspace.layout.combine_region(0)
                self.workspace.buffers[VICTIM][region.end - 1] = 0  # the last slot is far from being used
            return home

    return three_rounds(group, Meddles)


def test_a_rank_that_writes_where_it_may_only_read_is_found_out_in_the_next_round():
    words = ["of region 'combine' was written after this rank's results were there"]
    by_rank = on_ranks(3, writes_results_of_others)
    check_alarm(by_rank, [VICTIM], place="combine", source=None, token=None, words=words)


def between_payloads(group):
    class Between(SharedMemoryTransport):
        name = "between"

        def push(self, batch, firsts):
            super().push(batch, firsts)
            if self.group.rank == SOURCE and batch.round == DAMAGED_ROUND:
                slots, region = batch.spec.dispatch_slots, self.workspace.layout.dispatch_region(0)
                end = region.offset + slots.offsets[-2] + slots.slots * slots.payloads[-2].nbytes
                assert end < region.offset + slots.offsets[-1]  # else nothing lies between the two
                self.workspace.buffers[VICTIM][end] = 0

    return three_rounds(group, Between, layer=layer_spec(payloads=()))


def test_a_byte_between_two_payloads():
    words = ["byte 1 behind the slots of payload 'weights' in region 'dispatch'"]
    by_rank = on_ranks(3, between_payloads)
    check_alarm(by_rank, [VICTIM], place="dispatch", source=None, token=None, words=words)


def test_a_region_is_looked_at_from_the_first_round_on_and_again_after_one_that_failed():
    layer = spec(experts="reference")
    plan = ty.plan([layer], thread_groups(1)[0], exchange="one_sided", paranoid=True)
    built, workspace = build(plan, "moe"), plan.exchange.transport.inner.workspace
    slots = plan.wiring("moe").exchange_spec.dispatch_slots

    def found(tokens, *, meddles=False):
        if meddles:  # in the last slot, which is not used
            end = workspace.layout.dispatch_region(0).offset + slots.slots * slots.payloads[0].nbytes
            workspace.buffers[0][end - 1] = 0
        return raised(built, *batch(layer, tokens))

    first, *fine = found(5, meddles=True), found(5), found(2)
    again, *after = found(2, meddles=True), found(5), found(2)
    assert [fine, after] == [[None] * 2] * 2
    for alarm in (first, again):
        assert "slot 15 for rank 0 of region 'dispatch' holds no row" in str(alarm)


# -- Experts -------------------------------------------------------------------------------------------------


class Scribbles(ReferenceExperts):
    """Uses the rows that it was given as scratch."""

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        rows = received.rows.payloads["data"]
        if len(rows):
            rows.view(torch.uint8)[0 if received.slots_R is None else received.slots_R[0], 0] ^= 1
        return result


def scribbled(group, exchange):
    layer = layer_spec(experts=Scribbles)
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    x_TH, routes = batch(layer, 5, seed=group.rank)
    error = raised(build(plan, "moe"), x_TH, routes, payloads={"tag": torch.zeros(5, 2, dtype=torch.int64)})
    return told(error)


@pytest.mark.parametrize(("exchange", "world"), [("local", 1), *((name, 2) for name in WATCHED)])
def test_experts_that_write_into_the_rows_they_were_given(exchange, world):
    for alarm in on_ranks(world, scribbled, exchange):
        assert alarm["kind"] == "Corrupted"
        assert (alarm["place"], alarm["source"], alarm["token"]) == ("data", 0, 0)


def placed(group, forgets):
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange="one_sided", paranoid=True)
    built, (x_TH, routes) = build(plan, "moe"), batch(layer, 6, seed=group.rank)
    exchange_spec, exchange = built.wiring.exchange_spec, plan.exchange
    due = built(x_TH, routes)
    flight = exchange.dispatch(exchange_spec, built.wiring.wire.encode(x_TH), routes)
    buffer = flight.received.results
    rows_RH = built.experts(flight.received).rows_RH
    written = slice(0, -1) if forgets and group.rank == VICTIM else slice(None)
    buffer.rows_SH[buffer.slots_R[written]] = rows_RH[written].to(buffer.rows_SH.dtype)
    results = []
    error = raised(lambda: results.append(flight.combine(buffer.placed())))
    return told(error) if error else torch.equal(results[0].y_TH, due)


def test_results_that_experts_place_by_themselves_are_sealed_where_they_stand():
    assert on_ranks(2, placed, False) == [True, True]


def test_experts_that_place_all_results_but_one():
    other, alarm = on_ranks(2, placed, True)
    assert (alarm["kind"], other["kind"]) == ("Corrupted", "PeerFailed")
    assert (alarm["place"], alarm["source"]) == ("combine", 1)
    assert f"the experts placed no result for token {alarm['token']} of rank 1" in alarm["text"]


def read_too_late(group):
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange="one_sided", paranoid=True)
    x_TH, routes = batch(layer, 6, seed=group.rank)
    exchange_spec = plan.wiring("moe").exchange_spec
    flight = plan.exchange.dispatch(exchange_spec, exchange_spec.wire.encode(x_TH), routes)
    good = bool(flight.received.dense().decode().isnan().any())
    flight.combine(ExpertRows(rows_RH=torch.zeros(flight.received.num_rows, 32)))
    return good, bool(flight.received.dense().decode().isnan().all())


def test_rows_that_are_read_after_they_were_combined_are_poison():
    assert on_ranks(2, read_too_late) == [(False, True)] * 2


def guards_that_ask(verdicts, gone=()):
    """Guards of a transport that says these one after the other, in a group that has lost these."""
    guards = WorkspaceGuards.__new__(WorkspaceGuards)
    asked = []

    def lost():
        asked.append(1)
        return next(verdicts, [])

    guards._transport = SimpleNamespace(lost=lost)
    guards.group = SimpleNamespace(gone=lambda: dict.fromkeys(gone, "its process has ended"))
    return guards, asked


@pytest.mark.parametrize(
    ("verdicts", "gone", "found", "least", "most"),
    [
        ([[2]], (), [2], 1, 1),
        ([[], [], [2]], (), [2], 3, 3),
        ([[]], (1, 3), [], 1, 1),  # whoever was lost is gone: nobody else is blamed
        ([], (3,), [], 2, 7),  # 0.3 s at 0.05 s each
    ],
)
def test_the_verdict_of_a_transport_is_waited_for_for_a_while(
    monkeypatch, verdicts, gone, found, least, most
):
    monkeypatch.setattr(workspace_guards, "_VERDICT", 0.3 if not found else 60.0)
    monkeypatch.setattr(workspace_guards, "_PAUSE", 0.05)
    guards, asked = guards_that_ask(iter(verdicts), gone)
    assert guards.found_lost(ty.PeerLost([1], phase="combine", waited=1.0, rank=0)) == found
    assert least <= len(asked) <= most
