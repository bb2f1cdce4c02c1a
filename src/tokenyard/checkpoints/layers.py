"""Finds the MoE layers of a checkpoint by the names of their tensors, and checks every tensor against their layout.

Everything here works on headers. A layer is accepted when each expert has each tensor of its layout, with the
dtype and the shape that follow from the layer's sizes, and these sizes are those of `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenyard.checkpoints.compressed_tensors import COMPRESSED_LAYOUTS
from tokenyard.checkpoints.config import ModelConfig, quantization_in_words
from tokenyard.checkpoints.header import StoredTensor
from tokenyard.checkpoints.layout import PLAIN_DTYPES, PLAIN_LAYOUTS, Layout, Piece, PlainLayout
from tokenyard.checkpoints.naming import FoundLayer, Projections, tensor_name
from tokenyard.checkpoints.vendor_layouts import DeepSeekFp8, GptOssMxfp4, ModelOptNvfp4
from tokenyard.errors import CheckpointError
from tokenyard.experts.spec import EXACT

# The most experts that are looked for: a typing error in a config must not lead to a search of hours.
_MOST_EXPERTS = 65536

QUANTIZED_LAYOUTS: tuple[Layout, ...] = (*COMPRESSED_LAYOUTS, ModelOptNvfp4(), GptOssMxfp4(), DeepSeekFp8())
LAYOUTS = (*QUANTIZED_LAYOUTS, *PLAIN_LAYOUTS)


@dataclass(frozen=True, kw_only=True)
class CheckpointLayer:
    """One MoE layer of a checkpoint, as the headers of the files and the config describe it."""

    name: str  # the name in the files
    number: int  # the number of the layer in the model; -1 if its name has none
    num_experts: int  # E, the number of experts
    hidden_size: int  # H, the width of a row
    intermediate_size: int  # I, the width between an expert's two products
    projections: Projections  # what the expert's matrices are called
    # Whether gate and up rows of w13 alternate (gpt-oss), rather than all of gate coming first.
    interleaved: bool
    bias: bool  # whether experts have biases
    layout: Layout  # how the tensors of a matrix are stored
    # The format of activations between an expert's two products that the quantization implies (`LayerSpec(inner=…)`).
    inner: str
    # Bytes of all experts' weights, as they lie in the files.
    nbytes: int

    @property
    def weights(self) -> str:
        """The weight format that holds the layer's matrices, as in `LayerSpec(weights=…)`."""
        return self.layout.weights

    @property
    def gated(self) -> bool:
        """Whether w13 has a gate."""
        return self.projections.w13 != ("up_proj",)

    def sizes(self, projection: str) -> tuple[int, int]:
        """Outputs N and inputs D of a projection."""
        H, I = self.hidden_size, self.intermediate_size  # noqa: E741
        if projection == self.projections.w2:
            return H, I
        return (2 * I if projection == "gate_up_proj" else I), H

    def stored(self, expert: int, projection: str, suffix: str) -> tuple[str, int | None]:
        """The name of an expert's tensor; and, if one tensor holds all experts, the index in its first dimension."""
        if self.layout.fused:
            return tensor_name(self.name, None, projection, suffix), expert
        return tensor_name(self.name, expert, projection, suffix), None

    def tensors(self, *, written: bool = False) -> Iterator[tuple[int | None, str, Piece]]:
        """Every tensor that the layer must have: its expert (None: all in one), its projection, and its `Piece`.

        With `written`, also the tensors that conversion writes and reading does not need.
        """
        experts = [None] if self.layout.fused else range(self.num_experts)
        for projection in self.projections.names:
            outputs, inputs = self.sizes(projection)
            pieces = list(self.layout.pieces(outputs, inputs).values())
            pieces += self.layout.written if written else ()
            if self.bias:  # biases are plain, whatever the weights are
                pieces.append(Piece("bias", tuple(PLAIN_DTYPES), (outputs,)))
            for expert in experts:
                for piece in pieces:
                    yield expert, projection, piece


def declared_layout(quantization: Mapping[str, Any]) -> Layout | str:
    """The layout that a `quantization_config` declares; if there is none, its unsupported settings in words.

    >>> str(declared_layout({"quant_method": "fp8", "weight_block_size": [128, 128]}))
    'DeepSeek fp8_block128'
    >>> declared_layout({"quant_method": "awq"})
    "quant_method 'awq'"
    """
    for layout in QUANTIZED_LAYOUTS:
        if layout.declared(quantization):
            return layout.mismatch(quantization) or layout
    return quantization_in_words(quantization)


