"""The page of error messages: a section for every error class, with a message that was really raised.

A class says in `when` what went wrong; `EXAMPLES` has a call that goes wrong in just that way, `ADVICE` says what a
user does then. The page is made of these (`python -m docs.generate`), so that it cannot describe an error that is gone,
or a message that is never raised. It is the same on every machine: settings in the environment do not count, a time
that was waited is written as zero, and processes as 1, 2, ….
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tokenyard import errors
from tokenyard.checkpoints import open_checkpoint
from tokenyard.errors import (
    CheckpointError,
    ConcurrentUse,
    ContractError,
    Corrupted,
    Drifted,
    GroupError,
    HandleError,
    InputError,
    PeerFailed,
    PeerLost,
    PlanBroken,
    PlanError,
    PlanMismatch,
    RankError,
    TokenyardError,
    UnknownName,
    WrongProcess,
)
from tokenyard.experts import ExpertWeights
from tokenyard.group import Disagreement, Group, launch, thread_groups
from tokenyard.layer import MoELayer
from tokenyard.planning.drafting import EXCHANGE_VARIABLE, PARANOID_VARIABLE, draft
from tokenyard.planning.planner import plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes

_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_experts": 4, "top_k": 1}
_TOKENS = 4


def error_classes() -> list[type[TokenyardError]]:
    """The public errors, in the order in which a reader meets them: first planning, then running, then losing ranks.

    >>> error_classes()[0].__name__, TokenyardError in error_classes()
    ('PlanError', False)
    """
    public = [*vars(errors).values(), Disagreement]
    found = [kind for kind in public if isinstance(kind, type) and issubclass(kind, TokenyardError)]
    known = list(EXAMPLES)
    # One without an example stands at the end, and is missed when its row is made.
    return sorted(
        (kind for kind in found if kind is not TokenyardError),
        key=lambda kind: known.index(kind) if kind in known else len(known),
    )


def what_you_see(kind: type[TokenyardError]) -> str:
    """The message of an error of this class, as Python prints it; the call that raises it is made."""
    raised = "nothing"
    try:
        with _default_environment():
            EXAMPLES[kind]()
    except TokenyardError as error:
        raised = f"{type(error).__name__}: {error}"
    if not raised.startswith(f"{kind.__name__}: "):
        raise AssertionError(f"the example of {kind.__name__} raises {raised}")
    raised = re.sub(r"waited \d+\.\d s", "waited 0.0 s", raised)
    processes: dict[str, int] = {}
    return re.sub(
        r"(?<=process )\d+", lambda found: str(processes.setdefault(found[0], len(processes) + 1)), raised
    )


@contextmanager
def _default_environment() -> Iterator[None]:
    """The environment without the variables that change plans."""
    names = (EXCHANGE_VARIABLE, PARANOID_VARIABLE)
    found = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(found)


_ABOUT = """\
# Error messages

