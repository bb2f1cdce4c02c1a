"""Plans: wired or refused before the first token, on every rank, with choices that work."""

import dataclasses
import os
import re
import time

import pytest
import torch

import tokenyard as ty
from tests.exchange import interpreter
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights
from tokenyard.duties import Duty, Party
from tokenyard.errors import Alternative, HandleError, InputError, PlanError, PlanMismatch, UnknownName
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.formats import Payload
from tokenyard.group import thread_groups
from tokenyard.planning import gather_stats
from tokenyard.planning.alternatives import apply_alternative
from tokenyard.planning.drafting import EXCHANGE_VARIABLE, PARANOID_VARIABLE, draft
from tokenyard.routing import GroupedSigmoidRouter, Placement, SoftmaxRouter
from tokenyard.rows import UnfinalizedRows

interpreter.install()  # alternatives that are offered run here, kernels too
both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])
router = SoftmaxRouter(2, renormalize=True)

# Layers that cannot be wired, and a part of what the error says.
IMPOSSIBLE = {
    "quantized twice": (
        {"wire": "mxfp8", "expert_rows": "nvfp4"},
        "expert_rows=nvfp4: the rows arrive as mxfp8, and would be quantized a second time",
    ),
    "a wire for other rows": ({"wire": "fp32"}, "wire=fp32: takes float32 rows, not bfloat16"),
    "a way back that cannot": (
        {"combine_wire": "fp32"},
        "combine_wire=fp32: takes float32 rows, not bfloat16",
    ),
    "logits through two_sided": (
        {"experts": "self_routing", "router": router},
        "two_sided sends a row only where its experts are",
    ),
    "scales in a layout that the format has not": (
        {"wire": "fp8_block128", "experts": "Swizzled"},
        "wire=fp8_block128: swizzled experts want swizzled scales, which it does not have",
    ),
    "weights of an unknown kind": ({"weights": "int3"}, "weights=int3: grouped experts hold weights in"),
    "weights whose products take no codes": (
        {"inner": "fp8_block128"},
        "inner=fp8_block128: grouped experts with bf16 weights hold numbers between their products as exact",
    ),
    "a format that nobody holds between products": (
        {"inner": "nvfp4", "weights": "fp8_block128"},
        "inner=nvfp4: grouped experts with fp8_block128 weights hold numbers between their products as exact, "
        "fp8_block128",
    ),
    "the router's top-k": ({"top_k": 3, "router": router}, "top_k=3: the layer's router chooses 2"),
    "the router's scaling": (
        {"routed_scaling": 2.5, "router": router},
        "routed_scaling=2.5: the layer's router scales its weights by 1.0 already",
    ),
    "weight on nothing": ({"weight_on": "both"}, "weight_on=both: choose output or input"),
    "reduced by nobody": ({"reduce_ranks": "nobody"}, "reduce_ranks=nobody: choose exchange or caller"),
    "summed over nothing": ({"sum": "tokens"}, "sum=tokens: choose ranks or choices"),
    "choices summed by the caller": (
        {"sum": "choices", "reduce_ranks": "caller"},
        'reduce_ranks=caller: with sum="choices" there is one sum, of choices, and the exchange makes it',
    ),
    "choices of experts whose rows depend on each other": (
        {"sum": "choices", "experts": "Swizzled"},
        "sum=choices: the bits of a row of swizzled experts depend on the other rows of its batch",
    ),
    "choices of experts whose rows depend on each other there": (
        {"sum": "choices", "experts": "fused"},
        "sum=choices: the bits of a row of fused experts on cpu depend on the rest of its batch",
    ),
    "choices that only the experts know": (
        {"sum": "choices", "experts": "self_routing", "router": router},
        "sum=choices: experts that route by themselves leave home in the dark",
    ),
    "a placement of other experts": (
        {"placement": Placement.contiguous(7, 2)},
        "placement=a placement of 7 experts on 2 ranks, contiguous",
    ),
}


