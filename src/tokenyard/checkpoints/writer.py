"""Writes safetensors files tensor by tensor, in any order, without holding all tensors in memory.

The tensors that will be written are listed first (`Entry`); headers and file sizes follow from the list. Then each
tensor, or an expert's share of one, is written to its offset in a file. Only tensors that are being written are in
memory.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenyard.checkpoints.files import INDEX
from tokenyard.checkpoints.header import DTYPES
from tokenyard.formats.base import dtype_name

SPELLINGS = {dtype: spelling for spelling, (_, dtype) in DTYPES.items() if dtype is not None}

# The most bytes of tensors in a file, unless one tensor alone is larger.
LARGEST_FILE = 5_000_000_000

_AT_ONCE = 1 << 30  # Linux writes at most 2 GiB in a call


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor that will be written; its dtype is spelled as in headers (`BF16`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8


@dataclass(slots=True)
class _Place:
    file: Path
    begin: int
    entry: Entry
    written: int = 0


class CheckpointWriter:
    """Writes the tensors of a checkpoint into a folder: `write` each of them, from any thread, then `close`."""

    def __init__(self, folder: Path, entries: Sequence[Entry], *, largest_file: int = LARGEST_FILE) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._closed = False
        self._places: dict[str, _Place] = {}
        files = _divide(entries, largest_file)
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._names = [_file_name(number, len(files)) for number in range(len(files))]
        for name, share in zip(self._names, files, strict=True):
            self._places |= _begin(folder / name, share)
        self._descriptors: dict[Path, int] = {}

    def write(self, name: str, tensor: Tensor, index: int | None = None) -> None:
        """Write a tensor, or the slice `index` of it along its first dimension."""
        place = self._places[name]
        shape = place.entry.shape if index is None else place.entry.shape[1:]
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} is written as {shape}"
        assert SPELLINGS[tensor.dtype] == place.entry.dtype, f"{name}: {dtype_name(tensor.dtype)}"
        self.write_bytes(name, tensor.contiguous().view(-1).view(torch.uint8), index)

    def write_bytes(self, name: str, raw: Tensor, index: int | None = None) -> None:
        """Write a tensor, or the slice `index` of it, from its bytes."""
        place = self._places[name]
        begin = place.begin + (0 if index is None else index * (place.entry.nbytes // place.entry.shape[0]))
        with self._lock:
            if self._closed:  # another thread has abandoned the files
                return
            if place.file not in self._descriptors:
                self._descriptors[place.file] = os.open(place.file, os.O_WRONLY)
            view, done = raw.numpy().data, 0
            while done < len(view):
                done += os.pwrite(self._descriptors[place.file], view[done : done + _AT_ONCE], begin + done)
            place.written += len(view)

    def close(self) -> None:
        """Flush all files to disk and close them; with several files, write the index of which tensor is in which."""
        missing = [name for name, place in self._places.items() if place.written != place.entry.nbytes]
        assert not missing, f"not written: {missing[:3]}"
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        self.abandon()
        if len(self._names) > 1:
            index = {
                "metadata": {"total_size": self.nbytes},
                "weight_map": {name: place.file.name for name, place in self._places.items()},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def abandon(self) -> None:
        """Close the files, whether or not all tensors were written. Later writes are ignored."""
        with self._lock:
            self._closed = True
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors = {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write some tensors, which are in memory, into one safetensors file."""
    entries = [
        Entry(name=name, dtype=SPELLINGS[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    places = _begin(path, _wide_first(entries))
    with path.open("r+b") as file:
        for name, place in places.items():
            file.seek(place.begin)
            file.write(tensors[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _begin(path: Path, entries: Sequence[Entry]) -> dict[str, _Place]:
    """Write a file's header, and extend the file to its final size. Returns the place of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    places, begin = {}, 8 + len(text)
    for entry in entries:
        places[entry.name] = _Place(path, begin, entry)
        begin += entry.nbytes
    return places


def _divide(entries: Sequence[Entry], largest_file: int) -> list[list[Entry]]:
    """Distribute entries over files in order; within a file the widest dtypes come first, so that all are aligned."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > largest_file:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return [_wide_first(share) for share in files]


def _wide_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -DTYPES[entry.dtype][0])


def _file_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number + 1:05}-of-{total:05}.safetensors"
