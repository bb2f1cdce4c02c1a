"""Tests. Importing this package fills fresh memory with NaN (and integers with their largest value).

Memory that was freed often holds the right numbers still, so that what forgets to write looks right. The setting holds
for all threads of a process, and the processes of ranks import this package with the function that they run. GPUs are
left alone: there, torch would choose other kernels, too.
"""

from pathlib import Path

import torch

if not Path("/dev/nvidiactl").exists():
    # Not `torch.use_deterministic_algorithms`: that imports Triton, before it is known whether it is to be interpreted.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
