"""The few PTX instructions that decode packed weights, one after the other, on many threads at once."""

from __future__ import annotations

import re

import numpy as np


def from_bf16(bits):
    """The numbers of 16 bits each, as float64."""
    return ((bits & 0xFFFF) << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def to_bf16(values):
    """The bits of the nearest bf16 numbers, even ones of two, subnormal ones included."""
    _, exponent = np.frexp(values)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    rounded = (np.round(values / quantum) * quantum).astype(np.float32)
    assert np.isfinite(rounded).all()
    return rounded.view(np.uint32).astype(np.int64) >> 16


def _halves(of, *words):
    """A function of bf16 numbers, on both halves of words."""
    low, high = (to_bf16(of(*(from_bf16(word >> shift) for word in words))) for shift in (0, 16))
    return high << 16 | low


def by_table(a, b, c, table):
    """lop3: bit by bit what the table has for the three."""
    found = np.zeros_like(a)
    for row in range(8):
        chosen = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        found |= chosen & -(table >> row & 1)
    return found


def permuted(low, high, selector):
    """prmt: of eight bytes those that four nibbles name. (None of them asks for a sign.)"""
    assert not (selector & 0x8888).any()
    pair, found = low | high << 32, np.zeros_like(low)
    for nth in range(4):
        found |= (pair >> (selector >> 4 * nth & 7) * 8 & 0xFF) << 8 * nth
    return found


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": permuted,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": lambda low, high, by: high << by | low >> 32 - by,
    "lop3.b32": by_table,
    "mul.rn.bf16x2": lambda a, b: _halves(lambda x, y: x * y, a, b),
    "fma.rn.bf16x2": lambda a, b, c: _halves(lambda x, y, z: x * y + z, a, b, c),
}


def run_ptx(text, inputs, outputs):
    """What is in registers $0 to $(outputs - 1) after the instructions; `inputs` are in those behind them."""
    size = len(inputs[0])
    registers = {
        f"${outputs + nth}": np.asarray(values).astype(np.int64) & 0xFFFFFFFF
        for nth, values in enumerate(inputs)
    }

    def value(operand):
        if operand.startswith("{"):
            low, high = (registers[name.strip()] for name in operand[1:-1].split(","))
            return high << 16 | low
        if operand[0].isdigit():
            return np.full(size, int(operand, 0), dtype=np.int64)
        return registers[operand]

    for line in text.splitlines():
        if line in ("{", "}") or line.startswith(".reg"):
            continue
        name, rest = re.fullmatch(r"(\S+) (.*);", line).groups()
        target, *operands = re.findall(r"\{.*?\}|[^,\s]+", rest)
        found = INSTRUCTIONS[name](*map(value, operands)) & 0xFFFFFFFF
        if target.startswith("{"):
            low, high = target[1:-1].split(",")
            registers[low.strip()], registers[high.strip()] = found & 0xFFFF, found >> 16
        else:
            registers[target] = found
    return [registers[f"${nth}"] for nth in range(outputs)]
