"""Announcements: what fits is read back, one byte more is refused, and the first rank that failed is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tokenyard.errors import Drifted, GroupError, PeerFailed
from tokenyard.exchange.announcement import Announcement, Announcements, Announcer, Phase, ignore_notices

GROUP = SimpleNamespace(rank=0, size=3)


def announcement(counts=(), error="", tokens=4, **place):
    fields = {"plan": 5, "layer": 1, "phase": Phase.COMBINE, "round": 9} | place
    return Announcement(tokens=tokens, counts=tuple(counts), error=error, **fields)


@pytest.mark.parametrize(
    ("size", "counts", "error"),
    [
        (80, (), ""),  # the numbers, and no byte more
        (104, (1, 2, 3), ""),  # counts up to the last byte
        (86, (), "reason"),  # text up to the last byte
        (112, (1, 2, 3), "reasons!"),
        (113, (1, 2, 3), "reasons!"),
    ],
)
def test_what_fills_an_announcement_is_read_back(size, counts, error):
    sent = announcement(counts, error)
    encoded = sent.encode(size)
    assert len(encoded) == size
    assert Announcement.decode(encoded, 2) == sent


def test_a_text_that_is_too_long_is_cut_and_the_counts_are_whole():
    encoded = announcement((1, 2, 3), "reasons!").encode(108)
    assert Announcement.decode(encoded, 2) == announcement((1, 2, 3), "reas")


def with_number(index, value, size=104):
    encoded = bytearray(announcement((1, 2, 3)).encode(size))
    encoded[8 * index : 8 * index + 8] = value.to_bytes(8, "little", signed=True)
    return bytes(encoded)


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (announcement().encode(80)[:79], "79 bytes"),
        (with_number(3, 2), "phase 2"),
        (with_number(3, -1), "phase -1"),
        (with_number(7, 4), "4 counts"),
        (with_number(7, -1), "-1 counts"),
        (with_number(8, 1), "1 bytes of text in 24 bytes"),
        (with_number(8, -1), "-1 bytes of text"),
    ],
)
def test_what_does_not_fit_is_no_announcement(encoded, words):
    with pytest.raises(GroupError, match="rank 2 sent what is no announcement") as caught:
        Announcement.decode(encoded, 2)
    assert words in str(caught.value)


def heard(mine, answers, layers=(), met=None):
    """What a rank makes of the answers to its announcement."""
    announcer = SimpleNamespace(
        group=GROUP, layers=layers, noticed=ignore_notices, meet=[].append if met is None else met.append
    )
    announcements = Announcements(announcer, lambda: mine, mine.round, SimpleNamespace(max_tokens=4))
    return announcements.heard(answers)


def dispatch(counts, **fields):
    return announcement(counts, phase=Phase.DISPATCH, **fields)


@pytest.mark.parametrize(("tokens", "counts"), [(4, (0, 4, 4)), (0, (0, 0, 0))])
def test_counts_up_to_the_most_are_believed(tokens, counts):
    mine = dispatch((0, 0, 0))
    answers = [mine, dispatch(counts, tokens=tokens)]
    assert heard(mine, answers) == answers


@pytest.mark.parametrize(("tokens", "counts"), [(5, (0, 4, 4)), (4, (0, 5, 4)), (4, (0, -1, 4)), (4, (0, 4))])
def test_counts_that_cannot_be_are_not(tokens, counts):
    mine = dispatch((0, 0, 0))
    with pytest.raises(GroupError, match="rank 1 announces"):
        heard(mine, [mine, dispatch(counts, tokens=tokens)])


@pytest.mark.parametrize("mine", [dispatch((0, 0, 0), error="no memory"), announcement(())])
def test_counts_are_not_looked_at_by_a_rank_that_failed_nor_on_the_way_back(mine):
    """The rank raises its own error, and no memory follows from what the others say."""
    answers = [mine, replace(mine, tokens=99, counts=(7,), error="")]
    assert heard(mine, answers) == answers


def test_of_several_ranks_that_failed_the_first_is_named_and_a_rank_that_failed_itself_raises_its_own():
    fine = announcement()
    answers, met = [fine, announcement(error="no memory"), announcement(error="no disk")], []
    with pytest.raises(PeerFailed, match="rank 1 failed in combine: no memory") as caught:
        heard(fine, answers, met=met)
    assert caught.value.peer == 1
    assert met == [9]  # all ranks were in this round, though one has failed
    assert heard(answers[1], answers) == answers
    assert heard(fine, [fine] * 3) == [fine] * 3


@pytest.mark.parametrize(
    "other",
    [{"plan": 6}, {"layer": 0}, {"phase": Phase.DISPATCH}, {"round": 8}, {"forward": 3}, {"protocol": -1}],
)
def test_a_rank_that_is_somewhere_else_has_drifted(other):
    mine = announcement()
    met = []
    heard(mine, [mine, mine], ["a", "b"])
    with pytest.raises(Drifted, match="rank 0: combine of layer 'b', round 9, rank 1: "):
        heard(mine, [mine, announcement(**other)], ["a", "b"], met)
    assert met == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"layer": 0}, "rank 1: combine of layer 'a', round 9;"),
        ({"layer": 2}, "rank 1: combine of layer 2 of another plan, round 9;"),
        ({"layer": -1}, "rank 1: combine of layer -1 of another plan, round 9;"),
        ({"plan": 6}, "rank 1: combine of layer 1 of another plan, round 9;"),
        ({"forward": 3}, "rank 1: combine of the gradients of round 3 of layer 'b', round 9;"),
        ({"protocol": 7}, "rank 1: combine of layer 'b', round 9, protocol 7, not 5;"),
    ],
)
def test_where_the_others_are_is_told_in_words(other, words):
    mine = announcement()
    with pytest.raises(Drifted) as caught:
        heard(mine, [mine, announcement(**other)], ["a", "b"])
    assert words in str(caught.value)


def test_a_rank_is_told_its_own_count_and_all_ranks_all_of_them():
    mine = dispatch((4, 5, 6))
    told = Announcements(None, lambda: mine, 9, None)
    assert told.for_all() is mine
    assert [told.for_rank(rank).counts for rank in range(3)] == [(4,), (5,), (6,)]


# -- What a plan announces -----------------------------------------------------------------------------------


def announcer():
    """That of plan 5, over a transport with three counts, on rank 0."""
    made = Announcer(SimpleNamespace(group=GROUP, num_counts=lambda spec: 3, loads=None), None, 5)
    made.notice = lambda: 77
    return made


def layer(max_rows=None):
    return SimpleNamespace(index=1, max_rows=max_rows, max_tokens=4)


@pytest.mark.parametrize(("max_rows", "counts"), [(None, 3), (8, 6)])
def test_there_are_twice_as_many_counts_where_rows_have_a_bound(max_rows, counts):
    told = announcer().of_failed_dispatch(layer(max_rows), ValueError("no memory"))
    assert told.mine.error == "ValueError: no memory"
    assert told.mine.tokens == 0
    assert len(told.mine.counts) == counts
    assert (told.bound and told.bound.max_rows) == max_rows
    assert announcer().num_counts(layer(max_rows)) == counts


def test_a_dispatch_begins_the_next_round_with_a_notice_and_a_combine_ends_its_own_without():
    made = announcer()
    assert made.round == 0
    for round in (6, 4):  # the second one was late
        made.meet(round)
    assert made.round == 6
    out, back = made.of_dispatch(layer(), 2, [1, 0, 2]), made.of_combine(layer(), 6, 2)
    assert (out.round, back.round) == (7, 6)
    assert out.mine == dispatch((1, 0, 2), tokens=2, round=7, notice=77)
    assert back.mine == announcement((), tokens=2, round=6)


def test_in_a_second_meeting_of_one_phase_other_ranks_are_told_and_notices_are_not_heard_again():
    made, heard = announcer(), []
    made.noticed = heard.append
    inside = SimpleNamespace(rank=1, size=2)
    again = made.once_more(inside)
    made.noticed([1])
    again.noticed([2])
    assert heard == [[1]]
    assert (made.group, again.group) == (GROUP, inside)
    assert again.plan_id == 5
