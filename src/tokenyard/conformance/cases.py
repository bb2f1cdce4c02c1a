"""A case: one layer, one batch per rank, drawn from a seed, and the checks that its result must pass.

A case is small plain data, so that it can be drawn, sent to processes, printed in a failure and run again.
Exchange, formats and experts are names, or the user's own classes or objects. Every rank draws its own
batch and the weights from the case's seed; nothing is passed around.

Everything is drawn on the CPU, so that a seed gives the same bits everywhere. A layer runs on its group's device, and
its result is compared on the CPU.

Three checks, kept apart so that a failure says where it is:

1. `bitwise`: equal to the one-process twin, bit for bit (but any NaN equals any other). This is the exchange's part.
2. `oracle_excess`: how far the result is beyond the bound around a float64 oracle that is fed the rows as they
   were decoded (≤ 0 passes). This is the experts' part; the bound is that of a bf16 matrix product.
3. `end_to_end_error`: relative L2 error against the oracle that is fed the rows before encoding. It cannot fail: it
   shows the error that the wire's format adds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.oracle import Bound, bounded_oracle, oracle, relative_error
from tokenyard.conformance.twin import twin
from tokenyard.exchange import Transport
from tokenyard.experts import Experts, ExpertWeights, activation
from tokenyard.experts.spec import EXACT, WeightOn
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import Format, Payload, for_dtype
from tokenyard.formats.base import ROW_DTYPES
from tokenyard.group import Group
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement, Routes, placement_for

RouteKind = Literal["uniform", "gaps", "duplicates", "one_rank", "one_expert", "nobody"]

_TAG = Payload(name="tag", dtype=torch.int64, width=3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer on `len(tokens)` ranks, with `tokens[r]` tokens on rank r."""

    tokens: tuple[int, ...]
    hidden_size: int
    intermediate_size: int = 8
    num_experts: int = 4
    top_k: int = 2
    exchange: str | type[Transport] = "two_sided"
    wire: str | Format | None = None
    combine_wire: str | Format | None = None
    expert_rows: str | Format | None = None
    experts: str | type[Experts] = "reference"
    activation: str = "swiglu"
    bias: bool = False
    weights: str = "bf16"
    inner: str | Format = EXACT
    weight_on: WeightOn = "output"
    placement: str = "contiguous"  # or "replicas" or "shuffled"
    routes: RouteKind = "uniform"
    dtype: str = "bfloat16"
    id_dtype: str = "int64"
    weight_dtype: str = "float32"
    payloads: bool = False
    sum: Literal["ranks", "choices"] = "ranks"
    data: str = "ordinary numbers"  # a kind of `batch_data.DATA`
    seed: int = 0

    @property
    def world(self) -> int:
        """W, the number of ranks."""
        return len(self.tokens)

    def spec(self) -> LayerSpec:
        """The spec of the case's layer."""
        named = {
            field.name: getattr(self, field.name) for field in fields(LayerSpec) if field.name in vars(self)
        }
        own: dict[str, Any] = {
            "max_tokens": max(1, *self.tokens),
            "dtype": getattr(torch, self.dtype),
            "placement": self._placement(),
            "payloads": (_TAG,) if self.payloads else (),
        }
        return LayerSpec(name="case", **named | own)

    def _placement(self) -> Placement:
        """Which rank owns which expert. `replicas`: each on two ranks. `shuffled`: each on a random rank."""
        if self.placement == "replicas":
            return on_two_ranks(self.num_experts, self.world)
        if self.placement == "shuffled":
            chance = random.Random(self.seed)
            table: list[list[int]] = [[] for _ in range(self.world)]
            for expert in chance.sample(range(self.num_experts), self.num_experts):
                chance.choice(table).append(expert)
            return Placement.explicit(self.num_experts, table)
        return placement_for(self.placement, self.num_experts, self.world)

    def __str__(self) -> str:
        """The call that makes this case, with the arguments that differ from their defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        classes = {name: value.__name__ for name, value in changed.items() if isinstance(value, type)}
        return f"Case({', '.join(f'{name}={classes.get(name, repr(value))}' for name, value in changed.items())})"

    def all_weights(self) -> ExpertWeights:
        """The weights of all experts, the same on every rank."""
        return random_weights(self.spec(), self.seed)

    def batch(self, rank: int) -> tuple[Tensor, Routes]:
        """Rows and routes of one rank."""
        seed = self.seed * 1009 + rank + 1
        draw = torch.Generator().manual_seed(seed)
        T, K, E = self.tokens[rank], self.top_k, self.num_experts
        x_TH = torch.randn(T, self.hidden_size, generator=draw)
        # Rows of very different magnitude: a scale that rows share by mistake would then give large errors.
        # (float16 ends at 65504, and a gated expert squares its input: such layers get factors of at most 2^1.)
        narrow = self.dtype == "float16" or "fp16" in (str(self.wire), str(self.combine_wire))
        largest = 1 if narrow else 6
        x_TH *= torch.exp2(torch.randint(-6, largest + 1, (T, 1), generator=draw).float())
        ids_TK = torch.randint(0, E, (T, K), generator=draw)
        weights_TK = torch.rand(T, K, generator=draw)
        if self.routes == "uniform":
            order_TE = torch.rand(T, E, generator=draw).argsort(dim=1)
            distinct = min(K, E)
            ids_TK[:, :distinct] = order_TE[:, :distinct]
        elif self.routes == "gaps":
            gone_TK = torch.rand(T, K, generator=draw) < 0.4
            ids_TK[gone_TK], weights_TK[gone_TK] = -1, float("nan")
        elif self.routes == "one_rank":
            fullest = torch.tensor(max(self._placement().table, key=len))
            ids_TK = fullest[ids_TK % len(fullest)]
        elif self.routes == "one_expert":
            ids_TK[:] = E - 1
        elif self.routes == "nobody":
            ids_TK[:] = -1
        x_TH = x_TH.to(getattr(torch, self.dtype))
        x_TH, ids_TK, weights_TK = DATA[self.data].change(x_TH, ids_TK, weights_TK, seed)
        if self.routes == "gaps":
            x_TH[(ids_TK < 0).all(dim=1)] = float("nan")  # padding tokens hold anything
        return x_TH, Routes(
            topk_ids_TK=ids_TK.to(getattr(torch, self.id_dtype)),
            topk_weights_TK=weights_TK.to(getattr(torch, self.weight_dtype)),
        )

    def further_payloads(self, rank: int) -> dict[str, Tensor] | None:
        """The further payloads of one rank's rows, by name; None if the case has none."""
        if not self.payloads:
            return None
        numbers_T1 = torch.arange(self.tokens[rank]).unsqueeze(1)
        return {_TAG.name: numbers_T1.expand(-1, 3).contiguous() * 1000 + rank}