def test_a_router_must_fit_the_experts_of_its_layer():
    with pytest.raises(PlanError, match="router=5 experts in 3 groups: expected groups of one size"):
        ty.draft([spec(router=GroupedSigmoidRouter(2, num_groups=3))], 2)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_wired_is_refused_with_alternatives_that_run(name):
    changes, message = IMPOSSIBLE[name]
    if changes.get("experts") == "Swizzled":
        changes = changes | {"experts": Swizzled}
    impossible = [spec("body"), spec("odd", **changes)]
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        ty.draft(impossible, 2, exchange="two_sided", device=torch.device("cpu"))
    error = caught.value
    assert error.layer == "odd"
    assert str(error).startswith("layer 'odd': ")
    assert error.alternatives, "the planner found nothing that works"
    for alternative in error.alternatives:
        assert str(alternative) in str(error)
        changed, exchange = apply_alternative(alternative, impossible, "odd", "two_sided")
        for finite in on_ranks(2, run_every_layer, changed, exchange):
            assert finite


def run_every_layer(group, layers, exchange):
    plan = ty.plan(layers, group, exchange=exchange)
    results = []
    for layer in layers:
        built = build(plan, layer.name)
        x_TH, routes = batch(layer, 6, seed=group.rank)
        given = torch.randn(6, layer.num_experts) if built.wiring.exchange_spec.carries_logits else routes
        by_caller = layer.reduce_ranks == "caller"
        y_TH = built.unreduced(x_TH, given).reduce().y_TH if by_caller else built(x_TH, given)
        results.append(bool(torch.isfinite(y_TH).all()) and y_TH.shape == x_TH.shape)
    return all(results)


def test_an_alternative_of_one_layer_must_not_break_another():
    # With allgather the self-routing layer fits, and so do all others: the exchange may be offered.
    with pytest.raises(PlanError) as caught:
        ty.draft([spec("a"), spec("b", experts="self_routing", router=router)], 2, exchange="two_sided")
    assert Alternative(changes={"exchange": "allgather"}) in caught.value.alternatives


def test_two_changes_are_offered_where_one_is_not_enough():
    with pytest.raises(PlanError) as caught:
        ty.draft([spec(wire="fp32", combine_wire="fp32")], 2)
    assert caught.value.alternatives
    assert all(len(a.changes) == 2 for a in caught.value.alternatives)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wire": "mxpf8"}, "unknown format 'mxpf8'.*did you mean 'mxfp8'"),
        ({"combine_wire": "bf61"}, "unknown format 'bf61'.*did you mean 'bf16'"),
        ({"experts": "groupd"}, "unknown experts 'groupd'.*did you mean 'grouped'"),
        ({"sum": "all", "wire": "mxpf8"}, "unknown format 'mxpf8'"),
        ({"activation": "swigul"}, "unknown activation 'swigul'.*did you mean 'swiglu'"),
        ({"wire": "mxfp8(alignment=100)"}, "alignment"),
    ],
)
def test_unknown_names_come_with_the_nearest_match_and_the_layer(changes, message):
    with pytest.raises(ty.TokenyardError, match=message) as caught:
        ty.draft([spec("third.layer", **changes)], 2)
    assert caught.value.layer == "third.layer"


def test_unknown_placements_and_exchanges():
    with pytest.raises(PlanError, match="placement=unknown placement 'round_robbin'"):
        ty.draft([spec(placement="round_robbin")], 2)
    with pytest.raises(UnknownName, match=r"unknown exchange 'two_side'.*did you mean 'two_sided'"):
        ty.draft([spec()], 2, exchange="two_side")


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_experts", "top_k"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, "8"])
def test_sizes_are_whole_numbers_of_at_least_one(field, value):
    with pytest.raises(PlanError, match=f"{field}={value}: must be a whole number of at least 1"):
        ty.draft([spec(**{field: value})], 2)


@pytest.mark.parametrize("value", [None, 0, -1, "many"])
def test_a_plan_needs_to_know_the_most_tokens(value):
    with pytest.raises(PlanError, match=f"max_tokens={value}: say how many tokens a rank brings at most"):
        ty.draft([spec(max_tokens=value)], 2)


def test_a_layers_own_max_tokens_goes_before_the_plans():
    drafted = ty.draft([spec("a", max_tokens=7), spec("b", max_tokens=None)], 2, max_tokens=99)
    assert [w.exchange_spec.max_tokens for w in drafted.wirings] == [7, 99]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "layers is empty"),
        (["moe"], "layers holds a str"),
        ([spec("a"), spec("b"), spec("a")], "a stands more than once"),
    ],
)
def test_the_list_of_layers_is_checked(layers, message):
    with pytest.raises(InputError, match=message):
        ty.draft(layers, 2)


