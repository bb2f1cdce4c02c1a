"""One thread at a time, of one process: the calls of a plan, or of a group, have the same order on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, cast

from tokenyard.errors import ConcurrentUse
from tokenyard.group.own_process import OwnProcess

Method = TypeVar("Method", bound=Callable[..., Any])


class OneThread:
    """A lock around the calls of a plan or a group that raises in a second thread, in place of letting it wait.

    With two threads, the order of calls could differ from rank to rank. A thread may make calls inside its own calls.
    Processes that are forked from the one that made this lock may make none.

    >>> plan = OneThread("the plan")
    >>> with plan, plan:
    ...     print("inside")
    inside
    """

    def __init__(self, what: str, rank: int | None = None) -> None:
        self._what = what
        self.own_process = OwnProcess(what, rank)  # refuses calls in processes that are forked from this one
        self._lock = threading.RLock()
        self._user = 0  # the ident of the thread that entered last
        self._helper: threading.Thread | None = None
        self.leave = self._lock.release  # lets the next thread in

    def lend(self, helper: threading.Thread) -> None:
        """Let a helper thread make the calls until it ends. Other threads first wait for its end before each call."""
        self._helper = helper

    def await_helper(self) -> None:
        """Wait until the helper thread has ended; in the helper itself, return at once."""
        self.own_process.check()
        helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            helper.join()
            self._helper = None

    @property
    def user(self) -> str:
        """The name of the thread that entered last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return names.get(self._user, "")

    def enter(self) -> None:
        """Acquire the lock for this thread, until `leave`; raise if another thread has it, or in a forked process."""
        if self.own_process.forks != OwnProcess.forks_now:
            self.own_process.check()
        if self._helper is not None:
            self.await_helper()
        if not self._lock.acquire(False):
            raise ConcurrentUse(
                f"thread {threading.current_thread().name!r} calls {self._what}, which thread {self.user!r} uses",
                expected="one thread at a time: all ranks make their calls in the same order",
                fix="make a plan for each thread, on a group of its own; or let one thread make all calls",
            )
        self._user = threading.get_ident()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


def by_one_thread(method: Method) -> Method:
    """Wrap a method so that only one thread at a time may run it, by the object's `_one_thread`."""

    @wraps(method)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._one_thread:
            return method(self, *args, **kwargs)

    return cast("Method", guarded)
