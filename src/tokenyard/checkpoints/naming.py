"""The names of experts' tensors.

    model.layers.3.mlp.experts.17.gate_proj.weight     a tensor for each expert: layer, expert, projection, suffix
    model.layers.3.mlp.experts.gate_up_proj_blocks     one tensor for all experts: layer, projection, suffix

A projection is one of an expert's linear maps. Families call the same three by different names (`PROJECTIONS`);
gate and up make up w13, and down is w2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tokenyard.checkpoints.header import StoredTensor
from tokenyard.errors import CheckpointError

_EXPERTS = re.compile(r"(?:.*\.)?experts\..*")
# Numbers have no leading zeros, so that `tensor_name` makes the same name again from the parsed numbers.
_ONE_BY_ONE = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<expert>0|[1-9][0-9]{0,8})\.(?P<projection>\w+)\.(?P<suffix>\w+)"
)
_FUSED = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<projection>gate_up_proj|up_proj|down_proj)(?:_(?P<suffix>blocks|scales|bias))?"
)
_NUMBER = re.compile(r"\.([0-9]{1,9})(?=\.|$)")


class Projections(NamedTuple):
    """The projections of an expert by name: those that make up w13, in order, and w2."""

    w13: tuple[str, ...]
    w2: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all projections."""
        return (*self.w13, self.w2)


# The names that checkpoints use; a layer must have exactly the names of one entry.
PROJECTIONS = (
    Projections(("gate_proj", "up_proj"), "down_proj"),  # Qwen, DeepSeek, GLM, OLMoE
    Projections(("w1", "w3"), "w2"),  # Mixtral, MiniMax
    Projections(("gate_up_proj",), "down_proj"),  # gpt-oss; what Transformers fuses on load
    Projections(("up_proj",), "down_proj"),  # without a gate: Nemotron-H
)


@dataclass
class FoundLayer:
    """The experts' tensors of one layer, by (expert, projection, suffix); expert None: one tensor holds all experts."""

    name: str
    tensors: dict[tuple[int | None, str, str], StoredTensor] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """Whether one tensor holds all experts."""
        return any(expert is None for expert, _, _ in self.tensors)

    @property
    def number(self) -> int:
        """The layer's index in the model: the last number in its name, or -1 if the name has none."""
        found = _NUMBER.findall(self.name)
        return int(found[-1]) if found else -1

    @property
    def file(self) -> Path:
        """One of the files that hold the layer's tensors."""
        return next(iter(self.tensors.values())).file

    def suffixes(self, expert: int | None, projection: str) -> dict[str, StoredTensor]:
        """The tensors of one projection of one expert, by suffix."""
        return {suffix: t for (e, p, suffix), t in self.tensors.items() if (e, p) == (expert, projection)}

    def projections(self) -> Projections:
        """The names of this layer's projections. Raises if they are not among `PROJECTIONS`."""
        found = {projection for _, projection, _ in self.tensors}
        for known in PROJECTIONS:
            if found == set(known.names):
                return known
        usual = [known for known in PROJECTIONS if not self.fused or known.w13 == ("gate_up_proj",)]
        near = max(usual, key=lambda known: len(found & set(known.names)))
        spelled = " or ".join(", ".join(known.names) for known in PROJECTIONS)
        missing = [name for name in near.names if name not in found]
        raise self.error(
            f"the experts of {self.name!r} have {', '.join(sorted(found))}"
            + (f"; {', '.join(missing)} is missing" if missing else ""),
            expected=spelled,
            fix="check that all files of the checkpoint are there; other families are not known yet",
        )

    def error(self, found: str, *, expected: str, fix: str, tensor: str | None = None) -> CheckpointError:
        """An error about this layer, whose message is a file's name followed by `found`."""
        said = f"{self.file.name}: {found}"
        return CheckpointError(
            said, expected=expected, fix=fix, file=self.file, tensor=tensor, layer=self.name
        )


def tensor_name(layer: str, expert: int | None, projection: str, suffix: str) -> str:
    """The name of a tensor of one expert, or of all experts of a layer (`expert` is None).

    >>> tensor_name("model.layers.3.mlp", 17, "up_proj", "weight")
    'model.layers.3.mlp.experts.17.up_proj.weight'
    >>> tensor_name("model.layers.3.mlp", None, "gate_up_proj", "blocks")
    'model.layers.3.mlp.experts.gate_up_proj_blocks'
    """
    if expert is None:
        return f"{layer}.experts.{projection}" + (f"_{suffix}" if suffix else "")
    return f"{layer}.experts.{expert}.{projection}.{suffix}"


def find_layers(tensors: Mapping[str, StoredTensor]) -> list[FoundLayer]:
    """The layers that have experts, sorted by their number in the model."""
    layers: dict[str, FoundLayer] = {}
    for name, tensor in tensors.items():
        match = _ONE_BY_ONE.fullmatch(name) or _FUSED.fullmatch(name)
        if match is None:
            if _EXPERTS.fullmatch(name):
                raise tensor.error(
                    " belongs to experts, under a name that is not known",
                    expected="….experts.0.gate_proj.weight, ….experts.gate_up_proj, or alike",
                    fix="save the model as Transformers does, or download it again",
                )
            continue
        parts = match.groupdict()
        expert = int(parts["expert"]) if parts.get("expert") is not None else None
        layer = layers.setdefault(parts["layer"], FoundLayer(parts["layer"]))
        layer.tensors[expert, parts["projection"], parts["suffix"] or ""] = tensor
    return sorted(layers.values(), key=lambda layer: (layer.number, layer.name))


def also_called(name: str) -> Iterable[str]:
    """Other names for a layer: the one that plans use, and its number.

    >>> list(also_called("model.layers.3.block_sparse_moe"))
    ['model.layers.3.mlp', '3']
    """
    yield f"{name.rpartition('.')[0]}.mlp"
    numbers = _NUMBER.findall(name)
    if numbers:
        yield numbers[-1]
