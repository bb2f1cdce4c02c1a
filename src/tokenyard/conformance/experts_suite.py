"""What every experts class must keep to: one type, one meaning of rows and weights, nothing changed on the way.

Each check takes a class, somebody's own too, and tries it on specs that its `supports` accepts, with rows on a device.

The bound around the float64 result is the usual first-order analysis, carried through the layer: a dot product of
D terms, summed in float32 in any order, is off by at most (D + 2) · 2^-24 · Σ|x·w|; where a product runs in a 16-bit
dtype, its output, the activation's result, and a row that was weighted are each rounded to it; and through the
activation an error grows by at most its slope.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.conformance.cases import excess, same_bits
from tokenyard.conformance.oracle import exact_activation, quantizing_error
from tokenyard.conformance.runner import Finding, expect
from tokenyard.experts import ACTIVATIONS, Activation, Experts, ExpertsSpec, ExpertWeights, activation
from tokenyard.experts.base import EXACT, WEIGHT_DTYPES
from tokenyard.formats import WEIGHT_FORMATS, Format, QuantizedMatrix
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, RoutingLogits, UnfinalizedRows, describe

# Random specs that the oracle check draws, and rows of a batch.
_DRAWS = 40
_ROWS = 17
_FLOAT32 = 2.0**-24
_SLOPE = 1.13  # of silu, gelu and the clamped SwiGLU, at most
_TINY = 2.0**-24  # half the distance of float16's subnormal numbers
_ALL_BUT = 2.0**-12  # of the length of an output: far below what any product rounds
_CPU = torch.device("cpu")
# Codes whose numbers every 16-bit dtype holds: whoever decodes them once decodes them exactly.
_EXACT_CODES = ("mxfp8", "nvfp4(global_scale=8.0)", "fp8_block128(power_of_two_scales=True)")


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A layer of experts on this rank, and rows for it. They are drawn on the CPU, and computed on `device`."""

    spec: ExpertsSpec
    weights: ExpertWeights
    x_RH: Tensor
    routes: LocalRoutes
    device: torch.device = _CPU
    wire: Format | None = None  # in which the rows arrive; None: in their own dtype

    def received(self, cls: type[Experts], routes: LocalRoutes | None = None) -> ReceivedRows:
        """The rows as an exchange would deliver them; with logits, for experts that route by themselves."""
        routes, x_RH = self.routes_there() if routes is None else routes, self.x_RH.to(self.device)
        shape = (x_RH.shape[0], self.spec.num_local_experts)
        logits = RoutingLogits(logits_RE=torch.zeros(shape, device=self.device))
        return ReceivedRows(
            rows=(self.wire or formats.for_dtype(x_RH.dtype)).encode(x_RH),
            routes=logits if cls.routes_itself else routes,
            counts_W=(x_RH.shape[0],),
        )

    def routes_there(self) -> LocalRoutes:
        """The routes on the device."""
        ids_RK, weights_RK = self.routes.ids_RK.to(self.device), self.routes.weights_RK.to(self.device)
        return LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)

    def build(self, cls: type[Experts], **options: Any) -> Experts:
        """The experts. Those that route by themselves get a router that answers with this batch's routes."""
        if cls.routes_itself:
            there = self.routes_there()
            routes = SimpleNamespace(topk_ids_TK=there.ids_RK, topk_weights_TK=there.weights_RK)
            options |= {"router": lambda logits_RE: routes, "to_local": lambda ids_RK, counts_W: ids_RK}
        return cls(self.spec, self.weights, **options).to(self.device)

    def result(self, cls: type[Experts], **options: Any) -> Tensor:
        """The finished rows."""
        return _finished(cls, self.build(cls, **options), self.received(cls))


def _finished(cls: type[Experts], experts: Experts, received: ReceivedRows) -> Tensor:
    result = experts(received, finalize=cls.finalizes)
    if isinstance(result, UnfinalizedRows):
        result = result.finish()
    rows_RH, device = result.rows_RH, received.rows.device
    assert isinstance(rows_RH, Tensor)
    expect(rows_RH.device.type == device.type, f"the result is on {rows_RH.device}", f"{device}, as the rows")
    return rows_RH.cpu()


