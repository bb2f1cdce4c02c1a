"""Settings that all tests share."""

import os

import torch
from hypothesis import HealthCheck, settings

# `derandomize`: a run of the suite is the same run everywhere. HYPOTHESIS_PROFILE=explore looks for new cases.
_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("suite", derandomize=True, **_common)
settings.register_profile("explore", derandomize=False, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

torch.set_num_threads(1)  # two workers share two cores; what depends on threads sets its own number
