"""Reading experts: only those that are asked for, without decoding, scales first.

The weights of L experts are laid out as the experts hold them: gate and up of one expert in one matrix, one
behind the other, and all experts in one tensor. Scales are a few percent of the bytes and tell whether a file is
good, so they are read and checked before anything large is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from tokenyard.checkpoints.files import TensorFiles
from tokenyard.checkpoints.header import DTYPES
from tokenyard.checkpoints.layers import CheckpointLayer
from tokenyard.errors import CheckpointError
from tokenyard.experts.base import ExpertWeights
from tokenyard.formats import QuantizedMatrix


class ExpertReading:
    """Reads some experts of one layer: `check_scales`, then `finish`."""

    def __init__(self, files: TensorFiles, layer: CheckpointLayer, experts: Sequence[int]) -> None:
        self._files, self._layer = files, layer
        self._experts = [self._checked(expert) for expert in experts]
        self._payloads: dict[str, dict[str, Tensor]] = {}

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
        """Read the scales, which are small. Raises if one is not a number."""
        self._payloads = {matrix: {} for matrix in self._matrices}
        format = self._layer.layout.format
        for matrix, held in self._payloads.items():
            for payload in format.payloads(*self._shape(matrix)[1:]):
                if payload != "data":
                    held[payload] = self._read(matrix, payload)

    def finish(self) -> ExpertWeights:
        """Read the rest."""
        if not self._payloads:
            self.check_scales()
        layer, parts = self._layer, {}
        for matrix, held in self._payloads.items():
            # In the order that the format declares.
            named = {"data": self._read(matrix, "data"), **held}
            parts[matrix] = (
                QuantizedMatrix(format=layer.layout.format, shape=self._shape(matrix), payloads=named)
                if layer.layout.format.quantized
                else named["data"]
            )
        biases = {}
        if layer.bias:
            biases = {name: self._read_bias(matrix) for name, matrix in (("b13", "w13"), ("b2", "w2"))}
        return ExpertWeights(**parts, **biases)  # type: ignore[arg-type]

    def _read(self, matrix: str, payload: str) -> Tensor:
        """A payload of all experts asked for."""
        layer, layout = self._layer, self._layer.layout
        many, outputs, inputs = self._shape(matrix)
        declared = layout.format.payloads(outputs, inputs)[payload]
        out = torch.empty(many, *declared.shape, dtype=declared.dtype)
        if payload in layout.constants:
            return out.fill_(layout.constants[payload])
        projections = self._matrices[matrix]
        joined = payload == "scales" and layout.overlaps(outputs // len(projections), len(projections))
        for place, expert in enumerate(self._experts):
            # Every payload has rows, in the order of the matrix's: each projection gets its share of them.
            shares: Sequence[Tensor] = () if joined else out[place].chunk(len(projections))
            for number, projection in enumerate(projections):
                piece = layout.pieces(*layer.sizes(projection))[payload]
                if joined:
                    shares = (*shares, torch.empty(piece.shape, dtype=declared.dtype))
                name, among = layer.stored(expert, projection, piece.suffix)
                with self._files.view(name, among) as stored:
                    layout.fill(payload, stored, shares[number])
                if payload != "data":
                    self._check_numbers(shares[number], payload, name, expert)
            if joined:
                together = layout.join(list(shares), outputs // len(projections))
                if together is None:
                    raise self._apart(name, expert, outputs // len(projections))
                out[place] = together
        return out

    def _apart(self, name: str, expert: int, outputs: int) -> CheckpointError:
        """The error for gate and up scales that differ, where the format holds one for both."""
        file = self._files.tensors[name].file
        return CheckpointError(
            f"{file.name}: tensor {name!r}: gate and up of expert {expert} have {outputs} rows each and different "
            "scales, and would share blocks as one matrix",
            expected="a multiple of 128 rows, or one scale for all blocks from the gate's last on",
            fix="convert the plain checkpoint with `tokenyard convert`, which gives them one scale",
            file=file,
            tensor=name,
            layer=self._layer.name,
        )

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

    def _check_numbers(self, scales: Tensor, payload: str, name: str, expert: int) -> None:
        """Raise unless scales are numbers that can be worked with."""
        if scales.dtype == torch.uint8:  # E8M0
            wrong, told = scales == 255, "NaN (E8M0 byte 255)"
        else:
            numbers = scales.float()
            wrong, told = ~numbers.isfinite(), "NaN or infinite"
            if payload == "global_scale":  # what values are divided by
                wrong, told = wrong | (numbers == 0), "NaN, infinite or zero"
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise CheckpointError(
                f"{self._files.tensors[name].file.name}: tensor {name!r}, of expert {expert}, is {told} at {place} "
                f"and {int(wrong.sum()) - 1} further places",
                expected="scales that are finite numbers",
                fix="quantize the model again, or download it again: what these scales belong to would be garbage",
                file=self._files.tensors[name].file,
                tensor=name,
                layer=self._layer.name,
            )