def on_two_ranks(num_experts: int, world: int) -> Placement:
    """A placement in which each expert lives on two ranks, or on the only one."""
    base = Placement.contiguous(num_experts, world)
    further = {e: [(base.owners(e)[0][0] + 1) % world] for e in range(num_experts)}
    return Placement.replicated(base, further if world > 1 else {})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The checks of one rank's result: which of them passed, and how large its errors are."""

    bitwise: bool
    oracle_excess: float
    end_to_end_error: float
    input_untouched: bool
    output_dtype: bool

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not self.complaints()

    def complaints(self) -> list[str]:
        """What is wrong, in words."""
        beyond = f"{self.oracle_excess:.3g} beyond the bound around the oracle; expected none"
        fine = {
            "other bits than the twin in one process has; expected the same bits": self.bitwise,
            beyond: self.oracle_excess <= 0,  # False for NaN, too
            "rows or routes of the caller were changed; expected them untouched": self.input_untouched,
            "an output of another dtype or shape than the input; expected the input's": self.output_dtype,
        }
        return [words for words, is_fine in fine.items() if not is_fine]


def run_case(group: Group, case: Case, *, end_to_end: bool = True) -> Outcome:
    """Run a case on this rank and check this rank's result. `end_to_end`: measure the wire's error, too."""
    spec, weights = case.spec(), case.all_weights()
    made = plan([spec], group, exchange=case.exchange)
    layer = MoELayer(made, spec.name, weights.select(made.local_experts(spec.name))).to(group.device)
    x_TH, routes = case.batch(group.rank)
    before = [tensor.clone() for tensor in (x_TH, routes.topk_ids_TK, routes.topk_weights_TK)]
    further = case.further_payloads(group.rank)
    payloads = further and {name: tensor.to(group.device) for name, tensor in further.items()}
    given_TH, given = x_TH.to(group.device), routes.to(group.device)
    y_TH = layer(given_TH, given, payloads=payloads).cpu()
    after = [tensor.cpu() for tensor in (given_TH, given.topk_ids_TK, given.topk_weights_TK)]
    made.close()
    wiring, bounded = made.wiring(spec.name), DATA[case.data].is_bounded
    return Outcome(
        bitwise=same_numbers(y_TH, twin(wiring, weights, x_TH, routes, group.rank)),
        # Of NaN, and of numbers that saturate, no bound is known.
        oracle_excess=oracle_excess(wiring, weights, x_TH, routes, y_TH) if bounded else 0.0,
        end_to_end_error=relative_error(y_TH, oracle(spec, weights, x_TH, routes)) if end_to_end else 0.0,
        input_untouched=all(same_bits(a, b) for a, b in zip(before, after, strict=True)),
        output_dtype=y_TH.dtype == x_TH.dtype and y_TH.shape == x_TH.shape,
    )


