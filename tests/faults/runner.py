"""Runs one session: starts it, strikes where ranks cannot strike themselves, bounds it, and looks for what is left."""

import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import tokenyard as ty
from tests.faults.fault_actions import PRIVATE, SHARED_MEMORY
from tests.faults.judge import Finding, judge
from tests.faults.kinds import ANYTIME, BY_NAME
from tests.faults.starting import bare_life, kill, launch_without_one, start_bare
from tests.faults.timestamps import Timestamps, met, stamp
from tests.faults.worker import live_through

# Seconds that `launch` gives the ranks that are left when one has ended; their own waits have another deadline.
_GOING_ON = 40.0
# Seconds in which what a session held must be given back: connections close in the background.
_GIVING_BACK = 10.0
# Of the deadline: a rank that was stopped for longer may have been missed, and rightly.
_TOO_LONG = 0.8
# How often a session is run in which a busy machine let a rank sleep for so long.
_TRIES = 3


@dataclass
class Outcome:
    """What came of a session."""

    findings: list[Finding]
    hung: bool = False
    leaks: list[str] = field(default_factory=list)
    stacks: str = ""
    seconds: float = 0.0
    # Whether a rank that was to sleep for a moment was woken too late: then nothing here says anything.
    overslept: bool = False


@dataclass(frozen=True)
class Belongings:
    """What the launching process holds."""

    descriptors: int
    sockets: int
    threads: int
    children: frozenset[int]
    shared_memory: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls):
        process = psutil.Process()
        held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return cls(
            descriptors=len(held),
            sockets=sum("socket:" in path for path in held),
            threads=process.num_threads(),
            children=frozenset(child.pid for child in process.children(recursive=True)),
            # Elsewhere it is everybody's.
            shared_memory=frozenset(os.listdir(SHARED_MEMORY) if PRIVATE in os.environ else ()),
            files=frozenset(filter(os.path.isfile, held)),
        )

    def more_than(self, before):
        """What there is now and was not before, in words."""
        counts = ("descriptors", "sockets", "threads")
        words = [
            f"{getattr(self, name)} {name}, {getattr(before, name)} before"
            for name in counts
            if getattr(self, name) > getattr(before, name)
        ]
        words += [f"process {pid}" for pid in sorted(self.children - before.children)]
        words += [f"open file {path}" for path in sorted(self.files - before.files)]
        return words + [f"/dev/shm/{name}" for name in sorted(self.shared_memory - before.shared_memory)]


def warm_up():
    """Start what stays between sessions (the forkserver), so that it is not taken for something left behind."""
    ty.launch(1, _nothing, ranks="processes")


def _nothing(group):
    return None


def run_session(session):
    """Run a session to its end, whatever that is; and again, if it was not the session that was meant."""
    for _ in range(_TRIES):
        outcome = _run_once(session)
        if not outcome.overslept or all(finding.right for finding in outcome.findings):
            break
    return outcome


def _run_once(session):
    before, started = Belongings.now(), time.monotonic()
    folder = tempfile.mkdtemp(prefix="faults-")
    watch = _Watch(session, Timestamps(folder), before)
    watch.start()
    try:
        error = met(_start, session, folder)
    finally:
        watch.finish()
    outcome = Outcome(
        findings=judge(session, Path(folder), error),
        hung=watch.hung,
        leaks=_left_behind(before),
        stacks=_stacks(Path(folder)) if watch.hung else "",
        seconds=time.monotonic() - started,
        overslept=watch.overslept,
    )
    shutil.rmtree(folder)
    return outcome


def _start(session, folder):
    if any(BY_NAME[fault.kind].alone for fault in session.faults):
        launch_without_one(session, folder)
    elif session.bare:
        start_bare(session, folder, bare_life)
    else:
        ty.launch(
            session.world,
            live_through,
            session,
            folder,
            ranks="processes",
            deadline=_GOING_ON,
            replacements=session.replacements,
            hosts=session.hosts or 1,
        )


def _left_behind(before):
    """What the launching process has not given back in time."""
    until = time.monotonic() + _GIVING_BACK
    while (left := Belongings.now().more_than(before)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _stacks(folder):
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(folder.glob("stack-*")))


class _Watch(threading.Thread):
    """Strikes from outside, wakes the stopped, and ends a session that hangs."""

    def __init__(self, session, timestamps, before):
        super().__init__(name="watch", daemon=True)
        self.session, self.timestamps, self._before = session, timestamps, before.children
        self.until = time.monotonic() + session.longest
        self.hung = self.overslept = False
        self._over = threading.Event()

    def run(self):
        waiting = dict(enumerate(self.session.faults))
        stopped = {}
        while not self._over.wait(0.004):
            for index, fault in list(waiting.items()):
                if self._strike(index, fault):
                    del waiting[index]
                    if fault.kind.startswith("stopped"):
                        stopped[index] = fault
            for index, fault in list(stopped.items()):
                if self._wake(index, fault):
                    del stopped[index]
            self._let_leave()
            if time.monotonic() > self.until:
                self._end_it()

    def finish(self):
        self._over.set()
        self.join()

    def _strike(self, index, fault):
        """Whether a fault has struck; one that may strike anytime is struck here."""
        if self.timestamps.get(f"struck-{index}") is not None:
            return True
        began = self.timestamps.get(f"strike-{index}")
        if fault.variant != ANYTIME or began is None or stamp() < began + fault.delay:
            return False
        number = signal.SIGKILL if fault.kind in ("killed", "replaced") else signal.SIGSTOP
        self.timestamps.put(f"struck-{index}")
        kill(self.timestamps.get(f"pid-{fault.victim}"), number)
        return True

    def _wake(self, index, fault):
        """Whether a stopped rank was woken: after a while, or when the others have given it up and gone on."""
        if fault.kind == "stopped":
            pause = (0.1 + 0.4 * fault.number) * self.session.deadline
            due = stamp() > self.timestamps.get(f"struck-{index}") + pause
        else:
            lost = [f.victim for f in self.session.faults[: index + 1] if f.declared.lethal]
            left = [rank for rank in range(self.session.world) if rank not in lost]
            due = all(self.timestamps.get(f"went-on-{index}-{rank}") is not None for rank in left)
        if due:
            kill(self.timestamps.get(f"pid-{fault.victim}"), signal.SIGCONT)
            slept = stamp() - self.timestamps.get(f"struck-{index}")
            self.overslept |= fault.kind == "stopped" and slept > _TOO_LONG * self.session.deadline
            self.timestamps.put(f"over-{index}")
        return due

    def _let_leave(self):
        """Ranks without a launcher stay until all that are there are done."""
        there = [
            rank for rank in range(self.session.world) if self.timestamps.get(f"done-{rank}") is not None
        ]
        dead = {f.victim for f in self.session.faults if f.kind in ("killed", "never starts")}
        failed = [r for r in range(self.session.world) if self.timestamps.get(f"failed-{r}") is not None]
        if len(set(there) | dead | set(failed)) == self.session.world:
            self.timestamps.put("leave")

    def _end_it(self):
        """Ask every rank where it is, then end it; and again, until there is none."""
        self.hung = True
        for number, pause in ((signal.SIGCONT, 0.0), (signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):
            for process in psutil.Process().children(recursive=True):
                if process.pid not in self._before:
                    kill(process.pid, number)
            time.sleep(pause)