def _specs(cls: type[Experts], seed: int = 0, count: int = _DRAWS) -> Iterator[ExpertsSpec]:
    """Random specs that the class supports."""
    chance = random.Random(seed)
    left = count
    for _ in range(100 * count):
        weights = chance.choice([name for name in cls.weight_formats if name in WEIGHT_FORMATS] or ["bf16"])
        spec = ExpertsSpec(
            hidden_size=chance.choice((1, 8, 33, 64, 100)),
            intermediate_size=chance.choice((1, 7, 16, 40)),
            num_local_experts=chance.choice((1, 2, 3, 5, 8)),
            top_k=chance.choice((1, 2, 3, 8)),
            activation=activation(chance.choice(sorted(ACTIVATIONS))),
            bias=chance.random() < 0.5,
            weights=weights,
            dtype=_dtype(weights),
            weight_on=chance.choice(("output", "input")),
            inner=_inner(chance, weights),
        )
        if cls.supports(spec) is None:
            left -= 1
            yield spec
        if left == 0:
            return
    if left == count:
        raise Finding(
            f"`supports` refused {100 * count} specs, the last with: {cls.supports(spec)}", "some spec"
        )


def _inner(chance: random.Random, weights: str) -> Format | None:
    """How numbers may be held between products with such weights: exactly, or in a format."""
    held = WEIGHT_FORMATS[weights].inner_formats if weights in WEIGHT_FORMATS else ()
    return formats.get(chance.choice(held)) if held and chance.random() < 0.5 else None


def _dtype(weights: str) -> torch.dtype:
    """The dtype of rows for weights in this format: bf16 for quantized ones, whose products have the bound of bf16."""
    return WEIGHT_DTYPES.get(weights, torch.bfloat16)


def _one(
    cls: type[Experts], device: torch.device, seed: int = 0, rows: int = _ROWS, *, least_k: int = 1
) -> _Batch:
    """A batch for a spec that the class supports."""
    for spec in _specs(cls, seed):
        if spec.top_k >= least_k and spec.num_local_experts > 1 and spec.hidden_size > 1:
            return _batch(spec, rows, seed, device)
    return _batch(next(_specs(cls, seed)), rows, seed, device)


def _batch(spec: ExpertsSpec, rows: int = _ROWS, seed: int = 0, device: torch.device = _CPU) -> _Batch:
    draw = torch.Generator().manual_seed(seed)
    dtype = _dtype(spec.weights)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(dtype)

    weights = ExpertWeights(
        **{  # type: ignore[arg-type]
            name: normal(*shape, scale=1.0 if name.startswith("b") else shape[-1] ** -0.5)
            for name, shape in spec.shapes().items()
        }
    )
    ids_RK = torch.randint(-1, spec.num_local_experts, (rows, spec.top_k), generator=draw).int()
    weights_RK = torch.rand(rows, spec.top_k, generator=draw) + 0.1
    return _Batch(
        spec=spec,
        weights=weights.quantize(spec.weights),
        x_RH=normal(rows, spec.hidden_size),
        routes=LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK),
        device=device,
    )


def _activation_error(act: Activation, pre: Tensor, error: Tensor) -> Tensor:
    """How far the activation's result may be off, if its input is off by `error`."""
    (gate, up), (gate_error, up_error) = act.split(pre), act.split(error)
    if up is None or up_error is None:
        return 2 * gate.abs() * gate_error + gate_error**2
    shift = dict(act.parameters).get("up_shift", 0.0)
    return _SLOPE * gate_error * ((up + shift).abs() + up_error) + gate.abs() * up_error


