"""`measure_dispatch`: every contestant takes part in every round, figures fit each other, wrong bits have no speed."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.models import WATCHED
from tokenyard.errors import ContractError, InputError, PlanError, RankError, Reason, UnknownName
from tokenyard.exchange import EXCHANGES, Pending, RowsAtHome, TwoSidedTransport
from tokenyard.group import thread_groups
from tokenyard.rows import CombineBuffer
from tokenyard_lab.bench import dispatch as bench


def measure_dispatch(world, kind="processes", **job):
    return bench.measure_dispatch(bench.Job(**job), world, kind)


SHAPE = {"num_tokens": 24, "hidden_size": 256, "top_k": 2, "num_experts": 6}


@pytest.fixture(scope="module")
def on_processes():
    return measure_dispatch(2, **SHAPE, rounds=4)


def test_every_exchange_is_measured_in_the_order_of_the_registry(on_processes):
    assert exchanges_of(on_processes) == list(EXCHANGES)
    for record in on_processes:
        assert (record.parameters["tokens"], record.parameters["wire"]) == (24, "bf16")
        assert record.details["encode_ms"] > 0


def exchanges_of(records):
    return [record.parameters["exchange"] for record in records]


def test_times_are_ordered(on_processes):
    for record in on_processes:
        for spread in (record.ours, record.floor, record.peers["gloo"]):
            assert 0 < spread.least <= spread.low <= spread.median <= spread.high <= spread.most
        # Out and back are parts of one round; the medians of parts may come from different rounds.
        assert 0 < record.details["out_ms"] <= record.ours.high * 2
        assert 0 <= record.details["back_ms"] <= record.ours.high * 2


def test_bytes_are_those_of_the_packets(on_processes):
    (two_sided,) = (record.details for record in on_processes if record.parameters["exchange"] == "two_sided")
    packet_out, packet_back = 2 * 256 + 16 + 16, 2 * 256  # two ids and two weights take 16 bytes each, padded
    rows = two_sided["combine_bytes"] / packet_back
    assert rows == int(rows)
    assert 2 * 24 <= rows <= 2 * 24 * 2  # each token goes to one rank, or to both
    assert two_sided["dispatch_bytes"] == rows * packet_out
    moved = two_sided["dispatch_bytes"] + two_sided["combine_bytes"]
    assert two_sided["bytes_per_token"] == moved / (2 * 24)


def test_mxfp8_sends_about_half_and_threads_have_no_gloo():
    by_wire = {
        wire: measure_dispatch(
            2,
            num_tokens=8,
            hidden_size=2048,
            top_k=2,
            num_experts=4,
            wire=wire,
            exchanges=["two_sided"],
            rounds=2,
            kind="threads",
        )[0]
        for wire in ("bf16", "mxfp8")
    }
    bf16, mxfp8 = (by_wire[wire].details for wire in ("bf16", "mxfp8"))
    assert 0.5 < mxfp8["dispatch_bytes"] / bf16["dispatch_bytes"] < 0.54
    assert bf16["combine_bytes"] == mxfp8["combine_bytes"]
    assert by_wire["bf16"].peers == {}
    assert list(by_wire["bf16"].ratios) == ["ours / floor"]
    assert by_wire["bf16"].ratios["ours / floor"].median > 0


def test_a_round_lasts_until_the_last_rank_is_done_and_ratios_are_taken_round_by_round():
    def rank(*, slow: float) -> bench._Measured:
        seconds = {
            "two_sided": [(0.002, 0.004), (0.003 * slow, 0.006 * slow)],
            "gloo": [(0.004, 0.008), (0.009, 0.018)],
            "floor": [(0.001, 0.002), (0.001, 0.002)],
            "encode": [(0.001, 0.001), (0.001, 0.001)],
        }
        return bench._Measured(seconds=seconds, sent_bytes={"two_sided": (100, 50)}, threads=1)

    job = bench.Job(
        **SHAPE, wire="bf16", combine_wire="bf16", exchanges=("two_sided",), rounds=2, paranoid=False
    )
    (record,) = bench._records(job, 2, [rank(slow=1.0), rank(slow=2.0)])
    assert record.ours.median == pytest.approx(statistics.median([4, 12]))
    assert record.details["out_ms"] == pytest.approx(statistics.median([2, 6]))
    assert record.ratios["gloo / ours"].median == pytest.approx(statistics.median([8 / 4, 18 / 12]))
    assert record.ratios["ours / floor"].median == pytest.approx(statistics.median([4 / 2, 12 / 2]))
    assert (record.details["dispatch_bytes"], record.details["combine_bytes"]) == (200, 100)


def test_an_exchange_that_does_not_reach_these_ranks_is_left_out(monkeypatch):
    class Elsewhere(TwoSidedTransport):
        name = "elsewhere"

        @classmethod
        def reaches(cls, group, hosts):
            return Reason(field="exchange", value=cls.name, why="it needs two hosts")

    monkeypatch.setitem(EXCHANGES, Elsewhere.name, Elsewhere)
    records = measure_dispatch(2, **SHAPE, rounds=2, kind="threads")
    assert exchanges_of(records) == [name for name in EXCHANGES if name != "elsewhere"]
    with pytest.raises(RankError, match="it needs two hosts"):
        measure_dispatch(2, **SHAPE, exchanges=["elsewhere"], rounds=2, kind="threads")


class GoodForThreeRounds(TwoSidedTransport):
    later: type[RowsAtHome]

    def send_back(self, results):
        pending = super().send_back(results)
        if results.arrival.round <= 3:
            return pending
        return Pending(lambda: self.later(**vars(pending.wait())))


class OneBitIsOff(RowsAtHome):
    def sum_into(self, out_TH, add):
        y_TH = super().sum_into(out_TH, add)
        y_TH[0, 0] += 1
        return y_TH


class NothingIsWritten(RowsAtHome):
    def sum_into(self, out_TH, add):
        return out_TH


class Late(GoodForThreeRounds):
    """Right in the first rounds; then a bit is off."""

    name, later = "late", OneBitIsOff


class Lazy(GoodForThreeRounds):
    """Leaves the caller's tensor as it is after the first rounds."""

    name, later = "lazy", NothingIsWritten


