"""The experts on a GPU: the reference to the bit as on the CPU, the grouped ones within the oracle's bound."""

import pytest
import torch

from tests.experts.expert_cases import Case, build_experts, oracle, run, run_unfinalized
from tokenyard.rows import LocalRoutes

pytestmark = pytest.mark.gpu

CASES = [
    *(
        Case(activation=a, bias=True, R=50)
        for a in ("swiglu", "gelu", "gelu_tanh", "relu2", "swiglu_clamped")
    ),
    *(Case(weights=w, weight_on="input", R=50) for w in ("bf16", "fp16", "fp32")),
    *(Case(H=h, I=i, weights=w) for h, i in [(1, 1), (100, 7), (2880, 96)] for w in ("bf16", "fp16", "fp32")),
    *(Case(ids=ids, R=40) for ids in ("nobody", "first", "duplicate", "sparse")),
    Case(K=32, L=33),
    Case(R=0),
]


def on_gpu(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The finalized result, and the one that is finished later."""
    experts, x_RH, routes = build_experts(name, case)
    moved = LocalRoutes(ids_RK=routes.ids_RK.cuda(), weights_RK=routes.weights_RK.cuda())
    experts, x_RH = experts.cuda(), x_RH.cuda()
    finished_RH = run_unfinalized(experts, x_RH, moved).finish().rows_RH
    return run(experts, x_RH, moved).cpu(), finished_RH.cpu()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_has_the_bits_of_the_cpu(case: Case) -> None:
    y_RH, finished_RH = on_gpu("reference", case)
    expected_RH = run(*build_experts("reference", case))
    assert torch.equal(y_RH.view(torch.int32), expected_RH.view(torch.int32))
    assert torch.equal(y_RH.view(torch.int32), finished_RH.view(torch.int32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_grouped_is_within_the_bound(case: Case) -> None:
    y_RH, finished_RH = on_gpu("grouped", case)
    expected_RH, bound_RH = oracle(case)
    assert ((y_RH - expected_RH).abs() <= bound_RH).all()
    assert torch.equal(y_RH.view(torch.int32), finished_RH.view(torch.int32))
