"""Checks of how a class of experts differentiates: its gradients within the bound, and what it must not touch or lose.

Each check runs a layer of a training plan on one rank. Experts that do not declare that they train on the device are
not asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.exchange_suite import draw_batch
from tokenyard.conformance.gradient_layers import Found, Step, gradients, layer, named, run_step
from tokenyard.conformance.gradient_oracle import exact_gradients, excess_of_gradient
from tokenyard.conformance.runner import expect
from tokenyard.experts import ACTIVATIONS, Experts, ExpertWeights
from tokenyard.formats import WEIGHT_FORMATS, PlainWeights
from tokenyard.group import thread_groups
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import Plan, plan

_TOKENS = 11
# Activations without a step in their slope: in 16 bits, a number may round to the other side of one.
_SMOOTH = ("swiglu", "gelu", "gelu_tanh")


class _Layer:
    """A layer of these experts in a training plan of one rank."""

    def __init__(self, cls: type[Experts], device: torch.device, seed: int = 0, **changes: Any) -> None:
        self.spec = layer(experts=cls, max_tokens=_TOKENS, **changes)
        self.weights: ExpertWeights = random_weights(self.spec, seed)
        self.plan: Plan = plan(
            [self.spec], thread_groups(1, device=device)[0], exchange="local", training=True
        )
        self.layer: MoELayer = self.plan.layer(self.spec.name, self.weights).to(device)
        self.step = Step.of(draw_batch(self.spec, 0, seed, _TOKENS)).to(device)

    def run(self) -> Found:
        """A step from gradients of zero."""
        return run_step(self.layer, self.step)

    def check_bound(self, found: Found, when: str) -> None:
        """Raise a finding unless the gradients are within the bound around those of the oracle."""
        here = self.step.to(torch.device("cpu"))
        exact, size = exact_gradients(self.spec, self.weights, here.x_TH, here.routes, here.dy_TH)
        for name, value in found.items():
            if name != "y":
                key = {"rows": "rows_TH", "weights": "weights_TK"}.get(name, name)
                due, sized = exact.by_name()[key], size.by_name()[key]
                over = excess_of_gradient(self.spec, value, due, sized, _TOKENS)
                expect(over <= 0, f"{named(name)} {when} are {over:.3g} beyond the bound", "within it")


def _dtypes(cls: type[Experts]) -> Iterator[tuple[torch.dtype, str]]:
    """The dtypes of rows and the formats of weights that a class may train with."""
    for name in cls.weight_formats:
        kind = WEIGHT_FORMATS.get(name)
        if kind is not None and issubclass(kind, PlainWeights) and kind.dtype is not torch.float16:
            yield kind.dtype, name


def _specs(cls: type[Experts], count: int) -> Iterator[dict[str, Any]]:
    """Random changes of a layer's spec that the class supports."""
    chance, dtypes = random.Random(0), list(_dtypes(cls))
    left = count
    for _ in range(50 * count):
        dtype, weights = chance.choice(dtypes)
        names = sorted(ACTIVATIONS) if dtype is torch.float32 else _SMOOTH
        changes: dict[str, Any] = {
            "dtype": dtype,
            "weights": weights,
            "activation": chance.choice(names),
            "bias": chance.random() < 0.5,
            "weight_on": chance.choice(("output", "input")),
            "hidden_size": chance.choice((1, 8, 24)),
            "intermediate_size": chance.choice((1, 8, 16)),
            "num_experts": chance.choice((1, 3, 6)),
            "top_k": chance.choice((1, 2, 3)),
            "sum": chance.choice(("ranks", "choices")),
        }
        if left and _supported(cls, changes):
            left -= 1
            yield changes


def _supported(cls: type[Experts], changes: dict[str, Any]) -> bool:
    from tokenyard.exchange import resolve
    from tokenyard.planning.wiring import Wiring, wire_layer

    wired = wire_layer(
        layer(experts=cls, **changes),
        index=0,
        exchange=resolve("local"),
        world=1,
        max_tokens=_TOKENS,
        max_rows=None,
        device=None,
        training=True,
    )
    return isinstance(wired, Wiring)


def _some(cls: type[Experts]) -> dict[str, Any]:
    """The dtype that the class trains with, float32 if it can."""
    dtype, weights = max(_dtypes(cls), key=lambda pair: pair[0] is torch.float32)
    return {"dtype": dtype, "weights": weights}


# -- The checks ----------------------------------------------------------------------------------------------


def expert_gradients_within_the_bound(cls: type[Experts], device: torch.device) -> None:
    """For every supported spec, all gradients are within the bound around the float64 ones."""
    for seed, changes in enumerate(_specs(cls, 16)):
        made = _Layer(cls, device, seed, **changes)
        words = ", ".join(f"{key}={value}" for key, value in changes.items())
        made.check_bound(made.run(), f"of a layer with {words}")


def idle_experts_have_zeros(cls: type[Experts], device: torch.device) -> None:
    """Experts that no row names have gradients of zero: not None, not what was in memory."""
    made = _Layer(cls, device, **_some(cls))
    made.step.routes.topk_ids_TK.fill_(2)
    found = made.run()
    for name in set(found) - {"y", "rows", "weights"}:
        others = [expert for expert in range(6) if expert != 2]
        expect(not bool(found[name][others].any()), f"{named(name)} of idle experts are not zero", "zeros")
        expect(bool(found[name][2].any()), f"{named(name)} of the only busy expert are zero", "numbers")
    made.check_bound(found, "where one expert has all tokens")


