"""Load a checkpoint from a folder, and its tokenizer."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenyard.errors import InputError
from tokenyard_lab.shipped import shipped_model

OLDEST_TRANSFORMERS = (5, 17)
# Ranks may be threads, and Transformers changes global state while it loads a model.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Language:
    """The tokenizer of a checkpoint."""

    tokenizer: Any

    @property
    def pad(self) -> int:
        """The token that fills up a batch; masks hide it."""
        found = self.tokenizer.pad_token_id
        return 0 if found is None else int(found)

    def end_ids(self, model: Any) -> list[int]:
        """The tokens that end an answer of this model."""
        for source in (model.generation_config, model.config, self.tokenizer):
            found = getattr(source, "eos_token_id", None)
            if found is not None:
                return [found] if isinstance(found, int) else list(found)
        return []

    def encode(self, prompts: list[str]) -> list[list[int]]:
        """The tokens of each prompt."""
        return [list(ids) for ids in self.tokenizer(prompts).input_ids] if prompts else []

    def text(self, ids: list[int]) -> str:
        """The text of an answer's tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def check_model(path: Path | None) -> Path:
    """The folder of the checkpoint (None: the one that ships with the package), checked before ranks are started."""
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
    """Raise if Transformers cannot be imported, or is too old. An importable folder of that name does not count."""
    try:
        import transformers

        version = str(transformers.__version__)
    except (ImportError, AttributeError) as error:
        raise _other_transformers(f"transformers is not installed ({error})") from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRANSFORMERS:
        raise _other_transformers(f"transformers is {version}")


def _other_transformers(found: str) -> InputError:
    return InputError(
        found,
        expected=f"transformers {'.'.join(map(str, OLDEST_TRANSFORMERS))} or newer, which loads the model",
        fix="pip install 'tokenyard[transformers]'",
    )


def load_language(folder: Path) -> Language:
    """The tokenizer of a checkpoint."""
    with quietly() as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Language(tokenizer)


def load_whole(folder: Path, device: torch.device | str = "cpu") -> Any:
    """The model of a checkpoint, with all its experts, as it is on disk."""
    with quietly() as transformers:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    return model.eval().to(device)


@contextmanager
def quietly() -> Iterator[Any]:
    """Inside, Transformers logs nothing, and one thread at a time uses it."""
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional libraries
        import transformers

        quiet: Any = transformers.utils.logging
        quiet.disable_progress_bar()
        quiet.set_verbosity(logging.ERROR)
        yield transformers
