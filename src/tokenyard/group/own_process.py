"""The process that a plan, a group and their layers belong to: the one that made them.

A process that is forked from it gets a copy of all of them, and of everything that they use: the connections to
the other ranks, the memory that is shared with them, locks that other threads hold. It gets none of the threads. A call
in that process would write into its parent's memory and connections. Many libraries fork, as a `DataLoader` does.

- Each call is refused there (`OwnProcess.check`). To see it takes no system call: each fork is counted in the child.
- What disturbs other ranks when it is freed, such as a process group of gloo, is kept there (`keep_in_children`).
- Memory that is shared with other ranks is replaced there by memory of its own (`tokenyard.group.shared_memory`).
- A child that leaves the function that `launch` runs ends (`end_forked_child`), and reports nothing to `launch`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

from tokenyard.errors import HandleError, WrongProcess

Method = TypeVar("Method", bound=Callable[..., Any])

# The objects that a forked child must not free, by their ids.
_kept: WeakValueDictionary[int, Any] = WeakValueDictionary()


class OwnProcess:
    """Remembers the process in which it is made, and finds out whether a call is made in a process forked from it.

    >>> OwnProcess("the plan").check()
    """

    __slots__ = ("_pid", "_rank", "_what", "forks")

    # The number of forks between this process and the first one that loaded this module.
    forks_now: ClassVar[int] = 0

    def __init__(self, what: str, rank: int | None = None) -> None:
        self._what, self._rank = what, rank
        # `forks_now` when it was made. Code that checks in every call of a layer compares the two itself.
        self.forks = OwnProcess.forks_now
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process in which the object was made."""
        return self.forks == OwnProcess.forks_now

    def check(self, *, layer: str | None = None) -> None:
        """Raise if this process was forked from the one in which the object was made."""
        if self.forks != OwnProcess.forks_now:
            raise WrongProcess(
                f"{self._what} is of process {self._pid}, and process {os.getpid()}, which was forked from it, uses it",
                expected="calls in the process that made it: a forked one has neither its threads nor its connections",
                fix="make the call in that process; workers that a library forks (a DataLoader, say) get data without "
                "layers, or are started with `spawn`",
                layer=layer,
                rank=self._rank,
            )


def in_own_process(method: Method) -> Method:
    """Wrap a method so that it raises in a process that was forked from the one of the object's `own_process`."""

    @wraps(method)
    def checked(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.own_process.check()
        return method(self, *args, **kwargs)

    return cast("Method", checked)


def not_pickled(what: str, *, fix: str, layer: str | None = None, rank: int | None = None) -> HandleError:
    """The error for an object that is to be pickled, or copied by what pickling uses (`copy.copy`)."""
    return HandleError(
        f"{what} was to be pickled, or copied with copy.copy",
        expected="it to stay in its process: it uses connections and memory that the ranks share",
        fix=fix,
        layer=layer,
        rank=rank,
    )


def keep_in_children(kept: Any) -> None:
    """Keep processes that are forked from now on from freeing this object, and what it refers to, even at their end."""
    _kept[id(kept)] = kept


def end_forked_child(error: BaseException | None) -> NoReturn:
    """End this process, which a rank has forked, as Python would: with the error that has left its function, if any."""
    code: object = 0
    if isinstance(error, SystemExit):
        code = error.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def _after_fork_in_child() -> None:
    OwnProcess.forks_now += 1
    for kept in list(_kept.values()):
        # A reference that is never given back. One that Python knew would be given back when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_after_fork_in_child)
