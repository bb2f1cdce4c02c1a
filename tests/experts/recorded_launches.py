"""Records the launches of fused experts for a Hopper GPU, on a machine without one, in a process of its own.

`python -m tests.experts.recorded_launches WEIGHTS WIRE INNER` compares, with Triton's own keys, what is prepared for a
layer with what batches of many sizes launch, and prints the result as JSON. Tests interpret kernels on CPUs; here
they must be those that are compiled.
"""

from __future__ import annotations

import json
import os
import random
import sys

import torch
import triton
from triton.runtime import driver

import tokenyard as ty
from tokenyard.experts import ExpertsSpec, FusedExperts, activation
from tokenyard.experts.fused import prepared
from tokenyard.experts.fused.tile_configs import expected_pairs
from tokenyard.gpu_kernels import LaunchKey, RecordedLaunch, launch_key, recorded
from tokenyard.kernel_compiler import _NoGpu
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows

GPU, MOST_ROWS = torch.device("cuda", 0), 40_000


def pretend_hopper() -> None:
    """Let everything that asks for the GPU see an H200."""
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    processors = type("Properties", (), {"multi_processor_count": 132})
    torch.cuda.get_device_properties = lambda device=None: processors
    driver.set_active(_NoGpu((9, 0)))


def arriving(spec: ExpertsSpec, wire: str, form: str):
    """A function that makes rows as an exchange brings them: `counted` or `slots` of a workspace, or `messages`."""

    def received(num_rows: int) -> ReceivedRows:
        format, meta = ty.formats.get(wire), torch.device("meta")
        rows = ty.formats.base.EncodedRows(
            format=format,
            hidden_size=spec.hidden_size,
            payloads=format.empty_payloads(num_rows, spec.hidden_size, meta),
        )
        # Routes of a message start wherever they lie in it.
        ids_RK = torch.empty(num_rows * spec.top_k + 1, dtype=torch.int32, device=meta)[1:].view(num_rows, -1)
        slots_R = torch.empty(num_rows, dtype=torch.int64, device=meta) if form == "counted" else None
        place = torch.empty(num_rows, spec.hidden_size, dtype=spec.dtype, device=meta)
        return ReceivedRows(
            rows=rows,
            routes=LocalRoutes(ids_RK=ids_RK, weights_RK=torch.empty(ids_RK.shape, device=meta)),
            counts_W=(num_rows,),
            slots_R=slots_R,
            may_be_empty=form == "slots",
            results=None if form == "messages" else CombineBuffer(rows_SH=place, slots_R=slots_R),
        )

    return received


def triton_key(launch: RecordedLaunch) -> str:
    """The key by which Triton looks for the compiled kernel."""
    *_, binder = launch.kernel.device_caches[0]
    given = dict(launch.options) | {"debug": False}
    _, specialization, options = binder(*launch.args, **given)
    return f"{launch.kernel.__name__} {specialization} {sorted(options.items(), key=str)}"


def boundaries(experts: FusedExperts, wire: str, *, may_be_empty: bool) -> list[int]:
    """Numbers of rows on both sides of every change of the tiles, found by looking at all numbers of pairs."""
    spec, found, last = experts.spec, [], None
    for rows in [*range(1, 3000), *range(3000, MOST_ROWS, 7)]:
        pairs = expected_pairs(
            rows, spec.top_k, spec.num_local_experts, spec.num_experts, may_be_empty=may_be_empty
        )
        tiles = experts.choose_tiles(pairs, wire)
        if tiles != last:
            found += [max(1, rows - 1), rows]
        last = tiles
    return found


def main() -> None:
    weights, wire, inner = sys.argv[1:4]
    pretend_hopper()
    spec = ExpertsSpec(
        hidden_size=512,
        intermediate_size=256,
        num_local_experts=16,
        top_k=4,
        activation=activation("swiglu"),
        weights=weights,
        inner=None if inner == "exact" else ty.formats.get(inner),
        num_experts=64,
    )
    draw, known, used, sizes = random.Random(0), {}, {}, 0
    for form in ("counted", "slots", "messages"):
        received = arriving(spec, wire, form)
        with recorded(GPU) as before:
            FusedExperts.record_launches(spec, received, MOST_ROWS, finalize=True)
        known |= before.launches
        with recorded(GPU) as later:
            for experts in prepared.stand_ins(FusedExperts, spec):
                numbers = boundaries(
                    experts, experts._rows(received(1))[0].format.name, may_be_empty=form == "slots"
                )
                numbers += [draw.randint(1, MOST_ROWS) for _ in range(30)]
                numbers += [1, 2, 16, 17, MOST_ROWS]
                sizes += len(numbers)
                for number in numbers:
                    experts.launch(received(number), finalize=True)
        used |= later.launches
    unknown = [str(key)[:300] for key in used if key not in known]
    by_key: dict[LaunchKey, str] = {key: triton_key(launch) for key, launch in (known | used).items()}
    again = {launch_key(one.kernel, one.args, one.options) for one in (known | used).values()}
    print(
        json.dumps(
            {
                "prepared": len(known),
                "used": len(used),
                "sizes": sizes,
                "unknown": unknown,
                "keys of Triton": len(set(by_key.values())),
                "keys": len(by_key),
                "same again": again == set(by_key),
                "triton": triton.__version__,
            }
        )
    )
    sys.stdout.flush()
    os._exit(0)  # without looking for leaks


if __name__ == "__main__":
    main()
