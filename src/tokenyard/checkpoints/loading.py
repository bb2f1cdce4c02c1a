"""Loading on all ranks of a group: each rank reads its own experts, and if one fails, all raise.

A file that is damaged on one host, or a folder that one rank was given wrongly, would otherwise leave the other
ranks waiting in the first exchange, with their memory full. Here ranks compare notes before each step that is
expensive: the headers, then the scales, then the rest. If one rank raises, the others raise `PeerFailed` with what
it said; if all is well but ranks hold different checkpoints, all raise `Disagreement`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tokenyard.checkpoints.reading import ExpertReading
from tokenyard.experts.base import ExpertWeights
from tokenyard.group import Disagreement, Group, make_together
from tokenyard.routing import Placement, placement_for

# Seconds that a rank waits for the slowest at least: it may read hundreds of gigabytes from a slow disk.
READING_DEADLINE = 1800.0


def open_together(path: str | Path, group: Group) -> Checkpoint:
    """`open_checkpoint` on every rank of a group: all get it, or all raise. Collective.

    The path may differ between hosts; what is in it may not.
    """

    def note(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"tensors": checkpoint.fingerprint()}

    what = "opening the checkpoint"
    opened, notes = make_together(
        group, what, lambda: open_checkpoint(path), seconds=READING_DEADLINE, note=note
    )
    _check_notes(notes, group)
    return opened


def load_experts(
    checkpoint: Checkpoint, layer: str | int, group: Group, placement: str | Placement = "contiguous"
) -> ExpertWeights:
    """This rank's experts of a layer, as the placement says. Collective: all ranks get theirs, or all raise.

    >>> import json, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from tokenyard import launch
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": 8}))
    >>> save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(7, 8, 8),
    ...            "model.layers.0.mlp.experts.down_proj": torch.zeros(7, 8, 4)}, folder / "model.safetensors")
    >>> def rank(group):
    ...     checkpoint = open_together(folder, group)
    ...     return load_experts(checkpoint, "model.layers.0.mlp", group).w13.shape[0], checkpoint.bytes_read
    >>> launch(3, rank, ranks="threads")
    [(3, 1152), (2, 768), (2, 768)]
    """
    facts: dict[str, Any] = {}

    def begin() -> ExpertReading:
        found = checkpoint.layer(layer)
        placed = placement_for(placement, found.num_experts, group.size)
        reading = checkpoint.reading(layer, placed.local_experts(group.rank))
        reading.check_scales()
        facts.update(
            layer=found.name,
            weights=found.weights,
            sizes=[found.num_experts, found.hidden_size, found.intermediate_size],
            placement=placed.fields(),
        )
        return reading

    name = str(layer)
    reading, notes = make_together(
        group, "checking the experts", begin, seconds=READING_DEADLINE, note=lambda _: facts, layer=name
    )
    _check_notes(notes, group, layer=name)
    experts, _ = make_together(
        group, "loading the experts", reading.finish, seconds=READING_DEADLINE, layer=name
    )
    return experts


def _check_notes(notes: list[dict[str, Any]], group: Group, layer: str | None = None) -> None:
    """Raise on all ranks if they do not hold the same checkpoint."""
    differing = sorted(key for key in notes[0] if any(other[key] != notes[0][key] for other in notes))
    if differing:
        values = [{key: other[key] for key in differing} for other in notes]
        raise Disagreement("the checkpoint", values, rank=group.rank).at(layer=layer)
