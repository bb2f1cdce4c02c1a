"""First calls on a GPU, in fresh processes, as the guide says: nothing is compiled or loaded once a layer is there."""

import json
import os
import random
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

BOUND = {
    "exact": 0.01,
    "bf16": 0.02,
    "fp16": 0.02,
    "fp8_block128": 0.08,
    "mxfp8": 0.08,
    "mxint4": 0.02,
    "nvfp4": 0.25,
}


def program(trial, **variables):
    """What `tests.gpu.fresh_process` says of a trial."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "TOKENYARD_SET_FOR_THREADS")
    }
    command = [sys.executable, "-m", "tests.gpu.fresh_process", json.dumps(trial)]
    found = subprocess.run(
        command, capture_output=True, text=True, env=environment | variables, check=False, timeout=280
    )
    assert found.returncode == 0, found.stderr[-3000:]
    answer = json.loads(found.stdout.splitlines()[-1])
    assert "failed" not in answer, (trial, answer["failed"])
    return answer["ranks"]


def check(trial, ranks):
    late = [name for rank in ranks for name in (*rank["compiled"], *rank["loaded"])]
    assert not late, (trial, late[:5])
    # Rows on the way out lose what their format loses; weights are decoded exactly on both sides.
    worst = max(rank["error"] for rank in ranks)
    assert worst <= BOUND[trial.get("wire", "bf16")], (trial, worst)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_threads_of_a_fresh_process_call_a_layer(world):
    trial = {"world": world, "drawn": 100}
    check(trial, program(trial))


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
def test_ranks_as_processes_compile_nothing_while_they_serve(weights):
    trial = {
        "world": 2,
        "ranks": "processes",
        "weights": weights,
        "numbers": [1, 8, 64, 128, 300, 777],
        "drawn": 20,
    }
    check(trial, program(trial))


def test_an_empty_cache_costs_at_most_a_minute_and_a_full_one_three_seconds(tmp_path):
    trial = {
        "weights": "mxfp4",
        "wire": "mxfp8",
        "inner": "fp8_block128",
        "hidden_size": 1024,
        "intermediate_size": 512,
    }
    ready = [program(trial, TRITON_CACHE_DIR=str(tmp_path))[0]["text"] for _ in range(2)]
    first, second = (float(text.split("ready in ")[1].split()[0]) for text in ready)
    assert first <= 60.0
    assert second <= 3.0


def test_adopted_weights_and_results_by_choice():
    for trial in ({"world": 2, "adopt": True, "drawn": 20}, {"world": 2, "choices": True, "drawn": 20}):
        check(trial, program(trial))


def drawn_trials(seed, count):
    draw = random.Random(seed)
    for number in range(count):
        yield {
            "world": draw.choice([1, 2]),
            "ranks": draw.choice(["threads", "threads", "processes"]),
            "exchange": draw.choice(["one_sided", "two_sided", "allgather"]),
            "experts": draw.choice(["fused", "fused", "grouped", "reference"]),
            "weights": draw.choice(["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "mxint4"]),
            "wire": draw.choice(["bf16", "mxfp8", "nvfp4", "fp8_block128"]),
            "numbers": [1, 64, 65, 777],
            "drawn": 4,
            "seed": number,
        }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(6))
def test_every_combination(part):
    from concurrent.futures import ThreadPoolExecutor

    trials = list(drawn_trials(int(os.environ.get("TOKENYARD_DRAW", "0")), 60))[part::6]
    with ThreadPoolExecutor(5) as pool:  # each is a process of its own
        for trial, ranks in zip(trials, pool.map(program, trials), strict=True):
            check(trial, ranks)
