"""What experts can be given, times what data can be; and what they declare, held against what happens.

The checks beside those of `experts_suite`, of the same form: each takes a class and a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.conformance import experts_bound as bound
from tokenyard.conformance.batch_data import DATA, DataKind, large
from tokenyard.conformance.cases import excess, same_numbers
from tokenyard.conformance.experts_bound import ExpertsBatch, draw_batch, draw_batches, expect_bound
from tokenyard.conformance.runner import expect, expect_same
from tokenyard.duties import Duty, Ledger
from tokenyard.errors import InputError
from tokenyard.experts import Experts, ExpertsSpec, ExpertWeights, activation
from tokenyard.formats import WEIGHT_FORMATS, Fp8Block128, QuantizedMatrix
from tokenyard.rows import CombineBuffer, ExpertRows, LocalRoutes, PlacedRows, UnfinalizedRows

NUMBERS = {**DATA, "large numbers": DataKind(rows=large)}
_MOST_ROWS = 65  # one more than a tile has


def _with(batch: ExpertsBatch, kind: DataKind, seed: int) -> ExpertsBatch:
    """A batch with a kind of data."""
    routes = batch.routes
    x_RH, ids_RK, weights_RK = kind.change(batch.x_RH, routes.ids_RK, routes.weights_RK, seed)
    return replace(batch, x_RH=x_RH, routes=LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK))


def _invariant_specs(cls: type[Experts], device: torch.device) -> Iterator[ExpertsSpec]:
    """Supported specs whose rows must have the same bits in every batch: of each format of weights."""
    if device.type not in cls.batch_invariant:
        return
    for weights in cls.weight_formats:
        for drawn in bound.draw_specs(cls, seed=5, count=60):
            spec = replace(drawn, batch_invariant=True)
            if spec.weights == weights and spec.hidden_size > 8 and cls.supports(spec) is None:
                yield spec
                break


# -- The checks ----------------------------------------------------------------------------------------------


def all_data_within_the_bound(cls: type[Experts], device: torch.device) -> None:
    """Rows, weights and routes of every kind of data give results within the bound; NaN gives NaN."""
    drawn = list(draw_batches(cls, device, seed=3, count=12))
    for number, (name, kind) in enumerate(NUMBERS.items()):
        batch = _with(drawn[number % len(drawn)], kind, number)
        rows_RH, (exact_RH, bound_RH) = batch.result(cls), bound.exact(batch)
        where = f"for {bound.in_words(batch.spec)}, and rows with {name}"
        lost = exact_RH.isnan() & ~rows_RH.isnan() & batch.x_RH.isnan().any(dim=1, keepdim=True)
        expect(not bool(lost.any()), f"NaN became a number {where}", "NaN")
        known = exact_RH.isfinite() & bound_RH.isfinite()
        if not kind.is_bounded:  # products of huge numbers may be Inf in float32
            known &= batch.x_RH.isfinite().all(dim=1, keepdim=True)
            known &= (batch.x_RH.abs() < 2.0**40).all(dim=1, keepdim=True)
        over = excess(rows_RH[known], exact_RH[known], bound_RH[known])
        expect(over <= 0, f"{over:.3g} beyond the bound {where}", "every element within it")


def every_number_of_rows(cls: type[Experts], device: torch.device) -> None:
    """Batches of every number of rows, odd ones and those at the ends of tiles, are within the bound."""
    for spec in bound.draw_specs(cls, seed=6, count=2):
        whole = draw_batch(spec, rows=_MOST_ROWS, seed=6, device=device)
        experts = whole.build(cls) if not cls.routes_itself else None
        for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 31, 33, 63, 64, _MOST_ROWS):
            batch = whole.first(rows)
            rows_RH = bound.finished_rows(experts or batch.build(cls), batch.received(cls))
            expect_bound(rows_RH, batch, f", for {rows} rows")


def many_rows_and_experts(cls: type[Experts], device: torch.device) -> None:
    """A rank may have more experts than a byte can count, and an expert more rows."""
    drawn = next(bound.draw_specs(cls, seed=8))
    spec = replace(drawn, hidden_size=16, intermediate_size=16, num_local_experts=300, top_k=2)
    if cls.supports(spec) is not None:
        return
    batch = draw_batch(spec, rows=600, seed=8, device=device)
    batch.routes.ids_RK[:, 0] = 299  # all rows have it
    expect_bound(batch.result(cls), batch, ", for 600 rows and 300 experts")


def moved_weights_are_used(cls: type[Experts], device: torch.device) -> None:
    """Weights that `movable()` gives may be written at any time, as a rebalance does: the next result is theirs."""
    if cls.routes_itself:
        return
    for seed, batch in enumerate(draw_batches(cls, device, seed=9, count=4)):
        other = draw_batch(batch.spec, seed=seed + 100, device=device)
        experts, received = batch.build(cls), batch.received(cls)
        bound.finished_rows(experts, received)  # what is prepared once is prepared now
        try:
            tensors, new = experts.movable(), other.build(cls).movable()
        except InputError:
            return  # it says that its experts do not move
        for name, tensor in tensors.items():
            tensor.copy_(new[name])
        moved, rows_RH = replace(batch, weights=other.weights), bound.finished_rows(experts, received)
        expect_bound(rows_RH, moved, ", after experts have moved", "the result of the weights that came")


def invariant_as_declared(cls: type[Experts], device: torch.device) -> None:
    """With `batch_invariant` the bits of a row are the same alone, and at any place of any batch."""
    for seed, spec in enumerate(_invariant_specs(cls, device)):
        batch = draw_batch(spec, rows=_MOST_ROWS, seed=seed, device=device)
        batch.routes.ids_RK[:, 0] = torch.arange(_MOST_ROWS) % spec.num_local_experts
        experts = batch.build(cls)
        whole_RKH, words = _choices(experts, cls, batch), bound.in_words(spec)
        for chosen in ([3], [64], [3, 4], list(range(17)), list(reversed(range(64))), [3] * 9 + [5] * 40):
            found_RKH = _choices(experts, cls, batch.with_rows(torch.tensor(chosen)))
            found = f"`batch_invariant`: rows have other bits in a batch of {len(chosen)} for {words}"
            expected = "the same bits in every batch, as declared"
            expect_same(found_RKH, whole_RKH[chosen], found, expected, same_numbers)


def _choices(experts: Experts, cls: type[Experts], batch: ExpertsBatch) -> Tensor:
    """The weighted result of every choice, `[R, K, H]`; zeros where a choice is -1."""
    result = experts(batch.received(cls), finalize=False)
    assert isinstance(result, UnfinalizedRows)
    rows_NH = result.weighted().rows_NH.cpu()
    there_RK = batch.routes.ids_RK >= 0
    found_RKH = torch.zeros(*there_RK.shape, rows_NH.shape[1], dtype=rows_NH.dtype)
    found_RKH[there_RK] = rows_NH
    return found_RKH


def strides_as_declared(cls: type[Experts], device: torch.device) -> None:
    """Adopted weights of any strides give the result of their copies, which the experts may make."""
    for batch in draw_batches(cls, device, seed=11, count=4):
        given = batch.weights
        matrices: dict[str, Any] = {}
        for name in ("w13", "w2"):
            matrix = getattr(given, name)
            if isinstance(matrix, QuantizedMatrix):
                payloads = {key: _strided(payload) for key, payload in matrix.payloads.items()}
                matrices[name] = replace(matrix, payloads=payloads)
            else:
                matrices[name] = _strided(matrix)
        strided = replace(batch, weights=replace(given, **matrices))
        rows_RH, expected = strided.result(cls, adopt=True), "the result of their copies"
        expect_bound(rows_RH, batch, ", with adopted weights with strides", expected)


def _strided(tensor: Tensor) -> Tensor:
    """The same numbers, with columns that do not lie beside each other."""
    as_bytes = tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor
    return torch.stack([as_bytes, as_bytes], dim=-1)[..., 0].view(tensor.dtype)


def rows_in_slots(cls: type[Experts], device: torch.device) -> None:
    """Rows may lie in any slots of a larger buffer; results go into the exchange's buffer where that is declared."""
    for batch in draw_batches(cls, device, seed=12, count=4):
        experts, received = batch.build(cls), batch.received(cls)
        due_RH, count = bound.finished_rows(experts, received), received.num_rows
        slots_R = (torch.arange(count) * 7 % (2 * count + 3)).to(device)
        rows = received.rows
        payloads = {}
        for name, payload in rows.payloads.items():
            buffer = torch.full((2 * count + 3, payload.shape[1]), 0, dtype=payload.dtype, device=device)
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
            buffer[slots_R] = payload
            payloads[name] = buffer
        in_slots = replace(received, rows=replace(rows, payloads=payloads), slots_R=slots_R)
        found_RH, alone = bound.finished_rows(experts, in_slots), "those of the rows alone"
        expect_same(found_RH, due_RH, "rows in slots gave other bits", alone, same_numbers)
        if cls.places_results:
            rows_SH = torch.full((2 * count + 3, batch.spec.hidden_size), torch.nan, device=device)
            place = CombineBuffer(rows_SH=rows_SH, slots_R=slots_R)
            placed = experts(replace(in_slots, results=place, place=place), finalize=True)
            expect(isinstance(placed, PlacedRows), f"it returned {type(placed).__name__}", "PlacedRows")
            placed_RH, found = rows_SH[slots_R].cpu(), "results that were placed have other bits"
            expect_same(placed_RH, due_RH.float(), found, "those that are returned elsewhere", same_numbers)
            rows_SH[slots_R] = torch.nan
            expect(bool(rows_SH.isnan().all()), "a slot without a row was written", "only those of rows")


