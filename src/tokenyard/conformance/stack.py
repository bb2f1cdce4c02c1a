"""A stack of layers, as in a model: a quantized body, and an unquantized head of another shape.

    x ──► body.0 ──► body.1 ──► projection ──► head ──► y
          wire under test              bf16, other H, K, E

One plan serves all three layers, as in a model whose body is 4-bit and whose prediction head is not. Every layer's
result is held against the float64 oracle, fed with the rows as the experts decoded them; beside it stands the
end-to-end error, which is what the wire's format costs. The ranks bring different numbers of tokens; one is idle.
All exchanges must give the same bits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.errors import TokenyardError
from tokenyard.exchange import Transport
from tokenyard.experts import ExpertWeights
from tokenyard.formats import Format, get
from tokenyard.group import Group, launch
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import GroupedSigmoidRouter, SoftmaxRouter

# Rows, hidden values, results on the way back and the output are each rounded to bf16 once: 2^-9, relative, each.
_PASSES = 4  # each with tokens of its own; the last is checked
TOLERANCE = 4 * 2.0**-9


def stack(wire: str | Format) -> list[LayerSpec]:
    """The layers, with the body's rows on the given wire."""
    router = GroupedSigmoidRouter(4, num_groups=4, topk_groups=2, routed_scaling=2.5)
    body = {"hidden_size": 1000, "intermediate_size": 256, "num_experts": 16, "top_k": 4, "router": router}
    head = LayerSpec(
        name="head",
        hidden_size=720,
        intermediate_size=192,
        num_experts=6,
        top_k=2,
        router=SoftmaxRouter(2, renormalize=True),
        wire="bf16",
    )
    return [LayerSpec(name=f"body.{n}", wire=wire, **body) for n in range(2)] + [head]  # type: ignore[arg-type]


@cache
def _weights_of(name: str, seed: int) -> ExpertWeights:
    """All experts of a layer: ranks that are threads share them, and so do cells, whatever their wire."""
    (spec,) = (spec for spec in stack("bf16") if spec.name == name)
    return random_weights(spec, seed)


def tokens_of(rank: int, world: int, tokens: int) -> int:
    """Uneven on purpose: the second of four ranks is idle, the last has twice as many as the first."""
    if world > 1 and rank == 1:
        return 0
    return tokens * (rank + world) // world


@dataclass(frozen=True, kw_only=True)
class StackResult:
    """What one rank found."""

    tokens: int
    oracle_error: float  # the largest of the layers', against the oracle that is fed decoded rows
    end_to_end_error: (
        float  # the largest of the layers', against the oracle that is fed the rows as they were
    )
    seconds: float  # one pass through all layers, the best of a few
    bytes_sent: int  # in one pass, on average
    digest: str  # of the output's bits


def run_stack(
    group: Group, wire: str | Format, exchange: type[Transport], tokens: int, seed: int = 0
) -> StackResult:
    """Push new tokens of this rank through the stack a few times, and check every layer of the last pass."""
    specs = stack(wire)
    made = plan(specs, group, exchange=exchange, max_tokens=2 * tokens)
    weights = {spec.name: _weights_of(spec.name, seed) for spec in specs}
    layers = {}
    for spec in specs:
        local = weights[spec.name].select(made.local_experts(spec.name))
        layers[spec.name] = MoELayer(made, spec.name, local).to(group.device)
    draw = torch.Generator().manual_seed(seed * 1009 + group.rank)
    num_tokens = tokens_of(group.rank, group.size, tokens)
    batches = (
        torch.randn(_PASSES, num_tokens, specs[0].hidden_size, generator=draw).bfloat16().to(group.device)
    )
    fixed = torch.Generator().manual_seed(seed + 1)  # the same on every rank
    gates = {
        s.name: torch.randn(s.num_experts, s.hidden_size, generator=fixed).to(group.device) for s in specs
    }
    projection = torch.randn(specs[-1].hidden_size, specs[0].hidden_size, generator=fixed).bfloat16()
    projection = projection.to(group.device)

    passes = []
    for x_TH in batches:
        group.barrier()
        started = time.perf_counter()
        inputs, outputs = _one_pass(layers, gates, projection, x_TH)
        group.wait_for_device()
        passes.append(time.perf_counter() - started)
    moved = sum(sum(s.dispatch_bytes) + sum(s.combine_bytes) for s in made.stats().values())
    errors, costs = [0.0], [0.0]
    for spec in specs if num_tokens else []:
        wiring, router = made.wiring(spec.name), spec.router
        assert router is not None
        routes = router(inputs[spec.name].float() @ gates[spec.name].T).to("cpu")
        exact_of, given_TH, y_TH = weights[spec.name], inputs[spec.name].cpu(), outputs[spec.name].cpu()
        decoded_TH = wiring.wire.encode(given_TH).decode(torch.float32)
        errors.append(relative_error(y_TH, oracle(spec, exact_of, decoded_TH, routes)))
        costs.append(relative_error(y_TH, oracle(spec, exact_of, given_TH, routes)))
    made.close()
    return StackResult(
        tokens=num_tokens,
        oracle_error=max(errors),
        end_to_end_error=max(costs),
        seconds=min(passes),
        bytes_sent=moved // _PASSES,
        digest=hashlib.sha256(_bits(outputs["head"])).hexdigest()[:16],
    )


