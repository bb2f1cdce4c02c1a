"""What was started is finished once, by whoever waits for it first; an error reaches everybody who asks."""

import pytest

from tokenyard.group.base import Background, Pending


class Broken(Exception):
    pass


def counting(outcome):
    """A call that gives an outcome, or raises it, and the list of its calls."""
    calls = []

    def finish():
        calls.append(1)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return finish, calls


@pytest.mark.parametrize("settles", [0, 1, 2])
def test_it_is_finished_once_and_looked_at_once_when_somebody_asks(settles):
    finish, calls = counting("rows")
    looked = []
    pending = Pending(finish, looked.append)
    assert (pending.result, calls) == (None, [])
    for _ in range(settles):
        pending.settle()
    assert looked == []  # who settles does it for somebody else
    assert pending.result == ("rows" if settles else None)
    assert [pending.wait(), pending.wait()] == ["rows", "rows"]
    assert (calls, looked, pending.result) == ([1], ["rows"], "rows")


def test_an_error_is_raised_to_who_settles_and_again_to_everybody_who_waits():
    error = Broken("lost")
    finish, calls = counting(error)
    looked = []
    pending = Pending(finish, looked.append)
    with pytest.raises(Broken, match="lost"):
        pending.settle()
    pending.settle()  # it is over
    for _ in range(2):
        with pytest.raises(Broken) as caught:
            pending.wait()
        assert caught.value is error
    assert (calls, looked, pending.result) == ([1], [], None)


def test_a_job_that_never_ends_keeps_no_process_alive():
    assert Background(lambda: None, name="beside").thread.daemon
