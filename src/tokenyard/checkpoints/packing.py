"""The weights of several experts, packed: filled tensor by tensor, as files have them, in any order.

A file has a tensor for each expert, projection and payload (`gate_proj` of expert 3: `weight_scale`). Experts hold a
tensor for each payload, of all experts, with gate and up one behind the other. `PackedMatrix.share` is the place of
one in the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tokenyard.checkpoints.layout import Layout, Piece
from tokenyard.checkpoints.writer import SPELLINGS
from tokenyard.errors import CheckpointError
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
        """The names of the payloads, those without a tensor in the files among them."""
        return tuple(self.layout.format.payloads(*self.shape[1:]))

    @property
    def pieces(self) -> dict[str, Piece]:
        """The tensors that files have of one projection of one expert, by the payload that each becomes."""
        return self.layout.pieces(self.outputs, self.shape[2])

    def is_joined(self, payload: str) -> bool:
        """Whether projections share numbers of this payload, which are put together when all are there."""
        return payload == "scales" and self.layout.overlaps(self.outputs, self.parts)

    def held(self, payload: str) -> Tensor:
        """The tensor that a payload of all experts is written to; allocated when it is asked for first."""
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
        """The place of one projection of one expert in a payload: every payload has rows in the matrix's order."""
        return self.held(payload)[place].chunk(self.parts)[part]

    def mismatch(self, payload: str, stored: Tensor) -> str | None:
        """None, or what a tensor of a file should be instead, to be one projection's of one expert."""
        piece = self.pieces[payload]
        same_rows = stored.dim() < 2 or stored.shape[0] == piece.shape[0]
        fits = SPELLINGS.get(stored.dtype) in piece.dtypes and stored.numel() == math.prod(piece.shape)
        return None if fits and same_rows else f"{' or '.join(piece.dtypes)}{list(piece.shape)}"

    def fill(self, payload: str, place: int, part: int, stored: Tensor) -> None:
        """Write what a file has of one projection of one expert to its place."""
        self.layout.fill(payload, stored, self.share(payload, place, part))

    def unusable(self, payload: str, place: int, part: int) -> str | None:
        """None, or which scales of one projection of one expert cannot be worked with, and what those are."""
        if payload == "data":
            return None
        scales = self.share(payload, place, part)
        numbers = scales.float()
        if scales.dtype == torch.uint8:  # E8M0
            wrong, kind = scales == 255, "NaN (E8M0 byte 255)"
        elif payload == "global_scale":  # what values are divided by
            wrong, kind = ~numbers.isfinite() | (numbers == 0), "NaN, infinite or zero"
        else:
            wrong, kind = ~numbers.isfinite(), "NaN or infinite"
        if not bool(wrong.any()):
            return None
        return f"{kind} at {wrong.nonzero()[0].tolist()} and {int(wrong.sum()) - 1} further places"

    def scales_apart(self, expert: str, **where: Any) -> CheckpointError:
        """The error for an expert whose projections `join` could not put together."""
        return CheckpointError(
            f"{expert} have {self.outputs} rows each and different scales, and would share blocks as one matrix",
            expected="a multiple of 128 rows, or one scale for all blocks from the gate's last on",
            fix="convert the plain checkpoint with `tokenyard convert`, which gives them one scale",
            **where,
        )

    def join(self, payload: str, place: int) -> bool:
        """Put together what an expert's projections share of a payload; False if theirs do not fit together."""
        whole = self.layout.join(list(self.held(payload)[place].chunk(self.parts)), self.outputs)
        if whole is None:
            return False
        self._finished(payload)[place] = whole
        return True

    def _finished(self, payload: str) -> Tensor:
        """A payload as the format declares it."""
        if not self.is_joined(payload):
            return self.held(payload)
        if payload not in self._joined:
            shape = self.layout.format.payloads(*self.shape[1:])[payload].shape
            self._joined[payload] = self.held(payload).new_empty(self.shape[0], *shape)
        return self._joined[payload]

    def matrix(self) -> Tensor | QuantizedMatrix:
        """The weights as experts take them, when everything is filled, and joined where it must be."""
        named = {payload: self._finished(payload) for payload in self.payloads}
        format = self.layout.format
        if not format.quantized:
            return named["data"]
        return QuantizedMatrix(format=format, shape=self.shape, payloads=named)
