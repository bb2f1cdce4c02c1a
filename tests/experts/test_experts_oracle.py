"""Both experts against the float64 oracle, over shapes, dtypes, activations and routes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.expert_cases import Case, build_experts, oracle, run, run_unfinalized

ACTIVATIONS = ["swiglu", "gelu", "gelu_tanh", "relu2", "swiglu_clamped"]

CASES = [
    *(Case(activation=a, bias=b, weight_on=w) for a in ACTIVATIONS for b, w in [(True, "output"), (False, "input")]),
    *(Case(weights=w, bias=True, weight_on=o) for w in ("fp16", "fp32") for o in ("input", "output")),
    *(Case(H=h, I=i, weights=w) for h, i in [(1, 1), (100, 7), (2880, 96)] for w in ("bf16", "fp16", "fp32")),
    Case(H=1, I=1, activation="relu2", bias=True),
    *(Case(ids=ids, R=40) for ids in ("nobody", "first", "duplicate", "sparse")),
    *(Case(K=k, L=33) for k in (1, 8, 32)),
    Case(R=0),
    Case(R=1, L=1, K=1),
    # Rows per expert on both sides of the step to float32 products, in one batch and over many tiles.
    Case(R=200, L=3, H=64, I=48),
    Case(R=90, ids="first", H=300, I=9, weights="fp16", bias=True, activation="swiglu_clamped"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["reference", "grouped"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(name: str, case: Case) -> None:
    experts, x_RH, routes = build_experts(name, case)
    y_RH = run(experts, x_RH, routes)
    expected_RH, bound_RH = oracle(case)
    assert y_RH.dtype == torch.float32
    assert ((y_RH - expected_RH).abs() <= bound_RH).all()


@pytest.mark.parametrize("name", ["reference", "grouped"])
@settings(max_examples=40, deadline=None)
@given(
    case=st.builds(
        Case,
        H=st.integers(1, 70),
        I=st.integers(1, 40),
        L=st.integers(1, 9),
        K=st.integers(1, 10),
        R=st.integers(0, 60),
        activation=st.sampled_from(ACTIVATIONS),
        bias=st.booleans(),
        weight_on=st.sampled_from(["input", "output"]),
        weights=st.sampled_from(["bf16", "fp16", "fp32"]),
        ids=st.sampled_from(["random", "nobody", "first", "duplicate", "sparse"]),
        seed=st.integers(0, 1000),
    )
)
def test_any_case_agrees_and_finishing_it_later_gives_the_same_bits(name: str, case: Case) -> None:
    experts, x_RH, routes = build_experts(name, case)
    y_RH = run(experts, x_RH, routes)
    expected_RH, bound_RH = oracle(case)
    assert ((y_RH - expected_RH).abs() <= bound_RH).all()
    unfinalized = run_unfinalized(experts, x_RH, routes)
    finished_RH = unfinalized.finish().rows_RH
    assert torch.equal(finished_RH.view(torch.int32), y_RH.view(torch.int32))
    assert unfinalized.index_N.tolist() == (routes.ids_RK.flatten() >= 0).nonzero().squeeze(1).tolist()


def test_the_bound_is_tight_enough_to_notice_a_wrong_layer() -> None:
    case = Case(bias=True)
    experts, x_RH, routes = build_experts("grouped", case)
    expected_RH, bound_RH = oracle(Case(bias=True, activation="gelu"))
    assert not ((run(experts, x_RH, routes) - expected_RH).abs() <= bound_RH).all()