def exact(batch: _Batch) -> tuple[Tensor, Tensor]:
    """The result in float64, and the bound on the error of each element."""
    spec, weights, routes = batch.spec, batch.weights.decode(torch.float64), batch.routes
    u = torch.finfo(_dtype(spec.weights)).eps / 2
    x_RH = batch.x_RH.double()
    y_RH, bound_RH = torch.zeros_like(x_RH), torch.zeros_like(x_RH)
    w13, w2 = weights.plain_matrices()
    b13 = torch.zeros(w13.shape[:2]).double() if weights.b13 is None else weights.b13.double()
    b2 = torch.zeros(w2.shape[:2]).double() if weights.b2 is None else weights.b2.double()
    on_input = spec.weight_on == "input"
    for choice in range(spec.top_k):
        for expert in range(spec.num_local_experts):
            taken = routes.ids_RK[:, choice] == expert
            weight = routes.weights_RK[taken, choice].double().unsqueeze(1)
            x = x_RH[taken] * weight if on_input else x_RH[taken]
            product = x @ w13[expert].T
            pre = product + b13[expert]
            size = x.abs() @ w13[expert].abs().T + b13[expert].abs()
            # The product may be rounded before the bias is added, and both together again.
            rounded = u * (product.abs() + pre.abs() + on_input * size)
            error = (spec.hidden_size + 2) * _FLOAT32 * size + rounded + _TINY
            act = exact_activation(spec.activation, pre)
            act_error = _activation_error(spec.activation, pre, error)
            # The formula itself is evaluated in float32, with a handful of roundings.
            act_error = act_error + (u + 8 * _FLOAT32) * act.abs() + _TINY
            if spec.inner is not None:
                # A number that is off is quantized as it is: what comes of both is at most this much more.
                act_error = 1.07 * act_error + quantizing_error(spec.inner, act)
            product = act @ w2[expert].T
            y = product + b2[expert]
            size = act.abs() @ w2[expert].abs().T + b2[expert].abs()
            y_error = act_error @ w2[expert].abs().T + (spec.intermediate_size + 2) * _FLOAT32 * size
            y_error = y_error + u * (product.abs() + y.abs()) + _TINY
            last = torch.ones_like(weight) if on_input else weight
            y_RH[taken] += y * last
            bound_RH[taken] += (y_error + (spec.top_k + 1) * _FLOAT32 * y.abs()) * last
    return y_RH, bound_RH * 1.01  # the second order


def _expect_bound(rows_RH: Tensor, batch: _Batch, where: str, expected: str) -> None:
    """Raise a finding unless the result of a batch is within the bound."""
    over = excess(rows_RH, *exact(batch))
    expect(over <= 0, f"{over:.3g} beyond the bound {where}", expected)


# -- The checks ----------------------------------------------------------------------------------------------


def one_type_returned(cls: type[Experts], device: torch.device) -> None:
    """`compute` returns `ExpertRows` if it finalizes, else `UnfinalizedRows`; never a tensor, a tuple or nothing."""
    batch = _one(cls, device)
    experts, received = batch.build(cls), batch.received(cls)
    for finalize in (True, False) if cls.finalizes else (False,):
        result: object = experts.compute(received, finalize=finalize)
        kind = ExpertRows if finalize else UnfinalizedRows
        expect(
            isinstance(result, kind),
            f"compute(finalize={finalize}) returned {describe(result)}",
            kind.__name__,
        )
    rows_RH = _finished(cls, experts, received)
    shape = (_ROWS, batch.spec.hidden_size)
    expect(
        tuple(rows_RH.shape) == shape and rows_RH.is_floating_point(),
        f"the finished rows are {describe(rows_RH)}",
        f"a floating-point tensor {list(shape)}: a row for every received row",
    )


def finalizing_agrees(cls: type[Experts], device: torch.device) -> None:
    """Rows that the experts finalize are bitwise those that the receiver finishes."""
    if not cls.finalizes:
        return
    for seed, spec in enumerate(_specs(cls, count=12)):
        batch = _batch(spec, seed=seed, device=device)
        experts, received = batch.build(cls), batch.received(cls)
        finalized, unfinalized = experts(received, finalize=True), experts(received, finalize=False)
        assert isinstance(finalized, ExpertRows)
        assert isinstance(unfinalized, UnfinalizedRows)
        expect(
            same_bits(finalized.rows_RH.float(), unfinalized.finish().rows_RH.float()),
            f"finalize=True and finalize=False differ for {_told(spec)}",
            "the same bits",
        )


