"""Two levels with the kernels that serve GPUs inside each host, run by Triton's interpreter in processes."""

import time

import pytest
import torch

from tests.exchange import interpreter
from tests.exchange.streams import no_streams
from tests.models import on_ranks
from tokenyard.conformance.cases import Case, run_case
from tokenyard.exchange import HierarchicalTransport, SharedMemoryTransport, hierarchical
from tokenyard.exchange.one_sided.kernels import flags

pytestmark = interpreter.only_without_gpu
interpreter.install()


def by_kernels(group, fn, *arguments):
    """A rank whose rows are moved by kernels inside its host, though it has no GPU."""
    from tokenyard.exchange.one_sided.cuda import CudaTransport

    tl = flags.tl
    flags.globaltimer = lambda: tl.full([], time.monotonic_ns(), tl.int64)
    torch.cuda.is_current_stream_capturing = lambda: False
    SharedMemoryTransport.on = lambda device: CudaTransport
    HierarchicalTransport.on = lambda device: hierarchical.DeviceHierarchicalTransport
    group.allow_messages = lambda nbytes: None  # rows follow their announcements, as on GPUs
    with no_streams():
        return fn(group, *arguments)


def on_processes(world, fn, *arguments, hosts, **options):
    return on_ranks(world, by_kernels, fn, *arguments, hosts=hosts, ranks="processes", **options)


def outcomes(group, cases):
    return [str(outcome) for case in cases if not (outcome := run_case(group, case)).passed]


KINDS = [
    {"wire": "nvfp4", "placement": "replicas", "payloads": True},
    {"wire": "mxfp8", "combine_wire": "mxfp8", "routes": "gaps"},
    {"wire": "fp8_block128", "dtype": "float16", "placement": "round_robin"},
    {"dtype": "float32", "combine_wire": "bf16", "routes": "duplicates"},
    {"num_experts": 2, "routes": "one_rank"},  # most ranks, and a host, have no expert
]


def cases(world):
    fields = {"hidden_size": 48, "num_experts": 6, "top_k": 3, "exchange": "hierarchical"}
    tokens = (3, 0, 4)[:world]
    return [Case(**(fields | kind), tokens=tokens, seed=seed) for seed, kind in enumerate(KINDS)]


@pytest.mark.parametrize("hosts", [[2, 1], [1, 2]])
def test_any_layer_has_the_bits_of_the_twin(hosts):
    assert on_processes(3, outcomes, cases(3), hosts=hosts) == [[]] * 3
