"""How much memory a process may still take: what the kernel has, and what each control group leaves."""

import os
import weakref

import pytest
import torch

from tests.models import raised
from tokenyard.errors import GroupError
from tokenyard.group import memory, shared_memory

MACHINE = {
    "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 3000 kB\nSwapFree: 500 kB\nHugePages_Total: 0\n"
}
OF_THE_MACHINE = 1024 * 3500


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Write the files of a system, by name, and let them be asked instead of this one's."""
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / name.strip("/"))
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "sys/fs/cgroup")

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))

    return write


def version_2(folder, most, used, stat=""):
    place = f"sys/fs/cgroup/{folder}"
    return {f"{place}memory.max": most, f"{place}memory.current": used, f"{place}memory.stat": stat}


def version_1(folder, most, used, stat=""):
    place = f"sys/fs/cgroup/memory/{folder}"
    files = {"memory.limit_in_bytes": most, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {place + name: value for name, value in files.items()}


def test_a_system_that_does_not_say(system):
    assert memory.available_memory() is None
    assert memory.too_much(2**60, 64) is None
    system({"proc/meminfo": "MemTotal: 5 kB\nSwapFree: 5 kB\n"})  # an old kernel
    assert memory.available_memory() is None


def test_the_machine_has_what_is_available_and_free_swap_space(system):
    system(MACHINE)
    assert memory.available_memory() == OF_THE_MACHINE
    system({"proc/meminfo": "MemAvailable: 3000 kB\nword\n"})
    assert memory.available_memory() == 1024 * 3000


@pytest.mark.parametrize(
    ("lines", "groups", "left"),
    [
        pytest.param("0::/a/b\n", version_2("a/b/", 1000, 900), 100, id="its own"),
        pytest.param("0::/a/b\n", version_2("a/", 1000, 900), 100, id="one above it"),
        pytest.param("0::/a\n", version_2("a/b/", 1000, 900), None, id="one below it"),
        pytest.param(
            "0::/a/b\n", version_2("a/b/", 1000, 900) | version_2("a/", 500, 450), 50, id="the least of two"
        ),
        pytest.param("0::/a\n", version_2("a/", "max", 900), None, id="without a limit"),
        pytest.param(
            "0::/a\n",
            version_2("a/", 1000, 900, "anon 7\nactive_file 20\ninactive_file 3\n"),
            123,
            id="pages of files can be dropped",
        ),
        pytest.param("0::/a\n", version_2("a/", 1000, 1200), 0, id="more used than allowed"),
        pytest.param("3:cpu,memory:/a\n1:name=systemd:/a\n", version_1("a/", 1000, 900), 100, id="version 1"),
        pytest.param("3:memory:/a\n", version_1("", 1000, 900), 100, id="version 1, in a container"),
        pytest.param("3:cpu:/a\n", version_1("a/", 1000, 900), None, id="version 1, not for memory"),
        pytest.param("3:cpuset:/a\n0::/a\n", version_2("a/", 1000, 900), 100, id="both versions"),
        pytest.param("0::/a:b\n", version_2("a:b/", 1000, 900), 100, id="a colon in a name"),
        pytest.param("nonsense\n4:memory\n", version_2("", 1000, 900), None, id="nonsense"),
    ],
)
def test_control_groups(system, lines, groups, left):
    system(MACHINE | {"proc/self/cgroup": lines} | groups)
    assert memory.available_memory() == (OF_THE_MACHINE if left is None else left)


def test_what_all_ranks_take_together_is_held_against_it(system):
    system({"proc/meminfo": "MemAvailable: 1 kB\n"})
    assert memory.too_much(256, 4) is None
    assert memory.too_much(257, 4) == (
        "257 bytes cannot be allocated by each of 4 ranks (1024 bytes are available)"
    )
    assert memory.too_much(1025, 1)


class Told:
    """A group of two ranks: what both say of their errors, and whose memory this one is told of."""

    size, rank = 2, 0

    def all_or_none(self, what, error):
        assert what == "sharing memory"
        if error is not None:
            raise GroupError(error, expected="", fix="")

    def gather_json(self, where, *, phase):
        made = os.fstat(where["descriptor"])
        assert (made.st_size, made.st_mode & 0o777, made.st_ino) == (64, 0o600, where["inode"])
        return [where, where | {"pid": 1 << 23}]


def test_memory_that_cannot_be_mapped_or_allocated_is_an_error_that_says_why(monkeypatch):
    """The first reason stands, the words are the system's, and no descriptor is left open."""
    before = os.listdir("/proc/self/fd")
    gone = raised(shared_memory.share_between_processes, Told(), 64)
    assert str(gone).startswith(
        f"the memory of process {1 << 23} cannot be mapped (No such file or directory)"
    )

    def odd(pid, *_):
        raise OSError(f"{'other' if pid == 1 << 23 else 'own'} memory is odd")

    monkeypatch.setattr(shared_memory, "_map", odd)
    error = raised(shared_memory.share_between_processes, Told(), 64)
    assert str(error).startswith(f"the memory of process {os.getpid()} cannot be mapped (own memory is odd)")
    for raises, words in (OSError(28, "No space"), "No space"), (OSError("none"), "none"):

        def refuse(*_, raises=raises):
            raise raises

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        error = raised(shared_memory.share_between_processes, Told(), 64)
        assert str(error).startswith(f"64 bytes cannot be allocated ({words})")
    monkeypatch.setattr(shared_memory, "too_much", lambda nbytes, ranks: f"{ranks} x {nbytes} are too much")
    error = raised(shared_memory.share_between_processes, Told(), 64)
    assert str(error).startswith("2 x 64 are too much")  # before anything is allocated
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_others_map_goes_back_with_its_last_tensor():
    before = set(os.listdir("/proc/self/fd"))
    memory = shared_memory.mappable_memory(8192)
    part = memory[4096:].view(torch.int16)
    part[:4] = torch.arange(4)
    address = shared_memory.address_of(part)
    assert address["start"] == 4096
    assert shared_memory.address_of(part[::2]) is None  # other numbers lie between
    assert shared_memory.address_of(part.clone()) is None
    other = shared_memory.map_memory(address)
    assert other[4096:].view(torch.int16)[:4].tolist() == [0, 1, 2, 3]
    del memory
    assert os.fstat(address["descriptor"]).st_blocks > 0
    del part
    assert int(other.sum()) == 0  # its pages are gone, though it is still mapped here
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match=r"No such file|another file"):
        shared_memory.map_memory(address)


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Invalid argument"):
        shared_memory.mappable_memory(0)
    monkeypatch.setattr(shared_memory, "_FAILED", None)
    monkeypatch.setattr(shared_memory._libc, "mmap", lambda *_: None)
    with pytest.raises(OSError, match="Errno"):
        shared_memory.mappable_memory(64)
    assert os.listdir("/proc/self/fd") == before


def test_memory_stays_mapped_while_the_process_ends(monkeypatch):
    """What runs at exit may still read it."""
    made = []

    class Noted(weakref.finalize):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(shared_memory.weakref, "finalize", Noted)
    mapped = shared_memory.mappable_memory(4096)
    assert [each.atexit for each in made] == [False, False]
    assert mapped.numel() == 4096
