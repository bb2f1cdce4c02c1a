"""`tokenyard bench combine-error`: what the way back costs in accuracy, against the number of ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenyard.cli.bench_output import Output, run_benchmark
from tokenyard.cli.options import JsonFlag, OutFile, PlotFile
from tokenyard.cli.output import reported
from tokenyard.cli.parts import refuse_override

_RANKS = (1, 2, 4, 8, 16)


@reported
def combine_error(
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=64, help="Threads; may be given several times.", show_default="1, 2, 4, 8, 16"
        ),
    ] = None,
    combine_wire: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this format on the way back; may be given several times.", show_default="all"
        ),
    ] = None,
    hidden_size: Annotated[int, typer.Option(min=1)] = 1024,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 64,
    num_experts: Annotated[int, typer.Option(min=1)] = 32,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Random layers of each kind.")] = 5,
    out: OutFile = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How far a layer's output is from float64, for every format on the way back, on 1 to 16 ranks.

    Random layers, with Gaussian results, with outliers among the columns, and with small results. `e4m3_unscaled` is a
    cast without scales, the bad example of this study, which no plan takes.
    """
    from tokenyard.lab.bench import combine_error as bench
    from tokenyard.lab.bench.records import Document
    from tokenyard.lab.bench.shapes import check_top_k
    from tokenyard.lab.unscaled_e4m3 import studied_format, studied_ways_back

    refuse_override()
    check_top_k(top_k, num_experts)
    wires = [str(studied_format(name)) for name in combine_wire or studied_ways_back()]
    setup = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k,
        "tokens": tokens,
        "layers": layers,
    }
    output = Output(out, as_json, plot)
    output.check()
    document = Document(
        benchmark="combine-error",
        unit="%",
        x="ranks",
        line="combine_wire",
        columns=("ordinary", "bytes_per_row"),
        setup=setup,
        notes=bench.NOTES,
    )
    study = bench.Study(**setup)
    cells = [(count, results) for results in bench.RESULTS for count in ranks or _RANKS]
    figures = (bench.measure_combine_error(study, *cell, wires) for cell in cells)
    run_benchmark(
        document, [f"{results} results on {count} ranks" for count, results in cells], figures, output
    )
