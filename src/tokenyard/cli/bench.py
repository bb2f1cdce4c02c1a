"""`tokenyard bench`: measurements, each beside its floor, kept with their provenance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenyard.cli.bench_combine_error import combine_error
from tokenyard.cli.bench_hosts import hosts
from tokenyard.cli.bench_options import choose, default_of
from tokenyard.cli.bench_output import Output, run_benchmark, show
from tokenyard.cli.options import Exchanges, JsonFlag, OutFile, PlotFile
from tokenyard.cli.output import reported
from tokenyard.cli.parts import refuse_override
from tokenyard.errors import InputError

if TYPE_CHECKING:
    import torch

    from tokenyard.lab.bench.clock import Clock
    from tokenyard.lab.bench.records import Record

app = typer.Typer(help="Measure, beside the floor.", no_args_is_help=True)
_SEVERAL = "may be given several times."


def _int(command: str, name: str, help: str | None = None, *, min: int = 1, max: int | None = None) -> Any:
    """A whole number whose default depends on where something is measured."""
    return typer.Option(min=min, max=max, help=help, show_default=default_of(command, name))


@app.command()
@reported
def encode(
    tokens: Annotated[list[int], typer.Option("--tokens", min=1, help=f"Tokens; {_SEVERAL}")] = [512],  # noqa: B006
    hidden_size: Annotated[int, typer.Option(min=1, help="The width of a row.")] = 7168,
    seconds: Annotated[float, typer.Option(min=0.0, max=600.0, help="About as long, for each format.")] = 1.0,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast one thread encodes rows, per format."""
    from tokenyard.lab.bench import encode as bench
    from tokenyard.lab.bench.records import Document

    setup = {"hidden_size": hidden_size, "threads": 1}
    document = Document(
        benchmark="encode", unit="MB/s", x="tokens", line="format", setup=setup, notes=[bench.NOTE]
    )
    figures = (bench.measure_encode(count, hidden_size, seconds) for count in tokens)
    run_benchmark(document, [f"{count} tokens" for count in tokens], figures, Output(out, as_json))


