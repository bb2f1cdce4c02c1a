"""The weights of fused experts, as their kernels read them.

They are held in the payloads of their format, with three exceptions:

    packed    4-bit weights, on Hopper (`packing`)
    recoded   mxfp8 weights, as blocks of e4m3, on GPUs whose tensor cores multiply e4m3 (`recoding`)
    boxed     bf16, fp16 and fp8_block128 weights, on Hopper: the same bytes in the order in which they are loaded
              (`boxes`), if the layer can use the kernel with specialized warps

Such weights are in buffers of other names, so that a state_dict with another form is refused. They change their form
when the experts move to a device whose kernels read another one.

Weights are boxed in place, expert by expert. Adopted tensors are not boxed, since whoever gave them may still read
them, or write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.experts.base import Experts
from tokenyard.experts.fused import packing, recoding
from tokenyard.experts.fused.boxes import UNITS, box, unbox
from tokenyard.experts.fused.kernel_choice import (
    can_run_boxed,
    can_run_codes,
    can_run_expanded,
    can_run_packed,
    can_run_recoded,
    takes_e4m3,
)
from tokenyard.experts.fused.packing import PackedMatrix
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import QuantizedMatrix, weight_format

# The names of the buffers that hold a quantized matrix: as given, packed, or recoded. Boxes are in `w13_boxes`.
_GIVEN = ("data", "scales")
_PACKED = ("words", "word_scales")
_RECODED = ("blocks", "block_scales")


class KernelWeights(Experts):
    """Experts that hold their weights as the fused kernels read them. Computing is left to `FusedExperts`."""

    recodes: bool = True  # whether mxfp8 weights are held as blocks of e4m3 where that is faster
    expands: bool = True  # whether packed mxfp4 weights are expanded to such blocks for calls with many rows
    boxes: bool = True  # whether weights that are not adopted are held box by box where that is faster

    def __init__(self, spec: ExpertsSpec, weights: ExpertWeights, *, adopt: bool = False) -> None:
        super().__init__(spec, weights, adopt=adopt)
        self._adopted = adopt
        self._hold_for_kernels()

    @property
    def is_packed(self) -> bool:
        """Whether weights are held in the order of Hopper's tensor cores."""
        return "w2_words" in self._buffers

    @property
    def is_recoded(self) -> bool:
        """Whether mxfp8 weights are held as blocks of e4m3 (`recoding`)."""
        return "w2_blocks" in self._buffers

    @property
    def is_boxed(self) -> bool:
        """Whether weights are held box by box (`boxes`)."""
        return "w2_boxes" in self._buffers

    @property
    def is_expandable(self) -> bool:
        """Whether packed weights can be expanded to blocks of e4m3 within the error bound of `recoding`."""
        return "w2_bases" in self._buffers

    @property
    def has_codes(self) -> bool:
        """Whether packed weights can be decoded to e4m3 codes without rounding."""
        return "w2_largest" in self._buffers

    @property
    def held_format(self) -> str:
        """The format of the weights that the kernels read: that of the spec, or `fp8_block128` if they are recoded."""
        return "fp8_block128" if self.is_recoded else self.spec.weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weights with the model, and hold them as the kernels of the new device need."""
        super()._apply(fn, recurse)
        device = next(self.buffers()).device
        if (self.is_packed and device.type != "cuda") or (self.is_recoded and not takes_e4m3(device)):
            self._hold_as_given()
        elif self.is_boxed and not can_run_boxed(self.spec, device):
            self._unbox()
        self._hold_for_kernels()
        return self

    def _hold_as_given(self) -> None:
        """Replace packed or recoded weights by the payloads of their format."""
        for name in ("w13", "w2"):
            matrix = self._part(name, self.spec.shapes()[name])
            assert isinstance(matrix, QuantizedMatrix)
            held = [f"{name}_{part}" for part in (_PACKED if self.is_packed else _RECODED)]
            derived = [part for part in (f"{name}_bases", f"{name}_largest") if part in self._buffers]
            given = {f"{name}_{payload}": matrix.payloads[payload] for payload in _GIVEN}
            self._replace([*derived, *held], given)

    def _hold_for_kernels(self) -> None:
        """Pack, recode or box the weights, if that is faster on this device; the given payloads are dropped."""
        if self.is_packed or self.is_recoded or self.is_boxed:
            return
        if self.boxes and not self._adopted and can_run_boxed(self.spec, next(self.buffers()).device):
            self._box()
            return
        is_packed = can_run_packed(self.spec, self.weights)
        if not is_packed and not (self.recodes and can_run_recoded(self.spec, self.weights)):
            return
        expands = is_packed and self.expands and can_run_expanded(self.spec, self.weights)
        largest = self._largest_scales(self.weights) if is_packed and can_run_codes(self.spec) else {}
        for name in ("w13", "w2"):
            matrix = self._part(name, self.spec.shapes()[name])
            assert isinstance(matrix, QuantizedMatrix)
            if largest:
                self.register_buffer(f"{name}_largest", largest[name], persistent=False)
            if expands:
                bases = recoding.block_scales(matrix, matrix.device)
                self.register_buffer(f"{name}_bases", bases, persistent=False)
            if is_packed:
                packed = self._pack(name, matrix)
                made = dict(zip(_PACKED, (packed.words, packed.scales), strict=True))
            else:
                made = dict(zip(_RECODED, recoding.recode(matrix).payloads.values(), strict=True))
            given = [f"{name}_{part}" for part in _GIVEN]
            self._replace(given, {f"{name}_{part}": tensor for part, tensor in made.items()})

    def _given_name(self, name: str) -> str:
        """The name of the buffer that holds the numbers of a matrix in the given order."""
        return f"{name}_data" if weight_format(self.spec.weights).quantized else name

    def _box(self) -> None:
        """Bring the weights into the order of boxes, in place."""
        for name in ("w13", "w2"):
            given = self.get_buffer(self._given_name(name))
            held = box(given, UNITS[self.spec.weights], into=given)
            self._replace([self._given_name(name)], {f"{name}_boxes": held})

    def _unbox(self) -> None:
        """Bring boxed weights back into the given order, in place."""
        for name in ("w13", "w2"):
            held = self.get_buffer(f"{name}_boxes")
            given = unbox(held, UNITS[self.spec.weights], into=held)
            self._replace([f"{name}_boxes"], {self._given_name(name): given})

    def _replace(self, old: Sequence[str], new: Mapping[str, Tensor]) -> None:
        """Replace the buffers `old` by the buffers `new`."""
        for name in old:
            delattr(self, name)
        for name, tensor in new.items():
            self.register_buffer(name, tensor)

    def _pack(self, name: str, matrix: QuantizedMatrix) -> PackedMatrix:
        is_first = name == "w13"
        return packing.pack(matrix, gated=is_first, interleaved=is_first and self.spec.activation.interleaved)

    def _largest_scales(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """The largest scale of every line of both matrices; empty if e4m3 codes cannot hold all weights."""
        found: dict[str, Tensor] = {}
        for name in ("w13", "w2"):
            matrix, is_first = getattr(weights, name), name == "w13"
            interleaved = is_first and self.spec.activation.interleaved
            largest = packing.largest_scales(matrix, gated=is_first, interleaved=interleaved)
            if largest is None:
                return {}
            found[name] = largest
        return found

    def _packed(self, name: str) -> PackedMatrix:
        """The packed matrices of all experts, as views of the buffers."""
        buffers, is_first = dict(self.named_buffers(recurse=False)), name == "w13"
        return PackedMatrix(
            self.spec.weights,
            self.spec.shapes()[name],
            is_first,
            is_first and self.spec.activation.interleaved,
            buffers[f"{name}_words"],
            buffers[f"{name}_word_scales"],
            buffers.get(f"{name}_global_scale"),
            buffers.get(f"{name}_global_factor"),
        )

    def _blocks(self, name: str) -> QuantizedMatrix:
        """The recoded matrices of all experts, as views of the buffers."""
        data, scales = (self.get_buffer(f"{name}_{part}") for part in _RECODED)
        payloads = {"data": data, "scales": scales}
        return QuantizedMatrix(
            format=weight_format("fp8_block128"), shape=tuple(data.shape), payloads=payloads
        )

    def _boxed(self, name: str) -> Tensor | QuantizedMatrix:
        """The boxed matrices of all experts, as views of the buffers: the numbers are not in the order of `shape`."""
        data, format = self.get_buffer(f"{name}_boxes"), weight_format(self.spec.weights)
        if not format.quantized:
            return data
        payloads = {"data": data, "scales": self.get_buffer(f"{name}_scales")}
        return QuantizedMatrix(format=format, shape=tuple(data.shape), payloads=payloads)

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedMatrix:
        if f"{name}_words" in self._buffers:
            given = packing.unpack(self._packed(name))
        elif f"{name}_blocks" in self._buffers:
            given = recoding.give_back(self._blocks(name))
        elif f"{name}_boxes" in self._buffers:
            numbers = unbox(self.get_buffer(f"{name}_boxes"), UNITS[self.spec.weights])
            if not weight_format(self.spec.weights).quantized:
                return numbers
            given = {"data": numbers, "scales": self.get_buffer(f"{name}_scales").clone()}
        else:
            return super()._part(name, shape)
        format = weight_format(self.spec.weights)
        others = [payload for payload in format.payloads(*shape[1:]) if payload not in given]
        payloads = given | {payload: self.get_buffer(f"{name}_{payload}") for payload in others}
        return QuantizedMatrix(format=format, shape=shape, payloads=payloads)

    def movable(self) -> dict[str, Tensor]:
        if not (self.is_packed or self.is_recoded or self.is_boxed):
            return super().movable()
        return {name: self._by_expert(name, buffer) for name, buffer in self.named_buffers(recurse=False)}

    def _by_expert(self, name: str, buffer: Tensor) -> Tensor:
        """A view of a buffer with one row per expert. (A packed buffer is flat, and has a pad at its end.)"""
        experts, outputs = self.spec.shapes()["w13" if "13" in name else "w2"][:2]
        if len(buffer) == experts:
            return buffer
        each = packing.per_matrix(buffer, experts, outputs)
        return buffer[: experts * each].view(experts, each)

    def _seen_by_kernels(self) -> ExpertWeights:
        """The weights that the kernels read if they are not packed: as given, recoded, or boxed (no copies)."""
        if not self.is_recoded and not self.is_boxed:
            return self.weights
        b13, b2 = self._buffers.get("b13"), self._buffers.get("b2")
        w13, w2 = (self._blocks(name) if self.is_recoded else self._boxed(name) for name in ("w13", "w2"))
        return ExpertWeights(w13=w13, w2=w2, b13=b13, b2=b2)

    @torch.no_grad()
    def load_(self, weights: ExpertWeights) -> None:
        """Replace the weights in place, so that captured CUDA graphs use the new ones."""
        if not (self.is_packed or self.is_recoded or self.is_boxed):
            super().load_(weights)
            return
        self._check_new(weights)
        if self.is_boxed:
            self._load_boxes(weights)
            return
        for name in ("w13", "w2"):
            self._check_form(name, getattr(weights, name))
        largest = self._largest_scales(weights) if self.has_codes else {}
        if self.has_codes and not largest:
            raise InputError(
                f"the new weights have an output whose scales differ by more than 2^{packing.CODE_RANGE}",
                expected="weights that become codes of e4m3 without being rounded, as those here do",
                fix="make new experts of these weights: they will be multiplied in another way",
            )
        for name in ("w13", "w2"):
            if self.has_codes:
                self.get_buffer(f"{name}_largest").copy_(largest[name])
            if self.is_recoded:
                recoding.recode_into(getattr(weights, name), self._blocks(name))
            else:
                matrix = self._pack(name, getattr(weights, name))
                if self.is_expandable:
                    bases = self.get_buffer(f"{name}_bases")
                    bases.copy_(recoding.block_scales(getattr(weights, name), bases.device))
                self.get_buffer(f"{name}_words").copy_(matrix.words)
                self.get_buffer(f"{name}_word_scales").copy_(matrix.scales)
        for name, tensor in weights.by_name().items():
            if not name.endswith(("_data", "_scales")):
                self.get_buffer(name).copy_(tensor)

    def _load_boxes(self, weights: ExpertWeights) -> None:
        boxed = {self._given_name(name): f"{name}_boxes" for name in ("w13", "w2")}
        for name, tensor in weights.by_name().items():
            if name in boxed:
                box(tensor, UNITS[self.spec.weights], into=self.get_buffer(boxed[name]))
            else:
                self.get_buffer(name).copy_(tensor)

    def _check_form(self, name: str, matrix: QuantizedMatrix) -> None:
        """Raise unless a new matrix can be packed or recoded like the one that it replaces."""
        if self.is_packed and not packing.can_pack(matrix):
            largest = packing.LARGEST_SCALE[self.spec.weights]
            beyond = "below zero" if self.spec.weights == "nvfp4" else f"beyond {largest}"
            raise InputError(
                f"{name} has scales {beyond}, or that are no numbers",
                expected="scales that packed weights can hold",
                fix="make new experts of these weights: they will not be packed",
            )
        expected = self.is_recoded or self.is_expandable
        if expected and not recoding.can_recode(matrix, next(self.buffers()).device):
            raise InputError(
                f"{name} has an output that would change by more than 2^-12 of its length, or is no number",
                expected="weights that blocks of 128 × 128 can hold: scales that are not too far apart",
                fix="make new experts of these weights: they will not be recoded",
            )
