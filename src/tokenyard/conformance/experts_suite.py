"""Checks of a class of experts: the type and values of its results, and that it changes none of its inputs.

Each check takes a class, also one from outside of this package, and runs it on specs that its `supports` accepts, with
rows on a device. Results must be within the bound of `experts_bound` around the float64 ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.conformance import experts_bound as bound
from tokenyard.conformance.cases import same_bits
from tokenyard.conformance.experts_bound import ROWS, draw_batch, expect_bound, finished_rows, supported_batch
from tokenyard.conformance.runner import expect, expect_same, unchanged
from tokenyard.experts import ACTIVATIONS, Experts, ExpertsSpec, ExpertWeights, activation
from tokenyard.formats import QuantizedMatrix
from tokenyard.rows import ExpertRows, LocalRoutes, UnfinalizedRows, describe

_ALL_BUT = 2.0**-12  # of the norm of a row of weights: far below the rounding of any product
# Formats whose decoded numbers every 16-bit dtype can hold, so that decoding them is exact.
_EXACT_CODES = ("mxfp8", "nvfp4(global_scale=8.0)", "fp8_block128(power_of_two_scales=True)")


# -- The checks ----------------------------------------------------------------------------------------------


def one_type_returned(cls: type[Experts], device: torch.device) -> None:
    """`compute` returns `ExpertRows` if it finalizes, else `UnfinalizedRows`; never a tensor, a tuple or nothing."""
    batch = supported_batch(cls, device)
    experts, received = batch.build(cls), batch.received(cls)
    for finalize in (True, False) if cls.finalizes else (False,):
        result: object = experts.compute(received, finalize=finalize)
        kind = ExpertRows if finalize else UnfinalizedRows
        found = f"compute(finalize={finalize}) returned {describe(result)}"
        expect(isinstance(result, kind), found, kind.__name__)
    rows_RH, shape = finished_rows(experts, received), [ROWS, batch.spec.hidden_size]
    fine = list(rows_RH.shape) == shape and rows_RH.is_floating_point()
    expected = f"a floating-point tensor {shape}: a row for every received row"
    expect(fine, f"the finished rows are {describe(rows_RH)}", expected)


def finalizing_agrees(cls: type[Experts], device: torch.device) -> None:
    """Rows that the experts finalize are bitwise those that the receiver finishes."""
    if not cls.finalizes:
        return
    for batch in bound.draw_batches(cls, device, count=12):
        experts, received = batch.build(cls), batch.received(cls)
        finalized, unfinalized = experts(received, finalize=True), experts(received, finalize=False)
        assert isinstance(finalized, ExpertRows)
        assert isinstance(unfinalized, UnfinalizedRows)
        found = f"finalize=True and finalize=False differ for {bound.in_words(batch.spec)}"
        expect_same(finalized.rows_RH.float(), unfinalized.finish().rows_RH.float(), found)


def within_the_bound(cls: type[Experts], device: torch.device) -> None:
    """For every supported spec the result is within the bound around the float64 one: weighted once, summed once."""
    for batch in bound.draw_batches(cls, device):
        expect_bound(batch.result(cls), batch)


def rows_are_quantized_once(cls: type[Experts], device: torch.device) -> None:
    """Rows that arrive quantized are taken as they are; plain rows are quantized where the spec asks for it."""
    for number, drawn in enumerate(bound.draw_batches(cls, device, count=12)):
        name = _EXACT_CODES[number % len(_EXACT_CODES)]
        code = formats.get(name)
        for wire, rows in ((code, None), (code, code), (None, code)):
            batch = replace(drawn, spec=replace(drawn.spec, rows=rows), wire=wire)
            if cls.supports(batch.spec) is None:
                given = replace(batch, x_RH=code.encode(batch.x_RH).decode(torch.float32))
                how = f", rows that arrive {'plain' if wire is None else f'in {name}'}, and experts that compute "
                how += "on what arrives" if rows is None else f"on {name}"
                expect_bound(batch.result(cls), given, how, "rows that are quantized once")


def rows_for_nobody_are_zero(cls: type[Experts], device: torch.device) -> None:
    """A row none of whose experts live here is zero, even where it or its weight holds NaN."""
    batch = supported_batch(cls, device)
    ids_RK, weights_RK = batch.routes.ids_RK.clone(), batch.routes.weights_RK.clone()
    ids_RK[3], ids_RK[9] = -1, -1
    x_RH = batch.x_RH.clone()
    x_RH[3] = float("nan")
    weights_RK[ids_RK < 0] = float("nan")  # not used there
    rows_RH = replace(batch, x_RH=x_RH, routes=LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)).result(cls)
    for row in (3, 9):
        found = f"row {row}, for no expert, is {rows_RH[row, :4].tolist()}"
        expect(not bool(rows_RH[row].any()), found, "zeros")
    expect(
        bool(torch.isfinite(rows_RH).all()), "NaN of a row for no expert reached another row", "finite rows"
    )


def nan_stays_in_its_row(cls: type[Experts], device: torch.device) -> None:
    """NaN in one row does not reach another row, and is not lost in its own, whatever the activation."""
    drawn = supported_batch(cls, device).spec
    for formula in ACTIVATIONS.values():
        spec = replace(drawn, activation=formula)
        if cls.supports(spec) is not None:
            continue
        batch = draw_batch(spec, device=device)
        batch.routes.ids_RK[:, 0] = 0  # all rows share an expert
        batch.x_RH[5] = float("nan")
        rows_RH, others = batch.result(cls), [row for row in range(ROWS) if row != 5]
        where = f"with {formula.name}"
        fine = bool(torch.isfinite(rows_RH[others]).all())
        expect(fine, f"NaN of row 5 reached another row {where}", "row 5 alone")
        expect(bool(rows_RH[5].isnan().all()), f"a row of NaN gave numbers {where}", "NaN")


def duplicate_choices_count_twice(cls: type[Experts], device: torch.device) -> None:
    """An expert that a row names twice counts twice, with both weights."""
    batch = supported_batch(cls, device, least_k=2)
    ids_RK = batch.routes.ids_RK[:, :1].clamp(min=0).expand(-1, batch.spec.top_k).contiguous()
    batch = replace(batch, routes=replace(batch.routes, ids_RK=ids_RK))
    expect_bound(batch.result(cls), batch, ", where all choices name one expert", "both to count")


def empty_batches(cls: type[Experts], device: torch.device) -> None:
    """No rows give no rows; rows that no expert takes give zeros, also on a rank that owns no experts."""
    batch = supported_batch(cls, device, rows=0)
    shape = tuple(batch.result(cls).shape)
    expect(shape == (0, batch.spec.hidden_size), f"no rows gave {list(shape)}", [0, batch.spec.hidden_size])
    batch = supported_batch(cls, device)
    batch.routes.ids_RK.fill_(-1)
    expect(not bool(batch.result(cls).any()), "a batch for no expert gave something", "zeros")
    spec = replace(batch.spec, num_local_experts=0, num_experts=batch.spec.num_local_experts)
    if cls.supports(spec) is None:
        for rows in (0, ROWS):
            batch = draw_batch(spec, rows, device=device)
            batch.routes.ids_RK.fill_(-1)
            expect(not bool(batch.result(cls).any()), "a rank without experts gave something", "zeros")


def _means(held: Tensor | QuantizedMatrix, given: Tensor | QuantizedMatrix) -> bool:
    """Whether experts hold the weights that they were given: bit for bit, or within `_ALL_BUT` if they recode them."""
    if isinstance(held, Tensor) or isinstance(given, Tensor):
        return isinstance(held, Tensor) and isinstance(given, Tensor) and same_bits(held.cpu(), given.cpu())
    exact, found = (matrix.decode(torch.float64).cpu() for matrix in (given, held))
    return bool(((found - exact).norm(dim=-1) <= _ALL_BUT * exact.norm(dim=-1)).all())


def _expect_weights(experts: Experts, given: ExpertWeights, found: str, expected: str) -> None:
    """Raise a finding unless experts hold the matrices that they were given."""
    for name in ("w13", "w2"):
        fine = _means(getattr(experts.weights, name), getattr(given, name))
        expect(fine, f"{found} {name}", expected)


def nothing_is_changed(cls: type[Experts], device: torch.device) -> None:
    """Neither rows, nor routes, nor weights are changed by computing, adopted weights included."""
    batch = supported_batch(cls, device)
    routes = batch.routes_there()
    received = batch.received(cls, routes)
    given = {
        "x_RH": received.rows.payloads["data"],
        "ids_RK": routes.ids_RK,
        "weights_RK": routes.weights_RK,
        **batch.weights.by_name(),
    }
    with unchanged(given):
        experts = batch.build(cls, adopt=True)
        _expect_weights(
            experts, batch.weights, "the experts do not hold what they were given as", "it untouched"
        )
        own = {f"the experts' own {name}": tensor for name, tensor in experts.weights.by_name().items()}
        with unchanged(own):
            for finalize in (True, False) if cls.finalizes else (False,):
                experts(received, finalize=finalize)


def load_is_in_place(cls: type[Experts], device: torch.device) -> None:
    """`load_` writes into the tensors that are there, and the next result is that of the new weights."""
    batch = supported_batch(cls, device, seed=1)
    other = draw_batch(batch.spec, seed=2, device=device)
    experts, received = batch.build(cls), batch.received(cls)
    finished_rows(experts, received)  # so that what is prepared only once is prepared before `load_`
    pointers = {name: tensor.data_ptr() for name, tensor in experts.named_buffers()}
    experts.load_(other.weights)
    for name, tensor in experts.named_buffers():
        stays = tensor.data_ptr() == pointers[name]
        expect(stays, f"load_ put another tensor in the place of {name}", "the same")
    _expect_weights(experts, other.weights, "load_ did not take", "the new weights")
    due = other.build(cls).weights.by_name()
    for name, tensor in experts.weights.by_name().items():
        expect_same(tensor, due[name], f"load_ did not take {name}", "the new weights")
    new = replace(batch, weights=other.weights)
    expect_bound(finished_rows(experts, received), new, ", after load_", "the result of the new weights")


def computing_repeats(cls: type[Experts], device: torch.device) -> None:
    """The same batch twice gives the same bits."""
    batch = supported_batch(cls, device)
    experts, received = batch.build(cls), batch.received(cls)
    first, second = finished_rows(experts, received).clone(), finished_rows(experts, received)
    expect_same(first, second, "computing twice gave two results")


def batches_are_independent(cls: type[Experts], device: torch.device) -> None:
    """Each batch is computed from its own rows and routes, whatever the experts computed before."""
    batch = supported_batch(cls, device)
    experts = batch.build(cls)
    for number, rows in enumerate((ROWS, ROWS, ROWS if cls.routes_itself else 5, ROWS)):
        other = draw_batch(batch.spec, rows, seed=20 + number, device=device)
        # Experts that route by themselves have a router that answers with the routes of the first batch.
        here = replace(batch, x_RH=other.x_RH, routes=batch.routes if cls.routes_itself else other.routes)
        rows_RH, where = (
            finished_rows(experts, here.received(cls)),
            f", in batch {number + 1} of the same experts",
        )
        expect_bound(rows_RH, here, where, "its own rows and routes")


def objects_are_independent(cls: type[Experts], device: torch.device) -> None:
    """Two layers of one spec have weights of their own, also when they compute in turns."""
    spec = supported_batch(cls, device).spec
    built = [
        (batch, batch.build(cls)) for batch in (draw_batch(spec, ROWS, seed, device) for seed in (31, 32))
    ]
    for batch, experts in built * 2:
        rows_RH = finished_rows(experts, batch.received(cls))
        expect_bound(rows_RH, batch, ", beside others with other weights", "the result of the own weights")


def results_are_kept(cls: type[Experts], device: torch.device) -> None:
    """A result is not overwritten by later calls of these or other experts: two dispatches may be in flight."""
    batch = supported_batch(cls, device)
    later = draw_batch(batch.spec, seed=41, device=device)
    for finalize in (True, False) if cls.finalizes else (False,):
        for experts, caller in ((batch.build(cls), "the same experts"), (later.build(cls), "other experts")):
            first = batch.build(cls) if caller == "other experts" else experts
            result = first(batch.received(cls), finalize=finalize)
            kept = {
                f"`{name}` of a result": one for name, one in vars(result).items() if isinstance(one, Tensor)
            }
            with unchanged(kept, f" by a later call of {caller}", "memory of its own, until it is combined"):
                experts(replace(later, routes=batch.routes).received(cls), finalize=finalize)


def formats_as_declared(cls: type[Experts], device: torch.device) -> None:
    """For every format in `weight_formats` some layer is supported."""
    for name in cls.weight_formats:
        bound.expect_weight_format(name)
        reasons = [cls.supports(spec) for spec in _specs_of(name)]
        found = f"`weight_formats` has {name!r}, and `supports` refused {len(reasons)} layers with it, the last with: "
        expect(None in reasons, f"{found}{reasons[-1]}", "a declared format to be supported")


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
            dtype=bound.row_dtype(weights),
            weight_on=weight_on,  # type: ignore[arg-type]
        )
