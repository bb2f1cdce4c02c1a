"""`tokenyard plan`: how a model's layers would be wired, and the bytes, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenyard.cli.options import JSON_FLAG, MOST_RANKS, option
from tokenyard.cli.output import Output, say
from tokenyard.cli.tables import show_table
from tokenyard.units import size

if TYPE_CHECKING:
    from tokenyard.planning.drafting import Draft
    from tokenyard.planning.wiring import Wiring


def plan(
    config: Path = option(..., "A Hugging Face config.json, or the folder that holds it."),
    ranks: int = option(..., "Ranks in the EP group.", min=1, max=MOST_RANKS),
    exchange: str = option("auto", "How rows move."),
    wire: str | None = option(None, "The format in which rows travel out.", shown="the model's dtype"),
    combine_wire: str | None = option(None, "The format on the way back.", shown="the model's dtype"),
    weights: str | None = option(None, "The format that holds the experts.", shown="the model's dtype"),
    inner: str | None = option(
        None, "How numbers are held between the two products.", shown="as the config says"
    ),
    max_tokens: int = option(4096, "The most tokens that a rank brings in a call.", min=1),
    placement: str = option("contiguous", "Which rank owns which expert."),
    experts: str = option("auto", "What computes."),
    in_flight: int = option(1, "Dispatches in flight at a time.", min=1),
    max_rows: int | None = option(
        None, "The most rows that a rank receives in one pass.", shown="all that may come", min=1
    ),
    training: bool = option(False, "A plan for training: with the way of gradients, and their bytes."),
    as_json: bool = JSON_FLAG,
) -> None:
    """Show how a model's MoE layers would be wired, also for training, and the bytes, without running anything."""
    from tokenyard.integrations.huggingface import layers_from_config
    from tokenyard.planning.drafting import draft

    layers = layers_from_config(
        config,
        wire=wire,
        combine_wire=combine_wire,
        placement=placement,
        experts=experts,
        weights=weights,
        inner=inner,
    )
    drafted = draft(
        layers,
        ranks,
        exchange=exchange,
        max_tokens=max_tokens,
        in_flight=in_flight,
        max_rows=max_rows,
        training=training,
    )
    document = {"config": str(config), **as_fields(drafted)}
    Output(as_json).deliver(document, lambda: _show(drafted))


def as_fields(drafted: Draft) -> dict[str, Any]:
    """A draft as plain values."""
    rows = [{**row, "experts_per_rank": _experts_per_rank(_wiring(drafted, row))} for row in drafted.rows()]
    return {
        "ranks": drafted.world,
        "exchange": drafted.exchange.name,
        "in_flight": drafted.in_flight,
        "max_rows": drafted.max_rows,
        "training": drafted.training,
        "num_layers": len(drafted.wirings),
        "wirings": rows,
        "bytes_per_rank": {
            "dispatch": drafted.dispatch_bytes,
            "combine": drafted.combine_bytes,
            "workspace": drafted.workspace_bytes,
        },
    }


def _wiring(drafted: Draft, row: dict[str, Any]) -> Wiring:
    """The wiring that a row of the draft describes: that of its first layer, which all its layers share."""
    return next(wiring for wiring in drafted.wirings if wiring.spec.name == row["layers"][0])


def _experts_per_rank(wiring: Wiring) -> dict[str, int]:
    placement = wiring.exchange_spec.placement
    counts = [placement.num_local(rank) for rank in range(placement.world)]
    return {"fewest": min(counts), "most": max(counts)}


def _show(drafted: Draft) -> None:
    from tokenyard.planning.draft_text import chosen
    from tokenyard.units import count, span

    fields = as_fields(drafted)
    rows: list[tuple[str, ...]] = []
    for row in fields["wirings"]:
        share, per_row, per_rank = row["experts_per_rank"], row["bytes_per_row"], row["bytes_per_rank"]
        fewest, most = share["fewest"], share["most"]
        wiring = _wiring(drafted, row)
        rows.append(
            (
                span(row["layers"]).replace(" … ", "\n… ").replace(" (", "\n("),
                row["shape"].replace(", ", "\n"),
                f"{most if fewest == most else f'{fewest} to {most}'} a rank\n{wiring.experts.name}\n"
                f"{wiring.spec.weights} weights\n{wiring.spec.placement}"
                + ("" if wiring.inner is None else f"\n{wiring.inner}\nbetween products"),
                f"{row['wire']}\n{per_row['dispatch']} B/row",
                f"{row['combine_wire']}\n{per_row['combine']} B/row",
                f"{row['max_tokens']} tokens\n"
                + ("" if row["max_rows"] is None else f"{row['max_rows']} rows\n")
                + f"{size(per_rank['dispatch'])} out\n{size(per_rank['combine'])} back",
                _lines_of_duties(row["duties"]),
            )
        )
        if "gradients" in row:
            rows.append(_line_of_gradients(row["gradients"]))
    show_table(
        ("layers", "shape", "experts", "out", "back", "a rank, at most", "duties"),
        rows,
        show_lines=True,
        title=f"{count(fields['num_layers'], 'layer')} on {count(drafted.world, 'rank')}, exchange "
        f"{drafted.exchange.name}{chosen(drafted.exchange_reason)}, {drafted.in_flight} in flight"
        + (", training" if drafted.training else ""),
    )
    times = "" if drafted.in_flight == 1 else f", × {drafted.in_flight} in flight"
    say(
        f"All layers share a workspace of {size(drafted.workspace_bytes)} a rank: largest out "
        f"{size(drafted.dispatch_bytes)} + largest back {size(drafted.combine_bytes)}{times}."
    )


def _line_of_gradients(gradients: dict[str, Any]) -> tuple[str, ...]:
    """The line below a layer's: how its gradients travel."""
    per_row, per_rank = gradients["bytes_per_row"], gradients["bytes_per_rank"]
    return (
        "gradients",
        "",
        f"a forward keeps\n{gradients['keep']}",
        f"{gradients['wire']}\n{per_row['dispatch']} B/row",
        f"{gradients['wire']}\n{per_row['combine']} B/row",
        f"{size(per_rank['dispatch'])} out\n{size(per_rank['combine'])} back",
        _lines_of_duties(gradients["duties"]),
    )


def _lines_of_duties(duties: dict[str, str]) -> str:
    return "\n".join(f"{duty}: {who}" for duty, who in duties.items() if who != "–")
