"""Train the shipped model's architecture on ranks of this machine; any number of ranks gives the same checkpoints.

    python -m tokenyard_lab.training --ranks 4 --steps 200 --out run

prints the loss of each step, and the SHA-256 of each checkpoint. If `--out` has checkpoints, the run goes on from the
newest, whatever number of ranks wrote it: kill the command, and give it again with another `--ranks`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from tokenyard import launch
from tokenyard_lab.training.expert_layers import How
from tokenyard_lab.training.network import Shape
from tokenyard_lab.training.rank_run import train_rank
from tokenyard_lab.training.recipe import Recipe


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenyard_lab.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes: 1, 2, 4 or 8")
    parser.add_argument("--steps", type=int, default=200, help="of the whole run")
    parser.add_argument("--until", type=int, help="stop at this step, as a kill would")
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument(
        "--full", action="store_true", help="the shipped model's size; a smaller one otherwise"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, on all ranks together")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument(
        "--how",
        choices=get_args(How),
        default="choices",
        help="to compare: sums by rank, or torch's own all-to-all and all-reduce, whose bits depend on the ranks",
    )
    options = parser.parse_args()
    recipe = Recipe(steps=options.steps, batch=options.batch, seed=options.seed)
    if options.full:
        recipe = Recipe(
            shape=Shape(),
            steps=options.steps,
            batch=options.batch,
            seed=options.seed,
            length=168,
            rate=2e-3,
            warmup=200,
        )
    until = recipe.steps if options.until is None else options.until
    arguments = (recipe, options.how, options.out, until, options.every, True)
    launch(options.ranks, train_rank, *arguments, ranks="processes", threads_per_rank=1, deadline=300)


if __name__ == "__main__":
    main()
