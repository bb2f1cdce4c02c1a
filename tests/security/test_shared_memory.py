"""The workspace between processes: memory that its user alone can open, and that has no name to guess or to squat."""

from __future__ import annotations

import fcntl
import gc
import os
import stat
from pathlib import Path

import pytest
import torch

import tokenyard as ty
from tokenyard.group import shared_memory

NOBODY = 65534  # the user that owns nothing


def names_in_shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


def try_to_open(path: str) -> str:
    """What happens to another user who knows everything: the process, the descriptor, the path."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.close(os.open(path, os.O_RDONLY))
            outcome = "opened"
        except OSError as error:
            outcome = type(error).__name__
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        return answer.read()


def share(group: ty.Group) -> dict[str, object]:
    """One rank: share memory, and look at the descriptors of all ranks while they are there to be opened."""
    seen: dict[str, object] = {}
    map_it = shared_memory._map

    def looked_at(pid: int, descriptor: int, inode: int, nbytes: int) -> torch.Tensor:
        path = f"/proc/{pid}/fd/{descriptor}"
        found = os.stat(path)
        seen["mode"], seen["owner"] = stat.S_IMODE(found.st_mode), found.st_uid
        seen["where"] = os.readlink(path)
        seen["stranger"] = try_to_open(path) if os.geteuid() == 0 else "not root: nobody to be"
        return map_it(pid, descriptor, inode, nbytes)

    shared_memory._map = looked_at
    before = names_in_shared_memory()
    buffers = group.share_memory(1 << 16)
    buffers[group.rank].fill_(group.rank + 1)
    group.barrier()
    seen["shared"] = [int(buffer[-1]) for buffer in buffers]
    seen["names"] = sorted(name for name in names_in_shared_memory() - before if "tokenyard" in name)
    seen["descriptors"] = [
        target
        for entry in os.listdir("/proc/self/fd")
        if "tokenyard" in (target := _target(f"/proc/self/fd/{entry}"))
    ]
    group.barrier()
    return seen


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the one that listed the folder
        return ""


@pytest.fixture(scope="module")
def seen() -> list[dict[str, object]]:
    return ty.launch(2, share, ranks="processes")


def test_memory_is_shared_by_the_ranks(seen):
    assert [rank["shared"] for rank in seen] == [[1, 2], [1, 2]]


def test_memory_can_be_opened_by_its_user_alone(seen):
    for rank in seen:
        assert rank["mode"] == 0o600
        assert rank["owner"] == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_it_even_with_its_path(seen):
    assert [rank["stranger"] for rank in seen] == ["PermissionError", "PermissionError"]
    # The test itself can tell: what is open to all, the same stranger does open.
    assert try_to_open("/proc/self/status") == "opened"


def test_it_has_no_name_and_keeps_no_descriptor(seen):
    for rank in seen:
        assert rank["where"] == "/memfd:tokenyard (deleted)"
        assert rank["names"] == []
        assert rank["descriptors"] == []


def test_a_file_that_stands_where_memory_was_announced_is_not_mapped(tmp_path):
    """A descriptor that was closed and given away again is another file, or one that is too short."""
    with (tmp_path / "other").open("wb+") as file:
        file.truncate(100)
        inode = os.fstat(file.fileno()).st_ino
        for announced, nbytes in ((inode + 1, 100), (inode, 101)):
            with pytest.raises(OSError, match="it is another file"):
                shared_memory._map(os.getpid(), file.fileno(), announced, nbytes)
        assert shared_memory._map(os.getpid(), file.fileno(), inode, 100).shape == (100,)


def test_memory_that_the_system_does_not_map_is_an_error(tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(b"1234")
    with path.open("rb+") as file, pytest.raises(OSError, match="Invalid argument"):
        shared_memory._map(os.getpid(), file.fileno(), path.stat().st_ino, 0)


def test_memory_that_cannot_be_mapped_is_an_error_of_the_system():
    """A file that is sealed against writing; a file that is too short by a byte; another file at its place."""
    sealed = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(sealed, 0, 4096)
        inode = os.fstat(sealed).st_ino
        assert shared_memory._map(os.getpid(), sealed, inode, 4096).shape == (4096,)
        for wrong in ((inode, 4097), (inode + 1, 4096)):
            with pytest.raises(OSError, match="it is another file"):
                shared_memory._map(os.getpid(), sealed, *wrong)
        gc.collect()  # what is mapped cannot be sealed
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(PermissionError):
            shared_memory._map(os.getpid(), sealed, inode, 4096)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        os.close(sealed)
