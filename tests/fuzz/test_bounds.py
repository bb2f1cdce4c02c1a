"""Numbers without measure: an error of ours, before memory is taken. The kernel watches, in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tokenyard as ty
from tests.fuzz.targets import BODY, CONFIGS
from tokenyard.checkpoints import open_checkpoint
from tokenyard.errors import GroupError
from tokenyard.formats import Payload
from tokenyard.integrations.huggingface import layers_from_config
from tokenyard.routing import Placement

SPEC = ty.LayerSpec(name="moe", hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, max_tokens=16)
# Bytes beyond what the process has when it starts. Each case alone would take gigabytes, were it taken at its word.
ROOM = 400 << 20
# Seconds of CPU for each case; all of them take far less than one. A table of 10**9 experts takes minutes.
MOST_SECONDS = 30


def on_a_rank(**changes):
    return lambda: ty.launch(
        2, lambda group: ty.plan([replace(SPEC, **changes)], group, exchange="one_sided")
    )


def a_header(length: int, text: bytes):
    def read() -> None:
        folder = Path("header")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + BODY)
        open_checkpoint(folder)

    return read


def config(**changes):
    return lambda: layers_from_config({**CONFIGS["qwen3_moe"], **changes})


HUGE_SHAPE = json.dumps({"a": {"dtype": "F32", "shape": [2**62] * 10**5, "data_offsets": [0, 96]}}).encode()
HUGE_TENSOR = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()

CASES = {
    **{
        f"draft {field}=10**{power}": lambda field=field, power=power: ty.draft(
            [replace(SPEC, **{field: 10**power})], 2
        )
        for field, power in [
            ("max_tokens", 15),
            ("hidden_size", 12),
            ("intermediate_size", 15),
            ("num_experts", 9),
            ("top_k", 12),
        ]
    },
    "draft world=10**9": lambda: ty.draft([SPEC], 10**9),
    "draft in_flight=10**12": lambda: ty.draft([SPEC], 2, in_flight=10**12),
    "draft sizes that fit each, and not together": lambda: ty.draft(
        [replace(SPEC, hidden_size=2**31 - 1, max_tokens=2**31 - 1)], 2
    ),
    "draft payload of 10**12": lambda: ty.draft(
        [replace(SPEC, payloads=(Payload(name="tag", dtype=SPEC.dtype, width=10**12),))], 2
    ),
    "draft wire of alignment 32 * 10**30": lambda: ty.draft(
        [replace(SPEC, wire=f"mxfp8(alignment={32 * 10**30})")], 2
    ),
    "placement of 10**9 experts": lambda: Placement.contiguous(10**9, 2),
    "placement on 10**9 ranks": lambda: Placement.round_robin(2, 10**9),
    "placement of 10**9 experts in a table": lambda: Placement.explicit(10**9, [[0]]),
    "launch of 10**9 ranks": lambda: ty.launch(10**9, print),
    "workspace of terabytes": on_a_rank(hidden_size=2**20, max_tokens=2**20),
    "header of 2**62 bytes": a_header(2**62, b"{}"),
    "shape of 100,000 sizes": a_header(len(HUGE_SHAPE), HUGE_SHAPE),
    "tensor of 4 TB": a_header(len(HUGE_TENSOR), HUGE_TENSOR),
    "nesting": a_header(10**6, b"[" * 10**6),
    "config of 10**9 layers": config(num_hidden_layers=10**9),
    "config of 10**9 experts": config(num_experts=10**9),
    "config of hidden size 10**12": config(hidden_size=10**12),
}


def main() -> None:
    """Run every case with little memory to spare; print what came of each."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes = {}
    for name, case in CASES.items():
        started = time.process_time()
        try:
            case()
            outcome = "no error"
        except ty.TokenyardError as error:
            outcome = type(error).__name__
        except BaseException as error:  # what must not be
            outcome = f"{type(error).__name__}: {error}"
        outcomes[name] = (outcome, time.process_time() - started)
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[str, float]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "from tests.fuzz.test_bounds import main; main()"],
        cwd=tmp_path_factory.mktemp("bounds"),
        env={"PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_number_without_measure_is_our_error_before_memory_is_taken(outcomes, case):
    outcome, seconds = outcomes[case]
    expected = {"draft": ("PlanError", "InputError"), "workspace": ("RankError",)}
    assert outcome in expected.get(case.split()[0], ("InputError", "CheckpointError")), outcome
    assert seconds < MOST_SECONDS


def test_a_workspace_is_refused_by_all_ranks_before_one_takes_memory(monkeypatch):
    monkeypatch.setattr("tokenyard.group.memory.available_memory", lambda: 10_000)

    def say(group):
        with pytest.raises(GroupError) as caught:
            ty.plan([SPEC], group, exchange="one_sided")
        return str(caught.value)

    for rank, message in enumerate(ty.launch(2, say)):
        assert f"rank {rank}: " in message
        assert "bytes cannot be allocated by each of 2 ranks (10000 bytes are available)" in message
