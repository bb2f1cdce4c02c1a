"""Decodes packed 4-bit weights to the register operand of tensor cores, in PTX (see `tokenyard.experts.fused.packing`).

The instructions read 4 words (64 inputs) and scales, and give 16 pairs of bf16 numbers. Those for e2m1 read the scales
of 128 inputs from the registers into which they were loaded, so each half of the inputs has its own instructions.

`code_instructions` give e4m3 codes of mxfp4 weights instead. A magnitude of e2m1 has three bits, so there are eight
e4m3 codes for a scale (in units of the output's largest scale). Two registers hold them as a table of eight bytes, from
which `prmt` selects four at a time. A word gives four codes of output g, and four of output g + 8. The tensor cores
need four neighboring inputs in a thread: inputs are therefore permuted within 16, in rows as well
(`packing.code_order`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenyard.experts.fused import packing

INT4 = gl.constexpr(0)
E2M1 = gl.constexpr(1)

_OUTPUTS, _WORDS = 16, 4


def _twice(bits: int) -> int:
    """16 bits in both halves of a word."""
    return bits << 16 | bits


def _scale_pair(scale: str) -> list[str]:
    """Instructions that fill both halves of b0 with the scale of output g, and of b1 with that of output g + 8."""
    return [f"mov.b32 {{l, h}}, {scale};", "mov.b32 b0, {l, l};", "mov.b32 b1, {h, h};"]


def int4_instructions() -> str:
    """Instructions for integers, whose scales are pairs of bf16 numbers: an AND and a fused multiply-add each."""
    lines = ["{", ".reg .b32 t, c, b0, b1, c0, c1;", ".reg .b16 l, h;"]
    for span in range(2):
        scale = f"${_OUTPUTS + _WORDS + span}"
        # -8 times the scale, of both outputs.
        lines += [f"mov.b32 t, {0x80808008};", f"mul.rn.bf16x2 c, {scale}, t;"]
        lines += [*_scale_pair(scale), "mov.b32 {l, h}, c;", "mov.b32 c0, {l, l};", "mov.b32 c1, {h, h};"]
        for q in (2 * span, 2 * span + 1):
            word = f"${_OUTPUTS + q}"
            for later in range(2):
                out = (q * 2 + later) * 2
                if later:
                    lines.append(f"shr.u32 t, {word}, 8;")
                    word = "t"
                lines += [f"and.b32 ${out}, {word}, {_twice(0x000F)};"]
                lines += [f"and.b32 ${out + 1}, {word}, {_twice(0x00F0)};"]
                lines += [f"fma.rn.bf16x2 ${out}, ${out}, b0, c0;"]
                lines += [f"fma.rn.bf16x2 ${out + 1}, ${out + 1}, b1, c1;"]
    return "\n".join([*lines, "}"])


def e2m1_instructions(spans: int, half: int) -> str:
    """Instructions for e2m1, with 2 or 4 spans in 64 inputs: a shift, an AND and a product each."""
    code, mask = _twice(0x81C0), _twice(0xFF << packing.SCALE_SHIFT["mxfp4" if spans == 2 else "nvfp4"])
    left, right = packing.E2M1_FOURTH
    lines = ["{", ".reg .b32 s, t, u, b0, b1;", ".reg .b16 l, h;"]
    for q in range(4):
        span = q * spans // 4
        if q * spans % 4 == 0:
            scale = f"${_OUTPUTS + _WORDS + (half * spans + span) // 2}"
            if span % 2:
                lines += [f"shf.l.wrap.b32 s, {scale}, {scale}, 8;"]
                scale = "s"
            if spans == 2:
                lines += [f"and.b32 s, {scale}, {mask};"]
            else:
                # AND with the mask, then OR with the bits that all exponents share.
                lines += [f"lop3.b32 s, {scale}, {mask}, {_twice(packing.NVFP4_EXPONENT)}, 0xea;"]
            lines += _scale_pair("s")
        word, out = f"${_OUTPUTS + q}", 4 * q
        lines += [f"and.b32 ${out}, {word}, {code};"]
        lines += [f"shl.b32 t, {word}, {packing.E2M1_SECOND};", f"and.b32 ${out + 1}, t, {code};"]
        lines += [
            f"shf.l.wrap.b32 t, {word}, {word}, {packing.E2M1_THIRD};",
            f"and.b32 ${out + 2}, t, {code};",
        ]
        lines += [f"shl.b32 t, {word}, {left};", f"shr.u32 u, {word}, {right};"]
        lines += [f"lop3.b32 ${out + 3}, t, u, {code}, 0x28;"]  # XOR, AND
        for later in range(2):
            lines += [f"mul.rn.bf16x2 ${out + 2 * later}, ${out + 2 * later}, b0;"]
            lines += [f"mul.rn.bf16x2 ${out + 2 * later + 1}, ${out + 2 * later + 1}, b1;"]
    return "\n".join([*lines, "}"])


def _select(mask: int, there: str, elsewhere: str, to: str) -> str:
    """An instruction: the bits of `there` where the mask has ones, and those of `elsewhere` where it has zeros."""
    return f"lop3.b32 {to}, {there}, {elsewhere}, {mask}, 0xe4;"


def code_instructions(half: int) -> str:
    """Instructions for e2m1 with 2 spans in 64 inputs: four registers of four e4m3 codes for output g, and for g + 8.

    They read four words, the scales of 128 inputs, and the offsets of both outputs (`packed_codes.offsets_of`).
    """
    outputs, scale = 8, f"${8 + _WORDS + half}"
    offsets = [f"${8 + _WORDS + 2 + nth}" for nth in range(4)]
    lines = ["{", ".reg .b32 s, f, l0, h0, l1, h1, a, b, d, x, y;"]
    # Four bytes: of the second span and of the first, for output g, then for g + 8.
    lines += [f"shf.l.wrap.b32 s, {scale}, {scale}, 1;"]
    for q in range(4):
        word = f"${outputs + q}"
        if q % 2 == 0:
            for nth in range(2):
                byte = 2 * nth + (q == 0)
                lines += [f"prmt.b32 f, s, 0, {0x4440 + byte};"]
                for low, factor in ((True, packing.CODE_FACTORS[0]), (False, packing.CODE_FACTORS[1])):
                    table = f"{'l' if low else 'h'}{nth}"
                    lines += [f"mad.lo.u32 {table}, f, {factor}, {offsets[2 * nth + (not low)]};"]
        # Output g: magnitudes at bits 6, 10, 22 and 26; signs at 15, 19, 31 and 3.
        lines += [f"shr.u32 x, {word}, 6;", "prmt.b32 x, x, x, 0x2020;", "and.b32 x, x, 0x7777;"]
        lines += ["prmt.b32 x, l0, h0, x;"]
        lines += [f"shr.u32 a, {word}, 8;", f"shf.l.wrap.b32 b, {word}, {word}, {packing.E2M1_THIRD};"]
        lines += [_select(0x80008000, "b", "a", "y")]
        lines += [f"lop3.b32 ${q}, x, y, {0x80808080}, 0xf8;"]  # OR with the masked signs
        # Output g + 8: magnitudes at bits 0, 4, 16 and 20; signs at 9, 13, 25 and 29, once the fourth codes are there.
        lines += [f"shr.u32 a, {word}, {packing.E2M1_UNMIXING};"]
        lines += [f"lop3.b32 d, {word}, a, {packing.E2M1_UNMIXED}, 0x78;"]  # XOR with the masked bits
        lines += ["prmt.b32 x, d, d, 0x2020;", "and.b32 x, x, 0x7777;", "prmt.b32 x, l1, h1, x;"]
        lines += ["shr.u32 a, d, 2;", "shl.b32 b, d, 2;", _select(0x80008000, "b", "a", "y")]
        lines += [f"lop3.b32 ${q + 4}, x, y, {0x80808080}, 0xf8;"]
    return "\n".join([*lines, "}"])


# For each half of 128 inputs: for integers, for e2m1 with 2 spans in 64 inputs, and with 4.
DECODE = gl.constexpr(
    (*[int4_instructions()] * 2, *(e2m1_instructions(spans, half) for spans in (2, 4) for half in range(2)))
)
# For scales in 2 registers, and in 4.
CONSTRAINTS_2 = gl.constexpr(",".join(["=&r"] * _OUTPUTS + ["r"] * (_WORDS + 2)))
CONSTRAINTS_4 = gl.constexpr(",".join(["=&r"] * _OUTPUTS + ["r"] * (_WORDS + 4)))
# Moves that turn an int32, as the compiler sees it, into two bf16 numbers, so that it does not unpack the register.
NAME_PAIRS = gl.constexpr("\n".join(f"mov.b32 ${nth}, ${_OUTPUTS + nth};" for nth in range(_OUTPUTS)))
PAIR_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * _OUTPUTS + ["r"] * _OUTPUTS))
DECODE_CODES = gl.constexpr((code_instructions(0), code_instructions(1)))
CODE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * (_WORDS + 2 + 4)))
# Moves that turn an int32, as the compiler sees it, into four e4m3 numbers, so that it does not unpack the register.
NAME_CODES = gl.constexpr(
    "\n".join(
        f"mov.b32 ${8 * half + 2 * q + nth}, ${16 + 8 * half + 4 * nth + q};"
        for half in range(2)
        for q in range(4)
        for nth in range(2)
    )
)
NAME_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16))


@gluon.jit
def decode(
    words, scales, HALF: gl.constexpr,
    KIND: gl.constexpr, SPANS: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Decode words `[T, 4]` of 64 inputs with scales `[T, 4]` to the operand `[16 · WARPS, 64]`, within threads."""
    INSTRUCTIONS: gl.constexpr = DECODE[KIND * SPANS + HALF]
    CONSTRAINTS: gl.constexpr = CONSTRAINTS_4 if SPANS == 4 else CONSTRAINTS_2
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        INSTRUCTIONS, CONSTRAINTS, [words, scales], is_pure=True, pack=4,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    return operand_of(o0, o1, o2, o3, o4, o5, o6, o7, WARPS, OPERAND)


