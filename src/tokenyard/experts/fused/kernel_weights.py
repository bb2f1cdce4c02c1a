"""The weights of fused experts, as their kernels read them.

They are held in the payloads of their format, with three exceptions:

    packed    4-bit weights, on Hopper (`packing`)
    recoded   mxfp8 weights, as blocks of e4m3, on GPUs whose tensor cores multiply e4m3 (`recoding`)
    boxed     bf16, fp16 and fp8_block128 weights, on Hopper: the same bytes in the order in which they are loaded
              (`boxes`), if the layer can use the kernel with specialized warps

Such weights are in buffers of other names. They change their form when the experts move to a device whose kernels read
another one. A state dict has them as they were given, on every device (`experts.state_dicts`): they are unpacked on the
CPU, expert by expert, so that the GPU needs memory for one expert more. Loading writes into the buffers, expert by
expert, too. Weights that the present form cannot hold are an error then, because captured CUDA graphs read the buffers.
With `load_state_dict(assign=True)`, as in torch, the tensors are replaced, and the form is chosen anew.

Weights are boxed in place, expert by expert. Adopted tensors are not boxed, since the caller may still read them,
or write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

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
from tokenyard.experts.state_dicts import MATRICES, convert_old, layout, wrong_dtypes, wrong_shapes
from tokenyard.experts.weights import WEIGHT_DTYPES, ExpertWeights
from tokenyard.formats import QuantizedMatrix, weight_format

# The names of the buffers that hold a quantized matrix: as given, packed, or recoded. Boxes are in `w13_boxes`.
_GIVEN = ("data", "scales")
_PACKED = ("words", "word_scales")
_RECODED = ("blocks", "block_scales")
CPU = torch.device("cpu")
_OR_ASSIGN = ", or load them with load_state_dict(…, assign=True)"


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
    def is_as_given(self) -> bool:
        """Whether weights are held in the payloads of their format."""
        return not (self.is_packed or self.is_recoded or self.is_boxed)

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
        packed_elsewhere = self.is_packed and device.type != "cuda"
        recoded_elsewhere = self.is_recoded and not takes_e4m3(device)
        if packed_elsewhere or recoded_elsewhere or (self.is_boxed and not can_run_boxed(self.spec, device)):
            self._hold_as_given()
        self._hold_for_kernels()
        return self

    def _hold_as_given(self) -> None:
        """Hold the weights as they were given."""
        if self.is_boxed:
            self._unbox()
        if self.is_as_given:
            return
        all_held = {name: self._held_names(name) for name in MATRICES}
        for name, held in all_held.items():
            made = self._as_given(name)
            derived = [part for part in (f"{name}_bases", f"{name}_largest") if part in self._buffers]
            self._replace([*derived, *held], {one: made[one] for one in made if one not in self._buffers})

    def _hold_for_kernels(self) -> None:
        """Pack, recode or box the weights, if that is faster on this device; the given payloads are dropped."""
        if not self.is_as_given:
            return
        if self.boxes and not self._adopted and can_run_boxed(self.spec, next(self.buffers()).device):
            self._box()
            return
        is_packed = can_run_packed(self.spec, self.weights)
        if not is_packed and not (self.recodes and can_run_recoded(self.spec, self.weights)):
            return
        expands = is_packed and self.expands and can_run_expanded(self.spec, self.weights)
        largest = self._largest_scales(self.weights) if is_packed and can_run_codes(self.spec) else {}
        for name in MATRICES:
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
        for name in MATRICES:
            given = self.get_buffer(self._given_name(name))
            held = box(given, UNITS[self.spec.weights], into=given)
            self._replace([self._given_name(name)], {f"{name}_boxes": held})

    def _unbox(self) -> None:
        """Bring boxed weights back into the given order, in place."""
        for name in MATRICES:
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
        for name in MATRICES:
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
        if self.is_as_given or name.startswith("b"):
            return super()._part(name, shape)
        tensors, format = self._as_given(name), weight_format(self.spec.weights)
        if not format.quantized:
            return tensors[name]
        payloads = {payload: tensors[f"{name}_{payload}"] for payload in format.payloads(*shape[1:])}
        return QuantizedMatrix(format=format, shape=shape, payloads=payloads)

    def _as_given(self, name: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """The tensors of a matrix in the layout of state dicts; those held otherwise are made on `device`, by expert.

        `device` is by default that of the buffers. Scales beside boxes are copies, too.
        """
        if self.is_as_given:
            return {one: self.get_buffer(one) for one in layout(self.spec, name)}
        if self.is_boxed:
            boxes = self.get_buffer(f"{name}_boxes")
            into = torch.empty_like(boxes, device=device)
            made = {self._given_name(name): unbox(boxes, UNITS[self.spec.weights], into=into)}
            if weight_format(self.spec.weights).quantized:
                made[f"{name}_scales"] = self.get_buffer(f"{name}_scales").to(boxes.device, copy=True)
        else:
            if self.is_packed:
                payloads = packing.unpack(self._packed(name), device)
            else:
                payloads = recoding.give_back(self._blocks(name), device)
            made = {f"{name}_{payload}": tensor for payload, tensor in payloads.items()}
        return {one: made[one] if one in made else self.get_buffer(one) for one in layout(self.spec, name)}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the weights in the layout of state dicts; those held otherwise are made on the CPU."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_as_given:
            return
        for name in MATRICES:
            for held in self._held_names(name):
                del destination[prefix + held]
            made = self._as_given(name, CPU)
            destination.update({prefix + one: made[one] for one in made if one not in self._buffers})

    def _held_names(self, name: str) -> list[str]:
        """The buffers that hold a matrix in another form than it was given."""
        parts = _PACKED if self.is_packed else _RECODED if self.is_recoded else ("boxes",)
        return [f"{name}_{part}" for part in parts]

    def __getattr__(self, name: str) -> Any:
        """The tensors of a state dict have their names here, too: torch's `get_model_state_dict` looks them up."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            matrix = name.partition("_")[0]
            if matrix not in MATRICES or "_buffers" not in self.__dict__ or self.is_as_given:
                raise
            held = self._buffers.keys() >= set(self._held_names(matrix))
            if not held or name not in layout(self.spec, matrix):
                raise
            return self._as_given(matrix, CPU)[name]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a state dict in the layout of `state_dicts`, or of an older file, into the buffers as they are."""
        if assigns := local_metadata.get("assign_to_params_buffers", False):
            self._adopted = True  # the assigned tensors belong to the caller
            self._hold_as_given()
        if self.is_as_given:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            if assigns:
                self._hold_for_kernels()
            return
        convert_old(self.spec, state_dict, prefix)
        wrong = wrong_shapes(self.spec, state_dict, prefix) | wrong_dtypes(self.spec, state_dict, prefix)
        names = [one for name in MATRICES for one in layout(self.spec, name)]
        found = {
            n: state_dict.pop(prefix + n) for n in names if isinstance(state_dict.get(prefix + n), Tensor)
        }
        absent: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
        )
        missing_keys += [prefix + name for name in names if name not in found]
        held = {prefix + name for name in [*names, *self._held_names("w13"), *self._held_names("w2")]}
        missing_keys += [key for key in absent if key not in held]
        error_msgs += wrong.values()
        if found and not wrong:
            try:
                self.load_(self._with_matrices(found))
            except InputError as error:
                error_msgs.append(f"{prefix.removesuffix('.')}: {error}.")

    def _with_matrices(self, found: Mapping[str, Tensor]) -> ExpertWeights:
        """The weights as they are, with some tensors of matrices replaced."""
        parts: dict[str, Any] = {name: self._buffers.get(name) for name in ("b13", "b2")}
        format = weight_format(self.spec.weights)
        for name in MATRICES:
            declared = layout(self.spec, name)
            tensors = {one: found[one] for one in declared if one in found}
            if len(tensors) < len(declared):
                tensors = {one: tensor.cpu() for one, tensor in (self._as_given(name, CPU) | tensors).items()}
            if format.quantized:
                payloads = {one.removeprefix(f"{name}_"): tensors[one] for one in declared}
                shape = self.spec.shapes()[name]
                parts[name] = QuantizedMatrix(format=format, shape=shape, payloads=payloads)
            else:
                parts[name] = tensors[name].to(WEIGHT_DTYPES[self.spec.weights])
        return ExpertWeights(**parts)

    def movable(self) -> dict[str, Tensor]:
        if self.is_as_given:
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
        w13, w2 = (self._blocks(name) if self.is_recoded else self._boxed(name) for name in MATRICES)
        return ExpertWeights(w13=w13, w2=w2, b13=b13, b2=b2)

    @torch.no_grad()
    def load_(self, weights: ExpertWeights) -> None:
        """Replace the weights in place, so that captured CUDA graphs use the new ones."""
        if self.is_as_given:
            super().load_(weights)
            return
        self._check_new(weights)
        if self.is_boxed:
            self._load_boxes(weights)
            return
        for name in MATRICES:
            self._check_form(name, getattr(weights, name))
        largest = self._largest_scales(weights) if self.has_codes else {}
        if self.has_codes and not largest:
            raise InputError(
                f"the new weights have an output whose scales differ by more than 2^{packing.CODE_RANGE}",
                expected="weights that become codes of e4m3 without being rounded, as those here do",
                fix=f"make new experts of these weights{_OR_ASSIGN}: they will be multiplied in another way",
            )
        for name in MATRICES:
            if self.has_codes:
                self.get_buffer(f"{name}_largest").copy_(largest[name])
            if self.is_recoded:
                recoding.recode_into(getattr(weights, name), self._blocks(name))
            else:
                if self.is_expandable:
                    bases = self.get_buffer(f"{name}_bases")
                    bases.copy_(recoding.block_scales(getattr(weights, name), bases.device))
                packing.pack_into(getattr(weights, name), self._packed(name))
        for name, tensor in weights.by_name().items():
            if not name.endswith(("_data", "_scales")):
                self.get_buffer(name).copy_(tensor)

    def _load_boxes(self, weights: ExpertWeights) -> None:
        boxed = {self._given_name(name): f"{name}_boxes" for name in MATRICES}
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
                fix=f"make new experts of these weights{_OR_ASSIGN}: they will not be packed",
            )
        expected = self.is_recoded or self.is_expandable
        if expected and not recoding.can_recode(matrix, next(self.buffers()).device):
            raise InputError(
                f"{name} has an output that would change by more than 2^-12 of its length, or is no number",
                expected="weights that blocks of 128 × 128 can hold: scales that are not too far apart",
                fix=f"make new experts of these weights{_OR_ASSIGN}: they will not be recoded",
            )
