"""Ranks that come and go while a plan is in use: no output changes, and an error or a loss leaves one placement."""

import threading
import time

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.elastic import join_plan, moving, resizing, take_over
from tokenyard.elastic.resizing import placement_with, placement_without
from tokenyard.errors import GroupError
from tokenyard.group import rejoin, thread_groups
from tokenyard.routing import Placement, SoftmaxRouter

SECONDS = 20.0  # in which fresh ranks come


def newcomer(address, rank, layers, calls, results, weights=None):
    """A fresh rank: enters the plan, and makes so many calls of each layer."""
    try:
        group = rejoin(address, rank=rank, seconds=SECONDS)
        plan = join_plan(layers, group, seconds=SECONDS)
        built = [plan.layer(layer.name) for layer in layers]
        take_over(plan, seconds=SECONDS)
        results[rank] = [
            (module(*batch(layer, 4, seed=rank)), plan.local_experts(layer.name))
            for _ in range(calls)
            for layer, module in zip(layers, built, strict=True)
        ]
        group.leave("it has returned")
    except BaseException as error:
        results[rank] = error


def resized(group, layers, exchange, results, wait):
    """Outputs before, while and after two ranks come, and while and after rank 0 leaves."""
    plan = ty.plan(layers, group, exchange=exchange)
    built = [build(plan, layer.name) for layer in layers]
    given = [batch(layer, 5, seed=group.rank) for layer in layers]
    first = [module(*x) for module, x in zip(built, given, strict=True)]

    def same():
        return all(torch.equal(a, module(*x)) for a, module, x in zip(first, built, given, strict=True))

    world, said = group.size, []
    fresh = [
        threading.Thread(target=newcomer, args=(group.address, world + n, layers, 3, results))
        for n in range(2)
    ]
    if group.rank == 0:
        for thread in fresh:
            thread.start()
    move = plan.grow(2, seconds=SECONDS, wait=wait)
    while not move.is_done:
        said.append(same())
    said += [same() for _ in range(3 if wait else 2)]  # in the last pass of the loop all had switched
    said.append(move.pause_ms > 0 and plan.group.size == world + 2)
    if group.rank == 0:
        for thread in fresh:
            thread.join()
    return said, plan.local_experts(layers[0].name), plan.stats()[layers[0].name].moves


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        ("one_sided", [{}, {"weights": "mxfp4", "bias": True}]),
        ("two_sided", [{"weights": "nvfp4", "experts": "reference"}, {"weights": "mxint4"}]),
        ("allgather", [{"weights": "fp8_block128"}, {"weights": "mxfp8"}]),
    ],
)
def test_fresh_ranks_take_experts_over_and_no_output_changes(exchange, kinds, wait):
    layers = [spec(f"moe.{n}", sum="choices", num_experts=7, **kind) for n, kind in enumerate(kinds)]
    results = {}
    said = on_ranks(2, resized, layers, exchange, results, wait)
    for outputs, experts, _ in said:
        assert all(outputs)
        assert len(experts) == 2
    alone = on_ranks(1, outputs_alone, layers)[0]
    for rank in (2, 3):
        assert not isinstance(results[rank], BaseException), results[rank]
        for number, (y_TH, experts) in enumerate(results[rank]):
            assert torch.equal(y_TH, alone[rank][number % len(layers)])
            assert 1 <= len(experts) <= 2


def outputs_alone(group, layers):
    plan = ty.plan(layers, group)
    built = [build(plan, layer.name) for layer in layers]
    return {
        rank: [module(*batch(layer, 4, seed=rank)) for layer, module in zip(layers, built, strict=True)]
        for rank in (2, 3)
    }