def test_dtypes_that_rows_cannot_have():
    with pytest.raises(PlanError, match="dtype=float64: rows are bfloat16, float16, float32"):
        ty.draft([spec(dtype=torch.float64)], 2)


@pytest.mark.parametrize("name", ["ids", "data", "scales"])
def test_a_further_payload_must_not_take_a_name_of_the_packet(name):
    payload = Payload(name=name, dtype=torch.int32, width=1)
    with pytest.raises(PlanError, match=f"payloads={name}: a packet has a payload of this name already"):
        ty.draft([spec(payloads=(payload,))], 2)


def test_two_further_payloads_have_two_names():
    tag = Payload(name="tag", dtype=torch.int32, width=1)
    assert ty.draft([spec(payloads=(tag, dataclasses.replace(tag, name="other")))], 2).specs
    with pytest.raises(PlanError, match="payloads=tag: a packet has a payload of this name already"):
        ty.draft([spec(payloads=(tag, tag))], 2)


# -- Ranks that disagree ---------------------------------------------------------------------------------------

DIFFERENCES = {
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_experts": 6,
    "top_k": 1,
    "max_tokens": 3,
    "dtype": torch.float16,
    "wire": "nvfp4",
    "combine_wire": "fp16",
    "expert_rows": "mxfp8",
    "activation": "gelu",
    "bias": True,
    "weights": "fp32",
    "inner": "fp8_block128",
    "weight_on": "input",
    "router": router,
    "routed_scaling": 2.5,
    "placement": "round_robin",
    "spare_experts": 2,
    "experts": "reference",
    "payloads": (Payload(name="tag", dtype=torch.int64, width=1),),
    "reduce_ranks": "caller",
    "sum": "choices",
    "gradient_wire": "mxfp8",
    "keep": "rows",
    "token_numbers": True,
    "name": "other",
}


def test_every_field_of_a_spec_is_compared():
    fields = {f.name for f in dataclasses.fields(ty.LayerSpec)}
    assert set(DIFFERENCES) == fields


def plan_that_differs(group, field, value):
    changes = {field: value} if group.rank == 1 else {}
    try:
        held = "fp8_block128" if field == "inner" else "bf16"  # the only weights that have a choice there
        ty.plan([spec("a"), dataclasses.replace(spec("b", weights=held), **changes)], group)
    except PlanMismatch as error:
        return error.differences, str(error), group.gather_json("still here")
    return None


@pytest.mark.parametrize("field", DIFFERENCES)
def test_all_ranks_raise_when_one_ranks_layer_differs_in_any_field(field):
    for rank, outcome in enumerate(on_ranks(3, plan_that_differs, field, DIFFERENCES[field])):
        assert outcome is not None, f"rank {rank} did not notice"
        differences, message, after = outcome
        name = f"layers[1].{field}"
        assert name in differences
        assert differences[name][0] == differences[name][2] != differences[name][1]
        assert name in message
        assert "rank 1 has" in message
        assert after == ["still here"] * 3


@pytest.mark.parametrize(
    ("name", "most"), [("hidden_size", 2**31 - 1), ("intermediate_size", 2**31 - 1), ("num_experts", 65536)]
)
def test_sizes_up_to_the_limit_are_planned_and_larger_ones_are_not(name, most):
    small = {"hidden_size": 8, "intermediate_size": 8, "max_tokens": 1, "experts": "reference"}
    assert ty.draft([spec(**(small | {name: most}))], 2, exchange="two_sided").specs
    with pytest.raises(PlanError, match=f"{name}={most + 1}"):
        ty.draft([spec(**(small | {name: most + 1}))], 2, exchange="two_sided")


@pytest.mark.parametrize(("name", "most"), [("world", 65536), ("in_flight", 1024)])
def test_counts_up_to_the_limit_are_planned_and_larger_ones_are_not(name, most):
    def draft(number):
        world, in_flight = {"world": (number, 1), "in_flight": (2, number)}[name]
        return ty.draft([spec(max_tokens=1)], world, exchange="two_sided", in_flight=in_flight)

    assert draft(most).specs
    with pytest.raises(InputError, match=f"{name} is {most + 1}"):
        draft(most + 1)


