"""The functions between an expert's two matrix products.

An `Activation` is a value: a formula's name, whether it has a gate, how gate and up share the columns of the
first product, and its constants. It maps the float32 pre-activation `[n, 2I]` (`[n, I]` without a gate) to
`[n, I]`, in two ways that implement the same formula:

- Calling it uses torch's own kernels: fast, and right to a few units in the last place of float32.
- `reproducible` is its plain twin: a row's bits depend on that row alone, on every machine.

`differentiate` and `differentiate_reproducibly` give the derivative with respect to the pre-activation in the same two
ways. The slope of each function of the gate stands beside the function, in `_FORMULAS`.

Why two? On a CPU, torch's `sigmoid`, `silu` and `gelu` run vector code on the body of a tensor and scalar
code on its tail, and the two round differently. Measured on 200 rows of 7 against the same rows one by one:
up to 4% of the elements differ in their last bit, in float32 and in float64 alike, so computing in float64
and rounding would only make such differences rare. (`exp`, `erf` and `tanh` were row-independent there, but
nothing promises it.) What IEEE 754 does promise is one correctly rounded result for `+ - × ÷`, whatever the
vector width, the thread or the machine. The twin therefore builds `exp` and `erf` from these operations, in float64:
`exp` as a Taylor polynomial after reducing the argument by powers of two, `erf` as a series of positive terms. The
result is rounded to float32 once. Fused operations (`addcmul`) are avoided, because they round once instead of twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.errors import InputError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation: its formula (`name`), the layout of gate and up, and the constants of the formula.

    >>> activation("swiglu")(torch.tensor([[0.0, 2.0, 3.0, 5.0]]))  # gate 0 and 2, up 3 and 5
    tensor([[0.0000, 8.8080]])
    """

    name: str  # the formula
    # Whether there is a gate. The first product then has 2I columns, gate and up.
    gated: bool = True
    # Where gate and up are: gate on even columns and up on odd ones, or all of gate and then all of up.
    interleaved: bool = False
    parameters: tuple[tuple[str, float], ...] = ()  # names and values of its constants

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in _FORMULAS:
            raise unknown_name("activation", self.name, _FORMULAS)
        constants = _FORMULAS[self.name].constants
        if set(dict(self.parameters)) != set(constants):
            raise InputError(
                f"activation {self.name!r} has parameters {dict(self.parameters)}",
                expected=f"values for {', '.join(constants) or 'none'}",
                fix=f"start from `dataclasses.replace(ACTIVATIONS[{self.name!r}], ...)`",
            )
        if (self.interleaved or constants) and not self.gated:
            raise InputError(
                f"activation {self.name!r} has no gate, but its layout or its formula needs one",
                expected="gated=True",
                fix=f"start from `dataclasses.replace(ACTIVATIONS[{self.name!r}], ...)`",
            )

    def __call__(self, pre: Tensor) -> Tensor:
        """Apply the activation with torch's kernels, in float32 or wider. The input is not changed."""
        gate, up = self.split(pre)
        # The gate is widened here. Up may stay 16 bits wide: a product with float32 is a float32 product.
        gate = gate.float() if gate.dtype.itemsize < 4 else gate
        if up is not None and self.parameters:
            up = up.to(gate.dtype)
        return self._apply(gate, up, _FORMULAS[self.name].fast)

    def reproducible(self, pre: Tensor) -> Tensor:
        """Apply the activation such that the bits of each element depend on its own inputs alone."""
        return self._apply(*self.split(pre.double()), _FORMULAS[self.name].written_out).float()

    def differentiate(self, pre: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The activation, and the gradient of the pre-activation from that of the result, by torch's kernels.

        >>> pre = torch.tensor([[0.5, -1.0]])
        >>> activation("relu2").differentiate(pre, torch.ones(1, 2))[1].tolist()
        [[1.0, 0.0]]
        """
        pre = pre.float() if pre.dtype.itemsize < 4 else pre
        formula = _FORMULAS[self.name]
        return self._differentiate(pre, gradient.to(pre.dtype), formula.fast, formula.slope)

    def differentiate_reproducibly(self, pre: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """`differentiate` such that the bits of each element depend on its own inputs alone."""
        formula = _FORMULAS[self.name]
        hidden, slopes = self._differentiate(
            pre.double(), gradient.double(), formula.written_out, formula.slope_written_out
        )
        return hidden.float(), slopes.float()

    def _differentiate(
        self,
        pre: Tensor,
        gradient: Tensor,
        function: Callable[[Tensor], Tensor],
        slope: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        gate, up = self.split(pre)
        if up is None:
            return function(gate), gradient * slope(gate)
        both = torch.empty_like(pre)
        gate_slopes, up_slopes = self.split(both)
        assert up_slopes is not None
        if not self.parameters:
            act = function(gate)
            torch.mul(gradient * up, slope(gate), out=gate_slopes)
            torch.mul(gradient, act, out=up_slopes)
            return act * up, both
        constants = dict(self.parameters)
        limit, alpha = constants["limit"], constants["alpha"]
        inside_gate, inside_up = gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + constants["up_shift"]
        swish = function(gate * alpha)
        act = gate * swish
        # d(gate · f(α · gate)) = f(α · gate) + α · gate · f'(α · gate); a number that was clamped has slope 0.
        steep = swish + gate * alpha * slope(gate * alpha)
        gate_slopes.copy_(torch.where(inside_gate, gradient * up * steep, 0.0))
        up_slopes.copy_(torch.where(inside_up, gradient * act, 0.0))
        return act * up, both

    def split(self, pre: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gate and the up columns, as views; without a gate, all columns and None."""
        if not self.gated:
            return pre, None
        if self.interleaved:
            return pre[..., 0::2], pre[..., 1::2]
        gate, up = pre.chunk(2, dim=-1)
        return gate, up

    def _apply(self, gate: Tensor, up: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor:
        if up is None:
            return function(gate)
        if not self.parameters:
            return function(gate) * up
        constants = dict(self.parameters)  # the clamped SwiGLU, the one formula that has any
        limit, alpha = constants["limit"], constants["alpha"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * function(gate * alpha) * (up + constants["up_shift"])


def activation(name: str | Activation) -> Activation:
    """The activation of this name, or an alias that engines use for it.

    >>> activation("swigluoai") is ACTIVATIONS["swiglu_clamped"]
    True
    >>> activation("swigul")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tokenyard.errors.UnknownName: unknown activation 'swigul'; expected ... did you mean 'swiglu'?
    """
    if isinstance(name, Activation):
        return name
    known = ALIASES.get(name, name) if isinstance(name, str) else None
    if known not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[known]


# --- Functions made of + - × ÷ alone, in float64 -------------------------------------------------------------

_PER_LN2 = 1.4426950408889634
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 32 bits of ln 2: n · this is exact for |n| < 2^20
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # the rest of ln 2
_EXP_TERMS = 14  # |r| ≤ ln(2)/2: the first term left out is below 5e-18
_ERF_TERMS = 130  # |x| ≤ 6: the first term left out is below 1e-17 of the sum


def exp_written_out(x: Tensor) -> Tensor:
    """e^x in float64, for x clamped to [-708, 709]: 2^n · e^r with |r| ≤ ln(2)/2, and e^r by Taylor."""
    x = x.clamp(-708.0, 709.0)
    n = (x * _PER_LN2).round_()
    r = (x - n * _LN2_HIGH).sub_(n * _LN2_LOW)
    power = torch.full_like(r, 1.0 / math.factorial(_EXP_TERMS - 1))
    for k in range(_EXP_TERMS - 2, -1, -1):
        power.mul_(r).add_(1.0 / math.factorial(k))
    # 2^n is written as bits. A NaN has no n, but r is NaN then, and so is the result.
    exponent = n.nan_to_num_(0.0).to(torch.int64).add_(1023).bitwise_left_shift_(52)
    return power.mul_(exponent.view(torch.float64))


def erf_written_out(x: Tensor) -> Tensor:
    """erf(x) in float64: 2/√π · e^(-x²) · Σ 2^n x^(2n+1) / (1·3·5···(2n+1)), whose terms have one sign."""
    x = x.clamp(-6.0, 6.0)  # 1 - erf(6) is 2e-17
    square = x * x
    term, total = x, x.clone()
    for n in range(_ERF_TERMS):
        term.mul_(square).mul_(2.0 / (2 * n + 3))
        total.add_(term)
    return total.mul_(exp_written_out(-square)).mul_(2.0 / math.sqrt(math.pi))


def _sigmoid_written_out(x: Tensor) -> Tensor:
    return 1.0 / exp_written_out(-x).add_(1.0)


def _silu_written_out(x: Tensor) -> Tensor:
    return x / exp_written_out(-x).add_(1.0)


def _gelu_written_out(x: Tensor) -> Tensor:
    return x * 0.5 * erf_written_out(x * math.sqrt(0.5)).add_(1.0)


def _gelu_tanh_written_out(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 is sigmoid(2u).
    inner = (x + 0.044715 * (x * x * x)) * math.sqrt(2.0 / math.pi)
    return x / exp_written_out(inner * -2.0).add_(1.0)


def _relu2(x: Tensor) -> Tensor:
    positive = x.relu()
    return positive * positive


# --- Their slopes -----------------------------------------------------------------------------------------

_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)  # of the normal distribution at 0
_TANH_SCALE, _TANH_CUBE = math.sqrt(2.0 / math.pi), 0.044715  # of the tanh approximation of gelu


def _silu_slope(x: Tensor, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _gelu_slope(
    x: Tensor, erf: Callable[[Tensor], Tensor] = torch.erf, exp: Callable[[Tensor], Tensor] = torch.exp
) -> Tensor:
    return 0.5 * (1.0 + erf(x * math.sqrt(0.5))) + x * exp(x * x * -0.5) * _DENSITY


def _gelu_tanh_slope(x: Tensor, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    s = sigmoid((x + _TANH_CUBE * (x * x * x)) * (2.0 * _TANH_SCALE))
    return s + x * s * (1.0 - s) * (2.0 * _TANH_SCALE) * (1.0 + 3.0 * _TANH_CUBE * (x * x))


def _sigmoid_slope(x: Tensor, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
    s = sigmoid(x)
    return s * (1.0 - s)


def _relu2_slope(x: Tensor) -> Tensor:
    return x.relu() * 2.0


# --- The registry -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Formula:
    """The function of the gate and its slope, by torch's kernels and by + - × ÷ alone, and the constants it needs."""

    fast: Callable[[Tensor], Tensor]
    written_out: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    slope_written_out: Callable[[Tensor], Tensor]
    constants: tuple[str, ...] = ()


_FORMULAS = {
    "swiglu": _Formula(
        functional.silu, _silu_written_out, _silu_slope, partial(_silu_slope, sigmoid=_sigmoid_written_out)
    ),
    "gelu": _Formula(
        functional.gelu,
        _gelu_written_out,
        _gelu_slope,
        partial(_gelu_slope, erf=erf_written_out, exp=exp_written_out),
    ),
    "gelu_tanh": _Formula(
        lambda x: functional.gelu(x, approximate="tanh"),
        _gelu_tanh_written_out,
        _gelu_tanh_slope,
        partial(_gelu_tanh_slope, sigmoid=_sigmoid_written_out),
    ),
    "relu2": _Formula(_relu2, _relu2, _relu2_slope, _relu2_slope),
    "swiglu_clamped": _Formula(
        torch.sigmoid,
        _sigmoid_written_out,
        _sigmoid_slope,
        partial(_sigmoid_slope, sigmoid=_sigmoid_written_out),
        ("limit", "alpha", "up_shift"),
    ),
}

# The activations by name.
ACTIVATIONS = {
    "swiglu": Activation(name="swiglu"),  # silu(gate) · up
    "gelu": Activation(name="gelu"),  # gelu(gate) · up, with the exact erf
    "gelu_tanh": Activation(name="gelu_tanh"),  # its tanh approximation
    "relu2": Activation(name="relu2", gated=False),  # relu(x)²
    # gpt-oss: with gate ≤ 7 and |up| ≤ 7, gate · sigmoid(1.702 · gate) · (up + 1).
    "swiglu_clamped": Activation(
        name="swiglu_clamped",
        interleaved=True,
        parameters=(("limit", 7.0), ("alpha", 1.702), ("up_shift", 1.0)),
    ),
}

# Other names that engines and checkpoints use for the activations.
ALIASES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "silu_and_mul": "swiglu",
    "gelu_and_mul": "gelu",
    "geglu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh_and_mul": "gelu_tanh",
    "relu_squared": "relu2",
    "relu2_no_mul": "relu2",
    "gpt_oss": "swiglu_clamped",
    "swigluoai": "swiglu_clamped",
    "swiglu_oai": "swiglu_clamped",
    "swigluoai_and_mul": "swiglu_clamped",
    "swiglu_clamped_interleaved": "swiglu_clamped",
}