def shrunk(group, exchange, leaving, wait, spare):
    layer = spec(sum="choices", num_experts=7, spare_experts=spare)
    more = spec("more", sum="choices", num_experts=4, spare_experts=spare, weights="mxfp8")
    plan = ty.plan([layer, more], group, exchange=exchange)
    built = [build(plan, name) for name in ("moe", "more")]
    given = [batch(built[0].wiring.spec, 5, seed=group.rank), batch(more, 3, seed=group.rank)]
    first = [module(*x) for module, x in zip(built, given, strict=True)]

    def same():
        return all(torch.equal(a, module(*x)) for a, module, x in zip(first, built, given, strict=True))

    move = plan.shrink(leaving, wait=wait)
    said = []
    while not move.is_done:
        said.append(same())
    if group.rank in leaving:
        move.wait()
        return all(said), str(raised(built[0], *given[0])), str(raised(plan.rebalance))
    said += [same() for _ in range(3)]
    return all(said), plan.group.size, plan.local_experts("moe"), move.pause_ms


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("exchange", ["one_sided", "two_sided", "allgather"])
def test_experts_of_ranks_that_leave_move_first_and_no_output_changes(exchange, wait):
    first, gone, third = on_ranks(3, shrunk, exchange, [1], wait, 3)
    for said, size, experts, pause_ms in (first, third):
        assert said
        assert size == 2
        assert len(experts) >= 3
        assert pause_ms > 0
    assert sorted({*first[2], *third[2]}) == list(range(7))
    assert gone[0]
    assert "the plan has let this rank go (`plan.shrink`)" in gone[1]
    assert "the plan has let this rank go" in gone[2]


def come_and_go(group, exchange):
    """Rank 2 comes, and rank 0 leaves: on processes, of which the last one is in no plan at first."""
    layer = spec(sum="choices", num_experts=6, spare_experts=4, weights="mxfp8")
    within = group.subgroup([0, 1]) if group.rank < 2 else None
    address = group.gather_json(within and within.address)[0]
    given = batch(layer, 5, seed=group.rank)
    if within is None:
        plan = join_plan([layer], rejoin(address, rank=2, seconds=SECONDS), seconds=SECONDS)
        built = plan.layer("moe")
        take_over(plan)
        first_TH = built(*given)
    else:
        plan = ty.plan([layer], within, exchange=exchange)
        built = build(plan, "moe")
        first_TH = built(*given)
        move = plan.grow(1, seconds=SECONDS, wait=False)
        while not move.is_done:
            assert torch.equal(first_TH, built(*given))
    same = [torch.equal(first_TH, built(*given)) for _ in range(3)]
    grown = plan.local_experts("moe"), plan.group.size
    move = plan.shrink([0], wait=False)
    while not move.is_done:
        same.append(torch.equal(first_TH, built(*given)))
    if group.rank == 0:
        move.wait()
        return all(same), grown, str(raised(built, *given))
    same += [torch.equal(first_TH, built(*given)) for _ in range(3)]
    return all(same), grown, (plan.local_experts("moe"), plan.group.size)


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_processes_come_and_go(exchange):
    said = on_ranks(3, come_and_go, exchange, ranks="processes")
    assert [same for same, *_ in said] == [True] * 3
    assert [grown for _, grown, _ in said] == [([0, 1], 3), ([3, 4], 3), ([2, 5], 3)]
    assert "the plan has let this rank go" in said[0][2]
    assert [after for *_, after in said[1:]] == [([3, 4, 0], 2), ([2, 5, 1], 2)]


def test_hosts_experts_that_route_by_themselves_and_watched_plans_shrink():
    def halved(group, exchange, fields, paranoid):
        layer = spec(num_experts=6, spare_experts=6, dtype=torch.float32, weights="fp32", **fields)
        plan = ty.plan([layer], group, exchange=exchange, paranoid=paranoid)
        built, rows = build(plan, "moe"), batch(layer, 5, seed=group.rank)
        if layer.router is not None:
            rows = rows[0], torch.randn(5, 6, generator=torch.Generator().manual_seed(group.rank))
        before_TH = built(*rows)
        plan.shrink([1, 3])
        if group.rank in (1, 3):
            return None
        torch.testing.assert_close(built(*rows), before_TH)
        plan.shrink([1])
        if group.rank:
            return None
        torch.testing.assert_close(built(*rows), before_TH)
        return plan.local_experts("moe")

    router = SoftmaxRouter(top_k=2, renormalize=True)
    for exchange, fields, paranoid, hosts in (
        ("hierarchical", {}, False, 2),
        ("two_sided", {}, False, 2),
        ("one_sided", {}, True, 1),
        ("allgather", {"experts": "self_routing", "router": router}, False, 1),
    ):
        said = on_ranks(4, halved, exchange, fields, paranoid, hosts=hosts)
        assert sorted(said[0]) == list(range(6)), exchange


def grown_into(group, larger, results):
    """Outputs before and after a third rank has come, in a group that somebody else has made."""
    layer = spec(sum="choices", num_experts=6)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    given = batch(layer, 5, seed=group.rank)
    before_TH = built(*given)
    plan.grow(larger[group.rank], seconds=SECONDS)
    return torch.equal(before_TH, built(*given)), plan.group is larger[group.rank]


