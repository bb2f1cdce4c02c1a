"""State dicts of experts: one layout on every device, that of `ExpertWeights.by_name()`.

    plain weights   w13, w2
    quantized       w13_data, w13_scales, w2_data, w2_scales (nvfp4: also w13_global_scale, w13_global_factor, …)
    biases          b13, b2

Experts that hold their weights in another form for their kernels (`fused.kernel_weights`) save them in this layout,
and bring them into their form when they load them. Until version 0.2 a state dict had the names and the form of the
kernels of one GPU. `convert_old` brings such tensors into the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tokenyard.experts.spec import ExpertsSpec
from tokenyard.formats import QuantizedMatrix, weight_format

MATRICES = ("w13", "w2")
Declared = tuple[torch.dtype, tuple[int, ...]]  # the dtype and the shape of a tensor


def layout(spec: ExpertsSpec, matrix: str) -> dict[str, Declared]:
    """The dtypes and shapes of the tensors of one matrix, by their names in a state dict.

    >>> from tokenyard.experts import activation
    >>> spec = ExpertsSpec(hidden_size=64, intermediate_size=32, num_local_experts=2, top_k=1,
    ...     activation=activation("swiglu"), weights="mxfp4")
    >>> layout(spec, "w2")["w2_scales"]
    (torch.uint8, (2, 64, 1))
    """
    experts, outputs, inputs = spec.shapes()[matrix]
    format = weight_format(spec.weights)
    return {
        f"{matrix}_{name}" if format.quantized else matrix: (p.dtype, (experts, *p.shape))
        for name, p in format.payloads(outputs, inputs).items()
    }


def wrong_dtypes(spec: ExpertsSpec, state: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """What is wrong with tensors of quantized matrices in another dtype: copying would convert codes as if numbers."""
    if not weight_format(spec.weights).quantized:
        return {}
    return {
        key: f"dtype mismatch for {key}: {found.dtype} in the state dict, {dtype} in the layer, for "
        f"{spec.weights} weights; if it has the same bytes, pass `tensor.view({dtype})`."
        for key, found, (dtype, _) in _found(spec, state, prefix)
        if found.dtype != dtype
    }


def wrong_shapes(spec: ExpertsSpec, state: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """What is wrong with tensors of matrices in another shape, in the words of `nn.Module.load_state_dict`."""
    return {
        key: f"size mismatch for {key}: copying a param with shape {found.shape} from checkpoint, the shape in "
        f"current model is {torch.Size(shape)}."
        for key, found, (_, shape) in _found(spec, state, prefix)
        if tuple(found.shape) != shape
    }


def _found(
    spec: ExpertsSpec, state: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Tensor, Declared]]:
    """The tensors of matrices that a state dict has, by key, with what the layout declares."""
    for matrix in MATRICES:
        for name, declared in layout(spec, matrix).items():
            if isinstance(found := state.get(prefix + name), Tensor):
                yield prefix + name, found, declared


def convert_old(spec: ExpertsSpec, state: MutableMapping[str, Any], prefix: str) -> None:
    """Replace the tensors of this prefix that are in a kernel's form, as older files have them, by those of the layout.

    Tensors that this spec's weights cannot have been held in stay, and are reported as unexpected.
    """
    for matrix in MATRICES:
        for names, convert in _OLD_FORMS:
            old = [state.get(f"{prefix}{matrix}_{name}") for name in names]
            if any(tensor is None for tensor in old):
                continue
            found = convert(spec, matrix, *old)
            if found is not None:
                for name in names:
                    del state[f"{prefix}{matrix}_{name}"]
                state.update({prefix + name: tensor for name, tensor in found.items()})


def _from_boxes(spec: ExpertsSpec, matrix: str, boxes: Tensor) -> dict[str, Tensor] | None:
    from tokenyard.experts.fused.boxes import LINES, UNITS, unbox

    whole = boxes.dim() == 3 and all(size % LINES == 0 for size in boxes.shape[1:])
    if spec.weights not in UNITS or not whole:
        return None
    name = f"{matrix}_data" if weight_format(spec.weights).quantized else matrix
    return {name: unbox(boxes, UNITS[spec.weights])}


def _from_words(spec: ExpertsSpec, matrix: str, words: Tensor, scales: Tensor) -> dict[str, Tensor] | None:
    from tokenyard.experts.fused import packing

    shape, gated = spec.shapes()[matrix], matrix == "w13"
    if spec.weights not in packing.LARGEST_SCALE:
        return None
    if [(t.dtype, t.numel()) for t in (words, scales)] != [*packing.sizes(spec.weights, shape).values()]:
        return None
    interleaved = gated and spec.activation.interleaved
    packed = packing.PackedMatrix(spec.weights, shape, gated, interleaved, words, scales, None, None)
    return {f"{matrix}_{name}": tensor for name, tensor in packing.unpack(packed).items()}


def _from_blocks(spec: ExpertsSpec, matrix: str, data: Tensor, scales: Tensor) -> dict[str, Tensor] | None:
    from tokenyard.experts.fused import recoding

    if spec.weights != "mxfp8" or data.dim() != 3:
        return None
    format, (experts, *sizes) = weight_format("fp8_block128"), data.shape
    declared = format.payloads(*sizes)
    found = {"data": data, "scales": scales}
    if any((found[name].dtype, tuple(found[name].shape[1:])) != p for name, p in declared.items()):
        return None
    blocks = QuantizedMatrix(format=format, shape=(experts, *sizes), payloads=found)
    return {f"{matrix}_{name}": tensor for name, tensor in recoding.give_back(blocks).items()}


# The names of a matrix's tensors in each form of older files, and the function that brings them into the layout.
_OLD_FORMS: tuple[tuple[tuple[str, ...], Callable[..., dict[str, Tensor] | None]], ...] = (
    (("boxes",), _from_boxes),
    (("words", "word_scales"), _from_words),
    (("blocks", "block_scales"), _from_blocks),
)
