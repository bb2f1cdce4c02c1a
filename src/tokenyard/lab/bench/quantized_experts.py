"""How fast are experts whose weights stay quantized? Beside decoding all of them first, and beside the floor.

The peer decodes every matrix to bf16, and calls `F.grouped_mm` on the result; sorting pairs, activation and sum are
the same. Both start from the same quantized weights and the same rows, in one process, and rounds alternate.

The floor is the larger of two: the bytes of the experts that are hit over the rate at which this machine reads
memory, and the arithmetic over its best rate for a plain square product. Decoding is not in it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.experts import ExpertsSpec, ExpertWeights, GroupedExperts, activation
from tokenyard.lab.bench.experts import SQUARE, alternate, compare
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows

# Elements of the float32 tensor whose sum shows the rate of reading: 64 MiB, far beyond the caches.
_READ_ELEMENTS = 16 * 1024 * 1024


def measure_quantized_experts(
    num_tokens: int = 512,
    *,
    weights: str = "mxint4",
    hidden_size: int = 2048,
    intermediate_size: int = 1024,
    num_experts: int = 64,
    top_k: int = 8,
    rounds: int = 7,
) -> dict[str, Any]:
    """Measure grouped experts with quantized weights on the CPU. The fields are those of `measure_experts`.

    `decoded_first_ms` is the peer's time, `memory_ratio` the bytes of our weights over those that the peer multiplies.
    """
    generator = torch.Generator().manual_seed(0)
    spec = ExpertsSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=num_experts,
        top_k=top_k,
        activation=activation("swiglu"),
        weights=weights,
    )
    plain = ExpertWeights(
        **{  # type: ignore[arg-type]
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(
                0.0, shape[-1] ** -0.5, generator=generator
            )
            for name, shape in spec.shapes().items()
        }
    )
    held, plain_bytes = plain.quantize(weights), plain.nbytes
    del plain
    x_TH = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()
    scores_TE = torch.rand(num_tokens, num_experts, generator=generator)
    topk_weights_TK, topk_ids_TK = scores_TE.softmax(-1).topk(top_k)
    routes = LocalRoutes(ids_RK=topk_ids_TK.int(), weights_RK=topk_weights_TK)
    received = ReceivedRows(rows=formats.get("bf16").encode(x_TH), routes=routes, counts_W=(num_tokens,))
    experts = GroupedExperts(spec, held, adopt=True)
    plain_spec = dataclasses.replace(spec, weights="bf16")

    def finished(experts: GroupedExperts) -> Tensor:
        result = experts(received)
        assert isinstance(result, ExpertRows)
        return result.rows_RH.to(torch.bfloat16)

    def theirs() -> Tensor:
        return finished(GroupedMm(plain_spec, held.decode(torch.bfloat16), adopt=True))

    wide = torch.randn(SQUARE, SQUARE, generator=generator)
    much = torch.ones(_READ_ELEMENTS)
    candidates: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: finished(experts),
        "theirs": theirs,
        "float32": lambda: wide @ wide,
        "read": much.sum,
    }
    difference = compare(finished(experts), theirs(), "that of weights decoded first")
    seconds = alternate(candidates, rounds, "cpu")
    ratios = [t / o for o, t in zip(seconds["ours"], seconds["theirs"], strict=True)]
    hit = int(topk_ids_TK.unique().numel())
    flops = 2 * num_tokens * top_k * 3 * hidden_size * intermediate_size
    by_flops = flops / (2 * SQUARE**3 / min(seconds["float32"]))
    by_bytes = held.nbytes * hit / num_experts / (much.nbytes / min(seconds["read"]))
    floor = max(by_flops, by_bytes)
    return {
        "weights": weights,
        "num_tokens": num_tokens,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "ours_ms": 1e3 * statistics.median(seconds["ours"]),
        "decoded_first_ms": 1e3 * statistics.median(seconds["theirs"]),
        "floor_ms": 1e3 * floor,
        "floor_rate": "float32" if by_flops >= by_bytes else "read",
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "over_floor": statistics.median(seconds["ours"]) / floor,
        "memory_ratio": held.nbytes / plain_bytes,
        "difference": difference,
    }


class GroupedMm(GroupedExperts):
    """Grouped experts that always call `F.grouped_mm`, as the peer does."""

    name = "grouped_mm"

    def _path(self, weights: ExpertWeights, rows: int) -> Any:
        return "grouped_mm"