@pytest.mark.parametrize("cls", [Late, Lazy])
def test_wrong_bits_have_no_speed(cls, monkeypatch):
    monkeypatch.setitem(EXCHANGES, cls.name, cls)
    with pytest.raises(RankError, match=f"exchange {cls.name} gave other bits") as raised:
        measure_dispatch(2, **SHAPE, exchanges=[cls.name], rounds=3, kind="threads")
    assert isinstance(raised.value.__cause__, ContractError)


class Buffered(TwoSidedTransport):
    """Offers a buffer with slots that hold no row, in another order."""

    name = "buffered"
    buffer = None

    def send(self, batch):
        pending = super().send(batch)

        def wait():
            arrival = pending.wait()
            if self.buffer is None:
                rows = arrival.received.num_rows
                rows_SH = torch.full((2 * rows, 256), torch.nan, dtype=torch.bfloat16)
                self.buffer = CombineBuffer(rows_SH=rows_SH, slots_R=torch.arange(rows).flip(0) * 2)
            return replace(arrival, received=replace(arrival.received, results=self.buffer))

        return Pending(wait)

    def send_back(self, results):
        assert results.rows_RH is None  # they stand in the buffer
        rows_RH = self.buffer.rows_SH[self.buffer.slots_R]
        encoded = results.arrival.spec.combine_wire.encode(rows_RH)
        return super().send_back(replace(results, rows_RH=rows_RH, encoded=encoded))


def test_results_stand_in_the_buffer_that_an_exchange_offers(monkeypatch):
    monkeypatch.setitem(EXCHANGES, Buffered.name, Buffered)
    records = measure_dispatch(2, **SHAPE, exchanges=["buffered"], rounds=2, kind="threads")
    assert exchanges_of(records) == ["buffered"]


def test_all_ranks_start_at_one_moment():
    with ThreadPoolExecutor(3) as pool:
        starts = list(pool.map(bench.start_together, thread_groups(3)))
    assert len(set(starts)) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"top_k": 7}, InputError, "top_k is 7, of 6 experts"),
        ({"rounds": 1}, InputError, "at least 2"),
        ({"wire": "fp32"}, PlanError, "wire=fp32"),
        ({"exchanges": ["two_faced"]}, UnknownName, "two_faced"),
    ],
)
def test_errors_come_before_any_rank_is_started(arguments, error, words, monkeypatch):
    monkeypatch.delattr(bench, "launch")
    with pytest.raises(error, match=words):
        measure_dispatch(2, **{**SHAPE, **arguments})


def test_an_override_of_all_plans_is_refused(monkeypatch):
    monkeypatch.setenv("TOKENYARD_EXCHANGE", "allgather")
    with pytest.raises(InputError, match="TOKENYARD_EXCHANGE=allgather"):
        measure_dispatch(2, **SHAPE)


def test_what_watching_costs_is_measured_beside_the_plain_exchange(monkeypatch):
    records = measure_dispatch(2, **SHAPE, rounds=3, kind="threads", paranoid=True)
    watched = [f"{name}, watched" for name in WATCHED]
    assert exchanges_of(records) == [*EXCHANGES, *watched]
    for record in records[len(EXCHANGES) :]:
        ratio = record.ratios["watched / plain"]
        assert 0 < record.ours.low <= record.ours.median <= record.ours.high
        assert 0 < ratio.low <= ratio.median <= ratio.high
    plain = measure_dispatch(2, **SHAPE, exchanges=["two_sided"], rounds=2, kind="threads")
    assert exchanges_of(plain) == ["two_sided"]
    monkeypatch.setenv("TOKENYARD_PARANOID", "1")
    with pytest.raises(InputError, match="TOKENYARD_PARANOID makes every plan watch itself"):
        measure_dispatch(2, **SHAPE, rounds=2, kind="threads")