@app.command()
@reported
def experts(
    tokens: Annotated[list[int] | None, _int("experts", "tokens", f"Tokens; {_SEVERAL}")] = None,
    hidden_size: Annotated[int | None, _int("experts", "hidden_size")] = None,
    intermediate_size: Annotated[int | None, _int("experts", "intermediate_size")] = None,
    num_experts: Annotated[int | None, _int("experts", "num_experts")] = None,
    top_k: Annotated[int | None, _int("experts", "top_k")] = None,
    rounds: Annotated[int | None, _int("experts", "rounds", "Rounds of each.")] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help=f"The format of the weights, bf16 or quantized; {_SEVERAL}",
            show_default=default_of("experts", "weights"),
        ),
    ] = None,
    cells: Annotated[
        str | None,
        typer.Option(help="With --device cuda: A, B and C (several with commas).", show_default="all"),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu: grouped experts. cuda: fused experts, on the shapes of --cells.")
    ] = "cpu",
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast experts compute, beside a peer and the floor.

    On a CPU the peer of bf16 weights is Transformers; that of quantized ones decodes them first and calls F.grouped_mm.
    On a GPU it is F.grouped_mm or its fp8 sister, and the best that was measured before.
    """
    chosen = choose("experts", device, locals())
    output = Output(out, as_json, plot)
    output.check()
    if device == "cuda":
        _experts_on_gpu(chosen, output)
    else:
        _experts_on_cpu(chosen, output)


def _experts_on_gpu(chosen: Any, output: Output) -> None:
    from tokenyard.lab.bench.clock import check_gpu
    from tokenyard.lab.bench.experts import COLUMNS, FUSED, NOTES, measure_experts
    from tokenyard.lab.bench.machine_rates import measure_rates
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import cases_of, grid

    cells = grid(cases_of(chosen.cells), chosen.weights)
    device = check_gpu("leave out --device to measure on the CPU")
    gpu, clock, rested = _clocks(device, chosen.rounds)
    rates = measure_rates(device, clock)
    shapes = {cell.case: f"{cell.case}: {cell.shape}" for cell in cells}
    document = Document(
        benchmark="experts-cuda",
        unit="µs",
        x="size",
        line="weights",
        columns=COLUMNS,
        setup={"gpu": gpu, "rounds": chosen.rounds, **rates.as_setup()},
        notes=[*shapes.values(), *NOTES, _rested_note(measure_rates(device, rested).product)],
    )
    figures = measure_experts(
        cells, kind=FUSED, device=device, machine=gpu, clock=clock, rates=rates, rested=rested
    )
    run_benchmark(document, [str(cell) for cell in cells], ([record] for record in figures), output)


def _clocks(device: torch.device, rounds: int) -> tuple[str, Clock, Clock]:
    """The name of a GPU, a clock of rounds that follow at once, and one that rests before each."""
    import torch

    from tokenyard.lab.bench.clock import REST, RESTED_ROUNDS, graph_clock

    rested = graph_clock(device, min(rounds, RESTED_ROUNDS), rest=REST)
    return torch.cuda.get_device_name(device), graph_clock(device, rounds), rested


def _rested_note(product: float) -> str:
    from tokenyard.lab.bench.clock import REST

    return f"rested: after {REST} s without work before each round; bf16 products reach {product / 1e6:.0f} TFLOP/s"


def _experts_on_cpu(chosen: Any, output: Output) -> None:
    import torch

    from tokenyard.lab.bench.clock import host_clock
    from tokenyard.lab.bench.experts import GROUPED, measure_experts
    from tokenyard.lab.bench.experts_peers import check_transformers
    from tokenyard.lab.bench.machine_rates import measure_rates
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import Case, Cell, check_top_k

    check_top_k(chosen.top_k, chosen.num_experts)
    if "bf16" in chosen.weights:
        check_transformers()
    shape = Case(
        hidden_size=chosen.hidden_size,
        intermediate_size=chosen.intermediate_size,
        local_experts=chosen.num_experts,
        num_experts=chosen.num_experts,
        top_k=chosen.top_k,
        weights=tuple(chosen.weights),
        sizes=tuple(chosen.tokens),
        arrives=tuple((name, "bf16") for name in chosen.weights),
    )
    cells = [
        Cell(case="", shape=shape, weights=weights, size=size)
        for weights in chosen.weights
        for size in chosen.tokens
    ]
    device, clock = torch.device("cpu"), host_clock(chosen.rounds)

    def figures() -> Iterator[list[Record]]:
        rates = measure_rates(device, clock)
        document.setup |= rates.as_setup()
        for record in measure_experts(
            cells, kind=GROUPED, device=device, machine="cpu", clock=clock, rates=rates
        ):
            yield [record]

    document = Document(
        benchmark="experts",
        unit="ms",
        x="tokens",
        line="weights",
        columns=("floor_by", "difference"),
        setup={
            name: getattr(shape, name)
            for name in ("hidden_size", "intermediate_size", "num_experts", "top_k")
        }
        | {"threads": torch.get_num_threads(), "rounds": chosen.rounds},
        notes=["peers: Transformers, or weights that are decoded first for F.grouped_mm"],
    )
    run_benchmark(document, [str(cell) for cell in cells], figures(), output)


@app.command()
@reported
def dispatch(
    ranks: Annotated[
        list[int] | None,
        _int("dispatch", "ranks", "How many ranks: processes, or virtual ones on a GPU.", max=64),
    ] = None,
    tokens: Annotated[
        list[int] | None, _int("dispatch", "tokens", f"Tokens of each rank; {_SEVERAL}")
    ] = None,
    hidden_size: Annotated[int | None, _int("dispatch", "hidden_size")] = None,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    num_experts: Annotated[int | None, _int("dispatch", "num_experts")] = None,
    wire: Annotated[
        list[str] | None,
        typer.Option(
            help=f"The format on the way out; {_SEVERAL}", show_default=default_of("dispatch", "wire")
        ),
    ] = None,
    combine_wire: Annotated[str, typer.Option(help="The format on the way back.")] = "bf16",
    exchange: Exchanges = None,
    rounds: Annotated[
        int | None, _int("dispatch", "rounds", "Round trips of each; on a GPU rounds of replays.", min=2)
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu: processes. cuda: virtual ranks on one GPU, through one_sided's kernels.")
    ] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="With --device cuda: fewer cells and rounds.")
    ] = False,
    paranoid: Annotated[
        bool, typer.Option("--paranoid", help="Every exchange a second time, watching itself; on the CPU.")
    ] = False,
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast rows travel out and back, beside the floor and a peer: bare gloo, or FlashInfer on a GPU."""
    chosen = choose("dispatch", device, locals())
    chosen.top_k, chosen.combine_wire = top_k, combine_wire
    output = Output(out, as_json, plot)
    output.check()
    if device == "cuda":
        _dispatch_on_gpu(chosen, output)
    else:
        _dispatch_between_processes(chosen, output)


