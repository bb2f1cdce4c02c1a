"""Puts the Python files of a vLLM wheel over the compiled library of the vLLM for CPUs that is installed.

    python -m tests.vllm_engines.next_version WHEEL FOLDER

There is no build for CPUs of every version. With FOLDER first in PYTHONPATH, `import vllm` gives the version of the
wheel, as far as its Python files go with the older library. `make test-vllm-next` runs tests there.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def put_together(wheel: Path, folder: Path) -> None:
    """Extract the Python files of the wheel, and link the installed library beside them."""
    with zipfile.ZipFile(wheel) as files:
        files.extractall(
            folder, [name for name in files.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        )
    installed = find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    for library in Path(installed.origin).parent.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    # vLLM takes itself for a build for CPUs if its version says so.
    version = f"{wheel.name.split('-')[1]}+cpu"
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    named = folder / "vllm" / "_version.py"
    named.write_text(named.read_text().replace(f"= '{version.removesuffix('+cpu')}'", f"= '{version}'"))


if __name__ == "__main__":
    put_together(Path(sys.argv[1]), Path(sys.argv[2]))
