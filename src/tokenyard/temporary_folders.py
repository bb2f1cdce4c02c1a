"""Temporary folders that can all be removed at once, when a command is interrupted.

A command that is interrupted ends without leaving its `with` blocks (see `tokenyard.cli.interrupts`). So the folders
that are in use are kept in a list.
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
    """Remove the folders of all blocks, and let nobody make a new one: this process is about to end.

    Waits at most so many seconds for a folder that another thread is just making.
    """
    _lock.acquire(timeout=seconds)  # and never released
    for folder in list(_in_use):
        # Threads that still run would go on writing into the folder while it is emptied: they no longer find it.
        hidden = folder.with_name(f"{folder.name}.removed")
        with suppress(OSError):
            folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
