"""Operations that were started and are waited for later: a collective, or a job in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar

import torch

from tokenyard.group.own_process import OwnProcess

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """An operation that was started, and that the first call of `wait` finishes; further calls return its result.

    `check` is called once with the result, before `wait` first returns it, and may raise.
    """

    def __init__(self, finish: Callable[[], Result], check: Callable[[Result], None] | None = None) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._check = check
        self._result: Result | None = None
        self._error: BaseException | None = None

    def wait(self) -> Result:
        """Wait until the operation is done; return its result, or raise its error."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        elif self._error is not None:
            raise self._error
        result: Result = self._result  # type: ignore[assignment]  # `cast` is a call, and every call of a layer waits
        if self._check is not None:
            check, self._check = self._check, None
            check(result)
        return result

    def settle(self) -> None:
        """Wait until the operation is done, before another one starts. An error is raised here, and again by `wait`."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except BaseException as error:
                self._error = error
                raise

    @property
    def result(self) -> Result | None:
        """The result; None if the operation was not waited for yet, or has failed."""
        return self._result


class Background(Pending[Result]):
    """A job in a thread of its own, which the owner of this object starts. `wait` returns its result, or raises.

    The job sees the context variables of the thread that makes this object, and the same settings of torch that are
    kept for each thread: gradients, inference mode, autocast, and the number of intra-op threads.
    """

    thread: threading.Thread

    def __init__(self, job: Callable[[], Result], *, name: str) -> None:
        found: list[Result] = []
        errors: list[BaseException] = []
        settings, own_process = _torch_settings(), OwnProcess(f"the thread {name!r}")

        def run() -> None:
            try:
                with settings():
                    found.append(job())
            except BaseException as error:  # `wait` raises it, in the thread that calls it
                errors.append(error)

        def finish() -> Result:
            own_process.check()  # a forked process has a copy of this object, but not the thread
            self.thread.join()
            if errors:
                raise errors.pop()
            return found.pop()

        self.thread = threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True)
        super().__init__(finish)

    @property
    def has_ended(self) -> bool:
        """Whether the job's thread has ended, so that `wait` returns at once."""
        return not self.thread.is_alive()


def _torch_settings() -> Callable[[], AbstractContextManager[None]]:
    """The settings of torch in this thread, as a context manager that makes the same settings in another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    cached = torch.is_autocast_cache_enabled()
    cores = torch.get_num_threads()

    @contextmanager
    def entered() -> Iterator[None]:
        torch.set_num_threads(cores)
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype, autocast, cached),
        ):
            yield

    return entered
