"""Checkpoints: read the experts of a model from safetensors files, a rank's share at a time."""

from __future__ import annotations

from tokenyard.checkpoints.checkpoint import Checkpoint, load_experts, open_checkpoint, open_together
from tokenyard.checkpoints.config import CONFIG, read_json, text_config
from tokenyard.checkpoints.conversion import TARGETS, Conversion, ConvertedLayer, convert
from tokenyard.checkpoints.files import read_tensors
from tokenyard.checkpoints.header import StoredTensor
from tokenyard.checkpoints.layers import CheckpointLayer, declared_layout, recipe_inner
from tokenyard.checkpoints.layout import Layout
from tokenyard.checkpoints.reading import PackedMatrix
from tokenyard.checkpoints.writer import write_tensors

__all__ = [
    "CONFIG",
    "TARGETS",
    "Checkpoint",
    "CheckpointLayer",
    "Conversion",
    "ConvertedLayer",
    "Layout",
    "PackedMatrix",
    "StoredTensor",
    "convert",
    "declared_layout",
    "load_experts",
    "open_checkpoint",
    "open_together",
    "read_json",
    "read_tensors",
    "recipe_inner",
    "text_config",
    "write_tensors",
]
