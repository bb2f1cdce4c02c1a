"""Routers against Transformers' own and against plain formulas in float64; routes against their check."""

from __future__ import annotations

import inspect
import json
import math
import sys

import pytest
import torch
from torch import Tensor

from tokenyard.errors import InputError, UnknownName
from tokenyard.routing import (
    ROUTERS,
    GroupedSigmoidRouter,
    Router,
    Routes,
    SoftmaxRouter,
    SqrtSoftplusRouter,
    TopLogitsRouter,
    router_class,
    routers,
)
from tokenyard.routing import routes as routes_module

HIDDEN, EXPERTS, TOKENS = 32, 16, 200


def bias(seed: int = 3, experts: int = EXPERTS) -> Tensor:
    return torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.3


def logits(seed: int = 0, tokens: int = TOKENS, experts: int = EXPERTS) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 3


def one_of_each() -> list[Router]:
    return [
        SoftmaxRouter(4, renormalize=True),
        SoftmaxRouter(4, renormalize=False, routed_scaling=1.7),
        SoftmaxRouter(4, renormalize=True, order="topk_softmax"),
        TopLogitsRouter(4),
        GroupedSigmoidRouter(4, num_groups=4, topk_groups=2, choice_bias_E=bias(), routed_scaling=2.5),
        GroupedSigmoidRouter(4, renormalize=False),
        SqrtSoftplusRouter(4, choice_bias_E=bias(), routed_scaling=1.5),
    ]


each_router = pytest.mark.parametrize("router", one_of_each(), ids=str)


