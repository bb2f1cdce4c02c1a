"""A layer under test in training: steps of all ranks, and the gradients that are due.

Every rank draws the batches of all ranks, so that it can compute what must come of them by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.exchange_suite import Batch, Trial
from tokenyard.conformance.gradient_oracle import exact_gradients, excess_of_gradient
from tokenyard.conformance.runner import Finding, expect
from tokenyard.experts import ExpertWeights
from tokenyard.group import Group, thread_groups
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import Plan, plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes

# A step's results by name: `y`, the gradients of `rows` and routing `weights`, and those of each parameter.
Found = dict[str, Tensor]


def layer(**changes: Any) -> LayerSpec:
    """A small layer in float32 whose bits depend on no rank."""
    fields: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 6,
        "num_experts": 6,
        "top_k": 3,
        "max_tokens": 16,
        "dtype": torch.float32,
        "weights": "fp32",
        "experts": "reference",
        "sum": "choices",
    }
    return LayerSpec(name="moe", **(fields | changes))


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank brings to a step: rows and routes, and the gradient of its result."""

    x_TH: Tensor
    routes: Routes
    dy_TH: Tensor

    @staticmethod
    def of(one: Batch) -> Step:
        """A batch, with a gradient that follows from it."""
        return Step(x_TH=one.x_TH, routes=one.routes, dy_TH=one.x_TH.flip(0) * 1.5)

    @staticmethod
    def joined(steps: Sequence[Step]) -> Step:
        """The tokens of all ranks, in rank order."""
        routes = [step.routes for step in steps]
        return Step(
            x_TH=torch.cat([step.x_TH for step in steps]),
            dy_TH=torch.cat([step.dy_TH for step in steps]),
            routes=replace(
                routes[0],
                topk_ids_TK=torch.cat([one.topk_ids_TK for one in routes]),
                topk_weights_TK=torch.cat([one.topk_weights_TK for one in routes]),
            ),
        )

    def to(self, device: torch.device) -> Step:
        """The same on a device."""
        return Step(x_TH=self.x_TH.to(device), routes=self.routes.to(device), dy_TH=self.dy_TH.to(device))


class TrainedLayer:
    """A layer of a training plan on this rank."""

    def __init__(self, trial: Trial, spec: LayerSpec, **options: Any) -> None:
        if not trial.exchange.returns_choices:
            spec = replace(spec, sum="ranks")
        self.trial, self.spec, self.group = trial, spec, trial.group
        self.seed = next(trial.seeds)
        self.plan: Plan = trial.plan(spec, training=True, **options)
        self.weights: ExpertWeights = random_weights(spec, self.seed)
        self.experts = self.plan.local_experts(spec.name)
        self.layer = MoELayer(self.plan, spec.name, self.weights.select(self.experts)).to(self.group.device)

    def steps(self, *tokens: int) -> list[Step]:
        """A new step of every rank, on the CPU; rank r has `tokens[r % len(tokens)]` tokens."""
        return [Step.of(one) for one in self.trial.batches(self.spec, tokens or (5, 0, 9, 2))]

    def mine(self, steps: Sequence[Step]) -> Step:
        """This rank's step, on the device of the group."""
        return steps[self.group.rank].to(self.group.device)

    def forward(self, step: Step) -> tuple[Tensor, Found]:
        """Call the layer; return its result, and the leaves whose gradients the backward makes."""
        leaves = {
            "rows": step.x_TH.clone().requires_grad_(),
            "weights": step.routes.topk_weights_TK.clone().requires_grad_(),
        }
        routes = replace(step.routes, topk_weights_TK=leaves["weights"])
        return self.layer(leaves["rows"], routes), leaves

    def run(self, steps: Sequence[Step]) -> Found:
        """One whole step of this rank, from gradients of zero."""
        return run_step(self.layer, self.mine(steps))

    def check(self, steps: Sequence[Step], found: Found, when: str) -> None:
        """Raise a finding unless a step's result and gradients have the bits of one rank that holds all tokens.

        Where an exchange sums inside of ranks or hosts first, bits depend on these: gradients are within the bound.
        """
        if self.spec.sum == "ranks":
            self.check_bound(steps, found, when)
            return
        due = alone(self.spec, self.weights, steps)
        first = sum(len(step.x_TH) for step in steps[: self.group.rank])
        mine = slice(first, first + len(steps[self.group.rank].x_TH))
        for name, value in found.items():
            part = due[name][mine] if name in ("y", "rows", "weights") else due[name][self.experts]
            expect(
                same_bits(value.cpu(), part),
                f"{named(name)} {when} {'has' if name == 'y' else 'have'} other bits than on one rank",
                "the same bits",
            )

    def check_bound(self, steps: Sequence[Step], found: Found, when: str) -> None:
        """Raise a finding unless the gradients of a step are within the bound around those of the oracle."""
        whole = Step.joined(steps)
        exact, size = exact_gradients(self.spec, self.weights, whole.x_TH, whole.routes, whole.dy_TH)
        first = sum(len(step.x_TH) for step in steps[: self.group.rank])
        mine = slice(first, first + len(steps[self.group.rank].x_TH))
        keys = {"rows": "rows_TH", "weights": "weights_TK"}
        for name, value in found.items():
            if name == "y":
                continue
            key = keys.get(name, name)
            chosen = mine if name in keys else self.experts
            due, sized = exact.by_name()[key][chosen], size.by_name()[key][chosen]
            over = excess_of_gradient(self.spec, value, due, sized, len(whole.x_TH))
            expect(over <= 0, f"{named(name)} {when} are {over:.3g} beyond the bound", "within it")

    def check_next(self, when: str) -> None:
        """Run a new step, and compare its bits."""
        steps = self.steps()
        self.check(steps, self.run(steps), when)


def run_step(made: MoELayer, step: Step) -> Found:
    """A call of a layer and its backward: its result and all gradients. One that is missing is a finding."""
    made.zero_grad()
    x_TH = step.x_TH.clone().requires_grad_()
    weights_TK = step.routes.topk_weights_TK.clone().requires_grad_()
    y_TH = made(x_TH, replace(step.routes, topk_weights_TK=weights_TK))
    y_TH.backward(step.dy_TH)
    return {"y": y_TH.detach()} | gradients(made, {"rows": x_TH, "weights": weights_TK})


def gradients(made: MoELayer, leaves: Found) -> Found:
    """Copies of the gradients of the leaves and of all parameters of a layer's experts; none of them may be missing."""
    leaves = leaves | {name.rpartition(".")[2]: leaf for name, leaf in made.experts.named_parameters()}
    found = {}
    for name, leaf in leaves.items():
        if leaf.grad is None:
            raise Finding(f"{named(name)} are None", "numbers: zeros where nothing depends on them")
        expect(
            leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape,
            f"{named(name)} are {leaf.grad.dtype}{list(leaf.grad.shape)}",
            f"{leaf.dtype}{list(leaf.shape)}, as the tensor",
        )
        found[name] = leaf.grad.clone()
    return found


def named(name: str) -> str:
    """How a finding names one of a step's results."""
    return "the result" if name == "y" else f"the gradients of {name}"


def alone(spec: LayerSpec, weights: ExpertWeights, steps: Sequence[Step]) -> Found:
    """The results of a step in which one rank holds all experts, and the tokens of all ranks in their order."""
    group: Group = thread_groups(1)[0]
    whole = Step.joined(steps)
    made = plan(
        [replace(spec, max_tokens=max(1, len(whole.x_TH)), placement="contiguous")],
        group,
        exchange="local",
        training=True,
    )
    found = run_step(made.layer(spec.name, weights), whole)
    made.close()
    return found
