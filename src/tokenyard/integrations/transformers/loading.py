"""Load models without their experts: of a checkpoint, each rank reads the shared tensors, and its own experts.

    sharded = load_sharded("path/of/a/model", group, wire="mxfp8")

Shared tensors (attention, norms, embeddings, routers, shared experts) are read once and become the model's parameters
without a copy. Experts modules never get memory: while the model is built, an `ExpertsLeftOut` takes the
place of each, which knows its shapes. Only safetensors files are read (`tokenyard.checkpoints`), never a pickle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.utils import logging as transformers_logging

from tokenyard.checkpoints import Checkpoint, open_checkpoint
from tokenyard.errors import ContractError, InputError
from tokenyard.integrations.transformers.expert_modules import (
    FIELDS,
    FLAGS,
    config_of,
    is_experts,
    tensors_of,
)

# Building a model changes global state of torch for a while (the default dtype, how weights are initialized). Ranks
# that are threads of one process therefore take turns.
_one_at_a_time = threading.RLock()


class ExpertsLeftOut(nn.Module):
    """Takes the place of an experts module that was not built: its shapes and flags, and no memory."""

    # Transformers reads this of every module: tensors of a checkpoint with such names are not reported as unexpected.
    _keys_to_ignore_on_load_unexpected = [r"\.experts\."]  # noqa: RUF012

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        for flag in (*FLAGS, "has_post_expert_norm", "limit", "alpha"):
            if hasattr(experts, flag):
                setattr(self, flag, getattr(experts, flag))
        for name, tensor in tensors_of(experts).items():
            # A plain attribute: neither a parameter nor a buffer.
            shape = torch.empty_like(tensor, device="meta", requires_grad=False)
            object.__setattr__(self, FIELDS[name], shape)

    def forward(self, *_: Any) -> Tensor:
        """Raise: there are no weights to compute with."""
        raise ContractError(
            "a model was called whose experts were left out",
            expected="experts",
            fix="shard_experts(model, group, checkpoint=…) gives every rank its share",
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{FIELDS[name]} {list(tensor.shape)}" for name, tensor in tensors_of(self).items())


@contextmanager
def experts_left_out() -> Iterator[None]:
    """Models that this thread builds or loads inside come without their experts.

    >>> import transformers
    >>> config = transformers.AutoConfig.for_model("qwen3_moe", hidden_size=64, moe_intermediate_size=32,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=128, vocab_size=100)
    >>> with experts_left_out():
    ...     model = transformers.AutoModelForCausalLM.from_config(config)
    >>> model.model.layers[0].mlp.experts
    ExpertsLeftOut(gate_up_proj [128, 64, 64], down_proj [128, 64, 32])
    """
    before, _leaving_out.now = getattr(_leaving_out, "now", False), True
    try:
        yield
    finally:
        _leaving_out.now = before


_leaving_out = threading.local()


def _leave_out(_: nn.Module, __: str, module: nn.Module | None) -> nn.Module | None:
    if module is None or not getattr(_leaving_out, "now", False) or not is_experts(module):
        return None
    if not isinstance(module, ExpertsLeftOut):
        config_of(module, type(module).__name__)  # raises, where the family is not known
    return ExpertsLeftOut(module)


# Registered once: torch calls these hooks whenever a module gets a child, in any thread.
register_module_module_registration_hook(_leave_out)  # type: ignore[arg-type] # it may return a module


def load_without_experts(checkpoint: Checkpoint | str | Path, *, dtype: torch.dtype | None = None) -> Any:
    """A causal language model with everything but its experts, in evaluation mode.

    `dtype` is the model's, by default the one that its config says. A checkpoint
    that quantizes other tensors than those of experts is refused, because the model is plain there.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = _model_class(config, checkpoint)
    if getattr(config, "quantization_config", None) is not None:
        # Experts are read by us, as they are; the rest is plain, or refused below.
        del config.quantization_config
    state = {name: checkpoint.tensor(name) for name in checkpoint.shared}
    with _one_at_a_time, experts_left_out(), _without_progress_bar():
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype or getattr(config, "dtype", None) or torch.bfloat16,
            output_loading_info=True,
        )
    _check_found(checkpoint, found)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def fill_shared(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the shared tensors of a model that was built on the meta device.

    A tensor that has several names (tied embeddings) is one tensor afterwards, as in the model of the checkpoint.
    """
    names = [name for name, tensor in _shared_tensors(model) if tensor.is_meta]
    if not names:
        return
    loaded = load_without_experts(checkpoint, dtype=getattr(model, "dtype", None))
    for name in names:
        owner_name, _, attribute = name.rpartition(".")
        try:
            source = loaded.get_submodule(owner_name)
        except AttributeError:
            source = None
        value = getattr(source, attribute, None)
        if value is None or value.is_meta:
            raise InputError(
                f"{name} is on the meta device, and {type(loaded).__name__} of this checkpoint has no such tensor",
                expected=f"a {type(loaded).__name__}",
                fix="load the model with `load_sharded`",
            )
        setattr(model.get_submodule(owner_name), attribute, value)  # stays a parameter, or a buffer
    model.eval()


def _shared_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that do not belong to experts, under all of their names."""
    modules = model.named_modules(remove_duplicate=False)
    experts = tuple(f"{name}." for name, module in modules if is_experts(module))
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *model.named_buffers(remove_duplicate=False)]:
        if not name.startswith(experts):
            yield name, tensor


def _model_class(config: Any, checkpoint: Checkpoint) -> Any:
    """The class of a config's causal language model. Raise, before any tensor is read, if its family is not known."""
    holder = nn.Module()
    holder.config = config
    config_of(holder, str(checkpoint.path))
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise InputError(
            f"{checkpoint.path} is a {type(config).__name__}, of which Transformers has no causal language model",
            expected="a causal language model",
            fix="load it under `experts_left_out()` with its own class, and pass it to shard_experts(checkpoint=…)",
        )
    return mapping[type(config)]


def _check_found(checkpoint: Checkpoint, found: dict[str, Any]) -> None:
    missing = sorted(found["missing_keys"])
    # Scales that no module takes: the codes that they belong to were loaded as if they were plain numbers.
    unused = sorted(key for key in found["unexpected_keys"] if "scale" in key or "packed" in key)
    if missing and not unused:
        raise checkpoint.error(
            f" has no {missing[0]!r}" + (f", nor {len(missing) - 1} more" if missing[1:] else ""),
            expected="all parameters of the model that its config describes",
            fix="check that all files of the model are there",
            tensor=missing[0],
        )
    if unused:
        raise checkpoint.error(
            f" quantizes more than its experts: {unused[0]!r}, and {len(unused) - 1} more",
            expected="attention, norms, embeddings and shared experts in bf16, fp16 or float32",
            fix="load the model under `experts_left_out()` with Transformers' own quantizer, and pass it to "
            "shard_experts(model, group, checkpoint=…)",
            tensor=unused[0],
        )


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the progress bar of Transformers: parameters are not copied, and each rank would show one."""
    shown = transformers_logging.is_progress_bar_enabled()
    set_progress_bar: Any = transformers_logging
    set_progress_bar.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            set_progress_bar.enable_progress_bar()
