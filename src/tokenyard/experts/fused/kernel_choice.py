"""Which kernels can compute a layer's products on a device, by its GPU and the layer's sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from tokenyard.experts.fused import boxes, packing, recoding
from tokenyard.experts.fused.tile_configs import SPLIT_BLOCK
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import QuantizedMatrix


def has_packed_kernels(spec: ExpertsSpec, device: torch.device) -> bool:
    """Whether kernels for packed weights can compute a layer's products on a device, if its weights can be packed."""
    if spec.weights not in packing.LARGEST_SCALE or not spec.activation.gated:
        return False
    # Rows are copied 16 bytes at a time.
    return _is_hopper(device) and spec.hidden_size % 8 == 0 and spec.intermediate_size % 8 == 0


def can_run_packed(spec: ExpertsSpec, weights: ExpertWeights) -> bool:
    """Whether these weights can be packed for Hopper's tensor cores; if not, plain Triton kernels are used."""
    return has_packed_kernels(spec, weights.w13.device) and all(map(packing.can_pack, _matrices(weights)))


def interprets() -> bool:
    """Whether Triton interprets its kernels, wherever the rows are."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes_e4m3(device: torch.device) -> bool:
    """Whether kernels on this device can multiply e4m3: on tensor cores from Ada on, and in Triton's interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "cpu" and interprets()


def can_run_recoded(spec: ExpertsSpec, weights: ExpertWeights) -> bool:
    """Whether these weights can be recoded to blocks of e4m3; if not, kernels decode them in registers."""
    if spec.weights != "mxfp8" or not takes_e4m3(weights.w13.device):
        return False
    return all(map(recoding.can_recode, _matrices(weights)))


def can_run_specialized(spec: ExpertsSpec, device: torch.device) -> bool:
    """Whether `kernels.specialized` can compute a layer's products on a device, if the rows allow it, too.

    It needs Hopper. With 16-bit weights, it needs a gate and sizes that are multiples of 8, and, if gate and up are
    interleaved, an H that is a multiple of 64. With other weights, `has_blocks` must hold.
    """
    if not _is_hopper(device):
        return False
    sizes, interleaved = (spec.hidden_size, spec.intermediate_size), spec.activation.interleaved
    if spec.weights in ("bf16", "fp16"):
        whole = all(size % 8 == 0 for size in sizes) and (not interleaved or spec.hidden_size % 64 == 0)
        return spec.activation.gated and whole
    return has_blocks(spec)


def can_run_boxed(spec: ExpertsSpec, device: torch.device) -> bool:
    """Whether weights can be held box by box (`boxes`): matrices are whole boxes, and `kernels.specialized` reads them.

    Gate and up must not be interleaved: a box then holds 128 lines of one of them.
    """
    if spec.weights not in boxes.UNITS or spec.activation.interleaved:
        return False
    whole = spec.hidden_size % boxes.LINES == 0 and spec.intermediate_size % boxes.LINES == 0
    return whole and can_run_specialized(spec, device)


def has_blocks(spec: ExpertsSpec) -> bool:
    """Whether a layer has an inner format, a gate that is not interleaved, and sizes that are multiples of 128."""
    whole = spec.hidden_size % SPLIT_BLOCK == 0 and spec.intermediate_size % SPLIT_BLOCK == 0
    return spec.inner is not None and spec.activation.gated and not spec.activation.interleaved and whole


def can_run_codes(spec: ExpertsSpec) -> bool:
    """Whether packed weights may be decoded to e4m3 codes as they are multiplied, which needs an inner format."""
    return spec.weights == "mxfp4" and spec.inner is not None and spec.activation.gated


def can_run_expanded(spec: ExpertsSpec, weights: ExpertWeights) -> bool:
    """Whether packed weights can be expanded to blocks of e4m3 for many rows, within the error bound of `recoding`."""
    if spec.weights != "mxfp4" or not can_run_specialized(spec, weights.w13.device):
        return False
    return all(map(recoding.can_recode, _matrices(weights)))


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _matrices(weights: ExpertWeights) -> Iterator[QuantizedMatrix]:
    """Both matrices of weights in a quantized format."""
    for matrix in (weights.w13, weights.w2):
        assert isinstance(matrix, QuantizedMatrix)
        yield matrix
