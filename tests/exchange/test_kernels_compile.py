"""The kernels of nvfp4's way back compile for Hopper, on a machine without a GPU: the interpreter knows no types."""

import os
import subprocess
import sys

COMPILE = r"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenyard.exchange.transports.one_sided.kernels import pull
from tokenyard.exchange.transports.one_sided.cuda.operands import Encoding, ReturnLayout
from tokenyard.formats import get

KINDS = {"results": "*fp32", "out": "*bf16", "term": "*bf16", "other_term": "*bf16", "slots": "*i32",
         "owners": "*i32", "ended": "*i32", "begun": pull.Begun("*fp32", "*i32"), "peers": "*i64",
         "host": "*i64", "global_scale": "fp32", "deadline": "i64"}

def compiled(kernel, tiles, **constants):
    signature, values = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        else:
            kind = "*i64" if name == "given" else "i64" if name.endswith("_at") else "i32"
            signature[name] = KINDS.get(name, kind)
    source = ASTSource(kernel, signature, values, {})
    options = {"num_warps": tiles.warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # Scales are divided as IEEE says, not by an approximate reciprocal.
    assert "div.rn.f32" in made.asm["ptx"], kernel

encoding = Encoding.of(get("nvfp4"))
layout = ReturnLayout(encoding=encoding, places={}, padded=208)
ranks = dict(WORLD=2, WIDE=2)
tiles = layout.place_tiles()
compiled(pull.place, tiles, ROW=encoding.row(200, 208, tiles), given=None, LIMITED=False, **ranks)
compiled(pull.place, tiles, ROW=encoding.row(200, 208, tiles), LIMITED=True, **ranks)
tiles = layout.tiles(128)
alone = dict(ended=None, begun=None)
for choices in (0, 3):
    compiled(
        pull.pull, tiles, ROW=encoding.row(200, 208, tiles), TURNS=2, MEETS=True, EARLY=True, CHOICES=choices,
        LIMITED=choices > 0, **alone, **ranks,
    )
# Few blocks that begin, and all that go on behind them.
for ends in ({}, dict(ended=None)):
    compiled(
        pull.pull, tiles, ROW=encoding.row(200, 208, tiles), TURNS=2, MEETS=False, EARLY=True, CHOICES=0,
        LIMITED=not ends, **ends, **ranks,
    )
"""


def test_kernels_compile_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
