"""Conversion: writes a plain checkpoint again with quantized experts, in a layout that other engines read.

    read one expert ── quantize ── spell it in the target's layout ── write it to its place

Each of torch's threads converts one expert at a time, and no other experts are in memory. Only the matrices of routed
experts are quantized. Attention, routers, shared experts, embeddings and biases are copied byte for byte, and the
config lists the modules that are not quantized. Gate and up of an expert are quantized as one matrix, w13, so that the
weights that are read back equal, bit for bit, those that `ExpertWeights.quantize` makes in memory (and gate and up of
nvfp4 have one global scale, as fused kernels want).

The result is written into a temporary folder, which is renamed when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.checkpoints.checkpoint import Checkpoint
from tokenyard.checkpoints.compressed_tensors import COMPRESSED_LAYOUTS
from tokenyard.checkpoints.config import CONFIG
from tokenyard.checkpoints.header import PICKLE_ENDINGS, refused
from tokenyard.checkpoints.layers import CheckpointLayer
from tokenyard.checkpoints.layout import Layout
from tokenyard.checkpoints.naming import PROJECTIONS, tensor_name
from tokenyard.checkpoints.vendor_layouts import DeepSeekFp8, GptOssMxfp4
from tokenyard.checkpoints.writer import LARGEST_FILE, SPELLINGS, CheckpointWriter, Entry
from tokenyard.errors import CheckpointError, unknown_name
from tokenyard.experts import workers
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import QuantizedMatrix
from tokenyard.temporary_folders import temporary_folder

# The layout in which each weight format is written.
TARGETS: dict[str, Layout] = {layout.weights: layout for layout in (*COMPRESSED_LAYOUTS, DeepSeekFp8())}

# Files with weights, in safetensors and in other formats. All other files of the folder are copied: tokenizer, chat
# templates, generation config, code, license.
_WEIGHTS = (".safetensors", ".index.json", *PICKLE_ENDINGS, ".h5", ".msgpack", ".gguf", ".onnx", ".npz")
# The folder in which Transformers keeps chat templates, where a model has several.
_CHAT_TEMPLATES = "additional_chat_templates"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ConvertedLayer:
    """The figures of one converted layer."""

    name: str  # the name of the layer
    num_experts: int  # E, the number of experts
    layout: str  # how the tensors are stored
    bytes_before: int  # bytes of the experts in the old files
    bytes_after: int  # bytes of the experts in the new files
    # |quantized - plain| / |plain|, in L2 over all matrices of the layer.
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion wrote."""

    folder: Path  # the folder that was written
    weights: str  # the weight format
    files: tuple[str, ...]  # the names of the files that hold tensors
    bytes_before: int  # bytes of all experts in the old files
    bytes_after: int  # bytes of all experts in the new files
    layers: tuple[ConvertedLayer, ...]  # the figures of each layer


def convert(
    checkpoint: Checkpoint,
    weights: str,
    out: str | Path,
    *,
    largest_file: int = LARGEST_FILE,
    progress: Progress | None = None,
) -> Conversion:
    """Write a copy of a plain checkpoint with the experts' matrices in a weight format.

    `weights` is a key of `TARGETS`. Files hold up to `largest_file` bytes. `progress` is called, from several threads,
    with the name of the part that is being converted, the bytes read so far, and all bytes to read.

    >>> from tokenyard.checkpoints import convert, open_checkpoint
    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text('{"model_type": "qwen3_moe", "hidden_size": 32}')
    >>> save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 64, 32),
    ...            "model.layers.0.mlp.experts.down_proj": torch.ones(4, 32, 32)}, folder / "model.safetensors")
    >>> written = convert(open_checkpoint(folder), "mxint4", folder / "small")
    >>> written.bytes_before, written.bytes_after, written.layers[0].layout
    (49152, 7104, 'compressed-tensors mxint4')
    >>> open_checkpoint(folder / "small").experts(0, [2]).w13.format
    Mxint4Weights()
    """
    targets = {layer.name: _target(checkpoint, layer, weights) for layer in checkpoint.layers}
    _check_all_plain(checkpoint)
    folder = Path(out)
    _check_free(folder)
    entries = list(_entries(checkpoint, targets))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_space(folder.parent, sum(entry.nbytes for entry in entries))
        with temporary_folder(f".{folder.name}.", folder.parent) as partial:
            writer = CheckpointWriter(partial, entries, largest_file=largest_file)
            try:
                layers = _write(checkpoint, targets, writer, progress or (lambda *_: None))
                writer.close()
            finally:
                writer.abandon()
            _write_config(checkpoint, targets, partial)
            partial.chmod(0o755)
            os.replace(partial, folder)  # `folder` may exist if it is empty
    except OSError as error:
        raise _unwritable(folder, error) from error
    return Conversion(
        folder=folder,
        weights=weights,
        files=tuple(sorted(path.name for path in folder.glob("*.safetensors"))),
        bytes_before=checkpoint.nbytes,
        bytes_after=writer.nbytes,
        layers=layers,
    )


