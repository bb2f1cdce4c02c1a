"""Training gives the same checkpoints, byte for byte, on any number of ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional

from tokenyard import launch
from tokenyard.errors import InputError, RankError
from tokenyard_lab.training.checkpoints import digest, load_state, newest
from tokenyard_lab.training.network import Shape, forward, initialize
from tokenyard_lab.training.rank_run import BETAS, train_rank
from tokenyard_lab.training.recipe import Recipe, draw_chunk

ROOT = Path(__file__).resolve().parents[3]
SHAPE = Shape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=8, top_k=3, expert_width=16)
RECIPE = Recipe(shape=SHAPE, steps=6, batch=8, warmup=2)


def trained(folder, ranks, until=3, *, recipe=RECIPE, how="choices"):
    """The losses and the digest of the checkpoint."""
    losses = launch(ranks, train_rank, recipe, how, folder, until, threads_per_rank=1)[0]
    return losses, digest(newest(folder))


def test_checkpoints_are_the_same_on_any_number_of_ranks(tmp_path):
    alone = trained(tmp_path / "1", 1)
    for ranks in (2, 4, 8):
        assert trained(tmp_path / str(ranks), ranks) == alone


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    _, through = trained(tmp_path / "through", 4)
    trained(tmp_path / "stopped", 2, until=1)
    trained(tmp_path / "stopped", 8, until=2)
    assert trained(tmp_path / "stopped", 1)[1] == through


def test_sums_by_rank_give_other_bits(tmp_path):
    losses, alone = trained(tmp_path / "1", 1, how="ranks")
    others, apart = trained(tmp_path / "4", 4, how="ranks")
    assert alone != apart
    assert others == pytest.approx(losses, rel=1e-5)


def test_a_step_is_that_of_the_plain_network(tmp_path):
    recipe = replace(RECIPE, noise=0.0, balance=0.0)
    (loss,), _ = trained(tmp_path, 2, until=1, recipe=recipe)
    parameters = initialize(SHAPE, torch.device("cpu"), recipe.seed)
    chunks = [draw_chunk(recipe, 0, number) for number in range(recipe.chunks)]
    tokens = torch.cat([chunk.tokens_BS for chunk in chunks])
    wanted = torch.cat([chunk.wanted for chunk in chunks]).flatten()
    logits, _ = forward(parameters, tokens, SHAPE)
    each = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    plain = (each * wanted).sum() / wanted.sum()
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    plain.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), recipe.clip)
    assert norm > recipe.clip  # the bound does something
    state = load_state(newest(tmp_path), recipe)
    assert state.first.keys() == parameters.keys()
    for name, value in parameters.items():
        scaled = value.grad * (1 - BETAS[0])
        torch.testing.assert_close(state.first[name], scaled, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({"seed": 7}, 1, "is of a run with"),
        ({}, 3, "3 ranks for 8 chunks and 8 experts; expected a number of ranks that divides both"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, changed, ranks, message):
    trained(tmp_path, 1, until=1)
    with pytest.raises(RankError, match=re.escape(message)):
        trained(tmp_path, ranks, recipe=replace(RECIPE, **changed))


def test_chunks_of_unequal_size_are_refused():
    with pytest.raises(InputError, match="a batch of 10 sequences in 8 chunks"):
        Recipe(batch=10)


def command(folder, ranks):
    steps = ["--steps", "3", "--every", "1", "--batch", "8"]
    return [
        sys.executable,
        "-m",
        "tokenyard_lab.training",
        "--ranks",
        str(ranks),
        *steps,
        "--out",
        str(folder),
    ]


def test_a_killed_command_goes_on_with_other_ranks_and_ends_with_the_same_checkpoint(tmp_path):
    killed = subprocess.Popen(command(tmp_path, 2), start_new_session=True, stdout=subprocess.PIPE, text=True)
    for line in killed.stdout:
        if "step-000001" in line:
            break
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    if (
        newest(tmp_path).name == "step-000003.safetensors"
    ):  # on a busy machine it may have been faster than the kill
        newest(tmp_path).unlink()
    again = subprocess.run(command(tmp_path, 4), check=True, capture_output=True, text=True, timeout=240)
    assert "goes on from" in again.stdout
    assert trained(tmp_path / "alone", 1, recipe=Recipe(steps=3, batch=8))[1] in again.stdout
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_picture_shows_the_recorded_runs_and_those_that_sum_choices_are_the_same():
    recorded = json.loads((ROOT / "bench/results/training-same-bits-cpu.json").read_text())
    choices = [run for run in recorded["results"] if run["way"] == "choices"]
    assert [run["ranks"] for run in choices] == [[1], [2], [4], [8], [2, 8, 1]]
    assert len({run["sha256"] for run in choices}) == 1
    assert len({run["sha256"] for run in recorded["results"]}) == 5
    told = Image.open(ROOT / "docs/pictures/training-same-bits-cpu.png").text["Description"]
    assert recorded["date"][:10] in told


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_steps_end_with_the_same_checkpoint_on_any_number_of_ranks(tmp_path):
    recipe = Recipe(batch=8)
    losses, alone = trained(tmp_path / "1", 1, recipe.steps, recipe=recipe)
    assert losses[-1] < losses[0] / 2
    for ranks in (2, 4, 8):
        assert trained(tmp_path / str(ranks), ranks, recipe.steps, recipe=recipe) == (losses, alone)
    trained(tmp_path / "stopped", 8, 70, recipe=recipe)
    assert trained(tmp_path / "stopped", 2, recipe.steps, recipe=recipe)[1] == alone
