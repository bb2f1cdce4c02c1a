"""Launches Triton kernels, and compiles and loads them before a call needs them.

A kernel that is compiled in a call makes all other ranks wait. One that is loaded while a kernel of another rank waits
on the same GPU may never be loaded: CUDA may let the loading wait for running kernels. Therefore exchange and experts
say before the first call which kernels they can launch, and a plan makes all of them ready:

    recorded(device)      a context in which `launch` launches nothing and writes down what it was given
    make_ready(launches)  compiles the kernels of these launches, several at a time, and loads them on this rank

Launches are recorded on tensors of the meta device, which take no memory. `kernel_device` is the GPU for which they are
recorded. What Triton compiles for a launch depends on the types, constants and alignments of its arguments, and for
integers on whether they are 1 or multiples of 16: `launch_key` has just that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Seconds in which one rank may compile kernels while the others wait, whatever the deadline of other waits.
COMPILING = 900.0
# What decides which compiled kernel a launch uses.
LaunchKey = tuple[Any, ...]

_log = logging.getLogger("tokenyard")


@dataclass(frozen=True, eq=False)
class RecordedLaunch:
    """A kernel and the arguments of one of its launches."""

    kernel: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def compiled(self) -> Any:
        """The compiled kernel. Triton compiles it, or finds it in memory or in its cache on disk."""
        return self.kernel.warmup(*self.args, grid=(1,), **self.options)


@dataclass(eq=False)
class Recorder:
    """The launches of a `recorded` block, one for each kernel that they need."""

    device: torch.device
    launches: dict[LaunchKey, RecordedLaunch] = field(default_factory=dict)

    def add(self, kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Write a launch down, if no earlier one uses the same compiled kernel."""
        self.launches.setdefault(launch_key(kernel, args, options), RecordedLaunch(kernel, args, options))


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel; inside a `recorded` block of this thread, write the launch down instead."""
    recorder = _recorder.get()
    if recorder is None:
        kernel[grid](*args, **options)
    else:
        recorder.add(kernel, args, options)


@contextmanager
def recorded(device: torch.device) -> Iterator[Recorder]:
    """A context in which kernels for a GPU are not launched but written down."""
    recorder = Recorder(device)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def kernel_device(device: torch.device) -> torch.device:
    """The device that runs the kernels for tensors on `device`: inside `recorded`, the GPU for tensors on meta."""
    recorder = _recorder.get() if device.type == "meta" else None
    return device if recorder is None else recorder.device


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and starts at a multiple of 16 bytes: for others Triton compiles other kernels."""
    return tensor.data_ptr() % 16 == 0 and tensor.is_contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and at a multiple of 16 bytes; a copy if need be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def launch_key(kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> LaunchKey:
    """What decides which compiled kernel a launch uses: the kernel, and what Triton specializes it by."""
    by_name = {parameter.name: parameter for parameter in kernel.params}
    described = []
    for name, value in (dict(zip(by_name, args, strict=False)) | dict(options)).items():
        parameter = by_name.get(name)
        if parameter is None or parameter.is_constexpr:
            described.append((name, value))
        else:
            described.append((name, _described(value, specializes=not parameter.do_not_specialize)))
    return kernel, tuple(sorted(described, key=lambda item: item[0]))


def _described(value: Any, *, specializes: bool) -> Any:
    """The type of an argument, and what Triton specializes a kernel by."""
    if isinstance(value, tuple):
        return tuple(_described(part, specializes=specializes) for part in value)
    if isinstance(value, Tensor):
        return value.dtype, specializes and value.data_ptr() % 16 == 0
    if value is None or isinstance(value, bool | float):
        return type(value).__name__
    if isinstance(value, int):
        is_wide = not -(2**31) <= value < 2**31
        return ("int", is_wide, *((value == 1, value % 16 == 0) if specializes else ()))
    # A descriptor of a tensor, for loads by TMA.
    return (
        type(value).__name__,
        value.base.dtype,
        tuple(value.block_shape),
        str(getattr(value, "layout", None)),
    )


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What `make_ready` did."""

    kernels: int = 0
    seconds: float = 0.0

    def __add__(self, other: Readiness) -> Readiness:
        return Readiness(kernels=self.kernels + other.kernels, seconds=self.seconds + other.seconds)

    def __str__(self) -> str:
        return f"{self.kernels} kernels, ready in {self.seconds:.1f} s"


class ReadyKernels:
    """The kernels of one GPU that are compiled and loaded in this process, for one plan."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readiness = Readiness()  # how many there are, and how long they took
        self._known: set[LaunchKey] = set()
        self._recorded: set[Any] = set()

    def add(self, record: Callable[[], None], *, of: Any = None) -> None:
        """Make ready what `record` launches: inside of it, kernels are not launched. Does nothing on CPUs.

        `of`: what `record` depends on; a second call with an equal value does nothing.
        """
        if self.device.type != "cuda" or (of is not None and of in self._recorded):
            return
        with recorded(self.device) as recorder:
            record()
        missing = {key: launch for key, launch in recorder.launches.items() if key not in self._known}
        self.readiness += make_ready(missing.values(), self.device)
        self._known |= missing.keys()
        if of is not None:
            self._recorded.add(of)


def make_ready(launches: Iterable[RecordedLaunch], device: torch.device) -> Readiness:
    """Compile the kernels of these launches for a GPU, several at a time, and load them into this process.

    Of several processes of a host that call this at the same time, one compiles, and the others find its kernels in
    Triton's cache.
    """
    from tokenyard.kernel_compiler import compile_side_by_side

    needed, start = list(launches), time.monotonic()
    if not needed:
        return Readiness()
    with torch.cuda.device(device):
        compile_side_by_side(needed, torch.cuda.get_device_capability(device))
        for one in needed:
            one.compiled().run  # noqa: B018 (to get the launcher of a kernel loads the kernel)
    ready = Readiness(kernels=len(needed), seconds=time.monotonic() - start)
    _log.info("%s: %s", device, ready)
    return ready
