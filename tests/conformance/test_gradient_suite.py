"""The checks of gradients pass for every part that trains, and catch every mutant by the check named for its fault."""

import pytest

from tests.conformance.mutants import gradients as mutants
from tests.known_bugs.kinds import gradients as bugs
from tokenyard.conformance.suites import (
    EXCHANGE_GRADIENT_CHECKS,
    EXPERTS_GRADIENT_CHECKS,
    assert_passed,
    check_exchange,
    check_experts,
)
from tokenyard.exchange import TwoSidedTransport

WRONG_EXPERTS = [
    (
        mutants.DropsRouterGradient,
        "expert_gradients_within_the_bound",
        "the gradients of weights of a layer with",
    ),
    (mutants.WeighsGradientsTwice, "expert_gradients_within_the_bound", "beyond the bound"),
    (mutants.LeavesIdleExpertsAsTheyWere, "idle_experts_have_zeros", "of idle experts are not zero"),
    (
        mutants.GivesNobodyToTheFirst,
        "nobody_has_no_gradient",
        "with choices of -1 are",
    ),
    (mutants.HidesNanOfGradients, "nan_stays_with_its_row", "a row of NaN gave its expert numbers"),
    (
        mutants.CountsDuplicatesOnce,
        "duplicate_choices_add_up",
        "where two choices of each token name one expert",
    ),
    (mutants.RecomputesInBf16, "what_is_kept_changes_no_bit", 'with keep="rows" have other bits'),
    (mutants.AddsToTheLastStep, "gradients_repeat", "of a second step have other bits"),
    (
        mutants.StopsAtFrozenWeights,
        "frozen_weights_cost_nothing",
        "rows beside frozen w13 have other gradients",
    ),
    (mutants.ScalesByTheBatch, "a_row_changes_no_other_gradient", "if those of other rows change"),
]
WRONG_TRANSPORTS = [
    (mutants.HalvesGradients, "gradients_within_the_bound", "the gradients of rows of a layer"),
    (mutants.LosesWhatComesBeside, "gradients_within_the_bound", "the gradients of weights of a layer"),
    (mutants.MovesGradientsToTheFirstChoice, "gradients_as_on_one_rank", "the gradients of weights of"),
    (mutants.ForgetsNobodyInBackward, "gradients_as_on_one_rank", "gradients came along other routes"),
]
WRONG_BACKWARDS = [
    (bugs.divides_by_the_ranks, "gradients_within_the_bound", "the gradients of w13 of a layer"),
    (bugs.quantizes_gradients, "gradients_within_the_bound", "beyond the bound"),
    (mutants.rounds_gradients_at_home, "gradients_within_the_bound", "the gradients of rows of a layer"),
    (
        bugs.forgets_which_forward,
        "backwards_in_another_order",
        "two backwards in another order on rank 0: no error",
    ),
    (bugs.compares_no_routes, "recomputed_routes_are_compared", "that routes otherwise on rank 0"),
    (bugs.counts_recomputations, "load_counts_first_forwards", "`plan.load()` after two steps is"),
    (mutants.keeps_every_tape, "nothing_is_kept", "tensors of a step are still there"),
    (mutants.keeps_one_forward, "several_forwards_are_open", "gradients came along other routes"),
    (mutants.keeps_errors_of_backwards, "errors_in_backward_reach_all", "expected PeerFailed"),
    (bugs.makes_no_node_for_frozen_ranks, "frozen_parts_have_none", "does not require grad"),
    (mutants.computes_otherwise_under_grad, "forward_as_in_inference", "a call under grad gave other bits"),
    (mutants.scales_gradients_in_place, "inputs_of_a_step_untouched", "dy_TH was changed"),
    (bugs.multiplies_nobody_by_zero, "no_gradient_is_missing", "with tokens for nobody are not finite"),
    (mutants.drops_passes, "gradients_in_passes", "in several passes are"),
]


@pytest.mark.parametrize("exchange", ["two_sided", "one_sided", "allgather", "hierarchical"])
def test_every_exchange_that_carries_gradients_passes(exchange):
    assert_passed(check_exchange(exchange, world=3, only=list(EXCHANGE_GRADIENT_CHECKS)))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("exchange", ["two_sided", "one_sided", "allgather", "hierarchical"])
def test_every_exchange_that_carries_gradients_passes_on_processes(exchange, world):
    results = check_exchange(exchange, ranks="processes", world=world, only=list(EXCHANGE_GRADIENT_CHECKS))
    assert [result.check for result in results] == list(EXCHANGE_GRADIENT_CHECKS)
    assert_passed(results)


@pytest.mark.parametrize("experts", ["grouped", "reference"])
def test_experts_that_train_pass(experts):
    results = check_experts(experts, only=list(EXPERTS_GRADIENT_CHECKS))
    assert [result.check for result in results] == list(EXPERTS_GRADIENT_CHECKS)
    assert_passed(results)


def test_what_does_not_train_is_not_asked():
    class ForInference(TwoSidedTransport):
        name = "for_inference"
        carries_gradients = ()

    assert check_exchange(ForInference, only=list(EXCHANGE_GRADIENT_CHECKS)) == []
    assert check_experts("self_routing", only=list(EXPERTS_GRADIENT_CHECKS)) == []


@pytest.mark.parametrize(
    ("experts", "check", "part"), WRONG_EXPERTS, ids=lambda one: getattr(one, "name", None)
)
def test_wrong_experts_are_caught(experts, check, part):
    (result,) = check_experts(experts, only=[check])
    assert part in str(result.finding)


@pytest.mark.parametrize(
    ("exchange", "check", "part"), WRONG_TRANSPORTS, ids=lambda one: getattr(one, "name", None)
)
def test_wrong_transports_are_caught(exchange, check, part):
    (result,) = check_exchange(exchange, world=3, only=[check], deadline=5.0)
    assert part in str(result.finding)


@pytest.mark.parametrize(
    ("mutate", "check", "part"), WRONG_BACKWARDS, ids=lambda one: getattr(one, "__name__", None)
)
def test_a_wrong_backward_is_caught(mutate, check, part, monkeypatch):
    mutate(monkeypatch)
    (result,) = check_exchange("two_sided", world=3, only=[check], deadline=3.0)
    assert part in str(result.finding)


def test_every_check_kills_a_mutant():
    named = {check for _, check, _ in (*WRONG_EXPERTS, *WRONG_TRANSPORTS, *WRONG_BACKWARDS)}
    # These hold what the others hold, in other plans and uses.
    further = {
        "gradients_of_any_placement",
        "backward_twice",
        "checkpointed_as_plain",
        "gradients_in_paranoid_plans",
    }
    further |= {"a_skipped_backward_is_found"}
    assert named | further == {*EXCHANGE_GRADIENT_CHECKS, *EXPERTS_GRADIENT_CHECKS}
    assert not named & further
