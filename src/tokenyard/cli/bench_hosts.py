"""`tokenyard bench hosts`: a layer over thin links, between hosts that are made on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenyard.cli.bench_output import Output, run_benchmark
from tokenyard.cli.options import JsonFlag, OutFile, PlotFile
from tokenyard.cli.output import reported
from tokenyard.cli.parts import refuse_override


@reported
def hosts(
    hosts: Annotated[int, typer.Option(min=2, max=8, help="How many hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Ranks on each of them.")] = 4,
    tokens: Annotated[
        list[int],
        typer.Option("--tokens", min=1, help="Tokens of each rank; may be given several times."),
    ] = [256],  # noqa: B006
    hidden_size: Annotated[int, typer.Option(min=1)] = 2048,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    num_experts: Annotated[int, typer.Option(min=1)] = 64,
    wire: Annotated[str, typer.Option(help="The format on the way out.")] = "bf16",
    exchange: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this exchange; may be given several times.", show_default="two_sided, hierarchical"
        ),
    ] = None,
    rate: Annotated[float, typer.Option(min=1.0, help="Mbit/s of each link, each way.")] = 200.0,
    delay: Annotated[float, typer.Option(min=0.0, help="ms from one host to another.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=2, help="Calls of each.")] = 5,
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a layer is over links of a rate and a delay, beside what must cross.

    Hosts are network namespaces of this machine: Linux, with user namespaces or as root.
    """
    from tokenyard.exchange import resolve
    from tokenyard.lab.bench import hosts as bench
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import check_top_k
    from tokenyard.lab.hosts.network import check_hosts
    from tokenyard.planning.drafting import draft

    refuse_override()
    check_top_k(top_k, num_experts)
    check_hosts()
    output = Output(out, as_json, plot)
    output.check()
    exchanges = tuple(dict.fromkeys(resolve(name).name for name in exchange or bench.EXCHANGES))
    setup = {
        "hidden_size": hidden_size,
        "top_k": top_k,
        "num_experts": num_experts,
        "wire": wire,
        "rate": rate,
        "delay": delay,
        "rounds": rounds,
    }
    jobs = [
        bench.Job(ranks_by_host=(ranks,) * hosts, num_tokens=count, exchanges=exchanges, **setup)  # type: ignore[arg-type]
        for count in tokens
    ]
    for name in exchanges:
        draft(
            [jobs[0].spec()], hosts * ranks, exchange=name
        )  # what does not fit is found out before hosts are made
    document = Document(
        benchmark="hosts",
        unit="ms",
        x="tokens",
        line="exchange",
        columns=("crossed_MB", "least_MB"),
        setup={"hosts": hosts, "ranks_per_host": ranks, **setup},
        notes=bench.NOTES,
    )
    figures = (bench.measure_hosts(job) for job in jobs)
    run_benchmark(document, [f"{count} tokens" for count in tokens], figures, output)
