"""Expands packed mxfp4 weights to blocks of e4m3, which `kernels.specialized` multiplies, for calls with many rows.

All numbers of a matrix are decoded as in `kernels.packed`, divided by the scale of their block of 128 × 128, a
power of two that was computed when the weights were packed (`recoding`), and written in the layout of `fp8_block128`.
The result equals that of `recoding.recode` bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenyard.experts.fused import packing
from tokenyard.experts.fused.kernels.packed import depends, load_weights
from tokenyard.experts.fused.kernels.unpacking import E2M1, decode

# The exponent of packing.LEFT_OVER, in the bits of a float32. For a power of two x, the bits of 1 / x are INVERSE minus
# those of x.
LEFT_OVER = gl.constexpr(int(packing.LEFT_OVER).bit_length() - 1 << 23)
INVERSE = gl.constexpr(254 << 23)
# Steps of 128 inputs that each block computes.
STEPS = gl.constexpr(4)


class Packed(NamedTuple):
    """Packed matrices, and the scales of their blocks."""

    words: Any
    scales: Any
    bases: Any


@gluon.jit
def expand_matrices(
    packed, out, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Expand 64 lines × 512 inputs of an expert's matrix, whose sizes are multiples of 128."""
    if EARLY:
        depends("wait")  # kernels launched earlier may still read the memory of `out`
        depends("launch_dependents")
    ALL: gl.constexpr = INPUTS // 128
    UNITS: gl.constexpr = OUTPUTS // 64
    ACROSS: gl.constexpr = (ALL + STEPS - 1) // STEPS
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    unit = gl.program_id(0) // ACROSS
    first_step = (gl.program_id(0) - unit * ACROSS) * STEPS
    expert, own = unit // UNITS, unit % UNITS
    words = packed.words + unit.to(gl.int64) * (INPUTS // 64 * 512)
    scales = packed.scales + unit.to(gl.int64) * (ALL * 32 * 4)
    held = ()
    for s in gl.static_range(STEPS):
        held = held + load_weights(words, scales, first_step + s, first_step + s < ALL, E2M1, 1, INPUTS, 4)
    operand_line = gl.arange(0, 64, layout=gl.SliceLayout(1, OPERAND))
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
    if GATED:  # gate and up lines alternate, 8 and 8
        gate = own * 32
        output = line // 8 % 2 * (OUTPUTS // 2) + gate + line // 16 * 8 + line % 8
        block0, block1 = gate // 128, (OUTPUTS // 2 + gate) // 128
    else:
        output = own * 64 + line
        block0 = own // 2
        block1 = block0
    base = packed.bases + expert * (OUTPUTS // 128 * ALL) + first_step
    where = out + (expert.to(gl.int64) * OUTPUTS + output) * INPUTS + first_step * 128
    for s in gl.static_range(STEPS):
        there = first_step + s < ALL
        base0 = gl.load(base + block0 * ALL + s, mask=there, other=1.0).to(gl.int32, bitcast=True)
        base1 = gl.load(base + block1 * ALL + s, mask=there, other=1.0).to(gl.int32, bitcast=True)
        factor = (INVERSE - gl.where(operand_line // 8 % 2 == 0, base0, base1)) + LEFT_OVER
        factor = factor.to(gl.float32, bitcast=True)[:, None]
        for half in gl.static_range(2):
            number = decode(held[4 * s + half], held[4 * s + 2 + half], half, E2M1, 2, 4, OPERAND)
            code = (number.to(gl.float32) * factor).to(gl.float8e4nv)
            to = where[:, None] + (s * 128 + half * 64 + c)[None, :]
            gl.store(to, gl.convert_layout(code, STORE), mask=there)