# --- What can be converted, and into what -----------------------------------------------------------------


def _target(checkpoint: Checkpoint, layer: CheckpointLayer, weights: str) -> CheckpointLayer:
    """The layer as it will be written: projections keep their names, but fused gate and up may be split."""
    if weights not in TARGETS:
        raise unknown_name("weight format to convert into", str(weights), TARGETS)
    if layer.layout.format.quantized:
        raise checkpoint.error(
            f": the experts are {layer.layout} already",
            expected="plain weights: quantizing twice loses twice",
            fix="convert the checkpoint that this one was made from",
        ).at(layer=layer.name)
    if reason := _reason(layer, weights):
        fit = [name for name in TARGETS if _reason(layer, name) is None]
        works = f"one of these works: {', '.join(fit)}" if fit else "no format has a layout for these experts"
        expected = "experts that this format has a layout for"
        raise checkpoint.error(f": {reason}", expected=expected, fix=works).at(layer=layer.name)
    layout, fused = _layouts(layer)[weights], layer.projections.w13 == ("gate_up_proj",)
    return replace(
        layer, layout=layout, projections=PROJECTIONS[0] if fused and not layout.fused else layer.projections
    )


def _layouts(layer: CheckpointLayer) -> dict[str, Layout]:
    """The layouts that can hold a layer, by weight format. Only that of gpt-oss holds interleaved gate and up rows."""
    return {"mxfp4": GptOssMxfp4()} if layer.interleaved else TARGETS


def _reason(layer: CheckpointLayer, weights: str) -> str | None:
    layout = _layouts(layer).get(weights)
    if layout is None:
        return f"gate and up rows take turns, and no layout of {weights} says so"
    return layout.refused(layer.hidden_size) or layout.refused(layer.intermediate_size)


def _check_all_plain(checkpoint: Checkpoint) -> None:
    """Raise if tensors other than experts' are quantized already: a config can declare only one quantization."""
    config = checkpoint.model
    if config.quantization:
        raise CheckpointError(
            f"{config.file} has {config.quantized_as}, of other weights than those of experts",
            expected="a checkpoint that is plain as a whole: its config says one way of quantizing",
            fix="convert the checkpoint that this one was made from, or, if nothing is quantized, remove that entry",
            file=config.file,
        )


def _check_free(folder: Path) -> None:
    try:
        os.lstat(folder)
        is_taken = not folder.is_dir() or any(folder.iterdir())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # such as a name that the operating system does not allow
        raise _unwritable(folder, error) from error
    if is_taken:
        expected, fix = "a folder that is empty, or none", "choose another --out, or remove it first"
        raise refused(folder, "is there already", expected=expected, fix=fix)


def _unwritable(folder: Path, error: OSError | ValueError) -> CheckpointError:
    found = f"cannot be written ({getattr(error, 'strerror', None) or error})"
    expected = "a folder that can be made, on a disk with room"
    return refused(folder, found, expected=expected, fix="choose another --out")


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        found, expected = f"has {free} bytes left", f"{nbytes} bytes for the new checkpoint"
        raise refused(folder, found, expected=expected, fix="choose a disk with more room")


# --- What will be written ---------------------------------------------------------------------------------


def _entries(checkpoint: Checkpoint, targets: Mapping[str, CheckpointLayer]) -> Iterator[Entry]:
    for name, stored in checkpoint.shared.items():
        yield Entry(name=name, dtype=stored.dtype, shape=stored.shape)
    for layer in checkpoint.layers:
        bias, target = checkpoint.bias_dtype(layer), targets[layer.name]
        for expert, projection, piece in target.tensors(written=True):
            name = tensor_name(target.name, expert, projection, piece.suffix)
            dtype = SPELLINGS[bias] if bias is not None and piece.suffix == "bias" else piece.dtypes[0]
            shape = piece.shape if expert is not None else (target.num_experts, *piece.shape)
            yield Entry(name=name, dtype=dtype, shape=shape)


# --- Writing ----------------------------------------------------------------------------------------------


def _write(
    checkpoint: Checkpoint,
    targets: Mapping[str, CheckpointLayer],
    writer: CheckpointWriter,
    progress: Progress,
) -> tuple[ConvertedLayer, ...]:
    total = checkpoint.shared_nbytes + checkpoint.experts_nbytes
    start = checkpoint.bytes_read

    def report(what: str) -> None:
        progress(what, checkpoint.bytes_read - start, total)

    report("shared weights")
    for name in checkpoint.shared:
        checkpoint.copy(name, writer.write_bytes)
        report("shared weights")
    return tuple(
        _LayerConversion(checkpoint, layer, targets[layer.name], writer).run(partial(report, layer.name))
        for layer in checkpoint.layers
    )


