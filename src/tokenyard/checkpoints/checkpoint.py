"""`open_checkpoint` lists the tensors of a checkpoint, and reads the weights of chosen experts from it.

`open_together` and `load_experts` do this on all ranks of a group: each rank reads its own experts, and if one fails,
all raise. A file that is damaged on one host, or a wrong folder on one rank, would otherwise leave the other ranks
waiting in the first exchange, with their memory full. Ranks therefore agree before each expensive step: on the
headers before they read scales, and on the scales before they read the rest. If one rank raises, the others raise
`PeerFailed` with its error; if no rank raises, but ranks hold different checkpoints, all raise `Disagreement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.checkpoints.config import ModelConfig, model_config, text_config
from tokenyard.checkpoints.families import FAMILIES, unknown_family
from tokenyard.checkpoints.files import TensorFiles, open_files
from tokenyard.checkpoints.header import StoredTensor
from tokenyard.checkpoints.layers import CheckpointLayer, read_layer
from tokenyard.checkpoints.layout import PLAIN_DTYPES
from tokenyard.checkpoints.naming import also_called, find_layers
from tokenyard.checkpoints.reading import ExpertReading
from tokenyard.errors import CheckpointError, unknown_name
from tokenyard.experts.weights import ExpertWeights
from tokenyard.group import Disagreement, Group, GroupLike, borrowed, make_together
from tokenyard.routing import Placement, placement_for

# The least seconds that a rank waits for the slowest one, which may read hundreds of gigabytes from a slow disk.
READING_DEADLINE = 1800.0


class Checkpoint:
    """The weights of a model on disk. Made by `open_checkpoint`.

    `layers` are its MoE layers, `shared` all tensors that do not belong to experts. Opening it reads headers only; a
    tensor's bytes are read when a method returns it.
    """

    def __init__(
        self, path: Path, files: TensorFiles, model: ModelConfig, layers: Sequence[CheckpointLayer]
    ) -> None:
        self.path = path  # the folder, or the file
        self.model = model  # the sizes and the quantization that `config.json` declares for the experts
        self.config = model.values  # all values of `config.json`
        self.layers = tuple(layers)  # the MoE layers
        self._files = files
        self._by_name: dict[str, CheckpointLayer] = {}
        for layer in self.layers:
            for alias in also_called(layer.name):
                self._by_name.setdefault(alias, layer)
        self._by_name |= {layer.name: layer for layer in self.layers}
        prefixes = tuple(f"{layer.name}.experts." for layer in self.layers)
        # the tensors that do not belong to experts, by name
        self.shared: dict[str, StoredTensor] = {
            name: tensor for name, tensor in files.tensors.items() if not name.startswith(prefixes)
        }

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the files, by name."""
        return self._files.tensors

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors."""
        return sorted({tensor.file for tensor in self._files.tensors.values()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._files.tensors.values())

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the tensors that do not belong to experts: every rank holds them."""
        return sum(tensor.nbytes for tensor in self.shared.values())

    @property
    def experts_nbytes(self) -> int:
        """Bytes of the weights of all experts of all layers, as they lie in the files."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far, headers not counted."""
        return self._files.bytes_read

    def layer(self, name: str | int) -> CheckpointLayer:
        """A layer by its name in the files, its name in plans (`model.layers.3.mlp`), or its number."""
        found = self._by_name.get(str(name))
        if found is None:
            unknown = unknown_name("MoE layer", str(name), [layer.name for layer in self.layers])
            raise self.error(f": {unknown.found}", expected=unknown.expected, fix=unknown.fix)
        return found

    def error(self, found: str, *, expected: str, fix: str, tensor: str | None = None) -> CheckpointError:
        """An error about this checkpoint, whose message is its path followed by `found`."""
        said = f"{self.path}{found}"
        return CheckpointError(said, expected=expected, fix=fix, file=self.path, tensor=tensor)

    def reading(self, layer: str | int, experts: Iterable[int] | None = None) -> ExpertReading:
        """A reader of some experts (None: of all) that reads their scales first, and the rest in a second step."""
        found = self.layer(layer)
        chosen = range(found.num_experts) if experts is None else experts
        return ExpertReading(self._files, found, list(chosen))

    def experts(self, layer: str | int, experts: Iterable[int] | None = None) -> ExpertWeights:
        """The weights of the experts with these global ids, in the order of the ids; of all experts, if None are given.

        The bytes of other experts are not read. Quantized weights stay quantized.
        """
        return self.reading(layer, experts).finish()

    def tensor(self, name: str) -> Tensor:
        """A copy of a tensor, under its name in the files."""
        if name not in self._files.tensors:
            unknown = unknown_name("tensor", name, self._files.tensors)
            raise self.error(f": {unknown.found}", expected="a tensor of this checkpoint", fix=unknown.fix)
        return self._files.read(name)

    def copy(self, name: str, write: Callable[[str, Tensor], None]) -> None:
        """Call `write(name, bytes)` with a tensor's bytes, which stay in the memory map: they are not copied."""
        with self._files.view_bytes(name) as raw:
            write(name, raw)

    def bias_dtype(self, layer: CheckpointLayer) -> torch.dtype | None:
        """The dtype of a layer's biases, if it has any."""
        return self.reading(layer.name, []).bias_dtype if layer.bias else None

    def fingerprint(self) -> str:
        """A hash of the names, dtypes and shapes of all tensors; the values do not count."""
        lines = sorted(f"{t.name} {t.dtype}{list(t.shape)}" for t in self._files.tensors.values())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.layers)} MoE layers, {self.nbytes} bytes)"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint: a folder with `config.json` and safetensors files, or one such file.

    It reads the headers and the config, and checks that every expert has every tensor, with the dtype and the shape
    that follow from the config. No weights are read.

    >>> import json, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "hidden_size": 8,
    ...     "intermediate_size": 4, "num_local_experts": 2}))
    >>> save_file({f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight": torch.zeros(8, 4) if w == "w2"
    ...     else torch.zeros(4, 8) for e in (0, 1) for w in ("w1", "w2", "w3")}, folder / "model.safetensors")
    >>> checkpoint = open_checkpoint(folder)
    >>> weights = checkpoint.experts("model.layers.0.mlp", [1])
    >>> weights.w13.shape, checkpoint.bytes_read, checkpoint.nbytes
    (torch.Size([1, 8, 8]), 384, 768)
    """
    path = Path(path)
    files, values, source = open_files(path)
    try:
        config = model_config(values, source)
        layers = [read_layer(found, config) for found in find_layers(files.tensors)]
        if not layers:
            raise CheckpointError(
                f"none of the {len(files.tensors)} tensors of {path} is called as those of experts are",
                expected="a Mixture-of-Experts checkpoint, with tensors ….experts.0.gate_proj.weight or alike",
                fix="check the path, and that the config.json belongs to these weights",
                file=path,
            )
    except CheckpointError as error:
        # The cause may be an unknown family, which names its tensors or sizes in other ways: then name the family.
        text = text_config(values)
        family = text.get("model_type")
        if not isinstance(family, str) or family in FAMILIES:
            raise
        shown = any("expert" in name for name in files.tensors)
        raise unknown_family(text, str(source), experts=shown, why=error.found) from error
    _check_quantized(config, files)
    return Checkpoint(path, files, config, layers)


def _check_quantized(config: ModelConfig, files: TensorFiles) -> None:
    """Raise if the config declares quantized weights, but no tensor of the checkpoint is quantized."""
    quantized = not config.quantization or any(
        "scale" in name or name.endswith("_blocks") or tensor.dtype not in PLAIN_DTYPES
        for name, tensor in files.tensors.items()
    )
    if not quantized:
        tensor = next(iter(files.tensors.values()))
        raise tensor.error_at(
            f"{config.file} has {config.quantized_as}, but no tensor has scales; {tensor}",
            expected="quantized weights, as the config says",
            fix="take the config.json that belongs to these weights, or remove its quantization_config",
        )


def open_together(path: str | Path, group: GroupLike) -> Checkpoint:
    """Call `open_checkpoint` on every rank of a group: it succeeds on all of them, or all raise. Collective.

    The path may differ between hosts; the names, dtypes and shapes of the tensors may not.
    """

    def note(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"tensors": checkpoint.fingerprint()}

    what = "opening the checkpoint"
    with borrowed(group) as ranks:
        opened, notes = make_together(
            ranks, what, lambda: open_checkpoint(path), seconds=READING_DEADLINE, note=note
        )
        _check_notes(notes, ranks)
    return opened


def load_experts(
    checkpoint: Checkpoint, layer: str | int, group: GroupLike, placement: str | Placement = "contiguous"
) -> ExpertWeights:
    """The weights of the experts that `placement` gives to this rank. Collective: all ranks succeed, or all raise.

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
    with borrowed(group) as ranks:
        return _load_experts(checkpoint, layer, ranks, placement)


def _load_experts(
    checkpoint: Checkpoint, layer: str | int, group: Group, placement: str | Placement
) -> ExpertWeights:
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
