"""`experts_implementation="tokenyard"`: our experts under a Transformers model that is not sharded.

Transformers asks a registry which function computes its experts modules. Importing this package puts ours there:

    model.set_experts_implementation("tokenyard")     or     from_pretrained(…, experts_implementation="tokenyard")

There is no plan and no group. The model's own weights are used without a copy, also after they were changed in place
or moved.

Transformers takes any registered name for any model. It ignores the name in models whose experts do not ask the
registry (Llama 4's among them). Such a model is refused here when it is built, or given the name.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenyard.checkpoints.families import counts_experts
from tokenyard.errors import InputError
from tokenyard.experts import Experts, ExpertsSpec, GroupedExperts
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
from tokenyard.layer.compiled import is_training_step, without_gradient
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows

NAME = "tokenyard"

# The experts of each module, and the addresses of the weights that they were made with.
_built: WeakKeyDictionary[nn.Module, tuple[Experts, object]] = WeakKeyDictionary()


def tokenyard_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What Transformers calls: the weighted sum of each row's experts, in the dtype of the rows."""
    x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    experts = _experts(module, top_k_index.shape[1])  # raises if the family is not known
    inputs = (x_TH, top_k_weights, *tensors_of(module).values()) if torch.is_grad_enabled() else ()
    if is_training_step(module, inputs):
        name = type(module).__name__
        raise no_gradient(
            f"{name} was called in training mode, with gradients enabled and an input that requires them"
        )
    with torch.no_grad():
        # Where Transformers itself splits experts between ranks, the first id after the local ones means: not here.
        elsewhere = top_k_index == experts.spec.num_local_experts
        received = ReceivedRows(
            rows=for_dtype(x_TH.dtype).encode(x_TH.detach()),
            routes=LocalRoutes(
                ids_RK=top_k_index.masked_fill(elsewhere, -1).int(), weights_RK=top_k_weights.float()
            ),
            counts_W=(x_TH.shape[0],),
            may_be_empty=True,
        )
        result = experts(received)
    assert isinstance(result, ExpertRows)
    return without_gradient(result.rows_RH.to(x_TH.dtype), inputs, no_gradient).reshape(hidden_states.shape)


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
        found = GroupedExperts(spec, weights_of(module), adopt=True), place
        _built[module] = found
    return found[0]


def register() -> None:
    """Make the implementation known to Transformers. Importing `tokenyard.integrations.transformers` does it."""
    if NAME in ALL_EXPERTS_FUNCTIONS:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, tokenyard_experts)
    chosen = PreTrainedModel.get_correct_experts_implementation

    @wraps(chosen)
    def checked(self: Any, requested_experts: str | None) -> str:
        if requested_experts == NAME:
            for model in self.modules():  # itself, and the models that it is made of, once they are built
                if isinstance(model, PreTrainedModel):
                    check_asks_registry(model)
        return chosen(self, requested_experts)

    # Every model asks this method about the name that it was given, when it is built and later.
    PreTrainedModel.get_correct_experts_implementation = checked  # type: ignore[method-assign]


def check_asks_registry(model: Any) -> None:
    """Raise if a model has experts that never ask Transformers' registry what computes them.

    Of a model of several models, each is asked itself. One without experts (a vision model) is passed over.
    """
    own = {key: value for key, value in model.config.to_dict().items() if not isinstance(value, dict)}
    if model._can_set_experts_implementation() or not counts_experts(own):
        return
    family = model.config.model_type
    raise InputError(
        f"{type(model).__name__} was given experts_implementation={NAME!r}, and would ignore it: in this version of "
        f"Transformers, the experts of model_type {family!r} cannot be replaced by name",
        expected="a model whose experts module has Transformers' `use_experts_implementation`",
        fix="leave `experts_implementation` out: the model computes its experts itself",
    )