def test_what_differs_is_shown_as_it_was_asked_for():
    for differences, _, _ in on_ranks(3, plan_that_differs, "inner", "fp8_block128"):
        assert list(differences["layers[1].inner"].values()) == ["exact", "fp8_block128", "exact"]


def test_all_processes_raise_too():
    for outcome in on_ranks(3, plan_that_differs, "wire", "nvfp4", ranks="processes"):
        assert list(outcome[0]["layers[1].wire"].values()) == ["bf16", "nvfp4", "bf16"]


def other_order(group):
    layers = [spec("a", hidden_size=16), spec("b", hidden_size=48)]
    error = raised(ty.plan, layers[::-1] if group.rank == 0 else layers, group)
    return type(error).__name__, "layers[0].name" in error.differences


def other_length(group):
    error = raised(ty.plan, [spec("a"), spec("b")][: 1 + (group.rank != 2)], group)
    return type(error).__name__, error.differences["number of layers"] == {0: 2, 1: 2, 2: 1}


def other_settings(group):
    error = raised(ty.plan, [spec()], group, exchange="allgather" if group.rank else "two_sided", in_flight=1)
    return type(error).__name__, list(error.differences) == ["exchange"]


@pytest.mark.parametrize("differs", [other_order, other_length, other_settings])
def test_order_length_and_settings_are_compared(differs):
    assert on_ranks(3, differs) == [("PlanMismatch", True)] * 3


def unreadable_on_one(group):
    """A router's bias that has no numbers: found only when plans are compared."""
    bias_E = torch.zeros(5, device="meta" if group.rank == 1 else "cpu")
    try:
        ty.plan([spec(router=GroupedSigmoidRouter(2, choice_bias_E=bias_E))], group)
    except Exception as error:
        return type(error).__name__
    return None


def test_what_cannot_be_compared_on_one_rank_reaches_all():
    assert on_ranks(2, unreadable_on_one) == ["PeerFailed", "NotImplementedError"]


def plan_error_on_one(group):
    error = raised(ty.plan, [spec(wire="fp32" if group.rank == 1 else "bf16")], group)
    plan = ty.plan([spec()], group)  # the group is still usable
    return type(error).__name__, str(error), plan.local_experts("moe")


@both_kinds
def test_an_error_in_the_plan_of_one_rank_reaches_all(ranks):
    results = on_ranks(3, plan_error_on_one, ranks=ranks)
    assert [name for name, _, _ in results] == ["PeerFailed", "PlanError", "PeerFailed"]
    assert "rank 1 failed in plan: PlanError: layer 'moe', rank 1: wire=fp32" in results[0][1]
    assert [experts for _, _, experts in results] == [[0, 1], [2, 3], [4]]


# -- Names, printing, stats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("flashinfer_nvlink_one_sided", "one_sided"),
        ("flashinfer_nvlink_two_sided", "two_sided"),
        ("allgather_reducescatter", "allgather"),
    ],
)
def test_the_names_that_engines_use_are_accepted(alias, name):
    assert ty.draft([spec()], 2, exchange=alias).exchange.name == name


def test_a_plan_tells_what_is_quantized_between_the_products():
    layers = [
        spec(name="exact", weights="fp8_block128"),
        spec(name="codes", weights="fp8_block128", inner="fp8_block128"),
    ]
    exact, codes = str(draft(layers, 2, max_tokens=4)).split("codes: ")
    assert "grouped (auto: on CPUs), fp8_block128 weights, 5 experts" in exact
    assert "(auto: on CPUs), fp8_block128 weights, fp8_block128 between the products, 5 experts" in codes


