"""Choices that are summed at home: the same bits on any ranks, whatever the placement, the exchange and the batch."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenyard as ty
from tests.models import WATCHED, batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.errors import PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.batch import BatchRoutes
from tokenyard.planning.wiring import wire_layer
from tokenyard.routing import Placement
from tokenyard.rows import ChoiceRows, ExpertRows, UnfinalizedRows

RETURNING = [name for name, cls in EXCHANGES.items() if cls.returns_choices]


def drawn_batches(layer, tokens, seed, gaps):
    """Rows and routes of each rank. Some tokens name an expert twice; with `gaps` some choices are nobody's."""
    batches = []
    for rank, count in enumerate(tokens):
        x_TH, routes = batch(layer, count, seed=seed + 17 * rank)
        draw = torch.Generator().manual_seed(seed + 31 * rank)
        ids_TK = routes.topk_ids_TK.masked_fill(torch.rand(count, layer.top_k, generator=draw) < gaps, -1)
        batches.append((x_TH, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=routes.topk_weights_TK)))
    return batches


def results(group, layer, exchange, batches):
    plan = ty.plan([layer], group, exchange=exchange)
    y_TH = build(plan, "moe")(*batches[group.rank])
    plan.close()
    return y_TH


def on_one_rank(layer, batches):
    """What one rank with all experts gives for all tokens, in one batch."""
    x_TH = torch.cat([rows for rows, _ in batches])
    routes = ty.Routes(
        topk_ids_TK=torch.cat([routes.topk_ids_TK for _, routes in batches]),
        topk_weights_TK=torch.cat([routes.topk_weights_TK for _, routes in batches]),
    )
    alone = ty.LayerSpec(**{**vars(layer), "placement": "contiguous", "max_tokens": max(1, len(x_TH))})
    (y_TH,) = on_ranks(1, results, alone, "two_sided", [(x_TH, routes)])
    return y_TH


@st.composite
def placements(draw, num_experts, world):
    if draw(st.booleans()):
        return draw(st.sampled_from(["contiguous", "round_robin"]))
    owners = draw(st.lists(st.integers(0, world - 1), min_size=num_experts, max_size=num_experts))
    table = [[e for e, owner in enumerate(owners) if owner == rank] for rank in range(world)]
    base = Placement.explicit(num_experts, table)
    copies = {e: [(owner + 1) % world] for e, owner in enumerate(owners) if world > 1 and draw(st.booleans())}
    return Placement.replicated(base, copies)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_bits_depend_on_neither_ranks_nor_placement_nor_exchange(data):
    world = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts, top_k = data.draw(st.sampled_from([(5, 2), (3, 4), (9, 6)]))
    layer = spec(
        sum="choices",
        num_experts=experts,
        top_k=top_k,
        hidden_size=data.draw(st.sampled_from([32, 33])),
        placement=data.draw(placements(experts, world)),
        experts=data.draw(st.sampled_from(["reference", "grouped"])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32])),
        wire=data.draw(st.sampled_from([None, "mxfp8", "nvfp4"])),
        combine_wire=data.draw(st.sampled_from([None, None, "mxfp8", "nvfp4"])),
        weights=data.draw(st.sampled_from(["bf16", "fp32", "mxfp4"])),
        weight_on=data.draw(st.sampled_from(["output", "input"])),
    )
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=world, max_size=world))
    batches = drawn_batches(
        layer, tokens, data.draw(st.integers(0, 999)), data.draw(st.sampled_from([0, 0.4]))
    )
    by_rank = on_ranks(world, results, layer, data.draw(st.sampled_from(RETURNING)), batches)
    assert torch.equal(torch.cat(by_rank), on_one_rank(layer, batches))


@pytest.mark.parametrize("exchange", RETURNING)
def test_processes_give_the_bits_of_one_rank(exchange):
    layer = spec(sum="choices", num_experts=7, top_k=4, placement="round_robin", hidden_size=48)
    batches = drawn_batches(layer, (5, 0, 9), 1, 0.3)
    by_rank = on_ranks(3, results, layer, exchange, batches, ranks="processes")
    assert torch.equal(torch.cat(by_rank), on_one_rank(layer, batches))


def test_by_ranks_bits_do_depend_on_the_placement():
    """The reason for all this; and a test that would not notice a difference would show here."""
    layer = spec(num_experts=7, top_k=4, experts="reference")
    batches = drawn_batches(layer, (9, 9, 9), 1, 0)
    by_rank = on_ranks(3, results, layer, "one_sided", batches)
    assert not torch.equal(torch.cat(by_rank), on_one_rank(layer, batches))


def before_and_after_a_loss(group, layer, batches):
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    before_TH = built(*batches[group.rank])
    if group.rank == 2:
        return None
    plan.go_on_without([2])
    return before_TH, built(*batches[group.rank])


def test_a_loss_with_replicas_changes_no_bit():
    everywhere = {expert: [(expert + 1) % 3] for expert in range(6)}
    placed = Placement.replicated(Placement.round_robin(6, 3), everywhere)
    layer = spec(sum="choices", num_experts=6, top_k=4, placement=placed)
    batches = drawn_batches(layer, (7, 5, 3), 2, 0.2)
    for before_TH, after_TH in on_ranks(3, before_and_after_a_loss, layer, batches)[:2]:
        assert torch.equal(before_TH, after_TH)


def watched(group, layer, exchange, batches):
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    built = build(plan, "moe")
    y_TH = [built(*batches[group.rank]) for _ in range(2)][-1]
    plan.close()
    return same_bits(
        y_TH, twin(plan.wiring("moe"), random_weights(layer, 0), *batches[group.rank], group.rank)
    )


