"""What the plugin refuses when a model is loaded, each with a reason and a fix. Nothing of vLLM is imported.

Each refusal reads vLLM's own configuration: of a layer (`FusedMoEConfig`), and of the ranks (`ParallelConfig`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenyard.errors import ContractError

# The versions of vLLM that the plugin takes. Engines were run with the first one; the others were compared with it, in
# what the plugin uses of them (tests/integrations/test_vllm_versions.py).
VERSIONS = ("0.32", "0.33")
# The all2all backend of vLLM under which rows, ids and weights reach `prepare` unchanged: its default.
ALL2ALL_BACKEND = "allgather_reducescatter"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One thing that the plugin cannot serve."""

    name: str  # what it is, as vLLM's users call it
    why: str
    fix: str
    # What was found in the configuration of a layer and of its ranks, or None. Some refusals are found elsewhere.
    found: Callable[[Any, Any], str | None] = lambda moe, ranks: None


def _where(condition: Callable[[Any, Any], bool], found: str) -> Callable[[Any, Any], str | None]:
    return lambda moe, ranks: found if condition(moe, ranks) else None


def _backend(moe: Any, _: Any) -> str | None:
    backend = moe.moe_parallel_config.all2all_backend
    return None if backend == ALL2ALL_BACKEND else f"all2all_backend is {backend!r}"


def _substituted(moe: Any, _: Any) -> str | None:
    substituted = moe.num_logical_experts - moe.num_experts
    return f"{substituted} of {moe.num_logical_experts} experts are constants" if substituted > 0 else None


def _split(moe: Any, _: Any) -> str | None:
    size = moe.moe_parallel_config.tp_size
    return f"each expert is split between {size} ranks" if size > 1 else None


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        name="expert substitution",
        found=_substituted,
        why="vLLM adds their outputs on one rank, to what it takes for a part of a sum",
        fix="unset TOKENYARD_VLLM for this model",
    ),
    Refusal(
        name="EPLB, redundant experts",
        found=_where(
            lambda moe, ranks: ranks.enable_eplb or moe.num_experts > moe.num_logical_experts,
            "expert load balancing (EPLB) is on",
        ),
        why="the plan knows one place for every expert, and vLLM would move experts while it is in use",
        fix="leave --enable-eplb out",
    ),
    Refusal(
        name="elastic EP",
        found=_where(lambda _, ranks: ranks.enable_elastic_ep, "elastic expert parallelism is on"),
        why="the plan is made for ranks that stay",
        fix="leave --enable-elastic-ep out",
    ),
    Refusal(
        name="LoRA on experts",
        found=_where(lambda moe, _: moe.is_lora_enabled, "LoRA is on"),
        why="nothing adds the adapters to the experts' products",
        fix="leave --enable-lora out, and merge the adapter into the checkpoint",
    ),
    Refusal(
        name="dual-batch overlap",
        found=_where(lambda _, ranks: ranks.use_ubatching, "dual-batch overlap (micro-batches) is on"),
        why="one batch of a layer is on its way at a time",
        fix="leave --enable-dbo and --ubatch-size out",
    ),
    Refusal(
        name="`skip_final_all_reduce`",
        found=_where(lambda moe, _: moe.skip_final_all_reduce, "the model asks for skip_final_all_reduce"),
        why="the exchange has summed over ranks already, and the model would sum a second time",
        fix="unset TOKENYARD_VLLM for this model",
    ),
    Refusal(
        name="experts split by TP",
        found=_split,
        why="ranks hold whole experts",
        fix="add --enable-expert-parallel",
    ),
    Refusal(
        name="another all2all backend",
        found=_backend,
        why="it changes the order of experts or the shape of a batch, and tokenyard moves the rows",
        fix=f"leave --all2all-backend out: {ALL2ALL_BACKEND} is the default",
    ),
)
# Refusals that are found elsewhere than in those configurations.
MONOLITHIC = Refusal(
    name="monolithic experts",
    why="they route by themselves, and an exchange has to know the routes before",
    fix="set TOKENYARD_VLLM=experts, or choose another --moe-backend",
)
QUANTIZED = Refusal(
    name="a quantization that the plugin does not read",
    why="vLLM's own experts would run, without an exchange",
    fix="set TOKENYARD_VLLM=experts and use a checkpoint that `tokenyard convert` writes, or unset it for this model",
)
VERSION = Refusal(
    name="another version of vLLM",
    why="the names that the plugin reads move between versions",
    fix=f"install vLLM {' or '.join(VERSIONS)}, or unset TOKENYARD_VLLM",
)


EVERY_REFUSAL = (*REFUSALS, MONOLITHIC, QUANTIZED, VERSION)


def refused(refusal: Refusal, found: str, *, layer: str | None = None) -> ContractError:
    """The error of a refusal."""
    return ContractError(
        f"{found}: {refusal.why}",
        expected="an engine that docs/guide/vllm.md says is served",
        fix=refusal.fix,
        layer=layer,
    )


def check_supported(moe: Any, ranks: Any, *, layer: str | None = None) -> None:
    """Raise if a layer, or its ranks, are set to what the plugin cannot serve."""
    for refusal in REFUSALS:
        if (found := refusal.found(moe, ranks)) is not None:
            raise refused(refusal, found, layer=layer)


def check_version(version: str) -> None:
    """Raise unless the plugin takes this version of vLLM.

    >>> check_version("0.32.1+cpu")
    >>> check_version("0.26.0")
    Traceback (most recent call last):
    tokenyard.errors.ContractError: vLLM is 0.26.0: the names that the plugin reads move between versions; expected \
an engine that docs/guide/vllm.md says is served; fix: install vLLM 0.32 or 0.33, or unset TOKENYARD_VLLM
    """
    if not is_taken(version):
        raise refused(VERSION, f"vLLM is {version}")


def is_taken(version: str) -> bool:
    """Whether the plugin takes a version of vLLM.

    >>> is_taken("0.32.0"), is_taken("0.33.0rc1"), is_taken("0.34.0"), is_taken("dev")
    (True, True, False, False)
    """
    return ".".join(version.split(".")[:2]) in VERSIONS