def _bits(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _one_pass(
    layers: dict[str, MoELayer], gates: dict[str, Tensor], projection: Tensor, x_TH: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every layer's input and output, by name."""
    inputs, outputs = {}, {}
    for name, layer in layers.items():
        if name == "head":
            x_TH = _normalized(x_TH @ projection.T)
        inputs[name] = x_TH
        outputs[name] = layer(x_TH, x_TH.float() @ gates[name].T)
        x_TH = _normalized(outputs[name])
    return inputs, outputs


def _normalized(x_TH: Tensor) -> Tensor:
    """Rows of unit root mean square, as between the layers of a model."""
    scale_T1 = x_TH.float().square().mean(dim=1, keepdim=True).add(1e-6).rsqrt()
    return (x_TH.float() * scale_T1).bfloat16()


@dataclass(kw_only=True)
class StackCell:
    """One exchange × wire: the figures of all ranks, and what is wrong."""

    exchange: str
    wire: str
    oracle_error: float | None = None
    end_to_end_error: float | None = None
    tokens: int = 0
    tokens_per_s: float = 0.0
    bytes_per_token: float = 0.0
    digest: str | None = None
    off: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.off


def runs_in_stack(wire: str | Format) -> bool:
    """Whether a wire carries the rows of the stack.

    >>> runs_in_stack("mxfp8"), runs_in_stack("fp32")
    (True, False)
    """
    return get(wire).carries(torch.bfloat16) is None


def check_stack(
    exchanges: Sequence[type[Transport]],
    wires: Sequence[str | Format],
    *,
    world: int = 4,
    tokens: int = 96,
    ranks: Literal["threads", "processes"] = "processes",
    device: str | None = None,
    progress: Callable[[str, int], None] = lambda what, steps: None,
) -> list[StackCell]:
    """Run the stack on every exchange × wire that carries bf16 rows, and judge what comes out.

    >>> from tokenyard.exchange import EXCHANGES
    >>> [cell] = check_stack([EXCHANGES["two_sided"]], ["mxfp8"], world=2, tokens=4, ranks="threads")
    >>> cell.passed, cell.tokens
    (True, 4)
    """
    cells: list[StackCell] = []
    for wire in filter(runs_in_stack, wires):
        for exchange in exchanges:
            cell = StackCell(exchange=exchange.name, wire=str(get(wire)))
            progress(f"the stack: {cell.exchange} × {cell.wire}", 0)
            try:
                size = min(world, exchange.most_ranks or world)
                by_rank = launch(size, run_stack, wire, exchange, tokens, ranks=ranks, device=device)
                _judge(cell, by_rank, cells)
            except TokenyardError as error:
                cell.off.append(str(error))
            cells.append(cell)
            progress(f"the stack: {cell.exchange} × {cell.wire}", 1)
    _weights_of.cache_clear()
    return cells


def _judge(cell: StackCell, by_rank: Sequence[StackResult], earlier: Sequence[StackCell]) -> None:
    """Combine the ranks' figures, and say what is wrong."""
    cell.tokens = sum(rank.tokens for rank in by_rank)
    cell.digest = "-".join(rank.digest for rank in by_rank)
    cell.oracle_error = max(rank.oracle_error for rank in by_rank)
    cell.end_to_end_error = max(rank.end_to_end_error for rank in by_rank)
    cell.tokens_per_s = cell.tokens / max(rank.seconds for rank in by_rank)
    cell.bytes_per_token = sum(rank.bytes_sent for rank in by_rank) / cell.tokens
    # `not <=`: NaN fails, too.
    if not cell.oracle_error <= TOLERANCE:
        cell.off.append(f"error {cell.oracle_error:.2%} against the oracle, more than {TOLERANCE:.2%}")
    for other in earlier:
        if other.wire == cell.wire and other.digest not in (None, cell.digest):
            cell.off.append(f"other bits than {other.exchange}")
