"""Sessions: a group, its layers, and the faults that strike it one after the other, drawn from a seed."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

import tokenyard as ty
from tests.faults.kinds import ANYTIME, BY_NAME, EXCHANGES, KINDS, Kind, Variant
from tokenyard.planning.drafting import draft

DEADLINE = 2.5  # seconds, of every wait
# Beyond it: finding out who is lost, and ranks that share two cores with others do not run when they are due.
SLACK = 4.0
_WIRES = (None, None, "mxfp8", "nvfp4", "fp8_block128")
_MOST_IN_A_SESSION = 7


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: what strikes whom, and when."""

    kind: str
    variant: str
    victim: int  # a rank, as the session counts them at its start
    rounds: int  # good round trips before it
    delay: float = 0.0  # seconds into a stream of round trips, where the moment is anybody's
    number: float = 0.0  # how long, how far: what the kind makes of it

    @property
    def declared(self) -> Variant:
        return BY_NAME[self.kind].variant(self.variant)


@dataclass(frozen=True, kw_only=True)
class Session:
    """A group of processes, and what happens to it."""

    seed: int
    world: int
    exchange: str
    layers: tuple[dict[str, object], ...]
    faults: tuple[Fault, ...]
    deadline: float = DEADLINE
    slack: float = SLACK
    # The ranks of each host, where they stand for several.
    hosts: tuple[int, ...] | None = None
    # Whether the plan watches itself (`plan(paranoid=True)`).
    paranoid: bool = False
    # The most rows that a rank receives in one pass (`plan(max_rows=…)`).
    max_rows: int | None = None
    # Whether ranks are started as torchrun does it, each finding the others by itself; else by `launch`.
    bare: bool = False

    def specs(self, experts: object = "reference") -> list[ty.LayerSpec]:
        return [
            ty.LayerSpec(name=f"moe.{i}", experts=experts, **fields) for i, fields in enumerate(self.layers)
        ]

    @property
    def replacements(self) -> int:
        return sum(fault.kind == "replaced" for fault in self.faults)

    @property
    def longest(self) -> float:
        """Seconds after which the session counts as hanging: far more than it takes on a busy machine."""
        return 60.0 + 6.0 * self.deadline * len(self.faults)


def draw_faults(chance: random.Random, counts: dict[str, int], without: Collection[str] = ()) -> list[Fault]:
    """So many faults of each kind; every variant about as often as the others, some left out."""
    faults = []
    for kind in KINDS:
        variants = [variant for variant in kind.variants if variant.name not in without]
        for i in range(counts.get(kind.name, 0)):
            in_turn = i < len(variants) <= counts[kind.name]
            faults.append(_fault(chance, kind, variants[i] if in_turn else chance.choice(variants)))
    chance.shuffle(faults)
    return faults


def _fault(chance: random.Random, kind: Kind, variant: Variant) -> Fault:
    return Fault(
        kind=kind.name,
        variant=variant.name,
        victim=-1,
        rounds=chance.randint(1, 5),
        delay=chance.uniform(0.0, 0.3) if variant.name == ANYTIME else 0.0,
        number=chance.random(),
    )


def draw_sessions(seed: int, counts: dict[str, int], without: Collection[str] = ()) -> list[Session]:
    """Sessions in which so many faults of each kind strike, some variants left out."""
    chance = random.Random(seed)
    faults = draw_faults(chance, counts, without)
    alone = [fault for fault in faults if BY_NAME[fault.kind].alone]
    together = [fault for fault in faults if not BY_NAME[fault.kind].alone]
    sessions = [_session(chance, [fault]) for fault in alone]
    while together:
        sessions.append(_fill(chance, together))
    chance.shuffle(sessions)
    return sessions


def _fill(chance: random.Random, waiting: list[Fault]) -> Session:
    """A session of faults that are waiting, as many as one group lives through."""
    bare = waiting[0].variant == "another monotonic clock"
    world, taken, lethal = chance.randint(2, 4), [], 0
    exchange = chance.choice(waiting[0].declared.exchanges)
    if bare and exchange == "hierarchical":  # such ranks are on one host
        exchange = "one_sided"
    for fault in list(waiting):
        fits = fault.variant != "another monotonic clock" or (bare and not taken)
        fits = fits and not (fault.kind == "replaced" and (bare or lethal))
        fits = fits and not (any(f.kind == "replaced" for f in taken) and fault.declared.lethal)
        fits = fits and exchange in fault.declared.exchanges
        fits = fits and (not fault.declared.lethal or lethal < world - 1)
        if fits and len(taken) < _MOST_IN_A_SESSION:
            waiting.remove(fault)
            taken.append(fault)
            lethal += fault.declared.lethal
    # One that is replaced strikes last: the fresh process joins a story that is nearly over. So does one that leaves a
    # rank alone: with whom should it disagree?
    last = [fault for fault in taken if fault.declared.lethal][world - 2 :]
    taken.sort(key=lambda fault: fault.kind == "replaced" or fault in last)
    return _session(chance, taken, world=world, exchange=exchange, bare=bare)


def _session(
    chance: random.Random,
    faults: list[Fault],
    *,
    world: int | None = None,
    exchange: str | None = None,
    bare: bool = False,
) -> Session:
    world, exchange = world or chance.randint(2, 4), exchange or chance.choice(EXCHANGES)
    two_levels = exchange == "hierarchical"
    first = chance.randint(1, world - 1)
    there, struck = list(range(world)), []
    for fault in faults:
        victim = chance.choice(there)
        struck.append(replace(fault, victim=victim))
        if fault.declared.lethal and fault.kind != "replaced":
            there.remove(victim)
    return Session(
        seed=chance.randrange(2**31),
        world=world,
        exchange=exchange,
        layers=_draw_layers(chance, world, exchange),
        faults=tuple(struck),
        hosts=(first, world - first) if two_levels else None,
        paranoid=not two_levels and chance.random() < 0.25,
        max_rows=chance.choice((None, None, 2 * world)),
        bare=bare,
    )


def _draw_layers(chance: random.Random, world: int, exchange: str) -> tuple[dict[str, object], ...]:
    """One to three layers that can be planned."""
    layers: list[dict[str, object]] = []
    wanted = chance.randint(1, 3)
    while len(layers) < wanted:
        fields: dict[str, object] = {
            "hidden_size": chance.choice((32, 48, 96, 128)),
            "intermediate_size": chance.choice((8, 16)),
            "num_experts": chance.randint(world, 9),
            "top_k": chance.randint(1, 3),
            "max_tokens": 16,
            "wire": chance.choice(_WIRES),
            "combine_wire": chance.choice((None, None, "mxfp8")),
            "placement": chance.choice(("contiguous", "round_robin")),
        }
        try:
            draft([ty.LayerSpec(name="moe", **fields)], world, exchange=exchange)
        except ty.TokenyardError:
            continue
        layers.append(fields)
    return tuple(layers)