def duties_as_declared(cls: type[Experts], device: torch.device) -> None:
    """With `counts_duties`, `compute` records each weighting and each sum that it does, once."""
    if not cls.counts_duties:
        return
    batch = bound.supported_batch(cls, device)
    experts, received, pairs = batch.build(cls), batch.received(cls), int((batch.routes.ids_RK >= 0).sum())
    for finalize in (True, False) if cls.finalizes else (False,):
        with Ledger().open() as ledger:
            experts(received, finalize=finalize)
        for duty in (Duty.WEIGHT, Duty.REDUCE_EXPERTS):
            early = duty is Duty.WEIGHT and batch.spec.weight_on == "input"
            due = pairs if finalize or early else 0
            rows = sum(ledger.rows(duty).values())
            expect(rows == due, f"duty {duty.value!r} was recorded for {rows} rows", f"{due}, as it was done")


def nothing_global_is_changed(cls: type[Experts], device: torch.device) -> None:
    """Computing draws no random numbers, and changes neither torch's threads nor its defaults."""
    batch = bound.supported_batch(cls, device)
    experts, received = batch.build(cls), batch.received(cls)

    def state() -> tuple[object, ...]:
        modes = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads())
        return (*modes, tuple(torch.get_rng_state().tolist()))

    before = state()
    bound.finished_rows(experts, received)
    expect(state() == before, "computing changed a setting of torch, or drew random numbers", "nothing")


