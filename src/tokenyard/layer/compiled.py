"""A layer under `torch.compile`: one custom operator, `tokenyard::moe_layer`, which the compiler does not trace.

A layer cannot be traced: it waits for other ranks, and only then knows how many rows arrive. A compiled model
therefore holds the layer as one call,

    y_TH = torch.ops.tokenyard.moe_layer(x_TH, routes, …, key)

whose result is a fresh tensor like `x_TH`, and whose work is the layer's own `forward`. All its checks, and its
errors, are those of an eager call. An operator takes no Python objects: `key` is a number by which it looks the layer
up. The number is held in a tensor, because the compiler treats the plain numbers of a module as constants: equal blocks
of a model, compiled one by one, would each be compiled anew, and from the ninth on the compiler would refuse.

- **Order.** Every rank calls every layer, in one order. The operator is registered with an ordered effect, so the
  compiler neither drops a call whose result is not used, nor merges two equal calls, nor swaps layers.
- **CUDA graphs** that the compiler makes (`mode="reduce-overhead"`) must leave the operator out. The tag for that,
  `cudagraph_unsafe`, is not seen on an operator with an effect; the option `custom_should_partition_ops` is.
- **`out`.** The operator mutates none of its arguments, so that it can be ordered and differentiated. It gets `out`
  only to check it, and its result is copied into `out` afterwards: one copy more than in an eager call.
- **Gradients.** Without a training plan there are none, in compiled calls or in eager ones. A call that would be a step
  of a training raises an error, and so does `backward` through a layer that is in evaluation mode. In a training plan
  a call with gradients enabled is another operator (`compiled_training`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._library.effects import EffectType

from tokenyard.errors import HandleError, TokenyardError
from tokenyard.layer.call import Inputs
from tokenyard.routing import Routes

ORDERED = EffectType.ORDERED  # compilers neither drop, merge nor swap calls of operators with this effect

# What to do where gradients are refused.
INFERENCE = (
    "plan(..., training=True) to train; to infer, call the model under torch.no_grad(), after model.eval(), or after "
    "model.requires_grad_(False)"
)

# The layers by their keys. The references are weak: a layer that is freed leaves no entry.
_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_keys = itertools.count(1)

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_of_the_graph(method: Method) -> Method:
    """Wrap a method so that `torch.compile` breaks the graph and calls it eagerly, between two graphs."""

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            from tokenyard.layer import graph_break  # loads the compiler, which takes a second

            if method.__name__ == "unreduced":
                return graph_break.call_unreduced(method, *arguments, **options)
            return graph_break.call_start(method, *arguments, **options)
        return method(*arguments, **options)

    return cast(Method, call)


def register(layer: nn.Module) -> Tensor:
    """Register a layer for the operator; return the key by which it is found, for as long as the layer lives."""
    number = next(_keys)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def call_operator(
    layer: Any,
    x_TH: Tensor,
    routes_or_logits: Routes | Tensor,
    payloads: Mapping[str, Tensor],
    out: Tensor | None,
    add: Tensor | None,
) -> Tensor:
    """Call the operator for a layer, with tensors and plain values only: this call stands in the compiled graph."""
    ids_or_logits, weights_TK, scaled_by = routes_or_logits, None, 1.0
    if isinstance(routes_or_logits, Routes):
        ids_or_logits, weights_TK = routes_or_logits.topk_ids_TK, routes_or_logits.topk_weights_TK
        scaled_by = routes_or_logits.scaled_by
    # Parameters of shared experts are not arguments of `forward`. The operator takes them as arguments, or `backward`
    # would silently leave their gradients out.
    trained = [p for p in layer.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
    routed = cast(Tensor, ids_or_logits) if weights_TK is None else weights_TK
    y_TH = torch.ops.tokenyard.moe_layer(
        x_TH,
        ids_or_logits,
        weights_TK,
        scaled_by,
        list(payloads),
        list(payloads.values()),
        add,
        out,
        trained,
        layer.key,
        is_training_step(layer, (x_TH, routed, add)),
    )
    return cast(Tensor, y_TH if out is None else out.copy_(y_TH))


def layer_of(key: Tensor) -> Any:
    """The layer with this key."""
    layer = _layers.get(int(key))
    if layer is None:
        raise HandleError(
            f"layer {int(key)} of a compiled model is gone",
            expected="the layer to live as long as the compiled model is called",
            fix="keep a reference to the model, or compile the new one",
        )
    return layer


@torch.library.custom_op(
    "tokenyard::moe_layer",
    mutates_args=(),
    schema="(Tensor x_TH, Tensor ids_or_logits, Tensor? topk_weights_TK, float scaled_by, str[] payload_names, "
    "Tensor[] payloads, Tensor? add, Tensor? out, Tensor[] trained, Tensor key, bool trains) -> Tensor",
)
def moe_layer(
    x_TH: Tensor,
    ids_or_logits: Tensor,
    topk_weights_TK: Tensor | None,
    scaled_by: float,
    payload_names: Sequence[str],
    payloads: Sequence[Tensor],
    add: Tensor | None,
    out: Tensor | None,
    trained: Sequence[Tensor],
    key: Tensor,
    trains: bool,
) -> Tensor:
    """Call the layer's `forward`, which raises if the call `trains`.

    Without `topk_weights_TK`, `ids_or_logits` holds logits. `out` is only checked.
    """
    routes_or_logits: Routes | Tensor = ids_or_logits
    if topk_weights_TK is not None:
        routes_or_logits = Routes(
            topk_ids_TK=ids_or_logits, topk_weights_TK=topk_weights_TK, scaled_by=scaled_by
        )
    if trains:  # an operator is called without gradients: show the layer what its caller wants
        x_TH = x_TH.detach().requires_grad_()
    with torch.set_grad_enabled(trains):
        y_TH = layer_of(key).forward(
            x_TH,
            routes_or_logits,
            payloads=dict(zip(payload_names, payloads, strict=True)),
            out=None if out is None else torch.empty_like(out, memory_format=torch.contiguous_format),
            add=add,
        )
    return cast(Tensor, y_TH)


@moe_layer.register_fake
def _(x_TH: Tensor, *others: Any) -> Tensor:
    out = others[6]
    # A wrong `out` is not an error here: the layer itself raises it when it runs, on all ranks.
    like = x_TH if out is None else out
    return like.new_empty(like.shape)


moe_layer.register_effect(ORDERED)


# -- Gradients ---------------------------------------------------------------------------------------------------
# Experts are for inference only. Asking for gradients through them raises, in place of giving zeros silently. Whether a
# caller will ask is not known when a layer is called: models are often called with gradients enabled only to infer. In
# training mode, with rows, routing weights or a residual that require gradients, it is taken for sure, so that nobody
# pays for a forward in vain. Parameters of shared experts alone do not count: those of an ordinary module require
# gradients, and a layer that nobody has put into evaluation mode is in training mode.


def is_training_step(module: nn.Module, inputs: Iterable[Tensor | None]) -> bool:
    """Whether a call is one of a training: in training mode, gradients enabled, and an input that requires one."""
    if not torch.is_grad_enabled() or not module.training:
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in inputs)


def refuse_training(layer: Any, inputs: Inputs) -> None:
    """Raise if a call is one of a training, before its rows are sent."""
    if is_training_step(layer, _given(inputs)):
        raise HandleError(
            "the layer was called in training mode, with gradients enabled and an input that requires them",
            expected="inference: experts are not differentiated",
            fix=INFERENCE,
            layer=layer.name,
        )


def _given(inputs: Inputs) -> list[Tensor]:
    """The tensors of a call whose gradients could be asked for."""
    routed = inputs.routes_or_logits
    routed = routed.topk_weights_TK if isinstance(routed, Routes) else routed
    return [one for one in (inputs.x_TH, routed, inputs.add) if isinstance(one, Tensor)]


def without_gradient(
    y_TH: Tensor, inputs: Iterable[Tensor | None], error: Callable[[], TokenyardError]
) -> Tensor:
    """`y_TH`, computed without gradients. If one of its inputs requires one, `backward` raises this error."""
    if not torch.is_grad_enabled():
        return y_TH
    wanting = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    return cast(Tensor, cast(Any, _NoGradient).apply(error, y_TH, *wanting)) if wanting else y_TH


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: Callable[[], TokenyardError], y_TH: Tensor, *wanting: Tensor) -> Tensor:
        ctx.error = error
        return y_TH.view_as(y_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error()


def refuse_gradients(layer: Any, y_TH: Tensor, inputs: Inputs) -> Tensor:
    """The result of an eager call; `backward` through it raises."""
    asked = itertools.chain(_given(inputs), layer.parameters())
    return without_gradient(y_TH, asked, partial(_no_gradient, layer.name))


def _no_gradient(layer: str) -> HandleError:
    return HandleError(
        "backward was called through a layer",
        expected="inference: experts are not differentiated",
        fix=INFERENCE,
        layer=layer,
    )


@torch.library.custom_op("tokenyard::moe_layer_backward", mutates_args=())
def moe_layer_backward(grad_TH: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Tensor) -> Tensor:
    """Raise: there is no gradient. Being an operator, it raises when `backward` runs, not when a compiler traces it."""
    raise _no_gradient(layer_of(key).name)


@moe_layer_backward.register_fake
def _(grad_TH: Tensor, shape: Sequence[int], dtype: torch.dtype, key: Tensor) -> Tensor:
    return grad_TH.new_empty(shape, dtype=dtype)


def _remember_shapes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[-2])  # the key
    ctx.inputs = [_shapes(value) for value in inputs]


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return [_shapes(item) for item in value] if isinstance(value, list) else None


def _backward(ctx: Any, grad_TH: Tensor) -> tuple[Any, ...]:
    (key,) = ctx.saved_tensors

    def gradient(known: Any, needed: Any) -> Any:
        if isinstance(known, list):
            return [gradient(*both) for both in zip(known, needed, strict=True)]
        return moe_layer_backward(grad_TH, *known, key) if known is not None and needed else None

    return tuple(gradient(*both) for both in zip(ctx.inputs, ctx.needs_input_grad, strict=True))


moe_layer.register_autograd(_backward, setup_context=_remember_shapes)
