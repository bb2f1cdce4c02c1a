"""The files of a checkpoint: finds them, lists their tensors, and reads tensors or parts of them.

A checkpoint is a folder with a `config.json` and safetensors files: one, several, or several with an index that
says which tensor is in which; or one safetensors file that has a `config.json` beside it. Opening one reads
headers and nothing else. Later, a tensor, or an expert's share of one, is read through a memory map, and its pages
are given back as soon as it was copied: a rank that reads a quarter of the experts has one copy of this quarter in
memory, and nothing more.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.checkpoints.config import CONFIG, read_json
from tokenyard.checkpoints.header import (
    DTYPES,
    PICKLE_ENDINGS,
    StoredTensor,
    damaged,
    read_header,
    refuse_pickle,
    refused,
)
from tokenyard.errors import CheckpointError

INDEX = "model.safetensors.index.json"

# The most bytes before and after a read that Linux may bring into memory with it.
_COME_ALONG = 2 << 20
_ONE_OF_SEVERAL = re.compile(r"(?P<name>.*-)(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")


@dataclass
class _Map:
    """A memory map of a file. Pages are given back after a read, so that the process does not keep them in memory."""

    pages: mmap.mmap
    readers: int = 0
    # The first and the last byte that were read since the map last had no readers.
    first: int = sys.maxsize
    last: int = 0

    def give_back(self, first: int, last: int) -> None:
        """End a read: give the pages of its bytes back; the last reader also gives back those that Linux read ahead."""
        self._forget(-(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE)
        self.readers -= 1
        self.first, self.last = min(self.first, first), max(self.last, last)
        if self.readers == 0:
            self._forget(max(0, self.first // _COME_ALONG - 1) * _COME_ALONG, self.last + _COME_ALONG)
            self.first, self.last = sys.maxsize, 0

    def _forget(self, first: int, last: int) -> None:
        if last > first:
            self.pages.madvise(mmap.MADV_DONTNEED, first, min(last, len(self.pages)) - first)


class TensorFiles:
    """The tensors of a checkpoint by name, and how to read them. Made by `open_files`.

    Any number of threads may read at a time.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], sizes: Mapping[Path, int]) -> None:
        self.tensors = tensors
        self._sizes = sizes
        self._maps: dict[Path, _Map] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0  # bytes of tensors that were read, without headers

    @contextmanager
    def view(self, name: str, index: int | None = None) -> Iterator[Tensor]:
        """A tensor, or its slice `index` along the first dimension, as a view of the file, valid inside the `with`."""
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype][1]
        if dtype is None:
            raise stored.error(
                f" is {stored.dtype}{list(stored.shape)}",
                expected="a dtype that torch can hold",
                fix="this tensor cannot be read; leave it out",
            )
        shape = stored.shape if index is None else stored.shape[1:]
        with self.view_bytes(name, index) as raw:
            # A tensor may start at any byte of a file; torch reads numbers only at addresses that their size divides.
            aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
            yield aligned.view(dtype).view(shape)

    @contextmanager
    def view_bytes(self, name: str, index: int | None = None) -> Iterator[Tensor]:
        """What `view` gives, as a flat tensor of bytes."""
        stored = self.tensors[name]
        begin, nbytes = stored.begin, stored.nbytes
        if index is not None:
            nbytes //= stored.shape[0]
            begin += index * nbytes
        if nbytes == 0:
            yield torch.empty(0, dtype=torch.uint8)
            return
        mapped = self._map(stored.file)
        with self._lock:
            self.bytes_read += nbytes
            mapped.readers += 1
        try:
            yield torch.frombuffer(mapped.pages, dtype=torch.uint8, count=nbytes, offset=begin)
        finally:
            with self._lock:
                mapped.give_back(begin, begin + nbytes)

    def read(self, name: str) -> Tensor:
        """A copy of a tensor."""
        with self.view(name) as tensor:
            return tensor.clone()

    def _map(self, path: Path) -> _Map:
        with self._lock:
            if path not in self._maps:
                try:
                    with path.open("rb") as file:
                        size = os.fstat(file.fileno()).st_size
                        if size != self._sizes[path]:
                            raise damaged(path, f"had {self._sizes[path]} bytes when opened, now {size}")
                        # A private map: torch wants writable memory, and writes would not reach the file.
                        self._maps[path] = _Map(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
                except OSError as error:
                    raise damaged(path, f"cannot be mapped ({error.strerror or error})") from error
            return self._maps[path]


def open_files(path: Path) -> tuple[TensorFiles, dict[str, Any], Path]:
    """The tensors of a checkpoint, the values of its config, and the path of the config file."""
    if os.path.isfile(path):  # False for a path that the operating system does not allow
        return _open_one(path)
    if not os.path.isdir(path):
        expected = "the folder of a checkpoint, or a safetensors file"
        raise refused(path, "is not there", expected=expected, fix="check the path")
    config = _read_config(path / CONFIG)
    index = path / INDEX
    if index.exists():
        return _indexed(path, index), config, path / CONFIG
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLE_ENDINGS)
        if pickles:
            refuse_pickle(pickles[0], b"")
        fix = "check the path, and that the weights were downloaded"
        raise refused(path, "holds no safetensors file", expected=f"{CONFIG} and *.safetensors", fix=fix)
    _check_numbering(path, files)
    return _all_of(files), config, path / CONFIG


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file, in memory."""
    files = _all_of([path])
    return {name: files.read(name) for name in files.tensors}


def _open_one(path: Path) -> tuple[TensorFiles, dict[str, Any], Path]:
    try:
        with path.open("rb") as file:
            refuse_pickle(path, file.read(9))
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror or error})") from error
    if path.suffix != ".safetensors":
        found = "is not a safetensors file, by its name"
        expected = "the folder of a checkpoint, or *.safetensors"
        raise refused(path, found, expected=expected, fix="pass the folder that holds config.json")
    return _all_of([path]), _read_config(path.parent / CONFIG), path.parent / CONFIG


def _all_of(files: list[Path]) -> TensorFiles:
    tensors: dict[str, StoredTensor] = {}
    sizes = {}
    for file in files:
        held, sizes[file] = read_header(file)
        for tensor in held:
            if tensor.name in tensors:
                raise tensor.error_at(
                    f"tensor {tensor.name!r} is in {tensors[tensor.name].file.name} and in {file.name}",
                    expected="each tensor once, or an index that says which counts",
                    fix=f"remove the file that is too many, or add {INDEX}",
                )
            tensors[tensor.name] = tensor
    return TensorFiles(tensors, sizes)


def _indexed(folder: Path, index: Path) -> TensorFiles:
    """The tensors that an index lists, each from the file that the index gives for it."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        found, expected = "has no weight_map of tensors to files", '{"weight_map": {"a tensor": "a file"}}'
        raise refused(index, found, expected=expected, fix="download or copy the index again")
    files = {name: folder / name for name in sorted(set(places.values()))}
    for name, file in files.items():
        refuse_pickle(file, b"")
        if Path(name).name != name:
            found, expected = f"names the file {name!r}", "the name of a file beside the index"
            fix = "do not trust this checkpoint: an index has no reason to lead elsewhere"
            raise refused(index, found, expected=expected, fix=fix)
        if not os.path.isfile(file):
            tensor = next(tensor for tensor, place in places.items() if place == name)
            raise _missing_file(file, f"{index.name} says that it holds tensor {tensor!r} and others")
    held, sizes = {}, {}
    for name, file in files.items():
        tensors, sizes[file] = read_header(file)
        held[name] = {tensor.name: tensor for tensor in tensors}
    for tensor, place in places.items():
        if tensor not in held[place]:
            raise CheckpointError(
                f"{files[place]} does not hold tensor {tensor!r}",
                expected=f"it to be there, as {index.name} says",
                fix="download the file and the index again: they are of different versions",
                file=files[place],
                tensor=tensor,
            )
    return TensorFiles({tensor: held[place][tensor] for tensor, place in places.items()}, sizes)


def _check_numbering(folder: Path, files: list[Path]) -> None:
    """Raise if a file is missing from a numbered series, such as `model-00001-of-00003.safetensors`."""
    for file in files:
        match = _ONE_OF_SEVERAL.fullmatch(file.name)
        if match is None:
            continue
        digits = len(match["number"])
        # The total may be wrong by billions, so at most one number more than there are files is looked for.
        for number in range(1, min(int(match["total"]), len(files) + 1) + 1):
            name = f"{match['name']}{number:0{digits}}-of-{match['total']}.safetensors"
            if not (folder / name).is_file():
                raise _missing_file(folder / name, f"{file.name} is there")


def _missing_file(path: Path, why: str) -> CheckpointError:
    expected = "all files of the checkpoint in one folder"
    return refused(path, f"is missing; {why}", expected=expected, fix="download or copy this file, too")


def _read_config(path: Path) -> dict[str, Any]:
    """The values of a model's `config.json`."""
    if not os.path.isfile(path):
        expected = "a config.json beside the weights: it says what they are"
        fix = "download or copy the config of this model, too"
        raise refused(path, "is missing", expected=expected, fix=fix)
    return read_json(path)
