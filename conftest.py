"""Settings that all tests share."""

import gc
import os
import random
import zlib
from importlib.util import find_spec

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: its kernels run on the CPU then

# The documentation shows the lab's figures, model and commands: these tests need tokenyard-lab (`pip install ./lab`).
collect_ignore = (
    [
        "lab",
        "tests/formats/test_non_finite.py",
        "tests/test_docs.py",
        "tests/test_error_table.py",
        "tests/test_pictures.py",
        "tests/test_reference.py",
        "tests/test_site.py",
        "tests/test_support.py",
    ]
    if find_spec("tokenyard_lab") is None
    else []
)

os.environ.pop(
    "COLUMNS", None
)  # workers that run tests side by side have it; the width of tables depends on it

# `derandomize`: a run of the suite is the same run everywhere. HYPOTHESIS_PROFILE=explore looks for new cases.
_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("suite", derandomize=True, **_common)
settings.register_profile("explore", derandomize=False, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_runtest_setup(item):
    """Whatever is drawn without a seed is the same in every run, whichever tests ran before on this worker."""
    number = zlib.crc32(item.nodeid.encode())
    random.seed(number)
    torch.manual_seed(number)


def pytest_collection_finish(session):
    """What was imported stays: `gc.collect()`, which many tests call, would look at all of it, for half a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """Libraries look for leaks when the process ends."""
    gc.unfreeze()


def pytest_collection_modifyitems(config, items):
    """What needs a GPU is left out where there is none."""
    if torch.cuda.is_available():
        return
    there = [item for item in items if item.get_closest_marker("gpu") is None]
    if len(there) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = there


torch.set_num_threads(1)  # two workers share two cores; what depends on threads sets its own number
