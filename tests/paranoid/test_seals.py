"""Rows that are damaged on their way, out or back, in every exchange: who sees it, and what it says."""

from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.models import WATCHED, batch, build, on_ranks, raised, spec
from tests.paranoid.tampering import (
    HOSTS,
    SOURCE,
    VICTIM,
    check_alarm,
    damaging,
    flip,
    layer_spec,
    outcome,
    three_rounds,
)
from tokenyard.errors import Corrupted
from tokenyard.exchange import EXCHANGES, LocalTransport, Pending
from tokenyard.group import thread_groups
from tokenyard.routing import SoftmaxRouter

every_exchange = pytest.mark.parametrize("exchange", WATCHED)


def on_three(fn, exchange, *arguments):
    return on_ranks(3, fn, exchange, *arguments, hosts=HOSTS.get(exchange, 1))


def finders_of(exchange):
    """Who sees what is damaged on the way out: all who get the packet, where several do, else its receiver."""
    return None if exchange in ("allgather", *HOSTS) else [VICTIM]


def flipped_out(group, exchange, payload):
    return three_rounds(group, damaging(exchange, out=lambda rows: flip(rows[payload][1])))


@every_exchange
@pytest.mark.parametrize("payload", ["data", "scales", "global_scale", "tag", "weights"])
def test_a_flipped_bit_on_the_way_out_names_payload_and_token(exchange, payload):
    by_rank = on_three(flipped_out, exchange, payload)
    check_alarm(
        by_rank, finders_of(exchange), place=payload, words=[f"payload {payload!r}", f"of rank {SOURCE}"]
    )


def test_a_damaged_row_is_found_before_experts_compute_it():
    layer = spec(top_k=1)
    plan = ty.plan([layer], thread_groups(1)[0], exchange="two_sided", paranoid=True)
    exchange, wired = plan.exchange, plan.wiring("moe").exchange_spec
    send = exchange.transport.inner.send

    def damage(batch):
        arrival = send(batch).wait()
        arrival.received.rows.payloads["data"][arrival.received.slots_R[1]] += 1
        return Pending(lambda: arrival)

    exchange.transport.inner.send = damage
    x_TH, routes = batch(layer, 3)
    error = raised(exchange.dispatch, wired, exchange.encode(wired, x_TH), routes)
    assert isinstance(error, Corrupted)
    assert error.place == "data"


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_a_flipped_id(exchange):
    check_alarm(on_ranks(3, flipped_out, exchange, "ids"), [VICTIM], place="ids")


def lost_id(group):
    def elsewhere(rows):
        rows["ids"][0] = -1

    return three_rounds(group, damaging("allgather", out=elsewhere))


def test_ids_that_hide_a_row_from_its_receiver_are_missed_by_count():
    check_lost_id(on_ranks(3, lost_id))


def check_lost_id(by_rank):
    words = ["rows from rank 0 have an expert here, and it announced"]
    check_alarm(by_rank, None, place="ids", token=None, words=words)


def test_a_checksum_that_was_damaged_itself_is_an_alarm_too():
    by_rank = on_ranks(3, flipped_out, "two_sided", "checksums")
    check_alarm(by_rank, [VICTIM], place="order", words=["not the one that belongs there"])


def logits_layer():
    router = SoftmaxRouter(2, renormalize=True)
    return layer_spec(top_k=2, experts="self_routing", router=router, payloads=(), wire="bf16")


def flipped_logits(group):
    layer = logits_layer()
    exchange = damaging("allgather", out=lambda rows: flip(rows["logits"][0]))
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    built, draw = build(plan, "moe"), torch.Generator().manual_seed(group.rank)
    x_TH, logits_TE = torch.randn(4, 40, generator=draw).bfloat16(), torch.randn(4, 5, generator=draw)
    return [outcome(plan, built, x_TH, logits_TE) for _ in range(3)]


def test_logits_have_a_checksum_as_well():
    check_alarm(on_ranks(2, flipped_logits), [0, 1], place="logits")


# -- Rows in the wrong place ---------------------------------------------------------------------------------


def swap(rows):
    for payload in rows.values():
        some = payload.view(torch.uint8)
        some[[0, 1]] = some[[1, 0]]


def swap_data_only(rows):
    swap({"data": rows["data"]})


def swapped(group, exchange, act):
    return three_rounds(group, damaging(exchange, out=act))


@every_exchange
def test_two_rows_in_each_others_place(exchange):
    finders = finders_of(exchange)
    if exchange != "allgather":  # where packets in each other's place are routed elsewhere
        check_alarm(on_three(swapped, exchange, swap), finders, place="order")
    check_alarm(on_three(swapped, exchange, swap_data_only), finders, place="data")


