"""What is seen only after thousands of rounds, or many plans: a counter that is too narrow, memory that is kept."""

from __future__ import annotations

import dataclasses
import gc

import torch

from tokenyard.conformance.exchange_layers import CheckedLayers, echo, echo_due
from tokenyard.conformance.exchange_suite import Trial, layer
from tokenyard.conformance.runner import expect
from tokenyard.group import Group

# Rounds of `thousands_of_rounds`: more than 12 bits can count.
ROUNDS = 4200
_LONG = 300.0  # seconds that the other ranks wait for those two which make the rounds
# Plans and rounds of the checks of memory, and bytes that all of them may keep: less than one row of each.
_MANY_PLANS, _MANY_ROUNDS, _KEPT = 5, 30, 100_000


def thousands_of_rounds(trial: Trial) -> None:
    """A plan of two ranks, or of one, gives right results in more rounds than 12 bits can count."""
    group, pair = trial.group, sorted({0, trial.group.size - 1})  # on two hosts, if there are several
    if group.rank in pair:
        spec = layer(hidden_size=8, num_experts=2, top_k=1, max_tokens=1, payloads=(), dtype=torch.float32)
        made = dataclasses.replace(trial, group=group.subgroup(pair)).plan(spec)
        wiring, mine = made.wiring("moe"), trial.batch(spec, 1)
        rows, due_TH = wiring.wire.encode(mine.x_TH), echo_due(made, spec, mine)
        for number in range(1, min(ROUNDS, trial.rounds or ROUNDS) + 1):
            flight = made.exchange.dispatch(wiring.exchange_spec, rows, mine.routes)
            y_TH = flight.combine(echo(flight.received)).y_TH.cpu()
            found = f"round {number} gave {y_TH.tolist()}"
            expect(torch.equal(y_TH, due_TH), found, f"{due_TH.tolist()}, as in the rounds before")
            expect(
                flight.arrival.round == number,
                f"dispatch {number} has the round {flight.arrival.round}",
                number,
            )
    with group.patience(_LONG):
        group.barrier()


def plans_leave_nothing(trial: Trial) -> None:
    """Plans that were closed keep no tensor alive, whatever memory it is in."""

    def make(count: int) -> int:
        for _ in range(count):
            stack = CheckedLayers(dataclasses.replace(trial, plans=[]), (layer(hidden_size=600),))
            stack.check("moe", "in a new plan", tokens=16)
            trial.group.barrier()  # no rank closes while another one still combines
            stack.plan.close()
        return _live_bytes(trial.group)

    more = -make(1) + make(_MANY_PLANS)
    expect(more <= _KEPT, f"{_MANY_PLANS} closed plans keep {more:,} bytes of tensors", "nothing")


def rounds_leave_nothing(trial: Trial) -> None:
    """Rounds keep no tensor alive: what a plan needs, it has after the first rounds."""
    stack = CheckedLayers(trial, (layer(hidden_size=600),))

    def run(count: int) -> int:
        for _ in range(count):
            stack.check("moe", "in a round of many", tokens=16)
        return _live_bytes(trial.group)

    more = -run(3) + run(_MANY_ROUNDS)
    expect(more <= _KEPT, f"{_MANY_ROUNDS} rounds keep {more:,} bytes of tensors", "nothing")


def _live_bytes(group: Group) -> int:
    """The bytes of all tensors of this process that are alive while all ranks of the group wait."""
    group.barrier()
    gc.collect()
    group.barrier()  # of ranks that are threads one collects at a time, and the others return from `collect` at once
    storages = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and (address := _address(one)):
            storages[address] = one.untyped_storage().nbytes()
    group.barrier()
    return sum(storages.values())


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none, as those of compilers."""
    try:
        return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # it has no device, or no memory
        return 0
