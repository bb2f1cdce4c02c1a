"""Random layers on random ranks: bitwise equal to the twin, inside the bound around the oracle."""

import pytest
import torch
from hypothesis import given, seed, settings

import tokenyard as ty
from tests.exchange.strategies import cases, is_large
from tests.models import batch, build, spec
from tests.products import product
from tokenyard.conformance.cases import Case, random_weights, run_case, same_bits
from tokenyard.conformance.draws import hosts_for
from tokenyard.conformance.twin import twin
from tokenyard.exchange import EXCHANGES


def hosts_of(case):
    return hosts_for(EXCHANGES[case.exchange], case.world)


def run_one(group, case):
    return run_case(group, case, end_to_end=False)  # nobody asks here what the wire costs


def check(case, ranks):
    outcomes = ty.launch(case.world, run_one, case, ranks=ranks, hosts=hosts_of(case))
    for rank, outcome in enumerate(outcomes):
        assert outcome.passed, f"rank {rank}: {outcome}"


def draw_many(count, part, check):
    """Draw `count` cases, other ones for each part, large ones in every third, and check each."""
    large = part % 3 == 0
    seen = []

    @seed(part)  # the same cases in every run of the suite
    @settings(max_examples=count, derandomize=False, database=None)
    @given(case=cases(large=large))
    def run(case):
        seen.append(case)
        check(case)

    run()
    assert len(seen) >= count
    assert not large or all(map(is_large, seen))


# In parts, so that two workers can share them: 512 cases over threads, 56 over processes. `make test` draws 192 and 14.
@pytest.mark.parametrize(
    "part", [0, 1, 2, *(pytest.param(part, marks=pytest.mark.long) for part in range(3, 8))]
)
def test_any_layer_on_thread_ranks(part):
    draw_many(64, part, lambda case: check(case, "threads"))


def run_one_after_the_other(group, drawn):
    return [run_one(group, case) for case in drawn]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))])
def test_any_layer_on_process_ranks(part):
    """Those of one world one after the other on the same processes: to start them takes longer than a case."""
    alike = {}
    draw_many(
        14,
        99 + part,
        lambda case: alike.setdefault((case.world, hosts_of(case)), []).append(case),
    )
    for (world, hosts), drawn in alike.items():
        by_rank = ty.launch(world, run_one_after_the_other, drawn, ranks="processes", hosts=hosts)
        for rank, outcomes in enumerate(by_rank):
            for case, outcome in zip(drawn, outcomes, strict=True):
                assert outcome.passed, f"rank {rank}, {case}: {outcome}"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sixty_four_thread_ranks(exchange):
    tokens = tuple(rank % 3 for rank in range(64))
    check(
        Case(tokens=tokens, hidden_size=40, num_experts=50, top_k=6, exchange=exchange, wire="mxfp8"),
        "threads",
    )


@pytest.mark.parametrize(("exchange", "ranks"), product(list(EXCHANGES), ["threads", "processes"]))
def test_eight_ranks_of_which_most_have_no_expert_and_some_no_token(exchange, ranks):
    tokens = (5, 0, 3, 0, 0, 9, 1, 0)
    check(
        Case(tokens=tokens, hidden_size=100, num_experts=3, top_k=32, exchange=exchange, wire="nvfp4"), ranks
    )


# Uneven ranks and an empty one, ids of -1, and widths that are padded; the second scale saturates some results.
@pytest.mark.parametrize(
    ("exchange", "combine_wire"), product(list(EXCHANGES), ["nvfp4", "nvfp4(global_scale=2000.0)"])
)
def test_results_come_home_in_four_bits(exchange, combine_wire):
    for hidden_size, routes in ((100, "gaps"), (33, "duplicates"), (1, "uniform")):
        case = Case(
            tokens=(5, 0, 3, 9),
            hidden_size=hidden_size,
            num_experts=7,
            top_k=4,
            exchange=exchange,
            combine_wire=combine_wire,
            routes=routes,
        )
        check(case, "threads")


def sums_with_other_terms(group, exchange):
    layer = spec(combine_wire="nvfp4", hidden_size=40, dtype=torch.float32, experts="reference")
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, 3 * group.rank, seed=group.rank)
    residual_TH = torch.randn(x_TH.shape, generator=torch.Generator().manual_seed(9))
    y_TH = build(plan, "moe", shared=lambda rows_TH: 3 * rows_TH)(x_TH, routes, add=residual_TH)
    twin_TH = twin(plan.wiring("moe"), random_weights(layer, 0), x_TH, routes, group.rank)
    return same_bits(y_TH, twin_TH + 3 * x_TH + residual_TH)  # float32: the twin's sum was not rounded


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_other_terms_are_added_to_results_of_four_bits(exchange):
    assert all(ty.launch(3, sums_with_other_terms, exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_ranks_are_idle(exchange):
    check(Case(tokens=(0, 0, 0), hidden_size=16, exchange=exchange), "processes")
