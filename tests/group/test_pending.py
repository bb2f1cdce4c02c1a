"""What was started is finished once, by whoever waits for it first; an error reaches everybody who asks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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


def test_a_job_gives_its_result_or_its_error_when_it_has_ended():
    go_on = threading.Event()
    for outcome in ("rows", Broken("lost")):
        finish, calls = counting(outcome)
        job = Background(lambda finish=finish: [go_on.wait(20), finish()][1], name="beside")
        job.thread.start()
        assert not job.has_ended
        assert job.thread.name == "beside"
        threading.Timer(0.01, go_on.set).start()
        if outcome == "rows":
            assert [job.wait(), job.wait()] == ["rows", "rows"]
        else:
            with pytest.raises(Broken, match="lost"):
                job.wait()
        assert job.has_ended
        assert calls == [1]
        go_on.clear()


def settings():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "cached": torch.is_autocast_cache_enabled(),
        "cores": torch.get_num_threads(),
    }


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ],
)
def test_a_job_has_the_settings_of_the_thread_that_gave_it(context):
    cores = torch.get_num_threads()

    def give():
        torch.set_num_threads(cores + 1)
        with context():
            return Background(settings, name="beside"), settings()

    with ThreadPoolExecutor(1) as pool:
        job, due = pool.submit(give).result()
    torch.set_num_threads(cores)  # what a new thread has by itself
    job.thread.start()
    assert job.wait() == due
    assert due["cores"] == cores + 1
