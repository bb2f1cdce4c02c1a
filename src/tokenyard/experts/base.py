"""The base class of experts, which compute on the rows that this rank received.

An experts class declares what it can serve (`supports`), takes `ReceivedRows`, and returns `ExpertRows`
(weighted, summed over this rank's experts of a row) or, with `finalize=False`, `UnfinalizedRows`. It knows
neither the group nor the exchange. Rows arrive in a format, and the experts decode them.

For each pair of a received row r and a choice k whose local id is not -1, with x the decoded row and w the
routing weight:

    weight_on="output":  w · (W2 · act(W13 · x + b13) + b2)
    weight_on="input":        W2 · act(W13 · (w · x) + b13) + b2

and the row's result is the sum over k, in the order of k, in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from tokenyard.duties import Party, acting
from tokenyard.errors import ContractError, InputError, Reason
from tokenyard.experts.gradients import RowGradients
from tokenyard.experts.spec import ExpertsSpec, takes_rows
from tokenyard.experts.state_dicts import convert_old, wrong_dtypes
from tokenyard.experts.weights import WEIGHT_DTYPES, ExpertWeights, check_weights, local_part
from tokenyard.formats import QuantizedMatrix, weight_format
from tokenyard.formats.base import ScaleLayout, dtype_name
from tokenyard.rows import ExpertRows, LocalRoutes, PlacedRows, ReceivedRows, UnfinalizedRows, describe

# The further payload with the numbers of tokens (`LayerSpec.token_numbers`), by which experts order their rows.
TOKEN_NUMBERS = "token_numbers"


class Experts(nn.Module, ABC):
    """Computes experts. Subclasses declare what they serve and implement `compute`."""

    name: ClassVar[str]  # the name in `EXPERTS`, or one of your own
    # Formats that may hold the weights.
    weight_formats: ClassVar[tuple[str, ...]] = tuple(WEIGHT_DTYPES)
    # The inner formats: those in which `compute` can hold the activation between the two products.
    inner_formats: ClassVar[tuple[str, ...]] = ()
    # Whether `compute` can weight and sum its results. If not, the layer weights and sums what it returns.
    finalizes: ClassVar[bool] = True
    # Whether the experts turn logits into routes by themselves (then logits travel instead of routes).
    routes_itself: ClassVar[bool] = False
    # The layout in which the experts want the scales of the rows.
    scale_layout: ClassVar[ScaleLayout] = "linear"
    # Whether `compute` records the duties that it does (`tokenyard.duties.record`). If not, a paranoid plan does not
    # count them.
    counts_duties: ClassVar[bool] = False
    # Whether `compute` works with adopted weights of any strides. If not, weights that are not contiguous are copied.
    any_strides: ClassVar[bool] = False
    # Whether `compute` writes its weighted and summed results into `received.place`, if that is not None.
    places_results: ClassVar[bool] = False
    # The device types on which `compute` gives a row the same bits in every batch, if `spec.batch_invariant` is set.
    batch_invariant: ClassVar[tuple[str, ...]] = ()
    # Whether slots without rows, whose ids are all -1, cost `compute` next to nothing. It may then be given all slots
    # of a workspace, so that the host need not wait for the number of rows that arrived.
    skips_empty_slots: ClassVar[bool] = False
    # The device types on which the experts are differentiated: `compute_kept` and `differentiate` work there.
    trains: ClassVar[tuple[str, ...]] = ()
    # The device types that the rows may be on.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Reason | None:
        """None, or why these experts cannot serve this spec."""
        if spec.weights not in cls.weight_formats:
            known = ", ".join(cls.weight_formats)
            return Reason(
                field="weights", value=spec.weights, why=f"{cls.name} experts hold weights in {known}"
            )
        if spec.rows is not None and not takes_rows(spec.weights, spec.rows):
            taken = ", ".join(("plain rows", *weight_format(spec.weights).row_formats))
            why = f"experts with {spec.weights} weights compute on {taken}"
            return Reason(field="expert_rows", value=spec.rows, why=why)
        if spec.inner is not None:
            held = weight_format(spec.weights).inner_formats
            taken = ", ".join(("exact", *(name for name in cls.inner_formats if name in held)))
            if spec.inner.name not in taken.split(", ")[1:]:
                why = f"{cls.name} experts with {spec.weights} weights hold numbers between their products as {taken}"
                return Reason(field="inner", value=spec.inner, why=why)
        if spec.batch_invariant and not cls.batch_invariant:
            why = f"the bits of a row of {cls.name} experts depend on the other rows of its batch"
            return Reason(field="sum", value="choices", why=why)
        if spec.trains and not cls.trains:
            why = f"{cls.name} experts are for inference: they are not differentiated"
            return Reason(field="experts", value=cls.name, why=why)
        return None

    @classmethod
    def scratch_bytes(cls, spec: ExpertsSpec) -> int:
        """Bytes that a call may allocate for its weights in another form; buffers that grow with its rows do not count.

        The bytes are free again when the call returns, so that all layers share them.
        """
        return 0

    @classmethod
    def runs_on(cls, device: torch.device) -> Reason | None:
        """None, or why these experts cannot compute on rows on this device."""
        if device.type in cls.devices:
            return None
        why = f"these experts run on {' and '.join(cls.devices)}, and rows are on {device}"
        return Reason(field="experts", value=cls.name, why=why)

    @classmethod
    def record_launches(
        cls,
        spec: ExpertsSpec,
        received: Callable[[int], ReceivedRows],
        most_rows: int,
        *,
        finalize: bool,
        held: Experts | None = None,
    ) -> None:
        """Launch, by `gpu_kernels.launch`, every kernel that experts of this spec can need, so that it is recorded.

        `received` makes rows as they will arrive, on the meta device; `most_rows` is the most of them. `held`: only
        what these experts need, whose weights are held in one of several forms. By default there are no kernels.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset the declarations about `compute` in a subclass that overrides it, unless it makes them itself."""
        super().__init_subclass__(**options)
        if "compute" in vars(cls):
            cls.counts_duties = vars(cls).get("counts_duties", False)
            cls.any_strides = vars(cls).get("any_strides", False)
            cls.places_results = vars(cls).get("places_results", False)
            cls.inner_formats = vars(cls).get("inner_formats", ())
            cls.batch_invariant = vars(cls).get("batch_invariant", ())
            cls.trains = vars(cls).get("trains", ())

    def __init__(self, spec: ExpertsSpec, weights: ExpertWeights, *, adopt: bool = False) -> None:
        """Check the weights, and hold a copy of them, or with `adopt=True` the tensors themselves.

        Adopted tensors belong to the experts from then on: `load_` writes into them. Tensors that are not contiguous
        are copied even so, unless the class declares `any_strides`.
        """
        super().__init__()
        if (reason := type(self).supports(spec)) is not None:
            raise InputError(
                str(reason), expected="a spec that these experts support", fix="ask `supports` first"
            )
        self.spec = spec  # what these experts compute
        check_weights(spec, weights)
        for name, tensor in weights.by_name().items():
            held = tensor.detach()
            if not adopt:
                held = held.clone(memory_format=torch.contiguous_format)
            elif not self.any_strides:
                held = held.contiguous()  # copies only if it is not
            if spec.trains:
                self.register_parameter(name, nn.Parameter(held))
            else:
                self.register_buffer(name, held)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the weights with the model, as `nn.Module` does, but do not cast quantized ones."""
        if weight_format(self.spec.weights).quantized:
            fn = _without_casts(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def weights(self) -> ExpertWeights:
        """The weights as they are now; copies only where they are held in another form than they were given."""
        shapes = self.spec.shapes()
        return ExpertWeights(**{name: self._part(name, shape) for name, shape in shapes.items()})  # type: ignore[arg-type]

    def multiplied(self, weights: ExpertWeights | None = None) -> ExpertWeights:
        """The weights in the dtype in which they are multiplied: these, or those that are held.

        Experts that are trained multiply in the dtype of the layer, and cast their matrices in each call.
        """
        held = self.weights if weights is None else weights
        if not self.spec.trains:
            return held
        w13, w2 = (matrix.detach().to(self.spec.dtype) for matrix in held.plain_matrices())
        b13, b2 = (bias if bias is None else bias.detach() for bias in (held.b13, held.b2))
        return replace(held, w13=w13, w2=w2, b13=b13, b2=b2)

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
        """Load a state dict in the layout of `state_dicts`, or of an older file."""
        convert_old(self.spec, state_dict, prefix)
        wrong, absent = wrong_dtypes(self.spec, state_dict, prefix), list[str]()
        for key in wrong:
            del state_dict[key]
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs
        )
        missing_keys += [key for key in absent if key not in wrong]
        error_msgs += wrong.values()

    def movable(self) -> dict[str, Tensor]:
        """The tensors to copy when experts move between ranks: the weights as they are held, by name, each `[L, …]`."""
        tensors = self.weights.by_name()
        held = {tensor.data_ptr() for tensor in chain(self.buffers(), self.parameters())}
        if any(tensor.data_ptr() not in held for tensor in tensors.values() if tensor.numel()):
            raise InputError(
                f"{self.name} experts hold {self.spec.weights} weights in a form of their own",
                expected="weights that are held as they were given, where experts move",
                fix="choose experts that hold them so: LayerSpec(experts='grouped')",
            )
        return tensors

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedMatrix:
        format = weight_format(self.spec.weights)
        if not format.quantized or name.startswith("b"):
            return local_part(getattr(self, name))  # a buffer; of trained experts a parameter
        payloads = {payload: self.get_buffer(f"{name}_{payload}") for payload in format.payloads(*shape[1:])}
        return QuantizedMatrix(format=format, shape=shape, payloads=payloads)

    @torch.no_grad()
    def load_(self, weights: ExpertWeights) -> None:
        """Replace the weights in place, so that captured CUDA graphs use the new ones.

        All of them are checked before the first is changed.
        """
        self._check_new(weights)
        for name, tensor in weights.by_name().items():
            local_part(getattr(self, name)).copy_(tensor)

    def _check_new(self, weights: ExpertWeights) -> None:
        """Raise unless these weights fit the spec and have values, so that `load_` can copy them."""
        check_weights(self.spec, weights)
        for name, tensor in weights.by_name().items():
            if tensor.is_meta:
                raise InputError(
                    f"{name} is on the meta device: {describe(tensor)} without numbers",
                    expected="weights to load",
                    fix="read them first, or leave this part as it is: pass `experts.weights` with the others replaced",
                )

    @abstractmethod
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Compute the experts of the received rows: `ExpertRows` if `finalize`, else `UnfinalizedRows`.

        A result must have memory that later calls do not overwrite, since several batches may be in flight. If
        `received.results` is a buffer, finalized results may be written into it instead; `PlacedRows` are returned
        then.
        """

    def compute_kept(
        self, received: ReceivedRows, weights: ExpertWeights, *, finalize: bool
    ) -> tuple[ExpertRows | PlacedRows | UnfinalizedRows, Tensor]:
        """What `compute` does, bit for bit, with these weights; and what `differentiate` needs beside the rows.

        That is one tensor with a row for each pair, such as the first product.
        """
        raise _not_differentiated(self)

    def differentiate(
        self,
        received: ReceivedRows,
        kept: Tensor | None,
        dy_RH: Tensor,
        weights: ExpertWeights,
        sums: Mapping[str, Tensor],
    ) -> RowGradients:
        """The gradients of the pairs of received rows, given those of their results.

        `kept` is what `compute_kept` returned beside its result; None: it is to be computed again. `sums` has a float32
        tensor for each weight whose gradient is wanted, by name; what this batch gives is added to it.
        """
        raise _not_differentiated(self)

    def forward(
        self, received: ReceivedRows, *, finalize: bool = True
    ) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Compute, and check the type of the result."""
        self._check_held(received)
        with acting(Party.EXPERTS):
            result = self.compute(received, finalize=finalize)
        return self.checked(result, received, finalize=finalize)

    def checked(
        self, result: object, received: ReceivedRows, *, finalize: bool
    ) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """The result of `compute` or `compute_kept`; raise unless it is of the type that it must be."""
        expected = ExpertRows if finalize else UnfinalizedRows
        placed = isinstance(result, PlacedRows) and result.buffer is received.results
        if not isinstance(result, expected) and not (finalize and placed):
            raise ContractError(
                f"{type(self).__name__}.compute(finalize={finalize}) returned {describe(result)}",
                expected=f"{expected.__name__}: one type, whatever the kernel underneath returns",
                fix=f"wrap the kernel's output in {expected.__name__}",
            )
        return cast(ExpertRows | PlacedRows | UnfinalizedRows, result)

    def _check_held(self, received: ReceivedRows) -> None:
        """Raise if the weights are on another device than the rows, or were cast to another dtype than the spec's."""
        tensors = {**self._buffers, **self._parameters}
        held = next(iter(tensors.values()), None)
        if held is None:  # as in `SelfRoutingExperts`, whose inner experts hold the weights, and check them
            return
        if held.device != received.rows.device:
            raise InputError(
                f"the weights are on {held.device}, and the rows on {received.rows.device}",
                expected="one device",
                fix=f"move the layer: layer.to({str(received.rows.device)!r})"
                + (", with weights that have numbers" if held.is_meta else ""),
            )
        plain = WEIGHT_DTYPES.get(self.spec.weights)
        # A subclass may hold it in another order, under a longer name.
        w13 = next((tensor for name, tensor in tensors.items() if name.startswith("w13")), None)
        # Wrappers that train with mixed precision cast parameters for the time of a call.
        if self.spec.trains:
            return
        if plain is not None and w13 is not None and w13.dtype != plain:
            raise InputError(
                f"w13 is {dtype_name(w13.dtype)}",
                expected=f"{dtype_name(plain)}, as the layer was planned",
                fix=f"cast the layer back, or plan with LayerSpec(weights=…) of {dtype_name(w13.dtype)}",
            )

    def incoming(self, received: ReceivedRows, dtype: torch.dtype) -> Tensor:
        """The received rows as numbers; if they are not in the format `spec.rows`, they are first encoded in it."""
        rows = received.dense()
        if self.spec.rows is not None and rows.format != self.spec.rows:
            rows = self.spec.rows.encode(rows.decode(self.spec.dtype))
        return rows.decode(dtype)

    def between(self, hidden_nI: Tensor) -> Tensor:
        """The input of the second product: the activation's result, rounded to the inner format if the spec has one."""
        inner = self.spec.inner
        return hidden_nI if inner is None else inner.encode(hidden_nI.float()).decode(torch.float32)


def _not_differentiated(experts: Experts) -> ContractError:
    return ContractError(
        f"{type(experts).__name__} was asked for gradients",
        expected="experts that declare where they are differentiated (`trains`)",
        fix="implement compute_kept and differentiate, or choose experts='grouped'",
    )


def _without_casts(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn` without its change of dtype: it moves tensors, and does not cast them."""

    def moved(tensor: Tensor) -> Tensor:
        probe = fn(tensor.new_empty(0))
        return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

    return moved


def local_routes(received: ReceivedRows) -> LocalRoutes:
    """The routes of a batch. Raises if it carries logits, which only experts that route by themselves take."""
    if not isinstance(received.routes, LocalRoutes):
        raise ContractError(
            f"the batch carries {describe(received.routes)}",
            expected="LocalRoutes",
            fix="use experts that route by themselves, or dispatch routes",
        )
    return received.routes
