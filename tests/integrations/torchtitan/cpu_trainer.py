"""torchtitan's own trainer on CPU ranks, started by torchrun; it writes its losses and the gradients of its first step.

    torchrun --standalone --nproc-per-node 2 -m tests.integrations.torchtitan OUT --module deepseek_v3 …

It needs all of torchtitan's dependencies. Attention and data are replaced by torchtitan's own overrides: its attention
has no backward on CPUs, and its test data is not in its wheel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.integrations.torchtitan import cpus  # before anything else of torchtitan

# isort: split
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ConfigManager, derive, override
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention


@override(target=FlexAttention.Config)
def plain_attention(cfg: Any) -> Any:
    """Attention whose backward runs on CPUs."""
    return derive(cfg, ScaledDotProductAttention.Config)


class FixedBatches(BaseDataLoader):
    """The same sequences in the same order, however many ranks share a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 2048

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self._vocabulary, self._length = config.vocabulary, seq_len
        self._rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self._all_rows = dp_world_size * local_batch_size
        self._step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self._step)
            # Numbers that grow by the same amount: something to learn.
            first, by = torch.randint(self._vocabulary, (2, self._all_rows, 1), generator=generator)
            tokens = (first + by % 7 * torch.arange(self._length + 1)) % self._vocabulary
            tokens = tokens[self._rows]
            self._step += 1
            yield {"input": tokens[:, :-1].clone()}, tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = state_dict["step"]


@override(target=BaseDataLoader.Config)
def fixed_batches(cfg: Any) -> Any:
    """Data that does not depend on the number of ranks."""
    return FixedBatches.Config()


def main() -> None:
    """Train, and write `losses.json`, `norms.json` and `gradients.pt` into the folder that comes first."""
    out = Path(sys.argv.pop(1))
    torch.set_num_threads(1)
    cpus.use_gloo()
    trainer = ConfigManager().parse_args().build()
    if trainer.config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()
        return
    losses: list[float] = []
    norms: list[float] = []
    clip = dist_utils.clip_grad_norm_

    def recorded_clip(parameters: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if trainer.step == 1:
            (model,) = trainer.model_parts
            found = {name: whole(value.grad) for name, value in model.named_parameters()}
            if torch.distributed.get_rank() == 0:
                torch.save(found, out / "gradients.pt")
        return clip(parameters, *arguments, **options)

    dist_utils.clip_grad_norm_ = recorded_clip
    log = trainer.metrics_processor.log

    def recorded_log(step: int, loss: float, most: float, norm: float, **options: Any) -> None:
        losses.append(loss)
        norms.append(norm)
        log(step, loss, most, norm, **options)

    trainer.metrics_processor.log = recorded_log
    trainer.train()
    if torch.distributed.get_rank() == 0:
        (out / "losses.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    trainer.close()
    torch.distributed.destroy_process_group()


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of all ranks, in one tensor."""
    return gradient.full_tensor().clone() if hasattr(gradient, "full_tensor") else gradient.clone()