What each error looks like, and what to do. Every message was raised by a real call when this page was generated. The
guide is [Errors](../guide/errors.md); [Errors in the reference](errors.md) have the attributes."""


def page() -> str:
    """A section for each class: when it is raised, what one sees then, and what to do."""
    return "\n\n".join([_ABOUT, *map(_section, error_classes())]) + "\n"


def _section(kind: type[TokenyardError]) -> str:
    also = next(base for base in kind.__mro__[1:] if base is not TokenyardError)
    is_also = (
        f" (also a [`{also.__name__}`](#{also.__name__.lower()}))" if issubclass(also, TokenyardError) else ""
    )
    return (
        f"## {kind.__name__}\n\n{kind.when[0].upper()}{kind.when[1:]}{is_also}.\n\n"
        f'```text title="error"\n{what_you_see(kind)}\n```\n\n{ADVICE[kind]}'
    )


def _spec(**changes: Any) -> LayerSpec:
    return LayerSpec(name="moe", **{**_SIZES, **changes})


def _rows(width: int = 32) -> torch.Tensor:
    return torch.ones(1, width, dtype=torch.bfloat16)


def _routes(expert: int = 0) -> Routes:
    return Routes(topk_ids_TK=torch.tensor([[expert]]), topk_weights_TK=torch.ones(1, 1))


def _layer(group: Group, **options: Any) -> MoELayer:
    weights = ExpertWeights(
        w13=torch.ones(4, 32, 32, dtype=torch.bfloat16), w2=torch.ones(4, 32, 16, dtype=torch.bfloat16)
    )
    agreed = plan([_spec()], group, max_tokens=_TOKENS, **options)
    return MoELayer(agreed, "moe", weights.select(agreed.local_experts("moe")))


def _on_ranks(world: int, body: Callable[[Group], object], *, first: int = 0) -> None:
    """Run ranks that each may raise; raise what rank `first` raised."""

    def caught(group: Group) -> TokenyardError | None:
        try:
            body(group)
        except TokenyardError as error:
            return error
        return None

    error = launch(world, caught)[first]
    if error is not None:
        raise error.with_traceback(None)


def _wrong_result(group: Group) -> None:
    layer = _layer(group)
    wrong: Any = lambda received, *, finalize: received.dense()  # noqa: E731
    layer.experts.compute = wrong  # type: ignore[method-assign]
    layer(_rows(), _routes())


def _used_twice(group: Group) -> None:
    layer = _layer(group)
    layer.plan.close()
    layer(_rows(), _routes())


def _closed() -> None:
    group = thread_groups(1)[0]
    group.close()
    group.barrier()


def _different_calls(group: Group) -> None:
    if group.rank == 0:
        group.barrier()
    else:
        group.all_gather_rows(torch.zeros(1, 8, dtype=torch.uint8), [1, 1], phase="rows")


def _leaves(group: Group) -> None:
    layer = _layer(group)
    if group.rank == 0:
        layer(_rows(), _routes())


def _called_again(group: Group) -> None:
    layer = _layer(group)
    if group.rank == 0:
        with contextlib.suppress(PeerLost):
            layer(_rows(), _routes())
        layer(_rows(), _routes())


def _from_two_threads(group: Group) -> None:
    layer = _layer(group)
    compute = layer.experts.compute

    def calls_again(received: Any, *, finalize: bool) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="thread") as pool:
            pool.submit(layer, _rows(), _routes()).result()
        return compute(received, finalize=finalize)

    layer.experts.compute = calls_again  # type: ignore[method-assign]
    layer(_rows(), _routes())


def _in_a_forked_process(group: Group) -> None:
    layer = _layer(group)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            layer(_rows(), _routes())
        except TokenyardError as error:
            os.write(writer, pickle.dumps(error))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        raised = pickle.load(pipe)
    os.waitpid(pid, 0)
    raise raised


def _writes_elsewhere(group: Group) -> None:
    layer = _layer(group, paranoid=True)
    compute = layer.experts.compute

    def in_place(received: Any, *, finalize: bool) -> Any:
        result = compute(received, finalize=finalize)
        received.rows.payloads["data"].zero_()
        return result

    layer.experts.compute = in_place  # type: ignore[method-assign]
    layer(_rows(), _routes())


def _raises(group: Group) -> None:
    if group.rank == 1:
        raise ZeroDivisionError("no tokens")


EXAMPLES: dict[type[TokenyardError], Callable[[], object]] = {
    PlanError: lambda: draft([_spec(combine_wire="fp32")], 4, max_tokens=_TOKENS),
    PlanMismatch: lambda: _on_ranks(2, lambda g: plan([_spec(top_k=1 + g.rank)], g, max_tokens=_TOKENS)),
    UnknownName: lambda: draft([_spec(wire="nvpf4")], 4, max_tokens=_TOKENS),
    InputError: lambda: _on_ranks(1, lambda group: _layer(group)(_rows(), _routes(expert=64))),
    CheckpointError: lambda: open_checkpoint(Path("pytorch_model")),
    ContractError: lambda: _on_ranks(1, _wrong_result),
    HandleError: lambda: _on_ranks(1, _used_twice),
    ConcurrentUse: lambda: _on_ranks(1, _from_two_threads),
    WrongProcess: lambda: _on_ranks(1, _in_a_forked_process),
    GroupError: _closed,
    PeerFailed: lambda: _on_ranks(2, lambda group: _layer(group)(_rows(32 + group.rank), _routes())),
    PeerLost: lambda: _on_ranks(2, _leaves),
    PlanBroken: lambda: _on_ranks(2, _called_again),
    Drifted: lambda: _on_ranks(2, _different_calls),
    Disagreement: lambda: _on_ranks(2, lambda group: group.agree("the seed", group.rank)),
    Corrupted: lambda: _on_ranks(1, _writes_elsewhere),
    RankError: lambda: launch(2, _raises),
}

# What a user does about each error, and what holds afterwards.
ADVICE: dict[type[TokenyardError], str] = {
    PlanError: "Take one of the alternatives (`error.alternatives`); the planner has tried each of them. `draft` "
    "finds the same errors in one process, without a group.",
    PlanMismatch: "All ranks raise. `error.differences` has the fields by rank. Build the layers from one config, and "
    "look for an environment variable (`TOKENYARD_EXCHANGE`) that differs. Ranks must run one version of "
    "tokenyard; different versions of torch are a warning in the log.",
    UnknownName: "Take the name that is meant.",
    InputError: "Do what the fix says. The other ranks raise [`PeerFailed`](#peerfailed), and the group stays usable.",
    CheckpointError: "`error.file` and `error.tensor` say where, as far as it is known. "
    "[Checkpoints](../guide/checkpoints.md#bad-files) has more cases.",
    ContractError: "Return the type that the contract names ([Experts of your own](../guide/experts.md#the-contract)). "
    "Rows that are reduced already have another type, so reducing them again is this error, too. The "
    "other ranks raise `PeerFailed`.",
    HandleError: "Combine each dispatch once, in the order of the dispatches, or plan with `in_flight=2`. Calls of a "
    "layer do this by themselves. Make a new plan after `plan.close()`.",
    ConcurrentUse: "Let one thread make the calls, or give each thread a plan on a group of its own "
    "(`group.subgroup`). Threads may take turns.",
    WrongProcess: "Make the call in the process that made the plan; the parent goes on. [Forked "
    "processes](../guide/faults.md#forked-processes) says what a child can do.",
    GroupError: "The base of the errors between ranks. Raised by itself if there is no group, or no longer one.",
    PeerFailed: "Fix the error of the rank that it names (`error.peer`, `error.message`). The call has no result; the "
    "group stays usable.",
    PeerLost: "`error.peers` are the lost ranks, empty if they cannot be known. If a rank was only slow (loading "
    "weights), raise the deadline. Otherwise go on with the ranks that are left, or with a fresh one: "
    "[Losing ranks](../guide/losing-ranks.md#going-on-without-it).",
    PlanBroken: "Catch the `PeerLost` that came first, and call `plan.go_on_without(error.peers)` or "
    "`plan.readmit(error.peers)` on every rank that is left. A call that was interrupted while it waited "
    "(Ctrl-C) breaks a plan, too.",
    Drifted: "All ranks raise. Look for a branch that only some ranks take. An idle rank calls every layer, too, "
    "with T = 0.",
    Disagreement: "Set the value from one source on all ranks.",
    Corrupted: "Only [paranoid plans](../guide/paranoid.md) raise it. `error.source`, `error.token` and "
    "`error.place` say whose row it is, and which payload, region or duty. Look at kernels and experts of "
    "your own first, then at other code that writes into this memory.",
    RankError: "The error of the rank is the `__cause__`, with the traceback of that rank.",
}
