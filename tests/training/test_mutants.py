"""Mistakes that are made in training, put into the library one by one: at least one of the properties notices each."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenyard as ty
from tests.models import on_ranks, raised
from tests.training.batches import Training, errors, trained
from tokenyard.errors import Corrupted, RankError
from tokenyard.exchange import Exchange
from tokenyard.exchange.returns import ChoicePlaces
from tokenyard.experts import gradients
from tokenyard.experts.activations import Activation
from tokenyard.experts.base import Experts
from tokenyard.layer import training

CASES = [
    Training(trained(dtype=torch.float32, bias=True), unused=(0, 1, 2, 3), options={"paranoid": True}),
    Training(trained(dtype=torch.float32, weight_on="input", sum="choices"), options={"paranoid": True}),
    Training(trained(dtype=torch.float32, activation="swiglu_clamped", top_k=4), options={"max_rows": 16}),
]
QUANTIZED = Training(trained(gradient_wire="mxfp8"), options={"paranoid": True})
CASE = Training(trained(dtype=torch.float32))


# -- Properties: each is true of the library, and false of some mutants ----------------------------------


def gradients_are_near_the_oracle():
    try:
        return all(max(errors(case.on(2), case.oracle).values()) < 4e-6 for case in CASES)
    except RankError as error:
        return not _noticed(error)
    except TypeError:  # a gradient is None
        return False


def gradients_are_quantized_once():
    try:
        return max(errors(QUANTIZED.on(2), QUANTIZED.oracle).values()) < 0.08
    except RankError as error:
        return not _noticed(error)


def _noticed(error):
    """Whether a paranoid plan has noticed a mistake; any other error is one of the test itself."""
    if not isinstance(error.__cause__, Corrupted):
        raise error
    return True


def two_open(group, swapped):
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    results = [layer(x_TH, routes), layer(2 * x_TH, routes)]
    order = results[:: -1 if swapped and group.rank else 1]
    error = raised(lambda: [y_TH.backward(dy_TH) for y_TH in order])
    return error is not None, layer.experts.w13.grad


def swapped_backwards_raise_on_all_ranks():
    return all(raised for raised, _ in on_ranks(2, two_open, True))


def alone(group):
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    layer(x_TH, routes).backward(dy_TH)
    layer(2 * x_TH, routes).backward(dy_TH)
    return layer.experts.w13.grad


def open_forwards_do_not_disturb_each_other():
    both = [found for _, found in on_ranks(2, two_open, False)]
    return all(map(torch.equal, both, on_ranks(2, alone)))


def recomputed(group, otherwise):
    plan, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    calls = []

    def call(x_TH):
        calls.append(1)
        flips = otherwise and group.rank == 1 and len(calls) > 1
        ids_TK = routes.topk_ids_TK.flip(0) if flips else routes.topk_ids_TK
        return layer(x_TH, replace(routes, topk_ids_TK=ids_TK))

    error = raised(checkpoint(call, x_TH, use_reentrant=False).backward, dy_TH)
    return error is not None, plan.load()["moe"]


def other_routes_in_a_recomputation_raise_on_all_ranks():
    return all(found for found, _ in on_ranks(2, recomputed, True))


def a_recomputation_is_not_counted_as_load():
    ids_TK = CASE.batch[1]
    due = ids_TK[ids_TK >= 0].bincount(minlength=8).tolist()
    return [load for _, load in on_ranks(2, recomputed, False)] == [due, due]


PROPERTIES = [
    gradients_are_near_the_oracle,
    gradients_are_quantized_once,
    swapped_backwards_raise_on_all_ranks,
    open_forwards_do_not_disturb_each_other,
    other_routes_in_a_recomputation_raise_on_all_ranks,
    a_recomputation_is_not_counted_as_load,
]


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_the_library_has_each_property(holds):
    assert holds()


# -- Mutants ---------------------------------------------------------------------------------------------


def changed(patch, place, name, change):
    """Replace a function by `change(the function)`."""
    patch.setattr(place, name, change(getattr(place, name)))


def differentiated(patch, change):
    """Change the gradients that experts compute: `change(found, sums)`."""

    def mutant(original):
        def differentiate(self, received, kept, dy_RH, weights, sums):
            return change(original(self, received, kept, dy_RH, weights, sums), sums)

        return differentiate

    for kind in (ty.experts.GroupedExperts,):
        changed(patch, kind, "differentiate", mutant)


def router_gradient_dropped(patch):
    differentiated(patch, lambda found, _: replace(found, weights_N=torch.zeros_like(found.weights_N)))


def router_gradient_divided_by_the_ranks(patch):
    differentiated(patch, lambda found, _: replace(found, weights_N=found.weights_N / 2))


def expert_gradient_divided_by_the_ranks(patch):
    changed(patch, training._Backward, "run", lambda run: lambda self, dy_TH: _halved(*run(self, dy_TH)))


def _halved(dx_TH, dweights_TK, sums):
    return dx_TH, dweights_TK, {name: total / 2 for name, total in sums.items()}


def a_rank_of_idle_experts_skipped(patch):
    def mutant(run):
        def skips(self, dy_TH):
            dx_TH, dweights_TK, sums = run(self, dy_TH)
            return dx_TH, dweights_TK, {name: total for name, total in sums.items() if total.any()}

        return skips

    changed(patch, training._Backward, "run", mutant)


def gradients_quantized_twice(patch):
    def mutant(encode):
        def twice(self, spec, x_TH):
            rows = encode(self, spec, x_TH)
            return encode(self, spec, rows.decode(x_TH.dtype)) if spec.of_gradients else rows

        return twice

    changed(patch, Exchange, "encode", mutant)


def backwards_without_the_round_of_their_forward(patch):
    changed(
        patch,
        Exchange,
        "begin",
        lambda begin: lambda self, spec, takes_slots=False, forward=0: begin(self, spec),
    )


def routes_of_a_recomputation_not_compared(patch):
    patch.setattr(training, "_checksum", lambda ids_TK: 0)


def a_recomputation_counted(patch):
    patch.setattr(training, "is_recomputed", lambda: False)


def rows_kept_where_the_next_call_writes(patch):
    """As views of the workspace are."""
    written = {}

    def of(original):
        def writes(cls, *arguments):
            kept = original(*arguments)
            rows = written.setdefault((threading.get_ident(), kept.rows.num_rows), kept.rows)
            rows.payloads["data"].copy_(kept.rows.payloads["data"])
            return replace(kept, rows=rows)

        return classmethod(writes)

    changed(patch, training.KeptPass, "of", of)


def weights_of_an_expert_applied_nowhere(patch):
    def mutant(original):
        def unweighted(spec, products, pairs, *others):
            return original(
                spec, products, replace(pairs, weights_N=torch.ones_like(pairs.weights_N)), *others
            )

        return unweighted

    for place in (gradients, ty.experts.trained):
        changed(patch, place, "differentiate_pairs", mutant)


def a_clamped_number_with_a_slope(patch):
    def mutant(original):
        def unclamped(self, pre, gradient):
            wide = replace(
                self, parameters=tuple((n, 1e9 if n == "limit" else v) for n, v in self.parameters)
            )
            return original(wide, 4 * pre, gradient) if self.parameters else original(self, pre, gradient)

        return unclamped

    changed(patch, Activation, "differentiate", mutant)


def numbers_placed_at_other_choices(patch):
    changed(
        patch,
        ChoicePlaces,
        "placed",
        lambda placed: lambda *arguments: placed(*arguments).flip(1).contiguous(),
    )


def only_the_last_pass_counted(patch):
    def mutant(original):
        def last(self, received, kept, dy_RH, weights, sums):
            for total in sums.values():
                total.zero_()
            return original(self, received, kept, dy_RH, weights, sums)

        return last

    changed(patch, ty.experts.GroupedExperts, "differentiate", mutant)


def gradients_of_rows_not_summed_over_choices(patch):
    def mutant(original):
        def first_only(self, kept, came):
            result, weights = original(self, kept, came)
            return replace(result, **{n: v * 0.5 for n, v in vars(result).items()}), weights

        return first_only

    changed(patch, training._Backward, "_pass", mutant)


def gradient_duties_not_done(patch):
    """The gradient of the routing weight is there, and nobody says so."""
    patch.setattr(gradients, "record", lambda *_: None)


def products_rounded_to_nothing(patch):
    changed(patch, Experts, "multiplied", lambda cast: lambda *arguments: _rounded(cast(*arguments)))


def _rounded(weights):
    return replace(weights, w2=weights.w2.bfloat16().float())


MUTANTS = [
    router_gradient_dropped,
    router_gradient_divided_by_the_ranks,
    expert_gradient_divided_by_the_ranks,
    a_rank_of_idle_experts_skipped,
    gradients_quantized_twice,
    backwards_without_the_round_of_their_forward,
    routes_of_a_recomputation_not_compared,
    a_recomputation_counted,
    rows_kept_where_the_next_call_writes,
    weights_of_an_expert_applied_nowhere,
    a_clamped_number_with_a_slope,
    numbers_placed_at_other_choices,
    only_the_last_pass_counted,
    gradients_of_rows_not_summed_over_choices,
    gradient_duties_not_done,
    products_rounded_to_nothing,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    assert not all(holds() for holds in PROPERTIES)
