"""A worker that dies inside a layer: for `python -m tests.vllm_engines.engine`, and for vLLM's own workers.

vLLM's `--worker-extension-cls tests.vllm_engines.dying.WorkerExtension` imports this module in every worker. The worker
of rank 1 is then killed in its first layer after a file was made, which the environment names.
"""

import os
import signal
from pathlib import Path

NOW = "TOKENYARD_TESTS_DIE_NOW"


class WorkerExtension:
    """Nothing: vLLM wants a class."""


def die_where(due):
    """Let rank 1 be killed in the first call of `finalize` at which `due` returns True."""
    from tokenyard.integrations.vllm import TokenyardPrepareAndFinalize

    finalize = TokenyardPrepareAndFinalize.finalize

    def dying(self, *arguments):
        if self.plan.group.rank == 1 and due():
            os.kill(os.getpid(), signal.SIGKILL)
        return finalize(self, *arguments)

    TokenyardPrepareAndFinalize.finalize = dying


if NOW in os.environ:
    die_where(Path(os.environ[NOW]).exists)
