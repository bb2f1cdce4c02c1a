"""`tokenyard bench`: measurements, each with its floor, saved with date, hardware, versions and commit.

A function here declares the options of a benchmark, and checks what can be checked before torch is loaded.
`_benchmark` makes a command of it. The measurements are in `tokenyard_lab.bench.runs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tokenyard.cli.options import JSON_FLAG, option
from tokenyard.cli.output import Command, CommandGroup, Output, reported
from tokenyard.cli.parts import refuse_override
from tokenyard.errors import InputError
from tokenyard_lab.cli.bench_options import choose, dependent
from tokenyard_lab.cli.bench_output import run_benchmark, show
from tokenyard_lab.cli.options import ONLY_EXCHANGES, OUT_FILE, PLOT_FILE

app = typer.Typer(
    cls=CommandGroup,
    help="Measure speed and accuracy, each figure beside its floor: the best that the hardware allows.",
    no_args_is_help=True,
)
_SEVERAL = "may be given several times."


def _benchmark(declared: Callable[..., str | None]) -> None:
    """Make a command of a function that declares a benchmark: `balance` has the options of `runs.balance_run`.

    A function whose options depend on the place of the measurement (see `bench_options`) returns that place: `experts`
    has the options of `runs.experts_cpu_run` or of `runs.experts_cuda_run`.
    """

    @functools.wraps(declared)
    def command(as_json: bool, out: Any, **given: Any) -> None:
        name, where = declared.__name__, declared(as_json=as_json, out=out, **given)
        if where is not None:
            name, given = f"{name}_{where}", vars(choose(name, where, given))
        output, plot = Output(as_json, out), given.pop("plot", None)
        if plot is not None:
            from tokenyard_lab.plots import check_picture

            check_picture(plot)
        given.pop("device", None)  # it is part of the name of the run
        from tokenyard_lab.bench import runs

        run_benchmark(getattr(runs, f"{name}_run")(**given), output, plot)

    app.command(cls=Command)(reported(command))


@_benchmark
def encode(
    tokens: list[int] = option([512], f"Tokens; {_SEVERAL}", "--tokens", min=1),
    hidden_size: int = option(7168, "The width of a row.", min=1),
    seconds: float = option(1.0, "Seconds to measure each format, roughly.", min=0.0, max=600.0),
    out: Path | None = OUT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """How fast one thread encodes rows, per format."""


@_benchmark
def experts(
    tokens: list[int] | None = dependent("experts", "tokens", f"Tokens; {_SEVERAL}"),
    hidden_size: int | None = dependent("experts", "hidden_size"),
    intermediate_size: int | None = dependent("experts", "intermediate_size"),
    num_experts: int | None = dependent("experts", "num_experts"),
    top_k: int | None = dependent("experts", "top_k"),
    rounds: int | None = dependent("experts", "rounds", "Rounds of each measurement."),
    weights: list[str] | None = dependent(
        "experts", "weights", f"The format of the weights, bf16 or quantized; {_SEVERAL}", min=None
    ),
    cells: str | None = option(
        None, "With --device cuda: A, B, C, D, FLASH, PRO and V3 (several with commas).", shown="all"
    ),
    device: str = option("cpu", "cpu: grouped experts. cuda: fused experts, on the shapes of --cells."),
    out: Path | None = OUT_FILE,
    plot: Path | None = PLOT_FILE,
    as_json: bool = JSON_FLAG,
) -> str:
    """How fast experts compute, beside a peer and the floor.

    On a CPU the peer of bf16 weights is Transformers; that of quantized ones decodes them first and calls F.grouped_mm.
    On a GPU it is F.grouped_mm or its fp8 sister, and the best that was measured before.
    """
    return device


@_benchmark
def dispatch(
    ranks: list[int] | None = dependent(
        "dispatch", "ranks", "How many ranks: processes, or virtual ones on a GPU.", max=64
    ),
    tokens: list[int] | None = dependent("dispatch", "tokens", f"Tokens of each rank; {_SEVERAL}"),
    hidden_size: int | None = dependent("dispatch", "hidden_size"),
    top_k: int = option(8, min=1),
    num_experts: int | None = dependent("dispatch", "num_experts"),
    wire: list[str] | None = dependent(
        "dispatch", "wire", f"The format on the way out; {_SEVERAL}", min=None
    ),
    combine_wire: str = option("bf16", "The format on the way back."),
    exchange: list[str] | None = ONLY_EXCHANGES,
    rounds: int | None = dependent(
        "dispatch", "rounds", "Round trips of each; on a GPU rounds of replays.", min=2
    ),
    device: str = option(
        "cpu", "cpu: processes. cuda: virtual ranks on one GPU, through one_sided's kernels."
    ),
    quick: bool = option(False, "With --device cuda: fewer cells and rounds.", "--quick"),
    paranoid: bool = option(
        False, "Every exchange a second time, watching itself; on the CPU.", "--paranoid"
    ),
    out: Path | None = OUT_FILE,
    plot: Path | None = PLOT_FILE,
    as_json: bool = JSON_FLAG,
) -> str:
    """How fast rows travel out and back, beside the floor and a peer: bare gloo, or FlashInfer on a GPU."""
    if device == "cpu":
        from tokenyard.group.forkserver import start_forkserver

        start_forkserver()  # it loads torch while this process does
    return device


@_benchmark
def layer(
    tokens: list[int] | None = dependent("layer", "tokens", f"Tokens of each rank; {_SEVERAL}"),
    ranks: int | None = dependent("layer", "ranks", "How many virtual ranks.", max=64),
    weights: list[str] | None = dependent(
        "layer",
        "weights",
        f"The format of the weights; {_SEVERAL} Rows travel as fp8_block128 or mxfp8 to experts with such "
        "weights, else as bf16.",
        min=None,
    ),
    hidden_size: int | None = dependent("layer", "hidden_size"),
    intermediate_size: int | None = dependent("layer", "intermediate_size"),
    num_experts: int | None = dependent("layer", "num_experts"),
    top_k: int | None = dependent("layer", "top_k"),
    cells: str | None = option(
        None, "Instead of a shape: FLASH, PRO and V3 on 8 virtual ranks (several with commas, or `all`)."
    ),
    rounds: int = option(15, "Rounds, in which the layer and its peer take turns.", min=2),
    device: str = option("cuda", "cuda: virtual ranks that share one GPU."),
    out: Path | None = OUT_FILE,
    plot: Path | None = PLOT_FILE,
    as_json: bool = JSON_FLAG,
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
    ranks: int = option(4, "Processes.", min=2, max=64),
    hidden_size: int = option(512, min=1),
    intermediate_size: int = option(256, "The width of an expert.", min=1),
    num_experts: int = option(32, min=1),
    top_k: int = option(4, min=1),
    num_layers: int = option(6, min=1),
    sequences: int = option(4, "Sequences of each rank.", min=1),
    length: int = option(32, "Tokens of a prompt.", min=1),
    steps: int = option(8, "Tokens that follow it, one pass each.", min=1),
    rounds: int = option(7, min=2),
    exchange: str = option("one_sided", "The exchange of our model."),
    out: Path | None = OUT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """How fast a sharded model answers, beside Transformers' own expert parallelism (5.19 or newer).

    Same model, same batch, same processes. Transformers' fastest layout is the peer.
    """
    refuse_override()


@_benchmark
def overhead(
    rounds: int = option(15, "Rounds of each measurement.", min=2),
    out: Path | None = OUT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """The overhead on one rank: of a layer with one token over its experts, of a model over plain Transformers."""
    refuse_override()


@_benchmark
def combine_error(
    ranks: list[int] | None = option(None, f"Threads; {_SEVERAL}", shown="1, 2, 4, 8, 16", min=1, max=64),
    combine_wire: list[str] | None = option(
        None, f"Only this format on the way back; {_SEVERAL}", shown="all"
    ),
    hidden_size: int = option(1024, min=1),
    intermediate_size: int = option(64, min=1),
    num_experts: int = option(32, min=1),
    top_k: int = option(8, min=1),
    tokens: int = option(64, "Tokens of all ranks together.", min=1),
    layers: int = option(5, "Random layers of each kind.", min=1),
    out: Path | None = OUT_FILE,
    plot: Path | None = PLOT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """How far a layer's output is from float64, for every format on the way back, on 1 to 16 ranks.

    Random layers, with Gaussian results, with outliers among the columns, and with small results. `e4m3_unscaled` is a
    cast without scales, the bad example of this study, which no plan takes.
    """
    refuse_override()


@_benchmark
def hosts(
    hosts: int = option(2, "How many hosts.", min=2, max=8),
    ranks: int = option(4, "Ranks on each of them.", min=1, max=16),
    tokens: list[int] = option([256], f"Tokens of each rank; {_SEVERAL}", "--tokens", min=1),
    hidden_size: int = option(2048, min=1),
    top_k: int = option(8, min=1),
    num_experts: int = option(64, min=1),
    wire: str = option("bf16", "The format on the way out."),
    exchange: list[str] | None = option(
        None, f"Only this exchange; {_SEVERAL}", shown="two_sided, hierarchical"
    ),
    rate: float = option(200.0, "Mbit/s of each link, each way.", min=1.0),
    delay: float = option(0.0, "ms from one host to another.", min=0.0),
    compute: float = option(
        0.0, "ms that the experts compute in, to measure what overlaps with it.", min=0.0
    ),
    rounds: int = option(5, "Calls through each exchange.", min=2),
    out: Path | None = OUT_FILE,
    plot: Path | None = PLOT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """How fast a layer is over links of a rate and a delay, beside what must cross.

    Hosts are network namespaces of this machine: Linux, with user namespaces or as root.
    """
    refuse_override()


@_benchmark
def balance(
    ranks: int = option(8, "Processes.", min=2, max=64),
    num_tokens: int = option(128, "Tokens of each rank.", "--tokens", min=1),
    hidden_size: int = option(256, min=1),
    intermediate_size: int = option(128, min=1),
    num_experts: int = option(64, min=1),
    top_k: int = option(4, min=1),
    zipf: float = option(1.2, "The exponent of Zipf's law.", min=0.0, max=10.0),
    spare_experts: int = option(2, "How many more experts each rank has memory for.", min=1),
    rounds: int = option(9, "Calls and moves of each kind.", min=2),
    out: Path | None = OUT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """What uneven load costs before and after a rebalance, beside uniform load; what a move costs, beside a copy."""
    refuse_override()


app.command(cls=Command)(show)