def test_a_plan_grows_into_a_group_that_somebody_else_has_made():
    larger, results = thread_groups(3, name="larger"), []
    layer = spec(sum="choices", num_experts=6)

    def come():
        plan = join_plan([layer], larger[2], seconds=SECONDS)
        built = plan.layer("moe")
        results.append(raised(take_over, plan, seconds=SECONDS))
        results.append(len(built(*batch(layer, 5, seed=2))))

    fresh = threading.Thread(target=come)
    fresh.start()
    assert on_ranks(2, grown_into, larger, results) == [(True, True)] * 2
    fresh.join()
    assert results == [None, 5]


def shared_before(group):
    """Which groups are closed after two ranks have left one after the other, and what an older move still holds."""
    plan = ty.plan([spec(num_experts=6, spare_experts=6)], group)
    built, groups, exchanges = build(plan, "moe"), [], []
    plan.rebalance({built.name: "round_robin"})
    carrier = plan._changing().moves.under_way.carrier
    carried_by, was_mapped = carrier._found(), bool(carrier._mapped)
    for _ in range(2):
        groups.append(plan.group)
        exchanges.append(plan.exchange)
        move = plan.shrink([plan.group.size - 1])
        move._thread.join()
        if move.next_ranks.leaves:
            return None
    groups.append(plan.group)
    assert "have switched placements [1] times" in str(raised(plan.exchange.announcer.noticed, [1 << 2]))
    assert plan._changing().moves.under_way.carrier._of is plan.group
    closed = ["is closed" in str(raised(each.barrier)) for each in (carried_by, *groups[:-1])]
    plan.close()
    closed.append("is closed" in str(raised(groups[-1].barrier)))
    ended = [str(raised(each.usability.check_open)) for each in exchanges]
    return was_mapped, carrier._mapped, closed, ended


def test_what_was_shared_before_is_given_back_but_for_the_group_of_the_caller():
    was_mapped, mapped, closed, ended = on_ranks(3, shared_before)[0]
    assert was_mapped
    assert mapped == {}
    assert closed == [True, False, True, False]
    assert all("the plan is closed" in words for words in ended)


def refused(group):
    plan = ty.plan([spec(num_experts=6, spare_experts=1), spec("none", num_experts=2)], group)
    errors = [raised(plan.shrink, [1])]  # no layer was made
    build(plan, "moe")
    built = [build(plan, name) for name in ("moe", "none")]
    errors += [raised(plan.shrink, ranks) for ranks in ([1], [0, 1, 2], [3], [], [group.rank])]
    errors += [raised(plan.grow, 0), raised(plan.grow, group)]
    given = batch(built[0].wiring.spec, 5, seed=group.rank)
    errors.append(raised(plan.grow, 1, seconds=0.2))  # nobody comes
    built[0](*given)
    move = plan.grow(1, seconds=0.5, wait=False)
    errors += [raised(plan.shrink, [1]), raised(plan.rebalance)]
    while not plan.stats()["moe"].moves.given_up > 1:
        built[0](*given)
    errors.append(raised(move.wait))
    plan.group.device = torch.device("cuda")
    return [str(error) for error in [*errors, raised(plan.grow, 1)]]


def test_what_cannot_be_done_is_said_and_the_plan_serves_on():
    for rank, said in enumerate(on_ranks(3, refused)):
        none, room, everybody, unknown, nobody, different, zero, small, missing, *later = said
        assert "no MoELayer of this rank has the experts of this layer" in none
        assert "1 experts live on ranks [1] alone, and there is memory for 0 more" in room
        assert "declare more of it: LayerSpec(spare_experts=…)" in room
        for words in (everybody, unknown, nobody):
            assert "are to leave a group of 3; expected some of ranks 0 to 2" in words
        assert "ranks disagree on shrink" in different
        assert "the number of fresh ranks is 0" in zero
        assert f"rank {rank} of 3 is rank {rank} of 3 in the group to grow into" in small
        assert "rank 3" in missing
        assert "shrink was called while experts move" in later[0]
        assert "rebalance was called while experts move" in later[1]
        assert "rank 3" in later[2] or "given up" in later[2]
        assert "grow on cuda; expected ranks on CPUs: captured CUDA graphs" in later[3]