def results_have_their_dtype(cls: type[Experts], device: torch.device) -> None:
    """Finished rows are float32, or of the dtype of the weights, whatever the batch: also of none, or of one row."""
    for whole in draw_batches(cls, device, seed=13, count=6):
        allowed = {torch.float32, bound.row_dtype(whole.spec.weights)}
        for rows in (0, 1, 2, 17):
            batch = whole.first(rows)
            result = batch.build(cls)(batch.received(cls), finalize=cls.finalizes)
            if isinstance(result, ExpertRows) and rows:
                dtype, words = result.rows_RH.dtype, bound.in_words(batch.spec)
                expect(dtype in allowed, f"{rows} finished rows are {dtype} for {words}", f"one of {allowed}")


def every_format_within_the_bound(cls: type[Experts], device: torch.device) -> None:
    """Weights of each declared format give results within the bound, whatever the signs of routing weights."""
    for weights in cls.weight_formats:
        bound.expect_weight_format(weights)
        specs = [spec for spec in bound.draw_specs(cls, seed=14, count=60) if spec.weights == weights]
        for seed, spec in enumerate(specs[:3]):
            batch = _with(draw_batch(spec, seed=seed, device=device), DATA["negative and zero weights"], seed)
            expect_bound(batch.result(cls), batch)


