"""How long shared experts take beside an exchange of the same length, on virtual ranks that share a GPU.

    python -m tests.gpu.overlap --write bench/results/overlap-h200.json

Rows and results move on as many multiprocessors of each rank as `sms` says, and are in CUDA graphs, as are the products
of shared experts. Four ranks share one GPU, its memory and its clock: this is not the time of a link.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

import tokenyard as ty
from tests.gpu.test_one_sided_cuda import there
from tests.models import batch, on_ranks, spec
from tokenyard.exchange import RoundTrip

RANKS, TOKENS, HIDDEN, TOP_K, REPLAYS = 4, 2048, 4096, 8, 5
ROUNDS = 3


def on_gpu(layer, tokens, seed):
    x_TH, routes = batch(layer, tokens, seed=seed)
    return x_TH.cuda(), there(routes)


def capture(group, run):
    """A graph of what a rank launches. Threads of one process capture one after the other."""
    graph = torch.cuda.CUDAGraph()
    for rank in range(group.size):
        if rank == group.rank:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                outputs = run()
        group.barrier()
    return graph, outputs


def shared_beside_the_exchange(group, sms):
    """ms of a round trip without experts: alone, shared experts of its length alone, both, one after the other."""
    layer = spec(hidden_size=HIDDEN, num_experts=32, top_k=TOP_K, max_tokens=TOKENS, experts="grouped")
    plan = ty.plan([layer], group, exchange="one_sided", sms=sms)
    exchange, exchange_spec = plan.exchange, plan.wiring(layer.name).exchange_spec
    x_TH, routes = on_gpu(layer, TOKENS, seed=group.rank)
    weights_HH = torch.randn(HIDDEN, HIDDEN // 2, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    back_HH = torch.randn(HIDDEN // 2, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    out_TH = torch.empty_like(x_TH)

    def shared(products):
        y_TH = x_TH
        for _ in range(products):
            y_TH = (y_TH @ weights_HH) @ back_HH
        return y_TH

    def round_trip(beside=None, before=None):
        add, ahead = [] if before is None else [before()], beside is not None
        rows = exchange.encode(exchange_spec, x_TH)
        trip = RoundTrip(exchange, exchange_spec)
        trip.send(rows, routes, ahead=ahead)
        add += [exchange.run_overlapped(beside)] if ahead else []
        trip.send_back(trip.receive().results.placed(), out=out_TH, add=add, ahead=ahead)
        trip.result()

    def milliseconds(run):
        graph, _ = capture(group, lambda: [run() for _ in range(3)])
        times = []
        for _ in range(3):
            plan.synchronize()
            group.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            plan.synchronize()
            times.append(start.elapsed_time(end) / REPLAYS / 3)
        by_rank = group.gather_json(min(times[1:]))
        return max(by_rank)

    exchange.run_overlapped(lambda: shared(1))  # memory and libraries, before a kernel waits
    shared(1)
    torch.cuda.synchronize()
    group.barrier()
    with plan.fixed_shapes():
        round_trip()
        round_trip(beside=lambda: shared(1))
        plan.synchronize()
        alone = milliseconds(round_trip)
        one = milliseconds(lambda: shared(4)) / 4
        products = max(1, int(alone / one))
        both = milliseconds(lambda: round_trip(beside=lambda: shared(products)))
        turns = milliseconds(lambda: round_trip(before=lambda: shared(products)))
        length = milliseconds(lambda: shared(products))
    plan.close()
    return {"exchange": alone, "shared": length, "both": both, "one after the other": turns}


def measured(sms):
    """ms of the slowest rank, by what is measured, in a process of its own.

    In a process that had made many streams before, ranks have waited for each other's branches of a graph until the
    deadline: branches share the queues of a GPU.
    """
    command = [sys.executable, "-m", "tests.gpu.overlap", "--sms", "0" if sms is None else str(sms)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def record_of(sms, rounds):
    """A figure of a few rounds: both together, beside the longer of the two, and the exchange alone."""
    from tokenyard_lab.bench.records import Record, Spread

    columns = {name: [times[name] for times in rounds] for name in rounds[0]}
    longer = [max(pair) for pair in zip(columns["exchange"], columns["shared"], strict=True)]
    spreads = {name: Spread.of(values) for name, values in columns.items()}
    return Record(
        parameters={"sms": "no bound" if sms is None else sms},
        ours=spreads["both"],
        floor=Spread.of(longer),
        target=None if sms is None else 1.1 * spreads["exchange"].median,
        peers={"one after the other": spreads["one after the other"]},
        ratios={"ours / exchange": Spread.ratio(columns["both"], columns["exchange"])},
        details={f"{name}_ms": spreads[name].median for name in ("exchange", "shared")},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a file for the JSON")
    parser.add_argument(
        "--sms", type=int, help="measure once, with so many multiprocessors; 0: without a bound"
    )
    options = parser.parse_args()
    if options.sms is not None:
        arguments = (shared_beside_the_exchange, options.sms or None)
        print(json.dumps(on_ranks(RANKS, *arguments, device="cuda", deadline=30.0)[0]))
        return
    from tokenyard.cli.machine import provenance
    from tokenyard_lab.bench.records import Document

    document = Document(
        benchmark="overlap",
        unit="ms",
        x="sms",
        columns=("exchange_ms", "shared_ms"),
        setup={"gpu": torch.cuda.get_device_name(), "ranks": RANKS, "tokens": TOKENS, "hidden_size": HIDDEN,
               "top_k": TOP_K, "wire": "bf16", "rounds": ROUNDS},
        notes=["virtual ranks share one GPU: memory and clock, not a link",
               "ours: a round trip without experts, and shared experts of its length beside it",
               "floor: the longer of both",
               "target: 1.1 times the exchange alone"],
        provenance=provenance(),
        results=[record_of(sms, [measured(sms) for _ in range(ROUNDS)]) for sms in (1, 2, None)],
    )  # fmt: skip
    if options.write:
        options.write.write_text(json.dumps(document.as_dict(), indent=2, ensure_ascii=False) + "\n")
    for column, cells in document.table().items():
        print(column, *cells, sep=" | ")


if __name__ == "__main__":
    main()
