"""Transformers models whose experts are on several ranks.

    sharded = shard_experts(model, group, exchange="one_sided", wire="mxfp8")
    tokens = sharded.generate(input_ids, max_new_tokens=64)

The modules, from the model inwards:

- `expert_modules`: the experts modules of a model, as layers of a plan; where a rank's own experts come from.
- `loading`: loads a model without its experts.
- `sharding`: `shard_experts`, `load_sharded`, and the model that they give.
- `state_dicts`: the state dict of a sharded model as Transformers has it.
- `synchronized_passes`: passes that all ranks make together, though ranks need different numbers of them.
- `reports`: rows, bytes and seconds of each layer, on all ranks.
- `registry_backend`: our experts in Transformers' registry, for models that are not sharded.
"""

from __future__ import annotations

try:
    import transformers.integrations.moe  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tokenyard.integrations.transformers needs transformers 5.17 or newer: pip install 'tokenyard[transformers]'"
    ) from error

from tokenyard.integrations.transformers import registry_backend
from tokenyard.integrations.transformers.loading import experts_left_out, load_without_experts
from tokenyard.integrations.transformers.reports import LayerReport
from tokenyard.integrations.transformers.sharding import (
    ShardedExperts,
    ShardedModel,
    load_sharded,
    shard_experts,
)

registry_backend.register()

__all__ = [
    "LayerReport",
    "ShardedExperts",
    "ShardedModel",
    "experts_left_out",
    "load_sharded",
    "load_without_experts",
    "shard_experts",
]
