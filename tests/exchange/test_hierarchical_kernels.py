"""Two levels with the kernels that serve GPUs inside each host, run by Triton's interpreter in processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

import tokenyard as ty
from tests.exchange import interpreter
from tests.exchange.streams import no_streams
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import Case, run_case, same_bits
from tokenyard.exchange import HierarchicalTransport, SharedMemoryTransport
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports import hierarchical
from tokenyard.exchange.transports.one_sided.cuda.control import VERDICT
from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport
from tokenyard.exchange.transports.one_sided.kernels import flags
from tokenyard.group import thread_groups

pytestmark = interpreter.only_without_gpu
interpreter.install()


def by_kernels(group, fn, *arguments):
    """A rank whose rows are moved by kernels inside its host, though it has no GPU."""
    tl = flags.tl
    flags.globaltimer = lambda: tl.full([], time.monotonic_ns(), tl.int64)
    torch.cuda.is_current_stream_capturing = lambda: False
    SharedMemoryTransport.for_device = lambda device: CudaTransport
    HierarchicalTransport.for_device = lambda device: hierarchical.DeviceHierarchicalTransport
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


def started_and_failed(group):
    """Two batches in flight; then rank 1 fails in a dispatch, and rank 2 in a combine; then a call works again."""
    layer = spec(num_experts=6, top_k=4, wire="mxfp8", experts="reference")
    plan = ty.plan([layer], group, exchange="hierarchical", in_flight=2)
    assert isinstance(plan.exchange.transport.inside, CudaTransport)
    built, compute = build(plan, "moe"), None
    x_TH, routes = batch(layer, 3, seed=group.rank)
    before_TH = built(x_TH, routes)
    pending = [built.start(x_TH, routes) for _ in range(2)]
    same = [same_bits(one.finish(), before_TH) for one in pending]
    errors = [raised(built, x_TH, None if group.rank == 1 else routes)]
    compute = built.experts.compute
    if group.rank == 2:
        built.experts.compute = lambda *_, **__: None
    errors.append(raised(built, x_TH, routes))
    built.experts.compute = compute
    same.append(same_bits(built(x_TH, routes), before_TH))
    bounded = raised(ty.plan, [layer], group, exchange="hierarchical", max_rows=8)
    return same, [str(error) for error in errors], str(bounded)


def test_batches_in_flight_arrive_and_errors_reach_all_hosts():
    found = on_processes(3, started_and_failed, hosts=[2, 1])
    for rank, (same, (out, back), bounded) in enumerate(found):
        assert same == [True] * 3
        assert "rank 1 failed in dispatch" in out or rank == 1, out
        assert "rank 2 failed in combine" in back or rank == 2, back
        assert "DeviceHierarchicalTransport) sends rows before it has heard how many come" in bounded


@pytest.fixture
def two_ranks(monkeypatch):
    """Two transports of one host in a CPU's memory, each of which waits for the other up to a deadline."""
    tl, looks = flags.tl, count()  # 20 ms pass from one look at the clock to the next
    monkeypatch.setattr(flags, "globaltimer", lambda: tl.full([], next(looks) * 20_000_000, tl.int64))
    layer = ty.draft([spec()], 2, exchange="one_sided").wirings[0].exchange_spec
    with no_streams():
        transports = [CudaTransport(group) for group in thread_groups(2, deadline=1.0)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda transport: transport.serve([layer]), transports))
        yield transports


def test_nobody_waits_for_a_rank_that_has_left_and_it_is_not_lost(two_ranks):
    leaver, waiter = two_ranks
    leaver.leave()
    waiter.launcher.signal_and_wait(0, Phase.COMBINE)
    with pytest.raises(ty.PeerLost) as caught:
        waiter._raise_trouble()
    assert list(caught.value.peers) == [0]
    assert caught.value.waited < 0.1
    assert waiter.departed()
    assert not leaver.departed()


def test_the_first_verdict_stands_and_a_loss_is_no_departure(two_ranks):
    leaver, waiter = two_ranks
    waiter.launcher.signal_and_wait(0, Phase.COMBINE)  # up to the deadline
    leaver.leave()
    assert [int(transport.workspace.reports.words()[VERDICT]) for transport in two_ranks] == [1, 1]
    assert not waiter.departed()
    with pytest.raises(ty.PeerLost):
        waiter._raise_trouble()
