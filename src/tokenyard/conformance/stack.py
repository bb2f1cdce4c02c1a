"""The stack that `tokenyard run` pushes tokens through: a quantized body and an unquantized head of another shape.

    x ──► body.0 ──► body.1 ──► projection ──► head ──► y
          wire under test              bf16, other H, K, E

One plan serves all three layers, as in a model whose body is 4-bit and whose prediction head is not. Every layer's
result is held against the float64 oracle, fed with the rows as the experts decoded them; beside it stands the
end-to-end error, which is what the wire's format costs. The ranks bring different numbers of tokens; one is idle.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.group import Group
from tokenyard.layer import MoELayer
from tokenyard.planner import plan
from tokenyard.routing import GroupedSigmoidRouter, SoftmaxRouter
from tokenyard.spec import LayerSpec

# Rows, hidden values, results on the way back and the output are each rounded to bf16 once: 2^-9, relative, each.
TOLERANCE = 4 * 2.0**-9


def stack(wire: str) -> list[LayerSpec]:
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
    bytes_sent: int  # in one pass
    digest: str  # of the output's bits


def run_stack(group: Group, wire: str, exchange: str, tokens: int, seed: int = 0) -> StackResult:
    """Push this rank's tokens through the stack, check every layer, then time passes without the checks."""
    specs = stack(wire)
    made = plan(specs, group, exchange=exchange, max_tokens=2 * tokens)
    weights = {spec.name: random_weights(spec, seed) for spec in specs}
    layers = {}
    for spec in specs:
        local = weights[spec.name].select(made.local_experts(spec.name))
        layers[spec.name] = MoELayer(made, spec.name, local).to(group.device)
    draw = torch.Generator().manual_seed(seed * 1009 + group.rank)
    num_tokens = tokens_of(group.rank, group.size, tokens)
    x_TH = torch.randn(num_tokens, specs[0].hidden_size, generator=draw).bfloat16().to(group.device)
    fixed = torch.Generator().manual_seed(seed + 1)  # the same on every rank
    gates = {
        s.name: torch.randn(s.num_experts, s.hidden_size, generator=fixed).to(group.device) for s in specs
    }
    projection = torch.randn(specs[-1].hidden_size, specs[0].hidden_size, generator=fixed).bfloat16()
    projection = projection.to(group.device)

    inputs, outputs = _one_pass(layers, gates, projection, x_TH)
    bytes_sent = sum(sum(s.dispatch_bytes) + sum(s.combine_bytes) for s in made.stats().values())
    errors, costs = [0.0], [0.0]
    for spec in specs if x_TH.shape[0] else []:
        wiring, router = made.wiring(spec.name), spec.router
        assert router is not None
        routes = router(inputs[spec.name].float() @ gates[spec.name].T).to("cpu")
        exact_of, given_TH, y_TH = weights[spec.name], inputs[spec.name].cpu(), outputs[spec.name].cpu()
        decoded_TH = wiring.wire.encode(given_TH).decode(torch.float32)
        errors.append(relative_error(y_TH, oracle(spec, exact_of, decoded_TH, routes)))
        costs.append(relative_error(y_TH, oracle(spec, exact_of, given_TH, routes)))

    passes = []
    for _ in range(3):
        group.barrier()
        started = time.perf_counter()
        _one_pass(layers, gates, projection, x_TH)
        group.wait_for_device()
        passes.append(time.perf_counter() - started)
    made.close()
    return StackResult(
        tokens=x_TH.shape[0],
        oracle_error=max(errors),
        end_to_end_error=max(costs),
        seconds=min(passes),
        bytes_sent=bytes_sent,
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
