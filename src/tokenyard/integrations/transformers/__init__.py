"""Transformers models whose experts live on several ranks.

from tokenyard.integrations.transformers import shard_experts

sharded = shard_experts(model, group, exchange="one_sided", wire="mxfp8")
tokens = sharded.generate(input_ids, max_new_tokens=64)
"""

from __future__ import annotations

from tokenyard.integrations.transformers import one_rank
from tokenyard.integrations.transformers.loading import experts_left_out, load_without_experts
from tokenyard.integrations.transformers.reports import LayerReport
from tokenyard.integrations.transformers.sharding import (
    ShardedExperts,
    ShardedModel,
    load_sharded,
    shard_experts,
)

one_rank.register()

__all__ = [
    "LayerReport",
    "ShardedExperts",
    "ShardedModel",
    "experts_left_out",
    "load_sharded",
    "load_without_experts",
    "shard_experts",
]
