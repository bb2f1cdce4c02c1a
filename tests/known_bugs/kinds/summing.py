"""Bugs of summing: weights, sums and factors, which must each be applied once."""

from dataclasses import replace

import torch

from tests.known_bugs.known_bug import (
    AlwaysOn,
    BugKind,
    ExchangeCheck,
    ExpertsCheck,
    KnownBug,
    batches,
)
from tests.models import spec
from tokenyard.exchange import results
from tokenyard.experts import GroupedExperts, grouped, trained
from tokenyard.rows import ExpertRows, LocalRoutes


def weights_applied_twice(patch):
    right = grouped.sum_choices

    def sum_choices(y_NH, weights_N, pairs, place):
        return right(y_NH, weights_N * weights_N, pairs, place)

    patch.setattr(grouped, "sum_choices", sum_choices)


def weights_never_applied(patch):
    right = grouped.sum_choices

    def sum_choices(y_NH, weights_N, pairs, place):
        return right(y_NH, torch.ones_like(weights_N), pairs, place)

    patch.setattr(grouped, "sum_choices", sum_choices)


def reduced_twice_over_ranks(patch):
    right = results.sum_over_ranks

    def sum_over_ranks(home, tokens_by_rank, out_TH, add):
        return right([*home, *home], [*tokens_by_rank, *tokens_by_rank], out_TH, add)

    patch.setattr(results, "sum_over_ranks", sum_over_ranks)


def never_reduced_over_ranks(patch):
    def sum_over_ranks(home, tokens_by_rank, out_TH, add):
        for rows, tokens in zip(home, tokens_by_rank, strict=True):
            out_TH[tokens] = rows.decode(out_TH.dtype)  # the last rank to answer is right
        return out_TH

    patch.setattr(results, "sum_over_ranks", sum_over_ranks)


def reduced_twice_over_experts(patch):
    right = grouped.sum_choices

    def sum_choices(y_NH, weights_N, pairs, place):
        sums_RH = right(y_NH, weights_N, pairs, None).rows_RH
        choices_R = torch.bincount(pairs.row_N, minlength=pairs.num_rows)
        sums_RH *= choices_R.unsqueeze(1)  # each choice holds the sum, and they are summed
        return ExpertRows(rows_RH=sums_RH) if place is None else place.write(sums_RH)

    patch.setattr(grouped, "sum_choices", sum_choices)


def routed_scaling_twice(patch):
    from tokenyard.layer import moe_layer as layer

    right = layer.route

    def route(wiring, routes_or_logits):
        routes = right(wiring, routes_or_logits)
        return replace(routes, topk_weights_TK=routes.topk_weights_TK * wiring.exchange_spec.routed_scaling)

    patch.setattr(layer, "route", route)


def kernel_returns_a_tuple(patch):
    right = GroupedExperts.compute

    def compute(self, received, *, finalize):
        result = right(self, received, finalize=finalize)
        return (result, None) if self.spec.weights == "mxint4" else result

    patch.setattr(GroupedExperts, "compute", compute)


def nan_in_an_unused_slot(patch):
    right = trained.sort_pairs

    def sort_pairs(routes, *rest):
        there_RK = routes.ids_RK >= 0
        everybody = LocalRoutes(
            ids_RK=routes.ids_RK.clamp(min=0),
            weights_RK=routes.weights_RK * there_RK,  # zero times anything is zero
        )
        return right(everybody, *rest)

    patch.setattr(trained, "sort_pairs", sort_pairs)


KIND = BugKind(
    name="Who weighs, who sums",
    about="A token's result is a weighted sum over experts: a sum over ranks of sums over the experts there, "
    "times a factor. Exactly one party does each of these. With two, or none, accuracy drops without an "
    "error.",
    bugs=(
        KnownBug(
            name="Weights applied twice",
            story="Some kernels apply the routing weight to the row, some to the result, and some leave it to "
            "the sum. If two of them do it, 0.5 counts as 0.25. Tokens with one strong expert hardly "
            "change, so a short test does not see it.",
            mutate=weights_applied_twice,
            caught_by=ExpertsCheck(name="within_the_bound"),
            says="beyond the bound for H",
        ),
        KnownBug(
            name="Weights never applied",
            story="Each part leaves the routing weight to another. The result is too large by a factor that "
            "differs from token to token; a normalization after the layer hides most of it.",
            mutate=weights_never_applied,
            caught_by=ExpertsCheck(name="within_the_bound"),
            says="beyond the bound for H",
        ),
        KnownBug(
            name="Reduced twice over ranks",
            seen="vLLM #41382",
            story="The library's combine had summed already. The engine's class said `output_is_reduced() → "
            "False`, copied from another class, so the engine summed again. No error: GSM8K went from "
            "about 93% to about 80%.",
            mutate=reduced_twice_over_ranks,
            caught_by=ExchangeCheck(name="bitwise_movement", exchange="two_sided"),
            says="the sum of one row from each rank that it went to",
        ),
        KnownBug(
            name="Never reduced over ranks",
            seen="vLLM #41382, as a risk of its mend",
            story="The fix of that report relies on what a library does in one version. If a later version does "
            "not sum, neither side does. A token whose experts are all on one rank is still right.",
            mutate=never_reduced_over_ranks,
            caught_by=ExchangeCheck(name="bitwise_movement", exchange="two_sided"),
            says="the sum of one row from each rank that it went to",
        ),
        KnownBug(
            name="Reduced twice over experts",
            seen="vLLM #41382",
            story="The kernel sums the results of a token's experts on one rank, and so does the code that "
            "finishes its result. A token with two experts on a rank counts double.",
            mutate=reduced_twice_over_experts,
            caught_by=ExpertsCheck(name="duplicate_choices_count_twice"),
            says="where all choices name one expert",
        ),
        KnownBug(
            name="Routed scaling applied twice",
            story="Models of the DeepSeek family multiply routing weights by 2.5. Router and layer read the "
            "same config, and both do it. Most models, and all smoke tests, have a factor of 1.",
            mutate=routed_scaling_twice,
            caught_by=ExchangeCheck(name="routed_scaling_once", exchange="two_sided"),
            says="a layer whose router scales its weights gave other bits than the twin",
        ),
        KnownBug(
            name="A kernel that returns a tuple",
            seen="vLLM #39315",
            story="A library added an argument, `do_finalize`, to its MoE kernels. Engines that did not pass it "
            "got a list instead of a tensor, and called `.to` on it. The backend for 4-bit integers was "
            "broken from then on; an environment variable chose it, and no test set that.",
            mutate=kernel_returns_a_tuple,
            in_check=ExpertsCheck(name="finalizing_agrees"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="in the first batch of a layer with mxint4 weights",
                run=batches(spec(weights="mxint4"), 5),
            ),
            says="GroupedExperts.compute(finalize=True) returned a tuple of 2; expected ExpertRows",
        ),
        KnownBug(
            name="NaN in an unused slot reaches a sum",
            seen="vLLM #40960",
            story="Some slots hold no row of this batch, only old memory. Giving them a weight of zero instead "
            "of leaving them out is wrong if that memory is NaN, because zero times NaN is NaN.",
            mutate=nan_in_an_unused_slot,
            caught_by=ExpertsCheck(name="rows_for_nobody_are_zero"),
            says="row 3, for no expert, is [nan, nan, nan, nan]; expected zeros",
        ),
    ),
)
