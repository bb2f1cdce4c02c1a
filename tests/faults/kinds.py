"""The kinds of faults, as data: what strikes, where it can strike, and what every rank must then say.

`Expected` is what one role (the rank that is struck, or another) must raise: the class, and what the error knows. None
stands for no error at all: results are right, and on time.
"""

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["victim", "other"]

EXCHANGES = ("one_sided", "two_sided", "allgather", "hierarchical")
# Those that have not told all ranks of a combine when it was started: in between, they can be struck.
APART = ("one_sided", "hierarchical")

# Places in a round trip at which a rank can be struck, by itself and exactly there.
MOMENTS = (
    "before dispatch",
    "inside dispatch",
    "after dispatch",
    "in the experts",
    "before combine",
    "inside combine",
    "after combine",
)
# Those of an exchange with two levels: rows of other hosts are not forwarded yet; results have not crossed back yet.
BETWEEN_LEVELS = ("between levels", "before sums")
# At a random moment of a stream of round trips, by somebody else.
ANYTIME = "anytime"


@dataclass(frozen=True)
class Expected:
    """What a rank must raise."""

    error: str
    # Whether it must name the victim (`peer`, `peers`).
    names: bool = False
    # The phase that it must name: "here" is the one that the rank was in; None says nothing about it.
    phase: str | None = None
    # Whether it must name the layer that the rank was in.
    layer: bool = False
    # Words that must stand in the message.
    says: tuple[str, ...] = ()


LOST = Expected("PeerLost", names=True, phase="here", layer=True)


@dataclass(frozen=True)
class Variant:
    """One way in which a kind strikes."""

    name: str
    victim: Expected | None
    other: Expected | None
    # Whether the victim is gone afterwards, and the others go on without it.
    lethal: bool = False
    # The exchanges that can be struck so.
    exchanges: tuple[str, ...] = EXCHANGES


@dataclass(frozen=True)
class Kind:
    """One kind of fault: its variants, and how many of it a whole campaign injects."""

    name: str
    title: str
    share: int
    variants: tuple[Variant, ...]
    # Whether it strikes before there is a group.
    alone: bool = field(default=False)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)


def _signals(lethal: bool, victim: Expected | None = None) -> tuple[Variant, ...]:
    """A signal at every moment. A rank that is only stopped for a while is not lost, and nobody notices."""
    other = LOST if lethal else None
    struck = {"inside combine": APART, **dict.fromkeys(BETWEEN_LEVELS, ("hierarchical",))}
    return tuple(
        Variant(moment, victim, other, lethal=lethal, exchanges=struck.get(moment, EXCHANGES))
        for moment in (*MOMENTS, *BETWEEN_LEVELS, ANYTIME, ANYTIME)
    )


def _raises(name: str, error: str, phase: str) -> Variant:
    return Variant(
        name,
        Expected(error),
        Expected("PeerFailed", names=True, phase=phase, layer=True, says=(error,)),
    )


def _no_memory(name: str, says: str) -> Variant:
    return Variant(
        name,
        Expected("GroupError", says=(says, "max_rows=…")),
        Expected("PeerFailed", names=True, phase="sharing memory", says=(says,)),
    )


def _differs(field: str) -> Variant:
    both = Expected("PlanMismatch", says=(field,))
    return Variant(field, both, both)


_DRIFTED = Expected("Drifted", layer=True, says=("protocol",))

KINDS = (
    Kind(
        "killed",
        "killed (SIGKILL)",
        70,
        (
            *_signals(lethal=True),
            Variant("before a plan", None, Expected("PeerLost", True, "agreement on the plan"), lethal=True),
            Variant("sharing memory", None, Expected("PeerLost", True, "sharing memory"), lethal=True),
        ),
    ),
    Kind("replaced", "killed, and replaced by a fresh process", 30, _signals(lethal=True)),
    Kind(
        "stopped for good",
        "stopped (SIGSTOP), longer than the deadline",
        40,
        # Awake again, it reads that it was given up.
        _signals(lethal=True, victim=Expected("PeerLost", names=True)),
    ),
    Kind("stopped", "stopped (SIGSTOP), shorter than the deadline", 50, _signals(lethal=False)),
    Kind(
        "exception",
        "an exception in an expert, or in what it is given",
        80,
        (
            _raises("ValueError", "ValueError", "combine"),
            _raises("RuntimeError", "RuntimeError", "combine"),
            _raises("wrong type", "ContractError", "combine"),
            _raises("bad ids", "InputError", "dispatch"),
            _raises("too many tokens", "InputError", "dispatch"),
        ),
    ),
    Kind(
        "allocation",
        "memory cannot be allocated on one rank",
        50,
        (
            _no_memory("file limit, plan", "cannot be allocated (File too large)"),
            _no_memory("file limit, extend", "cannot be allocated (File too large)"),
            _no_memory("address limit, plan", "cannot be mapped (Cannot allocate memory)"),
            _no_memory("address limit, extend", "cannot be mapped (Cannot allocate memory)"),
            _raises("in an expert", "RuntimeError", "combine"),
        ),
    ),
    Kind(
        "disk full",
        "the shared-memory disk is full",
        45,
        (
            _no_memory("no space, plan", "cannot be allocated (No space left on device)"),
            _no_memory("no space, extend", "cannot be allocated (No space left on device)"),
            Variant("full /dev/shm", None, None),
        ),
    ),
    Kind(
        "never starts",
        "a rank that never starts",
        35,
        (
            # The launching process sees one end, and the others must not have to wait for it.
            Variant("exits", None, Expected("ended", says=("exit code 3",))),
            Variant("sleeps", None, Expected("PeerLost", names=True, phase="finding each other")),
            Variant("is absent under torchrun", None, Expected("DistStoreError")),
            Variant("does not plan", None, Expected("PeerLost", names=True, phase="agreement on the plan")),
        ),
        alone=True,
    ),
    Kind(
        "another plan",
        "a rank with another plan",
        60,
        (
            *(
                _differs(f"layers[0].{name}")
                for name in ("top_k", "hidden_size", "intermediate_size", "num_experts", "max_tokens", "name")
            ),
            _differs("layers[0].wire"),
            _differs("layers[1].combine_wire"),
            _differs("number of layers"),
            _differs("in_flight"),
            _differs("max_rows"),
            _differs("exchange"),
        ),
    ),
    Kind(
        "another version",
        "a rank of another version",
        45,
        (
            Variant(
                "protocol",
                Expected("PlanMismatch", says=("protocol:",)),
                Expected("PlanMismatch", says=("protocol:",)),
            ),
            Variant(
                "version",
                Expected("PlanMismatch", says=("version:",)),
                Expected("PlanMismatch", says=("version:",)),
            ),
            Variant(
                "protocol and version",
                Expected("PlanMismatch", says=("protocol:", "version:")),
                Expected("PlanMismatch", says=("protocol:", "version:")),
            ),
            Variant(
                "a report of other fields",
                Expected("PlanMismatch", says=("protocol:",)),
                Expected("PlanMismatch", says=("protocol:",)),
            ),
            Variant("an announcement", _DRIFTED, _DRIFTED),
        ),
    ),
    Kind(
        "clock",
        "a clock that jumps, or is another one",
        55,
        (
            Variant("forward", None, None),
            Variant("back", None, None),
            Variant("another monotonic clock", None, None),
        ),
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}
