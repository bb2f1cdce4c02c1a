"""Ranks that come and go where hosts are: every output has the bits of the placement, and the hosts, of its call."""

import threading

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, spec
from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.twin import twin
from tokenyard.elastic import join_plan, take_over
from tokenyard.group import rejoin, threads

SECONDS = 20.0  # in which fresh ranks come


def layer_spec(**changes):
    return spec(num_experts=7, experts="reference", **changes)


def due(plan, given, rank):
    """What a rank must get for its batch, with the placement and the hosts of now."""
    wiring = plan.wiring("moe")
    return twin(wiring, random_weights(wiring.spec, 0), *given, rank)


def newcomer(address, rank, results):
    """A fresh rank: enters the plan, and makes three calls."""
    try:
        group = rejoin(address, rank=rank, seconds=SECONDS)
        plan = join_plan([layer_spec()], group, seconds=SECONDS)
        built, given = plan.layer("moe"), batch(layer_spec(), 4, seed=rank)
        take_over(plan, seconds=SECONDS)
        results[rank] = [torch.equal(built(*given), due(plan, given, rank)) for _ in range(3)]
        group.leave("it has returned")
    except BaseException as error:
        results[rank] = error


def grown(group, count, wait, results):
    """Whether outputs are right before, while and after ranks come; and the hosts then."""
    layer = layer_spec()
    plan = ty.plan([layer], group, exchange="hierarchical")
    built, given, rank = build(plan, "moe"), batch(layer, 5, seed=group.rank), group.rank
    before = due(plan, given, rank)
    said = [torch.equal(built(*given), before)]
    fresh = [
        threading.Thread(target=newcomer, args=(group.address, group.size + n, results)) for n in range(count)
    ]
    if rank == 0:
        for thread in fresh:
            thread.start()
    move = plan.grow(count, seconds=SECONDS, wait=wait)
    while not move.is_done:
        y_TH = built(*given)
        said.append(torch.equal(y_TH, due(plan, given, rank) if move.is_done else before))
    said += [torch.equal(built(*given), due(plan, given, rank)) for _ in range(3 if wait else 2)]
    if rank == 0:
        for thread in fresh:
            thread.join()
    return all(said), plan.wiring("moe").exchange_spec.hosts


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("hosts", "count", "on_new_host"),
    [([2, 1], 1, False), ([2, 2], 2, True), ([1, 2], 1, True), ([2], 1, True), ([1, 1], 2, False)],
)
def test_fresh_ranks_on_an_old_host_and_on_a_new_one(hosts, count, on_new_host, wait, monkeypatch):
    if on_new_host:
        make = threads._MeetingPoint.__init__

        def with_new_host(self, hosts, before=None, fresh=()):
            if before is not None:
                hosts = [*hosts[: -len(fresh)], *["a new host"] * len(fresh)]
            make(self, hosts, before, fresh)

        monkeypatch.setattr(threads._MeetingPoint, "__init__", with_new_host)
    results, world = {}, sum(hosts)
    said = on_ranks(world, grown, count, wait, results, hosts=hosts)
    old = [host for host, ranks in enumerate(hosts) for _ in range(ranks)]
    host = len(hosts) if on_new_host else len(hosts) - 1
    assert said == [(True, (*old, *[host] * count))] * world
    assert results == {world + n: [True] * 3 for n in range(count)}


def shrunk(group, leaving, wait):
    layer = layer_spec(spare_experts=7)
    plan = ty.plan([layer], group, exchange="hierarchical")
    built, given = build(plan, "moe"), batch(layer, 5, seed=group.rank)
    before = due(plan, given, group.rank)
    move, said = plan.shrink(leaving, wait=wait), []
    while not move.is_done:
        y_TH = built(*given)
        switched = move.is_done and group.rank not in leaving
        said.append(torch.equal(y_TH, due(plan, given, plan.group.rank) if switched else before))
    if group.rank in leaving:
        move.wait()
        return all(said)
    said += [torch.equal(built(*given), due(plan, given, plan.group.rank)) for _ in range(3)]
    return all(said), plan.wiring("moe").exchange_spec.hosts


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("hosts", "leaving", "left"),
    [
        ([2, 2], [2, 3], (0, 0)),  # a whole host
        ([2, 1, 1], [2], (0, 0, 1)),  # one in the middle
        ([1, 2], [0], (0, 0)),  # the first
        ([2, 2], [0, 3], (0, 1)),  # one rank of each
    ],
)
def test_a_host_leaves_or_a_rank_of_each(hosts, leaving, left, wait):
    said = on_ranks(sum(hosts), shrunk, leaving, wait, hosts=hosts)
    for rank, found in enumerate(said):
        assert found is True if rank in leaving else found == (True, left), (rank, found)
