"""What a user can do with the layers of a plan, times what data can be: every result has the bits of the twin.

Each check is a use: calls, batches that are started and finished, layers whose experts have moved, and so on. It sends
every kind of data (`batch_data.DATA`) through layers of several formats. Layers take turns, so that each kind of data
meets each layer in some of the uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import on_two_ranks
from tokenyard.conformance.exchange_layers import CheckedLayers, check_same, failing, must_raise
from tokenyard.conformance.exchange_suite import WIRES, Batch, Trial, check_movement, layer
from tokenyard.conformance.runner import expect
from tokenyard.errors import InputError, PeerFailed, PlanError
from tokenyard.layer.pending import PendingBatch
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement

# In float32 nothing is hidden by a rounding; the others have a scale per block, and results that are rounded twice.
LAYERS = (
    layer("exact", dtype=torch.float32, hidden_size=33, payloads=(), max_tokens=9),
    layer("blocks", wire="mxfp8", combine_wire="fp8_block128", hidden_size=40, payloads=(), max_tokens=9),
    layer("half", dtype=torch.float16, wire="nvfp4", combine_wire="bf16", hidden_size=48, max_tokens=9),
)
# Runs batches through a layer, and returns their results; the number says how often this use was made before.
Use = Callable[[CheckedLayers, str, Sequence[Batch], int], list[Tensor]]


def _check(
    trial: Trial,
    use: Use,
    words: str,
    layers: Sequence[LayerSpec] = LAYERS,
    *,
    batches: int = 1,
    **options: Any,
) -> None:
    """Send batches of each kind of data through a layer of a plan in this use, and compare all results."""
    stack = CheckedLayers(trial, layers, **options)
    first = sum(map(ord, words))  # another layer for each use
    for number, kind in enumerate(DATA):
        name = layers[(first + number) % len(layers)].name
        some = [stack.batch(name, kind=kind) for _ in range(batches)]
        for mine, y_TH in zip(some, use(stack, name, some, number), strict=True):
            check_same(y_TH, stack.due(name, mine), f"layer {name!r} {words}, of a batch with {kind},")


def _changed(**changes: Any) -> list[LayerSpec]:
    return [dataclasses.replace(spec, **changes) for spec in LAYERS]


def _call(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
    return [stack.run(name, mine) for mine in batches]


def _start(stack: CheckedLayers, name: str, mine: Batch) -> PendingBatch:
    return stack.layers[name].start(mine.x_TH, mine.routes, payloads=mine.extra)


# -- The checks ----------------------------------------------------------------------------------------------


def all_data_moves(trial: Trial) -> None:
    """Rows of every kind of data arrive bit for bit, with their ids and weights, in every format."""
    specs = [layer(f"in {wire}", wire=wire) for wire in WIRES]
    made = trial.plan(*specs)
    for number, kind in enumerate(DATA):
        for spec in (specs[0], specs[1 + number % (len(specs) - 1)]):  # plain rows, and rows with scales
            check_movement(trial, spec, tokens=(None,), kind=kind, made=made)


def all_data_in_calls(trial: Trial) -> None:
    """Calls give right results for every kind of data, also in inference mode."""

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        with torch.inference_mode(number % 3 == 2):
            return [stack.run(name, mine).clone() for mine in batches]

    _check(trial, use, "called", batches=2)


def all_data_started(trial: Trial) -> None:
    """Batches that are started and finished give right results; the caller may overwrite its rows in between."""

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        (mine,) = batches
        x_TH = mine.x_TH.clone(memory_format=torch.preserve_format)
        pending = _start(stack, name, dataclasses.replace(mine, x_TH=x_TH))
        x_TH.fill_(7.0)
        if number % 2:
            pending.compute()
        return [pending.finish()]

    _check(trial, use, "started and finished")


def all_data_in_flight(trial: Trial) -> None:
    """Two batches in flight, of a plan that was made for two, give right results."""

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        pending = [_start(stack, name, mine) for mine in batches]
        if number % 2:
            pending[0].compute()
        return [one.finish() for one in pending]

    _check(trial, use, "with two batches in flight", batches=2, in_flight=2)


def all_data_by_choices(trial: Trial) -> None:
    """Layers whose choices the source rank sums (`sum="choices"`) give right results, or a plan refuses them."""
    layers = _changed(sum="choices")
    if not trial.exchange.returns_choices:
        must_raise(PlanError, trial.plan, *layers, when='a layer with sum="choices"')
        return

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        if number % 2:
            return [_start(stack, name, mine).finish() for mine in batches]
        return _call(stack, name, batches, number)

    _check(trial, use, 'with sum="choices"', layers)


def all_data_after_moves(trial: Trial) -> None:
    """Layers whose experts have moved to other ranks (`plan.rebalance`), several times, give right results."""
    world = trial.group.size
    tables = [
        Placement.explicit(6, [[e for e in range(6) if (e + shift) % world == rank] for rank in range(world)])
        for shift in range(world)
    ]

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        if number % 4 == 0:
            stack.plan.rebalance(dict.fromkeys(stack.layers, tables[(1 + number // 4) % world]))
        return _call(stack, name, batches, number)

    _check(trial, use, "after its experts have moved", _changed(spare_experts=6, placement=tables[0]))


def all_data_while_plans_grow(trial: Trial) -> None:
    """Layers of a plan that is extended by other layers, and drops them, give right results."""

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        if number % 5 == 0:
            stack.plan.extend([layer(f"wider {number}", hidden_size=100 + number, payloads=())])
        elif number % 5 == 3:
            stack.plan.trim(keep=list(stack.layers))
        return _call(stack, name, batches, number)

    _check(trial, use, "of a plan that grows and shrinks")


def all_data_between_idle_calls(trial: Trial) -> None:
    """Calls in which some ranks, or all, have no rows change neither results that were returned nor later ones."""

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        first = stack.run(name, batches[0])
        for idle in range(4 if number % 4 == 0 else 1):
            busy = idle == 2 and trial.group.rank == 0
            stack.check(name, f"in idle call {idle + 1}", tokens=1 if busy else 0)
        return [first, stack.run(name, batches[1])]

    _check(trial, use, "before and after calls without rows", batches=2)


def all_data_after_errors(trial: Trial) -> None:
    """Calls after one that failed on one rank, in its input or in its experts, give right results."""
    last = trial.group.size - 1

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        other = stack.batch(name, kind="as many rows as may come")
        kind: type[Exception] = InputError if trial.group.rank == last else PeerFailed
        bad = other.with_ids(other.routes.topk_ids_TK + 6) if trial.group.rank == last else other
        must_raise(kind, stack.run, name, bad, when=f"ids that no expert has on rank {last}")
        results = [stack.run(name, batches[0])]
        with failing(stack.layers[name].experts, trial.group.rank == last) as kind:
            must_raise(kind, stack.run, name, other, when=f"experts that fail on rank {last}")
        return [*results, stack.run(name, batches[1])]

    _check(trial, use, "after a call that failed", batches=2)


def all_data_in_passes(trial: Trial) -> None:
    """Batches in several passes (`max_rows`) give right results, where the exchange declares `bounds_rows`."""
    if not trial.exchange.for_device(trial.group.device).bounds_rows:
        return  # `rows_bounded_as_declared` checks that a plan refuses it
    _check(trial, _call, "with a bound of the rows", max_rows=2 * trial.group.size)


def all_data_watched(trial: Trial) -> None:
    """Paranoid plans give right results, and raise no false alarm, where the exchange declares `watches`."""
    if trial.exchange.for_device(trial.group.device).watches(trial.group) is not None:
        return  # `paranoid_as_declared` checks that a plan refuses it
    _check(trial, _call, "in a plan that watches itself", paranoid=True)


def all_data_unreduced(trial: Trial) -> None:
    """Results that the caller sums over ranks are right, where the exchange does not sum inside hosts."""
    if trial.exchange.sums_in_hosts:
        return  # `unreduced_rows` checks that a plan refuses it

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        unreduced = stack.layers[name].unreduced
        return [unreduced(mine.x_TH, mine.routes, payloads=mine.extra).reduce().y_TH for mine in batches]

    _check(trial, use, "whose caller sums", _changed(reduce_ranks="caller"))


def all_data_beside_another_plan(trial: Trial) -> None:
    """Batches that are in flight while a layer of another plan runs give right results: plans share no memory."""
    other = CheckedLayers(trial, LAYERS)

    def use(stack: CheckedLayers, name: str, batches: Sequence[Batch], number: int) -> list[Tensor]:
        pending = _start(stack, name, batches[0])
        if number % 2:
            pending.compute()
        other.check(name, "while a batch of another plan is under way")
        return [pending.finish()]

    _check(trial, use, "beside another plan")


def all_data_where_calls_survive(trial: Trial) -> None:
    """Plans whose calls survive a loss (`survive=True`) give right results as long as no rank is lost."""
    world = trial.group.size
    if not trial.exchange.returns_choices:
        return
    layers = _changed(sum="choices", placement=on_two_ranks(6, world))
    _check(trial, _call, "in a plan that survives losses", layers, survive=world > 1)


def many_rows(trial: Trial) -> None:
    """A rank may send more rows than 16 bits can count, and all of them to one rank."""
    most = 66_000
    sizes: dict[str, Any] = {
        "hidden_size": 2,
        "intermediate_size": 1,
        "num_experts": trial.group.size,
        "top_k": 1,
    }
    stack = CheckedLayers(trial, (layer(**sizes, max_tokens=most, payloads=()),))
    last = trial.group.size - 1
    mine = stack.batch("moe", most if trial.group.rank == 0 else 1)
    mine = mine.with_ids(torch.full_like(mine.routes.topk_ids_TK, last))
    check_same(stack.run("moe", mine), stack.due("moe", mine), f"a batch of {most:,} rows for rank {last}")
    received = stack.plan.stats()["moe"].rows_received[0]
    due = most if trial.group.rank == last else 0
    expect(received == due, f"{received} rows were received of rank 0", due)