def test_a_plan_tells_what_experts_take_for_weights_in_another_form():
    """Once for all layers: as much as the rank with the most experts may take in the largest of them."""
    layer = spec(
        num_experts=5,
        hidden_size=256,
        intermediate_size=128,
        weights="mxfp4",
        inner="fp8_block128",
        experts="fused",
    )
    larger = dataclasses.replace(layer, name="larger", hidden_size=512)
    drafted = draft([layer, larger], 2, max_tokens=4)
    assert drafted.scratch_bytes == 3 * 3 * 128 * 512
    assert str(drafted).endswith("in long batches their experts share 589.8 KB more, for weights as e4m3")

    class Declined(EXPERTS["fused"]):
        name = "declined"
        expands = False

    others = [
        dataclasses.replace(layer, inner="exact"),
        dataclasses.replace(layer, experts="grouped"),
        dataclasses.replace(layer, experts=Declined),
    ]
    odd = dataclasses.replace(layer, hidden_size=264)
    for other in [*others, odd]:
        assert draft([other], 2, max_tokens=4).scratch_bytes == 0
        assert "long batches" not in str(draft([other], 2, max_tokens=4))


class OwnKernel(EXPERTS["grouped"]):
    """A kernel of one's own, which says nothing of what it holds between its products."""

    name = "own"

    def compute(self, received, *, finalize):
        return super().compute(received, finalize=finalize)


def test_experts_of_ones_own_hold_codes_only_where_they_say_so():
    layer = spec(weights="fp8_block128", inner="fp8_block128", experts=OwnKernel)
    with pytest.raises(PlanError, match=r"own experts with fp8_block128 weights hold numbers .* as exact"):
        draft([layer], 2, max_tokens=4)


def test_the_environment_overrides_the_exchange(monkeypatch):
    monkeypatch.setenv(EXCHANGE_VARIABLE, "allgather_reducescatter")
    assert ty.draft([spec()], 2, exchange="two_sided").exchange.name == "allgather"
    monkeypatch.setenv(EXCHANGE_VARIABLE, "")
    assert ty.draft([spec()], 2, exchange="two_sided").exchange.name == "two_sided"


def test_a_plan_prints_a_row_per_distinct_wiring_with_duties_and_bytes():
    body = {"hidden_size": 100, "wire": "mxfp8(alignment=256)", "max_tokens": 8}
    head = spec("head", hidden_size=48, top_k=1, num_experts=3, reduce_ranks="caller")
    drafted = ty.draft([spec("moe.0", **body), spec("moe.1", **body), head], 4, exchange="two_sided")
    text = str(drafted)
    assert "plan of 3 layers on 4 ranks, exchange two_sided, 1 in flight" in text
    assert "moe.0 … moe.1 (2 layers)" in text
    assert (
        "quantize: sender, pad: sender, weight: experts, reduce experts: experts, reduce ranks: exchange"
        in text
    )
    assert "reduce ranks: caller" in text
    # 256 columns + 8 scales + 2 ids + 2 weights, each from a multiple of 16: 256 + 16 + 16 + 16.
    assert "wire mxfp8(alignment=256) (304 bytes a row), back bf16 (208)" in text
    assert drafted.workspace_bytes == 4 * 8 * 304 + max(4 * 8 * 208, 4 * 16 * 96)


def counted(group, exchange):
    layer = spec("moe", num_experts=4, wire="mxfp8")
    idle = spec("idle")
    plan = ty.plan([layer, idle], group, exchange=exchange)
    built = build(plan, "moe")
    x_TH, _ = batch(layer, 3)
    # Each rank sends token 0 to rank 0, token 1 to rank 1, token 2 to both.
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]])
    began = time.monotonic()
    built(x_TH, ty.Routes(topk_ids_TK=ids, topk_weights_TK=torch.ones(3, 2)))
    mine = plan.stats()["moe"]
    return (
        mine,
        time.monotonic() - began,
        plan.stats()["idle"].rounds,
        gather_stats(plan),
        # On one host, rows of `hierarchical` go through memory.
        EXCHANGES["one_sided" if exchange == "hierarchical" else exchange].region_bytes(
            plan.wiring("moe").exchange_spec
        ),
    )


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_stats_count_rows_bytes_and_waits_by_rank_and_layer(exchange):
    results = on_ranks(2, counted, exchange)
    for mine, seconds, idle_rounds, everybody, nbytes in results:
        assert idle_rounds == 0
        assert (mine.rounds, mine.tokens) == (1, 3)
        assert mine.rows_sent == [2, 2]
        assert mine.rows_received == [2, 2]
        sent = 3 if exchange == "allgather" else 2
        assert mine.dispatch_bytes == [sent * nbytes.dispatch_row] * 2
        assert mine.combine_bytes == [2 * nbytes.combine_row] * 2
        assert mine.wait_s["dispatch"] > 0
        assert mine.wait_s["combine"] > 0
        assert sum(mine.wait_s.values()) < seconds
        assert [rank["moe"]["rows_sent"] for rank in everybody] == [[2, 2], [2, 2]]