def recipe_inner(weights: str, quantization: object) -> str:
    """The inner format (`LayerSpec.inner`) that a `quantization_config` implies for experts with such weights.

    >>> recipe_inner("fp8_block128", {"quant_method": "fp8", "activation_scheme": "dynamic"})
    'fp8_block128'
    >>> recipe_inner("bf16", {"quant_method": "fp8", "activation_scheme": "dynamic"})
    'exact'
    """
    if not isinstance(quantization, Mapping):
        return EXACT
    declared = (layout for layout in QUANTIZED_LAYOUTS if layout.declared(quantization))
    return next((layout.inner(quantization) for layout in declared if layout.weights == weights), EXACT)


def read_layer(found: FoundLayer, config: ModelConfig) -> CheckpointLayer:
    """Recognize the layout of a layer, and check the dtype and shape of each of its tensors, by the headers."""
    try:
        return _read_layer(found, config)
    except CheckpointError as error:
        error.at(layer=found.name)
        raise


def _read_layer(found: FoundLayer, config: ModelConfig) -> CheckpointLayer:
    projections = found.projections()
    layout = _recognize(found, projections, config)
    num_experts = _num_experts(found, projections, config)
    hidden, intermediate = _sizes(found, projections, layout, config)
    layer = CheckpointLayer(
        name=found.name,
        number=found.number,
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        projections=projections,
        interleaved=config.model_type == "gpt_oss" and projections.w13 == ("gate_up_proj",),
        bias=any(suffix == "bias" for _, _, suffix in found.tensors),
        layout=layout,
        inner=layout.inner(config.quantization),
        nbytes=0,
    )
    for projection in projections.names:
        if reason := layout.refused(layer.sizes(projection)[1]):
            tensor = _first(found, projection)
            raise _wrong(tensor, f"a {layout.weights} matrix that can be held", reason)
    nbytes = sum(_check(found, layer, config, piece) for piece in layer.tensors())
    _check_nothing_else(found, layer)
    return replace(layer, nbytes=nbytes)


# --- Which layout it is -----------------------------------------------------------------------------------


def _first(found: FoundLayer, projection: str) -> StoredTensor:
    return next(t for (_, p, suffix), t in found.tensors.items() if p == projection and suffix != "bias")


def _recognize(found: FoundLayer, projections: Projections, config: ModelConfig) -> Layout:
    lead = projections.w13[0]
    expert = None if found.fused else min(e for e, _, _ in found.tensors if e is not None)
    present = found.suffixes(expert, lead)
    alike = [layout for layout in LAYOUTS if layout.fused == found.fused and layout.matches(present)]
    looks = [layout for layout in alike if _fits(found, projections, layout)]
    if alike and not looks:
        first, last = found.tensors[None, lead, ""], found.tensors[None, projections.w2, ""]
        raise _wrong(last, f"a shape that fits that of {first.name!r}, {list(first.shape)}")
    declared = [layout for layout in looks if layout.declared(config.quantization)]
    if declared:
        if reason := declared[0].mismatch(config.quantization):
            raise CheckpointError(
                f"{config.file} says {reason}",
                expected=f"{declared[0]}, as tokenyard holds it",
                fix="quantize the model in another way",
                file=config.file,
            )
        return declared[0]
    tensor = next(iter(present.values()), None) or next(iter(found.tensors.values()))
    held = ", ".join(f"{suffix or lead} {t.dtype}{list(t.shape)}" for suffix, t in sorted(present.items()))
    if looks:
        raise tensor.error_at(
            f"{config.file} has {config.quantized_as}, but {tensor.file.name}: tensor {tensor.name!r} is of {looks[0]}",
            expected="a config that says how its weights are quantized",
            fix="take the config.json that belongs to these weights",
        )
    # If the config names a layout of which a tensor is missing or has another dtype, the error names that tensor.
    named = [layout for layout in QUANTIZED_LAYOUTS if layout.declared(config.quantization)]
    for layout in (each for each in named if each.fused == found.fused and each.data in present):
        for piece in layout.pieces(1, 1).values():
            there = present.get(piece.suffix)
            if there is None or there.dtype not in piece.dtypes:
                name = tensor_name(found.name, expert, lead, piece.suffix)
                raise CheckpointError(
                    f"{tensor.file.name}: tensor {name!r} is {'missing' if there is None else there.dtype}",
                    expected=f"{' or '.join(piece.dtypes)}, as {layout} has it",
                    fix="take the config.json that belongs to these weights, or download them again",
                    file=tensor.file,
                    tensor=name,
                )
    raise tensor.error_at(
        f"{tensor.file.name}: the experts of {found.name!r} hold {held} each, and {config.file} has "
        f"{config.quantized_as}",
        expected=f"one of {'; '.join(dict.fromkeys(map(str, LAYOUTS)))}",
        fix="this way of quantizing is not known; requantize the model into one that is",
    )


