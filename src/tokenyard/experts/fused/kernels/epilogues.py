"""What products do with their sums: activate those of the first product, and deliver those of the second as results.

Kernels in plain Triton and in its Gluon dialect call these functions, with tensors of any layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.experts.fused.kernels.sorting import unsigned

SWIGLU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU2 = tl.constexpr(3)
SWIGLU_CLAMPED = tl.constexpr(4)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(gate, up, CONSTANTS: tl.constexpr):
    """The activation of float32 numbers; `up` is None without a gate. NaN stays NaN, for which min and max need a flag.

    CONSTANTS are those of a layer or a product, which have the same names: `activation`, `limit`, `alpha`, `shift`.
    """
    if CONSTANTS.activation == SWIGLU_CLAMPED:
        LIMIT: tl.constexpr = CONSTANTS.limit
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate * sigmoid(gate * CONSTANTS.alpha) * (up + CONSTANTS.shift)
    if CONSTANTS.activation == SWIGLU:
        value = gate * sigmoid(gate)
    elif CONSTANTS.activation == GELU:
        value = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif CONSTANTS.activation == GELU_TANH:
        value = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate)))
    else:
        value = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = value * value
    if up is not None:
        value *= up
    return value


@triton.jit
def activate_rows(gate, up, pair, expert, gates, ups, weights, routes, LAYER: tl.constexpr):
    """Activate sums rows × columns of the first product; `gates` and `ups` are the outputs that the columns have."""
    if LAYER.weight_on_input:
        weight = tl.load(routes.weights_N + pair).to(tl.float32)[:, None]
        gate, up = gate * weight, up * weight
    if weights.bias is not None:
        bias = weights.bias + expert.to(tl.int64) * (2 * LAYER.intermediate)
        gate += tl.load(bias + gates).to(tl.float32)[None, :]
        up += tl.load(bias + ups).to(tl.float32)[None, :]
    return activate(gate, up, LAYER)


@triton.jit
def deliver(
    value, place, is_row, n, is_output, homes, routes, results,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, FINALIZE: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store results with outputs `n` along AXIS, and rows along the other axis.

    Rows with one expert here go weighted into `out`, others, or all without FINALIZE, into `partial_sums`. `is_output`
    is None where all outputs exist. `homes` holds the line of `out` and the weight of each row, or is None.
    """
    ROWS: tl.constexpr = 1 - AXIS
    partial_sums, out = results.partial_sums, results.out
    value = value.to(partial_sums.dtype.element_ty)
    pair, n = unsigned(place), tl.expand_dims(n, ROWS)
    shared = is_row & (place < 0) if FINALIZE else is_row
    mask = tl.expand_dims(shared, AXIS)
    if is_output is not None:
        mask = mask & tl.expand_dims(is_output, ROWS)
    tl.store(partial_sums + tl.expand_dims(pair.to(tl.int64), AXIS) * WIDTH + n, value, mask=mask)
    if FINALIZE:
        if homes is not None:
            line, weight = homes
        else:
            line = pair // TOP_K
            if results.out_slots_R is not None:
                line = tl.load(results.out_slots_R + line, mask=is_row, other=0)
            if WEIGHTED:
                weight = tl.load(routes.weights_N + pair, mask=is_row, other=0.0)
        weighted = value.to(tl.float32)
        if WEIGHTED:
            weighted *= tl.expand_dims(weight.to(tl.float32), AXIS)
        weighted = tl.where(weighted == 0.0, 0.0, weighted)  # -0 becomes +0, as in a sum that begins at +0
        mask = tl.expand_dims(is_row & (place >= 0), AXIS)
        if is_output is not None:
            mask = mask & tl.expand_dims(is_output, ROWS)
        home = out + tl.expand_dims(line.to(tl.int64), AXIS) * results.out_stride + n
        tl.store(home, weighted.to(out.dtype.element_ty), mask=mask)