def test_a_layer_that_is_kept_must_be_there():
    def body(group):
        plan = ty.plan([spec("a"), spec("b")], group)
        error = raised(plan.trim, keep=["a", "c"])
        return error, [layer.name for layer in plan.draft.specs]

    for error, names in on_ranks(2, body):
        assert isinstance(error, UnknownName)
        assert "'c'" in str(error)
        assert names == ["a", "b"]


def two_plans(group):
    first, second = ty.plan([spec()], group), ty.plan([spec()], group, exchange="allgather")
    x_TH, routes = batch(spec(), 4, seed=group.rank)
    layer = build(first, "moe")
    before = layer(x_TH, routes)
    between = build(second, "moe")(x_TH, routes)
    first.close()
    late = [
        raised(layer, x_TH, routes),
        raised(build, first, "moe"),
        raised(first.extend, [spec("other")]),
        raised(first.trim),
        raised(first.go_on_without, [1 - group.rank]),
        raised(first.readmit),
        raised(gather_stats, first),
    ]
    after = build(second, "moe")(x_TH, routes)
    return torch.equal(before, between) and torch.equal(between, after), late


@both_kinds
def test_several_plans_live_in_one_process_and_close_alone(ranks):
    for same, late in on_ranks(2, two_plans, ranks=ranks):
        assert same
        for error in late:
            assert isinstance(error, HandleError)
            assert "the plan is closed" in str(error)


def after_a_loss(group):
    """Rank 2 is gone; a third of the experts with it."""
    layer = spec(num_experts=6, top_k=3, dtype=torch.float32, weights="fp32")
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 6, seed=group.rank)
    if group.rank == 2:
        return None
    wrong = [raised(plan.go_on_without, lost) for lost in ([3], [-1], [group.rank], ["2"])]
    plan.go_on_without([2], renormalize=True)
    renormalized = built(x_TH, routes)
    plan.extend([spec("other")])
    return wrong, plan.stats()["moe"].dropped, torch.equal(renormalized, built(x_TH, routes))


def test_a_plan_that_goes_on_checks_who_is_lost_and_keeps_what_it_was_told():
    for rank, (wrong, dropped, same) in enumerate(on_ranks(3, after_a_loss)[:2]):
        for error in wrong:
            assert isinstance(error, InputError)
            assert f"expected ranks from 0 to 2, other than {rank}, which asks" in str(error)
        assert dropped > 0
        assert same


def loss_of_experts_that_route(group):
    layer = spec(num_experts=6, experts="self_routing", router=router)
    plan = ty.plan([layer], group, exchange="allgather")
    if group.rank == 2:
        return None
    return raised(plan.go_on_without, [2], renormalize=True)


def test_experts_that_route_by_themselves_do_not_renormalize_without_a_word():
    for error in on_ranks(3, loss_of_experts_that_route)[:2]:
        assert "route by themselves, and would not renormalize" in str(error)
        assert "fix: go on without renormalize=True" in str(error)


@pytest.mark.parametrize("group", [4, None, thread_groups(2)], ids=["a number", "nothing", "all groups"])
def test_a_plan_is_made_with_a_group(group):
    with pytest.raises(
        InputError, match=r"expected a Group.*fix: call it inside a function that `launch` runs"
    ):
        ty.plan([spec()], group)


def other_arguments(group):
    plan = ty.plan([spec()], group)
    weights = random_weights(spec(), 0).select(plan.local_experts("moe"))
    return (
        raised(ty.MoELayer, plan.draft, "moe", weights),
        raised(ty.MoELayer, "moe", plan, weights),
        raised(ty.MoELayer, plan, "moe", (weights.w13, weights.w2)),
        raised(ty.MoELayer, plan, "moe", None),
    )