def test_placements_keep_every_expert_and_stay_even():
    for world in (1, 2, 3, 5):
        for experts in (1, 4, 7, 16):
            for count in (1, 2, 3):
                grown = placement_with(Placement.round_robin(experts, world), count)
                sizes = [len(row) for row in grown.table]
                assert grown.world == world + count
                assert max(sizes) - min(sizes) <= 1
                if world > 1:
                    back = placement_without(grown, [0], [experts] * grown.world)
                    assert back.table[0] == ()
                    assert back.lost_experts == []
    twice = Placement.replicated(Placement.contiguous(4, 2), {e: [e // 2 ^ 1] for e in range(4)})
    assert placement_with(twice, 1).table == ((0, 1, 2), (2, 3, 0), (3, 1))
    assert placement_without(placement_with(twice, 1), [2], [5, 5, 5]).table == (
        (0, 1, 2, 3),
        (2, 3, 0, 1),
        (),
    )


@pytest.mark.parametrize(
    ("slots", "after"),
    [
        ([4, 4, 4], ((), (0, 1), (0, 2, 1))),  # expert 0 is everywhere, and expert 1 has two copies again
        ([4, 3, 3], ((), (0, 1), (0, 2))),  # a slot stays spare
        ([4, 3, 2], ((), (0, 1), (0, 2))),  # but for an expert that nobody else has
        ([4, 3, 1], ((), (0, 1, 2), (0,))),
    ],
)
def test_copies_of_experts_are_kept_where_a_slot_stays_spare(slots, after):
    present = Placement.explicit(3, [[0, 1, 2], [0, 1], [0]])
    assert placement_without(present, [0], slots).table == after


# -- Losses ------------------------------------------------------------------------------------------------

TWICE = Placement.replicated(Placement.round_robin(6, 3), {e: [(e + 1) % 3] for e in range(6)})


def one_is_behind(group):
    """All have heard that all are ready, and rank 2 leaves. Rank 0 switches; rank 1 misses rank 2 before it does."""
    layer = spec(sum="choices", num_experts=6, placement=TWICE, spare_experts=6)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    given = batch(layer, 5, seed=group.rank)
    before_TH = built(*given)
    move = plan.shrink([2], wait=False)
    while move.decision != 1:
        assert torch.equal(built(*given), before_TH)
    if group.rank == 2:
        return None
    if group.rank == 1:
        time.sleep(0.3)  # until rank 0 has said that it takes the next group
        plan.go_on_without([2])
    return torch.equal(built(*given), before_TH), plan.group.size


def test_after_a_loss_all_follow_a_rank_that_has_taken_the_next_group():
    first, second, _ = on_ranks(3, one_is_behind, deadline=5.0)
    assert first == second == (True, 2)


def dies(group, what, stage):
    """Rank 2 ends at a stage of the change; the others go on, all with the old or all with the next group."""
    layers = [spec(sum="choices", num_experts=6, placement=TWICE, spare_experts=6)]
    plan = ty.plan(layers, group)
    built = build(plan, "moe")
    given = batch(layers[0], 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 2:
        ended = {"agreement": "gather_json", "copying": "subgroup"}[stage]

        def end(*arguments, **options):
            group.leave("the test has ended it")
            raise SystemExit

        setattr(group, ended, end)
    lost = None
    try:
        move = plan.shrink([0], wait=False) if what == "shrink" else plan.grow(1, seconds=1.0, wait=False)
        if group.rank == 2:
            return None
        for _ in range(500):
            assert torch.equal(built(*given), before_TH)
        move.wait()
    except SystemExit:
        return None
    except ty.PeerLost as error:
        lost = type(error)
    plan.go_on_without([2])
    return lost, plan.group.size, torch.equal(built(*given), before_TH)


@pytest.mark.parametrize("stage", ["agreement", "copying"])
@pytest.mark.parametrize("what", ["shrink", "grow"])
def test_a_rank_that_dies_on_the_way_leaves_the_others_on_the_old_group(what, stage):
    first, second, _ = on_ranks(3, dies, what, stage, deadline=3.0)
    assert first == second
    assert issubclass(first[0], ty.PeerLost)
    assert first[1:] == (2, True)


class Ended(Exception):
    pass


def lost_before_the_switch(group, results):
    """Rank 1 ends when all are ready, and the fresh rank sees it before rank 0 has taken the next group."""
    layer = spec(sum="choices", num_experts=6)
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, "moe")
    fresh = threading.Thread(target=newcomer, args=(group.address, 2, [layer], 1, results))
    if group.rank == 1:
        with pytest.raises(Ended):
            plan.grow(1, seconds=SECONDS)
        del built
        return None
    fresh.start()
    error = raised(plan.grow, 1, seconds=SECONDS)
    fresh.join()
    return type(error), list(error.peers), plan.group.size, len(built.plan.local_experts("moe"))


def test_a_rank_that_is_lost_before_the_switch_is_named(monkeypatch):
    take, has_left = resizing.NextGroup.take, threading.Event()

    def taken(self):
        if self._present.rank == 1:
            self._present.leave("it has ended")
            has_left.set()
            raise Ended
        assert has_left.wait(SECONDS)
        self._present.decide(self._question, resizing.STAY)  # the word of the fresh rank
        return take(self)

    monkeypatch.setattr(resizing.NextGroup, "take", taken)
    results = {}
    assert on_ranks(2, lost_before_the_switch, results) == [(ty.PeerLost, [1], 2, 3), None]
    assert isinstance(results[2], ty.TokenyardError)


def fails_alone(group, what):
    """The thread of one rank fails where nobody hears of it: before the ranks have met. Says what ranks saw, and when.

    The deadline is 20 seconds, and ranks find each other for 30.
    """
    layer = spec(sum="choices", num_experts=6, spare_experts=6)
    within = group.subgroup([0, 1]) if group.rank < 2 else None
    address = group.gather_json(within and within.address)[0]
    if what == "shrink":
        within = group
    elif group.rank == 2:  # the memory of others is not there any more
        moving.map_memory = lambda address: open("/nowhere")  # noqa: SIM115
        plan = join_plan([layer], rejoin(address, rank=2, seconds=SECONDS), seconds=SECONDS)
        built = plan.layer("moe")
        started = time.monotonic()
        error = raised(take_over, plan, seconds=SECONDS)
        return type(error).__name__, str(error), time.monotonic() - started
    plan = ty.plan([layer], within)
    built = build(plan, "moe")
    given = batch(layer, 5, seed=group.rank)
    before_TH = built(*given)
    if what == "shrink" and group.rank == 1:
        silent = GroupError("the store does not answer", expected="an answer", fix="wait", rank=1)

        def subgroup(ranks, **options):
            raise silent

        within.subgroup = subgroup
    started = time.monotonic()
    error = raised(plan.grow, 1, seconds=SECONDS) if what == "grow" else raised(plan.shrink, [0])
    waited = time.monotonic() - started
    plan._changing().moves.under_way.last_move._thread.join()
    assert torch.equal(built(*given), before_TH)
    return type(error).__name__, str(error), waited


def test_who_fails_before_the_ranks_have_met_is_not_waited_for():
    for rank, (kind, words, waited) in enumerate(on_ranks(3, fails_alone, "shrink", ranks="processes")):
        assert kind == ("GroupError" if rank == 1 else "PeerFailed")
        assert "rank 1" in words
        assert "the store does not answer" in words
        assert waited < 15


def test_a_fresh_rank_whose_source_is_gone_names_it_and_the_others_serve_on():
    *old, (kind, words, waited) = on_ranks(3, fails_alone, "grow", ranks="processes")
    assert kind == "PeerLost"
    assert "rank 0" in words or "rank 1" in words
    assert "its memory cannot be mapped: No such file or directory" in words
    assert waited < 15
    for kind, words, waited in old:
        assert kind == "PeerLost"
        assert "rank 2 has given the change of ranks up" in words
        assert waited < 15


def nobody_comes(group):
    """Rank 1 waits for a fresh rank longer than rank 0 does, as on a busy machine, and hears of it."""
    layer = spec(sum="choices", num_experts=6)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    given = batch(layer, 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 1:
        admit = group.admit
        group.admit = lambda count, seconds, check: admit(count, seconds=seconds + 30, check=check)
    error = raised(plan.grow, 1, seconds=0.5)
    return type(error).__name__, list(error.peers), torch.equal(built(*given), before_TH)


def test_all_ranks_name_the_one_that_did_not_come_whoever_notices_first():
    assert on_ranks(2, nobody_comes, ranks="processes") == [("PeerLost", [2], True)] * 2