@pytest.mark.parametrize("exchange", [name for name in WATCHED if name in RETURNING])
@pytest.mark.parametrize("combine_wire", [None, "nvfp4"])
def test_a_paranoid_plan_watches_every_choice(exchange, combine_wire):
    layer = spec(sum="choices", num_experts=6, top_k=4, combine_wire=combine_wire)
    assert all(on_ranks(3, watched, layer, exchange, drawn_batches(layer, (5, 0, 6), 3, 0.3)))


# -- What comes home ---------------------------------------------------------------------------------------


def counted(group, layer):
    plan = ty.plan([layer], group, exchange="two_sided")
    ids_TK = torch.tensor([[0, 1, 3], [3, 3, -1]])  # three choices here and there; one twice; one of nobody
    routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(2, 3))
    build(plan, "moe")(torch.ones(2, 32).bfloat16(), routes)
    row = plan.exchange.transport.region_bytes(plan.wiring("moe").exchange_spec).combine_row
    return [nbytes // row for nbytes in plan.stats()["moe"].combine_bytes], str(plan)


def test_each_choice_comes_home_as_one_row_and_the_plan_says_how_many_that_are():
    layer = spec(sum="choices", num_experts=4, top_k=3)
    (first, told), (second, _) = on_ranks(2, counted, layer)
    assert (first, second) == ([2, 2], [3, 3])
    # Of 4 sets of 3 experts none lies on one rank alone: two ranks a token, three choices.
    assert 'the result of each choice comes home: 1.50 times the rows of sum="ranks"' in told
    assert "weight: receiver, reduce experts: exchange, reduce ranks: exchange" in told


def test_memory_for_results_follows_from_the_choices():
    by_ranks, by_choices = (ty.draft([spec(sum=sum)], 4) for sum in ("ranks", "choices"))
    assert by_choices.combine_bytes == 2 * by_ranks.combine_bytes
    assert by_choices.dispatch_bytes == by_ranks.dispatch_bytes


def test_unfinalized_rows_are_weighted_in_the_order_of_choices():
    rows = UnfinalizedRows(
        rows_NH=torch.tensor([[1.0], [2.0], [3.0]]),
        weights_N=torch.tensor([10.0, 100.0, 1000.0]),
        index_N=torch.tensor([5, 0, 3]),
        num_rows=3,
        top_k=2,
    )
    assert rows.weighted().rows_NH.tolist() == [[200.0], [3000.0], [10.0]]


# -- What is refused ---------------------------------------------------------------------------------------


def test_an_exchange_that_sums_on_the_way_refuses():
    with pytest.raises(
        PlanError, match=r"sum=choices: hierarchical \(HierarchicalTransport\) sums"
    ) as caught:
        ty.draft([spec(sum="choices")], 4, exchange="hierarchical")
    assert "exchange=" in str(caught.value)


def test_grouped_experts_on_gpus_refuse():
    layer = spec(sum="choices", experts="grouped")
    reason = wire_layer(
        layer,
        index=0,
        world=2,
        exchange=EXCHANGES["two_sided"],
        max_tokens=None,
        device=torch.device("cuda"),
    )
    assert str(reason) == (
        "sum=choices: the bits of a row of grouped experts on cuda depend on the rest of its batch"
    )


def wrong_results(group, sum):
    plan = ty.plan([spec(sum=sum)], group)
    exchange_spec = plan.wiring("moe").exchange_spec
    x_TH, routes = batch(plan.wiring("moe").spec, 4)
    answers = []
    for result in (
        ExpertRows(rows_RH=torch.zeros(4, 32)),
        ChoiceRows(rows_NH=torch.zeros(8, 32)),
        ChoiceRows(rows_NH=torch.zeros(8, 31)),
        ChoiceRows(rows_NH=torch.zeros(8, 32, dtype=torch.int32)),
    ):
        arrival = plan.exchange.dispatch(exchange_spec, exchange_spec.wire.encode(x_TH), routes)
        answers.append(str(raised(arrival.combine, result)))
    return answers


def test_a_result_that_is_summed_otherwise_than_planned_is_refused():
    ((one, fits, narrow, whole),) = on_ranks(1, wrong_results, "choices")
    assert "combine was given a ExpertRows; expected ChoiceRows, weighted and not summed" in one
    assert fits == "None"
    assert "ChoiceRows holds a tensor float32[8, 31]; expected a floating-point tensor [8, 32]" in narrow
    assert "ChoiceRows holds a tensor int32[8, 32]" in whole
    ((fits, single, *_),) = on_ranks(1, wrong_results, "ranks")
    assert fits == "None"
    assert "combine was given a ChoiceRows" in single
    assert 'or plan with sum="choices"' in single


def test_choices_of_a_rank_are_in_their_order_however_many_there_are():
    """torch keeps the order of equal numbers only if it is asked to, and of a few without being asked."""
    placement = Placement(num_experts=3, table=((0, 1), (2,)))
    ids_TK = torch.randint(-1, 3, (300, 4), generator=torch.Generator().manual_seed(1))
    routes = BatchRoutes(
        spec=SimpleNamespace(placement=placement),
        routes=ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(300, 4)),
        num_tokens=300,
        rank=0,
    )
    ids = ids_TK.flatten().tolist()
    due = [[n for n, expert in enumerate(ids) if expert in held] for held in placement.table]
    assert [choices.tolist() for choices in routes.choices_by_rank] == due
