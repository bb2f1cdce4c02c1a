"""One thread at a time: the calls of a plan and of a group have an order, which is the same on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tokenyard.errors import ConcurrentUse

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class OneThread:
    """Lets one thread at a time into the calls of a plan or a group; a second one gets an error, and does not wait.

    Two threads would make their calls in an order of their own on each rank. A call inside a call of the same thread is
    let in.

    >>> plan = OneThread("the plan")
    >>> with plan, plan:
    ...     print("inside")
    inside
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._user = 0  # the number of the thread that was let in last
        self._helper: threading.Thread | None = None
        self.leave = self._lock.release  # lets the next thread in

    def lend(self, helper: threading.Thread) -> None:
        """Let a thread of the user's make calls until it ends; meanwhile the user waits for it before each call."""
        self._helper = helper

    def await_helper(self) -> None:
        """Return when the thread that calls were lent to has ended; at once inside of it."""
        helper = self._helper
        if helper is not None and helper is not threading.current_thread():
            helper.join()
            self._helper = None

    @property
    def user(self) -> str:
        """The name of the thread that was let in last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return names.get(self._user, "")

    def enter(self) -> None:
        """Let this thread in, up to `leave`."""
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


class _Guarded(Protocol):
    _one_thread: OneThread


Owner = TypeVar("Owner", bound=_Guarded)


def by_one_thread(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """A method that one thread at a time may be in, as the object's `_one_thread` says."""

    @wraps(method)
    def guarded(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        one_thread = self._one_thread
        one_thread.enter()
        try:
            return method(self, *args, **kwargs)
        finally:
            one_thread.leave()

    return guarded
