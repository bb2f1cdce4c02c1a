"""`MoeAlltoAll`, with the names and arguments of FlashInfer's class, on tokenyard's one-sided exchange.

    received = a2a.dispatch(topk_ids, [rows, scales, topk_ids, topk_weights], runtime_max_tokens_per_rank)
    y_TH = a2a.combine(results, runtime_max_tokens_per_rank)

Names, order and defaults of the arguments are those of FlashInfer 0.7.2, which a test compares; only `group`
is added. How ranks agree on dtypes and shapes is described in `agreed_exchange`.

What `dispatch` returns, and the tensor for results, are views of the workspace, and valid until `combine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from tokenyard.errors import HandleError, InputError, PlanBroken
from tokenyard.exchange import RoundTrip
from tokenyard.formats import for_dtype
from tokenyard.group.base import Group
from tokenyard.integrations.flashinfer.agreed_exchange import AgreedExchange
from tokenyard.integrations.flashinfer.callers_handles import (
    Metainfo,
    Workspace,
    group_of_communicator,
    moe_a2a_get_workspace_size_per_rank,
    out_of_turn,
)
from tokenyard.integrations.flashinfer.carriers import GatheredStatistics, Mark
from tokenyard.integrations.flashinfer.manifest import (
    Manifest,
    check_backend,
    check_batch,
    check_marks,
    check_place,
    check_results,
    check_statistics,
    check_whole,
)
from tokenyard.integrations.flashinfer.quantized_output import (
    QuantizedOutput,
    SfLayout,
    check_output_format,
    through_e4m3,
)
from tokenyard.integrations.flashinfer.rank_mask import ActiveRanks, check_bits, read_mask
from tokenyard.routing import Placement
from tokenyard.rows import describe


class MoeAlltoAll:
    """Dispatch and combine for engines that call FlashInfer's class of this name.

    The ranks are those of `group`, or of `mnnvl_config.comm_backend` (vLLM's way). If `mapping` is
    given, its `moe_ep_size` and `moe_ep_rank` must be those of this group. `workspace_size_per_rank` is accepted, but
    does not limit the workspace, which grows to the size that is needed. With `hidden_size`, memory for bf16 results is
    reserved from the start.

    >>> from tokenyard import launch
    >>> def rank_main(group):
    ...     a2a = MoeAlltoAll(None, max_num_tokens=4, top_k=1, num_experts=2, group=group)
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
    eplb_stats_num_experts: int  # the counts in a rank's EPLB statistics; 0: there are none
    enable_eplb: bool  # whether dispatches may bring EPLB statistics
    enable_rank_mask: bool  # whether every call brings a rank mask
    num_tokens: int  # the tokens of this rank in its last dispatch
    eplb_gathered_stats: Tensor | None  # the EPLB statistics of the dispatch in flight: a row for each rank

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
        group: Group | None = None,
    ) -> None:
        self._made_group = group is None
        if group is None:
            group = group_of_communicator(getattr(mnnvl_config, "comm_backend", None))
        self.group = group
        self.ep_size, self.ep_rank = group.size, group.rank
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.eplb_stats_num_experts, self.enable_rank_mask = eplb_stats_num_experts, enable_rank_mask
        self._hidden_size = hidden_size

        def check() -> None:
            check_backend(backend)
            sizes = {"max_num_tokens": max_num_tokens, "top_k": top_k, "num_experts": num_experts}
            optional = {"workspace_size_per_rank": workspace_size_per_rank, "hidden_size": hidden_size}
            for name, value in (sizes | {k: v for k, v in optional.items() if v is not None}).items():
                check_whole(name, value, least=1)
            check_whole("eplb_stats_num_experts", eplb_stats_num_experts, least=0)
            if enable_rank_mask:
                check_bits(group.size)
            if mapping is not None:
                names = ("moe_ep_size", "moe_ep_rank")
                check_place(group, **{f"mapping.{name}": getattr(mapping, name, None) for name in names})

        self._start(group, ActiveRanks.all_of(group.size), check)
        self.enable_eplb = eplb_stats_num_experts > 0

    def _start(self, group: Group, active: ActiveRanks, check: Callable[[], None] = lambda: None) -> None:
        """Set up the exchange of the active ranks, which are those of `group`. Collective over these."""
        given = (
            f"max_num_tokens {self.max_num_tokens}, top_k {self.top_k}, num_experts {self.num_experts}, "
            f"hidden_size {self._hidden_size}, eplb_stats_num_experts {self.eplb_stats_num_experts}, "
            f"enable_rank_mask {self.enable_rank_mask}"
        )
        self._active, self._is_away, self._max_tokens, self.num_tokens = active, False, 0, 0
        self._staged: Tensor | None = None  # the caller's tensor for results while ranks are masked
        self.eplb_gathered_stats = None
        self._exchange = AgreedExchange(
            group,
            placement=lambda: active.keep(Placement.contiguous(self.num_experts, self.ep_size)),
            top_k=self.top_k,
            max_tokens=self.max_num_tokens,
            rank=self.ep_rank,
            given=given,
            check=check,
        )
        self._statistics = (
            GatheredStatistics(group, self.eplb_stats_num_experts) if self.eplb_stats_num_experts else None
        )
        if self._hidden_size is not None:
            self._exchange.learn(Manifest.of_results(self._hidden_size, torch.bfloat16, self.max_num_tokens))

    # -- The workspace -------------------------------------------------------------------------------------

    @property
    def workspace_size_per_rank(self) -> int:
        """Bytes of the workspace that this rank holds now."""
        return self._exchange.carrier.own_buffer.numel()

    @cached_property
    def workspace(self) -> Workspace:
        """A handle for the functions of FlashInfer's that take a workspace, `moe_a2a_dispatch` and others."""
        return Workspace(self.group)

    @cached_property
    def metainfo(self) -> Metainfo:
        """The handle that these functions take beside `workspace`; they then dispatch and combine by this object."""
        made = {(self.top_k, self.num_experts, self.enable_rank_mask): self}
        return Metainfo(self.workspace, self.max_num_tokens, self.eplb_stats_num_experts, made)

    @classmethod
    def get_workspace(
        cls,
        workspace_size_per_rank: int,
        ep_rank: int,
        ep_size: int,
        max_num_tokens: int,
        mapping: Any,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
        group: Group | None = None,
    ) -> dict[str, Any]:
        """A workspace for the functions of FlashInfer's, `moe_a2a_dispatch` and others, among the ranks of `group`.

        Its memory is allocated by the first dispatch, as much as that needs. `mapping` may be None.
        """
        if group is None:
            raise InputError(
                "get_workspace was called without a group",
                expected="the ranks that share the workspace: nothing else says who they are",
                fix="pass group=, or make a MoeAlltoAll, whose `workspace` and `metainfo` are the same",
            )
        check_backend(backend)
        check_place(group, ep_size=ep_size, ep_rank=ep_rank)
        workspace = Workspace(group)
        return {
            "workspace_size_per_rank": workspace_size_per_rank,
            "max_num_tokens": max_num_tokens,
            "ep_rank": ep_rank,
            "ep_size": ep_size,
            "eplb_stats_num_experts": eplb_stats_num_experts,
            "workspace": workspace,
            "metainfo": Metainfo(workspace, max_num_tokens, eplb_stats_num_experts),
        }

    @staticmethod
    def get_moe_workspace_size_per_rank(
        ep_size: int,
        top_k: int,
        max_num_tokens: int,
        hidden_size: int,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
        *,
        backend: str = "trtllm",
    ) -> int:
        """Bytes of a rank's workspace for rows of 16 bits, their ids and weights, and 16-bit results.

        >>> MoeAlltoAll.get_moe_workspace_size_per_rank(ep_size=4, top_k=2, max_num_tokens=10, hidden_size=64)
        10880
        """
        routes = 2 * 4 * top_k
        dispatched = 2 * hidden_size + routes + extra_payload_bytes_per_token
        return moe_a2a_get_workspace_size_per_rank(
            ep_size, max_num_tokens, dispatched, 2 * hidden_size, eplb_stats_num_experts, backend=backend
        )

    def checkpoint_prepare(self) -> None:
        """Free the workspace, on all ranks, until `checkpoint_restore`. A second call does nothing. Collective."""
        if self._is_away:
            return
        if self.group.device.type == "cuda":
            raise HandleError(
                "checkpoint_prepare was called on GPUs",
                expected="ranks on CPUs: CUDA graphs hold addresses of the workspace, and a new one has others",
                fix="close this MoeAlltoAll, and make and capture a new one after the checkpoint",
                rank=self.ep_rank,
            )
        self._check_idle("checkpoint_prepare was called between a dispatch and its combine")
        self._exchange.group.barrier(phase="checkpoint_prepare")
        self._exchange.close()
        self._statistics = None
        self._is_away = True

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Set up the workspace anew, among the ranks of `comm_backend`, a communicator or a group. Collective."""
        if not self._is_away:
            return
        group = group_of_communicator(comm_backend)
        check_place(group, ep_size=self.ep_size, ep_rank=self.ep_rank)
        if self._made_group:
            self.group.close()
        self._made_group = group is not comm_backend
        self.group = self.workspace.group = group
        self._start(group, ActiveRanks.all_of(group.size))

    def close(self) -> None:
        """Give the workspace back. Later calls raise; a group that was passed in stays."""
        self._exchange.close()
        if self._exchange.group is not self.group:
            self._exchange.group.close()
        if self._made_group:
            self.group.close()

    # -- Dispatch ------------------------------------------------------------------------------------------

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """Send row t of each payload to every rank that owns one of the experts of token t, once.

        Returns, for each payload, `[ep_size, runtime_max_tokens_per_rank, ...]`: the rows from each source rank, in
        token order. Slots behind them are zero on CPUs, and undefined on GPUs; with `invalid_token_expert_id` they
        hold that id in the payload `expert_id_payload_index`. The int32 `eplb_local_stats` of every rank are in
        `eplb_gathered_stats` afterwards. Ranks that `active_rank_mask` leaves out are not waited for from now on, and
        their experts get no rows.
        """
        self._check_here()
        self._check_idle("dispatch was called twice")
        active, mask_error = self._exchange.attempt(lambda: self._mask(active_rank_mask))
        if active is not None and active != self._active:
            self._go_on_with(active)
        self._check_usable()

        def check() -> Manifest:
            if mask_error is not None:
                raise mask_error
            most = check_whole(
                "runtime_max_tokens_per_rank", runtime_max_tokens_per_rank, least=0, most=self.max_num_tokens
            )
            experts = self.num_experts if self._exchange.carrier.reads_values else None
            check_batch(token_selected_experts, input_payloads, self.top_k, experts, most, self.group.device)
            check_marks(input_payloads, invalid_token_expert_id, expert_id_payload_index)
            check_statistics(eplb_local_stats, self.eplb_stats_num_experts, self.group.device)
            if self._statistics is not None and eplb_local_stats is not None:
                self._statistics.bring(eplb_local_stats)
            return Manifest.of_payloads(input_payloads, most, statistics=eplb_local_stats is not None)

        with self._naming_ranks():
            manifest, slots = self._exchange.dispatch(check, token_selected_experts, input_payloads)
        assert self._exchange.flight is not None
        self._max_tokens, self.num_tokens = manifest.max_tokens, len(token_selected_experts)
        if self._statistics is not None and manifest.statistics:
            self.eplb_gathered_stats = self._active.spread(self._statistics.gathered())
        mark = None
        if expert_id_payload_index is not None and invalid_token_expert_id is not None:
            mark = Mark(expert_id_payload_index, invalid_token_expert_id)
        self._exchange.carrier.mark_unused(self._exchange.flight, slots, manifest.max_tokens, mark)
        active_ranks = len(self._active.ranks)
        received = [
            self._active.spread(slots_SX.view(active_ranks, manifest.max_tokens, *shape))
            for slots_SX, (_, shape) in zip(slots, manifest.rows, strict=True)
        ]
        if mark is not None:
            for rank in self._active.masked:
                received[mark.payload][rank].fill_(mark.value)
        return received

    def unused_slots(self) -> Tensor:
        """Which slots of the dispatch in flight hold no row: `[ep_size, runtime_max_tokens_per_rank]`."""
        flight = self._check_dispatched("unused_slots")
        used = ~self._exchange.carrier.unused(flight, self._max_tokens)
        return ~self._active.spread(used)

    # -- Combine -------------------------------------------------------------------------------------------

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """`[ep_size, runtime_max_tokens_per_rank, hidden_size]` of the workspace, for results of the last dispatch.

        Results that are written there need no copy: `combine(…, payload_in_workspace=True)`. Collective if results of
        this width and dtype were not used before. While ranks are masked, the tensor is outside of the workspace.
        """
        self._check_dispatched("get_combine_payload_tensor_in_workspace")

        def manifest() -> Manifest:
            check_whole("hidden_size", hidden_size, least=1)
            for_dtype(dtype)
            return Manifest.of_results(hidden_size, dtype, self._same_tokens(runtime_max_tokens_per_rank))

        with self._naming_ranks():
            results = self._exchange.results(self._exchange.redirect(manifest))
        if not self._active.is_all:
            self._staged = results = torch.zeros_like(self._active.spread(results))
        return results

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the results of the last dispatch to their ranks: `[T, H]`, summed in float32, in rank order.

        `payload` is `[ep_size, runtime_max_tokens_per_rank, H]`, weighted and summed over the experts of this rank.
        The sum is rounded once, to the payload's dtype, or to the quantized output that `output_dtype` and
        `output_scales` ask for, and written into `output` if given. With `use_low_precision` results are cast to e4m3
        before they are summed, and the sum is bf16. `active_rank_mask` is that of the dispatch. A combine that raises
        ends the round trip on every rank: dispatch again.
        """
        self._check_dispatched("combine")
        quantized: list[QuantizedOutput | None] = []

        def manifest() -> Manifest:
            max_tokens = self._same_tokens(runtime_max_tokens_per_rank)
            check_results(payload, self.ep_size, max_tokens, self.group.device)
            given = Manifest.of_results(payload.shape[2], payload.dtype, max_tokens)
            if payload_in_workspace:
                self._check_in_workspace(given, payload)
            self._check_outside(output=output, output_scales=output_scales)
            self._check_same_mask(active_rank_mask)
            quantized.append(
                check_output_format(
                    payload,
                    self.num_tokens,
                    output_dtype,
                    output_scales,
                    output_scalar_scale,
                    sf_layout,
                    use_low_precision,
                    output,
                )
            )
            if use_low_precision:
                return Manifest.of_results(payload.shape[2], torch.bfloat16, max_tokens)
            return given

        with self._naming_ranks():
            wanted = self._exchange.redirect(manifest)
            (written,) = quantized
            in_place = payload_in_workspace and self._active.is_all and not use_low_precision
            results = through_e4m3(payload) if use_low_precision else payload
            y_TH = self._exchange.combine(
                wanted,
                None if in_place else self._active.pick(results),
                None if written else output,
                in_float32=written is not None,
            )
        self._staged = self.eplb_gathered_stats = None
        return y_TH if written is None else written.write(y_TH, output)

    def refuse_combine(self, error: InputError) -> NoReturn:
        """Take part in the combine of the last dispatch only to report an error of this rank. All ranks raise."""
        self._check_dispatched("combine")

        def check() -> Manifest:
            raise error

        with self._naming_ranks():
            self._exchange.redirect(check)
        raise error

    def _check_in_workspace(self, manifest: Manifest, payload: Tensor) -> None:
        """Raise unless `payload` is the whole tensor for results, possibly as another view of the same memory."""
        place = self._staged
        if self._active.is_all:
            there = self._exchange.knows(manifest) and self._exchange.owns(payload)
            place = self._exchange.results(manifest) if there else None
        if place is None or payload.data_ptr() != place.data_ptr() or not payload.is_contiguous():
            raise InputError(
                f"payload is {describe(payload)} that is not in the workspace",
                expected="the tensor of get_combine_payload_tensor_in_workspace, for payload_in_workspace=True",
                fix="write the results into that tensor, or pass payload_in_workspace=False",
            )

    def _check_outside(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and self._exchange.owns(tensor):
                raise InputError(
                    f"{name} is in the workspace",
                    expected="a tensor of the caller's own: other ranks still read and write there",
                    fix="allocate it with torch.empty",
                )

    def _same_tokens(self, max_tokens: int) -> int:
        if max_tokens != self._max_tokens:
            raise InputError(
                f"runtime_max_tokens_per_rank is {max_tokens!r}",
                expected=f"{self._max_tokens}, as in the dispatch before",
                fix="pass one value to both",
            )
        return self._max_tokens

    # -- Who takes part, and in which order ----------------------------------------------------------------

    def _mask(self, mask: Tensor | None) -> ActiveRanks:
        return read_mask(mask, self.enable_rank_mask, self._active, self.ep_rank)

    def _check_same_mask(self, mask: Tensor | None) -> None:
        if self._mask(mask) != self._active:
            raise InputError(
                "active_rank_mask is another one than that of the dispatch",
                expected=f"the ranks {list(self._active.ranks)}, as there",
                fix="pass one mask to both; a rank that was lost in between is left out of the next dispatch",
            )

    def _go_on_with(self, active: ActiveRanks) -> None:
        """Set up the exchange anew among the ranks that are left. Collective over these."""
        old = self._exchange
        with self._active.naming(self.ep_rank):
            group = old.group.subgroup([self._active.ranks.index(rank) for rank in active.ranks])
        old.close()
        if old.group is not self.group:
            old.group.close()
        with active.naming(self.ep_rank):
            self._start(group, active)

    @contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        """Inside, errors name EP ranks, and their fix says how to go on after ranks were lost."""
        with self._active.naming(self.ep_rank):
            try:
                yield
            except PlanBroken as error:
                error.fix = (
                    "pass an active_rank_mask without the ranks that were lost, on every rank that is left"
                    if self.enable_rank_mask
                    else "make a new MoeAlltoAll on every rank that is left, on a group of these ranks"
                )
                raise

    def _check_here(self) -> None:
        if self._is_away:
            raise HandleError(
                "the workspace was given back by checkpoint_prepare",
                expected="a workspace",
                fix="call checkpoint_restore on every rank",
                rank=self.ep_rank,
            )

    def _check_usable(self) -> None:
        self._check_here()
        with self._naming_ranks():
            self._exchange.exchange.usability.check()

    def _check_idle(self, found: str) -> None:
        if self._exchange.flight is not None:
            raise out_of_turn(found, "combine the last dispatch first", self.ep_rank)

    def _check_dispatched(self, name: str) -> RoundTrip:
        self._check_usable()
        if self._exchange.flight is None:
            raise out_of_turn(f"{name} was called before a dispatch", "dispatch first", self.ep_rank)
        return self._exchange.flight