def _dispatch_on_gpu(chosen: Any, output: Output) -> None:
    from tokenyard.lab.bench import dispatch_cuda as bench
    from tokenyard.lab.bench.clock import check_gpu
    from tokenyard.lab.bench.dispatch_cells import dispatch_grid
    from tokenyard.lab.bench.machine_rates import copy_rate
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import Shape

    rounds = chosen.rounds or (bench.QUICK_ROUNDS if chosen.quick else bench.ROUNDS)
    cells = dispatch_grid(chosen.ranks, chosen.tokens, chosen.wire, quick=chosen.quick)
    names = ("hidden_size", "top_k", "num_experts", "combine_wire")
    setup = {name: getattr(chosen, name) for name in names}
    shape = Shape(**setup)
    bench.check_cells(cells, shape, rounds)
    device = check_gpu("leave out --device to measure on the CPU")
    gpu, clock, _ = _clocks(device, rounds)
    copied = copy_rate(device, clock)
    document = Document(
        benchmark="dispatch-cuda",
        unit="µs",
        x="tokens",
        line="wire",
        columns=("peer_source",),
        setup={"gpu": gpu, **setup, "rounds": rounds, "copy_TB_per_s": copied / 1e6},
        notes=[bench.NOTE],
    )

    def measure_peers() -> None:
        said = bench.measure_peers(document.results, shape, device=device, clock=clock)
        document.notes += [said] if said else []

    figures = bench.measure_cells(cells, shape, device=device, gpu=gpu, clock=clock, copy_bytes_per_us=copied)
    steps = [str(cell) for cell in cells]
    run_benchmark(document, steps, ([record] for record in figures), output, finish=measure_peers)


def _dispatch_between_processes(chosen: Any, output: Output) -> None:
    from tokenyard.group.forkserver import start_forkserver
    from tokenyard.lab.bench import dispatch as bench
    from tokenyard.lab.bench.records import Document

    start_forkserver()  # it loads torch while this process prepares
    (ranks,) = chosen.ranks
    shape = {name: getattr(chosen, name) for name in ("hidden_size", "top_k", "num_experts", "combine_wire")}
    shape["rounds"] = chosen.rounds

    def measure(count: int) -> list[Record]:
        found: list[Record] = []
        for wire in chosen.wire:
            job = bench.Job(
                **shape, num_tokens=count, wire=wire, exchanges=chosen.exchange, paranoid=chosen.paranoid
            )
            found += bench.measure_dispatch(job, ranks)
        return found

    document = Document(
        benchmark="dispatch",
        unit="ms",
        x="tokens",
        line="exchange",
        columns=("out_ms", "back_ms", "encode_ms", "bytes_per_token"),
        setup={"ranks": ranks, "kind": "processes", **shape},
        notes=[bench.NOTE],
    )
    steps = [f"{count} tokens" for count in chosen.tokens]
    run_benchmark(document, steps, (measure(count) for count in chosen.tokens), output)


