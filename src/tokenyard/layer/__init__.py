"""The layer: `moe_layer` shows the way of a token on one page."""

from tokenyard.layer.moe_layer import MoELayer

__all__ = ["MoELayer"]
