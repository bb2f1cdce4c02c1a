"""The errors of tokenyard.

Every error gives three things: what was *found*, what was *expected*, and the *fix*; and, where they are
known, the name of the layer and the rank. Whatever can be known before the first token is raised before the
first token; bad input is raised before anything is moved.

A `Reason` says why one part cannot serve a layer. An exchange, a format or experts return it from `supports(...)`,
and the planner turns it into a `PlanError` with alternatives that work.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, Unpack


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a part cannot serve a layer: the field of the layer's spec, its value, and what is in the way.

    >>> print(Reason(field="wire", value="fp32", why="carries float32 rows only"))
    wire=fp32: carries float32 rows only
    """

    field: str  # the field of the spec
    value: object  # the value of the field
    why: str  # what is in the way

    def __str__(self) -> str:
        return f"{self.field}={shown(self.value, most=400, write=str)}: {self.why}"


class Where(TypedDict, total=False):
    """Where an error happened, as far as it is known."""

    layer: str | None
    rank: int | None


class TokenyardError(Exception):
    """The base of all errors of this package.

    >>> print(InputError("topk_ids_TK holds id 64", expected="ids from -1 to 63",
    ...                  fix="pass global expert ids", layer="head", rank=2))
    layer 'head', rank 2: topk_ids_TK holds id 64; expected ids from -1 to 63; fix: pass global expert ids
    """

    found: str  # what was found
    expected: str  # what was expected
    fix: str  # what to do
    layer: str | None  # the layer, if it is known
    rank: int | None  # the rank that raised, if it is known

    # When errors of this class are raised: a row of the tables in the guide of errors.
    when: ClassVar[str]
    # Changes that were tried and fit, where the error knows some.
    alternatives: tuple[Alternative, ...] = ()

    def __init__(
        self, found: str, *, expected: str, fix: str, layer: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(found)
        self.found, self.expected, self.fix = found, expected, fix
        self.layer, self.rank = layer, rank

    def at(self, *, layer: str | None = None, rank: int | None = None) -> Self:
        """Fill in the layer and the rank, where they are not known yet; return the error."""
        self.layer = layer if self.layer is None else self.layer
        self.rank = rank if self.rank is None else self.rank
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with all its attributes: it travels from the process of a rank to that of `launch`."""
        return _rebuild, (type(self), self.args, self.__dict__)

    @property
    def announced_as(self) -> Exception:
        """The error that this rank announces to the other ranks."""
        return self

    @property
    def headline(self) -> str:
        """The layer and the rank, as far as they are known, and what was found."""
        return self._headline(self.rank)

    def _headline(self, rank: int | None) -> str:
        where = [] if self.layer is None else [f"layer {self.layer!r}"]
        where += [] if rank is None else [f"rank {rank}"]
        return ": ".join([*([", ".join(where)] if where else []), self.found])

    def __str__(self) -> str:
        return f"{self.headline}; expected {self.expected}; fix: {self.fix}"


def _rebuild(cls: type[TokenyardError], args: tuple[Any, ...], known: dict[str, Any]) -> TokenyardError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(known)
    return error


class InputError(TokenyardError, ValueError):
    """A tensor or value that the caller passed does not fit the layer. Nothing was moved."""

    when = "a tensor or a value that you passed does not fit; nothing was moved"


class CheckpointError(InputError):
    """A checkpoint's file is damaged, missing, of a kind that is refused, or does not fit its config.

    `file` and `tensor` say where, as far as it is known.

    >>> print(CheckpointError("model.safetensors: tensor 'a' is F32[3]", expected="BF16[3]", fix="save it as bf16"))
    model.safetensors: tensor 'a' is F32[3]; expected BF16[3]; fix: save it as bf16
    """

    file: Path | None  # the file, as far as it is known
    tensor: str | None  # the tensor, as far as it is known

    when = "a checkpoint's file is damaged, missing, a pickle, or does not fit its config"

    def __init__(
        self,
        found: str,
        *,
        expected: str,
        fix: str,
        file: Path | None = None,
        tensor: str | None = None,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(found, expected=expected, fix=fix, **where)
        self.file, self.tensor = file, tensor


class ContractError(TokenyardError, TypeError):
    """A part returned or was given an object that its contract does not allow (say, rows reduced already)."""

    when = "experts or an exchange returned, or were given, the wrong kind of object: rows reduced already, a tuple"


class UnknownName(TokenyardError, ValueError):
    """A name that is not in its registry; the message holds all known names, and the nearest one as the fix."""

    when = "a format, an exchange, a layer has another name; a model is of a family that is not known"


class HandleError(TokenyardError, RuntimeError):
    """A dispatch handle was used twice, out of turn, or after its plan was closed."""

    when = "a batch is combined or finished twice, out of turn or never; a layer is called after its plan was closed"


class ConcurrentUse(HandleError):
    """A second thread called a plan or a group while a call of the first was under way. Nothing was moved."""

    when = "two threads use one plan, or one group, at the same time"


class WrongProcess(HandleError):
    """A plan, a group or a layer was used in a process that was forked from the one that made it. Nothing was moved."""

    when = "a process that is forked from a rank uses a plan, a group or a layer of its parent"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A change of a plan's arguments that was tried and fits: fields of the layer's spec, or the exchange."""

    changes: dict[str, Any]  # the new values of some fields

    def __str__(self) -> str:
        return ", ".join(f"{key}={value!s}" for key, value in self.changes.items())


class PlanError(TokenyardError, ValueError):
    """A layer cannot be wired as asked. Each of the `alternatives` was tried, and works."""

    alternatives: tuple[Alternative, ...]  # changes that work; each was tried

    when = "a layer cannot be wired as asked; what would work is said"

    def __init__(
        self,
        found: str,
        *,
        expected: str,
        fix: str = "",
        alternatives: Iterable[Alternative] = (),
        **where: Unpack[Where],
    ) -> None:
        self.alternatives = tuple(alternatives)
        if not fix and self.alternatives:
            fix = "one of these works: " + " | ".join(map(str, self.alternatives))
        super().__init__(found, expected=expected, fix=fix, **where)


# Fields that the message of a mismatch spells out.
_MOST_DIFFERENCES = 6


class PlanMismatch(TokenyardError, RuntimeError):
    """Ranks of one group made different plans. Raised on every rank; `differences` lists fields by rank."""

    differences: dict[str, dict[int, Any]]  # the fields that differ, by name and rank

    when = "ranks were given different layers, settings or versions"

    def __init__(self, differences: dict[str, dict[int, Any]], *, rank: int | None = None) -> None:
        self.differences = differences
        lines = [
            f"{name}: " + ", ".join(f"rank {r} has {value!r}" for r, value in by_rank.items())
            for name, by_rank in list(differences.items())[:_MOST_DIFFERENCES]
        ]
        if len(differences) > _MOST_DIFFERENCES:
            lines.append(
                f"and {len(differences) - _MOST_DIFFERENCES} more fields (`.differences` holds them)"
            )
        super().__init__(
            "the ranks of this group made different plans: " + "; ".join(lines),
            expected="the same layers, in the same order, on every rank",
            fix="run one version of tokenyard on all ranks"
            if "protocol" in differences or "version" in differences
            else "build the layers from one config on all ranks",
            rank=rank,
        )


class GroupError(TokenyardError, RuntimeError):
    """The ranks of a group could not finish a collective call together."""

    when = "ranks could not finish a call together: the group is closed or broken, or memory is not to be had"


class PeerFailed(GroupError):
    """Another rank of the group raised in this call. The call has no result; the group stays usable."""

    peer: int  # the rank that failed
    phase: str  # the phase in which it failed
    message: str  # what it said

    when = "another rank raised in this call; the group stays usable"

    def __init__(self, peer: int, message: str, *, phase: str, **where: Unpack[Where]) -> None:
        self.peer, self.phase, self.message = peer, phase, message
        super().__init__(
            f"rank {peer} failed in {phase}: {message}",
            expected="every rank of the group to finish the call",
            fix=f"mend the error of rank {peer}; the group is still usable",
            **where,
        )


class Drifted(GroupError):
    """Ranks are in different layers, phases or rounds."""

    when = "ranks are in different layers, rounds or calls"


class PeerLost(GroupError):
    """A rank did not arrive within the deadline, or has died. `peers` is empty where it is not known which rank.

    The plan whose layer raised it is broken from then on: see `PlanBroken`. `ended` means that the ranks are known to
    have ended, for the reason in `detail` (such as the end of their processes); otherwise they may only be late.
    """

    peers: tuple[int, ...]  # the ranks that are lost; empty where it is not known which
    phase: str  # the phase in which they were waited for
    waited: float  # seconds that this rank waited

    when = "a rank died, hangs, or is late by more than the deadline"

    def __init__(
        self,
        peers: Iterable[int],
        *,
        phase: str,
        waited: float,
        detail: str = "",
        ended: bool = False,
        **where: Unpack[Where],
    ) -> None:
        self.peers, self.phase, self.waited = tuple(peers), phase, waited
        who = ", ".join(f"rank {p}" for p in self.peers) or "a rank of the group"
        late = "look at that rank's own log; raise the group's deadline if it was only slow"
        rank = where.get("rank")
        if rank is not None and rank in self.peers:
            late = f"raise the group's deadline if it was only slow; {_way_back(rank)}"
        gone = f"look at that rank's own log; a plan can {_ways_on(self.peers)}"
        super().__init__(
            f"{who} did not arrive in {phase} (waited {waited:.1f} s{'; ' + detail if detail else ''})",
            expected="every rank of the group to make the same calls within the deadline",
            fix=gone if ended else late,
            **where,
        )


class PlanBroken(PeerLost):
    """A layer was called after an earlier call of its plan had ended before all other ranks answered.

    In that earlier call ranks may have received different data, and a late answer to it must not be taken for an answer
    to a later call. Therefore every call raises, until `go_on_without` or `readmit` has given the plan new connections
    and memory. `peers` and `phase` are those of the error that broke the plan.
    """

    when = "a layer is called after its plan lost a rank, or was interrupted while it waited for one"

    def __init__(self, cause: BaseException, *, layer: str | None = None, rank: int | None = None) -> None:
        lost = isinstance(cause, PeerLost)
        self.peers: tuple[int, ...] = cause.peers if isinstance(cause, PeerLost) else ()
        self.phase: str = cause.phase if isinstance(cause, PeerLost) else ""
        self.waited: float = cause.waited if isinstance(cause, PeerLost) else 0.0
        if rank is not None and rank in self.peers:
            fix = _way_back(rank)
        elif self.peers:
            fix = f"{_ways_on(self.peers)}, on every rank that is left"
        else:
            fix = "make a new plan, on a new group, on every rank"
        GroupError.__init__(
            self,
            f"the plan is broken: {cause.found if isinstance(cause, TokenyardError) else _named(cause)}",
            expected="a plan whose ranks have all finished its last call"
            if lost
            else "a call of the plan that is not interrupted while it waits for other ranks",
            fix=fix,
            layer=layer,
            rank=rank,
        )


def _ways_on(lost: Sequence[int]) -> str:
    ranks = list(lost)
    return f"go on without it: `plan.go_on_without({ranks})`, or with a fresh rank: `plan.readmit({ranks})`"


def _way_back(rank: int) -> str:
    return f"the others have given this rank up; it can come back as a fresh one: `rejoin(…, rank={rank})`"


def _named(error: BaseException) -> str:
    """The class and the message of an error that is not tokenyard's, in one line."""
    text = shown(error, most=200, write=str)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Corrupted(TokenyardError, RuntimeError):
    """A paranoid plan (`paranoid=True`) found bytes, rows or duties that are not what they must be.

    `source` is the rank that a row came from, `token` its index there, `place` the payload, the region or the duty;
    each is None where it does not apply. The round has no result on any rank; the group stays usable.

    >>> print(Corrupted("payload 'scales' of token 3 of rank 1 is not what was sent", expected="the bytes that rank 1 "
    ...                 "encoded", layer="moe", rank=0, source=1, token=3, place="scales"))
    layer 'moe', rank 0: payload 'scales' of token 3 of rank 1 is not what was sent; expected the bytes that rank 1 \
encoded; fix: something wrote into memory that is not its own: look at kernels and experts of your own first
    """

    source: int | None  # the rank that a row came from
    token: int | None  # the row's token on that rank
    place: str | None  # the payload, the region or the duty

    when = "a plan that watches itself found bytes, rows or duties that are not what they must be"

    def __init__(
        self,
        found: str,
        *,
        expected: str,
        fix: str = "something wrote into memory that is not its own: look at kernels and experts of your own first",
        source: int | None = None,
        token: int | None = None,
        place: str | None = None,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(found, expected=expected, fix=fix, **where)
        self.source, self.token, self.place = source, token, place


class RankError(TokenyardError, RuntimeError):
    """A rank that `launch` started raised an error, which is the `__cause__` of this one and gives its message.

    >>> print(RankError(3, PlanError("wire=nvpf4", expected="a known format", layer="moe", rank=3,
    ...                              alternatives=[Alternative(changes={"wire": "nvfp4"})])))
    rank 3 raised PlanError: layer 'moe': wire=nvpf4; expected a known format; fix: one of these works: wire=nvfp4
    >>> print(RankError(1, ZeroDivisionError("no tokens")))
    rank 1 raised ZeroDivisionError: no tokens; expected every rank to return; fix: look at the traceback of that \
rank, or at what it printed
    """

    when = "a rank that `launch` started raised; its error is the cause of this one"

    def __init__(self, rank: int, error: BaseException) -> None:
        ours = error if isinstance(error, TokenyardError) else None
        # The message names the rank of the error only if it differs: in a subgroup, a rank has another number.
        message = str(error) if ours is None else ours._headline(None if ours.rank == rank else ours.rank)
        super().__init__(
            f"rank {rank} raised {type(error).__name__}: {message}",
            expected="every rank to return" if ours is None else ours.expected,
            fix="look at the traceback of that rank, or at what it printed" if ours is None else ours.fix,
            layer=None if ours is None else ours.layer,
            rank=rank,
        )
        self.alternatives = () if ours is None else ours.alternatives

    @property
    def headline(self) -> str:
        """What was found: it names the rank already."""
        return self.found


def shown(value: object, most: int = 80, write: Callable[[object], str] = repr) -> str:
    """A value as text for a message, cut to `most` characters.

    >>> shown([1, 2]), shown("x" * 100)[-5:], shown(10**9999)
    ('[1, 2]', 'xxxx…', 'an int that cannot be written')
    """
    try:
        text = write(value)
    except Exception:  # Python refuses to write very long numbers; other people's classes may refuse anything
        return f"an {type(value).__name__} that cannot be written"
    return text if len(text) <= most else text[: most - 1] + "…"


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownName:
    """The error for a name that is not in a registry, with the nearest match.

    >>> print(unknown_name("format", "nvpf4", ["mxfp8", "nvfp4"]))
    unknown format 'nvpf4'; expected one of mxfp8, nvfp4; fix: did you mean 'nvfp4'?
    """
    known = sorted(known)
    near = difflib.get_close_matches(name[:80], known, n=1, cutoff=0.4) if isinstance(name, str) else []
    fix = f"did you mean {near[0]!r}?" if near else f"choose the {kind} from that list"
    return UnknownName(f"unknown {kind} {shown(name)}", expected=f"one of {', '.join(known)}", fix=fix)


def check_part(kind: str, given: object, base: type) -> None:
    """Raise unless what was given in place of a part's name is a concrete subclass of `base` with a `name`.

    >>> class Mine:
    ...     pass
    >>> check_part("exchange", 3, Mine)
    Traceback (most recent call last):
    tokenyard.errors.InputError: the exchange is 3; expected a name, or a class that derives from Mine; fix: pass the \
class itself
    >>> check_part("exchange", Mine, Mine)
    Traceback (most recent call last):
    tokenyard.errors.InputError: the exchange Mine has no name; expected a class attribute `name`, a string; fix: \
write `name = "mine"` in the class
    """
    if not isinstance(given, type) or not issubclass(given, base):
        raise InputError(
            f"the {kind} is {shown(given)}",
            expected=f"a name, or a class that derives from {base.__name__}",
            fix=f"derive {given.__name__} from {base.__name__}"
            if isinstance(given, type)
            else "pass the class itself",
        )
    if missing := sorted(getattr(given, "__abstractmethods__", ())):
        raise InputError(
            f"the {kind} {given.__name__} is abstract: it lacks {', '.join(missing)}",
            expected="a class that has every method",
            fix="define them, or derive from a class that has them",
        )
    if not isinstance(getattr(given, "name", None), str):
        raise InputError(
            f"the {kind} {given.__name__} has no name",
            expected="a class attribute `name`, a string",
            fix=f'write `name = "{given.__name__.lower()}"` in the class',
        )
