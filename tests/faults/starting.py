"""Ranks that never start, and ranks that find each other by themselves, as torchrun's do."""

import json
import multiprocessing
import os
import signal
import time
from datetime import timedelta

import torch.distributed as dist

import tokenyard as ty
from tests.faults.namespaces import fork_with_another_clock
from tests.faults.timestamps import Timestamps, met, stamp
from tests.faults.worker import RankWorker, live_through
from tokenyard.group import process_ranks
from tokenyard.group.forkserver import start_forkserver
from tokenyard.group.hosts import loopback_interface

# Seconds in which the ranks of these sessions must have found each other, where tokenyard gives them thirty.
FINDING = 10.0
GRACE = process_ranks._GRACE
_A_DAY = 24 * 3600.0


# -- As torchrun starts them ---------------------------------------------------------------------------------------


def start_bare(session, folder, rank_main):
    """Start every rank of a session as torchrun does: with an environment, and a store in the launching process."""
    context = start_forkserver("tests.faults.starting")
    store = process_ranks._meeting_store(60.0)
    processes = [
        context.Process(target=_bare_rank, args=(rank, session, folder, store.port, rank_main), daemon=True)
        for rank in range(session.world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        process.close()


def _bare_rank(rank, session, folder, port, rank_main):
    """One process. Whatever it has to say is in the session's folder."""
    offset = _clock_offset(session, rank)
    if offset and (child := fork_with_another_clock(offset)):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(session.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not a rank's
        "GLOO_SOCKET_IFNAME": loopback_interface() or "",
    }
    error = met(rank_main, session, folder)
    if error is not None:
        Timestamps(folder).put(f"failed-{rank}", f"{type(error).__name__}: {error}")
    os._exit(0 if error is None else 1)


def _clock_offset(session, rank):
    """By how many seconds the monotonic clock of a rank is off."""
    odd = [f for f in session.faults if f.variant == "another monotonic clock" and f.victim == rank]
    return int((1 + odd[0].number * 99) * _A_DAY) if odd else 0


def bare_life(session, folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    live_through(ty.DistributedGroup(), session, folder)
    # Others may still read from this rank's connections.
    Timestamps(folder).put(f"done-{os.environ['RANK']}")
    Timestamps(folder).wait("leave")


# -- Ranks that never start ----------------------------------------------------------------------------------------


class Trap:
    """An argument of a launched function that, where it arrives at the victim, never does."""

    def __init__(self, session, folder):
        self.session, self.folder = session, folder

    def __reduce__(self):
        return _arrive, (self.session, self.folder)


def _arrive(session, folder):
    name = multiprocessing.current_process().name
    if not name.startswith("rank "):
        return Trap(session, folder)
    rank, (fault,), timestamps = int(name.split()[1]), session.faults, Timestamps(folder)
    timestamps.put(f"pid-{rank}", os.getpid())
    if fault.variant != "does not plan":
        process_ranks.FINDING_EACH_OTHER = FINDING
    if rank == fault.victim and fault.variant in ("exits", "sleeps"):
        time.sleep(fault.number)
        timestamps.put("struck-0")
        if fault.variant == "exits":
            os._exit(3)
        time.sleep(3600)
    return Trap(session, folder)


def never_plans(group, trap):
    """All ranks start; one of them never makes its plan."""
    (fault,) = trap.session.faults
    group.deadline = trap.session.deadline
    worker, timestamps = RankWorker.__new__(RankWorker), Timestamps(trap.folder)
    worker.rank, worker.there, worker.timestamps = group.rank, list(range(group.size)), timestamps
    if fault.variant != "does not plan":
        return
    group.barrier()
    if group.rank == fault.victim:
        timestamps.put("struck-0")
        timestamps.wait("leave")
        return
    error = met(ty.plan, trap.session.specs(), group)
    worker.record(0, error)
    timestamps.put(f"done-{group.rank}")


def launch_without_one(session, folder):
    """Launch ranks of which one never starts; write down what the launching process is told."""
    (fault,) = session.faults
    if fault.variant == "is absent under torchrun":
        start_bare(session, folder, _absent)
        return
    trap = Trap(session, folder)
    error = met(
        lambda: ty.launch(session.world, never_plans, trap, ranks="processes", deadline=session.deadline)
    )
    cause = getattr(error, "__cause__", None)
    told = {
        "error": type(cause).__name__,
        "text": str(error),
        "rank": getattr(error, "rank", None),
        "at": stamp(),
    }
    told |= {name: getattr(cause, name, None) for name in ("peers", "phase", "waited")}
    Timestamps(folder).put("told", told if error is not None else {})


def _absent(session, folder):
    (fault,) = session.faults
    rank = int(os.environ["RANK"])
    if rank == fault.victim:
        Timestamps(folder).put("struck-0")
        return
    started = time.monotonic()
    error = met(dist.init_process_group, "gloo", timeout=timedelta(seconds=FINDING))
    entry = {"fault": 0, "error": type(error).__name__, "text": str(error)[:300], "at": stamp()}
    entry |= {"waited": time.monotonic() - started, "names": [], "layer": None, "phase": None, "place": {}}
    with open(os.path.join(folder, f"record-{rank}.jsonl"), "a") as file:
        file.write(json.dumps(entry) + "\n")


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
