"""FlashInfer's `MoeAlltoAll`, with the methods and arguments that its callers use, on a tokenyard workspace."""

from tokenyard.integrations.flashinfer.all_to_all import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank

__all__ = ["MoeAlltoAll", "moe_a2a_get_workspace_size_per_rank"]
