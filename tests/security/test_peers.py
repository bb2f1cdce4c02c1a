"""What other ranks send is not believed: no memory is taken for a number that no rank may announce."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.errors import GroupError
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.announcement import ANNOUNCEMENT_BYTES, Announcement, Phase
from tokenyard.group.base import LARGEST_JSON, Group

HUGE = 10**15  # rows, or bytes: memory for so many would be the end of any machine


def lying(kind: type, **lies):
    """An exchange that announces what is not so, on rank 1."""

    class Lying(kind):
        name = f"lying {kind.name}"

        def send(self, batch):
            told = batch.announcements
            if self.group.rank == 1:
                lie = replace(told.mine, **{name: make(told.mine) for name, make in lies.items()})
                told = replace(told, say=lambda: lie)
            return super().send(replace(batch, announcements=told))

    return Lying


def call_once(group, exchange):
    layer = spec()
    built = build(ty.plan([layer], group, exchange=exchange), "moe")
    return raised(built, *batch(layer, 3))


LIES = {
    "more tokens than were planned": {"tokens": lambda told: HUGE},
    "less than no tokens": {"tokens": lambda told: -1},
    "more rows than were planned": {"counts": lambda told: (HUGE,) * len(told.counts)},
    "less than no rows": {"counts": lambda told: (-1,) * len(told.counts)},
    "no counts": {"counts": lambda told: ()},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("exchange", ["two_sided", "allgather", "one_sided"])
def test_rows_that_are_announced_are_bounded_by_the_plan(exchange, lie):
    errors = on_ranks(2, call_once, lying(EXCHANGES[exchange], **LIES[lie]))
    assert isinstance(errors[0], GroupError)
    assert "rank 1 announces" in str(errors[0])
    assert "max_tokens=16" in str(errors[0])
    assert errors[0].layer == "moe"
    # Where an announcement goes to all, all raise; one that a single rank got ends the others' waits.
    assert isinstance(errors[1], GroupError)


class Hearsay(Group):
    """A group whose other rank sends these bytes, call by call, whatever is asked."""

    def __init__(self, *answers: bytes) -> None:
        self.rank, self.size, self.device, self.name, self.deadline = (
            0,
            2,
            torch.device("cpu"),
            "hearsay",
            1.0,
        )
        self.answers = list(answers)
        self.asked_for = 0

    def all_gather(self, mine, *, phase):
        self.asked_for = max(self.asked_for, mine.numel())
        theirs = self.answers.pop(0).ljust(mine.numel(), b"\0")
        return torch.stack([mine, torch.frombuffer(bytearray(theirs), dtype=torch.uint8)])

    all_gather_rows = all_to_all_rows = share_memory = host = subgroup = close = None


Hearsay.__abstractmethods__ = frozenset()


def in_words(size: int) -> bytes:
    return size.to_bytes(8, "little", signed=True)


@pytest.mark.parametrize("size", [HUGE, LARGEST_JSON + 1, 2**63 - 1, 0, -1])
def test_the_size_of_a_value_is_bounded_before_memory_is_taken(size):
    group = Hearsay(in_words(size))
    with pytest.raises(GroupError, match=f"rank 1 sent {size} bytes in gather_json"):
        group.gather_json("mine")
    assert group.asked_for <= 8


@pytest.mark.parametrize("value", [b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"nonsense"])
def test_what_is_no_json_is_an_error_of_ours(value):
    with pytest.raises(GroupError, match="rank 1 sent no JSON"):
        Hearsay(in_words(len(value)), value).gather_json("mine")


def test_values_arrive_as_json_and_nothing_of_them_is_run():
    value = {"__class__": "os.system", "args": ["false"], "number": 1e300, "text": "\ud800"}
    encoded = json.dumps(value).encode()
    assert Hearsay(in_words(len(encoded)), encoded).gather_json(0) == [0, value]


def announcement(**changes) -> Announcement:
    fields = {"plan": 1, "layer": 0, "phase": Phase.DISPATCH, "round": 1, "tokens": 2, "counts": (1, 2)}
    return Announcement(**(fields | changes))


def test_an_announcement_comes_back_whatever_its_error_says():
    """A layer's name may hold half a surrogate pair, and an error any text: telling the others must not fail."""
    told = announcement(error="layer '\ud800' " + "ü" * 1000)
    heard = Announcement.decode(told.encode(ANNOUNCEMENT_BYTES + 16), 1)
    assert heard.place == told.place
    assert heard.error.startswith("layer '?' üü")


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"", "0 bytes"),
        (b"\0" * 63, "63 bytes"),
        (announcement().encode(128)[:24] + in_words(2) + b"\0" * 96, "phase 2"),
        (announcement().encode(128)[:56] + in_words(HUGE) + in_words(0) + b"\0" * 64, f"{HUGE} counts"),
        (announcement().encode(128)[:56] + in_words(-1) + in_words(0) + b"\0" * 64, "-1 counts"),
        (
            announcement().encode(128)[:56] + in_words(2) + in_words(HUGE) + b"\0" * 64,
            f"{HUGE} bytes of text",
        ),
    ],
)
def test_what_is_no_announcement_is_an_error_that_names_the_rank(encoded, words):
    with pytest.raises(GroupError, match="rank 7 sent what is no announcement") as caught:
        Announcement.decode(encoded, 7)
    assert words in str(caught.value)
