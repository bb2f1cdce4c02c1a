"""`tokenyard bench`: measurements, each beside its floor, kept with their provenance.

A function here declares the options of a benchmark, and what must be so before anything is loaded. `_benchmark` makes
a command of it. What is measured stands in `tokenyard.lab.bench.runs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tokenyard.cli.bench_options import choose, default_of
from tokenyard.cli.bench_output import run_benchmark, show
from tokenyard.cli.options import Exchanges, JsonFlag, OutFile, PlotFile, option
from tokenyard.cli.output import Output, reported
from tokenyard.cli.parts import refuse_override
from tokenyard.errors import InputError

app = typer.Typer(help="Measure, beside the floor.", no_args_is_help=True)
_SEVERAL = "may be given several times."


def _benchmark(declared: Callable[..., str | None]) -> None:
    """Make a command of a function that declares a benchmark: `balance` has the options of `runs.balance_run`.

    A function whose options have other defaults elsewhere (see `bench_options`) returns where it is measured: `experts`
    has the options of `runs.experts_cpu_run` or of `runs.experts_cuda_run`.
    """

    @functools.wraps(declared)
    def command(as_json: bool, out: Any, **given: Any) -> None:
        name, where = declared.__name__, declared(as_json=as_json, out=out, **given)
        if where is not None:
            name, given = f"{name}_{where}", vars(choose(name, where, given))
        output = Output(as_json, out, given.pop("plot", None))
        given.pop("device", None)  # the name of the run says it
        from tokenyard.lab.bench import runs

        run_benchmark(getattr(runs, f"{name}_run")(**given), output)

    app.command()(reported(command))


def _int(command: str, name: str, help: str | None = None, *, min: int = 1, max: int | None = None) -> Any:
    """A whole number whose default depends on where something is measured."""
    return option(help, shown=default_of(command, name), min=min, max=max)


@_benchmark
def encode(
    tokens: Annotated[list[int], option(f"Tokens; {_SEVERAL}", "--tokens", min=1)] = [512],  # noqa: B006
    hidden_size: Annotated[int, option("The width of a row.", min=1)] = 7168,
    seconds: Annotated[float, option("About as long, for each format.", min=0.0, max=600.0)] = 1.0,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast one thread encodes rows, per format."""


