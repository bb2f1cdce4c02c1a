"""Garbage in, a few examples of it each: `make test-faults` runs many more, and lets coverage lead them."""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.targets import TARGETS

# Examples of each target. What an example costs is from 3 ms (announcements) to 100 ms (layers on two ranks).
EXAMPLES = {
    "layer_specs": 60,
    "drafts": 25,
    "routes": 60,
    "layer_calls": 25,
    "huggingface_configs": 60,
    "checkpoint_headers": 60,
    "checkpoint_indexes": 40,
    "announcements": 100,
    "command_lines": 10,
}
TIMES = int(os.environ.get("TOKENYARD_FAULTS", "1"))


@pytest.mark.parametrize("name", TARGETS)
def test_only_errors_of_ours_come_out(name):
    limited = settings(
        max_examples=EXAMPLES[name] * TIMES,
        deadline=None,  # the machine may be busy
        suppress_health_check=list(HealthCheck),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of dtypes and layouts that are young
        limited(TARGETS[name])()
