"""`experts_implementation="tokenyard"`: our experts under a Transformers model that is not sharded.

Transformers asks a registry which function computes its experts modules. Importing this package puts ours there:

    model.set_experts_implementation("tokenyard")     or     from_pretrained(…, experts_implementation="tokenyard")

There is no plan and no group. The model's own weights are used without a copy, also after they were changed in place
or moved.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenyard import experts as experts_room
from tokenyard.experts import Experts, ExpertsSpec
from tokenyard.formats import for_dtype
from tokenyard.integrations.transformers.expert_modules import (
    activation_of,
    config_of,
    no_gradient,
    plain_format,
    sizes_of,
    tensors_of,
    weights_of,
)
from tokenyard.layer.compiled import without_gradient
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows

NAME = "tokenyard"

# The experts of each module, and the addresses of the weights that they were made with.
_built: WeakKeyDictionary[nn.Module, tuple[Experts, object]] = WeakKeyDictionary()


def tokenyard_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What Transformers calls: the weighted sum of each row's experts, in the dtype of the rows."""
    x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    with torch.no_grad():
        experts = _experts(module, top_k_index.shape[1])
        # Where Transformers itself splits experts between ranks, the first id after the local ones means: not here.
        nobody = top_k_index == experts.spec.num_local_experts
        received = ReceivedRows(
            rows=for_dtype(x_TH.dtype).encode(x_TH.detach()),
            routes=LocalRoutes(
                ids_RK=top_k_index.masked_fill(nobody, -1).int(), weights_RK=top_k_weights.float()
            ),
            counts_W=(x_TH.shape[0],),
            may_be_empty=True,
        )
        result = experts(received)
    assert isinstance(result, ExpertRows)
    return without_gradient(result.rows_RH.to(x_TH.dtype), [x_TH], no_gradient).reshape(hidden_states.shape)


def _experts(module: nn.Module, top_k: int) -> Experts:
    """Our experts with the module's own weights; made anew when the weights have other addresses."""
    found = _built.get(module)
    if found is None:  # raises if the family, and so the names of its weights, is not known
        config_of(module, type(module).__name__)
    tensors = tensors_of(module)
    place = (top_k, *((tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors.values()))
    if found is None or found[1] != place:
        num_experts, hidden, inner = sizes_of(module)
        spec = ExpertsSpec(
            hidden_size=hidden,
            intermediate_size=inner,
            num_local_experts=num_experts,
            top_k=top_k,
            activation=activation_of(module, config_of(module, type(module).__name__)),
            bias=bool(module.has_bias),
            weights=plain_format(tensors["w13"]),
            dtype=tensors["w13"].dtype,
        )
        found = experts_room.get("grouped")(spec, weights_of(module), adopt=True), place
        _built[module] = found
    return found[0]


def register() -> None:
    """Make the implementation known to Transformers. Importing `tokenyard.integrations.transformers` does it."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, tokenyard_experts)
