"""Checkpoints of a run: one file a step, whose bytes depend on the training alone, not on the ranks that did it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from tokenyard.errors import InputError
from tokenyard_lab.training.network import Parameters
from tokenyard_lab.training.recipe import Recipe


@dataclass(frozen=True)
class State:
    """Where a run is."""

    recipe: str  # `Recipe.as_json`
    step: int
    parameters: Parameters
    first: Parameters  # AdamW's moments
    second: Parameters


def save_state(state: State, folder: Path) -> Path:
    """Write the checkpoint of a step; a file of this name is always whole."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"parameters": state.parameters, "first": state.first, "second": state.second}
    tensors = {
        f"{kind}/{name}": value.contiguous() for kind, of in kinds.items() for name, value in of.items()
    }
    path = folder / f"step-{state.step:06}.safetensors"
    beside = path.with_suffix(".new")
    # One entry of metadata: the order of several is not fixed.
    save_file(tensors, beside, metadata={"run": json.dumps([state.recipe, state.step])})
    os.replace(beside, path)
    return path


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder."""
    return max(folder.glob("step-*.safetensors"), default=None)


def load_state(path: Path, recipe: Recipe) -> State:
    """Read a checkpoint of a run with this recipe."""
    kinds: dict[str, Parameters] = {"parameters": {}, "first": {}, "second": {}}
    with safe_open(path, framework="pt") as file:
        found, step = json.loads(file.metadata()["run"])
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            kind, name = key.split("/", 1)
            kinds[kind][name] = file.get_tensor(key)
    if found != recipe.as_json():
        raise InputError(
            f"{path} is of a run with {found}",
            expected=recipe.as_json(),
            fix="give the options of that run, or another folder",
        )
    return State(found, step, kinds["parameters"], kinds["first"], kinds["second"])


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
