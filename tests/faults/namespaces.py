"""What the kernel can give a process of its own: a /dev/shm, and a monotonic clock. Both where it allows them."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_TIME, _NEW_MOUNTS, _NEW_USER = 0x80, 0x20000, 0x10000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14


def _unshare(flags):
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source, target, kind, flags, options):
    arguments = [text if text is None else text.encode() for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _own(flags):
    """Leave namespaces: as root, or as the root of a user namespace of one's own."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        try:
            _unshare(flags)
            return
        except PermissionError:
            pass  # a root without powers, in a container
    _unshare(flags | _NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def own_shared_memory(megabytes=2):
    """Give this process, and those that it starts, a /dev/shm of their own, so small that it can be filled.

    Returns None, or why the kernel refuses. Call it before anything starts a thread.
    """
    try:
        _own(_NEW_MOUNTS)
        _mount(None, "/", None, _PRIVATE | _RECURSIVE, "")
        _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={megabytes}m")
    except OSError as error:
        return str(error)
    return None


def fork_with_another_clock(seconds):
    """Fork: the child's monotonic clock is off by so many seconds. Returns as `os.fork` does."""
    _own(_NEW_TIME)
    with open("/proc/self/timens_offsets", "w") as file:
        file.write(f"monotonic {int(seconds)} 0\nboottime {int(seconds)} 0\n")
    return os.fork()


def clocks_are_allowed():
    """None, or why no process can have a monotonic clock of its own here."""
    child = os.fork()
    if child == 0:
        try:
            _own(_NEW_TIME)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == 0 else os.strerror(status)