def within_the_bound(cls: type[Experts], device: torch.device) -> None:
    """For every supported spec the result is within the bound around the float64 one: weighted once, summed once."""
    for seed, spec in enumerate(_specs(cls)):
        batch = _batch(spec, seed=seed, device=device)
        _expect_bound(batch.result(cls), batch, f"for {_told(spec)}", "every element within it")


def rows_are_quantized_once(cls: type[Experts], device: torch.device) -> None:
    """Rows that arrive quantized are taken as they are; plain rows are quantized where the spec asks for it."""
    for seed, drawn in enumerate(_specs(cls, count=12)):
        name = _EXACT_CODES[seed % len(_EXACT_CODES)]
        code = formats.get(name)
        for wire, rows in ((code, None), (code, code), (None, code)):
            spec = replace(drawn, rows=rows)
            if cls.supports(spec) is not None:
                continue
            batch = replace(_batch(spec, seed=seed, device=device), wire=wire)
            given_RH = code.encode(batch.x_RH).decode(torch.float32)
            how = f"rows that arrive {'plain' if wire is None else 'so'}, and experts that compute on "
            how += "what arrives" if rows is None else "such rows"
            given = replace(batch, x_RH=given_RH)
            _expect_bound(batch.result(cls), given, f"for {name}, {how}", "rows that are quantized once")


def rows_for_nobody_are_zero(cls: type[Experts], device: torch.device) -> None:
    """A row none of whose experts live here is zero, even where it or its weight holds NaN."""
    batch = _one(cls, device)
    ids_RK, weights_RK = batch.routes.ids_RK.clone(), batch.routes.weights_RK.clone()
    ids_RK[3], ids_RK[9] = -1, -1
    x_RH = batch.x_RH.clone()
    x_RH[3] = float("nan")
    weights_RK[ids_RK < 0] = float("nan")  # means nothing there
    rows_RH = replace(batch, x_RH=x_RH, routes=LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)).result(cls)
    for row in (3, 9):
        expect(
            not bool(rows_RH[row].any()), f"row {row}, for nobody, is {rows_RH[row, :4].tolist()}", "zeros"
        )
    expect(bool(torch.isfinite(rows_RH).all()), "NaN of a row for nobody reached another row", "finite rows")


def nan_stays_in_its_row(cls: type[Experts], device: torch.device) -> None:
    """NaN in one row does not reach another row, and is not lost in its own, whatever the activation."""
    drawn = _one(cls, device).spec
    for formula in ACTIVATIONS.values():
        spec = replace(drawn, activation=formula)
        if cls.supports(spec) is not None:
            continue
        batch = _batch(spec, device=device)
        batch.routes.ids_RK[:, 0] = 0  # everyone shares an expert
        batch.x_RH[5] = float("nan")
        rows_RH, others = batch.result(cls), [row for row in range(_ROWS) if row != 5]
        told = f"with {formula.name}"
        fine = bool(torch.isfinite(rows_RH[others]).all())
        expect(fine, f"NaN of row 5 reached another row {told}", "row 5 alone")
        expect(bool(rows_RH[5].isnan().all()), f"a row of NaN gave numbers {told}", "NaN")


def duplicate_choices_count_twice(cls: type[Experts], device: torch.device) -> None:
    """An expert that a row names twice counts twice, with both weights."""
    batch = _one(cls, device, least_k=2)
    ids_RK = batch.routes.ids_RK[:, :1].clamp(min=0).expand(-1, batch.spec.top_k).contiguous()
    batch = replace(batch, routes=replace(batch.routes, ids_RK=ids_RK))
    _expect_bound(batch.result(cls), batch, "where all choices name one expert", "both to count")