@_benchmark
def experts(
    tokens: Annotated[list[int] | None, _int("experts", "tokens", f"Tokens; {_SEVERAL}")] = None,
    hidden_size: Annotated[int | None, _int("experts", "hidden_size")] = None,
    intermediate_size: Annotated[int | None, _int("experts", "intermediate_size")] = None,
    num_experts: Annotated[int | None, _int("experts", "num_experts")] = None,
    top_k: Annotated[int | None, _int("experts", "top_k")] = None,
    rounds: Annotated[int | None, _int("experts", "rounds", "Rounds of each.")] = None,
    weights: Annotated[
        list[str] | None,
        option(
            f"The format of the weights, bf16 or quantized; {_SEVERAL}",
            shown=default_of("experts", "weights"),
        ),
    ] = None,
    cells: Annotated[
        str | None, option("With --device cuda: A, B and C (several with commas).", shown="all")
    ] = None,
    device: Annotated[
        str, option("cpu: grouped experts. cuda: fused experts, on the shapes of --cells.")
    ] = "cpu",
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> str:
    """How fast experts compute, beside a peer and the floor.

    On a CPU the peer of bf16 weights is Transformers; that of quantized ones decodes them first and calls F.grouped_mm.
    On a GPU it is F.grouped_mm or its fp8 sister, and the best that was measured before.
    """
    return device


@_benchmark
def dispatch(
    ranks: Annotated[
        list[int] | None,
        _int("dispatch", "ranks", "How many ranks: processes, or virtual ones on a GPU.", max=64),
    ] = None,
    tokens: Annotated[
        list[int] | None, _int("dispatch", "tokens", f"Tokens of each rank; {_SEVERAL}")
    ] = None,
    hidden_size: Annotated[int | None, _int("dispatch", "hidden_size")] = None,
    top_k: Annotated[int, option(min=1)] = 8,
    num_experts: Annotated[int | None, _int("dispatch", "num_experts")] = None,
    wire: Annotated[
        list[str] | None,
        option(f"The format on the way out; {_SEVERAL}", shown=default_of("dispatch", "wire")),
    ] = None,
    combine_wire: Annotated[str, option("The format on the way back.")] = "bf16",
    exchange: Exchanges = None,
    rounds: Annotated[
        int | None, _int("dispatch", "rounds", "Round trips of each; on a GPU rounds of replays.", min=2)
    ] = None,
    device: Annotated[
        str, option("cpu: processes. cuda: virtual ranks on one GPU, through one_sided's kernels.")
    ] = "cpu",
    quick: Annotated[bool, option("With --device cuda: fewer cells and rounds.", "--quick")] = False,
    paranoid: Annotated[
        bool, option("Every exchange a second time, watching itself; on the CPU.", "--paranoid")
    ] = False,
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> str:
    """How fast rows travel out and back, beside the floor and a peer: bare gloo, or FlashInfer on a GPU."""
    if device == "cpu":
        from tokenyard.group.forkserver import start_forkserver

        start_forkserver()  # it loads torch while this process does
    return device


@_benchmark
def layer(
    tokens: Annotated[list[int] | None, _int("layer", "tokens", f"Tokens of each rank; {_SEVERAL}")] = None,
    ranks: Annotated[int | None, _int("layer", "ranks", "How many virtual ranks.", max=64)] = None,
    weights: Annotated[
        list[str] | None,
        option(
            f"The format of the weights; {_SEVERAL} Rows travel as fp8_block128 or mxfp8 to experts with such "
            "weights, else as bf16.",
            shown=default_of("layer", "weights"),
        ),
    ] = None,
    hidden_size: Annotated[int | None, _int("layer", "hidden_size")] = None,
    intermediate_size: Annotated[int | None, _int("layer", "intermediate_size")] = None,
    num_experts: Annotated[int | None, _int("layer", "num_experts")] = None,
    top_k: Annotated[int | None, _int("layer", "top_k")] = None,
    cells: Annotated[
        str | None,
        option("Instead of a shape: FLASH, PRO and V3 on 8 virtual ranks (several with commas, or `all`)."),
    ] = None,
    rounds: Annotated[int, option("Both contestants take turns so often.", min=2)] = 15,
    device: Annotated[str, option("cuda: virtual ranks that share one GPU.")] = "cuda",
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> str:
    """How fast a whole layer is on a GPU, beside the same experts behind an allgather of plain copies."""
    if device != "cuda":
        raise InputError(
            f"--device {device}",
            expected="cuda: the experts that are measured are kernels for GPUs",
            fix="`tokenyard bench dispatch` and `bench experts` measure the halves on a CPU",
        )
    return "shape" if cells is None else "cells"


@_benchmark
def transformers(
    ranks: Annotated[int, option("Processes.", min=2, max=64)] = 4,
    hidden_size: Annotated[int, option(min=1)] = 512,
    intermediate_size: Annotated[int, option("The width of an expert.", min=1)] = 256,
    num_experts: Annotated[int, option(min=1)] = 32,
    top_k: Annotated[int, option(min=1)] = 4,
    num_layers: Annotated[int, option(min=1)] = 6,
    sequences: Annotated[int, option("Of each rank.", min=1)] = 4,
    length: Annotated[int, option("Tokens of a prompt.", min=1)] = 32,
    steps: Annotated[int, option("Tokens that follow it, one pass each.", min=1)] = 8,
    rounds: Annotated[int, option(min=2)] = 7,
    exchange: Annotated[str, option("Ours.")] = "one_sided",
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a sharded model answers, beside Transformers' own expert parallelism (5.19 or newer).

    Same model, same batch, same processes. Transformers' fastest layout is the peer.
    """
    refuse_override()


@_benchmark
def overhead(
    rounds: Annotated[int, option("Rounds of each.", min=2)] = 15,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """What one rank pays: a layer with one token beside its experts, the shipped model beside plain Transformers."""
    refuse_override()


@_benchmark
def combine_error(
    ranks: Annotated[
        list[int] | None, option(f"Threads; {_SEVERAL}", shown="1, 2, 4, 8, 16", min=1, max=64)
    ] = None,
    combine_wire: Annotated[
        list[str] | None, option(f"Only this format on the way back; {_SEVERAL}", shown="all")
    ] = None,
    hidden_size: Annotated[int, option(min=1)] = 1024,
    intermediate_size: Annotated[int, option(min=1)] = 64,
    num_experts: Annotated[int, option(min=1)] = 32,
    top_k: Annotated[int, option(min=1)] = 8,
    tokens: Annotated[int, option("Of all ranks together.", min=1)] = 64,
    layers: Annotated[int, option("Random layers of each kind.", min=1)] = 5,
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How far a layer's output is from float64, for every format on the way back, on 1 to 16 ranks.

    Random layers, with Gaussian results, with outliers among the columns, and with small results. `e4m3_unscaled` is a
    cast without scales, the bad example of this study, which no plan takes.
    """
    refuse_override()


@_benchmark
def hosts(
    hosts: Annotated[int, option("How many hosts.", min=2, max=8)] = 2,
    ranks: Annotated[int, option("Ranks on each of them.", min=1, max=16)] = 4,
    tokens: Annotated[list[int], option(f"Tokens of each rank; {_SEVERAL}", "--tokens", min=1)] = [256],  # noqa: B006
    hidden_size: Annotated[int, option(min=1)] = 2048,
    top_k: Annotated[int, option(min=1)] = 8,
    num_experts: Annotated[int, option(min=1)] = 64,
    wire: Annotated[str, option("The format on the way out.")] = "bf16",
    exchange: Annotated[
        list[str] | None, option(f"Only this exchange; {_SEVERAL}", shown="two_sided, hierarchical")
    ] = None,
    rate: Annotated[float, option("Mbit/s of each link, each way.", min=1.0)] = 200.0,
    delay: Annotated[float, option("ms from one host to another.", min=0.0)] = 0.0,
    compute: Annotated[float, option("ms that experts compute: what overlaps is measured.", min=0.0)] = 0.0,
    rounds: Annotated[int, option("Calls of each.", min=2)] = 5,
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a layer is over links of a rate and a delay, beside what must cross.

    Hosts are network namespaces of this machine: Linux, with user namespaces or as root.
    """
    refuse_override()


@_benchmark
def balance(
    ranks: Annotated[int, option("Processes.", min=2, max=64)] = 8,
    num_tokens: Annotated[int, option("Tokens of each rank.", "--tokens", min=1)] = 128,
    hidden_size: Annotated[int, option(min=1)] = 256,
    intermediate_size: Annotated[int, option(min=1)] = 128,
    num_experts: Annotated[int, option(min=1)] = 64,
    top_k: Annotated[int, option(min=1)] = 4,
    zipf: Annotated[float, option("The exponent of Zipf's law.", min=0.0, max=10.0)] = 1.2,
    spare_experts: Annotated[int, option("Memory for so many more on each rank.", min=1)] = 2,
    rounds: Annotated[int, option("Calls and moves of each.", min=2)] = 9,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """What uneven load costs before and after a rebalance, beside uniform load; what a move costs, beside a copy."""
    refuse_override()


app.command()(show)
