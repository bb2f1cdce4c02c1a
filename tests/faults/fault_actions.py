"""How each kind strikes, and how the ranks live through it.

`ROUND_TRIP_FAULTS` strike the round trips of the session's own plan; `PLAN_FAULTS` strike while a further plan is made
beside it. Each returns what this rank raised.
"""

import contextlib
import errno
import os
import resource
import time
from dataclasses import replace
from pathlib import Path

import tokenyard as ty
from tests.faults.fault_points import (
    FaultPoint,
    allocate_too_much,
    raise_runtime_error,
    raise_value_error,
    return_a_tuple,
)
from tests.faults.timestamps import met
from tests.models import batch
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.group import shared_memory
from tokenyard.planning import agreement, drafting

SHARED_MEMORY = Path("/dev/shm")
# Set where /dev/shm belongs to this session alone, and may be filled.
PRIVATE = "TOKENYARD_PRIVATE_SHM"

# A layer whose workspace is some megabytes, and one whose workspace is nothing beside it.
LARGE = ty.LayerSpec(
    name="large",
    hidden_size=256,
    intermediate_size=8,
    num_experts=4,
    top_k=1,
    max_tokens=4096,
    experts="reference",
)
SMALL = replace(LARGE, name="small", hidden_size=32, max_tokens=8, top_k=2)
_LIMIT = 256 * 1024  # bytes: SMALL fits, LARGE does not