def empty_batches(cls: type[Experts], device: torch.device) -> None:
    """No rows give no rows; rows for nobody at all give zeros, also on a rank that owns no experts."""
    batch = _one(cls, device, rows=0)
    shape = tuple(batch.result(cls).shape)
    expect(shape == (0, batch.spec.hidden_size), f"no rows gave {list(shape)}", [0, batch.spec.hidden_size])
    batch = _one(cls, device)
    batch.routes.ids_RK.fill_(-1)
    expect(not bool(batch.result(cls).any()), "a batch for nobody gave something", "zeros")
    spec = replace(batch.spec, num_local_experts=0, num_experts=batch.spec.num_local_experts)
    if cls.supports(spec) is None:
        for rows in (0, _ROWS):
            batch = _batch(spec, rows, device=device)
            batch.routes.ids_RK.fill_(-1)
            expect(not bool(batch.result(cls).any()), "a rank without experts gave something", "zeros")


def _means(held: Tensor | QuantizedMatrix, given: Tensor | QuantizedMatrix) -> bool:
    """Whether experts hold the weights that they were given: bit for bit, or within `_ALL_BUT` if they recode them."""
    if isinstance(held, Tensor) or isinstance(given, Tensor):
        return isinstance(held, Tensor) and isinstance(given, Tensor) and same_bits(held.cpu(), given.cpu())
    exact, found = (matrix.decode(torch.float64).cpu() for matrix in (given, held))
    return bool(((found - exact).norm(dim=-1) <= _ALL_BUT * exact.norm(dim=-1)).all())


