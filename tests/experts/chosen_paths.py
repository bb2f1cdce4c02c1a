"""Which kernels compute the products of layers of many kinds on three kinds of GPUs, on a machine without one.

`python -m tests.experts.chosen_paths` records what fused experts launch, for every form in which their weights may be
held and for all numbers of rows that choose other tiles, and prints by kernel what chose it, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import defaultdict

import torch

import tokenyard as ty
from docs.generate.kernel_paths import GPUS
from tests.experts.recorded_launches import GPU, arriving, pretend_hopper
from tokenyard import gpu_kernels
from tokenyard.experts import ExpertsSpec, FusedExperts, activation
from tokenyard.experts.fused import launch, prepared
from tokenyard.formats import weight_format

# H and I: multiples of 128, of 8, and neither.
SIZES = {128: (256, 128), 8: (264, 136), 1: (250, 130)}
# Rows per expert, on average, on both sides of the limits that choose another path.
ROWS = (0.3, 1, 2, 4, 8, 20, 24, 28, 29, 40, 41, 64, 66, 80, 81, 154, 155, 272, 273, 1000)
EXPERTS = 16


def kernel_of(kernel, options) -> str:
    """The name of a kernel, or of the function that computes the tiles of one."""
    return getattr(options.get("compute"), "__name__", kernel.__name__)


def layers():
    """Layers of every weight format, each with rows of several formats, inner formats, activations and sizes."""
    for weights, multiple, act in itertools.product(
        FusedExperts.weight_formats, SIZES, ("swiglu", "swiglu_oai")
    ):
        format, (hidden_size, intermediate_size) = weight_format(weights), SIZES[multiple]
        for inner in ("exact", *format.inner_formats):
            spec = ExpertsSpec(
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_local_experts=EXPERTS,
                top_k=1,
                activation=activation(act),
                weights=weights,
                inner=None if inner == "exact" else ty.formats.get(inner),
            )
            own = () if format.quantized else (weights,)
            for wire in dict.fromkeys(("bf16", *own, *format.row_formats, "mxfp8")):
                yield spec, multiple, inner, wire


def main() -> None:
    pretend_hopper()
    chosen: dict[str, dict[str, set]] = defaultdict(lambda: defaultdict(set))
    seen: list[str] = []
    gpu_kernels.Recorder.add = lambda self, kernel, args, options: seen.append(kernel_of(kernel, options))
    for gpu, capability in GPUS.items():
        torch.cuda.get_device_capability = lambda device=None, found=capability: found
        launch.starts_early.cache_clear()
        for spec, multiple, inner, wire in layers():
            with gpu_kernels.recorded(GPU):
                for experts in prepared.stand_ins(FusedExperts, spec):
                    for rows in ROWS:
                        seen.clear()
                        received = arriving(spec, wire, "slots")(max(1, round(rows * EXPERTS)))
                        experts.launch(received, finalize=True)
                        for name in seen:
                            found = chosen[name]
                            found["gpus"].add(gpu)
                            found["weights"].add(spec.weights)
                            found["inner"].add(inner)
                            found["sizes"].add(multiple)
                            found["rows"].add(rows)
    print(
        json.dumps({name: {key: sorted(of) for key, of in found.items()} for name, found in chosen.items()})
    )
    sys.stdout.flush()
    os._exit(0)  # without looking for leaks


if __name__ == "__main__":
    main()