def nobody_has_no_gradient(cls: type[Experts], device: torch.device) -> None:
    """Choices of -1 take no part: their weights may be NaN, and tokens of nobody may hold NaN."""
    made = _Layer(cls, device, **_some(cls))
    ids_TK, weights_TK = made.step.routes.topk_ids_TK, made.step.routes.topk_weights_TK
    ids_TK[::3, 0] = -1
    ids_TK[4] = -1
    weights_TK[ids_TK < 0] = torch.nan
    found = made.run()
    for name, value in found.items():
        expect(
            bool(value.isfinite().all()), f"NaN of nobody's weights reached {named(name)}", "finite numbers"
        )
    expect(not bool(found["weights"][ids_TK < 0].any()), "weights of nobody have gradients", "zeros")
    expect(not bool(found["rows"][4].any()), "a token for nobody has a gradient", "zeros")
    made.check_bound(found, "with choices of -1")
    made.step.x_TH[4], made.step.dy_TH[4] = torch.nan, torch.nan
    again = made.run()
    for name, value in again.items():
        expect(
            same_bits(value, found[name]),
            f"NaN of a token for nobody reached {named(name)}",
            "the same bits as without",
        )


def nan_stays_with_its_row(cls: type[Experts], device: torch.device) -> None:
    """A row of NaN makes no other row's gradient NaN, and none of experts that it does not name."""
    made = _Layer(cls, device, **_some(cls))
    ids_TK = made.step.routes.topk_ids_TK
    ids_TK[ids_TK == 5] = 0
    ids_TK[3] = 5  # of expert 5 alone
    made.step.x_TH[3] = torch.nan
    found = made.run()
    others = [token for token in range(_TOKENS) if token != 3]
    for name in ("rows", "weights"):
        expect(
            bool(found[name][others].isfinite().all()),
            f"NaN of row 3 reached {named(name)} of others",
            "row 3 alone",
        )
    for name in set(found) - {"y", "rows", "weights"}:
        expect(
            bool(found[name][:5].isfinite().all()),
            f"NaN of row 3 reached {named(name)} of other experts",
            "expert 5 alone",
        )
    expect(bool(found["w13"][5].isnan().any()), "a row of NaN gave its expert numbers as gradients", "NaN")


def duplicate_choices_add_up(cls: type[Experts], device: torch.device) -> None:
    """An expert that a row names twice has the gradients of both choices."""
    made = _Layer(cls, device, **_some(cls))
    ids_TK = made.step.routes.topk_ids_TK
    ids_TK[:, 1] = ids_TK[:, 0]
    made.check_bound(made.run(), "where two choices of each token name one expert")


def what_is_kept_changes_no_bit(cls: type[Experts], device: torch.device) -> None:
    """Gradients have the same bits whether products are kept, computed again from rows, or rows are sent again."""
    found = {
        keep: _Layer(cls, device, keep=keep, **_some(cls)).run() for keep in ("products", "rows", "nothing")
    }
    for keep in ("rows", "nothing"):
        for name, value in found[keep].items():
            expect(
                same_bits(value, found["products"][name]),
                f'{named(name)} with keep="{keep}" have other bits',
                'those with keep="products"',
            )


def gradients_repeat(cls: type[Experts], device: torch.device) -> None:
    """The same step has the same bits again, and a second backward adds its gradients to the first one's."""
    made = _Layer(cls, device, **_some(cls))
    first, second = made.run(), made.run()
    for name, value in second.items():
        expect(same_bits(value, first[name]), f"{named(name)} of a second step have other bits", "the same")
    leaf = made.step.x_TH.clone().requires_grad_()
    made.layer(leaf, made.step.routes).backward(made.step.dy_TH)  # onto those of the second step
    for name, value in gradients(made.layer, {}).items():
        expect(
            same_bits(value, first[name] + first[name]),
            f"{named(name)} of two steps are not their sum",
            "the sum",
        )


def frozen_weights_cost_nothing(cls: type[Experts], device: torch.device) -> None:
    """Each parameter may be frozen: it has no gradient then, and the others' bits stay."""
    made = _Layer(cls, device, bias=_has_biases(cls), **_some(cls))
    due = made.run()
    parameters = dict(made.layer.experts.named_parameters())
    for frozen, parameter in parameters.items():
        made.layer.zero_grad(set_to_none=True)
        parameter.requires_grad_(False)
        leaf = made.step.x_TH.clone().requires_grad_()
        made.layer(leaf, made.step.routes).backward(made.step.dy_TH)
        expect(parameter.grad is None, f"frozen {frozen} got a gradient", "None")
        assert leaf.grad is not None
        expect(
            same_bits(leaf.grad, due["rows"]),
            f"rows beside frozen {frozen} have other gradients",
            "the same bits",
        )
        for name, other in parameters.items():
            if name != frozen:
                assert other.grad is not None
                expect(
                    same_bits(other.grad, due[name]),
                    f"{named(name)} beside frozen {frozen} have other bits",
                    "the same",
                )
        parameter.requires_grad_(True)


def _has_biases(cls: type[Experts]) -> bool:
    return _supported(cls, {"bias": True, **_some(cls)})


def a_row_changes_no_other_gradient(cls: type[Experts], device: torch.device) -> None:
    """The gradient of one row does not depend on what comes back for the others."""
    made = _Layer(cls, device, **_some(cls))
    first = made.run()["rows"]
    made.step.dy_TH[5:] *= -3.0
    second = made.run()["rows"]
    expect(
        same_bits(first[:5], second[:5]),
        "rows have other gradients if those of other rows change",
        "the same bits",
    )
    expect(not same_bits(first[5:], second[5:]), "rows have the same gradients for another dy", "others")
