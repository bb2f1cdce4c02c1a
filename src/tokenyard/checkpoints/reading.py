"""Reads the weights of chosen experts, without decoding them, and their scales first.

The weights of L experts are laid out as `ExpertWeights` holds them: gate and up of one expert concatenated to one
matrix, and the matrices of all experts in one tensor. Scales are a few percent of the bytes, and damaged files often
show in them, so they are read and checked before anything large is allocated.

Files hold a tensor for each expert, projection and payload (such as `weight_scale` of `gate_proj` of expert 3), where
`ExpertWeights` holds one tensor per payload for all experts. A `PackedMatrix` is filled with the tensors of files, in
any order; `PackedMatrix.share` is the part of its payload that one tensor fills.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from tokenyard.checkpoints.files import TensorFiles
from tokenyard.checkpoints.header import DTYPES
from tokenyard.checkpoints.layers import CheckpointLayer
from tokenyard.checkpoints.layout import Layout, Piece
from tokenyard.checkpoints.writer import SPELLINGS
from tokenyard.errors import CheckpointError
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import QuantizedMatrix


class PackedMatrix:
    """One matrix of several experts (w13 or w2), made of `parts` projections each, in a layout's weight format.

    >>> from tokenyard.checkpoints import declared_layout
    >>> packed = PackedMatrix(declared_layout({"quant_method": "mxfp4"}), (8, 64, 32), parts=1)
    >>> packed.fill("scales", 3, 0, torch.full((64, 1), 127, dtype=torch.uint8))
    >>> packed.fill("data", 3, 0, torch.full((64, 1, 16), 0x22, dtype=torch.uint8))
    >>> packed.matrix()[3].decode().unique()
    tensor([1.])
    """

    def __init__(self, layout: Layout, shape: tuple[int, int, int], parts: int) -> None:
        self.layout = layout  # how the tensors lie in files
        self.shape = shape  # experts, outputs, inputs
        self.parts = parts  # projections of one expert in the matrix: gate and up, or one
        self._held: dict[str, Tensor] = {}
        self._joined: dict[str, Tensor] = {}

    @property
    def outputs(self) -> int:
        """The outputs of one projection."""
        return self.shape[1] // self.parts

    @property
    def payloads(self) -> tuple[str, ...]:
        """The names of all payloads of the weight format, including those that no tensor of the files holds."""
        return tuple(self.layout.format.payloads(*self.shape[1:]))

    @property
    def pieces(self) -> dict[str, Piece]:
        """The tensors that files have of one projection of one expert, by the payload that each becomes."""
        return self.layout.pieces(self.outputs, self.shape[2])

    def is_joined(self, payload: str) -> bool:
        """Whether gate and up share blocks of this payload, so that it must be joined after both are filled."""
        return payload == "scales" and self.layout.overlaps(self.outputs, self.parts)

    def held(self, payload: str) -> Tensor:
        """The tensor that holds a payload of all experts, allocated on first use."""
        if payload not in self._held:
            many, outputs, inputs = self.shape
            declared = self.layout.format.payloads(outputs, inputs)[payload]
            shape = declared.shape
            if self.is_joined(payload):
                rows, *rest = self.pieces[payload].shape
                shape = (self.parts * rows, *rest)
            self._held[payload] = torch.empty(many, *shape, dtype=declared.dtype)
            if payload in self.layout.constants:
                self._held[payload].fill_(self.layout.constants[payload])
        return self._held[payload]

    def share(self, payload: str, place: int, part: int) -> Tensor:
        """The part of a payload that belongs to one projection (`part`) of the expert at `place`, as a view."""
        return self.held(payload)[place].chunk(self.parts)[part]

    def mismatch(self, payload: str, stored: Tensor) -> str | None:
        """None, or the dtypes and the shape that a tensor of one projection of one expert should have instead."""
        piece = self.pieces[payload]
        same_rows = stored.dim() < 2 or stored.shape[0] == piece.shape[0]
        fits = SPELLINGS.get(stored.dtype) in piece.dtypes and stored.numel() == math.prod(piece.shape)
        return None if fits and same_rows else f"{' or '.join(piece.dtypes)}{list(piece.shape)}"

    def fill(self, payload: str, place: int, part: int, stored: Tensor) -> None:
        """Write a payload of one projection of one expert, from its tensor in a file."""
        self.layout.fill(payload, stored, self.share(payload, place, part))

    def check(self, payload: str, place: int, part: int, named: str, **where: Any) -> None:
        """Raise if a scale of one projection of one expert is not a usable number. Errors begin with `named`."""
        if payload == "data":
            return
        scales = self.share(payload, place, part)
        numbers = scales.float()
        if scales.dtype == torch.uint8:  # E8M0
            wrong, kind = scales == 255, "NaN (E8M0 byte 255)"
        elif payload == "global_scale":  # values are divided by it
            wrong, kind = ~numbers.isfinite() | (numbers == 0), "NaN, infinite or zero"
        else:
            wrong, kind = ~numbers.isfinite(), "NaN or infinite"
        if bool(wrong.any()):
            raise CheckpointError(
                f"{named}, is {kind} at {wrong.nonzero()[0].tolist()} and {int(wrong.sum()) - 1} further places",
                expected="scales that are finite numbers",
                fix="quantize the model again, or download it again: what these scales belong to would be garbage",
                **where,
            )

    def join(self, payload: str, place: int, named: str, **where: Any) -> None:
        """Join an expert's scales of gate and up; raise if those of shared blocks differ. Errors begin with `named`."""
        whole = self.layout.join(list(self.held(payload)[place].chunk(self.parts)), self.outputs)
        if whole is None:
            raise CheckpointError(
                f"{named} have {self.outputs} rows each and different scales, and would share blocks as one matrix",
                expected="a multiple of 128 rows, or one scale for all blocks from the gate's last on",
                fix="convert the plain checkpoint with `tokenyard convert`, which gives them one scale",
                **where,
            )
        self._finished(payload)[place] = whole

    def _finished(self, payload: str) -> Tensor:
        """A payload of all experts in the shape that the format declares, joined where projections share blocks."""
        if not self.is_joined(payload):
            return self.held(payload)
        if payload not in self._joined:
            shape = self.layout.format.payloads(*self.shape[1:])[payload].shape
            self._joined[payload] = self.held(payload).new_empty(self.shape[0], *shape)
        return self._joined[payload]

    def matrix(self) -> Tensor | QuantizedMatrix:
        """The weights of all experts; call it after all payloads are filled, and joined where `is_joined` says so."""
        named = {payload: self._finished(payload) for payload in self.payloads}
        format = self.layout.format
        if not format.quantized:
            return named["data"]
        return QuantizedMatrix(format=format, shape=self.shape, payloads=named)