@gluon.jit
def operand_of(o0, o1, o2, o3, o4, o5, o6, o7, WARPS: gl.constexpr, OPERAND: gl.constexpr):
    """Arrange eight tensors of four numbers per thread as the operand `[16 · WARPS, 64]`, within threads."""
    a = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    a = a.reshape([WARPS, 8, 4, 2, 2, 2, 2, 2]).permute([0, 3, 1, 7, 6, 5, 2, 4]).reshape([WARPS * 16, 64])
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.jit
def decode_pairs(words, scales, HALF: gl.constexpr, KIND: gl.constexpr, SPANS: gl.constexpr):
    """`decode` to four tensors `[T, 4]` of int32 with two numbers each, which a loop can carry without unpacking."""
    INSTRUCTIONS: gl.constexpr = DECODE[KIND * SPANS + HALF]
    CONSTRAINTS: gl.constexpr = CONSTRAINTS_4 if SPANS == 4 else CONSTRAINTS_2
    return gl.inline_asm_elementwise(
        INSTRUCTIONS, CONSTRAINTS, [words, scales], is_pure=False, pack=4,
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
    )  # fmt: skip


@gluon.jit
def pair_operand(p0, p1, p2, p3, OPERAND: gl.constexpr):
    """The operand `[64, 64]` from the four results of `decode_pairs`."""
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        NAME_PAIRS, PAIR_CONSTRAINTS, [p0, p1, p2, p3], is_pure=True, pack=4,
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
    )  # fmt: skip
    return operand_of(o0, o1, o2, o3, o4, o5, o6, o7, 4, OPERAND)


