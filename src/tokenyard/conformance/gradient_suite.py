"""Checks of how an exchange carries gradients: the checks of `exchange_suite`, for the way back of a step.

Gradients are those of the sum of all ranks' losses. They are compared with the float64 oracle, and bit for bit with
those of one rank that holds all experts and all tokens: with `sum="choices"` they do not depend on ranks or exchanges.
An exchange that does not declare that it carries gradients is not asked.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenyard.conformance.cases import same_bits
from tokenyard.conformance.exchange_layers import must_raise
from tokenyard.conformance.exchange_suite import Trial
from tokenyard.conformance.gradient_layers import Found, Step, TrainedLayer, gradients, layer, named
from tokenyard.conformance.runner import expect
from tokenyard.errors import Drifted, PeerFailed, TokenyardError
from tokenyard.routing import Placement


def gradients_within_the_bound(trial: Trial) -> None:
    """All gradients are within the bound around the float64 oracle: not divided, doubled, dropped or summed in part."""
    for changes in (
        {"sum": "ranks"},
        {"sum": "choices", "weight_on": "input", "bias": True},
        {"sum": "ranks", "dtype": torch.bfloat16, "weights": "bf16", "bias": True},
    ):
        trained = TrainedLayer(trial, layer(**changes))
        steps = trained.steps()
        words = ", ".join(f"{key}={value}" for key, value in changes.items())
        trained.check_bound(steps, trained.run(steps), f"of a layer with {words}")


def gradients_as_on_one_rank(trial: Trial) -> None:
    """Results and gradients have the bits of one rank that holds everything, whatever the ranks and their tokens."""
    for changes in ({}, {"bias": True, "dtype": torch.bfloat16, "weights": "bf16"}):
        trained = TrainedLayer(trial, layer(**changes))
        for tokens in ((5, 0, 9, 2), (16,), (1, 4)):
            steps = trained.steps(*tokens)
            trained.check(steps, trained.run(steps), f"of {tokens} tokens")


def gradients_of_any_placement(trial: Trial) -> None:
    """Which rank holds an expert changes no bit of a gradient."""
    world = trial.group.size
    for placement in (
        Placement.round_robin(6, world),
        Placement.explicit(6, [[5, 0, 3, 1, 2, 4], *[[] for _ in range(world - 1)]]),
    ):
        trained = TrainedLayer(trial, layer(placement=placement))
        steps = trained.steps()
        trained.check(steps, trained.run(steps), f"with the experts {placement.table}")


def no_gradient_is_missing(trial: Trial) -> None:
    """Experts, choices and ranks without tokens have gradients of zero: never None, never NaN."""
    trained = TrainedLayer(trial, layer())
    for what, tokens, change in (
        ("experts without tokens", (4, 2), torch.zeros_like),
        ("tokens for nobody", (3, 5), lambda ids_TK: torch.full_like(ids_TK, -1)),
        ("ranks without tokens", (0, 3), lambda ids_TK: ids_TK),
        ("no tokens at all", (0,), lambda ids_TK: ids_TK),
    ):
        steps = [_rerouted(step, change) for step in trained.steps(*tokens)]
        found = trained.run(steps)
        for name, value in found.items():
            expect(
                bool(value.isfinite().all()), f"{named(name)} in a step with {what} are not finite", "numbers"
            )
        trained.check(steps, found, f"in a step with {what}")


def _rerouted(step: Step, change: Callable[[Tensor], Tensor]) -> Step:
    """The same step with other ids. Weights of nobody are NaN."""
    ids_TK = change(step.routes.topk_ids_TK)
    weights_TK = step.routes.topk_weights_TK.masked_fill(ids_TK < 0, torch.nan)
    return replace(step, routes=replace(step.routes, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK))


def forward_as_in_inference(trial: Trial) -> None:
    """A call that keeps what its backward needs returns the bits of one under `no_grad`."""
    trained = TrainedLayer(trial, layer(sum="ranks"))
    mine = trained.mine(trained.steps())
    with torch.no_grad():
        plain_TH = trained.layer(mine.x_TH, mine.routes)
    y_TH, _ = trained.forward(mine)
    expect(
        same_bits(y_TH.detach(), plain_TH),
        "a call under grad gave other bits than under no_grad",
        "the same bits",
    )
    expect(not plain_TH.requires_grad, "a call under no_grad returned a result with a graph", "none")
    y_TH.backward(mine.dy_TH)


def several_forwards_are_open(trial: Trial) -> None:
    """Two forwards, an evaluation, and both backwards: each has the gradients of its own forward, and they add up."""
    trained = TrainedLayer(trial, layer())
    first, second = trained.steps(), trained.steps(3, 8)
    alone = [trained.run(steps) for steps in (first, second)]
    trained.layer.zero_grad()
    forwards = [trained.forward(trained.mine(steps)) for steps in (first, second)]
    with torch.no_grad():
        other = trained.mine(trained.steps(2))
        trained.layer(other.x_TH, other.routes)
    for steps, (y_TH, _) in zip((first, second), forwards, strict=True):
        y_TH.backward(trained.mine(steps).dy_TH)
    for number, (_, leaves) in enumerate(forwards):
        found = gradients(trained.layer, leaves)
        for name, value in found.items():
            both = alone[0][name] + alone[1][name] if name not in leaves else alone[number][name]
            expect(
                same_bits(value, both),
                f"{named(name)} of two open forwards have other bits",
                "those of each alone",
            )


def backward_twice(trial: Trial) -> None:
    """A second backward through a kept graph has the bits of the first."""
    trained = TrainedLayer(trial, layer())
    mine = trained.mine(trained.steps())
    found: list[Found] = []
    y_TH, leaves = trained.forward(mine)
    for keep in (True, False):
        trained.layer.zero_grad()
        for leaf in leaves.values():
            leaf.grad = None
        y_TH.backward(mine.dy_TH, retain_graph=keep)
        found.append(gradients(trained.layer, leaves))
    for name, value in found[1].items():
        expect(
            same_bits(value, found[0][name]),
            f"{named(name)} of a second backward have other bits",
            "the same",
        )


def checkpointed_as_plain(trial: Trial) -> None:
    """A layer that is computed again in its backward has the bits of one that is not."""
    trained = TrainedLayer(trial, layer())
    steps = trained.steps()
    plain, mine = trained.run(steps), trained.mine(steps)
    trained.layer.zero_grad()
    x_TH, weights_TK = (
        mine.x_TH.clone().requires_grad_(),
        mine.routes.topk_weights_TK.clone().requires_grad_(),
    )

    def call(x_TH: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH: Tensor = trained.layer(x_TH, replace(mine.routes, topk_weights_TK=weights_TK))
        return y_TH

    checkpoint(call, x_TH, weights_TK, use_reentrant=False).backward(mine.dy_TH)
    for name, value in gradients(trained.layer, {"rows": x_TH, "weights": weights_TK}).items():
        expect(
            same_bits(value, plain[name]),
            f"{named(name)} of a checkpointed layer have other bits",
            "the same",
        )


def recomputed_routes_are_compared(trial: Trial) -> None:
    """A forward that routes otherwise when it is computed again is an error on all ranks; the next step is right."""
    trained = TrainedLayer(trial, layer())
    mine = trained.mine(trained.steps(4))
    calls: list[int] = []

    def call(x_TH: Tensor) -> Tensor:
        calls.append(1)
        ids_TK = mine.routes.topk_ids_TK
        if len(calls) > 1 and trial.group.rank == 0:
            ids_TK = ids_TK.flip(0)  # the same experts in all, for other tokens
        y_TH: Tensor = trained.layer(x_TH, replace(mine.routes, topk_ids_TK=ids_TK))
        return y_TH

    y_TH = checkpoint(call, mine.x_TH.clone().requires_grad_(), use_reentrant=False)
    must_raise(
        TokenyardError, y_TH.backward, mine.dy_TH, when="a recomputed forward that routes otherwise on rank 0"
    )
    trained.check_next("after a recomputation that was refused")


def backwards_in_another_order(trial: Trial) -> None:
    """Two backwards in another order on one rank are an error on all, even with equal routes; then all goes on."""
    if trial.group.size == 1:
        return
    trained = TrainedLayer(trial, layer())
    mine = trained.mine(trained.steps(4))
    results = [trained.forward(mine)[0] for _ in range(2)]
    if trial.group.rank == 0:
        results.reverse()
    must_raise(Drifted, results[0].backward, mine.dy_TH, when="two backwards in another order on rank 0")
    del results
    trained.check_next("after backwards in another order")


def a_skipped_backward_is_found(trial: Trial) -> None:
    """A rank that goes on without its backward is an error on all ranks, and the next step is right."""
    if trial.group.size == 1:
        return
    trained = TrainedLayer(trial, layer())
    mine = trained.mine(trained.steps(3))
    y_TH, _ = trained.forward(mine)
    if trial.group.rank == 0:
        must_raise(
            Drifted, trained.layer, mine.x_TH, mine.routes, when="a forward on rank 0 beside backwards"
        )
    else:
        must_raise(Drifted, y_TH.backward, mine.dy_TH, when="a backward while rank 0 is in its next forward")
    del y_TH
    trained.check_next("after a backward that was skipped")


def errors_in_backward_reach_all(trial: Trial) -> None:
    """What one rank raises in its backward reaches all ranks, and the next step is right."""
    trained = TrainedLayer(trial, layer())
    mine, fails_here = trained.mine(trained.steps(3)), trial.group.rank == trial.group.size - 1

    def unpack(packed: Tensor) -> Tensor:
        if fails_here:
            raise ZeroDivisionError("what was kept is gone")
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y_TH, _ = trained.forward(mine)
    kind = ZeroDivisionError if fails_here else PeerFailed
    error = must_raise(kind, y_TH.backward, mine.dy_TH, when="a backward that fails on the last rank")
    if isinstance(error, PeerFailed):
        last = trial.group.size - 1
        expect(error.peer == last, f"PeerFailed names rank {error.peer}", f"rank {last}, which failed")
    del y_TH
    trained.check_next("after a backward that failed")


def frozen_parts_have_none(trial: Trial) -> None:
    """Frozen experts get no gradient and change nobody else's; a rank where everything is frozen keeps none waiting."""
    trained = TrainedLayer(trial, layer())
    steps = trained.steps()
    due, mine = trained.run(steps), trained.mine(steps)
    parameters = list(trained.layer.experts.parameters())
    for frozen_everywhere in (True, False):
        trained.layer.zero_grad(set_to_none=True)
        here = frozen_everywhere or trial.group.rank == 0
        for parameter in parameters:
            parameter.requires_grad_(not here)
        x_TH = mine.x_TH.clone().requires_grad_(frozen_everywhere or not here)
        trained.layer(x_TH, mine.routes).backward(mine.dy_TH)
        if x_TH.requires_grad:
            assert x_TH.grad is not None
            expect(
                same_bits(x_TH.grad, due["rows"]),
                "rows beside frozen experts have other gradients",
                "the same bits",
            )
        for name, parameter in trained.layer.experts.named_parameters():
            if here:
                expect(parameter.grad is None, f"frozen {name} got a gradient", "None")
            else:
                assert parameter.grad is not None
                expect(
                    same_bits(parameter.grad, due[name]),
                    f"{named(name)} beside a frozen rank have other bits",
                    "the same",
                )
    for parameter in parameters:
        parameter.requires_grad_(True)