def test_a_layer_is_made_of_a_plan_a_name_and_weights():
    (drafted, swapped, pair, nothing) = on_ranks(1, other_arguments)[0]
    for error in (drafted, swapped):
        assert isinstance(error, InputError)
        assert "expected a Plan, which all ranks have agreed on; fix: pass plan(layers, group" in str(error)
    for error in (pair, nothing):
        assert isinstance(error, InputError)
        assert "layer 'moe', rank 0: the weights are" in str(error)
        assert "fix: pass ExpertWeights(" in str(error)


def crossed_plans(group):
    plans = [ty.plan([spec()], group, exchange="two_sided") for _ in range(2)]
    x_TH, routes = batch(spec(), 4)
    error = raised(build(plans[group.rank], "moe"), x_TH, routes)
    y_TH = build(plans[0], "moe")(x_TH, routes)
    return type(error).__name__, bool(torch.isfinite(y_TH).all())


def test_ranks_that_call_different_plans_find_out_and_go_on():
    assert on_ranks(2, crossed_plans) == [("Drifted", True)] * 2


def environment_changes(group, variable, value):
    plan = ty.plan([spec("a")], group, exchange="two_sided")
    group.barrier()
    os.environ[variable] = value
    group.barrier()
    try:
        plan.extend([spec("b")])
        x_TH, routes = batch(spec("a"), 5, seed=group.rank)
        y_TH = build(plan, "a")(x_TH, routes)
    finally:
        group.barrier()
        os.environ.pop(variable, None)
    return plan.draft.exchange.name, plan.draft.paranoid, bool(torch.isfinite(y_TH).all())


@pytest.mark.parametrize(("variable", "value"), [(EXCHANGE_VARIABLE, "allgather"), (PARANOID_VARIABLE, "1")])
def test_a_plan_keeps_what_it_was_made_with_whatever_the_environment_says_later(variable, value):
    assert on_ranks(2, environment_changes, variable, value) == [("two_sided", False, True)] * 2


class Own(EXCHANGES["two_sided"]):
    name = "an exchange of one's own"


def test_a_layer_that_does_not_fit_an_exchange_of_ones_own_is_refused_with_alternatives():
    with pytest.raises(PlanError, match="wire=fp32") as caught:
        ty.draft([spec(wire="fp32")], 2, exchange=Own)
    assert {"wire": "mxfp8"} in [alternative.changes for alternative in caught.value.alternatives]


def test_a_layer_that_the_plan_does_not_have():
    plan = on_ranks(1, lambda group: ty.plan([spec("model.layers.3.mlp")], group))[0]
    with pytest.raises(UnknownName, match=r"did you mean 'model\.layers\.3\.mlp'"):
        plan.wiring("model.layer.3.mlp")


# -- Duties ----------------------------------------------------------------------------------------------------


class Unfinished(EXPERTS["reference"]):
    """A kernel that cannot finalize."""

    name = "unfinished"
    finalizes = False

    def compute(self, received, *, finalize):
        assert not finalize, "a kernel that cannot finalize was asked to"
        result = super().compute(received, finalize=False)
        assert isinstance(result, UnfinalizedRows)
        return result


class Swizzled(EXPERTS["reference"]):
    """A kernel that wants swizzled scales."""

    name = "swizzled"
    scale_layout = "swizzled"

    def compute(self, received, *, finalize):
        assert received.rows.scale_layout == ("swizzled" if "scales" in received.rows.payloads else "linear")
        return super().compute(received, finalize=finalize)


def test_every_duty_has_exactly_one_party():
    duty, party = Duty, Party

    def duties(**changes):
        (wiring,) = ty.draft([spec(hidden_size=100, **changes)], 2, exchange="allgather").wirings
        assert set(wiring.duties) == set(duty)  # none is forgotten, and a mapping cannot name two
        return wiring.duties

    plain = duties()
    assert plain[duty.QUANTIZE] is plain[duty.PAD] is plain[duty.SWIZZLE] is party.NOBODY
    assert plain[duty.ROUTED_SCALING] is party.NOBODY
    before = duties(wire="mxfp8")
    assert before[duty.QUANTIZE] is before[duty.PAD] is party.SENDER
    after = duties(expert_rows="mxfp8")
    assert after[duty.QUANTIZE] is after[duty.PAD] is party.EXPERTS
    unfinished = duties(experts=Unfinished)
    assert unfinished[duty.WEIGHT] is unfinished[duty.REDUCE_EXPERTS] is party.RECEIVER
    assert duties(experts=Unfinished, weight_on="input")[duty.WEIGHT] is party.EXPERTS
    assert duties(wire="mxfp8", experts=Swizzled)[duty.SWIZZLE] is party.RECEIVER
    assert duties(experts=Swizzled)[duty.SWIZZLE] is party.NOBODY  # bf16 has no scales
    assert duties(reduce_ranks="caller")[duty.REDUCE_RANKS] is party.CALLER
    scaled = SoftmaxRouter(2, renormalize=True, routed_scaling=2.5)
    assert duties(router=scaled)[duty.ROUTED_SCALING] is party.ROUTER
    assert duties(routed_scaling=2.5)[duty.ROUTED_SCALING] is party.CALLER


