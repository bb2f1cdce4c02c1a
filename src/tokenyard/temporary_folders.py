"""Temporary folders that can all be removed at once, when a command is interrupted.

A command that is interrupted ends without leaving its `with` blocks (see `tokenyard.cli.interrupts`). This module
therefore keeps a list of the folders that are in use.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_lock = threading.Lock()
_in_use: set[Path] = set()


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new, empty folder that only this user can enter. It is removed at the end of the block.

    Without a `parent` it is made where the system keeps temporary files.

    >>> with temporary_folder("tokenyard-") as folder:
    ...     _ = (folder / "a file").write_text("")
    >>> folder.exists()
    False
    """
    folder = (parent or Path(tempfile.gettempdir())) / f"{prefix}{secrets.token_hex(8)}"
    with _lock:
        folder.mkdir(mode=0o700)
        _in_use.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with _lock:
            _in_use.discard(folder)


def remove_temporary_folders(seconds: float) -> None:
    """Remove all temporary folders, and block the creation of new ones, in a process that is about to end.

    If another thread is creating a folder, wait for it, at most `seconds`.
    """
    _lock.acquire(timeout=seconds)  # never released, so that no folder is created after this
    for folder in list(_in_use):
        # Threads that still run could write into the folder while it is emptied. Under a new name they do not find it.
        hidden = folder.with_name(f"{folder.name}.removed")
        with suppress(OSError):
            folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
