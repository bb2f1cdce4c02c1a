"""Without `memfd_create` and /proc, as on macOS: threads work, and processes are refused before they start."""

import json
import os
import subprocess
import sys

# Takes away what Linux has, and others do not, before anything of tokenyard is imported. torch is that of Linux.
_ELSEWHERE = """
import builtins, io, mmap, os, pathlib, platform
import torch

del os.memfd_create, os.MFD_CLOEXEC, os.posix_fallocate, mmap.MAP_POPULATE, mmap.MADV_REMOVE
platform.system = lambda: "Darwin"

def without_proc(function):
    def hiding(path, *more, **options):
        if str(path).startswith(("/proc", "/sys")) and type(path) is not int:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *more, **options)
    return hiding

for module, names in ((builtins, ("open",)), (io, ("open",)), (os, ("open", "stat", "listdir"))):
    for name in names:
        setattr(module, name, without_proc(getattr(module, name)))
os.path.isdir = lambda path: False if str(path).startswith("/proc") else pathlib.Path(path).is_dir()
"""

_EXCHANGES = ("auto", "one_sided", "two_sided", "allgather")
_THREADS = """
import json, sys
import tokenyard as ty
from tokenyard.routing import Placement

weights = ty.ExpertWeights(w13=torch.randn(4, 64, 64).bfloat16(), w2=torch.randn(4, 64, 32).bfloat16())
x_TH = torch.randn(5, 64).bfloat16()
routes = ty.Routes(topk_ids_TK=torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]]), topk_weights_TK=torch.rand(5, 2))

def main(group, exchange):
    spec = ty.LayerSpec(
        name="moe", hidden_size=64, intermediate_size=32, num_experts=4, top_k=2, spare_experts=2, sum="choices"
    )
    plan = ty.plan([spec], group, exchange=exchange, max_tokens=8)
    layer = ty.MoELayer(plan, "moe", weights.select(plan.local_experts("moe")))
    before = layer(x_TH, routes)
    plan.rebalance({"moe": Placement.explicit(4, [[3, 0], [2, 1]])})
    after = layer(x_TH, routes)
    plan.close()
    return bool(before.abs().sum() > 0) and torch.equal(before, after)

print(json.dumps({exchange: ty.launch(2, main, exchange) for exchange in sys.argv[1:]}))
"""

_PROCESSES = """
import torch.distributed as dist
from multiprocessing import forkserver
from tokenyard import DistributedGroup, launch
from tokenyard.errors import InputError

def main(group):
    return group.rank

for start in (lambda: launch(2, main, ranks="processes"), DistributedGroup):
    try:
        start()
    except InputError as error:
        print(error)
assert forkserver._forkserver._forkserver_pid is None
"""


def elsewhere(script, *arguments):
    """A Python process on such a system."""
    return subprocess.run(
        [sys.executable, "-c", _ELSEWHERE + script, *arguments],
        env=os.environ | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_threads_work_and_move_their_experts():
    done = elsewhere(_THREADS, *_EXCHANGES)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {exchange: [True, True] for exchange in _EXCHANGES}


def test_processes_are_refused_with_what_works_before_anything_starts():
    done = elsewhere(_PROCESSES)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("ranks as processes, on a system without os.memfd_create and /proc (Darwin)") == 2
    )
    assert done.stdout.count("launch(…, ranks='threads')") == 2


def test_a_command_says_which_ranks_work():
    check_it_says_which_ranks_work("check")


def check_it_says_which_ranks_work(*command):
    """Raise unless a command that starts processes is refused, with what works instead."""
    done = elsewhere("from tokenyard.cli import main; main()", *command)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith("error: ranks as processes, on a system without")
    assert "--kind threads" in done.stderr


def test_the_doctor_takes_it_for_no_failure():
    done = elsewhere("from tokenyard.cli import main; main()", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["one_sided on threads"]["ok"]
    for name in ("one_sided on processes", "two_sided on processes", "4 process ranks"):
        assert findings[name]["absent"]
        assert "os.memfd_create and /proc" in findings[name]["detail"]