@dataclass(frozen=True)
class _LayerConversion:
    """Reads the experts of one layer, and writes them as those of `target`."""

    checkpoint: Checkpoint
    layer: CheckpointLayer
    target: CheckpointLayer
    writer: CheckpointWriter

    def run(self, report: Callable[[], None]) -> ConvertedLayer:
        """Convert all experts of the layer, in parallel."""
        done: dict[int, _ConvertedExpert] = {}
        failed: dict[int, Exception] = {}

        def convert_one(expert: int) -> None:
            if failed:
                return
            # An error is raised only after all threads have stopped, because raising it removes the folder.
            try:
                done[expert] = self._convert(expert)
            except Exception as error:
                failed[expert] = error
            report()

        layer = self.layer
        workers.for_each(convert_one, range(layer.num_experts), torch.get_num_threads())
        if failed:
            raise failed[min(failed)]
        parts = [done[expert] for expert in range(layer.num_experts)]
        squares = sum(part.squares for part in parts)
        return ConvertedLayer(
            name=layer.name,
            num_experts=layer.num_experts,
            layout=str(self.target.layout),
            bytes_before=layer.nbytes,
            bytes_after=sum(part.nbytes for part in parts),
            relative_error=math.sqrt(sum(part.errors for part in parts) / squares) if squares else 0.0,
        )

    def _convert(self, expert: int) -> _ConvertedExpert:
        layout, projections = self.target.layout, self.target.projections
        plain = self.checkpoint.experts(self.layer.name, [expert])
        self._check_numbers(expert, plain)
        quantized = layout.quantize(plain, len(projections.w13))
        squares, errors, nbytes = 0.0, 0.0, 0
        for matrix, bias, names in (("w13", "b13", projections.w13), ("w2", "b2", (projections.w2,))):
            one, other = getattr(plain, matrix), getattr(quantized, matrix)
            squares += float(one.float().square().sum(dtype=torch.float64))
            errors += float((other.decode() - one.float()).square().sum(dtype=torch.float64))
            nbytes += self._write(expert, names, other[0], getattr(quantized, bias))
        return _ConvertedExpert(squares, errors, nbytes)

    def _write(
        self, expert: int, projections: tuple[str, ...], matrix: QuantizedMatrix, bias: Tensor | None
    ) -> int:
        """Write the tensors of one matrix and of its bias, projection by projection. Returns the number of bytes."""
        layout, parts, nbytes = self.target.layout, len(projections), 0
        outputs, inputs = matrix.shape[0] // parts, matrix.shape[1]
        shares = {
            name: layout.split(name, payload, parts, outputs) for name, payload in matrix.payloads.items()
        }
        for number, projection in enumerate(projections):
            payloads = {name: share[number] for name, share in shares.items()}
            tensors = layout.spelled(payloads, outputs, inputs)
            if bias is not None:
                tensors["bias"] = bias[0].chunk(parts)[number]
            for suffix, tensor in tensors.items():
                name, among = self.target.stored(expert, projection, suffix)
                self.writer.write(name, tensor, among)
                nbytes += tensor.nbytes
        return nbytes

    def _check_numbers(self, expert: int, plain: ExpertWeights) -> None:
        """Raise if a weight is NaN or infinite, because quantizing would spoil its whole block."""
        projections = self.layer.projections
        for name, projection in (("w13", projections.w13[0]), ("w2", projections.w2)):
            if not bool(getattr(plain, name).isfinite().all()):
                tensor, _ = self.layer.stored(expert, projection, self.layer.layout.data)
                stored = self.checkpoint.tensors[tensor]
                raise stored.error_at(
                    f"{stored.file.name}: {name} of expert {expert} ({tensor}) holds NaN or Inf",
                    expected="weights that are finite numbers",
                    fix="mend the weights first: quantized, a whole block of them would be lost",
                ).at(layer=self.layer.name)


class _ConvertedExpert(NamedTuple):
    squares: float  # the sum of the squares of the plain weights
    errors: float  # the sum of the squares of quantized minus plain
    nbytes: int


def _write_config(checkpoint: Checkpoint, targets: Mapping[str, CheckpointLayer], folder: Path) -> None:
    """Write the config with the new quantization, and copy the other files of the model."""
    modules = {
        name.removesuffix(".weight")
        for name, tensor in checkpoint.shared.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    }
    layout = next(iter(targets.values())).layout
    config = dict(checkpoint.config) | {
        "quantization_config": layout.quantization_config(sorted(modules | {"lm_head"}))
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    source = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for path in sorted(source.iterdir()):
        left_out = path.name == CONFIG or path.name.startswith(".") or path.name.endswith(_WEIGHTS)
        if path.is_file() and not left_out:
            shutil.copyfile(path, folder / path.name)
    if (source / _CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / _CHAT_TEMPLATES, folder / _CHAT_TEMPLATES)
