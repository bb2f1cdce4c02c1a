"""Random cases from a seed: every combination that the declarations allow, with a cap on the work of one.

    draw_case(seed)              any layer on 1 to 8 ranks
    draw_case(seed, large=True)  W ≥ 4, H ≥ 2048, not the same number of tokens on each rank

Sizes are drawn from what models have and from the corners (H 1, T 0, E < W, E % W ≠ 0, K > E, T 4096). What parts
support is not written here: `wire_layer` checks a drawn layer, as it does for a plan, and a layer that a part refuses
is drawn again. New formats, and exchanges that support less, are therefore covered without a change here.

The reference experts, the twin and the oracle are slow on purpose; the caps below keep a case near 50 ms. One case in
fifty may take eight times as much work, so that combinations above the caps (E 384 with H 2048) are drawn, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import Case
from tokenyard.errors import InputError
from tokenyard.exchange import EXCHANGES, Transport
from tokenyard.exchange import resolve as resolve_exchange
from tokenyard.experts import ACTIVATIONS
from tokenyard.experts.spec import EXACT
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import FORMATS, WEIGHT_FORMATS, Format, get, weight_format
from tokenyard.planning.wiring import Wiring, wire_layer
from tokenyard.routing import PLACEMENTS

RankKind = Literal["threads", "processes"]

_SPECIAL = [name for name, kind in DATA.items() if kind.rows is not None]

# Multiply-adds of the experts on all ranks together, weights that all ranks draw, experts that are visited (each
# costs some 30 small operations, on its rank and in the twin), and elements of the routes' draw.
MOST_PRODUCTS = 1_000_000
MOST_WEIGHTS = 1_500_000
MOST_VISITS = 64
MOST_CHOICES = 200_000
# Elements of results that a rank's workspace has room for, if each choice has its own result row (`sum="choices"`).
MOST_ROWS_BACK = 4_000_000
_HEAVY = 8

# Few ranks more often than many: a case costs 6 ms of a core and more on each of them, whatever it computes.
WORLDS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
LARGE_WORLDS = (4, 4, 4, 5, 5, 6, 7, 8)
HIDDEN_SIZES = (1, 2, 16, 33, 100, 128, 256, 500, 1024)
LARGE_HIDDEN_SIZES = (2048, 2880, 4096, 7168)
EXPERT_COUNTS = (1, 2, 3, 5, 7, 8, 13, 16, 31, 64, 128, 256, 384)
TOP_KS = (1, 2, 2, 3, 4, 5, 8, 8, 17, 32)
# Plain weights half of the time: they are the strictest test of all other parts.
WEIGHTS = (*2 * sorted(WEIGHT_DTYPES), *(name for name, kind in WEIGHT_FORMATS.items() if kind.quantized))
# Spellings of a format with parameters, drawn beside the plain name.
SPELLINGS = {
    "fp8_block128": ("fp8_block128(power_of_two_scales=True)",),
    "mxfp8": ("mxfp8(alignment=256)",),
    "nvfp4": ("nvfp4(global_scale=8.0)",),
}
_TRIES = 400


def draw_case(
    seed: int,
    *,
    large: bool = False,
    exchange: str | type[Transport] | None = None,
    wire: str | Format | None = None,
    ranks: RankKind = "threads",
    formats: Sequence[str | Format] = (),
    crowded: bool = True,
    world: int | None = None,
    device: str = "cpu",
) -> Case:
    """The case of this seed. `exchange`, `wire` and `world` are fixed if given; `formats` are drawn, too.

    Its exchange supports the layer on this kind of device. `crowded` lets one case in a hundred on threads have 9 to 64
    ranks, for which a GPU has too few streams.

    >>> draw_case(5) == draw_case(5)
    True
    >>> is_large(draw_case(6, large=True, wire="nvfp4"))
    True
    """
    chance = random.Random(f"{seed} {large}")
    of_data = random.Random(f"data {seed}")
    data = of_data.choice([*_SPECIAL, *["ordinary numbers"] * len(_SPECIAL)])
    # Tiny numbers test how a sum of one result rounds: mostly of one rank, or of one choice, in the narrowest dtype.
    alone = data == "tiny numbers" and of_data.random() < 0.7
    names = [*FORMATS, *formats]

    def draw() -> Case:
        """A random case, which its exchange, formats or experts may not support."""
        heavy = _HEAVY if chance.random() < 0.02 else 1
        ranks_here = world or _draw_world(chance, large, crowded and ranks == "threads")
        if alone and not (world or large):
            ranks_here = of_data.choice((1, ranks_here))
        sizes = _sizes(chance, large, ranks_here, heavy)
        dtype = chance.choice(("bfloat16", "bfloat16", "float16", "float32"))
        if alone:
            dtype = of_data.choice(("float16", "float16", dtype))  # some wires take no float16
            sizes["top_k"] = of_data.choice((1, sizes["top_k"]))
        spelled = _spelling(chance, wire if wire is not None else chance.choice(names), dtype)
        plain = spelled is None or not get(spelled).quantized
        weights = chance.choice(WEIGHTS)
        # With sum="choices" each choice has a row on the way back, and a workspace needs room for all of them.
        rows_back = ranks_here * max(1, *sizes["tokens"]) * sizes["top_k"] * sizes["hidden_size"]
        return Case(
            **sizes,
            exchange=exchange or chance.choice(list(EXCHANGES)),
            wire=spelled,
            combine_wire=chance.choice([None, None, *names]),
            expert_rows=chance.choice([None, None, *(names if plain else [spelled])]),
            activation=chance.choice(sorted(ACTIVATIONS)),
            bias=chance.random() < 0.5,
            weights=weights,
            inner=chance.choice([EXACT, *weight_format(weights).inner_formats]),
            weight_on=chance.choice(("output", "output", "input")),
            placement=chance.choice([*PLACEMENTS, "replicas", "shuffled"]),
            routes=chance.choice(
                ("uniform", "uniform", "gaps", "duplicates", "one_rank", "one_expert", "nobody")
            ),
            dtype=dtype,
            id_dtype=chance.choice(("int32", "int64")),
            weight_dtype=chance.choice(("float32", "bfloat16")),
            payloads=chance.random() < 0.5,
            # Sums that leave float16 inside of a host, and come back in it, are not modeled by the twin.
            data="ordinary numbers" if data == "huge numbers" and dtype == "float16" else data,
            sum="choices" if chance.random() < 0.25 and rows_back <= MOST_ROWS_BACK else "ranks",
            seed=seed,
        )

    for _ in range(_TRIES):
        case = draw()
        carrier = resolve_exchange(case.exchange).for_device(torch.device(device))
        wired = wire_layer(case.spec(), index=0, world=case.world, exchange=carrier, max_tokens=None)
        if isinstance(wired, Wiring):
            return case
    raise InputError(
        f"{_TRIES} layers drawn for exchange {exchange or 'any'} and wire {wire or 'any'}, the last refused: {wired}",
        expected="a part that carries some layer",
        fix="look at its `supports`, `wire_dtypes` and `combine_dtypes`",
    )


def hosts_for(exchange: type[Transport], world: int) -> int:
    """The number of hosts that ranks under test are split into: two for an exchange that sums inside each host."""
    return min(2, world) if exchange.sums_in_hosts else 1


def is_large(case: Case) -> bool:
    """Whether a case is large: at least 4 ranks, rows of at least 2048, and an uneven number of tokens on the ranks."""
    return case.world >= 4 and case.hidden_size >= 2048 and len(set(case.tokens)) > 1


def _draw_world(chance: random.Random, large: bool, crowded: bool) -> int:
    """A random number of ranks."""
    world = chance.choice(LARGE_WORLDS if large else WORLDS)
    return chance.randint(9, 64) if crowded and chance.random() < 0.01 else world


def _spelling(chance: random.Random, wire: str | Format, dtype: str) -> str | Format | None:
    """A random way to write a format: its name, with parameters, or None if it is the rows' own dtype."""
    if isinstance(wire, str):
        own = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
        if wire == own and chance.random() < 0.5:
            return None
        spellings: list[str] = [wire, wire, *SPELLINGS.get(wire, ())]
        return chance.choice(spellings)
    return wire


