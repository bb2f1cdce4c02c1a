"""The float64 oracle: what a layer computes, on one rank, without an exchange, in full precision.

It says in a few lines what the whole machinery is for:

    y_t = Σ_k  w_tk · Expert_{id_tk}(x_t)          (or Expert(w · x), where the weight is on the input)

Fed with `decode(encode(x))` it isolates the matrix products; fed with `x` it gives the end-to-end error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.experts import Activation, ExpertWeights, activation
from tokenyard.routing import Routes
from tokenyard.spec import LayerSpec


def oracle(spec: LayerSpec, weights: ExpertWeights, x_TH: Tensor, routes: Routes) -> Tensor:
    """The exact result of a layer, float64. `weights` are those of all E experts."""
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    act = activation(spec.activation)
    for expert in range(spec.num_experts):
        token_N, choice_N = (routes.topk_ids_TK == expert).nonzero(as_tuple=True)
        if token_N.numel() == 0:
            continue
        weight_N1 = routes.topk_weights_TK[token_N, choice_N].double().unsqueeze(1)
        x_NH = x_TH[token_N].double()
        if spec.weight_on == "input":
            x_NH = weight_N1 * x_NH
        hidden_NI = exact_activation(act, _linear(x_NH, weights.w13, weights.b13, expert))
        result_NH = _linear(hidden_NI, weights.w2, weights.b2, expert)
        if spec.weight_on == "output":
            result_NH = weight_N1 * result_NH
        y_TH.index_add_(0, token_N, result_NH)  # a token may name an expert twice: both count
    return y_TH


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return functional.linear(x, weight[expert].double(), None if bias is None else bias[expert].double())


def exact_activation(act: Activation, pre: Tensor) -> Tensor:
    """Each activation's formula once more, in float64, written independently of the one that experts use."""
    gate, up = act.split(pre)
    if act.name == "relu2":
        return torch.relu(gate) ** 2
    assert up is not None
    if act.name == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if act.name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if act.name == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    constants = dict(act.parameters)
    gate = gate.clamp(max=constants["limit"])
    up = up.clamp(-constants["limit"], constants["limit"])
    return gate / (1 + torch.exp(-constants["alpha"] * gate)) * (up + constants["up_shift"])


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖; 0 where both are zero, NaN where either holds one."""
    distance = torch.linalg.vector_norm(found.double() - exact.double())
    norm = torch.linalg.vector_norm(exact.double())
    return float(distance / norm) if float(norm) != 0.0 else float(distance)
