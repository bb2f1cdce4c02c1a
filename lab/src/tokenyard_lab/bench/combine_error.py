"""The error that the format of the way back adds: random layers on W ranks, compared with the float64 oracle.

A model that is sure of its answers hides the rounding of its exchange: the answers stay right. Here the layer's output
itself is compared: the relative L2 error of all tokens, ‖y − exact‖ / ‖exact‖, where `exact` is the oracle's result for
the same bf16 rows and weights. Rows travel out as they are, and the experts compute in float32, so only the way back
adds errors.

One plan holds the layer once for each combine wire, on W threads, and the same tokens are shared out among them. W
changes only the number of rows that a token's result is summed from. The floor is the exact result in bf16, the dtype
of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.experts import ExpertWeights
from tokenyard.group import Group, launch
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.unscaled_e4m3 import UNSCALED, studied_format

# One column in 100 is an outlier; how many times as large it is in rows, and in results.
_OUTLIER_EVERY, _LARGER_ROWS, _LARGER_RESULTS = 100, 10.0, 50.0
# The root mean square of the layer's output (of its ordinary columns), to a power of two.
_SIZES = {"gaussian": 1.0, "outliers": 1.0, "small": 2.0**-7}
RESULTS = tuple(_SIZES)
RANKS = (1, 2, 4, 8, 16)
NOTES = [
    f"relative L2 error of a layer's output beside float64, in %; {UNSCALED}: a direct cast, the bad example",
    f"outliers: one column in {_OUTLIER_EVERY} is {_LARGER_ROWS:.0f} times as large in rows, and "
    f"{_LARGER_RESULTS:.0f} times in results; small: the output's root mean square is 1/128, else 1",
    "ordinary: the same error over the columns that are no outliers; the floor is the exact result in bf16",
]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The sizes of the layers whose outputs are compared, and how many are drawn."""

    hidden_size: int = 1024
    intermediate_size: int = 64
    num_experts: int = 32
    top_k: int = 8
    tokens: int = 64  # of all ranks together
    layers: int = 5  # random layers of each kind


@dataclass(frozen=True, kw_only=True, eq=False)
class _Drawn:
    """One random layer, its batch, and its exact output."""

    spec: LayerSpec
    weights: ExpertWeights
    x_TH: Tensor
    routes: Routes
    exact_TH: Tensor

    def share(self, rank: int, world: int) -> tuple[Tensor, Routes]:
        """The tokens of one rank."""
        mine = slice(rank, None, world)
        return self.x_TH[mine], self.routes.of_tokens(mine)


def measure_combine_error(
    study: Study, ranks: int, results: str, combine_wires: Sequence[str]
) -> list[Record]:
    """The error of every combine wire on this number of ranks, for results of one kind: a record for each.

    >>> study = Study(hidden_size=64, intermediate_size=8, num_experts=4, top_k=2, tokens=4, layers=1)
    >>> for record in measure_combine_error(study, 2, "gaussian", ["bf16", "nvfp4"]):
    ...     print(record, record.ours.median < 20)
    ranks 2, gaussian, bf16 True
    ranks 2, gaussian, nvfp4 True
    """
    layers = [_draw(study, results, seed) for seed in range(study.layers)]
    is_ordinary = ~_outliers(study.hidden_size) if results == "outliers" else None
    # By layer: the output of each wire, of all tokens.
    outputs = [_outputs(drawn, ranks, combine_wires) for drawn in layers]

    def errors(wire: str, columns: Tensor | None = None) -> list[float]:
        chosen = slice(None) if columns is None else columns
        return [
            100 * relative_error(output[wire][:, chosen], drawn.exact_TH[:, chosen])
            for output, drawn in zip(outputs, layers, strict=True)
        ]

    floor = Spread.of(
        100 * relative_error(drawn.exact_TH.to(drawn.spec.dtype), drawn.exact_TH) for drawn in layers
    )
    return [
        Record(
            parameters={"ranks": ranks, "results": results, "combine_wire": wire},
            ours=Spread.of(errors(wire)),
            floor=floor,
            details={
                "bytes_per_row": studied_format(wire).bytes_per_row(study.hidden_size),
                "ordinary": None
                if is_ordinary is None
                else round(Spread.of(errors(wire, is_ordinary)).median, 3),
            },
        )
        for wire in combine_wires
    ]


def _outliers(hidden_size: int) -> Tensor:
    """Which columns are outliers."""
    return torch.arange(hidden_size) % _OUTLIER_EVERY == _OUTLIER_EVERY // 2


def _draw(study: Study, results: str, seed: int) -> _Drawn:
    spec = LayerSpec(
        name="moe",
        hidden_size=study.hidden_size,
        intermediate_size=study.intermediate_size,
        num_experts=study.num_experts,
        top_k=study.top_k,
        max_tokens=study.tokens,
        experts="reference",
    )
    draw = torch.Generator().manual_seed(seed)
    weights = random_weights(spec, seed)
    x_TH = torch.randn(study.tokens, study.hidden_size, generator=draw)
    assert isinstance(weights.w2, Tensor)
    w2 = weights.w2
    if results == "outliers":
        columns = _outliers(study.hidden_size)
        x_TH[:, columns] *= _LARGER_ROWS
        w2 = torch.where(columns[:, None], w2 * _LARGER_RESULTS, w2)
    chances_TE = torch.rand(study.tokens, study.num_experts, generator=draw)
    top = chances_TE.topk(study.top_k)
    routes = Routes(topk_ids_TK=top.indices, topk_weights_TK=torch.softmax(4 * top.values, dim=1))
    x_TH = x_TH.to(spec.dtype)
    exact_TH = oracle(spec, replace(weights, w2=w2), x_TH, routes)
    # Scaled by a power of two, which rounds nothing: the output is linear in the second weights.
    size = exact_TH[:, ~_outliers(study.hidden_size)].square().mean().sqrt()
    factor = float(torch.exp2(torch.log2(_SIZES[results] / size).round()))
    return _Drawn(
        spec=spec,
        weights=replace(weights, w2=w2 * factor),
        x_TH=x_TH,
        routes=routes,
        exact_TH=factor * exact_TH,
    )


def _outputs(drawn: _Drawn, ranks: int, combine_wires: Sequence[str]) -> dict[str, Tensor]:
    """The output of the layer on this number of ranks, by combine wire."""
    by_rank = launch(ranks, _share_of_outputs, drawn, combine_wires)
    outputs = {}
    for wire in combine_wires:
        y_TH = torch.empty_like(drawn.x_TH)
        for rank, found in enumerate(by_rank):
            y_TH[rank::ranks] = found[wire]
        outputs[wire] = y_TH
    return outputs


def _share_of_outputs(group: Group, drawn: _Drawn, combine_wires: Sequence[str]) -> dict[str, Tensor]:
    specs = [replace(drawn.spec, name=wire, combine_wire=studied_format(wire)) for wire in combine_wires]
    made = plan(specs, group)
    x_TH, routes = drawn.share(group.rank, group.size)
    weights = drawn.weights.select(made.local_experts(combine_wires[0]))
    try:
        return {wire: MoELayer(made, wire, weights)(x_TH, routes) for wire in combine_wires}
    finally:
        made.close()
