"""Activations: against their definitions, both ways of computing them, and bit by bit."""

import dataclasses
import math

import pytest
import torch

from tests.experts.expert_cases import formula
from tokenyard.errors import InputError, UnknownName
from tokenyard.experts.activations import (
    ACTIVATIONS,
    ALIASES,
    Activation,
    activation,
    erf_written_out,
    exp_written_out,
)

NAMES = sorted(ACTIVATIONS)


def pre_activation(name: str, rows: int, width: int, scale: float = 4.0) -> torch.Tensor:
    columns = 2 * width if ACTIVATIONS[name].gated else width
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(width)) * scale


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 7, 100, 1408])
def test_both_ways_follow_the_definition(name: str, width: int) -> None:
    pre = pre_activation(name, 30, width)
    expected = formula(name, pre.double())
    # Written out: one rounding to float32, from float64 values that are right to about 1e-14.
    error = (ACTIVATIONS[name].reproducible(pre) - expected).abs()
    assert (error <= 2**-24 * expected.abs() + 1e-12).all()
    # torch's kernels: a few float32 roundings, and 1 + erf cancels to 2^-24 of the gate times up (≤ 28 · 28).
    fast = ACTIVATIONS[name](pre)
    assert fast.dtype == torch.float32
    assert ((fast - expected).abs() <= 16 * 2**-24 * (expected.abs() + 10)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 7, 100, 1408])
def test_written_out_rows_do_not_depend_on_their_neighbors(name: str, width: int) -> None:
    pre = pre_activation(name, 60, width)
    whole = ACTIVATIONS[name].reproducible(pre)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            alone = torch.cat([ACTIVATIONS[name].reproducible(pre[r : r + 1].clone()) for r in range(60)])
            assert torch.equal(alone, whole)
            assert torch.equal(ACTIVATIONS[name].reproducible(pre[7:50:3]), whole[7:50:3])
    finally:
        torch.set_num_threads(threads)


def test_exp_and_erf_out_of_arithmetic_alone() -> None:
    x = torch.linspace(-700, 700, 5001, dtype=torch.float64)
    expected = torch.tensor([math.exp(v) for v in x.tolist()], dtype=torch.float64)
    assert ((exp_written_out(x) - expected) / expected).abs().max() < 4e-16
    x = torch.linspace(-9, 9, 5001, dtype=torch.float64)
    expected = torch.tensor([math.erf(v) for v in x.tolist()], dtype=torch.float64)
    assert (erf_written_out(x) - expected).abs().max() < 1e-14
    ends = exp_written_out(torch.tensor([math.nan, -math.inf, math.inf, 0.0], dtype=torch.float64))
    assert ends[0].isnan()
    assert ends[1] < 1e-300
    assert ends[2] > 1e300
    assert ends[3] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_extremes_stay_finite_and_nan_is_kept(name: str) -> None:
    pre = pre_activation(name, 8, 16, scale=1e6)
    for computed in (ACTIVATIONS[name](pre), ACTIVATIONS[name].reproducible(pre)):
        assert computed.isfinite().all()
    pre[3] = math.nan
    for computed in (ACTIVATIONS[name](pre), ACTIVATIONS[name].reproducible(pre)):
        assert computed[3].isnan().all()
        assert computed[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_computed_with_in_float32(name: str, dtype: torch.dtype) -> None:
    pre = pre_activation(name, 20, 64).to(dtype)
    computed = ACTIVATIONS[name](pre)
    assert computed.dtype == torch.float32
    torch.testing.assert_close(computed, ACTIVATIONS[name](pre.float()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_input_is_not_changed(name: str) -> None:
    pre = pre_activation(name, 5, 6)
    before = pre.clone()
    ACTIVATIONS[name](pre)
    ACTIVATIONS[name].reproducible(pre)
    assert torch.equal(pre, before)


def test_interleaving_is_a_layout_and_not_another_formula() -> None:
    pre = pre_activation("swiglu", 5, 6)
    gate, up = pre.chunk(2, dim=-1)
    interleaved = dataclasses.replace(ACTIVATIONS["swiglu"], interleaved=True)
    woven = torch.stack([gate, up], dim=-1).flatten(1)
    assert torch.equal(interleaved.reproducible(woven), ACTIVATIONS["swiglu"].reproducible(pre))


def test_parameters_of_the_clamped_one() -> None:
    pre = torch.tensor([[100.0, -100.0]])
    looser = dataclasses.replace(
        ACTIVATIONS["swiglu_clamped"], parameters=(("limit", 10.0), ("alpha", 1.0), ("up_shift", 0.0))
    )
    assert looser(pre).item() == pytest.approx(10 / (1 + math.exp(-10)) * -10)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_engine_spellings(alias: str) -> None:
    assert activation(alias) is ACTIVATIONS[ALIASES[alias]]
    assert activation(activation(alias)) is activation(alias)


def test_wrong_names_and_parameters() -> None:
    with pytest.raises(UnknownName, match="did you mean 'gelu_tanh'"):
        activation("gelu_tahn")
    with pytest.raises(UnknownName, match="unknown activation 'mish'"):
        Activation(name="mish")
    with pytest.raises(InputError, match="limit, alpha, up_shift"):
        Activation(name="swiglu_clamped")
    with pytest.raises(InputError, match="has no gate"):
        Activation(name="relu2", gated=False, interleaved=True)


def test_they_are_values() -> None:
    assert activation("swiglu") == Activation(name="swiglu")
    assert len({*ACTIVATIONS.values(), *ACTIVATIONS.values()}) == len(ACTIVATIONS)


def test_gpt_oss_formula_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    experts = modeling.GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=16, num_local_experts=2))
    pre = pre_activation("swiglu_clamped", 20, 16)
    expected = experts._apply_gate(pre)
    torch.testing.assert_close(activation("swigluoai")(pre), expected, rtol=1e-6, atol=1e-6)