def _fits(found: FoundLayer, projections: Projections, layout: Layout) -> bool:
    """Whether the shapes of w13 and w2 fit a layout; asked only of plain layouts with all experts in one tensor."""
    if not isinstance(layout, PlainLayout) or not layout.fused:
        return True
    first, last = (found.tensors.get((None, name, "")) for name in (projections.w13[0], projections.w2))
    if first is None or last is None or not len(first.shape) == len(last.shape) == 3:
        return not layout.transposed
    (wide, hidden), (outputs, inner) = layout.size(first.shape[1:]), layout.size(last.shape[1:])
    return hidden == outputs and wide == (2 * inner if projections.w13[0] == "gate_up_proj" else inner)


# --- How large it is --------------------------------------------------------------------------------------


def _num_experts(found: FoundLayer, projections: Projections, config: ModelConfig) -> int:
    """E, the number of experts. Raises if one is missing, or if the config has another number."""
    known = config.num_experts
    if found.fused:
        tensor = _first(found, projections.w13[0])
        number = tensor.shape[0] if tensor.shape else 0
        if number == 0 or number != (known or number):
            raise _wrong(tensor, f"{known or 'some'} experts, as {config.file} says")
        return number
    ids = {expert: t for (expert, _, _), t in found.tensors.items() if expert is not None}
    number = known if known is not None else max(ids) + 1
    if max(ids) >= number:
        tensor = ids[max(ids)]
        raise tensor.error(
            f" is of expert {max(ids)}",
            expected=f"experts 0 to {number - 1}, as {config.file} says",
            fix="take the config.json that belongs to these weights",
        )
    missing = next((expert for expert in range(min(number, _MOST_EXPERTS)) if expert not in ids), None)
    if missing is not None:
        name = f"{found.name}.experts.{missing}"
        raise found.error(
            f"expert {missing} is missing: no tensor is called {name}.…",
            expected=f"{number} experts" + ("" if known is None else f", as {config.file} says"),
            fix="check that all files of the checkpoint are there, and that the config belongs to them",
            tensor=name,
        )
    return number


def _sizes(
    found: FoundLayer, projections: Projections, layout: Layout, config: ModelConfig
) -> tuple[int, int]:
    """H and I from the config; a size that the config lacks follows from the first tensor of w13."""
    lead, dimensions = projections.w13[0], len(layout.pieces(1, 1)["data"].shape)
    # This tensor exists, because the layout was recognized by it.
    first = next(t for (_, p, suffix), t in found.tensors.items() if (p, suffix) == (lead, layout.data))
    shape = first.shape[1:] if layout.fused else first.shape
    if len(shape) != dimensions:
        raise _wrong(first, f"{dimensions} dimensions for each expert")
    outputs, inputs = layout.size(shape)
    intermediate = outputs // 2 if lead == "gate_up_proj" else outputs
    hidden = inputs if config.hidden_size is None else config.hidden_size
    return hidden, intermediate if config.intermediate_size is None else config.intermediate_size


# --- Every tensor -----------------------------------------------------------------------------------------


def _check(
    found: FoundLayer, layer: CheckpointLayer, config: ModelConfig, expected: tuple[int | None, str, Piece]
) -> int:
    """Raise unless an expected tensor is present, with its dtype and shape. Returns its bytes."""
    expert, projection, piece = expected
    tensor = found.tensors.get((expert, projection, piece.suffix))
    if tensor is None:
        name = tensor_name(layer.name, expert, projection, piece.suffix)
        raise found.error(
            f"tensor {name!r} is missing",
            expected=f"it with the other tensors of {layer.layout} experts",
            fix="check that all files of the checkpoint are there",
            tensor=name,
        )
    shape = piece.shape if expert is not None else (layer.num_experts, *piece.shape)
    if tensor.dtype not in piece.dtypes or tensor.shape != shape:
        because = (
            f": hidden size {layer.hidden_size}, intermediate size {layer.intermediate_size}, "
            f"{layer.num_experts} experts, as {config.file.name} and the other tensors say"
        )
        raise _wrong(tensor, f"{' or '.join(piece.dtypes)}{list(shape)}{because}")
    return tensor.nbytes


def _check_nothing_else(found: FoundLayer, layer: CheckpointLayer) -> None:
    """Raise if the experts have a tensor that is not part of the layout, and that nothing would read."""
    known = {piece.suffix for piece in layer.layout.pieces(1, 1).values()} | {"bias", *layer.layout.unread}
    for (expert, _, suffix), tensor in found.tensors.items():
        if suffix not in known or (expert is None) != layer.layout.fused:
            names = ", ".join(sorted(filter(None, known)))
            raise _wrong(tensor, f"{names}, as {layer.layout} has it: no layer reads this tensor")


def _wrong(tensor: StoredTensor, expected: str, why: str = "") -> CheckpointError:
    found = f" is {tensor.dtype}{list(tensor.shape)}" + (f": {why}" if why else "")
    fix = "take the config.json that belongs to these weights, or download them again"
    return tensor.error(found, expected=expected, fix=fix)