def inner_format_as_declared(cls: type[Experts], device: torch.device) -> None:
    """Between the products, numbers share a scale with those of their own block, and with no others.

    Beside large numbers of their block, tiny ones become zero; in a block of their own they stay. Blocks of another
    size may be nearer to the exact result; they are not what the model was trained or evaluated with.
    """
    for weights in cls.weight_formats:
        held = WEIGHT_FORMATS[weights].inner_formats if weights in WEIGHT_FORMATS else ()
        for name in set(held) & set(cls.inner_formats):
            inner = formats.get(name)
            assert isinstance(inner, Fp8Block128), inner
            batch = _large_beside_tiny(weights, inner, device)
            if cls.supports(batch.spec) is not None:
                continue
            found = batch.result(cls)[0, :3].tolist()
            due = [0.0, inner.block * _TINY * _SILU_OF_4, inner.block / 2 * _SILU_OF_4]
            for sum_, meant, what in zip(found, due, _SUMS, strict=True):
                expect(
                    abs(sum_ - meant) <= 0.2 * meant,
                    f"{what} come to {sum_:.3g} with {weights} weights and {name} between the products",
                    f"{meant:.3g}: a scale for each {inner.block} numbers",
                )


_TINY = 2.0**-20  # of a large number: below half of the smallest step of e4m3 beside it, 2^-9 / 448
_SILU_OF_4 = 3.928
_SUMS = ("tiny numbers in a block with large ones", "tiny numbers in a block of their own", "large numbers")


def _large_beside_tiny(weights: str, inner: Fp8Block128, device: torch.device) -> ExpertsBatch:
    """A row whose activation has 64 large numbers and 64 tiny ones in its first block, and tiny ones in its second."""
    size, half = 2 * inner.block, inner.block // 2
    spec = ExpertsSpec(
        hidden_size=128,
        intermediate_size=size,
        num_local_experts=1,
        top_k=1,
        activation=activation("swiglu"),
        weights=weights,
        dtype=bound.row_dtype(weights),
        inner=inner,
    )
    gate, up, w2 = torch.zeros(size, 128), torch.zeros(size, 128), torch.zeros(128, size)
    gate[:, 0] = 1.0
    up[:half, 1], up[half:, 2] = 1.0, 1.0
    w2[0, half : 2 * half], w2[1, 2 * half :], w2[2, :half] = 1.0, 1.0, 1.0
    x_RH = torch.zeros(1, 128)
    x_RH[0, :3] = torch.tensor([4.0, 1.0, _TINY])
    plain = ExpertWeights(w13=torch.cat([gate, up]).unsqueeze(0), w2=w2.unsqueeze(0))
    return ExpertsBatch(
        spec=spec,
        weights=plain.decode(bound.row_dtype(weights)).quantize(weights),
        x_RH=x_RH.to(bound.row_dtype(weights)),
        routes=LocalRoutes(ids_RK=torch.zeros(1, 1, dtype=torch.int32), weights_RK=torch.ones(1, 1)),
        device=device,
    )