@contextlib.contextmanager
def changed(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def limited(which, limit):
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


# -- In the midst of round trips ---------------------------------------------------------------------------------

_IN_EXPERTS = {
    "ValueError": raise_value_error,
    "RuntimeError": raise_runtime_error,
    "wrong type": return_a_tuple,
    "in an expert": allocate_too_much,
}


def exception(worker, fault, mine):
    """One round trip that fails on the victim."""
    if not mine:
        return met(worker.round_trip)
    if fault.variant in _IN_EXPERTS:
        FaultPoint.arm("in the experts", _IN_EXPERTS[fault.variant])
        return met(worker.round_trip)
    name = worker.specs[worker.number % len(worker.specs)].name
    spec = worker.plan.wiring(name).spec
    x_TH, routes = batch(spec, 17 if fault.variant == "too many tokens" else 3, seed=worker.number)
    if fault.variant == "bad ids":
        routes.topk_ids_TK[-1, -1] = spec.num_experts
    worker.number += 1
    return met(worker.layers[name], x_TH, routes)


def clock(worker, fault, mine):
    """The clock of the wall jumps by up to a hundred days, for the rest of the session; nobody looks at it."""
    if mine and fault.variant in ("forward", "back"):
        seconds = (1 if fault.variant == "forward" else -1) * (60 + fault.number * 100 * 24 * 3600)
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + seconds
        time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    return met(worker.calm, 6)


ROUND_TRIP_FAULTS = {"exception": exception, "clock": clock}


# -- While a plan is made ----------------------------------------------------------------------------------------


def make(worker, layers, exchange=None, **options):
    """A further plan, by default one that shares memory."""
    shares = "hierarchical" if worker.session.hosts else "one_sided"
    return ty.plan(layers, worker.group, exchange=exchange or shares, **options)


def works(worker, plan, spec):
    """Whether a layer of a plan beside the session's own gives the right bits."""
    weights = random_weights(spec, 1)
    layer = ty.MoELayer(plan, spec.name, weights.select(plan.local_experts(spec.name)))
    x_TH, routes = batch(spec, 5, seed=worker.group.rank)
    expected = twin(plan.wiring(spec.name), weights, x_TH, routes, worker.group.rank)
    worker.wrong += not same_bits(layer(x_TH, routes), expected)


def no_memory(worker, fault, mine):
    """Memory for a workspace cannot be had on the victim: at a new plan, or where one is extended."""
    if fault.variant == "in an expert":
        return exception(worker, fault, mine)
    what, _, when = fault.variant.partition(", ")
    scarce = _SCARCITY[what] if mine else contextlib.nullcontext
    if when == "plan":
        with scarce():
            error = met(make, worker, [LARGE])
        plan = make(worker, [LARGE])  # and now it can be had
    else:
        plan = make(worker, [SMALL])
        works(worker, plan, SMALL)
        with scarce():
            error = met(plan.extend, [LARGE])
        works(worker, plan, SMALL)  # as it was
        plan.extend([LARGE])
        works(worker, plan, SMALL)
    works(worker, plan, LARGE)
    plan.close()
    return error


@contextlib.contextmanager
def _short_of_addresses():
    """No room for a mapping, when it is made; at other times there is, for whoever else runs in this process."""
    mapping = shared_memory._map

    def map_in_little_room(pid, descriptor, inode, nbytes):
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, now + nbytes // 2):
            return mapping(pid, descriptor, inode, nbytes)

    with changed(shared_memory, "_map", map_in_little_room):
        yield


def _no_space(descriptor, offset, length):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_SCARCITY = {
    "file limit": lambda: limited(resource.RLIMIT_FSIZE, _LIMIT),
    "address limit": _short_of_addresses,
    "no space": lambda: changed(os, "posix_fallocate", _no_space),
}


def disk_full(worker, fault, mine):
    if fault.variant != "full /dev/shm":
        return no_memory(worker, fault, mine)
    fill = SHARED_MEMORY / "full"
    if mine and PRIVATE in os.environ:
        with open(fill, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\1" * 65536)
    worker.group.barrier()  # it is full from here on

    def everything():
        worker.calm(3)
        plan = make(worker, [SMALL])
        plan.extend([LARGE])
        works(worker, plan, LARGE)
        plan.close()

    error = met(everything)
    worker.group.barrier()
    if mine:
        fill.unlink(missing_ok=True)
    return error


def another_plan(worker, fault, mine):
    """The victim's plan differs in one field."""
    layers, options, exchange = [SMALL, replace(SMALL, name="second")], {}, None
    field = fault.variant
    if mine and field == "number of layers":
        layers.append(replace(SMALL, name="third"))
    elif mine and field == "in_flight":
        options["in_flight"] = 2
    elif mine and field == "max_rows":
        options["max_rows"] = 8
    elif mine and field == "exchange":
        exchange = "two_sided"
    elif mine:
        index, name = int(field[len("layers[")]), field.partition(".")[2]
        others = {
            "top_k": 1,
            "hidden_size": 64,
            "intermediate_size": 16,
            "num_experts": 5,
            "max_tokens": 9,
            "name": "other",
            "wire": "mxfp8",
            "combine_wire": "mxfp8",
        }
        layers[index] = replace(layers[index], **{name: others[name]})
    return met(make, worker, layers, exchange, **options)


def another_version(worker, fault, mine):
    if fault.variant == "an announcement":
        with changed(FaultPoint, "protocol", 99 if mine else None):
            return met(worker.round_trip)
    with contextlib.ExitStack() as stack:
        if mine and fault.variant == "a report of other fields":
            report = worker.group.gather_json  # an older one: neither error nor fields
            stack.enter_context(
                changed(
                    worker.group,
                    "gather_json",
                    lambda value, **words: report({"hash": "0a1b", "ranks": 4}, **words),
                )
            )
        elif mine and fault.variant != "version":
            stack.enter_context(changed(drafting, "PROTOCOL", 99))
        if mine and fault.variant in ("version", "protocol and version"):
            stack.enter_context(changed(agreement, "__version__", "99.0"))
        return met(make, worker, [SMALL])


def killed_while_planning(worker, fault, mine, strike):
    """The victim is killed before it tells of its plan, or when all wait for its memory."""
    if mine and fault.variant == "before a plan":
        strike()
    with changed(os, "posix_fallocate", lambda *arguments: strike()) if mine else contextlib.nullcontext():
        return met(make, worker, [LARGE])


PLAN_FAULTS = {
    "allocation": no_memory,
    "disk full": disk_full,
    "another plan": another_plan,
    "another version": another_version,
    "killed": killed_while_planning,
}
