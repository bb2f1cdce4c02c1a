"""A checkpoint in a folder, its tokenizer, and what its tokens say."""

from __future__ import annotations

import logging
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenyard.errors import InputError
from tokenyard.shipped import shipped_model
from tokenyard.shipped.vocabulary import readable

# Ranks may be threads, and Transformers changes what is global while it loads a model.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be sharded, and its tokenizer."""

    model: Any
    tokenizer: Any
    shipped: bool

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer."""
        for source in (self.model.generation_config, self.model.config):
            found = getattr(source, "eos_token_id", None)
            if found is not None:
                return [found] if isinstance(found, int) else list(found)
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    @property
    def pad(self) -> int:
        """A token that nobody looks at."""
        found = self.tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def encode(self, prompts: list[str]) -> list[list[int]]:
        """The tokens of each prompt."""
        return [list(ids) for ids in self.tokenizer(prompts).input_ids]

    def text(self, ids: list[int]) -> str:
        """What the tokens of an answer say."""
        if self.shipped:
            return readable(self.tokenizer.convert_ids_to_tokens(ids))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def check_model(path: Path | None) -> Path:
    """The folder of the checkpoint (None: the one that ships with the package), looked at before ranks are started."""
    require_transformers()
    folder = shipped_model() if path is None else path
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} has no {name}",
                expected="the folder of a checkpoint, with its tokenizer",
                fix="give the folder that `save_pretrained` wrote, or that was downloaded",
            )
    return folder


def require_transformers() -> None:
    """Raise where Transformers is not installed."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            "transformers is not installed",
            expected="transformers 5.17 or newer, which loads the model",
            fix="pip install 'tokenyard[transformers]'",
        )


def load_model(folder: Path, device: torch.device) -> LoadedModel:
    """Load a checkpoint, as it is on disk, onto a device."""
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that Transformers looks for
        import transformers

        quiet: Any = transformers.utils.logging
        quiet.disable_progress_bar()
        quiet.set_verbosity(logging.ERROR)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        model = model.eval().to(device)
    return LoadedModel(model, tokenizer, shipped=folder.resolve() == shipped_model().resolve())