class ExpertReading:
    """Reads some experts of one layer: `check_scales`, then `finish`."""

    def __init__(self, files: TensorFiles, layer: CheckpointLayer, experts: Sequence[int]) -> None:
        self._files, self._layer = files, layer
        self._experts = [self._checked(expert) for expert in experts]
        self._packed: dict[str, PackedMatrix] = {}

    def _checked(self, expert: int) -> int:
        try:
            number = index(expert)
        except TypeError:
            number = -1
        if not 0 <= number < self._layer.num_experts:
            raise CheckpointError(
                f"expert {expert!r} was asked for",
                expected=f"ids from 0 to {self._layer.num_experts - 1}",
                fix="pass global expert ids of this layer",
                layer=self._layer.name,
            )
        return number

    @property
    def _matrices(self) -> dict[str, tuple[str, ...]]:
        return {"w13": self._layer.projections.w13, "w2": (self._layer.projections.w2,)}

    def _shape(self, matrix: str) -> tuple[int, int, int]:
        sizes = [self._layer.sizes(projection) for projection in self._matrices[matrix]]
        return len(self._experts), sum(outputs for outputs, _ in sizes), sizes[0][1]

    def check_scales(self) -> None:
        """Read the scales, which are small. Raises if one is NaN, infinite, or otherwise unusable."""
        self._packed = {
            matrix: PackedMatrix(self._layer.layout, self._shape(matrix), len(projections))
            for matrix, projections in self._matrices.items()
        }
        for matrix, packed in self._packed.items():
            for payload in packed.payloads:
                if payload != "data":
                    self._read(matrix, payload)

    def finish(self) -> ExpertWeights:
        """Read the elements and the biases, and return the weights."""
        if not self._packed:
            self.check_scales()
        parts = {}
        for matrix, packed in self._packed.items():
            self._read(matrix, "data")
            parts[matrix] = packed.matrix()
        biases = {}
        if self._layer.bias:
            biases = {name: self._read_bias(matrix) for name, matrix in (("b13", "w13"), ("b2", "w2"))}
        return ExpertWeights(**parts, **biases)  # type: ignore[arg-type]

    def _read(self, matrix: str, payload: str) -> None:
        """Read, check and join a payload of the chosen experts."""
        layer, packed = self._layer, self._packed[matrix]
        if payload in layer.layout.constants:
            return
        for place, expert in enumerate(self._experts):
            for number, projection in enumerate(self._matrices[matrix]):
                suffix = layer.layout.pieces(*layer.sizes(projection))[payload].suffix
                name, among = layer.stored(expert, projection, suffix)
                with self._files.view(name, among) as stored:
                    packed.fill(payload, place, number, stored)
                file = self._files.tensors[name].file
                tensor = f"{file.name}: tensor {name!r}"
                where = {"file": file, "tensor": name, "layer": layer.name}
                packed.check(payload, place, number, f"{tensor}, of expert {expert}", **where)
            if packed.is_joined(payload):
                packed.join(payload, place, f"{tensor}: gate and up of expert {expert}", **where)

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """The dtype of the layer's biases."""
        name, _ = self._layer.stored(0, self._layer.projections.w2, "bias")
        return DTYPES[self._files.tensors[name].dtype][1]

    def _read_bias(self, matrix: str) -> Tensor:
        layer, projections = self._layer, self._matrices[matrix]
        many, outputs, _ = self._shape(matrix)
        out = torch.empty(many, outputs, dtype=self.bias_dtype)
        for place, expert in enumerate(self._experts):
            for projection, share in zip(projections, out[place].chunk(len(projections)), strict=True):
                name, among = layer.stored(expert, projection, "bias")
                with self._files.view(name, among) as stored:
                    share.copy_(stored)
        return out
