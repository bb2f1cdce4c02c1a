"""The MoE layer, `MoELayer`: router, dispatch, experts and combine in one module."""

from tokenyard.layer.micro_batches import overlapped
from tokenyard.layer.moe_layer import MoELayer
from tokenyard.layer.pending import PendingBatch

__all__ = ["MoELayer", "PendingBatch", "overlapped"]