def by_expert(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Ids in ascending order, and their weights: some gates return the chosen in no order."""
    ids_TK, order_TK = ids_TK.long().sort(dim=1)
    return ids_TK, weights_TK.gather(1, order_TK)


# ---- against the real gates ----


def mixtral() -> tuple[torch.nn.Module, Router]:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)
    return MixtralTopKRouter(config), SoftmaxRouter(4, renormalize=True)


def qwen3_moe(renormalize: bool) -> tuple[torch.nn.Module, Router]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=renormalize
    )
    return Qwen3MoeTopKRouter(config), SoftmaxRouter(4, renormalize=renormalize)


def olmoe() -> tuple[torch.nn.Module, Router]:
    from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeTopKRouter

    config = OlmoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=False)
    return OlmoeTopKRouter(config), SoftmaxRouter(4, renormalize=False)


def gpt_oss(router: Router) -> tuple[torch.nn.Module, Router]:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter

    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)
    gate = GptOssTopKRouter(config)
    torch.nn.init.normal_(gate.bias)
    return gate, router


def deepseek_v3(num_groups: int, topk_groups: int) -> tuple[torch.nn.Module, Router]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=topk_groups,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    gate = DeepseekV3TopkRouter(config)
    gate.e_score_correction_bias.copy_(bias())
    router = GroupedSigmoidRouter(
        4, num_groups=num_groups, topk_groups=topk_groups, choice_bias_E=bias(), routed_scaling=2.5
    )
    return gate, router


def deepseek_v4_config():
    configuration = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    return configuration.DeepseekV4Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        routed_scaling_factor=1.5,
        vocab_size=64,
    )


def deepseek_v4() -> tuple[torch.nn.Module, Router]:
    config = deepseek_v4_config()
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    gate = DeepseekV4TopKRouter(config)
    gate.e_score_correction_bias.copy_(bias())
    return gate, SqrtSoftplusRouter(4, choice_bias_E=bias(), routed_scaling=1.5)


@pytest.mark.parametrize(
    "make",
    [
        mixtral,
        lambda: qwen3_moe(True),
        lambda: qwen3_moe(False),
        olmoe,
        lambda: gpt_oss(TopLogitsRouter(4)),
        lambda: gpt_oss(SoftmaxRouter(4, renormalize=True, order="topk_softmax")),
        lambda: deepseek_v3(1, 1),
        lambda: deepseek_v3(4, 2),
        lambda: deepseek_v3(4, 4),
        deepseek_v4,
    ],
    ids=[
        "mixtral",
        "qwen3_moe",
        "qwen3_moe_raw",
        "olmoe",
        "gpt_oss",
        "gpt_oss_as_softmax",
        "deepseek_v3_flat",
        "deepseek_v3",
        "deepseek_v3_all_groups",
        "deepseek_v4",
    ],
)
@torch.no_grad()
def test_agrees_with_transformers(make) -> None:
    torch.manual_seed(7)
    gate, router = make()
    torch.nn.init.normal_(gate.weight, std=0.3)
    logits_TE, weights_TK, ids_TK = gate(torch.randn(TOKENS, HIDDEN))
    routes = router(logits_TE)
    routes.check(EXPERTS, top_k=4, num_tokens=TOKENS, scaled_by=router.routed_scaling)
    their_ids_TK, their_weights_TK = by_expert(ids_TK, weights_TK)
    our_ids_TK, our_weights_TK = by_expert(routes.topk_ids_TK, routes.topk_weights_TK)
    assert torch.equal(our_ids_TK, their_ids_TK)
    torch.testing.assert_close(our_weights_TK, their_weights_TK, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_weigh_agrees_with_the_hash_layers_of_deepseek_v4() -> None:
    config = deepseek_v4_config()
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    torch.manual_seed(8)
    gate = DeepseekV4HashRouter(config)
    torch.nn.init.normal_(gate.weight, std=0.3)
    gate.tid2eid.copy_(torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(64)]))
    input_ids_T = torch.randint(64, (TOKENS,))
    logits_TE, weights_TK, ids_TK = gate(torch.randn(TOKENS, HIDDEN), input_ids_T)
    routes = SqrtSoftplusRouter(4, routed_scaling=1.5).weigh(logits_TE, ids_TK)
    assert torch.equal(routes.topk_ids_TK.long(), ids_TK)
    torch.testing.assert_close(routes.topk_weights_TK, weights_TK, rtol=1e-6, atol=1e-7)
    assert routes.scaled_by == 1.5


# ---- against plain formulas ----


def plainly(router: Router, row: list[float]) -> dict[int, float]:
    """Expert → weight for one token, written out in Python's float64."""
    experts = range(len(row))
    if isinstance(router, SoftmaxRouter) and router.order == "softmax_topk":
        total = sum(math.exp(x) for x in row)
        score = [math.exp(x) / total for x in row]
    elif isinstance(router, GroupedSigmoidRouter):
        score = [1 / (1 + math.exp(-x)) for x in row]
    elif isinstance(router, SqrtSoftplusRouter):
        score = [math.sqrt(math.log1p(math.exp(x))) for x in row]
    else:
        score = [math.exp(x) for x in row]  # a softmax over the chosen is a renormalized exp
    choice_bias_E = getattr(router, "choice_bias_E", None)
    moved = [0.0] * len(row) if choice_bias_E is None else choice_bias_E.tolist()
    by = [s + b for s, b in zip(score, moved, strict=True)]
    eligible = list(experts)
    if isinstance(router, GroupedSigmoidRouter):
        size = len(row) // router.num_groups
        groups = [list(experts)[g * size : (g + 1) * size] for g in range(router.num_groups)]
        groups.sort(key=lambda group: -sum(sorted((by[e] for e in group), reverse=True)[:2]))
        eligible = [e for group in groups[: router.topk_groups] for e in group]
    chosen = sorted(eligible, key=lambda e: (-by[e], e))[: router.top_k]
    total = sum(score[e] for e in chosen) if router.renormalize else 1.0
    return {e: score[e] / total * router.routed_scaling for e in chosen}


@each_router
def test_agrees_with_the_plain_formula(router: Router) -> None:
    logits_TE = logits()
    routes = router(logits_TE)
    for row, ids, weights in zip(
        logits_TE.tolist(), routes.topk_ids_TK.tolist(), routes.topk_weights_TK.tolist(), strict=True
    ):
        expected = plainly(router, row)
        assert ids == list(expected)  # in the order of the choice, best first
        assert weights == pytest.approx(list(expected.values()), rel=2e-6)


def test_softplus_is_the_logit_itself_above_20() -> None:
    routes = SqrtSoftplusRouter(2, renormalize=False)(torch.tensor([[20.5, 400.0, -300.0]]))
    assert routes.topk_ids_TK.tolist() == [[1, 0]]
    torch.testing.assert_close(routes.topk_weights_TK, torch.tensor([[20.0, 20.5**0.5]]), rtol=1e-7, atol=0.0)


def test_the_bias_moves_the_choice_and_not_the_weight() -> None:
    row_TE = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    for family in (GroupedSigmoidRouter, SqrtSoftplusRouter):
        bias_E = torch.tensor([0.0, 0.0, 5.0, 1.0])
        routes = family(2, choice_bias_E=bias_E)(row_TE)
        assert routes.topk_ids_TK.tolist() == [[2, 3]]
        assert routes.topk_weights_TK.tolist() == [[0.5, 0.5]]


# ---- what all routers keep ----


@each_router
def test_output_types_and_no_change_of_the_input(router: Router) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits_TE = logits().to(dtype)
        before = logits_TE.clone()
        routes = router(logits_TE)
        assert routes.topk_ids_TK.dtype == torch.int32
        assert routes.topk_weights_TK.dtype == torch.float32
        assert routes.topk_ids_TK.is_contiguous()
        assert torch.equal(logits_TE, before)
        from_float = router(logits_TE.float())  # computed in float32: the dtype of the logits costs nothing
        assert torch.equal(routes.topk_ids_TK, from_float.topk_ids_TK)
        assert torch.equal(routes.topk_weights_TK, from_float.topk_weights_TK)


@each_router
def test_no_tokens(router: Router) -> None:
    routes = router(torch.empty(0, EXPERTS), valid_T=torch.ones(0, dtype=torch.bool))
    assert (routes.num_tokens, routes.top_k) == (0, 4)
    routes.check(EXPERTS, top_k=4, num_tokens=0, scaled_by=router.routed_scaling)


@each_router
def test_nan_in_padding_rows_stays_there(router: Router) -> None:
    logits_TE = logits(tokens=6)
    clean = router(logits_TE)
    logits_TE[1] = math.nan
    logits_TE[4, 5] = math.nan
    routes = router(logits_TE)
    routes.check(EXPERTS, scaled_by=router.routed_scaling)
    valid_T = torch.tensor([True, False, True, True, False, True])
    masked = router(logits_TE, valid_T=valid_T)
    masked.check(EXPERTS, scaled_by=router.routed_scaling)
    for found in (routes, masked):
        assert torch.equal(found.topk_ids_TK[valid_T], clean.topk_ids_TK[valid_T])
        assert torch.equal(found.topk_weights_TK[valid_T], clean.topk_weights_TK[valid_T])
    assert (masked.topk_ids_TK[~valid_T] == -1).all()
    assert (masked.topk_weights_TK[~valid_T] == 0).all()


@each_router
def test_ties_go_to_the_lowest_id(router: Router) -> None:
    unbiased = type(router)(**{key: value for key, value in vars(router).items() if key != "choice_bias_E"})
    assert unbiased(torch.zeros(3, EXPERTS)).topk_ids_TK.tolist() == [[0, 1, 2, 3]] * 3
    tied_TE = torch.zeros(1, EXPERTS)
    tied_TE[0, [6, 7]] = 1.0
    assert unbiased(tied_TE).topk_ids_TK[0, :2].tolist() == [6, 7]


@each_router
def test_a_token_is_routed_the_same_in_any_batch(router: Router) -> None:
    """Alone, or with any number of others: vectors of a CPU begin and end elsewhere then."""
    logits_TE = logits()
    whole = router(logits_TE)
    for tokens in (1, 2, 3, 7):
        for first in range(0, len(logits_TE) - tokens, tokens):
            some = slice(first, first + tokens)
            alone = router(logits_TE[some])
            assert torch.equal(whole.topk_ids_TK[some], alone.topk_ids_TK)
            assert torch.equal(whole.topk_weights_TK[some], alone.topk_weights_TK)


@each_router
def test_gradients_reach_the_logits(router: Router) -> None:
    logits_TE = logits(tokens=5).requires_grad_()
    router(logits_TE).topk_weights_TK[:, 0].sum().backward()
    assert logits_TE.grad is not None
    assert logits_TE.grad.isfinite().all()
    assert logits_TE.grad.abs().sum() > 0


@each_router
def test_weigh_repeats_what_the_router_chose(router: Router) -> None:
    logits_TE = logits()
    routes = router(logits_TE)
    again = router.weigh(logits_TE, routes.topk_ids_TK)
    assert torch.equal(again.topk_ids_TK, routes.topk_ids_TK)
    assert torch.equal(again.topk_weights_TK, routes.topk_weights_TK)
    assert again.scaled_by == routes.scaled_by


@each_router
def test_weigh_leaves_out_choices_of_nobody(router: Router) -> None:
    logits_TE = logits(tokens=1)
    ids_TK = torch.tensor([[3, -1, 5, -1]])
    routes = router.weigh(logits_TE, ids_TK)
    assert torch.equal(routes.topk_ids_TK, ids_TK.int())
    present = routes.topk_weights_TK[0, [0, 2]]
    if router.renormalize:
        assert present.sum().item() == pytest.approx(router.routed_scaling, rel=1e-6)
    with pytest.raises(InputError, match="holds id 16"):
        router.weigh(logits_TE, torch.tensor([[3, 16, 5, 1]]))
    with pytest.raises(InputError, match="3 choices per token"):
        router.weigh(logits_TE, torch.tensor([[3, 4, 5]]))


@each_router
def test_saturated_scores_give_finite_weights(router: Router) -> None:
    routes = router(torch.full((2, EXPERTS), -200.0))
    assert routes.topk_weights_TK.isfinite().all()


def test_groups_of_one_and_a_single_group() -> None:
    logits_TE = logits()
    flat = GroupedSigmoidRouter(4)(logits_TE)
    singles = GroupedSigmoidRouter(4, num_groups=EXPERTS, topk_groups=4)(logits_TE)
    assert torch.equal(flat.topk_ids_TK, singles.topk_ids_TK)


# ---- description and registry ----


def test_registry_names_every_router() -> None:
    assert set(ROUTERS) == {"softmax", "top_logits", "grouped_sigmoid", "sqrt_softplus"}
    assert router_class("softmax") is SoftmaxRouter
    with pytest.raises(UnknownName, match="did you mean 'grouped_sigmoid'"):
        router_class("grouped_sigmoids")


@each_router
def test_fields_are_json_and_rebuild_the_router(router: Router) -> None:
    fields = json.loads(json.dumps(router.fields()))
    assert fields.pop("name") == router.name
    if isinstance(fields.get("choice_bias_E"), dict):
        assert fields["choice_bias_E"]["shape"] == [EXPERTS]
        assert fields["choice_bias_E"]["dtype"] == "float32"
        assert len(fields["choice_bias_E"]["sha256"]) == 64
        fields["choice_bias_E"] = bias()
    assert router_class(router.name)(**fields).fields() == router.fields()


def test_fields_tell_biases_apart() -> None:
    one, same, other = (SqrtSoftplusRouter(4, choice_bias_E=bias(seed)) for seed in (1, 1, 2))
    assert one.fields() == same.fields()
    assert one.fields() != other.fields()
    assert one != same  # routers with tensors compare by identity
    assert SoftmaxRouter(4, renormalize=True) == SoftmaxRouter(4, renormalize=True)
    assert SoftmaxRouter(4, renormalize=True) != SoftmaxRouter(4, renormalize=False)


def test_a_bias_is_told_by_its_numbers_wherever_they_lie() -> None:
    """Every second number of a tensor, and a tensor that wants a gradient."""
    plain, spread = bias(), torch.stack((bias(), bias(4)), dim=1)[:, 0]
    assert not spread.is_contiguous()
    for same in (spread, plain.clone().requires_grad_()):
        assert (
            SqrtSoftplusRouter(2, choice_bias_E=same).fields()
            == SqrtSoftplusRouter(2, choice_bias_E=plain).fields()
        )


def test_str_shows_what_differs_from_the_defaults() -> None:
    router = GroupedSigmoidRouter(4, num_groups=4, topk_groups=2, choice_bias_E=bias(), routed_scaling=2.5)
    expected = "top_k=4, routed_scaling=2.5, choice_bias_E=float32[16], num_groups=4, topk_groups=2"
    assert str(router) == f"grouped_sigmoid({expected})"


# ---- errors of routers ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TopLogitsRouter(0), "top_k=0; expected top_k ≥ 1"),
        (lambda: SqrtSoftplusRouter(0), "top_k=0; expected top_k ≥ 1"),
        (lambda: GroupedSigmoidRouter(0), "top_k=0; expected top_k ≥ 1"),
        (lambda: SoftmaxRouter(2, renormalize=1), "renormalize=1; expected True or False"),
        (lambda: SqrtSoftplusRouter(5).check_experts(4), "top_k=5 of 4 experts; expected top_k from 1 to 4"),
        (lambda: TopLogitsRouter(5)(torch.zeros(2, 4)), "top_k=5 of 4 experts; expected top_k from 1 to 4"),
        (lambda: TopLogitsRouter(2, renormalize=False), "renormalize=False with a softmax over the chosen"),
        (
            lambda: SoftmaxRouter(2, renormalize=False, order="topk_softmax"),
            "renormalize=False with a softmax over the chosen",
        ),
        (lambda: TopLogitsRouter(2, routed_scaling=0.0), "routed_scaling=0.0; expected a positive number"),
        (lambda: TopLogitsRouter(2)(torch.zeros(4)), "logits_TE is a tensor float32[4]; expected a matrix"),
        (lambda: TopLogitsRouter(2)(torch.zeros(2, 3, 4)), "logits_TE is a tensor float32[2, 3, 4]"),
        (lambda: TopLogitsRouter(2)(torch.zeros(2, 4).long()), "logits_TE is a tensor int64[2, 4]"),
        (lambda: TopLogitsRouter(2)(torch.zeros(2, 4).double()), "logits_TE is a tensor float64[2, 4]"),
        (lambda: TopLogitsRouter(2)([[0.0, 1.0]]), "logits_TE is a list of 1"),
        (
            lambda: TopLogitsRouter(2)(torch.zeros(2, 4), valid_T=torch.ones(3).bool()),
            "valid_T is a tensor bool[3] on cpu; expected bool[2] on cpu",
        ),
        (
            lambda: TopLogitsRouter(2)(torch.zeros(2, 4), valid_T=torch.ones(2)),
            "valid_T is a tensor float32[2] on cpu; expected bool[2]",
        ),
        (
            lambda: GroupedSigmoidRouter(2, num_groups=3)(torch.zeros(2, 16)),
            "16 experts in 3 groups; expected groups of one size",
        ),
        (lambda: GroupedSigmoidRouter(2, num_groups=2, topk_groups=3), "topk_groups=3 of num_groups=2"),
        (lambda: GroupedSigmoidRouter(2, num_groups=2, topk_groups=0), "topk_groups=0 of num_groups=2"),
        (
            lambda: GroupedSigmoidRouter(5, num_groups=4, topk_groups=1).check_experts(16),
            "top_k=5 of the 4 experts in 1 chosen groups; expected top_k from 1 to 4",
        ),
        (
            lambda: SqrtSoftplusRouter(2, choice_bias_E=torch.zeros(8)).check_experts(16),
            "choice_bias_E holds 8 values for 16 experts",
        ),
        (
            lambda: GroupedSigmoidRouter(2, choice_bias_E=torch.zeros(8)).check_experts(16),
            "choice_bias_E holds 8 values for 16 experts",
        ),
        (
            lambda: SqrtSoftplusRouter(2, choice_bias_E=torch.zeros(8).bfloat16()),
            "choice_bias_E is a tensor bfloat16[8]; expected None, or float32[E]",
        ),
        (
            lambda: SqrtSoftplusRouter(2, choice_bias_E=torch.zeros(4, device="meta"))(torch.zeros(2, 4)),
            "choice_bias_E is on meta, the logits are on cpu",
        ),
    ],
)
def test_router_errors(call, message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
    assert "; fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("router", "taken"),
    [
        (SoftmaxRouter(4, renormalize=True), 4),
        (TopLogitsRouter(4), 4),
        (SqrtSoftplusRouter(4, choice_bias_E=torch.zeros(4)), 4),
        (GroupedSigmoidRouter(4), 4),
        (GroupedSigmoidRouter(4, num_groups=2, topk_groups=2), 4),
        (GroupedSigmoidRouter(2, num_groups=2, topk_groups=1), 2),
    ],
    ids=str,
)
def test_as_many_experts_as_there_are_can_be_chosen(router: Router, taken: int) -> None:
    routes = router(torch.tensor([[4.0, 3.0, 2.0, 1.0]]))
    assert routes.topk_ids_TK.tolist() == [list(range(taken))]


