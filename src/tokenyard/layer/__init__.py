"""The layer: `moe_layer` shows the way of a token on one page."""

from tokenyard.layer.micro_batches import overlapped
from tokenyard.layer.moe_layer import MoELayer
from tokenyard.layer.pending import PendingBatch

__all__ = ["MoELayer", "PendingBatch", "overlapped"]
