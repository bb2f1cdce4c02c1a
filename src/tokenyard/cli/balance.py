"""`tokenyard balance`: forecasts whether another placement of the experts pays, from the routes of a real run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenyard.cli.machine import provenance
from tokenyard.cli.options import JSON_FLAG, MOST_RANKS, option
from tokenyard.cli.output import Output, say
from tokenyard.cli.tables import show_table
from tokenyard.units import size

if TYPE_CHECKING:
    from tokenyard.balancing.forecast import LayerForecast


def balance(
    routes: Path = typer.Argument(..., help="Routes that `tokenyard run --record` wrote."),
    ranks: int | None = option(None, "Ranks in the EP group.", shown="as recorded", min=1, max=MOST_RANKS),
    replicas: int = option(0, "Copies of experts beyond one of each, in all.", min=0),
    slots: int | None = option(
        None, "Experts of a layer that a rank has memory for.", shown="what it takes", min=1
    ),
    ranks_per_host: int | None = option(None, "Ranks on a host.", shown="all on one", min=1),
    bandwidth: float | None = option(
        None, "GB/s between two ranks.", shown="of a copy, measured here", min=1e-3
    ),
    tflops: float | None = option(
        None, "TFLOP/s of a rank's experts.", shown="of a product, measured", min=1e-6
    ),
    out: Path | None = option(None, "Save what was found, with the placement of every layer."),
    as_json: bool = JSON_FLAG,
) -> None:
    """Show what a better placement of the experts would gain and cost, before anything is moved."""
    from tokenyard.balancing.forecast import forecast, steps_to_pay
    from tokenyard.balancing.recorded_routes import read_routes

    output = Output(as_json, out)
    recorded = read_routes(routes)
    world = recorded[0].world if ranks is None else ranks
    gb_per_s, tera = _rates(bandwidth, tflops)
    layers = forecast(
        recorded,
        world,
        copies=replicas,
        slots=slots,
        ranks_per_host=ranks_per_host,
        bytes_per_s=gb_per_s * 1e9,
        flops_per_s=tera * 1e12,
    )
    document = {
        "command": "balance",
        "routes": str(routes),
        "ranks": world,
        "replicas": replicas,
        "bandwidth_GB_per_s": gb_per_s,
        "TFLOP_per_s": tera,
        "steps": recorded[0].num_steps,
        "steps_to_pay": steps_to_pay(layers),
        "layers": [layer.as_dict() for layer in layers],
        **provenance(),
    }
    output.deliver(document, lambda: _show(layers, document))


def _rates(bandwidth: float | None, tflops: float | None) -> tuple[float, float]:
    """GB/s between ranks, and TFLOP/s of experts: as given, or those of a copy and of a product on this CPU."""
    import torch

    from tokenyard.machine_rates import copy_rate, host_clock, product_rate

    cpu, clock = torch.device("cpu"), host_clock(3)
    # Half of the bytes of a copy: those that are read, as those that would arrive.
    return bandwidth or copy_rate(cpu, clock) / 2 / 1e3, tflops or product_rate(cpu, clock) / 1e6


def _show(layers: list[LayerForecast], document: dict[str, Any]) -> None:
    rows = [
        (
            layer.layer,
            f"{layer.before:.3f}",
            f"{layer.after:.3f}",
            f"{layer.experts_moved:,}",
            f"{layer.moved_between_hosts:,}",
            size(layer.moved_bytes),
            f"{1e3 * layer.move_s:.2f}",
            f"{1e6 * layer.saved_s:.2f}",
        )
        for layer in layers
    ]
    figures = ("before", "after", "moved", "between hosts", "bytes", "move, ms", "saved a step, µs")
    show_table(
        ("layer", *figures),
        rows,
        right=figures,
        less_needed=("between hosts", "bytes"),
        title=f"Busiest rank over mean, on {document['ranks']} ranks with {document['replicas']} replicas a layer",
    )
    steps = document["steps_to_pay"]
    paid = (
        "The present placement is as good."
        if steps == 0
        else "It does not pay: the busiest ranks get no fewer rows."
        if steps is None
        else f"The move has paid for itself after {steps:,} step{'s' if steps > 1 else ''}."
    )
    say(
        f"{paid} Experts move at {document['bandwidth_GB_per_s']:.3g} GB/s, products run at "
        f"{document['TFLOP_per_s']:.3g} TFLOP/s; {document['steps']:,} steps were recorded."
    )