def inputs_of_a_step_untouched(trial: Trial) -> None:
    """Neither the forward nor the backward changes rows, routes, or the gradient that comes in."""
    trained = TrainedLayer(trial, layer(sum="ranks"))
    mine = trained.mine(trained.steps())
    given = {
        "x_TH": mine.x_TH,
        "topk_ids_TK": mine.routes.topk_ids_TK,
        "topk_weights_TK": mine.routes.topk_weights_TK,
        "dy_TH": mine.dy_TH,
        **dict(trained.layer.experts.named_parameters()),
    }
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    x_TH = mine.x_TH.requires_grad_()
    trained.layer(x_TH, mine.routes).backward(mine.dy_TH)
    for name, tensor in given.items():
        expect(
            same_bits(tensor.detach(), before[name]),
            f"{name} was changed",
            "nothing of the caller's to be changed",
        )


def gradients_in_passes(trial: Trial) -> None:
    """A batch that goes in several passes (`max_rows`) has the gradients of one that goes at once."""
    if not trial.exchange.bounds_rows:
        return
    trained = TrainedLayer(trial, layer(), max_rows=2 * trial.group.size)
    steps = trained.steps()
    found = trained.run(steps)
    # Sums over rows are made pass by pass: those of parameters differ in their last bits.
    at_home = {name: found[name] for name in ("y", "rows", "weights")}
    trained.check(steps, at_home, "in several passes")
    trained.check_bound(steps, found, "in several passes")