def dropped(group, exchange):
    """A row is not written: what stands in its slot, or behind it in the message, is taken for it."""

    def drop(rows):
        for payload in rows.values():
            some = payload.view(torch.uint8)
            if exchange == "one_sided":
                some[0] = 0xFF  # the poison that was there
            else:
                some[0] = some[1]

    return three_rounds(group, damaging(exchange, out=drop))


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_a_row_that_was_dropped(exchange):
    words = ["no rank wrote it in round 2"] if exchange == "one_sided" else ["not the one that belongs there"]
    token = None if exchange == "one_sided" else "some"
    check_alarm(on_ranks(3, dropped, exchange), [VICTIM], place="order", token=token, words=words)


def stale(group, exchange):
    """The first row of the last round stands where that of this one should."""
    last = {}

    class Stale(EXCHANGES[exchange]):
        name = "stale"

        def push(self, batch, firsts):
            super().push(batch, firsts)
            self.take_the_last(batch, self.workspace.dispatch(VICTIM, batch.spec, batch.region))

        def pack(self, batch, packets_by_rank):
            super().pack(batch, packets_by_rank)
            self.take_the_last(batch, {"packet": packets_by_rank[VICTIM]})

        def take_the_last(self, batch, rows):
            if self.group.rank == SOURCE:
                first = {name: payload.view(torch.uint8)[0] for name, payload in rows.items()}
                kept = {name: row.clone() for name, row in first.items()}
                for name, row in last.items() if batch.round == 2 else ():
                    first[name].copy_(row)
                last.update(kept)

    return three_rounds(group, Stale)


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_a_row_of_the_last_round(exchange):
    by_rank = on_ranks(3, stale, exchange)
    check_alarm(by_rank, [VICTIM], place="order", words=["of round 1: it was left there"])


# -- The way back --------------------------------------------------------------------------------------------


def damaged_back(group, exchange, act, combine_wire):
    return three_rounds(group, damaging(exchange, back=act), layer=layer_spec(combine_wire=combine_wire))


def flip_data(rows):
    flip(rows["data"][0])


def flip_scales(rows):
    flip(rows["scales"][0])


def flip_global_scale(rows):
    flip(rows["global_scale"][0])


@every_exchange
@pytest.mark.parametrize(
    ("act", "place", "wire"),
    [
        (flip_data, "data", "mxfp8"),
        (flip_scales, "scales", "mxfp8"),
        (flip_global_scale, "global_scale", "nvfp4"),
    ],
)
def test_a_flipped_bit_on_the_way_back(exchange, act, place, wire):
    by_rank = on_three(damaged_back, exchange, act, wire)
    words = [f"payload {place!r} of the result of token", f"that rank {VICTIM} returned"]
    check_alarm(by_rank, [SOURCE], place=place, source=VICTIM, words=words)


@every_exchange
def test_results_in_each_others_place(exchange):
    by_rank = on_three(damaged_back, exchange, swap, None)
    check_alarm(by_rank, [SOURCE], place="order", source=VICTIM, words=[f"rank {VICTIM} returned what rank"])


def forget(rows):
    for payload in rows.values():
        payload.view(torch.uint8)[0] = 0xFF


def test_a_result_that_nobody_wrote():
    by_rank = on_ranks(3, damaged_back, "one_sided", forget, None)
    check_alarm(
        by_rank, [SOURCE], place="order", source=VICTIM, words=["returned nothing as the result of token"]
    )


def seals_of_two_rounds(group, exchange):
    """What a rank keeps of a round to look at its results is not written over by the next one."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    kept = []
    for seed in (1, 2, 3):
        x_TH, routes = batch(layer, 5, seed=10 * seed + group.rank)
        trip = plan.exchange.dispatch(exchange_spec, plan.wiring("moe").wire.encode(x_TH), routes)
        arrival = trip.arrival
        seals = [arrival.checksums_RC, getattr(arrival.way_back, "heads_NC", None)]
        kept += [(seal, seal.clone()) for seal in seals if seal is not None]
        trip.combine(built.experts(trip.received))
    return len(kept), all(torch.equal(*pair) for pair in kept)


@every_exchange
@pytest.mark.parametrize("world", [1, 3])
def test_seals_of_a_round_outlive_its_rows(exchange, world):
    kinds = 2 if exchange == "hierarchical" else 1
    hosts = HOSTS.get(exchange, 1) if world == 3 else 1
    assert on_ranks(world, seals_of_two_rounds, exchange, hosts=hosts) == [(3 * kinds, True)] * world


class ReusesMemory(LocalTransport):
    """A transport of one's own, whose rows arrive in memory that it uses again in each round."""

    name = "reuses_memory"
    room = None

    def send(self, batch):
        pending = super().send(batch)

        def arrive():
            arrival = pending.wait()
            if self.room is None:
                self.room = {name: torch.empty_like(part) for name, part in arrival.received.extra.items()}
            extra = {name: self.room[name].copy_(part) for name, part in arrival.received.extra.items()}
            return replace(arrival, received=replace(arrival.received, extra=extra))

        return Pending(arrive)


def test_seals_of_a_round_outlive_rows_that_are_written_over():
    assert seals_of_two_rounds(thread_groups(1)[0], ReusesMemory) == (3, True)
