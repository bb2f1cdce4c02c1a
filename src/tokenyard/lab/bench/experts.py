"""How fast are our experts? Beside Transformers' own, and beside the floor.

Both compute the same layer: the same bf16 weights (the peer's parameters *are* our buffers), the same rows,
the same routes, in one process. Rounds alternate between the two, so that a slow moment of the machine hits
both; what counts is the median of the ratios round by round, and their spread.

The floor is the arithmetic of the two products over the best rate that this machine shows for a plain square
matrix product, in bf16 or in float32, whichever is faster, measured in the same rounds. Nothing else is in
it: no gather, no activation, no sum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenyard import formats
from tokenyard.errors import InputError
from tokenyard.experts import ExpertsSpec, ExpertWeights, GroupedExperts, activation
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows

SQUARE = 2048  # the side of the product that shows the machine's rate: 17 GFLOP


def measure_experts(
    num_tokens: int = 512,
    *,
    hidden_size: int = 2048,
    intermediate_size: int = 1024,
    num_experts: int = 64,
    top_k: int = 8,
    rounds: int = 7,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure our grouped experts against Transformers' `grouped_mm` experts on one set of weights.

    `ratio` is the peer's time over ours (above 1: ours is faster), the median over rounds; `ratio_low` and
    `ratio_high` are its extremes. Times are medians in milliseconds. `difference` is the largest deviation
    between the two results over the largest result.
    """
    generator = torch.Generator().manual_seed(0)
    spec = ExpertsSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=num_experts,
        top_k=top_k,
        activation=activation("swiglu"),
    )
    weights = ExpertWeights(
        **{  # type: ignore[arg-type]
            name: torch.empty(shape, dtype=torch.bfloat16)
            .normal_(0.0, shape[-1] ** -0.5, generator=generator)
            .to(device)
            for name, shape in spec.shapes().items()
        }
    )
    x_TH = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16().to(device)
    scores_TE = torch.rand(num_tokens, num_experts, generator=generator)
    topk_weights_TK, topk_ids_TK = (t.to(device) for t in scores_TE.softmax(-1).topk(top_k))

    experts = GroupedExperts(spec, weights, adopt=True)
    routes = LocalRoutes(ids_RK=topk_ids_TK.int(), weights_RK=topk_weights_TK)
    received = ReceivedRows(rows=formats.get("bf16").encode(x_TH), routes=routes, counts_W=(num_tokens,))
    peer = _transformers_experts(spec, weights)

    def ours() -> Tensor:
        result = experts(received)
        assert isinstance(result, ExpertRows)
        return result.rows_RH.to(torch.bfloat16)

    def theirs() -> Tensor:
        with torch.no_grad():
            result: Tensor = peer(x_TH, topk_ids_TK, topk_weights_TK)
        return result.to(torch.bfloat16)

    wide = torch.randn(SQUARE, SQUARE, generator=generator).to(device)
    narrow = wide.bfloat16()
    candidates: dict[str, Callable[[], Tensor]] = {
        "ours": ours,
        "theirs": theirs,
        "float32": lambda: wide @ wide,
        "bf16": lambda: narrow @ narrow,
    }
    difference = compare(ours(), theirs(), "Transformers'")
    seconds = alternate(candidates, rounds, device)
    ratios = [t / o for o, t in zip(seconds["ours"], seconds["theirs"], strict=True)]
    # The best rate is a property of the machine, so the fastest round counts.
    rates = {name: 2 * SQUARE**3 / min(seconds[name]) for name in ("float32", "bf16")}
    flops = 2 * num_tokens * top_k * 3 * hidden_size * intermediate_size
    floor = flops / max(rates.values())
    return {
        "num_tokens": num_tokens,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k,
        "device": device,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "ours_ms": 1e3 * statistics.median(seconds["ours"]),
        "transformers_ms": 1e3 * statistics.median(seconds["theirs"]),
        "floor_ms": 1e3 * floor,
        "floor_rate": max(rates, key=lambda name: rates[name]),
        "floor_gflops": max(rates.values()) / 1e9,
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "over_floor": statistics.median(seconds["ours"]) / floor,
        "difference": difference,
    }


def alternate(
    candidates: dict[str, Callable[[], Tensor]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each candidate, round by round; every second round runs in the opposite order."""

    def synchronize() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for function in candidates.values():
        function()
    for number in range(rounds):
        order = list(candidates.items())
        for name, function in order if number % 2 == 0 else reversed(order):
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(ours: Tensor, theirs: Tensor, peer: str) -> float:
    """The largest deviation over the largest result; raise where the two do not compute the same layer.

    Both round to bf16 (2^-9 relative) at the end, and the peer also after each product: four roundings, and
    sums of random sign in between, stay far below 5% of the largest result. A wrong layout does not.
    """
    difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not difference < 0.05:
        raise InputError(
            f"our result differs from {peer} by {difference:.1%}",
            expected="the same layer from both, to a few bf16 roundings",
            fix="compare only what agrees: check the layout of the weights",
        )
    return difference


def _transformers_experts(spec: ExpertsSpec, weights: ExpertWeights) -> nn.Module:
    """Transformers' experts on the same tensors, with their `grouped_mm` implementation."""
    try:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        raise InputError(
            "transformers is not installed",
            expected="transformers 5.17 or newer, whose experts are the peer of this benchmark",
            fix="pip install 'tokenyard[transformers]'",
        ) from error
    config = Qwen3MoeConfig(
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.intermediate_size,
        num_experts=spec.num_local_experts,
        num_experts_per_tok=spec.top_k,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        peer: nn.Module = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]
    w13, w2 = weights.plain_matrices()
    peer.gate_up_proj = nn.Parameter(w13, requires_grad=False)
    peer.down_proj = nn.Parameter(w2, requires_grad=False)
    return peer.eval()
