"""Layers of a plan under test: every call has new rows, and its result must have the bits of the twin.

The layers compute with the reference experts, whose result for a row does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights, same_numbers
from tokenyard.conformance.exchange_suite import Batch, Trial, expect_on, send
from tokenyard.conformance.runner import Finding, expect
from tokenyard.conformance.twin import twin
from tokenyard.errors import PeerFailed
from tokenyard.exchange import RoundTrip
from tokenyard.experts import Experts, ExpertWeights
from tokenyard.formats.base import dtype_name
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import Plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.rows import ExpertRows, ReceivedRows


class CheckedLayers:
    """The layers of a plan on this rank. Each layer has other weights, also across the plans of a trial."""

    def __init__(self, trial: Trial, specs: Sequence[LayerSpec], **options: Any) -> None:
        self.trial = trial
        self.plan: Plan = trial.plan(*specs, **options)
        self.layers: dict[str, MoELayer] = {}
        self._weights: dict[str, ExpertWeights] = {}
        for spec in specs:
            self.add(spec)

    def add(self, spec: LayerSpec) -> None:
        """Make a layer of the plan."""
        weights = self._weights[spec.name] = random_weights(spec, next(self.trial.seeds))
        local = weights.select(self.plan.local_experts(spec.name))
        self.layers[spec.name] = MoELayer(self.plan, spec.name, local).to(self.trial.group.device)

    def batch(self, name: str, tokens: int | None = None, kind: str = "ordinary numbers") -> Batch:
        """A new batch for a layer, with a kind of data, and a number of tokens of that kind if none is given."""
        return self.trial.batch(self.plan.wiring(name).spec, tokens, kind)

    def run(self, name: str, mine: Batch) -> Tensor:
        """One round trip of a layer."""
        y_TH: Tensor = self.layers[name](mine.x_TH, mine.routes, payloads=mine.extra)
        expect_on(y_TH.device, self.trial.group.device, f"the output of layer {name!r} is")
        return y_TH

    def due(self, name: str, mine: Batch) -> Tensor:
        """What a layer must give for a batch, on the CPU."""
        wiring, here = self.plan.wiring(name), mine.to(torch.device("cpu"))
        return twin(wiring, self._weights[name], here.x_TH, here.routes, self.plan.group.rank)

    def check(self, name: str, when: str, tokens: int | None = None) -> None:
        """Run a new batch through a layer and compare its bits with the twin's."""
        mine = self.batch(name, tokens)
        check_same(self.run(name, mine), self.due(name, mine), f"layer {name!r} {when}")


def check_same(y_TH: Tensor, due_TH: Tensor, what: str) -> None:
    """Raise a finding unless a result has the expected bits; any NaN equals any other."""
    y_TH = y_TH.cpu()  # where the expected bits were computed
    if same_numbers(y_TH, due_TH):
        return
    found, due = (f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in (y_TH, due_TH))
    expect(found == due, f"{what} gave {found}", due)
    off_T = [t for t, pair in enumerate(zip(y_TH, due_TH, strict=True)) if not same_numbers(*pair)]
    raise Finding(f"{what} gave other bits than the twin for tokens {off_T[:8]}", "the same bits")


def must_raise(
    kind: type[Exception], fn: Callable[..., Any], *args: Any, when: str, **options: Any
) -> Exception:
    """Call a function; return the error of this kind that it must raise, or raise a finding."""
    try:
        fn(*args, **options)
    except kind as error:
        return error
    except Exception as error:
        raise Finding(f"{when}: {type(error).__name__}: {error}", kind.__name__) from error
    raise Finding(f"{when}: no error", kind.__name__)


@contextmanager
def before_compute(experts: Experts, act: Callable[[ReceivedRows], object]) -> Iterator[None]:
    """Inside, `act` is called before each computation of these experts, and may raise."""
    compute = experts.compute

    def act_and_compute(received: ReceivedRows, *, finalize: bool) -> Any:
        act(received)
        return compute(received, finalize=finalize)

    object.__setattr__(experts, "compute", act_and_compute)
    yield
    object.__setattr__(experts, "compute", compute)


@contextmanager
def failing(experts: Experts, fails: bool) -> Iterator[type[Exception]]:
    """Inside, these experts raise, if `fails`. Yields what a call of their layer then raises on this rank."""

    def fail(received: ReceivedRows) -> None:
        if fails:
            raise ZeroDivisionError("these experts fail")

    with before_compute(experts, fail):
        yield ZeroDivisionError if fails else PeerFailed


def round_trip(made: Plan, spec: LayerSpec, mine: Batch) -> RoundTrip:
    """A dispatch of this rank's batch, combined with zeros as its result."""
    trip = send(made, spec, mine.to(made.group.device))
    trip.combine(zeros(trip.received))
    return trip


def zeros(received: ReceivedRows) -> ExpertRows:
    """Zeros as the result for received rows."""
    shape = (received.num_rows, received.rows.hidden_size)
    return ExpertRows(rows_RH=torch.zeros(shape, device=received.rows.device))


def echo(received: ReceivedRows) -> ExpertRows:
    """A result that is the received rows themselves, decoded."""
    return ExpertRows(rows_RH=received.dense().decode(torch.float32))


def echo_due(made: Plan, spec: LayerSpec, mine: Batch) -> Tensor:
    """What comes home if every rank returns the `echo` of a batch, on the CPU."""
    exchange_spec, here = made.wiring(spec.name).exchange_spec, mine.to(torch.device("cpu"))
    ranks_TK = exchange_spec.placement.resolve(here.routes.topk_ids_TK, made.group.rank)[0]
    times_T1 = torch.tensor([[len(set(ranks) - {-1})] for ranks in ranks_TK.tolist()])
    decoded_TH = exchange_spec.wire.encode(here.x_TH).decode(torch.float32)
    one_TH = exchange_spec.combine_wire.encode(decoded_TH).decode(torch.float32)
    due_TH = torch.zeros_like(one_TH)
    for time_ in range(int(times_T1.max()) if len(times_T1) else 0):
        # Added one by one, not multiplied: an exchange rounds after each addition.
        due_TH += torch.where(times_T1 > time_, one_TH, 0.0)
    return due_TH.to(exchange_spec.dtype)