def nothing_is_changed(cls: type[Experts], device: torch.device) -> None:
    """Neither rows, nor routes, nor weights are changed by computing, adopted weights included."""
    batch = _one(cls, device)
    routes = batch.routes_there()
    received = batch.received(cls, routes)
    tensors = {
        "x_RH": received.rows.payloads["data"],
        "ids_RK": routes.ids_RK,
        "weights_RK": routes.weights_RK,
        **batch.weights.by_name(),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    experts = batch.build(cls, adopt=True)
    for name in ("w13", "w2"):
        what = f"the experts do not hold the {name} that they were given"
        expect(_means(getattr(experts.weights, name), getattr(batch.weights, name)), what, "it untouched")
    own = {name: tensor.clone() for name, tensor in experts.weights.by_name().items()}
    for finalize in (True, False) if cls.finalizes else (False,):
        experts(received, finalize=finalize)
    for name, tensor in tensors.items():
        expect(same_bits(tensor, before[name]), f"{name} was changed", "it untouched")
    for name, tensor in experts.weights.by_name().items():
        expect(same_bits(tensor, own[name]), f"the experts' own {name} was changed", "it untouched")


def load_is_in_place(cls: type[Experts], device: torch.device) -> None:
    """`load_` writes into the tensors that are there, and the next result is that of the new weights."""
    batch = _one(cls, device, seed=1)
    other = _batch(batch.spec, seed=2, device=device)
    experts, received = batch.build(cls), batch.received(cls)
    _finished(cls, experts, received)  # whatever is prepared once is prepared now
    pointers = {name: tensor.data_ptr() for name, tensor in experts.named_buffers()}
    experts.load_(other.weights)
    for name, tensor in experts.named_buffers():
        expect(
            tensor.data_ptr() == pointers[name],
            f"load_ put another tensor in the place of {name}",
            "the same",
        )
    for name in ("w13", "w2"):
        fine = _means(getattr(experts.weights, name), getattr(other.weights, name))
        expect(fine, f"load_ did not take {name}", "the new weights")
    expected = other.build(cls).weights.by_name()
    for name, tensor in experts.weights.by_name().items():
        fine = same_bits(tensor, expected[name])
        expect(fine, f"load_ did not take {name}", "the new weights")
    new = replace(batch, weights=other.weights)
    over = excess(_finished(cls, experts, received), *exact(new))
    expect(over <= 0, f"after load_, {over:.3g} beyond the bound", "the result of the new weights")


def computing_repeats(cls: type[Experts], device: torch.device) -> None:
    """The same batch twice gives the same bits."""
    batch = _one(cls, device)
    experts, received = batch.build(cls), batch.received(cls)
    first, second = _finished(cls, experts, received).clone(), _finished(cls, experts, received)
    expect(same_bits(first, second), "computing twice gave two results", "the same bits")


def batches_are_independent(cls: type[Experts], device: torch.device) -> None:
    """Each batch is computed from its own rows and routes, whatever the experts computed before."""
    batch = _one(cls, device)
    experts = batch.build(cls)
    for number, rows in enumerate((_ROWS, _ROWS, _ROWS if cls.routes_itself else 5, _ROWS)):
        other = _batch(batch.spec, rows, seed=20 + number, device=device)
        # Experts that route by themselves have a router that answers with the routes of the first batch.
        here = replace(batch, x_RH=other.x_RH, routes=batch.routes if cls.routes_itself else other.routes)
        rows_RH, told = (
            _finished(cls, experts, here.received(cls)),
            f"in batch {number + 1} of the same experts",
        )
        _expect_bound(rows_RH, here, told, "its own rows and routes")


def objects_are_independent(cls: type[Experts], device: torch.device) -> None:
    """Two layers of one spec have weights of their own, also when they compute in turns."""
    first, second = (_batch(_one(cls, device).spec, seed=seed, device=device) for seed in (31, 32))
    built = [(batch, batch.build(cls)) for batch in (first, second)]
    for batch, experts in built * 2:
        rows_RH = _finished(cls, experts, batch.received(cls))
        _expect_bound(rows_RH, batch, "beside others with other weights", "the result of the own weights")


def results_are_kept(cls: type[Experts], device: torch.device) -> None:
    """A result is not written again by later calls, of these experts or of others: two dispatches may be in flight."""
    batch = _one(cls, device)
    later = _batch(batch.spec, seed=41, device=device)
    for finalize in (True, False) if cls.finalizes else (False,):
        for experts, told in ((batch.build(cls), "the same experts"), (later.build(cls), "other experts")):
            first = batch.build(cls) if told == "other experts" else experts
            result = first(batch.received(cls), finalize=finalize)
            tensors = _tensors(result)
            before = [tensor.clone() for tensor in tensors]
            experts(replace(later, routes=batch.routes).received(cls), finalize=finalize)
            fine = all(map(same_bits, tensors, before))
            expect(
                fine,
                f"a result was changed by a later call of {told}",
                "memory of its own, until it is combined",
            )


def _tensors(result: object) -> list[Tensor]:
    """All that a result holds."""
    return [value for value in vars(result).values() if isinstance(value, Tensor)]


def formats_as_declared(cls: type[Experts], device: torch.device) -> None:
    """Every format in `weight_formats` is one that some layer is supported with."""
    for name in cls.weight_formats:
        if name not in WEIGHT_FORMATS:
            raise Finding(
                f"`weight_formats` has {name!r}", f"formats of weights: {', '.join(WEIGHT_FORMATS)}"
            )
        reasons = [cls.supports(spec) for spec in _specs_of(name)]
        if None not in reasons:
            raise Finding(
                f"`weight_formats` has {name!r}, and `supports` refused {len(reasons)} layers with it, the last "
                f"with: {reasons[-1]}",
                "a declared format to be supported",
            )


def _specs_of(weights: str) -> Iterator[ExpertsSpec]:
    """Layers of every activation, with such weights, of sizes that every format can hold."""
    for formula, bias, weight_on in product(sorted(ACTIVATIONS), (False, True), ("output", "input")):
        yield ExpertsSpec(
            hidden_size=256,
            intermediate_size=128,
            num_local_experts=2,
            top_k=2,
            activation=activation(formula),
            bias=bias,
            weights=weights,
            dtype=_dtype(weights),
            weight_on=weight_on,  # type: ignore[arg-type]
        )


def _told(spec: ExpertsSpec) -> str:
    """How a finding names a spec."""
    return (
        f"H {spec.hidden_size}, I {spec.intermediate_size}, L {spec.num_local_experts}, K {spec.top_k}, "
        f"{spec.activation.name}, {spec.weights} weights, bias {spec.bias}, weight on {spec.weight_on}, "
        f"{spec.inner or EXACT} between the products"
    )
