"""`MoeAlltoAll`, by the names under which engines know FlashInfer's, on tokenyard's one-sided exchange.

    received = a2a.dispatch(topk_ids, [rows, scales, topk_ids, topk_weights], runtime_max_tokens_per_rank)
    y_TH = a2a.combine(results, runtime_max_tokens_per_rank)

A layer of a plan is declared before the first token. This door learns what travels from the tensors that it is given,
and they may change from call to call. So it keeps a list of *manifests* (dtypes and shapes of a call, and its
`runtime_max_tokens_per_rank`), the same list on every rank, and a spec of the exchange for each of them.

- A manifest that is on the list costs nothing more: the exchange's own announcement carries its number, so ranks that
  bring different ones find out in the flags of that very round.
- A rank that brings a new one, or has an error to report, says so in that round ("at the door", spec 0). Every rank
  hears it, and all meet in one agreement over the group: what does each bring, what went wrong? Either all raise, or
  all bring the same: it goes on the list, the workspace grows where it has to, and the round is made again.

Results have a manifest of their own (width and dtype), which is not known when rows are dispatched. A dispatch that is
in flight is therefore *redirected* to the spec of its results. Nothing that stands in the workspace is needed for the
way back, so the workspace may grow even there, between the two.

What `dispatch` returns, and the tensor for results, are views of the workspace: they mean something until `combine`.

On GPUs (`tokenyard.integrations.flashinfer.device_carrier`) a call whose manifest is on the list waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenyard.errors import (
    Drifted,
    HandleError,
    InputError,
    PeerFailed,
    PlanBroken,
    PlanError,
    TokenyardError,
)
from tokenyard.exchange import Arrival, ExchangeSpec, SharedMemoryTransport
from tokenyard.exchange.workspace import REGION_ALIGNMENT, round_up
from tokenyard.formats import EncodedRows, Format, Payload, for_dtype
from tokenyard.group import Disagreement
from tokenyard.group.base import Group
from tokenyard.integrations.flashinfer.carriers import NeedsAgreement, carrier_for
from tokenyard.integrations.flashinfer.manifest import (
    Manifest,
    PayloadSet,
    as_matrix,
    check_batch,
    check_marks,
    check_place,
    check_results,
    check_whole,
)
from tokenyard.routing import Placement, Routes
from tokenyard.rows import describe

Result = TypeVar("Result")

# The wire of a spec that only serves the way back.
_NOTHING = PayloadSet(entries=(Payload(name="nothing", dtype=torch.uint8, width=1),))


class MoeAlltoAll:
    """Dispatch and combine for engines that call FlashInfer's class of this name.

    `mapping` (with `moe_ep_size` and `moe_ep_rank`), or `ep_size` and `ep_rank`, are compared with `group`, which does
    the work. `workspace_size_per_rank` and `mnnvl_config` are taken for the sake of callers that pass them: the
    workspace has the size that is needed, and grows. With `hidden_size`, room for bf16 results is there from the start.

    >>> from tokenyard import launch
    >>> def rank_main(group):
    ...     a2a = MoeAlltoAll(max_num_tokens=4, top_k=1, num_experts=2, group=group)
    ...     ids, rows = torch.tensor([[1], [0]]), torch.tensor([[1.0], [2.0]]) + 10 * group.rank
    ...     (received,) = a2a.dispatch(ids, [rows], runtime_max_tokens_per_rank=2)
    ...     return received[:, 0, 0].tolist(), a2a.combine(received * 100, 2).flatten().tolist()
    >>> launch(2, rank_main)  # expert 0 is on rank 0, expert 1 on rank 1
    [([2.0, 12.0], [100.0, 200.0]), ([1.0, 11.0], [1100.0, 1200.0])]
    """

    group: Group  # the ranks that exchange
    ep_size: int  # the number of ranks
    ep_rank: int  # the rank of this process or thread
    max_num_tokens: int  # the most tokens that a rank brings in a call
    top_k: int  # the experts that a token chooses
    num_experts: int  # the experts of the layer, on all ranks together

    def __init__(
        self,
        mapping: Any = None,
        max_num_tokens: int = 0,
        top_k: int = 0,
        num_experts: int = 0,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        *,
        group: Group,
        ep_size: int | None = None,
        ep_rank: int | None = None,
    ) -> None:
        self.group, self.ep_size, self.ep_rank = group, group.size, group.rank
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self._exchange_specs: dict[Manifest | None, ExchangeSpec] = {}
        self._warm: set[Manifest | None] = set()
        self._flight: Arrival | None = None
        self._dispatched: Manifest | None = None

        def check() -> None:
            sizes = {"max_num_tokens": max_num_tokens, "top_k": top_k, "num_experts": num_experts}
            optional = {"workspace_size_per_rank": workspace_size_per_rank, "hidden_size": hidden_size}
            for name, value in (sizes | {k: v for k, v in optional.items() if v is not None}).items():
                check_whole(name, value, least=1)
            check_place(mapping, group.size, ep_size=ep_size)
            check_place(mapping, group.rank, ep_rank=ep_rank)

        number = group.count_plan()
        given = (
            f"max_num_tokens {max_num_tokens}, top_k {top_k}, num_experts {num_experts}, "
            f"hidden_size {hidden_size}, number {number} of this group"
        )
        self._agree("MoeAlltoAll", given, self._attempt(check)[1])
        if reason := SharedMemoryTransport.reaches(group, group.gather_json(group.host())):
            raise PlanError(str(reason), expected="ranks that share memory", fix=reason.why, rank=group.rank)
        self._placement = Placement.contiguous(num_experts, group.size)
        self._carrier = carrier_for(group, plan_id=number)
        self._exchange = self._carrier.exchange
        # The routing weights travel as a payload of the caller's, if at all.
        self._ones_TK = torch.ones(max_num_tokens, top_k, device=group.device)
        self._exchange_specs[None] = self._exchange_spec("door", _NOTHING, 0, 1, torch.bfloat16, max_tokens=0)
        self._serve(self._exchange_specs)
        if hidden_size is not None:
            self._learn(Manifest.of_results(hidden_size, torch.bfloat16, max_num_tokens))

    @property
    def workspace_size_per_rank(self) -> int:
        """Bytes of the workspace that this rank holds now."""
        return self._carrier.own_buffer.numel()

    # -- The way out ---------------------------------------------------------------------------------------

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: Sequence[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
    ) -> list[Tensor]:
        """Send row t of each payload to every rank that owns one of the experts of token t, once.

        Returns, for each payload, `[ep_size, runtime_max_tokens_per_rank, ...]`: the rows from each source rank, in
        token order. Slots behind them are zero; with `invalid_token_expert_id` they hold that id in the payload
        `expert_id_payload_index`.
        """
        self._check_usable()
        if self._flight is not None:
            raise self._out_of_turn("dispatch was called twice", "combine the last dispatch first")

        def check() -> Manifest:
            most = check_whole(
                "runtime_max_tokens_per_rank", runtime_max_tokens_per_rank, least=0, most=self.max_num_tokens
            )
            experts = self.num_experts if self._carrier.reads_values else None
            check_batch(token_selected_experts, input_payloads, self.top_k, experts, most, self.group.device)
            check_marks(input_payloads, invalid_token_expert_id, expert_id_payload_index)
            return Manifest.of_payloads(input_payloads, most)

        manifest, error = self._attempt(check)
        if error is not None or self._listed(manifest) not in self._exchange_specs:
            self._carrier.check_may_agree(f"what this dispatch brings ({manifest})", error)
            with suppress(NeedsAgreement, Drifted), self._exchange.round_trip(self._exchange_specs[None]):
                raise NeedsAgreement(self._cause("dispatch", manifest, error))
            self._agree_at_the_door("dispatch", manifest, error)
        assert manifest is not None
        spec = self._exchange_specs[self._listed(manifest)]
        names = [payload.name for payload in spec.wire.payloads(1)]
        matrices = dict(zip(names, map(as_matrix, input_payloads), strict=True))
        rows = EncodedRows(format=spec.wire, hidden_size=1, payloads=matrices)
        routes = Routes(
            topk_ids_TK=token_selected_experts, topk_weights_TK=self._ones_TK[: len(token_selected_experts)]
        )
        send = partial(self._carrier.move, spec, rows, routes, manifest.max_tokens)
        flight = self._explained(manifest, send)
        self._flight, self._dispatched = flight, manifest
        slots = [flight.received.rows.payloads[name] for name in names]
        self._carrier.mark_unused(
            flight, slots, manifest.max_tokens, expert_id_payload_index, invalid_token_expert_id
        )
        return [
            slots_SX.view(self.ep_size, manifest.max_tokens, *shape)
            for slots_SX, (_, shape) in zip(slots, manifest.rows, strict=True)
        ]

    # -- The way back --------------------------------------------------------------------------------------

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """`[ep_size, runtime_max_tokens_per_rank, hidden_size]` of the workspace, for results of the last dispatch.

        Results that are written there need no copy: `combine(…, payload_in_workspace=True)`. Collective where results
        of this width and dtype are new.
        """
        self._check_dispatched("get_combine_payload_tensor_in_workspace")

        def manifest() -> Manifest:
            check_whole("hidden_size", hidden_size, least=1)
            for_dtype(dtype)
            return Manifest.of_results(hidden_size, dtype, self._same_tokens(runtime_max_tokens_per_rank))

        wanted, _ = self._redirected(manifest)
        return self._results(wanted)

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output: Tensor | None = None,
    ) -> Tensor:
        """Bring the results of the last dispatch home: `[T, H]`, summed over ranks in float32, in rank order.

        `payload` is `[ep_size, runtime_max_tokens_per_rank, H]`, weighted and summed over the experts of this rank.
        The sum is rounded once, to the payload's dtype, and written into `output` if given. A combine that raises ends
        the round trip on every rank: dispatch again.
        """
        self._check_dispatched("combine")

        def manifest() -> Manifest:
            max_tokens = self._same_tokens(runtime_max_tokens_per_rank)
            check_results(payload, self.ep_size, max_tokens, self.group.device)
            wanted = Manifest.of_results(payload.shape[2], payload.dtype, max_tokens)
            if payload_in_workspace and not self._is_results(wanted, payload):
                raise InputError(
                    f"payload is {describe(payload)} that does not stand in the workspace",
                    expected="the tensor of get_combine_payload_tensor_in_workspace, for payload_in_workspace=True",
                    fix="write the results into that tensor, or pass payload_in_workspace=False",
                )
            if isinstance(output, Tensor) and self._in_workspace(output):
                raise InputError(
                    "output stands in the workspace",
                    expected="a tensor of the caller's own: other ranks still read and write there",
                    fix="allocate it with torch.empty",
                )
            return wanted

        wanted, flight = self._redirected(manifest)
        self._flight = None
        if not payload_in_workspace:
            self._carrier.place(flight, self._results(wanted), payload)
        buffer = flight.received.results
        assert buffer is not None  # results travel back as they are
        back = partial(self._exchange.combine, flight, buffer.placed(), out=output)
        return self._explained(wanted, back).y_TH

    def _redirected(self, manifest: Callable[[], Manifest]) -> tuple[Manifest, Arrival]:
        """The dispatch in flight, redirected to results of a manifest that all ranks know."""
        flight, self._flight = self._flight, None
        assert flight is not None
        wanted, error = self._attempt(manifest)
        again = error is not None or self._listed(wanted) not in self._exchange_specs
        if again:
            self._carrier.check_may_agree(f"what this combine brings ({wanted})", error)
            at_the_door = NeedsAgreement(self._cause("combine", wanted, error))
            with suppress(NeedsAgreement, Drifted):
                self._exchange.refuse(
                    self._exchange.redirect(flight, self._exchange_specs[None]), at_the_door
                )
            self._agree_at_the_door("combine", wanted, error)
        assert wanted is not None
        self._flight = self._carrier.redirect(
            flight, self._exchange_specs[self._listed(wanted)], wanted.max_tokens, again=again
        )
        return wanted, self._flight

    def _results(self, manifest: Manifest) -> Tensor:
        """Where results of a manifest belong in this rank's workspace: one place, as one dispatch is in flight."""
        spec = self._exchange_specs[self._listed(manifest)]
        rows_SH = self._carrier.results(spec, manifest.max_tokens).rows_SH
        return rows_SH.view(self.ep_size, manifest.max_tokens, spec.hidden_size)

    def _is_results(self, manifest: Manifest, payload: Tensor) -> bool:
        """Whether a tensor is that place, through whatever views it went in between."""
        if self._listed(manifest) not in self._exchange_specs or not self._in_workspace(payload):
            return False
        return payload.data_ptr() == self._results(manifest).data_ptr() and payload.is_contiguous()

    def _in_workspace(self, tensor: Tensor) -> bool:
        mine = self._carrier.own_buffer.untyped_storage()
        return tensor.untyped_storage().data_ptr() == mine.data_ptr()

    def _same_tokens(self, max_tokens: int) -> int:
        assert self._dispatched is not None
        if max_tokens != self._dispatched.max_tokens:
            raise InputError(
                f"runtime_max_tokens_per_rank is {max_tokens!r}",
                expected=f"{self._dispatched.max_tokens}, as in the dispatch before",
                fix="pass one value to both",
            )
        return self._dispatched.max_tokens

    # -- Agreeing ------------------------------------------------------------------------------------------

    def _listed(self, manifest: Manifest | None) -> Manifest | None:
        """The manifest on the list that serves this one."""
        if manifest is None or self._carrier.needs_exact_tokens:
            return manifest
        return replace(manifest, max_tokens=self.max_num_tokens)

    def _cause(self, phase: str, manifest: Manifest | None, error: Exception | None) -> Exception:
        """What brings this rank to the door, as others hear it that are not there."""
        return error or Drifted(
            f"this rank brings {manifest} to {phase}, which is new, and others bring what is not",
            expected="the same dtypes and shapes on every rank",
            fix="pass payloads of the same kind on every rank",
            rank=self.group.rank,
        )

    def _agree_at_the_door(self, phase: str, manifest: Manifest | None, error: Exception | None) -> None:
        """This rank was at the door: agree with the others, and put what all bring on the list."""
        if not self._carrier.all_need_agreement():
            raise self._cause(phase, manifest, error)
        self._agree(phase, str(manifest), error)
        self._learn(manifest)

    def _agree(self, phase: str, mine: str, error: Exception | None) -> None:
        """Raise on every rank if one has an error, or if they bring different things."""
        report = {"error": None if error is None else f"{type(error).__name__}: {error}", "brings": mine}
        by_rank = self.group.gather_json(report, phase=f"agreement on {phase}")
        if error is not None:
            raise error
        for rank, other in enumerate(by_rank):
            if other["error"] is not None:
                raise PeerFailed(rank, other["error"], phase=phase, rank=self.group.rank)
        brought = [other["brings"] for other in by_rank]
        if len(set(brought)) > 1:
            raise Disagreement(f"the arguments of {phase}", brought, rank=self.group.rank)

    def _explained(self, manifest: Manifest, call: Callable[[], Result]) -> Result:
        """Make a call of the exchange. If the ranks bring different manifests there, say so in those words."""
        try:
            return call()
        except Drifted:
            if self._carrier.reads_values:  # else the ranks are not in one call any more
                self._agree(manifest.phase, str(manifest), None)
            raise

    def _learn(self, manifest: Manifest | None) -> None:
        """Put a manifest on the list, and let the workspace grow if it has to. Collective."""
        assert manifest is not None  # there was no error
        known = dict(self._exchange_specs)
        # As many tokens as there may ever be come along: another number of them needs no other workspace.
        for each in (self._listed(manifest), replace(manifest, max_tokens=self.max_num_tokens)):
            if each is not None and each not in known:
                known[each] = self._exchange_spec_of(each, len(known))
        self._serve(known)
        self._exchange_specs = known

    def _serve(self, known: Mapping[Manifest | None, ExchangeSpec]) -> None:
        """Make room for these, and load their kernels before one waits for another rank. Collective."""
        self._exchange.serve(list(known.values()))
        self._exchange.warmup([spec for manifest, spec in known.items() if manifest not in self._warm])
        self._warm |= set(known)

    def _exchange_spec_of(self, manifest: Manifest, number: int) -> ExchangeSpec:
        name = f"{manifest.phase} {number}"
        if manifest.phase == "combine":
            ((dtype, (hidden_size,)),) = manifest.rows
            return self._exchange_spec(name, _NOTHING, number, hidden_size, dtype, manifest.max_tokens)
        return self._exchange_spec(name, manifest.wire(), number, 1, torch.bfloat16, manifest.max_tokens)

    def _exchange_spec(
        self, name: str, wire: Format, number: int, hidden_size: int, dtype: torch.dtype, max_tokens: int
    ) -> ExchangeSpec:
        return ExchangeSpec(
            layer=name,
            index=number,
            hidden_size=hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens=max_tokens,
            dtype=dtype,
            wire=wire,
            combine_wire=for_dtype(dtype),
            placement=self._placement,
        )

    # -- Turns ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the workspace back. Later calls raise; the group stays."""
        self._exchange.close()
        self._flight = None

    def _attempt(self, make: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """What a check of this rank's own gives, or its error, for the others to hear first."""
        try:
            return make(), None
        except Exception as error:
            return None, error.at(rank=self.group.rank) if isinstance(error, TokenyardError) else error

    def _check_usable(self) -> None:
        try:
            self._exchange.check_usable()
        except PlanBroken as error:
            error.fix = "make a new MoeAlltoAll on every rank that is left, on a group of these ranks"
            raise

    def _check_dispatched(self, name: str) -> None:
        self._check_usable()
        if self._flight is None:
            raise self._out_of_turn(f"{name} was called before a dispatch", "dispatch first")

    def _out_of_turn(self, found: str, fix: str) -> HandleError:
        return HandleError(found, expected="dispatch, then combine", fix=fix, rank=self.group.rank)


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
) -> int:
    """Bytes that payloads of these sizes take in a rank's workspace. Nobody has to ask: it grows by itself.

    >>> moe_a2a_get_workspace_size_per_rank(4, 10, 100, 64)  # 4000 and 2560, each rounded up to 128
    6656
    """
    slots = ep_size * max_num_tokens
    sizes = (total_dispatch_payload_size_per_token, combine_payload_size_per_token)
    return sum(round_up(slots * size, REGION_ALIGNMENT) for size in sizes)
