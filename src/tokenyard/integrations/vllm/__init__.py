"""vLLM's modular MoE kernel over tokenyard: one class that prepares and finalizes, one that holds experts.

    a1q, a1q_scale, meta, ids, weights = prepare_finalize.prepare(a1, topk_weights, topk_ids, …)   encode, dispatch
    experts.apply(output=results, hidden_states=a1q, w1=w1, w2=w2, …)                              compute
    prepare_finalize.finalize(y, results, weights, ids, …, experts.finalize_weight_and_reduce_impl())      combine

Both belong to one layer of a plan, and its wiring says who has which duty. What vLLM's arguments say
about a duty is compared with the wiring, and a difference raises `ContractError`:

    duty             what vLLM says about it
    QUANTIZE, PAD    `quant_config` and `defer_input_quant`: `prepare` does it, or the experts, or no part
    WEIGHT           `apply_router_weight_on_input`, and the kind of `weight_and_reduce_impl`
    REDUCE_EXPERTS   the kind of `weight_and_reduce_impl`: done (NoOP), or left to `finalize` (Contiguous, Delegate)
    REDUCE_RANKS     `output_is_reduced()` is True: the exchange does it, and no later part may

Where vLLM is installed, the classes are subclasses of its abstract ones, and hand out its types. Where it is not, they
have no base classes, and types of the same names. `plugin` puts them into an engine: docs/guide/vllm.md.

The classes are imported when they are asked for. vLLM imports the plugin in every process, and where the plugin is off
this must not import vLLM's kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenyard.integrations.vllm.experts import TokenyardExperts
    from tokenyard.integrations.vllm.prepare_finalize import TokenyardPrepareAndFinalize

__all__ = ["TokenyardExperts", "TokenyardPrepareAndFinalize"]
_MODULES = {"TokenyardExperts": "experts", "TokenyardPrepareAndFinalize": "prepare_finalize"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
