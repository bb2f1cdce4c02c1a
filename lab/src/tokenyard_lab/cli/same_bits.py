"""The same training on several numbers of ranks, in three ways: how far the losses are from those of one rank.

    python -m tokenyard_lab.cli.same_bits --write bench/results/training-same-bits-cpu.json

`--plot` draws the document. One of the runs ends half-way, and another number of ranks goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenyard.cli.machine import provenance

if TYPE_CHECKING:
    from tokenyard_lab.training.expert_layers import How
    from tokenyard_lab.training.recipe import Recipe

RANKS: dict[How, tuple[int, ...]] = {"choices": (1, 2, 4, 8), "ranks": (1, 4), "all_to_all": (1, 4)}
# How each way of training is named in the document and in the picture.
WAYS: dict[How, str] = {
    "choices": 'sum="choices", 2, 4 and 8 ranks',
    "ranks": 'sum="ranks", 4 ranks',
    "all_to_all": "torch's all_to_all and all_reduce, 4 ranks",
}


def run_ranks(recipe: Recipe, how: How, stages: dict[int, int]) -> dict[str, Any]:
    """Train on the numbers of ranks in `stages`, one after the other, each to its step."""
    from tokenyard import launch
    from tokenyard.temporary_folders import temporary_folder
    from tokenyard_lab.training.checkpoints import digest, newest
    from tokenyard_lab.training.rank_run import train_rank

    losses: list[float] = []
    with temporary_folder(prefix="tokenyard-training-") as folder:
        for ranks, until in stages.items():
            arguments = (recipe, how, Path(folder), until)
            losses += launch(
                ranks, train_rank, *arguments, ranks="processes", threads_per_rank=1, deadline=600
            )[0]
        last = newest(Path(folder))
        assert last is not None
        return {"way": how, "ranks": list(stages), "sha256": digest(last), "losses": losses}


def compare(recipe: Recipe, path: Path) -> dict[str, Any]:
    """Every way on every number of ranks, and one run that goes on with others; written after each run."""
    runs: list[dict[str, Any]] = []
    document = {
        **provenance(),
        "benchmark": "training",
        "ways": WAYS,
        "recipe": asdict(recipe),
        "results": runs,
    }
    for how in WAYS:
        stages = [{ranks: recipe.steps} for ranks in RANKS[how]]
        if how == "choices":
            stages.append({2: recipe.steps // 3, 8: 2 * recipe.steps // 3, 1: recipe.steps})
        for stage in stages:
            runs.append(run_ranks(recipe, how, stage))
            print(how, *stage, runs[-1]["sha256"], runs[-1]["losses"][-1], flush=True)
            path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main() -> None:
    """The command."""
    from tokenyard_lab.plots import check_picture, draw_losses
    from tokenyard_lab.training.recipe import Recipe

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--write", type=Path, required=True, help="the document; read if it is there")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    check_picture(options.plot)
    if options.write.exists():
        document = json.loads(options.write.read_text())
    else:
        document = compare(Recipe(steps=options.steps, batch=options.batch), options.write)
    if options.plot is not None:
        draw_losses(document, options.plot)


if __name__ == "__main__":
    main()
