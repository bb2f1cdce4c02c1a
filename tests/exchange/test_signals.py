"""Who is given up: those who have not come, but for those who wait themselves for somebody who has not come."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tokenyard.errors import PeerLost
from tokenyard.exchange.announcement import Announcement, Phase
from tokenyard.exchange.transports.one_sided.cpu.signals import Signals, control_bytes, flag

WORLD = 4


class FakeGroup:
    """A rank of a group whose other ranks are acted by the test."""

    size, deadline = WORLD, 0.05

    def __init__(self, rank):
        self.rank, self.ended = rank, []

    def gone(self):
        return self.ended

    def look(self, **_):
        pass

    def lost(self, peers, *, phase, waited):
        return PeerLost(peers, phase=phase, waited=waited, rank=self.rank)


def word(round=1, phase=Phase.DISPATCH):
    return Announcement(plan=7, layer=0, phase=phase, round=round, tokens=3, counts=())


def signals_of(groups):
    """The signals of all ranks of a plan, over the same memory."""
    controls = [torch.zeros(control_bytes(WORLD), dtype=torch.uint8) for _ in range(WORLD)]
    return [Signals(controls, group) for group in groups]


@pytest.fixture
def ranks():
    return signals_of([FakeGroup(rank) for rank in range(WORLD)])


def tell(ranks, source, targets, **place):
    for target in targets:
        ranks[source].tell(target, word(**place))


def waits(ranks, rank):
    ranks[rank]._set_state(flag(0, Phase.DISPATCH, 1), 0)


def blamed(ranks, rank=0):
    with pytest.raises(PeerLost) as caught:
        ranks[rank].hear(word())
    assert 0 <= caught.value.waited < 20
    return list(caught.value.peers)


def test_who_has_come_is_heard_and_nobody_is_lost(ranks):
    for source in range(WORLD):
        tell(ranks, source, [0])
    assert [other.tokens for other in ranks[0].hear(word())] == [3] * WORLD
    assert ranks[0].lost() == []
    assert ranks[0]._state(0) == (0, 0)


@pytest.mark.parametrize("late", [[1], [3], [1, 2]])
def test_at_the_deadline_those_are_named_who_have_not_come(ranks, late):
    for source in set(range(WORLD)) - set(late):
        tell(ranks, source, range(WORLD))
    assert blamed(ranks) == late
    assert [rank.lost() for rank in ranks] == [late] * WORLD  # the verdict is told to everybody
    assert ranks[0]._state(0) == (0, 0)  # it waits no more


def test_who_has_come_only_in_an_earlier_round_has_not_come(ranks):
    for source in (0, 1, 2):
        tell(ranks, source, [0], round=5)
    tell(ranks, 3, [0], round=4)
    with pytest.raises(PeerLost) as caught:
        ranks[0].hear(word(round=5))
    assert list(caught.value.peers) == [3]


def test_who_waits_for_another_is_not_blamed(ranks):
    """Rank 1 waits for rank 2, which does nothing, and has therefore not come to rank 0."""
    for source in (0, 3):
        tell(ranks, source, range(WORLD))
    tell(ranks, 1, [1])
    waits(ranks, 1)
    assert blamed(ranks) == [2]


def test_who_waits_for_nobody_is_blamed_though_it_says_that_it_waits(ranks):
    """Rank 1 has heard from everybody, and rank 2 told everybody but rank 0: both are stuck by themselves."""
    for source in (0, 3):
        tell(ranks, source, range(WORLD))
    tell(ranks, 1, [1])
    tell(ranks, 2, [1, 2, 3])
    waits(ranks, 1)
    assert blamed(ranks) == [1, 2]


def test_ranks_that_wait_for_each_other_are_all_named(ranks):
    for source in (0, 3):
        tell(ranks, source, range(WORLD))
    waits(ranks, 1)
    waits(ranks, 2)
    assert blamed(ranks) == [1, 2]


def test_the_first_verdict_stands(ranks):
    for source in (0, 1, 2):
        tell(ranks, source, range(WORLD))
    assert blamed(ranks, 0) == [3]
    assert ranks[1]._give_up(word(round=2), [0, 2]) == [3]
    assert [rank.lost() for rank in ranks] == [[3]] * WORLD


def test_a_rank_for_which_everything_is_there_hears_of_the_verdict(ranks):
    for source in range(WORLD):
        tell(ranks, source, [1, 2, 3])
        tell(ranks, source, [0] if source != 3 else [])
    assert blamed(ranks, 0) == [3]
    assert blamed(ranks, 2) == [3]


def test_who_is_gone_is_given_up_before_the_deadline(ranks):
    ranks[0].deadline = 60.0
    ranks[0]._group.ended = [1, 2]  # rank 2 has come before it ended
    for source in (0, 2, 3):
        tell(ranks, source, [0])
    assert blamed(ranks) == [1]


def test_in_the_second_turn_it_is_the_same(ranks):
    """All have met once. Rank 1 waits for rank 2, which has come to the first meeting only."""
    for source in range(WORLD):
        tell(ranks, source, range(WORLD))
    for rank in ranks:
        rank.hear(word())
    assert [rank._turn(Phase.DISPATCH) for rank in ranks] == [1] * WORLD
    assert [rank._turn(Phase.COMBINE) for rank in ranks] == [0] * WORLD
    for source in (0, 3):
        tell(ranks, source, range(WORLD), round=2)
    ranks[1]._set_state(flag(0, Phase.DISPATCH, 2), 1)
    with pytest.raises(PeerLost) as caught:
        ranks[0].hear(word(round=2))
    assert list(caught.value.peers) == [2]
    assert ranks[0]._turn(Phase.DISPATCH) == 1  # it has not met anybody


def test_in_the_second_turn_who_has_heard_from_everybody_waits_for_nobody(ranks):
    """All have met once. Rank 1 says that it waits, and has the words of all others: it is stuck by itself."""
    for source in range(WORLD):
        tell(ranks, source, range(WORLD))
    for rank in ranks:
        rank.hear(word())
    for source in (0, 3):
        tell(ranks, source, range(WORLD), round=2)
    tell(ranks, 1, [1], round=2)
    tell(ranks, 2, [1, 2, 3], round=2)
    ranks[1]._set_state(flag(0, Phase.DISPATCH, 2), 1)
    with pytest.raises(PeerLost) as caught:
        ranks[0].hear(word(round=2))
    assert list(caught.value.peers) == [1, 2]


def test_a_word_of_an_earlier_round_is_not_the_one_that_is_waited_for(ranks):
    """All have met twice. Rank 1 waits for rank 2, whose word of the first meeting stands where the third one goes."""
    for round in (1, 2):
        for source in range(WORLD):
            tell(ranks, source, range(WORLD), round=round)
        for rank in ranks:
            rank.hear(word(round=round))
    for source in (0, 3):
        tell(ranks, source, range(WORLD), round=3)
    tell(ranks, 1, [1], round=3)
    ranks[1]._set_state(flag(0, Phase.DISPATCH, 3), 0)
    with pytest.raises(PeerLost) as caught:
        ranks[0].hear(word(round=3))
    assert list(caught.value.peers) == [2]


def test_a_turn_that_was_overwritten_is_one_of_the_turns_that_there_are(ranks):
    """What stands in another rank's memory is not believed: the place that is looked at exists."""
    for source in (0, 3):
        tell(ranks, source, range(WORLD))
    ranks[1]._set_state(flag(0, Phase.DISPATCH, 1), 6)
    assert blamed(ranks) == [2]


