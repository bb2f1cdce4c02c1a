"""An episode: the work that all ranks do between two agreements, drawn from the seed and its number.

    case     a random case of the conformance suite, on some of the ranks: a subgroup, a plan, a layer, all closed again
    growth   layers that share a workspace: planned, extended, two in flight, trimmed, closed
    split    the ranks part into two groups, which go on side by side and do not know each other
    loss     a rank is killed under load; the others go on without it, a fresh one takes its place (`loss`)

Every result is checked on the rank that got it. A wrong result is not raised: the soak goes on, and
reports it at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import Case, same_bits
from tokenyard.conformance.draws import draw_case
from tokenyard.exchange import Transport, resolve
from tokenyard.group import Group
from tokenyard.planning.planner import Plan, plan
from tokenyard.planning.wiring import Wiring, wire_layer
from tokenyard_lab.soaking.serving import Batch, Served, named, two_in_flight
from tokenyard_lab.soaking.settings import Settings

EpisodeKind = Literal["case", "growth", "split", "loss"]

# The number of episodes of which one is a loss: each costs a deadline and a new process.
_EPISODES_PER_LOSS = 10
_MOST_LAYERS = 4
# The probability that a rank brings tokens.
_BUSY = 0.75
# The number of layers of which one runs on the grouped experts, which are compared with the oracle alone.
_LAYERS_PER_GROUPED = 4
# The layers that are served all along, so that their speed can be compared.
_STEADY = (
    Case(tokens=(), hidden_size=256, intermediate_size=32, num_experts=8, top_k=2, seed=1),
    Case(tokens=(), hidden_size=200, intermediate_size=16, num_experts=5, top_k=2, wire="nvfp4", seed=2),
)
_STEADY_TOKENS = 16
STEADY_TRIPS = 5  # of each of these layers, in every episode


@dataclass
class Tally:
    """What one rank has done in an episode, and the wrong results that it found."""

    round_trips: int = 0
    checked: int = 0
    complaints: list[str] = field(default_factory=list)

    def check(self, complaint: str | None) -> None:
        """Count a result that was checked, and note what is wrong with it."""
        self.checked += 1
        if complaint is not None:
            self.complaints.append(complaint)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What all ranks do next."""

    number: int
    kind: EpisodeKind
    seed: int
    exchange: str | type[Transport]

    @property
    def chance(self) -> random.Random:
        """A random generator with the same draws on every rank."""
        return random.Random(self.seed)