@app.command()
@reported
def layer(
    tokens: Annotated[list[int] | None, _int("layer", "tokens", f"Tokens of each rank; {_SEVERAL}")] = None,
    ranks: Annotated[int | None, _int("layer", "ranks", "How many virtual ranks.", max=64)] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help=f"The format of the weights; {_SEVERAL} Rows travel as fp8_block128 or mxfp8 to experts with such "
            "weights, else as bf16.",
            show_default=default_of("layer", "weights"),
        ),
    ] = None,
    hidden_size: Annotated[int | None, _int("layer", "hidden_size")] = None,
    intermediate_size: Annotated[int | None, _int("layer", "intermediate_size")] = None,
    num_experts: Annotated[int | None, _int("layer", "num_experts")] = None,
    top_k: Annotated[int | None, _int("layer", "top_k")] = None,
    cells: Annotated[
        str | None,
        typer.Option(
            help="Instead of a shape: FLASH, PRO and V3 on 8 virtual ranks (several with commas, or `all`)."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Both contestants take turns so often.")] = 15,
    device: Annotated[str, typer.Option(help="cuda: virtual ranks that share one GPU.")] = "cuda",
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a whole layer is on a GPU, beside the same experts behind an allgather of plain copies."""
    given = locals()
    from tokenyard.lab.bench import layer_cuda as bench
    from tokenyard.lab.bench.clock import check_gpu
    from tokenyard.lab.bench.machine_rates import measure_rates
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import MODELS, Case, cases_of, grid

    if device != "cuda":
        raise InputError(
            f"--device {device}",
            expected="cuda: the experts that are measured are kernels for GPUs",
            fix="`tokenyard bench dispatch` and `bench experts` measure the halves on a CPU",
        )
    chosen = choose("layer", "shape" if cells is None else "cells", given)
    output = Output(out, as_json, plot)
    if cells is None:
        bench.check_layer(chosen.ranks, chosen.num_experts, chosen.top_k, chosen.weights)
        names = ("hidden_size", "intermediate_size", "num_experts", "top_k")
        setup = {name: getattr(chosen, name) for name in names}
        measured = bench.layer_cells(
            Case(
                **setup,
                local_experts=chosen.num_experts // chosen.ranks,
                weights=tuple(chosen.weights),
                sizes=tuple(chosen.tokens),
                tokens_a_rank=True,
            )
        )
        setup, notes = {"ranks": chosen.ranks, **setup}, [*bench.NOTES]
    else:
        found = grid(cases_of(cells), chosen.weights, known=tuple(MODELS))
        measured = [cell for cell in found if not chosen.tokens or cell.size in chosen.tokens]
        shapes = {cell.case: f"{cell.case}: {cell.shape}" for cell in measured}
        setup, notes = (
            {"ranks": measured[0].shape.ranks},
            [*shapes.values(), *bench.NOTES, bench.DEEPGEMM_NOTE],
        )
    output.check()
    gpu_device = check_gpu("measure the halves on the CPU: `bench dispatch` and `bench experts`")
    gpu, clock, rested = _clocks(gpu_device, rounds)
    rates = measure_rates(gpu_device, clock)
    document = Document(
        benchmark="layer-cuda",
        unit="µs",
        x="tokens",
        line="weights",
        columns=("wire", "relative_error"),
        setup={"gpu": gpu, **setup, "rounds": rounds, **rates.as_setup()},
        notes=[*notes, _rested_note(measure_rates(gpu_device, rested).product)],
    )
    figures = bench.measure_layer(measured, device=gpu_device, clock=clock, rates=rates, rested=rested)
    run_benchmark(document, [str(cell) for cell in measured], figures, output)


@app.command()
@reported
def transformers(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Processes.")] = 4,
    hidden_size: Annotated[int, typer.Option(min=1)] = 512,
    intermediate_size: Annotated[int, typer.Option(min=1, help="The width of an expert.")] = 256,
    num_experts: Annotated[int, typer.Option(min=1)] = 32,
    top_k: Annotated[int, typer.Option(min=1)] = 4,
    num_layers: Annotated[int, typer.Option(min=1)] = 6,
    sequences: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that follow it, one pass each.")] = 8,
    rounds: Annotated[int, typer.Option(min=2)] = 7,
    exchange: Annotated[str, typer.Option(help="Ours.")] = "one_sided",
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a sharded model answers, beside Transformers' own expert parallelism (5.19 or newer).

    Same model, same batch, same processes. Transformers' fastest layout is the peer.
    """
    setup = {name: value for name, value in locals().items() if name not in ("out", "as_json")}
    from tokenyard.lab.bench import transformers_ep as bench
    from tokenyard.lab.bench.records import Document

    refuse_override()
    document = Document(
        benchmark="transformers",
        unit="ms",
        x="phase",
        columns=("peer", "with our experts_ms", "no exchange_ms", "difference"),
        setup=setup,
        notes=[bench.NOTE],
    )
    step = f"{ranks} processes load the model, try Transformers' layouts, then {rounds} rounds"
    figures = (bench.measure_transformers_ep(bench.Workload(**setup)) for _ in range(1))
    run_benchmark(document, [step], figures, Output(out, as_json))


@app.command()
@reported
def overhead(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each.")] = 15,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """What one rank pays: a layer with one token beside its experts, the shipped model beside plain Transformers."""
    from tokenyard.lab.bench import overhead as bench
    from tokenyard.lab.bench.experts_peers import check_transformers
    from tokenyard.lab.bench.records import Document

    refuse_override()
    check_transformers()
    document = Document(
        benchmark="overhead", unit="ms", x="call", setup={"rounds": rounds}, notes=[bench.NOTE]
    )
    steps = ["a layer beside its experts", "the model that ships beside plain Transformers"]
    run_benchmark(document, steps, bench.measure_overhead(rounds), Output(out, as_json))


@app.command()
@reported
def tiles(
    weights: Annotated[
        list[str] | None, typer.Option(help=f"The format of the weights; {_SEVERAL}", show_default="all")
    ] = None,
    cells: Annotated[
        str | None, typer.Option(help="A, B and C (several with commas).", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 5,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Which tile configurations of fused experts are fastest on this GPU, beside those that the table chooses.

    Every one is compiled once: for all cells that takes many minutes.
    """
    from tokenyard.lab.bench import tile_sweep as bench
    from tokenyard.lab.bench.clock import check_gpu
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import cases_of, grid

    chosen = grid(cases_of(cells), weights or [])
    device = check_gpu("measure on a machine that has one")
    gpu, clock, _ = _clocks(device, rounds)
    document = Document(
        benchmark="tiles-cuda",
        unit="µs",
        x="size",
        line="weights",
        columns=bench.COLUMNS,
        setup={"gpu": gpu, "rounds": rounds},
        notes=[bench.NOTE],
    )
    figures = ([record] for record in bench.sweep(chosen, device=device, clock=clock))
    run_benchmark(document, [str(cell) for cell in chosen], figures, Output(out, as_json))


app.command("combine-error")(combine_error)
app.command()(hosts)
app.command()(show)
