"""Layers drawn at random on a GPU, against float64: `python -m tests.gpu.drawn --seed 1 --seconds 600`.

A kind of layer is a shape, a format of weights, a wire, an inner format, experts and an exchange. Kernels are compiled
for each kind, so about forty kinds of ten shapes are drawn, all of them are compiled first, side by side, and then
served with many batches: numbers of tokens on both sides of what kernels are chosen by, routes that are even, hot, on
one expert, or dead, and rows of very different magnitude, on ranks that are threads or processes.

Each result is held against the bound of float64 (`conformance.experts_bound`), and a second call of the same batch
against the bits of the first. `--device cpu` tries this program itself, without kernels.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenyard import ExpertWeights, Group, LayerSpec, Routes, launch, plan
from tokenyard.conformance.cases import random_weights, same_numbers
from tokenyard.conformance.experts_bound import ExpertsBatch, exact
from tokenyard.conformance.oracle import oracle
from tokenyard.errors import TokenyardError
from tokenyard.exchange import resolve
from tokenyard.experts.spec import EXACT
from tokenyard.formats import QuantizedMatrix, weight_format
from tokenyard.planning.wiring import Wiring, wire_layer
from tokenyard.rows import LocalRoutes

# (H, I, E, K): shapes of models, cut to the experts that a small test can hold, and odd ones.
SHAPES = (
    (2048, 768, 32, 8),
    (7168, 256, 8, 4),
    (2880, 320, 8, 4),
    (4096, 512, 16, 6),
    (1024, 512, 64, 8),
    (512, 256, 8, 2),
    (640, 384, 7, 1),
    (256, 128, 5, 3),
    (100, 40, 3, 2),
    (96, 33, 2, 2),
)
WEIGHTS = ("bf16", "bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "mxint4")
WIRES = ("bf16", "bf16", "fp8_block128", "mxfp8", "nvfp4")
EXCHANGES = ("one_sided", "one_sided", "one_sided", "allgather", "two_sided", "hierarchical")
TOKENS = (0, 1, 3, 64, 65, 128, 129, 777, 2500)
ROUTES = ("even", "even", "hot", "one_expert", "dead", "nobody")
KINDS, BATCHES = 40, 6  # of layers; of each kind
MOST = max(TOKENS)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of layer."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    weights: str
    wire: str
    inner: str
    experts: str
    exchange: str

    def spec(self, number: int) -> LayerSpec:
        named = {name: value for name, value in asdict(self).items() if name != "exchange"}
        dtype = torch.float16 if self.weights == "fp16" and self.wire == "fp16" else torch.bfloat16
        return LayerSpec(name=f"layer {number}", max_tokens=MOST, dtype=dtype, **named)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One batch of one kind of layer on some ranks."""

    kind: Kind
    ranks: str
    tokens: tuple[int, ...]
    routes: str
    loud: bool
    seed: int


def kinds(seed: int, device: str, count: int = KINDS) -> Iterator[Kind]:
    """Kinds of layers that the declarations allow."""
    chance, left = random.Random(f"kinds {seed}"), count
    while left:
        shape = chance.choice(SHAPES if device == "cuda" else SHAPES[-4:])
        weights = chance.choice(WEIGHTS)
        kind = Kind(
            **dict(zip(("hidden_size", "intermediate_size", "num_experts", "top_k"), shape, strict=True)),
            weights=weights,
            wire=chance.choice(WIRES),
            inner=chance.choice((EXACT, *weight_format(weights).inner_formats)),
            experts=chance.choice(
                ("fused", "fused", "grouped") if device == "cuda" else ("grouped", "reference")
            ),
            exchange=chance.choice(EXCHANGES),
        )
        carrier = resolve(kind.exchange).for_device(torch.device(device))
        wired = wire_layer(kind.spec(0), index=0, world=2, exchange=carrier, max_tokens=None)
        if isinstance(wired, Wiring) and carrier.runs_on(torch.device(device)) is None:
            left -= 1
            yield kind


def trials(seed: int, device: str, count: int = KINDS, batches: int = BATCHES) -> list[Trial]:
    """The batches of all kinds; those of equal ranks follow each other."""
    chance, drawn = random.Random(f"trials {seed}"), []
    most = MOST if device == "cuda" else 65
    for kind in kinds(seed, device, count):
        for _ in range(batches):
            world = chance.choice((1, 2, 2, 4))
            tokens = tuple(
                chance.choice([number for number in TOKENS if number <= most]) for _ in range(world)
            )
            drawn.append(
                Trial(
                    kind=kind,
                    ranks=chance.choice(("threads", "threads", "processes")),
                    tokens=tokens,
                    routes=chance.choice(ROUTES),
                    loud=chance.random() < 0.5,
                    seed=chance.getrandbits(30),
                )
            )
    return sorted(drawn, key=lambda trial: (trial.ranks, len(trial.tokens)))


def batch(trial: Trial, rank: int, device: torch.device) -> tuple[Tensor, Routes]:
    """The rows and routes of a rank."""
    kind, T = trial.kind, trial.tokens[rank]
    E, K = kind.num_experts, kind.top_k
    draw = torch.Generator().manual_seed(trial.seed + rank)
    x_TH = torch.randn(T, kind.hidden_size, generator=draw)
    if trial.loud:
        x_TH *= torch.exp2(torch.randint(-6, 5, (T, 1), generator=draw).float())
    scores_TE = torch.rand(T, E, generator=draw)
    if trial.routes == "hot":  # Zipf: the first experts take most
        scores_TE /= torch.arange(1, E + 1) ** 1.5
    weights_TK, ids_TK = scores_TE.topk(K)
    if trial.routes == "one_expert":
        ids_TK[:] = E - 1
    elif trial.routes == "dead":
        ids_TK[torch.rand(T, K, generator=draw) < 0.4] = -1
    elif trial.routes == "nobody":
        ids_TK[:] = -1
    routes = Routes(topk_ids_TK=ids_TK.int(), topk_weights_TK=weights_TK)
    return x_TH.to(kind.spec(0).dtype).to(device), routes.to(device)