def test_who_is_gone_is_not_waited_for_until_the_deadline(ranks):
    ranks[0]._group.deadline, ranks[0]._group.ended = 60.0, [2]
    for source in (0, 1, 3):
        tell(ranks, source, [0])
    began = time.monotonic()
    assert blamed(ranks) == [2]
    assert time.monotonic() - began < 20


def test_who_leaves_tells_everybody_and_is_not_taken_for_lost_before(ranks):
    assert not any(rank.departed() for rank in ranks)
    ranks[2].leave()
    assert [rank.lost() for rank in ranks] == [[2]] * WORLD
    assert all(rank.departed() for rank in ranks)


def test_a_rank_that_was_lost_has_not_departed(ranks):
    for source in (0, 1, 2):
        tell(ranks, source, range(WORLD))
    assert blamed(ranks) == [3]
    assert not any(rank.departed() for rank in ranks)


def test_a_rank_tells_those_who_wait_for_it_in_another_plan_where_it_is(ranks):
    """Rank 0 is in one plan; in another one rank 1 waits for it, rank 2 has its word, and rank 3 does not wait."""
    others = signals_of([rank._group for rank in ranks])
    there = replace(word(round=5, phase=Phase.COMBINE), plan=8)
    for source in range(WORLD):
        others[source].tell(2, there)
    for source in (1, 2, 3):
        others[source].tell(1, there)
    for waiting in (0, 1, 2):
        others[waiting]._set_state(flag(0, Phase.COMBINE, 5), 0)
    ranks[0]._tell_in_other_plans(word(round=2), [])
    ranks[0]._tell_in_other_plans(word(round=2), [0, 2, 3])
    assert not others[0].left
    ranks[0]._tell_in_other_plans(word(round=2), [0, 1, 2, 3])
    assert [signals.left for signals in (*others, *ranks)] == [True] + [False] * 7
    assert [(heard.plan, heard.round) for heard in others[1].hear(there)] == [(7, 2)] + [(8, 5)] * 3
    assert [(heard.plan, heard.round) for heard in others[2].hear(there)] == [(8, 5)] * 4


