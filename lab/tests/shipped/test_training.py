"""The training script: its network is Transformers' Qwen3-MoE, and it learns."""

import json
import sys

import pytest
import torch

from tokenyard_lab.training.problems import held_out
from tokenyard_lab.training.vocabulary import END, PAD, encode, vocabulary


@pytest.fixture(scope="module")
def scripts():
    """The modules of the script."""
    from tokenyard_lab.training import network, train

    return network, train


@pytest.fixture(scope="module")
def shape(scripts):
    return scripts[0].Shape(hidden=96, layers=2, heads=4, kv_heads=2, expert_width=32)


@pytest.fixture(scope="module")
def parameters(scripts, shape):
    """Not as they are at the start, where norms are 1 and routers hardly choose: a mistake in them must show."""
    found = scripts[0].initialize(shape, torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in found.items():
            if value.dim() == 1:
                value.mul_(1 + 0.2 * torch.randn(value.shape, generator=generator))
            if name.endswith("gate.weight"):
                value.mul_(20)
    return found


@pytest.fixture(scope="module")
def loaded(scripts, shape, parameters, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    scripts[0].save(parameters, shape, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def rounded(parameters):
    """As they are stored."""
    return {name: value.detach().bfloat16().float() for name, value in parameters.items()}


def test_what_is_saved_has_the_same_logits_in_transformers(scripts, shape, loaded, rounded):
    for problem in held_out(4):
        ids = torch.tensor([encode(f"{problem.question} {problem.solution}")])
        ours, _ = scripts[0].forward(rounded, ids, shape)
        torch.testing.assert_close(ours, loaded(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_scripts_own_decoding_is_that_of_transformers(scripts, shape, loaded, rounded):
    prompts = [encode(problem.question) for problem in held_out(4)]
    ours = scripts[0].generate(rounded, prompts, shape, most=12)
    for prompt, written in zip(prompts, ours, strict=True):
        theirs = loaded.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=vocabulary()[PAD],
            eos_token_id=vocabulary()[END],
        )
        assert theirs[0, len(prompt) :].tolist()[: len(written)] == written


def test_the_loss_counts_the_solution_only(scripts, shape, parameters):
    problem = held_out(1)[0]
    question, solution = encode(problem.question), encode(problem.solution)
    tokens = torch.zeros(1, 120, dtype=torch.int64)
    tokens[0, : len(question) + len(solution)] = torch.tensor([*question, *solution])
    quiet, start = torch.zeros(1), torch.tensor([len(question)])
    found, _ = scripts[1].loss_of(parameters, tokens, start, quiet, shape, torch.float32)
    logits, _ = scripts[0].forward(parameters, tokens[:, : len(question) + len(solution)], shape)
    each = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1 : logits.shape[1]], reduction="none")
    torch.testing.assert_close(found, each[len(question) - 1 :].mean(), rtol=1e-4, atol=1e-4)


def test_the_whole_script_trains_saves_and_scores(scripts, tmp_path, monkeypatch):
    arguments = [
        "--device",
        "cpu",
        "--tiny",
        "--steps",
        "40",
        "--batch",
        "8",
        "--rate",
        "0.003",
        "--warmup",
        "4",
    ]
    arguments += [
        "--scored",
        "4",
        "--scored-last",
        "4",
        "--out",
        str(tmp_path / "model"),
        "--log",
        str(tmp_path / "log"),
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    scripts[1].main()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    assert lines[0]["seed"] == 6
    assert [line["experts_times"] for line in lines if "experts_times" in line] == [0.0, 0.5, 2.0, 4.0]
    assert (tmp_path / "model" / "model.safetensors").is_file()
