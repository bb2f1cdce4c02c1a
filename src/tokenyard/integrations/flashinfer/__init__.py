"""FlashInfer's `MoeAlltoAll` and its functions, with the arguments of FlashInfer 0.7.2, on a tokenyard workspace."""

from tokenyard.integrations.flashinfer.all_to_all import MoeAlltoAll
from tokenyard.integrations.flashinfer.callers_handles import moe_a2a_get_workspace_size_per_rank
from tokenyard.integrations.flashinfer.functions import (
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from tokenyard.integrations.flashinfer.quantized_output import SfLayout
from tokenyard.integrations.flashinfer.rank_mask import moe_a2a_active_rank_mask

__all__ = [
    "MoeAlltoAll",
    "SfLayout",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]
