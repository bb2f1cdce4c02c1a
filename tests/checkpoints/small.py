"""Small checkpoints, written by the tests: any layout, any naming, in any number of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# What a linear map [N, D] of weights is on disk: the ends of the tensors' names, and the tensors.
Written = dict[str, Tensor]
NAMES = {
    "gate_proj": ("gate_proj", "up_proj", "down_proj"),
    "w1": ("w1", "w3", "w2"),
}


@dataclass
class Small:
    """The sizes of a small model, and its weights, drawn from a seed."""

    num_experts: int = 8
    hidden_size: int = 64
    intermediate_size: int = 32
    num_layers: int = 2
    dtype: torch.dtype = torch.bfloat16
    model_type: str = "qwen3_moe"
    parent: str = "model.layers.{}.mlp"
    names: tuple[str, ...] = NAMES["gate_proj"]
    seed: int = 0
    extra_config: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": min(2, self.num_experts),
            "num_hidden_layers": self.num_layers,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            **self.extra_config,
        }

    def linear(self, layer: int, expert: int, projection: int) -> Tensor:
        """A linear map: 0 and 1 are gate and up, [I, H]; 2 is down, [H, I]."""
        H, I = self.hidden_size, self.intermediate_size  # noqa: E741
        shape = (H, I) if projection == 2 else (I, H)
        generator = torch.Generator().manual_seed(((self.seed * 97 + layer) * 997 + expert) * 7 + projection)
        # Different magnitudes, so that no two linear maps share a global scale.
        scale = shape[1] ** -0.5 * (1 + 0.37 * projection + 0.11 * expert)
        return (torch.randn(*shape, generator=generator) * scale).to(self.dtype)

    def w13(self, layer: int, experts: list[int] | None = None) -> Tensor:
        ids = range(self.num_experts) if experts is None else experts
        return torch.stack([torch.cat([self.linear(layer, e, p) for p in (0, 1)]) for e in ids])

    def w2(self, layer: int, experts: list[int] | None = None) -> Tensor:
        ids = range(self.num_experts) if experts is None else experts
        return torch.stack([self.linear(layer, e, 2) for e in ids])

    def shared(self) -> dict[str, Tensor]:
        tensors = {"model.embed_tokens.weight": torch.ones(16, self.hidden_size, dtype=self.dtype)}
        for layer in range(self.num_layers):
            parent = self.parent.format(layer)
            tensors[f"{parent}.gate.weight"] = torch.ones(self.num_experts, self.hidden_size)
            tensors[f"{parent}.shared_experts.up_proj.weight"] = torch.ones(4, self.hidden_size)
        return tensors

    def tensors(self, write: Callable[[Tensor], Written] | None = None) -> dict[str, Tensor]:
        """All tensors, the experts one by one, each linear map as `write` has it."""
        write = write or (lambda w: {"weight": w})
        tensors = self.shared()
        for layer in range(self.num_layers):
            for expert in range(self.num_experts):
                for projection, name in enumerate(self.names):
                    prefix = f"{self.parent.format(layer)}.experts.{expert}.{name}"
                    for suffix, tensor in write(self.linear(layer, expert, projection)).items():
                        tensors[f"{prefix}.{suffix}"] = tensor
        return tensors


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    files: int = 1,
    index: bool = True,
) -> Path:
    """Write a checkpoint: one file, or several with or without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    places = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        share = {key: tensor for i, (key, tensor) in enumerate(tensors.items()) if i % files == number}
        save_file(share, folder / name)
        places |= dict.fromkeys(share, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": places})
        )
    return folder


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit; NaN equals NaN."""
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
