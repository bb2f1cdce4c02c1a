"""`prepare` and `finalize`: the exchange, as vLLM's modular kernel calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import ContractError, HandleError, InputError
from tokenyard.exchange import RoundTrip
from tokenyard.integrations.vllm.experts import TokenyardExperts
from tokenyard.integrations.vllm.interface import (
    FINISHED,
    QUANT_DTYPES,
    UNFINISHED,
    ActivationFormat,
    ExpertTables,
    ExpertTokensMetadata,
    PrepareAndFinalizeOfVllm,
    check_layer,
    check_weight_on,
)
from tokenyard.layer.call import check_rows
from tokenyard.planning.planner import Plan
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, UnfinalizedRows, describe


@dataclass(frozen=True, kw_only=True)
class TokenSlices:
    """How `size` ranks that hold the same tokens split them into slices; this rank is number `rank` of them.

    Ranks of a tensor-parallel group hold the same tokens: each sends a slice of them, and all gather the results.
    Slices are equally long, but for the last ones, which may be shorter or empty. `all_gather` joins the equally long
    tensors of all ranks, in rank order, along the first dimension.

    >>> TokenSlices(rank=1, size=2, all_gather=lambda part: part).bounds(5)
    slice(3, 5, None)
    """

    rank: int
    size: int
    all_gather: Callable[[Tensor], Tensor]

    def longest(self, tokens: int) -> int:
        """The tokens of the longest slice."""
        return -(-tokens // self.size)

    def bounds(self, tokens: int) -> slice:
        """The slice of this rank, out of this number of tokens."""
        longest = self.longest(tokens)
        return slice(min(self.rank * longest, tokens), min((self.rank + 1) * longest, tokens))

    def mine(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The slice of this rank, of tensors that have a row for each token."""
        return tuple(tensor[self.bounds(len(tensor))] for tensor in tensors)

    def gather(self, output: Tensor, write: Callable[[Tensor], object]) -> None:
        """Let `write` write the results of this rank's slice, and fill `output` with those of all ranks."""
        part = output.new_zeros(self.longest(len(output)), *output.shape[1:])
        mine = self.bounds(len(output))
        write(part[: mine.stop - mine.start])
        output.copy_(self.all_gather(part)[: len(output)])


