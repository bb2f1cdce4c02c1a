"""The files of the package that one warm call of a layer touches: few, and CONTRIBUTING.md goes through them in order.

`python -m tests.test_files_of_a_call` prints them.
"""

import gc
import re
import sys
from pathlib import Path

import torch

import tokenyard as ty
from tests.models import batch, build, spec

ROOT = Path(ty.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
MOST = 30  # files


def files_of_calls(group):
    """The files that a rank touches in a warm call, in the order of first touch. Threads of the call count, too."""
    layer = spec(wire="bf16", max_tokens=16)
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, "moe")
    inputs = batch(layer, 16, seed=group.rank)
    found = []
    with torch.no_grad():
        for _ in range(5):
            built(*inputs)
        gc.disable()
        for _ in range(10):
            group.barrier()
            touched = {}
            recorder = _recorder(touched)
            _profile(recorder)
            built(*inputs)
            _profile(None)
            found.append(list(touched))
    return min(found, key=len)  # a wait of more than 0.1 s, on a busy machine, asks who is gone


def _recorder(touched):
    def record(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            touched.setdefault(str(Path(path).relative_to(ROOT)))

    return record


def _profile(recorder):
    import threading

    threading.setprofile(recorder)  # threads that start from now on
    sys.setprofile(recorder)


def recorded():
    first, second = ty.launch(2, files_of_calls, ranks="processes", threads_per_rank=1)
    assert first == second
    return first


def explained():
    """The files that CONTRIBUTING.md goes through."""
    (section,) = re.findall(r"^## The walk of a call$(.*?)^## ", CONTRIBUTING.read_text(), re.S | re.M)
    return re.findall(r"^\| `(\S+\.py)` \|", section, re.M)


def test_a_call_touches_few_files_and_contributing_goes_through_them():
    files = recorded()
    listed = "\n".join(f"{number:2} {path}" for number, path in enumerate(files, start=1))
    assert len(files) <= MOST, f"{len(files)} files, in the order of first touch:\n{listed}"
    assert explained() == files, f"CONTRIBUTING.md lists others. A call touches, in this order:\n{listed}"


if __name__ == "__main__":
    print("\n".join(recorded()))