def gradients_in_paranoid_plans(trial: Trial) -> None:
    """A plan that watches itself has the same gradients."""
    if trial.exchange.watches(trial.group) is not None:
        return
    trained = TrainedLayer(trial, layer(), paranoid=True)
    steps = trained.steps()
    trained.check(steps, trained.run(steps), "in a paranoid plan")


def load_counts_first_forwards(trial: Trial) -> None:
    """`plan.load` counts the choices of forwards: not of their backwards, nor of forwards that are computed again."""
    trained = TrainedLayer(trial, layer())
    steps = trained.steps()
    trained.run(steps)
    mine = trained.mine(steps)
    x_TH = mine.x_TH.clone().requires_grad_()
    checkpoint(trained.layer, x_TH, mine.routes, use_reentrant=False).backward(mine.dy_TH)
    ids = Step.joined(steps).routes.topk_ids_TK.flatten()
    due = torch.bincount(ids[ids >= 0], minlength=6).mul(2).tolist()
    found = trained.plan.load()["moe"]
    expect(found == due, f"`plan.load()` after two steps is {found}", f"{due}: the choices of two forwards")


def nothing_is_kept(trial: Trial) -> None:
    """After a backward, under `no_grad`, and when a result is dropped, no tensor of the step is kept."""
    trained = TrainedLayer(trial, layer())

    def whole(mine: Step) -> list[weakref.ref[Any]]:
        y_TH, leaves = trained.forward(mine)
        y_TH.backward(mine.dy_TH)
        return [weakref.ref(y_TH), *map(weakref.ref, leaves.values())]

    def dropped(mine: Step) -> list[weakref.ref[Any]]:
        y_TH, leaves = trained.forward(mine)
        return [weakref.ref(y_TH), *map(weakref.ref, leaves.values())]

    def evaluated(mine: Step) -> list[weakref.ref[Any]]:
        with torch.no_grad():
            return [weakref.ref(tensor) for tensor in (trained.layer(mine.x_TH, mine.routes), mine.x_TH)]

    for use in (whole, dropped, evaluated):
        left = use(trained.mine(trained.steps(4)))
        trained.layer.zero_grad(set_to_none=True)
        trained.run(trained.steps(1))  # what a call leaves may be freed by the next one
        gc.collect()
        alive = sum(one() is not None for one in left)
        words = {"whole": "a step", "dropped": "a dropped result", "evaluated": "an evaluation"}[use.__name__]
        expect(alive == 0, f"{alive} tensors of {words} are still there", "none")
