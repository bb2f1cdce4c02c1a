"""Jobs on ranks: results come back in order, and what ranks tell is heard."""

from types import SimpleNamespace

import pytest
import torch

from tokenyard.errors import InputError, RankError
from tokenyard_lab.evaluation.ranks import StartedRanks


def count_aloud(group, upto, tell):
    for number in range(upto):
        tell({"number": number})
    return group.rank * 10


def fail(group, tell):
    tell({"number": 0})
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_everything_that_was_told_is_heard_before_the_results(kind):
    heard = []
    results = StartedRanks(3, kind).call(count_aloud, 50, on_message=heard.append)
    assert results == [0, 10, 20]
    for rank in range(3):
        assert [message["number"] for message in heard if message["rank"] == rank] == list(range(50))


def test_nobody_has_to_listen():
    assert StartedRanks(2, "threads").call(count_aloud, 3) == [0, 10]


def test_an_error_of_a_rank_ends_the_call():
    heard = []
    with pytest.raises(RankError, match="broken"):
        StartedRanks(2, "threads").call(fail, on_message=heard.append)
    assert heard


def test_a_kind_that_is_none():
    with pytest.raises(InputError, match="fibers"):
        StartedRanks(2, "fibers")


def test_threads_on_a_gpu_are_refused(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr("tokenyard_lab.evaluation.ranks.thread_groups", lambda *_, **__: [on_gpu])
    with pytest.raises(InputError, match="use --kind processes"):
        StartedRanks(2, "threads", device="cuda")
    assert StartedRanks(2, "processes", device="cuda").kind == "processes"