def draw_episode(settings: Settings, number: int) -> Episode:
    """The episode of this number."""
    chance = random.Random(f"{settings.seed} {number}")
    kind: EpisodeKind = chance.choice(("case", "case", "case", "growth", "growth", "split"))
    if settings.loses_ranks and number % _EPISODES_PER_LOSS == _EPISODES_PER_LOSS // 2:
        kind = "loss"
    return Episode(
        number=number,
        kind=kind,
        seed=chance.getrandbits(40),
        exchange=settings.exchanges[number // _EPISODES_PER_LOSS % len(settings.exchanges)]
        if kind == "loss"
        else chance.choice(settings.exchanges),
    )


def run_case(group: Group, episode: Episode, tally: Tally) -> None:
    """Run a random case on some of the ranks. The others do nothing, and go on to the agreement."""
    chance = episode.chance
    world = chance.randint(1, group.size)
    members = sorted(chance.sample(range(group.size), world))
    if group.rank in members:
        _run_case_on(group.subgroup(members), episode, chance.getrandbits(40), tally)


def run_split(group: Group, episode: Episode, tally: Tally) -> None:
    """Split the ranks into two groups, which run cases of their own side by side."""
    chance = episode.chance
    first = sorted(chance.sample(range(group.size), chance.randint(0, group.size)))
    here = first if group.rank in first else [rank for rank in range(group.size) if rank not in first]
    # Each half makes and closes two subgroups, one after the other, without waiting for the other half.
    for turn in range(2):
        _run_case_on(group.subgroup(here), episode, episode.seed + 2 * turn + (here is first), tally)


def _run_case_on(group: Group, episode: Episode, seed: int, tally: Tally) -> None:
    """Run a case on all ranks of a group, and close the group."""
    case = _draw(seed, group, episode.exchange)
    agreed = plan([case.spec()], group, exchange=episode.exchange)
    served = Served(agreed, case, case.spec().name)
    go(served, served.batch(case.tokens, case.seed), tally)
    agreed.close()
    group.close()


def run_growth(group: Group, episode: Episode, tally: Tally) -> None:
    """Run different layers of one plan, which is extended and trimmed between their round trips."""
    chance = episode.chance
    number = chance.randint(2, _MOST_LAYERS)
    cases = [_draw(chance.getrandbits(40), group, episode.exchange) for _ in range(number)]
    specs = [named(case, f"layer {place}") for place, case in enumerate(cases)]
    agreed = plan(specs[:1], group, exchange=episode.exchange, in_flight=2)
    served = [Served(agreed, cases[0], specs[0].name)]
    for place in range(1, number):
        agreed.extend(specs[place : place + 1])
        served.append(Served(agreed, cases[place], specs[place].name))
        for one in served:
            go(one, any_batch(one, chance), tally)
    for first, second in ((served[0], served[-1]), (served[-1], served[0])):
        batches = (any_batch(first, chance), any_batch(second, chance))
        home = two_in_flight(first, second, batches)
        tally.round_trips += 2
        for one, batch, y_TH in zip((first, second), batches, home, strict=True):
            tally.check(one.complaint(batch, y_TH))
    kept = chance.choice(served)
    agreed.trim(keep=[kept.name])
    go(kept, any_batch(kept, chance), tally)
    agreed.close()


RUNS: dict[str, Callable[[Group, Episode, Tally], None]] = {
    "case": run_case,
    "growth": run_growth,
    "split": run_split,
}


def draw_layers(episode: Episode, group: Group, count: int) -> list[Case]:
    """Cases for the layers of one plan, whose experts can all be compared bit by bit."""
    return [_draw_on(group, episode.chance.getrandbits(40), episode.exchange) for _ in range(count)]


def _draw_on(group: Group, seed: int, exchange: str | type[Transport]) -> Case:
    """A case on the ranks of a group, wherever its rows are."""
    return draw_case(seed, exchange=exchange, world=group.size, device=group.device.type)


def _draw(seed: int, group: Group, exchange: str | type[Transport]) -> Case:
    """A case on the ranks of a group; sometimes with grouped experts, as models have, instead of reference ones."""
    case = _draw_on(group, seed, exchange)
    if seed % _LAYERS_PER_GROUPED:
        return case
    # Grouped experts are compared with a bound, and of special numbers none is known.
    fast = replace(
        case, experts="grouped", data=case.data if DATA[case.data].is_bounded else "ordinary numbers"
    )
    wired = wire_layer(
        fast.spec(),
        index=0,
        world=group.size,
        exchange=resolve(exchange),
        max_tokens=None,
        device=group.device,
    )
    return fast if isinstance(wired, Wiring) else case


def go(served: Served, batch: Batch, tally: Tally) -> None:
    """Make one round trip, and check its result."""
    y_TH = served(batch)
    tally.round_trips += 1
    tally.check(served.complaint(batch, y_TH))


def any_batch(served: Served, chance: random.Random) -> Batch:
    """This rank's batch of a round trip to which ranks bring random numbers of tokens, or none."""
    most, world = max(served.case.tokens), served.plan.group.size
    tokens = [chance.randint(0, most) if chance.random() < _BUSY else 0 for _ in range(world)]
    return served.batch(tokens, chance.getrandbits(40))


class KnownLayers:
    """Layers of one plan that are called again and again with the same rows, and must give the same bits."""

    def __init__(
        self, group: Group, exchange: str | type[Transport], cases: Sequence[Case], name: str
    ) -> None:
        specs = [named(case, f"{name} {place}") for place, case in enumerate(cases)]
        self.plan: Plan = plan(specs, group, exchange=exchange)
        self.served = [Served(self.plan, case, spec.name) for case, spec in zip(cases, specs, strict=True)]
        self.batches = [served.batch(served.case.tokens, served.case.seed) for served in self.served]
        self.first: list[Tensor] = []

    def go(self, tally: Tally, trips: int = 1) -> None:
        """Make some round trips of each layer: the first is compared with twin and oracle, later ones with it."""
        for _ in range(trips):
            results = [served(batch) for served, batch in zip(self.served, self.batches, strict=True)]
            for place, (served, batch) in enumerate(zip(self.served, self.batches, strict=True)):
                if not self.first:
                    tally.check(served.complaint(batch, results[place]))
                    continue
                same = same_bits(results[place], self.first[place])
                said = f"layer {served.name!r}, {batch.case}: other bits than in the first round trip"
                tally.check(None if same else said)
            self.first = self.first or results
        tally.round_trips += trips * len(self.served)


def steady_layers(group: Group, exchange: str | type[Transport]) -> KnownLayers:
    """Two layers that are called in every episode of the soak."""
    cases = [replace(case, tokens=(_STEADY_TOKENS,) * group.size) for case in _STEADY]
    return KnownLayers(group, exchange, cases, "steady")
