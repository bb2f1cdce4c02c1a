"""The kernels compile for Hopper, on a machine without a GPU, with whatever Triton is installed.

The interpreter runs neither the types nor the layouts of a kernel, and Gluon's kernels not at all.
"""

import json
import os
import subprocess
import sys

import pytest

COMPILE = r"""
import re
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from tokenyard.experts.fused import tile_table
from tokenyard.experts.fused.kernels import (
    arguments, decoding, epilogues, fp8_split, expanding, items, packed, packed_codes, packed_numbers, products,
    row_blocks, rows_first, sorting, specialized, summing, tma)

TABLE = tile_table.NUMBERS["mxfp4"][2]
BF16 = ("x", "scales", "y", "partial_sums", "inner", "out")
FLOATS = ("divisors", "factors", "bias", "weights_N")
WHOLE = ("words", "order_N", "ids_N", "tiles", "how_many", "counts_CB")

def compiled(kernel, constants, warps, source=ASTSource, kinds={}):
    signature, values, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        kind = "*bf16" if name in BF16 else "*fp32" if name in FLOATS else "*i32" if name in WHOLE else "i32"
        kind = "*i64" if name.endswith("slots_R") else kind
        kind = "*bf16" if "_scales" in name or "_global" in name and not name.endswith("stride") else kind
        kind = "*fp32" if name.endswith("_factor") else kind
        signature[name] = kind = kinds.get(name, kind)
        if kind.startswith("*"):  # strides are multiples of 8 here, of which the compiler hears nothing
            aligned[(place,)] = [["tt.divisibility", 16]]
    check_compiled(kernel, source(kernel, signature, values, aligned), warps)

def check_compiled(kernel, source, warps):
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert ".version" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024, (kernel.__name__, made.metadata.shared)
    # The smaller of a number and NaN must be NaN: that of an activation's limit, or of zero.
    dropping = re.findall(r"(?:min|max)(?:\.ftz)?(?:\.xorsign\.abs)?\.f32", made.asm["ptx"])
    assert not dropping, (kernel.__name__, set(dropping))
    print(getattr(kernel, "__name__", kernel))

def packed_product(kind, spans, first, columns, lines, activation):
    return packed.PackedProduct(
        kind=kind, spans=spans, inputs=264, width=384, lines=lines, columns=columns, top_k=4, first=first,
        interleaved=first, weighted=True, finalize=True, activation=activation, limit=7.0, alpha=1.7, shift=1.0)

def packed_kernel(kind, spans, first, widths, groups, warps=8):
    scale, held = "*fp32" if spans == 4 else None, "*bf16" if kind == 0 else "*i16" if spans == 2 else "*i32"
    arrive, leave = ("*i64", None) if first else (None, "*i64")
    groups_of = dict(
        rows=arguments.Rows("*bf16", None, None, arrive, "i32", "i32", "i32"),
        weights=arguments.Weights("*i32", held, scale, scale, "*bf16"),
        routes=arguments.Routes("*i32", "*i32", "*i32", "i32", "*fp32"),
        results=arguments.Results("*bf16", None, "*bf16", "*bf16", leave, "i32"),
    )
    constants = dict(
        PRODUCT=packed_product(kind, spans, first, 264, 256, epilogues.SWIGLU_CLAMPED.value),
        TILES=packed.Tiles(widths, groups, 2, 4), BEFORE=arguments.Counted(2, 4, 3), EARLY=True, num_warps=warps)
    grouped_kernel(packed.packed_product, groups_of, constants, {}, warps=warps)

def product(compute, layer, tiles, rows, weights, results, warps=4, descriptors=()):
    # One product in plain Triton, with slots and biases.
    full = dict(hidden=264, intermediate=136, top_k=4, experts=8, rows=0, weights=0, kind=tl.bfloat16,
                weight_on_input=False, finalize=True, gated=True, interleaved=False, activation=0, limit=7.0, alpha=1.7,
                shift=1.0, inner=0) | layer
    sizes = dict(across=5, out=64, tile=32, tail=16, block=64, rows_width=264, width=264, stride=264, scale_width=1)
    sizes |= tiles
    groups = dict(rows=rows, weights=weights, routes=arguments.Routes("*i32", "*i32", "*i32", "i32", "*fp32"),
                  results=results)
    constants = dict(compute=compute, LAYER=arguments.Layer(**full), TILES=arguments.Tiles(**sizes), EARLY=True)
    others = dict(zip(("x_descriptor", "tail_descriptor", "w_descriptor"), descriptors))
    absent = [name for name in ("x_descriptor", "tail_descriptor", "w_descriptor", "rows")
              if others.get(name) is None and groups.get(name) is None]
    grouped_kernel(arguments.every_tile, {name: group for name, group in groups.items() if group is not None},
                   constants | dict.fromkeys(absent), others, ASTSource, warps)

def plain_kernels():
    sizes = dict(EXPERTS=8, BINS=16, CHUNK=1024, TILE=16, TOP_K=6, CHOICES=8, EARLY=True)
    compiled(sorting.sort_pairs, sizes, 4)
    compiled(sorting.place_chunks, sizes | dict(SHARE=4), 4)
    rows = arguments.Rows("*bf16", None, None, "*i64", "i32", "i32", "i32")
    weights = arguments.Weights("*bf16", None, None, None, "*bf16")
    first = arguments.Results("*bf16", None, None, None, None, "i32")
    second = arguments.Results("*bf16", None, "*bf16", "*bf16", "*i64", "i32")
    for activation in (epilogues.SWIGLU, epilogues.RELU2, epilogues.SWIGLU_CLAMPED):
        layer = dict(activation=activation.value, gated=activation != epilogues.RELU2, weight_on_input=True)
        product(products.inner_tile, layer, {}, rows, weights, first)
    product(products.result_tile, {}, dict(width=136, stride=136), None, weights, second)
    nvfp4 = dict(rows=decoding.NVFP4.value, weights=decoding.NVFP4.value)
    product(products.inner_tile, nvfp4, dict(rows_width=272, width=272, stride=136, scale_width=17),
            arguments.Rows("*u8", "*fp8e4nv", "*fp32", "*i64", "i32", "i32", "i32"),
            arguments.Weights("*u8", "*fp8e4nv", "*fp32", "*fp32", "*bf16"), first)
    compiled(fp8_split.round_numbers, dict(
        inner_scales=None, I=264, TILE=16, ITEMS=0, ROWS=1, COLUMNS=512, POWERS=True, EARLY=True), 4,
        kinds=dict(numbers="*fp32"))
    for counted in (0, 3):
        compiled(summing.sum_rows, dict(
            H=264, TOP_K=4, CHOICES=4, EXPERTS=8, HAS_OUT_SLOTS=True, WEIGHTED=True, COLUMNS=512, ROWS=16,
            ITEMS=counted, EARLY=True), 4)

def kernels_of_e4m3(held):
    e4m3 = dict(rows=decoding.FP8_BLOCK.value, weights=decoding.FP8_BLOCK.value, inner=held.value)
    rows = arguments.Rows("*fp8e4nv", "*fp32", None, "*i64", "i32", "i32", "i32")
    weights = arguments.Weights("*fp8e4nv", "*fp32", None, None, "*bf16")
    first = arguments.Results("*fp8e4nv", "*fp32", None, None, None, "i32")
    second = arguments.Results("*fp8e4nv", "*fp32", "*bf16", "*bf16", "*i64", "i32")
    few, wide = dict(out=256, tile=16, tail=0, block=128, scale_width=3), dict(out=256, tile=128, tail=64, block=128)
    product(products.inner_tile, e4m3, few, rows, weights, first)
    two = few | dict(rows_width=512, width=512, stride=512, scale_width=4, block=256)
    product(products.inner_tile, e4m3 | dict(hidden=512), two, rows, weights, first)
    narrow = dict(width=136, stride=136, scale_width=2)
    product(products.result_tile, e4m3, few | narrow | dict(out=128), None, weights, second)
    product(rows_first.rows_first_tile, e4m3, wide | dict(scale_width=3), rows, weights, first, 8)
    product(rows_first.rows_first_result_tile, e4m3, wide | narrow, None, weights, second, 8)

def kernels_of_row_blocks():
    kinds = dict(x="*fp8e4nv", x_scales="*u8", blocks="*fp8e4nv", block_scales="*fp32")
    for hidden_size, columns, slots in ((264, 512, True), (2880, 1024, False), (7168, 1024, True)):
        compiled(row_blocks.recode_rows, dict.fromkeys(("order_N", "tiles", "how_many", "max_tiles", "TOP_K")) | dict(
            H=hidden_size, HAS_SLOTS=slots, ROWS=1 if slots else 4, COLUMNS=columns, EARLY=True), 4, kinds=kinds)
        compiled(row_blocks.decode_rows, dict(
            H=hidden_size, HAS_SLOTS=slots, COLUMNS=columns, EARLY=True), 4, kinds=kinds | dict(numbers="*bf16"))

def tma_kernels():
    wide, weights = dict(out=256, tile=128, tail=64), arguments.Weights(None, None, None, None, "*bf16")
    gates, some = "tensordesc<bf16[1, 1, 128, 64]>", "tensordesc<bf16[{}, 64]>"
    rows = arguments.Rows("*bf16", None, None, "*i64", "i32", "i32", "i32")
    clamped = dict(activation=epilogues.SWIGLU_CLAMPED.value, interleaved=True, weight_on_input=True)
    product(tma.tma_inner_tile, clamped, wide, rows, weights,
            arguments.Results("*bf16", None, None, None, None, "i32"), 8, (None, None, gates))
    for tail in (64, 0):
        product(tma.tma_result_tile, {}, wide | dict(tail=tail), None, weights,
                arguments.Results("*bf16", None, "*bf16", "*bf16", "*i64", "i32"), 8,
                (some.format(128), some.format(tail or 128), "tensordesc<bf16[1, 256, 64]>"))

def grouped_kernel(kernel, groups, constants, others, source=GluonASTSource, warps=4):
    # A kernel whose arguments are groups: named tuples of kinds, None for what is not there.
    signature, values, aligned = dict(others), {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name in groups:
            signature[name] = type(groups[name])(*("constexpr" if kind is None else kind for kind in groups[name]))
            for nth, kind in enumerate(groups[name]):
                if kind is None:
                    values[place, nth] = None
                elif name != "routes":
                    aligned[place, nth] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    check_compiled(kernel, source(kernel, signature, values, aligned), warps)

def specialized_kernel(bits, H, I, tile=128, transposed=(), activation=0, interleaved=False, plain=False, boxed=False):
    # Of e4m3, or of bf16. A plain layer has no biases, and no slots.
    element, wide = ("fp8e4nv", 128) if bits == 8 else ("bf16", 64)
    descriptor = f"tensordesc<{element}[{{}}, {wide}],{gl.NVMMASharedLayout(128, bits, 2)!r}>".format
    scales, bias, slots = "*fp32" if bits == 8 else None, None if plain else "*bf16", None if plain else "*i64"
    weights = arguments.Weights(None, scales, None, None, bias)
    groups = dict(
        rows=arguments.Rows("*" + element, scales, None, slots, "i32", "i32", "i32"),
        between=arguments.Rows("*" + element, scales, None, None, "i32", "i32", "i32"),
        weights13=weights,
        weights2=weights,
        routes=arguments.Routes("*i32", "*i32", "*i32", "i32", "*fp32"),
        results=arguments.Results("*" + element, scales, "*bf16", "*bf16", slots, "i32"),
    )
    deep = tile < 128
    first = items.Product(
        inputs=H, outputs=I, experts=8, top_k=4, first=True, interleaved=interleaved, weighted=True,
        finalize=True, activation=activation, limit=7.0, alpha=1.7, shift=1.0, powers=True, tile=tile,
        transposed=transposed,
        step=128, deep=False, boxed=boxed)
    second = first._replace(
        inputs=I, outputs=H, first=False, interleaved=False, step=128 if deep else 256, deep=deep)
    constants = dict(FIRST=first, SECOND=second, STAGES=4, EARLY=True, num_warps=4)
    grouped_kernel(specialized.specialized_products, groups, constants, dict(
        inner_descriptor=descriptor(min(tile, 64)), w13_descriptor=descriptor(128), w2_descriptor=descriptor(128)))

def expanding_kernels():
    groups = dict(packed=expanding.Packed("*i32", "*i16", "*fp32"))
    for gated, outputs, inputs in ((True, 512, 384), (False, 384, 256)):
        grouped_kernel(expanding.expand_matrices, groups, dict(
            OUTPUTS=outputs, INPUTS=inputs, GATED=gated, EARLY=True, num_warps=4), dict(out="*fp8e4nv"))

def packed_codes_kernel(first, runs, activation=0):
    groups = dict(
        weights=packed_codes.PackedWeights("*i16", "*i32", "*bf16"),
        routes=arguments.Routes("*i32", "*i32", "*i32", "i32", "*fp32"),
        results=arguments.Results("*fp32", None, "*bf16", "*bf16", "*i64", "i32"),
    )
    descriptor = "tensordesc<{}[{}, {}],{!r}>".format
    others = dict(
        x_descriptor=descriptor("fp8e4nv", 64, 128, gl.NVMMASharedLayout(128, 8, 2)),
        w_descriptor=descriptor("i32", 32, 32, gl.NVMMASharedLayout(128, 32, 2)),
        row_scales="*fp32", scale_stride="i32")
    product = packed_product(1, 2, first, 150 if first else 300, 320, activation)
    constants = dict(
        PRODUCT=product, BEFORE=arguments.Counted(3, 4, 1), RUNS=runs, STAGES=4, EARLY=True, num_warps=4)
    grouped_kernel(packed_codes.packed_codes_product, groups, constants, others)

def packed_codes_helpers():
    kinds = dict(x="*fp8e4nv", x_scales="*u8", blocks="*fp8e4nv", block_scales="*fp32")
    sizes = dict(H=264, TOP_K=4, HAS_SLOTS=True, ROWS=4, COLUMNS=512, EARLY=True)
    compiled(row_blocks.recode_rows, sizes, 4, kinds=kinds)
    sizes = dict(I=264, TILE=256, ITEMS=3, ROWS=4, COLUMNS=512, POWERS=True, EARLY=True)
    compiled(fp8_split.round_numbers, sizes, 4, kinds=dict(
        numbers="*fp32", inner="*fp8e4nv", inner_scales="*fp32"))

def packed_numbers_kernel(kind, spans, first, units, widths, stages, activation=0, plain=False):
    bias, slots, scale = (None, None, None) if plain else ("*bf16", "*i64", "*fp32" if spans == 4 else None)
    held = "*bf16" if kind == 0 else "*i16" if spans == 2 else "*i32"
    groups_of = dict(
        rows=arguments.Rows("*bf16", None, None, slots, "i32", "i32", "i32"),
        weights=arguments.Weights(None, held, scale, scale, bias),
        routes=arguments.Routes("*i32", "*i32", "*i32", "i32", "*fp32"),
        results=arguments.Results("*bf16", None, "*bf16", "*bf16", slots, "i32"),
    )
    descriptor, run = "tensordesc<{}[{}, {}],{!r}>".format, min(32, widths[-1])
    others = dict(
        x_descriptor=descriptor("bf16", run, 64, gl.NVMMASharedLayout(128, 16, 2)),
        w_descriptor=descriptor("i32", 32, 32, gl.NVMMASharedLayout(128, 32, 2)))
    product = packed_product(kind, spans, first, 150 if first else 300, 320, activation)
    tiles = packed_numbers.Tiles(units, widths, run, stages)
    constants = dict(PRODUCT=product, BEFORE=arguments.Counted(2), TILES=tiles, EARLY=True, num_warps=4)
    grouped_kernel(packed_numbers.packed_numbers_product, groups_of, constants, others)

def specialized_numbers():
    specialized_kernel(16, 328, 200, 128, (), epilogues.SWIGLU_CLAMPED.value)
    specialized_kernel(16, 320, 200, 128, (16,), epilogues.SWIGLU_CLAMPED.value, interleaved=True)

def specialized_boxes():
    # Of an even number of boxes beside each other, and of an odd one.
    specialized_kernel(16, 384, 256, 128, (16,), epilogues.SWIGLU_CLAMPED.value, boxed=True)
    specialized_kernel(8, 384, 384, 16, (16,), boxed=True)
    specialized_kernel(8, 384, 256, 128, (16,), plain=True, boxed=True)

def plain_boxes():
    # What reads boxes where rows do not allow specialized warps.
    sizes = dict(hidden=256, intermediate=128)
    rows = arguments.Rows("*bf16", None, None, "*i64", "i32", "i32", "i32")
    weights = arguments.Weights("*bf16", None, None, None, "*bf16")
    first = arguments.Results("*bf16", None, None, None, None, "i32")
    second = arguments.Results("*bf16", None, "*bf16", "*bf16", "*i64", "i32")
    boxes = dict(rows_width=256, width=256, stride=256, unit=64)
    product(products.inner_tile, sizes, boxes | dict(block=128), rows, weights, first)
    product(products.result_tile, sizes, boxes | dict(width=128, stride=128), None, weights, second)
    codes = sizes | dict(rows=decoding.FP8_BLOCK.value, weights=decoding.FP8_BLOCK.value, inner=fp8_split.CODES.value)
    rows = arguments.Rows("*fp8e4nv", "*fp32", None, "*i64", "i32", "i32", "i32")
    weights = arguments.Weights("*fp8e4nv", "*fp32", None, None, "*bf16")
    first = arguments.Results("*fp8e4nv", "*fp32", None, None, None, "i32")
    second = arguments.Results("*fp8e4nv", "*fp32", "*bf16", "*bf16", "*i64", "i32")
    boxes |= dict(out=256, tile=128, tail=64, block=128, scale_width=2, unit=128)
    product(products.inner_tile, codes, boxes | dict(tile=16, tail=0, block=256), rows, weights, first)
    product(rows_first.rows_first_tile, codes, boxes, rows, weights, first, 8)
    narrow = boxes | dict(width=128, stride=128, scale_width=1)
    product(rows_first.rows_first_result_tile, codes, narrow, None, weights, second, 8)

"""
# Every kernel is compiled in `make test`, in the variant that compiles soonest.
CALLS = {
    "mxint4, the first product": "packed_kernel(0, 2, True, ((16, 0), (32, 0)), 1)",
    "mxfp4, the second product": "packed_kernel(1, 2, False, ((8, 0),), 1)",
    "plain": "plain_kernels()",
    "codes of e4m3": "kernels_of_e4m3(fp8_split.CODES)",
    "rows of mxfp8 in blocks": "kernels_of_row_blocks()",
    "matrices by TMA": "tma_kernels()",
    "packed weights as blocks": "expanding_kernels()",
    "beside packed weights as codes": "packed_codes_helpers()",
    "packed weights as codes, the second product": "packed_codes_kernel(False, 1)",
    "mxint4 by warps that load": "packed_numbers_kernel(0, 2, True, 1, (16,), 3, plain=True)",
    "warps that load, and warps that multiply e4m3": "specialized_kernel(8, 384, 128, 32, (16, 32), plain=True)",
    "warps that load, and warps that multiply bf16": "specialized_kernel(16, 264, 136, 16, (16,))",
    "warps that load weights in boxes": "specialized_kernel(16, 384, 256, 16, (16,), boxed=True)",
}
LONG_CALLS = {
    "mxfp4, many warps": "packed_kernel(1, 2, True, ((32, 0), (64, 0)), 1, warps=16)",
    "nvfp4, few rows": "packed_kernel(1, 4, True, ((8, 0), (16, 0)), 2, warps=4)",
    "nvfp4, two runs of rows": "packed_kernel(1, 4, False, ((64, 32),), 2)",
    "numbers split in two of e4m3": "kernels_of_e4m3(fp8_split.FP8_SPLIT)",
    "codes of e4m3 whose scales are powers of two": "kernels_of_e4m3(fp8_split.POWER_CODES)",
    "packed weights as codes, the first product": "packed_codes_kernel(True, 3, epilogues.SWIGLU_CLAMPED.value)",
    "mxfp4 by warps that load": "packed_numbers_kernel(1, 2, True, 2, (32, 64), 3, 4)",
    "nvfp4 by warps that load": "packed_numbers_kernel(1, 4, False, 1, (64, 128), 3)",
    "mxfp4 as in the tile table, the first product": "packed_numbers_kernel(1, 2, True, *TABLE)",
    "mxfp4 as in the tile table, the second": "packed_numbers_kernel(1, 2, False, *TABLE)",
    "long tiles of e4m3": "specialized_kernel(8, 384, 256, 128, (16,), epilogues.SWIGLU_CLAMPED.value)",
    "long tiles of bf16": "specialized_numbers()",
    "long tiles of weights in boxes": "specialized_boxes()",
    "weights in boxes": "plain_boxes()",
}


# Answers each call with its traceback, or with nothing. What it prints meanwhile goes to stderr.
SERVE = r"""
import json, os, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for call in sys.stdin:
    try:
        exec(call)
    except BaseException:
        answer = traceback.format_exc()
    else:
        answer = ""
    print(json.dumps(answer), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def compiler():
    """One process that compiles for all tests: to load Triton takes longer than most kernels do."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", COMPILE + SERVE], env=environment, **pipes) as process:
        yield process
        process.stdin.close()
        process.wait(timeout=60)


@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(call, id=name) for name, call in CALLS.items()),
        *(pytest.param(call, id=name, marks=pytest.mark.long) for name, call in LONG_CALLS.items()),
    ],
)
def test_kernels_compile_for_hopper(call, compiler):
    compiler.stdin.write(call + "\n")
    compiler.stdin.flush()
    answer = compiler.stdout.readline()
    assert answer, "the process that compiles has ended; its error is on stderr"
    error = json.loads(answer)
    assert not error, error[-3000:]
