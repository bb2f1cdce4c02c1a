"""`tokenyard inspect`: what a checkpoint holds, and what would run it, from its headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenyard.cli.options import JSON_FLAG, MOST_RANKS, option
from tokenyard.cli.output import Output, say
from tokenyard.cli.tables import show_table
from tokenyard.errors import TokenyardError
from tokenyard.units import size

if TYPE_CHECKING:
    from tokenyard.checkpoints import Checkpoint, CheckpointLayer
    from tokenyard.planning.spec import LayerSpec

# The fields of a checkpoint's layer that are shown.
_SHOWN = (
    "name",
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "gated",
    "interleaved",
    "bias",
    "weights",
    "inner",
)


def inspect(
    path: Path = typer.Argument(..., help="The folder of a checkpoint, or one safetensors file."),
    ranks: int = option(4, "Ranks in the EP group, for the bytes of one of them.", min=1, max=MOST_RANKS),
    as_json: bool = JSON_FLAG,
) -> None:
    """Show a checkpoint's MoE layers, their formats and bytes, and what would run them. No weights are read."""
    from tokenyard.checkpoints import open_checkpoint

    found = as_fields(open_checkpoint(path), ranks)
    Output(as_json).deliver(found, lambda: _show(found))


def as_fields(checkpoint: Checkpoint, ranks: int) -> dict[str, Any]:
    """A checkpoint as plain values."""
    specs, notes = _specs(checkpoint)
    layers: list[dict[str, Any]] = []
    for layer in checkpoint.layers:
        spec = specs.get(_planned_name(layer), next(iter(specs.values()), None))
        mine = -(-layer.num_experts // ranks)
        layers.append(
            {
                **{name: getattr(layer, name) for name in _SHOWN},
                "layout": str(layer.layout),
                "bytes": layer.nbytes,
                "experts_per_rank": mine,
                "bytes_per_rank": layer.nbytes // layer.num_experts * mine,
                "experts": _who_runs(layer, spec, mine),
            }
        )
    on_a_rank = checkpoint.shared_nbytes + sum(layer["bytes_per_rank"] for layer in layers)
    return {
        "path": str(checkpoint.path),
        "model_type": checkpoint.config.get("model_type"),
        "ranks": ranks,
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in checkpoint.files],
        "num_tensors": len(checkpoint.tensors),
        "bytes": {
            "total": checkpoint.nbytes,
            "experts": checkpoint.experts_nbytes,
            "shared": checkpoint.shared_nbytes,
            "rank": on_a_rank,
        },
        "layers": layers,
        "notes": notes,
    }


def _specs(checkpoint: Checkpoint) -> tuple[dict[str, LayerSpec], list[str]]:
    """The layers of the model's config, by name, and notes on how they differ from those in the files."""
    from tokenyard.integrations.huggingface import layers_from_config
    from tokenyard.units import span

    try:
        specs = {spec.name: spec for spec in layers_from_config(checkpoint.config)}
    except TokenyardError as error:
        return {}, [
            f"The weights can be read, but layers cannot be planned from this config: {error.found} (expected "
            f"{error.expected})."
        ]
    there = {_planned_name(layer) for layer in checkpoint.layers}
    missing = [name for name in specs if name not in there]
    more = [name for name in there if name not in specs]
    notes = []
    if missing:
        notes.append(f"The config has MoE layers that are not in the files: {span(missing)}.")
    if more:
        notes.append(f"The files have MoE layers that the config does not: {span(sorted(more))}.")
    return specs, notes


def _planned_name(layer: CheckpointLayer) -> str:
    return f"{layer.name.rpartition('.')[0]}.mlp"


def _who_runs(layer: CheckpointLayer, spec: LayerSpec | None, num_local: int) -> dict[str, str | None]:
    """Each experts class, and None if it runs this layer's weights, or why not."""
    from tokenyard import formats
    from tokenyard.experts import EXPERTS, ExpertsSpec, activation
    from tokenyard.experts.spec import EXACT

    act = activation(spec.activation if spec is not None else _usual_activation(layer))
    asked = ExpertsSpec(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_local_experts=num_local,
        top_k=1 if spec is None else spec.top_k,
        activation=act,
        bias=layer.bias,
        weights=layer.weights,
        inner=None if layer.inner == EXACT else formats.get(layer.inner),
    )
    reasons = {name: kind.supports(asked) for name, kind in EXPERTS.items()}
    return {name: None if reason is None else str(reason) for name, reason in reasons.items()}


def _usual_activation(layer: CheckpointLayer) -> str:
    if layer.interleaved:
        return "swiglu_clamped"
    return "swiglu" if layer.gated else "relu2"


def _show(found: dict[str, Any]) -> None:
    from tokenyard.experts.spec import EXACT
    from tokenyard.formats import weight_format
    from tokenyard.units import count, span

    rows = []
    for names, layer in _alike(found["layers"]):
        what = ["gate and up", "up"][not layer["gated"]] + (", interleaved" if layer["interleaved"] else "")
        runs = [name for name, reason in layer["experts"].items() if reason is None]
        refused = [f"not {name}: {reason}" for name, reason in layer["experts"].items() if reason is not None]
        taken = ", ".join(("plain", *weight_format(layer["weights"]).row_formats))
        rows.append(
            (
                span(names).replace(" … ", "\n… ").replace(" (", "\n("),
                f"{layer['num_experts']} experts\nH {layer['hidden_size']}, I {layer['intermediate_size']}\n{what}"
                + ("\nwith biases" if layer["bias"] else ""),
                f"{layer['weights']}\n{layer['layout']}"
                + ("" if layer["inner"] == EXACT else f"\n{layer['inner']} between the products"),
                f"{size(layer['bytes'])} a layer\n{size(layer['bytes'] / layer['num_experts'])} an expert",
                f"{layer['experts_per_rank']} experts\n{size(layer['bytes_per_rank'])}",
                "\n".join([f"experts: {', '.join(runs) or 'none'}", f"rows: {taken}", *refused]),
            )
        )
    show_table(
        ("layers", "shape", "weights", "bytes", f"a rank of {found['ranks']}", "runs on"),
        rows,
        show_lines=True,
        title=f"{found['path']}: {found['model_type'] or 'a model'}, {count(len(found['layers']), 'MoE layer')}, "
        f"{size(found['bytes']['total'])} in {count(len(found['files']), 'file')}",
    )
    sizes = {part: size(nbytes) for part, nbytes in found["bytes"].items()}
    say(
        f"Experts {sizes['experts']}, everything else {sizes['shared']}. With {found['ranks']} ranks, one holds "
        f"{sizes['rank']} at most: everything else, and its experts."
    )
    for note in found["notes"]:
        say(note, style="yellow")


def _alike(layers: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Groups of layers that differ in their name only: the names, and the common fields."""
    groups: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for layer in layers:
        rest = {key: value for key, value in layer.items() if key != "name"}
        names, _ = groups.setdefault(json.dumps(rest), ([], rest))
        names.append(layer["name"])
    return list(groups.values())