def test_a_rank_that_hears_of_another_plan_answers_there(ranks):
    """Rank 1 waits for rank 0 in the second meeting of another plan, and has told it so here."""
    others = signals_of([rank._group for rank in ranks])
    first, there = (replace(word(round=round, phase=Phase.COMBINE), plan=8) for round in (4, 5))
    for source in range(WORLD):
        others[source].tell(1, first)
    others[1].hear(first)
    for source in (1, 2, 3):
        others[source]._put(1, Phase.COMBINE, 1, there, flag(0, Phase.COMBINE, 5))
    others[1]._set_state(flag(0, Phase.COMBINE, 5), 1)
    for source in (0, 2, 3):
        tell(ranks, source, [0])
    ranks[0]._set_state(flag(0, Phase.DISPATCH, 1), 0)
    others[1]._tell_in_other_plans(there, [0])
    assert [heard.plan for heard in ranks[0].hear(word())] == [7, 8, 7, 7]
    assert [heard.plan for heard in others[1].hear(there)] == [7, 8, 8, 8]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for sleeps, of a hundredth of a second each."""
    now = [100.0]

    def sleep(_):
        now[0] += 0.01

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("tokenyard.exchange.transports.one_sided.cpu.signals.time", fake)
    return fake


def test_a_wait_looks_ten_times_a_second_at_who_is_gone_until_the_deadline(ranks, clock):
    group, looks = ranks[0]._group, []
    group.deadline, group.gone = 1.005, lambda: looks.append(clock.monotonic()) or []
    for source in (0, 1, 3):
        tell(ranks, source, [0])
    with pytest.raises(PeerLost) as caught:
        ranks[0].hear(word())
    assert list(caught.value.peers) == [2]
    assert caught.value.waited == pytest.approx(1.01)
    assert len(looks) in (8, 9, 10)
    assert looks[0] == pytest.approx(100.11, abs=0.011)


@pytest.mark.parametrize("comes", [110.8, math.inf])
def test_a_rank_that_was_stopped_in_its_wait_gives_the_others_half_a_deadline_more(ranks, comes, monkeypatch):
    """Rank 0 waits, and is stopped for ten seconds. Rank 2 comes when it is awake again, or never."""
    now, stops = [100.0], [10.0]

    def sleep(_):
        now[0] += 0.01
        if now[0] > 100.5 and stops:
            now[0] += stops.pop()
        if now[0] > comes:
            tell(ranks, 2, [0])

    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("tokenyard.exchange.transports.one_sided.cpu.signals.time", fake)
    ranks[0]._group.deadline = 1.0
    for source in (0, 1, 3):
        tell(ranks, source, [0])
    if comes < math.inf:
        assert len(ranks[0].hear(word())) == WORLD
    else:
        assert blamed(ranks) == [2]
    assert now[0] < 111.1


def test_a_wait_says_that_it_begins_goes_on_and_ends(ranks, clock):
    said = []
    ranks[0]._group.look = lambda **how: said.append(how.get("waits"))
    ranks[0]._group.deadline = 0.45
    for source in (0, 1, 3):
        tell(ranks, source, [0])
    with pytest.raises(PeerLost):
        ranks[0].hear(word())
    assert said == [True, None, None, None, None]
    said.clear()
    for rank in ranks:
        rank._words[0][128 // 8] = 0  # no verdict
    tell(ranks, 2, [0])
    ranks[0].hear(word())
    assert said == [True, False]


def test_a_rank_that_waits_for_long_tells_those_who_wait_for_it_in_another_plan(ranks, clock):
    others = signals_of([rank._group for rank in ranks])
    there = replace(word(round=5, phase=Phase.COMBINE), plan=8)
    for source in (1, 2, 3):
        others[source].tell(1, there)
    others[1]._set_state(flag(0, Phase.COMBINE, 5), 0)
    ranks[0]._group.deadline = 0.3
    for source in (0, 2, 3):
        tell(ranks, source, [0])
    with pytest.raises(PeerLost) as caught:  # rank 1, which is told, does not answer
        ranks[0].hear(word())
    assert list(caught.value.peers) == [1]
    assert [heard.plan for heard in others[1].hear(there)] == [7, 8, 8, 8]


def test_a_wait_sleeps_longer_each_time_up_to_a_limit(ranks, monkeypatch):
    pauses, sleep = [], time.sleep
    monkeypatch.setattr(
        "tokenyard.exchange.transports.one_sided.cpu.signals.time.sleep",
        lambda s: pauses.append(s) or sleep(s),
    )
    tell(ranks, 0, [0])
    assert blamed(ranks) == [1, 2, 3]
    assert pauses[:2] == pytest.approx([20e-6, 30e-6])
    assert pauses == sorted(pauses)
    assert pauses[-1] == 200e-6


def test_a_mark_stays_while_its_rank_hears_the_others(ranks):
    for source in range(WORLD):
        ranks[source].mark(5)
        tell(ranks, source, [0])
    ranks[0].hear(word())
    assert ranks[0].all_marked(5, 0.0)
    assert ranks[3].all_marked(4, 0.0)
    assert not ranks[0].all_marked(6, 0.0)


def test_marks_are_waited_for_in_longer_and_longer_sleeps(ranks, monkeypatch):
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 9:
            for rank in ranks:
                rank.mark(5)

    monkeypatch.setattr("tokenyard.exchange.transports.one_sided.cpu.signals.time.sleep", sleep)
    assert ranks[0].all_marked(5, 5.0)
    assert pauses[:2] == pytest.approx([20e-6, 30e-6])
    assert pauses == sorted(pauses)
    assert pauses[-1] == 200e-6
    assert len(pauses) == 9


def test_counts_that_were_published_are_read_after_a_meeting_while_others_are_ahead(ranks):
    def counts(rank, round):
        return tuple(1000 * round + 10 * rank + number for number in range(2 * WORLD))

    def publish(rank, round):
        ranks[rank].publish_counts(replace(word(round=round), counts=counts(rank, round)))

    for round in (1, 2, 3):
        for source in range(WORLD):
            publish(source, round)
            tell(ranks, source, range(WORLD), round=round)
        for rank in ranks:
            assert [other.tokens for other in rank.hear(word(round=round))] == [3] * WORLD
        publish(3, round + 1)
        for rank in ranks[:3]:
            found = rank.published_counts(Phase.DISPATCH, 2 * WORLD)
            assert found == [counts(source, round) for source in range(WORLD)]