def oracle_excess(
    wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes, y_TH: Tensor
) -> float:
    """By how much a result is outside the bound around the oracle that is fed the rows as the experts get them."""
    exact_TH, tolerance_TH, _ = oracle_tolerance(wiring, weights, x_TH, routes)
    return excess(y_TH, exact_TH, tolerance_TH)


def oracle_tolerance(
    wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes
) -> tuple[Tensor, Tensor, Bound]:
    """The oracle that is fed the rows as the experts get them, how far a result may be from it, and why."""
    spec = wiring.spec
    decoded_TH = wiring.wire.encode(x_TH).decode(torch.float32)
    if wiring.expert_rows is not None and wiring.expert_rows != wiring.wire:
        decoded_TH = wiring.expert_rows.encode(decoded_TH.to(spec.dtype)).decode(torch.float32)
    exact_TH, bound = bounded_oracle(spec, weights, decoded_TH, routes)
    tolerance_TH = bound.tolerance(wiring.exchange_spec.combine_wire, spec.dtype)
    if wiring.exchange_spec.hosts:  # results are rounded once more, before they are summed inside their host
        tolerance_TH += bound.tolerance(for_dtype(spec.dtype), spec.dtype)
    return exact_TH, tolerance_TH, bound


def excess(y_TH: Tensor, exact_TH: Tensor, tolerance_TH: Tensor) -> float:
    """By how much the worst element is outside its bound; negative inside. NaN counts as outside."""
    if y_TH.numel() == 0:
        return 0.0
    over = (y_TH.double() - exact_TH).abs() - tolerance_TH
    worst = float(over.max())
    return float("inf") if math.isnan(worst) else worst


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits (NaN included)."""
    # Copied: a dimension of size 1 counts as contiguous with any stride, and cannot be viewed as another dtype.
    as_bytes = [t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, signs of zeros included; any NaN equals any other.

    >>> same_numbers(torch.tensor([0.0, torch.nan]), torch.tensor([0.0, -torch.nan]))
    True
    >>> same_numbers(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in ROW_DTYPES:
        return same_bits(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0))


def random_weights(spec: LayerSpec, seed: int) -> ExpertWeights:
    """Weights of all experts of a layer, at the scale of a trained model, in the layer's format."""
    draw = torch.Generator().manual_seed(seed)
    E, H, I = spec.num_experts, spec.hidden_size, spec.intermediate_size  # noqa: E741
    wide = 2 * I if activation(spec.activation).gated else I
    dtype = WEIGHT_DTYPES.get(spec.weights, torch.float32)

    def matrix(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=draw)
        return values.mul_(shape[-1] ** -0.5).to(dtype)

    biases = {"b13": matrix(E, wide), "b2": matrix(E, H)} if spec.bias else {}
    weights = ExpertWeights(w13=matrix(E, wide, H), w2=matrix(E, H, I), **biases)  # type: ignore[arg-type]
    return weights if spec.weights in WEIGHT_DTYPES else weights.quantize(spec.weights)