@pytest.mark.parametrize("experts", [5, 16, 17, 128, 256])
def test_of_equal_scores_the_first_are_chosen(experts: int) -> None:
    levels = torch.randint(0, 3, (20, experts), generator=torch.Generator().manual_seed(experts)).float()
    routes = TopLogitsRouter(4)(levels)
    for row, chosen in zip(levels.tolist(), routes.topk_ids_TK.tolist(), strict=True):
        assert chosen == sorted(range(experts), key=lambda e: (-row[e], e))[:4]


def test_scores_that_are_almost_zero_are_divided_by_a_little_more_than_their_sum() -> None:
    tiny, zero = GroupedSigmoidRouter(2)(torch.tensor([[-46.0, -46.0], [-200.0, -200.0]])).topk_weights_TK
    score = 1 / (1 + math.exp(46.0))
    assert tiny.tolist() == pytest.approx([score / (2 * score + 1e-20)] * 2)
    assert zero.tolist() == [0.0, 0.0]


def test_only_the_number_of_experts_goes_without_its_name() -> None:
    for router in ROUTERS.values():
        parameters = inspect.signature(router).parameters.values()
        by_place = [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert by_place == ["top_k"], router


def test_an_unknown_order_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'topk_softmax'"):
        SoftmaxRouter(2, renormalize=True, order="topk-softmax")


# ---- routes ----


def make_routes(ids=((0, 1), (2, -1)), weights=None, **fields) -> Routes:
    ids_TK = torch.tensor(ids) if isinstance(ids, tuple) else ids
    weights_TK = torch.rand(ids_TK.shape) if weights is None else weights
    return Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, **fields)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_routes_that_fit(id_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    ids_TK = torch.tensor([[0, 3], [-1, 2], [-1, -1]], dtype=id_dtype)
    weights_TK = torch.where(ids_TK < 0, math.nan, 0.5).to(weight_dtype)  # beside -1, weights mean nothing
    routes = make_routes(ids_TK, weights_TK)
    before = ids_TK.clone()
    routes.check(4, top_k=2, num_tokens=3, device="cpu")
    assert torch.equal(ids_TK, before)
    make_routes(ids_TK[:0], weights_TK[:0]).check(4, top_k=2, num_tokens=0, device=torch.device("cpu"))


def test_duplicates_and_more_choices_than_experts_are_routes() -> None:
    make_routes(((1, 1, 0), (0, 0, 0))).check(2, top_k=3)


def test_routes_that_hold_nothing_cannot_be_checked() -> None:
    routes = make_routes(
        torch.zeros(2, 2, dtype=torch.int64, device="meta"), torch.zeros(2, 2, device="meta")
    )
    with pytest.raises(InputError, match="topk_ids_TK is on meta, where tensors hold nothing"):
        routes.check(4)
    routes.check(4, values=False)


def test_values_can_be_left_out_where_nobody_may_wait() -> None:
    make_routes(((0, 99),)).check(4, values=False)


def test_scaling_that_went_through_float32_is_the_same() -> None:
    factor = torch.tensor(2.446).item()
    assert factor != 2.446
    make_routes(scaled_by=factor).check(4, scaled_by=2.446)


@pytest.mark.parametrize(
    ("routes", "check", "message"),
    [
        (
            make_routes([[0]], torch.ones(1, 1)),
            {},
            "topk_ids_TK is a list of 1; expected a matrix [T, K] of int32",
        ),
        (
            make_routes(weights=[[0.5]]),
            {},
            "topk_weights_TK is a list of 1; expected a matrix [T, K] of float32",
        ),
        (make_routes((0, 1)), {}, "topk_ids_TK is a tensor int64[2]; expected a matrix"),
        (make_routes(torch.zeros(2, 2)), {}, "topk_ids_TK is a tensor float32[2, 2]"),
        (make_routes(torch.zeros(2, 2).byte()), {}, "topk_ids_TK is a tensor uint8[2, 2]"),
        (make_routes(weights=torch.rand(2, 2).half()), {}, "topk_weights_TK is a tensor float16[2, 2]"),
        (make_routes(weights=torch.rand(2, 2, 1)), {}, "topk_weights_TK is a tensor float32[2, 2, 1]"),
        (make_routes(weights=torch.rand(2, 3)), {}, "topk_ids_TK is [2, 2] and topk_weights_TK is [2, 3]"),
        (
            make_routes(weights=torch.rand(2, 2, device="meta")),
            {},
            "topk_ids_TK is on cpu and topk_weights_TK is on meta; expected ids and weights on one device",
        ),
        (
            make_routes(((0, 1), (4, 9))),
            {},
            "holds id 4 (token 1, choice 0); expected ids from 0 to 3, or -1",
        ),
        (make_routes(((0, 1), (2, -2))), {}, "topk_ids_TK holds id -2 (token 1, choice 1)"),
        (
            make_routes(),
            {"top_k": 3},
            "the routes hold 2 choices per token; expected 3, as the layer declares",
        ),
        (make_routes(), {"num_tokens": 5}, "the routes hold 2 tokens; expected 5, one row of routes per row"),
        (make_routes(), {"device": "cuda:1"}, "the routes are on cpu; expected cuda:1, where the rows are"),
        (
            make_routes(scaled_by=2.5),
            {},
            "factor 2.5 (Routes.scaled_by): the layer scales by itself or not at all",
        ),
        (
            make_routes(scaled_by=2.5),
            {},
            "routed scaling would be applied twice; expected weights that hold 1.0",
        ),
        (
            make_routes(),
            {"scaled_by": 2.5},
            "routed scaling would never be applied; expected weights that hold 2.5",
        ),
        (make_routes(scaled_by=2.0), {"scaled_by": 2.5}, "router and layer mean different factors"),
        (make_routes(scaled_by=math.nan), {}, "the routed scaling factor nan"),
        (
            make_routes(scaled_by=True),
            {},
            "the routed scaling factor True (Routes.scaled_by); expected a positive",
        ),
        (make_routes(scaled_by=math.inf), {"scaled_by": math.inf}, "the routed scaling factor inf"),
    ],
)
def test_routes_that_do_not_fit(routes: Routes, check: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        routes.check(4, **check)
    assert message in str(caught.value)
    assert "; fix: " in str(caught.value)


def test_without_groups_every_expert_can_be_chosen():
    logits_TE = torch.randn(50, 8)
    plain = GroupedSigmoidRouter(2)
    assert (plain.num_groups, plain.topk_groups) == (1, 1)
    assert torch.equal(
        plain(logits_TE).topk_ids_TK.long(), logits_TE.sort(descending=True, stable=True).indices[:, :2]
    )


# --- Choices that are dropped, and limits --------------------------------------------------------------------


def test_weights_that_are_left_make_up_for_those_that_are_dropped() -> None:
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [0, -1, 2], [3, -1, -1]])
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, float("nan"), 0.5], [0.5, 7.0, 7.0]])
    dropped = torch.tensor([[False, True, False], [True, True, True], [False, False, True], [False] * 3])
    routes = Routes(topk_ids_TK=ids, topk_weights_TK=weights, scaled_by=2.5)
    found = routes.without(dropped, renormalize=True)
    assert found.topk_ids_TK.tolist() == [[0, -1, 2], [-1, -1, -1], [0, -1, -1], [3, -1, -1]]
    there = found.topk_ids_TK >= 0
    assert found.topk_weights_TK[there].tolist() == pytest.approx([2 / 3, 1 / 3, 1.0, 0.5])
    assert found.topk_weights_TK[1].isfinite().all()  # nothing is left of token 1, and nothing is raised
    assert found.scaled_by == 2.5
    plain = routes.without(dropped, renormalize=False)
    assert torch.equal(plain.topk_ids_TK, found.topk_ids_TK)
    assert torch.equal(plain.topk_weights_TK.nan_to_num(), weights.nan_to_num())


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("cpu", "cpu", True),
        ("cpu", "cuda", False),
        ("cuda:1", "cuda", True),
        ("cuda:1", "cuda:1", True),
        ("cuda:0", "cuda:1", False),
    ],
)
def test_a_device_without_a_number_is_any_of_its_kind(found: str, expected: str, same: bool) -> None:
    assert routes_module.same_device(torch.device(found), torch.device(expected)) == same


def test_what_weights_may_be_scaled_by() -> None:
    largest = sys.float_info.max
    for value, allowed in ((largest, True), (5e-324, True), (math.inf, False), (0.0, False), (-1.0, False)):
        assert routes_module.is_scaling(value) == allowed, value


def test_a_scaling_factor_may_differ_by_the_rounding_of_float32_and_no_more() -> None:
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    rounded = float(torch.tensor(2.446, dtype=torch.float32))
    Routes(topk_ids_TK=ids, topk_weights_TK=weights, scaled_by=rounded).check(1, scaled_by=2.446)
    with pytest.raises(InputError, match="different factors"):
        Routes(topk_ids_TK=ids, topk_weights_TK=weights, scaled_by=2.4461).check(1, scaled_by=2.446)


def test_equal_scores_are_chosen_in_column_order_however_many_there_are() -> None:
    scores_TE = torch.randint(0, 3, (5, 300), generator=torch.Generator().manual_seed(1)).float()
    for row, found in zip(scores_TE.tolist(), routers.top_of_row(scores_TE, 250).tolist(), strict=True):
        assert found == sorted(range(300), key=lambda column: -row[column])[:250]
