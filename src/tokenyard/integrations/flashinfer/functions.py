"""FlashInfer's functions for callers that keep the workspace themselves, in place of `MoeAlltoAll`.

    workspace = MoeAlltoAll.get_workspace(nbytes, ep_rank, ep_size, max_num_tokens, mapping, group=group)["workspace"]
    metainfo = moe_a2a_initialize(workspace, ep_rank, ep_size, max_num_tokens)
    received, offset, stats = moe_a2a_dispatch(
        ids, payloads, workspace, metainfo, most, ep_rank, ep_size, top_k, num_experts
    )
    y_TH = moe_a2a_combine(results, num_tokens, workspace, metainfo, most, ep_rank, ep_size, top_k, offset)

`workspace`, `metainfo` and the offset are handles here: callers only pass them on. Behind them is a
`MoeAlltoAll` for each combination of `top_k`, `num_experts` and `enable_rank_mask`, made by the first dispatch with it.
`enable_pdl` and `recv_view_cache` change how FlashInfer launches kernels and caches views, not what it computes: here
they are accepted, and have no effect.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.integrations.flashinfer.all_to_all import MoeAlltoAll
from tokenyard.integrations.flashinfer.callers_handles import Metainfo, Workspace, out_of_turn
from tokenyard.integrations.flashinfer.manifest import check_backend, check_place
from tokenyard.integrations.flashinfer.quantized_output import SfLayout
from tokenyard.rows import describe

# The offset of results, wherever they are: the only part of a workspace that a caller may ask for.
RESULTS_OFFSET = 0


def moe_a2a_initialize(
    workspace: Workspace,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> Metainfo:
    """The metainfo of a workspace, which the other functions take. Not collective."""
    check_backend(backend)
    _check_workspace(workspace)
    check_place(workspace.group, ep_size=ep_size, ep_rank=ep_rank)
    return Metainfo(workspace, max_num_tokens, eplb_stats_num_experts)


def moe_a2a_dispatch(
    token_selected_experts: Tensor,
    input_payloads: list[Tensor],
    workspace: Workspace,
    metainfo: Metainfo,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[Tensor], int, Tensor | None]:
    """`MoeAlltoAll.dispatch`: returns received payloads, the offset of results, and the gathered EPLB statistics."""
    _check_handles(workspace, metainfo)
    check_backend(backend)
    check_place(workspace.group, ep_size=ep_size, ep_rank=ep_rank)
    if workspace.in_flight is not None:
        raise out_of_turn("moe_a2a_dispatch was called twice", "call moe_a2a_combine first", ep_rank)
    layer = (top_k, num_experts, enable_rank_mask)
    if layer not in metainfo.made:
        metainfo.made[layer] = MoeAlltoAll(
            None,
            metainfo.max_num_tokens,
            top_k,
            num_experts,
            eplb_stats_num_experts=metainfo.eplb_stats_num_experts,
            enable_rank_mask=enable_rank_mask,
            group=workspace.group,
        )
    a2a = metainfo.made[layer]
    received = a2a.dispatch(
        token_selected_experts,
        input_payloads,
        runtime_max_tokens_per_rank,
        eplb_local_stats=eplb_local_stats,
        active_rank_mask=active_rank_mask,
    )
    workspace.in_flight = a2a
    return received, RESULTS_OFFSET, a2a.eplb_gathered_stats


def moe_a2a_sanitize_expert_ids(
    expert_ids: Tensor,
    workspace: Workspace,
    metainfo: Metainfo,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Write an id into the slots of received ids, `[ep_size, runtime_max_tokens_per_rank, top_k]`, that hold no row."""
    a2a = _in_flight(workspace, metainfo, "moe_a2a_sanitize_expert_ids", ep_rank, backend)
    unused_WT = a2a.unused_slots()
    if not isinstance(expert_ids, Tensor) or expert_ids.shape[:2] != unused_WT.shape or expert_ids.dim() != 3:
        raise InputError(
            f"expert_ids is {describe(expert_ids)}",
            expected=f"ids that were received: [{unused_WT.shape[0]}, {unused_WT.shape[1]}, {a2a.top_k}]",
            fix="pass the payload of the ids, as moe_a2a_dispatch returned it",
            rank=ep_rank,
        )
    expert_ids.masked_fill_(unused_WT.unsqueeze(-1), invalid_expert_id)


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: Workspace, leading_shape: list[int], slice_start: int, slice_end: int, dtype: torch.dtype
) -> Tensor:
    """The place for results in the workspace: `leading_shape` is `[ep_size, runtime_max_tokens_per_rank]`.

    `slice_start` is the offset that `moe_a2a_dispatch` returned, and `slice_end` lies as many bytes behind it as the
    results take. Any other slice of a workspace is refused.
    """
    _check_workspace(workspace)
    a2a = workspace.in_flight
    if a2a is None:
        found, rank = "a payload was asked for before a dispatch", workspace.group.rank
        raise out_of_turn(found, "dispatch first", rank)
    rows = math.prod(leading_shape)
    hidden_size, rest = divmod(slice_end - slice_start, max(1, rows * dtype.itemsize))
    if slice_start != RESULTS_OFFSET or rest or len(leading_shape) != 2 or leading_shape[0] != a2a.ep_size:
        raise InputError(
            f"bytes {slice_start} to {slice_end} of a workspace, as {leading_shape}",
            expected=f"the results: from {RESULTS_OFFSET}, as [ep_size, runtime_max_tokens_per_rank], whole rows",
            fix="pass the offset that moe_a2a_dispatch returned; received payloads are what it returned, too",
            rank=a2a.ep_rank,
        )
    return a2a.get_combine_payload_tensor_in_workspace(leading_shape[1], hidden_size, dtype)