class TokenyardPrepareAndFinalize(PrepareAndFinalizeOfVllm):
    """Moves the rows of one layer of a plan: `prepare` encodes and dispatches, `finalize` combines.

    `routed_scaling_in_weights` is the routed scaling factor that vLLM's `topk_weights` hold already. `slices` are given
    where several ranks of the group bring the same tokens. Every rank of the group makes the same calls; an error on
    one of them reaches all.
    """

    plan: Plan  # the plan that all ranks agreed on
    layer: str  # the name of the layer in the plan
    routed_scaling_in_weights: float  # the factor that vLLM's routing weights hold
    slices: TokenSlices | None  # how ranks that bring the same tokens share them

    def __init__(
        self,
        plan: Plan,
        layer: str,
        *,
        routed_scaling_in_weights: float = 1.0,
        slices: TokenSlices | None = None,
    ) -> None:
        self.plan, self.layer, self.routed_scaling_in_weights = plan, layer, routed_scaling_in_weights
        self.slices = slices
        self._experts: object = None
        self._open: ExitStack | None = None
        self._trip: RoundTrip | None = None
        check_layer(plan, layer)
        self._tables = ExpertTables.of(plan, layer)
        self._known_map: Tensor | None = None

    @property
    def wiring(self) -> Wiring:
        """The layer's wiring, as the plan has it now."""
        return self.plan.wiring(self.layer)

    # -- What vLLM asks before the first token -------------------------------------------------------------

    @property
    def activation_format(self) -> Any:
        """One row per token and rank, not a batch per expert."""
        return ActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype in which ids travel. int64 is taken, too."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens of a rank that the plan was made for."""
        return self.wiring.exchange_spec.max_tokens

    def num_dispatchers(self) -> int:
        """The number of ranks that send rows to this one."""
        return self.plan.group.size

    def output_is_reduced(self) -> bool:
        """True: what `finalize` writes is summed over experts and over ranks, and must not be summed again."""
        return True

    def supports_async(self) -> bool:
        """False: `prepare` and `finalize` come back when they are done."""
        return False

    def supports_deferred_moe_finalize(self) -> bool:
        """False: without `finalize`, results stay on the ranks of the experts."""
        return False

    def post_init_setup(self, fused_experts: Any) -> None:
        """Check that these experts, ours or vLLM's, do what the wiring leaves to them."""
        where: dict[str, Any] = {"layer": self.layer, "rank": self.plan.group.rank}
        ours = isinstance(fused_experts, TokenyardExperts)
        if ours and (fused_experts.plan is not self.plan or fused_experts.layer != self.layer):
            raise ContractError(
                f"the experts belong to layer {fused_experts.layer!r} of their plan",
                expected=f"experts of layer {self.layer!r} of the same plan",
                fix="make both objects with one plan and one layer",
                **where,
            )
        if not ours and self.wiring.spec.weight_on == "input":
            raise ContractError(
                f'the layer has weight_on="input", with experts of class {type(fused_experts).__name__}',
                expected="TokenyardExperts, which apply the weight to what they receive: nothing else does",
                fix='use TokenyardExperts, or plan with weight_on="output"',
                **where,
            )
        deferred = bool(getattr(fused_experts, "expects_unquantized_inputs", False))
        try:
            self._check_quantizer(getattr(fused_experts, "quant_config", None), deferred)
        except ContractError as error:
            raise error.at(**where) from None
        self._experts = fused_experts
        if ours:
            fused_experts.on_error = self.abandon

    # -- Prepare -------------------------------------------------------------------------------------------

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any, Tensor, Tensor]:
        """Encode and dispatch the rows; return what arrived: rows, scales, rows per expert, global ids, weights.

        A choice that is not for this rank has weight 0, and the id of an expert that `expert_map` puts elsewhere
        (-1 where there is no map).
        """
        wiring, stack = self.wiring, ExitStack()
        with stack:  # an error on one rank reaches all
            trip = stack.enter_context(self.plan.exchange.begin(wiring.exchange_spec))
            if self._experts is None:
                raise HandleError(
                    "prepare was called before post_init_setup",
                    expected="to know the experts, and what they leave to others, before the first token",
                    fix="call post_init_setup(experts), as vLLM's kernels do when they are made",
                )
            if self.slices is not None:
                a1, topk_weights, topk_ids = self.slices.mine(a1, topk_weights, topk_ids)
            check_rows(wiring, a1)
            if num_experts != wiring.spec.num_experts:
                raise InputError(
                    f"num_experts is {num_experts}",
                    expected=f"{wiring.spec.num_experts}, as the layer was planned",
                    fix="plan the layer with the model's number of experts, redundant ones included",
                )
            tables = ExpertTables.of(self.plan, self.layer, self._tables)
            self._check_map(expert_map, tables)
            check_weight_on(wiring, apply_router_weight_on_input)
            self._check_quantizer(quant_config, defer_input_quant)
            routes = Routes(
                topk_ids_TK=topk_ids, topk_weights_TK=topk_weights, scaled_by=self.routed_scaling_in_weights
            )
            rows = self.plan.exchange.encode(wiring.exchange_spec, a1)
            received = trip.dispatch(rows, routes)
            arrived = _hand_over(received, tables.global_L if expert_map is None else tables.mapped_L)
            self._trip, self._open = trip, stack.pop_all()  # `finalize` continues the round trip
        return arrived

    # -- Finalize ------------------------------------------------------------------------------------------

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Return the results to their tokens, and write them into `output`, summed over experts and ranks.

        `weight_and_reduce_impl` says what is done already; a result that would be weighted or summed twice is refused.
        The weights of `prepare` are used: `topk_weights` and `topk_ids` are not looked at.
        """
        if self._open is None or self._trip is None:
            raise HandleError(
                "finalize was called before prepare, or twice",
                expected="prepare, then finalize, once each",
                fix="call prepare first: what it sent out is combined once",
                layer=self.layer,
                rank=self.plan.group.rank,
            )
        stack, trip, self._open, self._trip = self._open, self._trip, None, None
        with stack:
            check_weight_on(self.wiring, apply_router_weight_on_input)
            rows = self._finished(fused_expert_output, trip.received, weight_and_reduce_impl)
            if self.slices is None:
                trip.combine(rows, out=output)
            else:
                self.slices.gather(output, lambda mine: trip.combine(rows, out=mine))

    def abandon(self, error: Exception) -> None:
        """Report an error of this rank since `prepare` to the other ranks, which wait for it in `finalize`."""
        stack, self._open, self._trip = self._open, None, None
        if stack is not None:
            with suppress(Exception), stack:  # the caller has an error already
                raise error

    def _finished(self, results: Tensor, received: ReceivedRows, impl: object) -> ExpertRows:
        """One row per received row, weighted and summed over experts: here, unless the experts did it already."""
        num_rows, top_k, width = received.num_rows, self.wiring.spec.top_k, self.wiring.spec.hidden_size
        names = [kind.__name__ for kind in type(impl).__mro__]
        finished = FINISHED in names
        if not finished and not any(name in names for name in UNFINISHED):
            raise ContractError(
                f"weight_and_reduce_impl is {describe(impl)}: it does not say who weights and reduces",
                expected=f"{FINISHED}, or {' or '.join(UNFINISHED)} for rows that are not reduced",
                fix="use experts of the standard activation format",
            )
        if not finished and isinstance(self._experts, TokenyardExperts):
            raise ContractError(
                f"weight_and_reduce_impl is {describe(impl)}, and TokenyardExperts weighted and summed already: "
                "the results would be reduced twice",
                expected=FINISHED,
                fix="pass experts.finalize_weight_and_reduce_impl()",
            )
        shape = tuple(results.shape) if isinstance(results, Tensor) else None
        if num_rows == 0 and shape is not None:  # vLLM does not call experts that have no rows
            return ExpertRows(rows_RH=torch.empty(0, width, device=results.device))
        reduced = (num_rows, width)
        per_choice = ((num_rows, top_k, width), (num_rows * top_k, width))
        if shape not in ((reduced,) if finished else per_choice):
            found = f"fused_expert_output is {describe(results)}, with {type(impl).__name__}"
            if not finished and shape == reduced:
                found += ": it is summed over experts already, and would be reduced twice"
            elif finished and shape in per_choice:
                found += ": it is not summed over experts yet, and nothing sums it later"
            wanted = reduced if finished else per_choice[0]
            raise ContractError(
                found,
                expected=f"{list(wanted)}: {num_rows} rows were received",
                fix=f"let the experts return {FINISHED} for rows that are weighted and summed, and only for them",
            )
        if finished:
            return ExpertRows(rows_RH=results)
        ids_RK, weights_RK = local_routes(received)
        # Results of choices that are not for this rank are not read.
        index_N = (ids_RK.flatten() >= 0).nonzero().squeeze(1)
        return UnfinalizedRows(
            rows_NH=results.reshape(-1, width)[index_N],
            weights_N=weights_RK.flatten()[index_N],
            index_N=index_N,
            num_rows=num_rows,
            top_k=top_k,
        ).finish()

    # -- What both sides must agree on ---------------------------------------------------------------------

    def _check_map(self, expert_map: Tensor | None, tables: ExpertTables) -> None:
        known = expert_map is self._known_map and tables is self._tables
        if expert_map is None or (known and expert_map.device.type != "cpu"):
            return  # a map on a GPU is compared once, not in every call
        tables.check(expert_map)
        self._known_map, self._tables = expert_map, tables

    def _check_quantizer(self, quant_config: Any, deferred: bool) -> None:
        wire = self.wiring.wire
        asked = getattr(quant_config, "quant_dtype", None)
        block_shape = getattr(quant_config, "block_shape", None)
        shown = f"quant_dtype={asked}" + (f", block_shape={block_shape}" if block_shape else "")
        if deferred and wire.quantized:
            raise ContractError(
                f"defer_input_quant=True, and the rows travel in {wire}: they would be quantized twice",
                expected="experts that take the rows as they arrive, or a plain wire",
                fix="plan the layer without `wire`, or let expects_unquantized_inputs be False",
            )
        if deferred or quant_config is None:
            return
        dtype, block = QUANT_DTYPES.get(wire.name, (None, None))
        if asked != dtype or (block is not None and (not block_shape or block_shape[-1] != block)):
            raise ContractError(
                f"quant_config has {shown}, and the rows travel in {wire}",
                expected=f"quant_dtype={dtype}" + (f", block_shape=[{block}, {block}]" if block else ""),
                fix="plan the layer with the `wire` that the quantization asks for: `prepare` quantizes, once",
            )


def local_routes(received: ReceivedRows) -> tuple[Tensor, Tensor]:
    """Ids of this rank's own experts (-1: not here), and weights. `check_layer` refuses layers that carry logits."""
    assert isinstance(received.routes, LocalRoutes)
    return received.routes.ids_RK, received.routes.weights_RK


def _hand_over(received: ReceivedRows, global_L: Tensor) -> tuple[Tensor, Tensor | None, Any, Tensor, Tensor]:
    """A dispatched batch as the five values that vLLM passes on."""
    payloads = [payload.contiguous() for payload in received.dense().payloads.values()]
    ids_RK, weights_RK = local_routes(received)
    num_local = len(global_L) - 1
    # One entry more counts the choices that are not for this rank.
    taken = torch.where(ids_RK < 0, num_local, ids_RK).flatten().long()
    rows_L = torch.zeros(num_local + 1, dtype=torch.int32, device=ids_RK.device)
    rows_L = rows_L.scatter_add_(0, taken, torch.ones_like(taken, dtype=torch.int32))[:num_local]
    on_cpu = rows_L if rows_L.device.type == "cpu" else None  # a GPU is not waited for
    meta = ExpertTokensMetadata(expert_num_tokens=rows_L, expert_num_tokens_cpu=on_cpu)
    scales = payloads[1] if len(payloads) > 1 else None
    return payloads[0], scales, meta, global_L[ids_RK.long()].int(), weights_RK.contiguous()
