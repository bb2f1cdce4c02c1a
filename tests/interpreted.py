"""Scripts whose kernels Triton interprets, in a process of their own: it reads the setting when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parent.parent


def run_interpreted(script: str) -> Any:
    """What a script prints, one JSON document."""
    pytest.importorskip("triton")
    path = os.pathsep.join(str(_ROOT / part) for part in ("", "src", "lab/src"))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