@gluon.jit
def decode_codes(words, scales, offsets, HALF: gl.constexpr):
    """Decode words `[T, 4]` of 64 inputs to int32 of four e4m3 codes: `[T, 4]` for output g, and for g + 8."""
    return gl.inline_asm_elementwise(
        DECODE_CODES[HALF], CODE_CONSTRAINTS, [words, scales, offsets], is_pure=False, pack=4,
        dtype=(gl.int32, gl.int32),
    )  # fmt: skip


@gluon.jit
def code_operand(a0, b0, a1, b1, WARPS: gl.constexpr, OPERAND: gl.constexpr):
    """The e4m3 operand `[16 · WARPS, 128]` from the results of `decode_codes` for 64 inputs, and for the next 64."""
    o0, o1, o2, o3, o4, o5, o6, o7, p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
        NAME_CODES, NAME_CONSTRAINTS, [a0, b0, a1, b1], is_pure=True, pack=4,
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
               gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
               gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
               gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv),
    )  # fmt: skip
    o = gl.join(gl.join(gl.join(o0, o1), gl.join(o2, o3)), gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    p = gl.join(gl.join(gl.join(p0, p1), gl.join(p2, p3)), gl.join(gl.join(p4, p5), gl.join(p6, p7)))
    # g c place | output + 8? q 64 inputs
    codes = gl.join(o, p).reshape([WARPS, 8, 4, 4, 2, 2, 2, 2])
    codes = codes.permute([0, 4, 1, 7, 6, 5, 2, 3]).reshape([WARPS * 16, 128])
    return gl.convert_layout(codes, OPERAND, assert_trivial=True)
