"""The reference experts: a row's result is the same bits, whatever is around it."""

import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.expert_cases import Case, build_experts, run
from tokenyard.experts import reference
from tokenyard.experts.reference import product_written_out
from tokenyard.rows import LocalRoutes

CASES = [
    Case(H=1, I=1, R=40, L=2, bias=True),
    Case(H=100, I=7, R=60),
    Case(H=130, I=100, R=60, activation="swiglu_clamped", bias=True),
    Case(H=64, I=1408, R=30, activation="gelu", weights="fp32"),
    Case(H=40, I=33, R=60, activation="gelu_tanh", weights="fp16", weight_on="input"),
    Case(H=40, I=33, R=60, activation="relu2"),
]


def rows_of(routes: LocalRoutes, rows: torch.Tensor) -> LocalRoutes:
    return LocalRoutes(ids_RK=routes.ids_RK[rows], weights_RK=routes.weights_RK[rows])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_subsets_permutations_and_threads(case: Case) -> None:
    experts, x_RH, routes = build_experts("reference", case)
    whole_RH = run(experts, x_RH, routes)
    generator = torch.Generator().manual_seed(1)
    before = torch.get_num_threads()
    try:
        for trial in range(12):
            torch.set_num_threads(1 + trial % 2)
            count = int(torch.randint(1, case.R + 1, (1,), generator=generator)) if trial > 1 else case.R
            rows = torch.randperm(case.R, generator=generator)[:count]
            part_RH = run(experts, x_RH[rows], rows_of(routes, rows))
            assert torch.equal(part_RH.view(torch.int32), whole_RH[rows].view(torch.int32))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(
    inner=st.integers(1, 90),
    outputs=st.integers(1, 50),
    rows=st.integers(1, 40),
    block=st.sampled_from([16, 64, 1000, 262144]),
)
def test_the_block_size_has_no_influence(inner: int, outputs: int, rows: int, block: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    x_nD, w_OD = (
        torch.randn(rows, inner, generator=generator),
        torch.randn(outputs, inner, generator=generator),
    )
    expected = product_written_out(x_nD, w_OD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BLOCK", block)
        assert torch.equal(product_written_out(x_nD, w_OD), expected)
    error = (expected - x_nD.double() @ w_OD.double().T).abs()
    assert (error <= (inner + 2) * 2**-24 * (x_nD.abs().double() @ w_OD.abs().double().T)).all()


@pytest.mark.parametrize("inner", [7, 300])
def test_how_rows_and_weights_lie_in_memory_has_no_influence(inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    x_nD, w_OD = torch.randn(33, inner, generator=generator), torch.randn(17, inner, generator=generator)
    expected = product_written_out(x_nD, w_OD)
    for x in (x_nD, x_nD.t().contiguous().t(), x_nD.repeat(1, 2)[:, :inner]):
        for w in (w_OD, w_OD.t().contiguous().t(), w_OD.repeat(1, 2)[:, :inner]):
            assert torch.equal(product_written_out(x, w), expected)


def test_other_threads_and_processes() -> None:
    case = CASES[2]
    experts, x_RH, routes = build_experts("reference", case)
    expected_RH = run(experts, x_RH, routes)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(run(experts, x_RH, routes)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected_RH)

    code = (
        "import sys, torch; sys.path[:0] = sys.argv[1:]; torch.set_num_threads(1)\n"
        "from tests.experts.expert_cases import Case, build_experts, run\n"
        f"print(run(*build_experts('reference', {case!r})).view(torch.int32).sum().item())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, *sys.path], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert int(printed) == expected_RH.view(torch.int32).sum().item()


@pytest.mark.parametrize("name", ["reference", "grouped"])
def test_nan_does_not_leak(name: str) -> None:
    case = Case(R=60, bias=True)
    experts, x_RH, routes = build_experts(name, case)
    ids_RK, weights_RK = routes.ids_RK.clone(), routes.weights_RK.clone()
    ids_RK[10:20] = -1
    clean_RH = run(experts, x_RH, LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK))
    x_RH[10:20] = torch.nan
    weights_RK[ids_RK == -1] = torch.nan
    dirty_RH = run(experts, x_RH, LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK))
    assert torch.equal(dirty_RH, clean_RH)
    assert (dirty_RH[10:20].view(torch.int32) == 0).all()  # plus zero, to the bit


@pytest.mark.parametrize("name", ["reference", "grouped"])
def test_a_nan_row_stays_alone(name: str) -> None:
    experts, x_RH, routes = build_experts(name, Case(R=60, L=1, K=1, ids="first"))
    x_RH[5] = torch.nan
    y_RH = run(experts, x_RH, routes)
    assert y_RH[5].isnan().all()
    assert y_RH[torch.arange(60) != 5].isfinite().all()