def compare_kernels(group, wire, weight_on):
    layers = [
        spec("plain", experts="reference", wire=wire, weight_on=weight_on, hidden_size=100),
        spec("unfinished", experts=Unfinished, wire=wire, weight_on=weight_on, hidden_size=100),
        spec("swizzled", experts=Swizzled, wire=wire, weight_on=weight_on, hidden_size=100),
    ]
    plan = ty.plan(layers, group)
    x_TH, routes = batch(layers[0], 9, seed=group.rank)
    results = [build(plan, layer.name)(x_TH, routes) for layer in layers]
    return all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("wire", ["bf16", "mxfp8", "nvfp4"])
def test_whoever_has_the_duty_the_bits_are_the_same(wire, weight_on):
    assert on_ranks(2, compare_kernels, wire, weight_on) == [True, True]


@pytest.mark.parametrize(
    ("ranks", "settings", "name"),
    [
        (0, {}, "world"),
        (2, {"in_flight": 0}, "in_flight"),
        (2, {"in_flight": True}, "in_flight"),
        (2, {"sms": 0}, "sms"),
        (2, {"sms": 2.0}, "sms"),
        (2, {"sms": 1025}, "sms"),
    ],
)
def test_counts_that_make_no_plan(ranks, settings, name):
    spec = ty.LayerSpec(name="moe", hidden_size=32, intermediate_size=16, num_experts=4, top_k=1)
    with pytest.raises(InputError, match=f"^{name} is "):
        ty.draft([spec], ranks, **({"max_tokens": 4} | settings))


def test_multiprocessors_are_bounded_where_kernels_move_rows_and_nowhere_else():
    drafted = draft([spec()], 2, exchange="one_sided", sms=8)
    assert "1 in flight, 8 multiprocessors of a GPU for the exchange (sms)" in str(drafted)
    assert drafted.fields()["sms"] == 8
    errors = on_ranks(2, lambda group: raised(ty.plan, [spec()], group, exchange="one_sided", sms=8))
    assert all(isinstance(error, PlanError) and "sms=8: one_sided on cpu" in str(error) for error in errors)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_workspace_holds_every_dispatch_in_flight_of_the_largest_layer(exchange, in_flight):
    layers = [spec("wide", hidden_size=96, max_tokens=4), spec("long", max_tokens=32)]
    drafted = ty.draft(layers, 3, exchange=exchange, in_flight=in_flight)
    regions = [drafted.exchange.region_bytes(wiring.exchange_spec) for wiring in drafted.wirings]
    assert drafted.dispatch_bytes == max(region.dispatch for region in regions)
    assert drafted.combine_bytes == max(region.combine for region in regions)
    assert drafted.workspace_bytes == in_flight * (drafted.dispatch_bytes + drafted.combine_bytes) > 0


def test_a_workspace_of_the_largest_size_is_planned_and_a_larger_one_is_not(monkeypatch):
    layer = spec()
    nbytes = ty.draft([layer], 3, in_flight=2).workspace_bytes
    monkeypatch.setattr("tokenyard.planning.drafting._LARGEST_WORKSPACE", nbytes)
    assert ty.draft([layer], 3, in_flight=2).workspace_bytes == nbytes
    monkeypatch.setattr("tokenyard.planning.drafting._LARGEST_WORKSPACE", nbytes - 1)
    with pytest.raises(PlanError, match="max_tokens=16: rows of this layer would take"):
        ty.draft([layer], 3, in_flight=2)