def _sizes(chance: random.Random, large: bool, world: int, heavy: int) -> dict[str, Any]:
    """Random widths, numbers of experts and tokens, under the caps on the work of a case."""
    long = not large and chance.random() < 0.15  # many tokens, narrow rows
    if large:
        hidden_size, intermediate_size = chance.choice(LARGE_HIDDEN_SIZES), chance.choice((1, 1, 2, 4))
    elif long:
        hidden_size, intermediate_size = chance.choice((1, 2, 16, 33)), chance.choice((1, 2, 7))
    elif chance.random() < 0.1:
        hidden_size, intermediate_size = chance.randint(1, 7168), chance.choice((1, 2))
    else:
        hidden_size, intermediate_size = chance.choice(HIDDEN_SIZES), chance.choice((1, 7, 8, 16, 24))
    per_expert = 3 * hidden_size * intermediate_size * world
    fitting = [count for count in EXPERT_COUNTS if count * per_expert <= MOST_WEIGHTS * heavy] or [1]
    num_experts = chance.choice(fitting)
    if chance.random() < 0.2:
        num_experts = chance.randint(1, num_experts)
    top_k = chance.choice((1, 1, 2, 4) if long else TOP_KS)
    most_in_all = MOST_PRODUCTS * heavy // (3 * hidden_size * intermediate_size * top_k)
    # A rank visits at most E experts, and at most one per choice of its tokens.
    visits = MOST_VISITS * heavy // world
    most = 4096 if num_experts <= visits else max(1, visits // top_k)
    most = max(1, min(most, most_in_all // world, MOST_CHOICES * heavy // num_experts, 4096 if long else 40))
    return {
        "tokens": _tokens(chance, world, most, uneven=large),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k,
    }


def _tokens(chance: random.Random, world: int, most: int, *, uneven: bool) -> tuple[int, ...]:
    """Tokens of each rank: even, any, some idle, or all on one rank."""
    style = chance.choice(("even", "any", "any", "idle", "alone"))
    tokens = [chance.randint(0, most) for _ in range(world)]
    if style == "even" and not uneven:
        tokens = tokens[:1] * world
    elif style == "idle":
        tokens = [count if chance.random() < 0.5 else 0 for count in tokens]
    elif style == "alone":
        busy = chance.randrange(world)
        tokens = [most if rank == busy else 0 for rank in range(world)]
    if uneven and len(set(tokens)) == 1:
        tokens[-1] = tokens[-1] + 1 if tokens[-1] < most else 0
    return tuple(tokens)


def draw_cases(
    count: int,
    seed: int,
    cells: Sequence[tuple[type[Transport], str | Format, RankKind]],
    *,
    device: str = "cpu",
) -> list[tuple[int, Case]]:
    """`count` cases in turns over the cells, a quarter of each cell's large, each with the number of its cell."""
    drawn = []
    further = [wire for _, wire, _ in cells if not isinstance(wire, str)]
    fixed: dict[str, Any] = {"formats": further, "crowded": device == "cpu", "device": device}
    for number in range(count):
        turn, cell = divmod(number, len(cells))
        exchange, wire, ranks = cells[cell]
        fixed |= {"large": turn % 4 == 0, "exchange": exchange, "wire": wire, "ranks": ranks}
        drawn.append((cell, draw_case(seed * 1_000_003 + number, **fixed)))
    return drawn


def histogram(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """How many cases have which number of ranks, width, tokens, top-k, experts, routes, data and sum."""
    labels: dict[str, Callable[[Case], str]] = {
        "W": lambda case: _bucket(case.world, (1, 2, 3, 4, 5, 6, 7, 8), 64),
        "H": lambda case: _bucket(case.hidden_size, (1, 99, 499, 2047, 4095), 7168),
        "T": lambda case: _evenness(case.tokens),
        "K": lambda case: _bucket(case.top_k, (1, 2, 4, 8), 32),
        "E": _remainder,
        "routes": lambda case: case.routes,
        "data": lambda case: case.data,
        "sum": lambda case: case.sum,
    }
    counts = {name: Counter(map(label, cases)) for name, label in labels.items()}
    return {
        name: dict(sorted(found.items(), key=lambda item: _first_number(item[0])))
        for name, found in counts.items()
    }


def _remainder(case: Case) -> str:
    if case.num_experts < case.world:
        return "E < W"
    return "E ≥ W, E % W ≠ 0" if case.num_experts % case.world else "E ≥ W, E % W = 0"


def _bucket(value: int, ends: tuple[int, ...], most: int) -> str:
    """The range that a value falls into: `500–2047`, or the value where a range holds one."""
    start = 1
    for end in (*ends, most):
        if value <= end:
            return str(end) if start == end else f"{start}–{end}"
        start = end + 1
    return f"over {most}"


def _evenness(tokens: tuple[int, ...]) -> str:
    if not any(tokens):
        return "no tokens"
    if len(set(tokens)) == 1:
        return "even"
    return "uneven, some idle" if 0 in tokens else "uneven"


def _first_number(label: str) -> tuple[int, str]:
    digits, _, _ = label.partition("–")
    return (int(digits), "") if digits.isdigit() else (10**9, label)
