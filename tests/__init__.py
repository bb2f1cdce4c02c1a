"""Tests. Importing this package fills fresh memory with NaN (and integers with their largest value).

Memory that was freed often holds the right numbers still, so that what forgets to write looks right. The setting holds
for all threads of a process, and the processes of ranks import this package with the function that they run. GPUs are
left alone: there, torch would choose other kernels, too.

Threads of an operator sleep while they have nothing to do. By default they look for work all the time, and take the
cores from the ranks and tests beside them: small layers on one rank then cost twice the CPU time.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch

if not Path("/dev/nvidiactl").exists():
    # Not `torch.use_deterministic_algorithms`: that imports Triton, before it is known whether it is to be interpreted.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