def moe_a2a_combine(
    payload: Tensor,
    local_num_tokens: int,
    workspace: Workspace,
    metainfo: Metainfo,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: SfLayout = SfLayout.layout_linear,
    output: Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: Tensor | None = None,
    backend: str = "trtllm",
) -> Tensor:
    """`MoeAlltoAll.combine` of the dispatch in flight. All ranks raise if arguments that it repeats have changed."""
    a2a = _in_flight(workspace, metainfo, "moe_a2a_combine", ep_rank, backend)
    workspace.in_flight = None
    given = {
        "local_num_tokens": (local_num_tokens, a2a.num_tokens),
        "ep_size": (ep_size, a2a.ep_size),
        "top_k": (top_k, a2a.top_k),
        "combine_payload_offset": (combine_payload_offset, RESULTS_OFFSET),
        "enable_rank_mask": (enable_rank_mask, a2a.enable_rank_mask),
    }
    for name, (value, dispatched) in given.items():
        if value != dispatched:
            a2a.refuse_combine(
                InputError(
                    f"{name} is {value!r}",
                    expected=f"{dispatched}, as in the dispatch before",
                    fix="pass one value to both",
                )
            )
    return a2a.combine(
        payload,
        runtime_max_tokens_per_rank,
        payload_in_workspace,
        output_dtype,
        output_scales,
        output_scalar_scale,
        sf_layout,
        output,
        use_low_precision=use_low_precision,
        active_rank_mask=active_rank_mask,
    )


def _check_workspace(workspace: object) -> None:
    if not isinstance(workspace, Workspace):
        raise InputError(
            f"workspace is {describe(workspace)}",
            expected="a workspace of tokenyard's, which knows its ranks; a tensor of bytes does not",
            fix='pass MoeAlltoAll.get_workspace(…, group=group)["workspace"], or the `workspace` of a MoeAlltoAll',
        )


def _check_handles(workspace: object, metainfo: object) -> None:
    _check_workspace(workspace)
    if not isinstance(metainfo, Metainfo) or metainfo.workspace is not workspace:
        raise InputError(
            "metainfo is of another workspace"
            if isinstance(metainfo, Metainfo)
            else f"metainfo is {describe(metainfo)}",
            expected="what moe_a2a_initialize returned for this workspace",
            fix="keep the two together",
        )


def _in_flight(
    workspace: Workspace, metainfo: Metainfo, name: str, ep_rank: int, backend: str
) -> MoeAlltoAll:
    """The `MoeAlltoAll` whose dispatch is in flight in a workspace. Raise if there is none, or if a handle is wrong."""
    _check_handles(workspace, metainfo)
    check_backend(backend)
    check_place(workspace.group, ep_rank=ep_rank)
    if workspace.in_flight is None:
        raise out_of_turn(f"{name} was called before a dispatch", "call moe_a2a_dispatch first", ep_rank)
    return workspace.in_flight