def beyond_bound(wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes, y_TH: Tensor) -> float:
    """By how much the worst element is outside of the bound around float64, as a share of the bound; 0 inside."""
    if not len(y_TH):
        return 0.0
    device, spec = y_TH.device, wiring.spec
    rows_TH = wiring.wire.encode(x_TH).decode(spec.dtype)
    if wiring.expert_rows is not None and wiring.expert_rows != wiring.wire:
        rows_TH = wiring.expert_rows.encode(rows_TH).decode(spec.dtype)
    with torch.device(device):  # both make further tensors where the rows are
        held = ExpertsBatch(
            spec=replace(wiring.experts_spec(0), num_local_experts=spec.num_experts),
            weights=weights,
            x_RH=rows_TH,
            routes=LocalRoutes(ids_RK=routes.topk_ids_TK, weights_RK=routes.topk_weights_TK.float()),
            device=device,
        )
        exact_TH, bound_TH = exact(held)
        _, home = oracle(spec, weights, rows_TH.float(), routes, with_bound=True)
        bound_TH = 1.01 * bound_TH + home.tolerance(wiring.exchange_spec.combine_wire, spec.dtype)
    over = (y_TH.double() - exact_TH).abs() / bound_TH
    worst = float(over.nan_to_num(nan=torch.inf).max())
    return max(0.0, worst - 1.0)


def rank_main(group: Group, some: Sequence[Trial]) -> list[dict[str, Any]]:
    """Run trials on this rank until one fails on some rank; what was found in each."""
    found: list[dict[str, Any]] = []
    for trial in some:
        try:
            answer = run_trial(group, trial)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        found.append(answer)
        try:
            failed = any("error" in other for other in group.gather_json(answer, phase="trial"))
        except TokenyardError:
            failed = True
        if failed:
            break
    return found


def run_trial(group: Group, trial: Trial) -> dict[str, Any]:
    """Call a layer twice; whether the bits are the same, and how far the result is beyond its bound."""
    spec = trial.kind.spec(0)
    made = plan([spec], group, exchange=trial.kind.exchange)
    weights = random_weights(spec, trial.seed)
    layer = made.layer(spec.name, weights).to(group.device)
    x_TH, routes = batch(trial, group.rank, group.device)
    with torch.no_grad():
        first_TH, second_TH = layer(x_TH, routes).clone(), layer(x_TH, routes)
    there = {name: moved(part, group.device) for name, part in weights.parts().items()}
    answer = {
        "repeats": same_numbers(first_TH.cpu(), second_TH.cpu()),
        "beyond": beyond_bound(made.wiring(spec.name), ExpertWeights(**there), x_TH, routes, first_TH),
    }
    made.close()
    return answer


def moved(part: Tensor | QuantizedMatrix, device: torch.device) -> Any:
    """A part of the weights on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    return replace(part, payloads={name: tensor.to(device) for name, tensor in part.payloads.items()})


def compile_all(group: Group, some: Sequence[Kind]) -> int:
    """Compile the kernels of all kinds, side by side; return how many layers were made ready."""
    by_exchange = Counter(kind.exchange for kind in some)
    for exchange in by_exchange:
        specs = [kind.spec(number) for number, kind in enumerate(some) if kind.exchange == exchange]
        plan(specs, group, exchange=exchange).close()
    return len(some)


def run(seed: int, seconds: float, device: str, count: int = KINDS, batches: int = BATCHES) -> dict[str, Any]:
    """Run trials until time is over; what went wrong, by trial."""
    start = time.monotonic()
    if device == "cuda":
        launch(1, compile_all, list(kinds(seed, device, count)), device=device)
    compiled = time.monotonic() - start
    wrong: list[dict[str, Any]] = []
    done, left = 0, trials(seed, device, count, batches)
    while left and time.monotonic() - start < seconds:
        ranks, world = left[0].ranks, len(left[0].tokens)
        some = [trial for trial in left if (trial.ranks, len(trial.tokens)) == (ranks, world)][:12]
        try:
            by_rank = launch(world, rank_main, some, ranks=ranks, device=device)
        except Exception as error:  # the first of them is to blame, or starting ranks is
            by_rank = [[{"error": f"{type(error).__name__}: {str(error)[:600]}"}]]
        ended = min(map(len, by_rank))
        for trial, answers in zip(some[:ended], zip(*by_rank, strict=False), strict=True):
            wrong += [{"trial": asdict(trial), "error": said} for said in complaints(answers)]
        done, left = done + ended, [trial for trial in left if trial not in some[:ended]]
    return {
        "seed": seed,
        "trials": done,
        "not run": len(left),
        "compiled in": compiled,
        "seconds": time.monotonic() - start,
        "wrong": wrong,
    }


def complaints(answers: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with what the ranks found in one trial."""
    said = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    beyond = max((answer.get("beyond", 0.0) for answer in answers), default=0.0)
    if beyond > 0:
        said.append(f"{beyond:.3g} times the bound beyond the bound")
    if not all(answer.get("repeats", True) for answer in answers):
        said.append("a second call has other bits")
    return said


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--device", default="cuda")
    options.add_argument("--kinds", type=int, default=KINDS)
    options.add_argument("--batches", type=int, default=BATCHES)
    given = options.parse_args()
    print(json.dumps(run(given.seed, given.seconds, given.device, given.kinds, given.batches), indent=1))


if __name__ == "__main__":
    main()
