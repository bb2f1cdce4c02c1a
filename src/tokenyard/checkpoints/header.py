"""The header of a safetensors file, read strictly.

    8 bytes: n, little endian │ n bytes of JSON: name → dtype, shape, [begin, end) │ the tensors' bytes

The header lists all tensors, and it is checked before anything else is read: its length against the file's, every
tensor's bytes against its shape and dtype, and that the tensors fill the file without gap or overlap. A file that was
cut off, or is of another kind, is therefore refused by name after reading a few kilobytes, and a damaged size leads to
no allocation.

Why not the library `safetensors`, which tests compare this with: its errors name neither the tensor nor the bytes that
are wrong ("invalid shape, data type, or offset for tensor"); it reads a tensor into memory of its own, where here an
expert's share goes from the file to its place in one copy (`files`); and it writes tensors that are all in memory,
where a conversion writes each expert as soon as it is made (`writer`).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenyard.errors import CheckpointError, shown

# The largest header that is read, enough for a million tensors. The safetensors library has the same limit.
LARGEST_HEADER = 100_000_000

# The most dimensions of a tensor. A damaged header could list a million, whose product takes hours.
_MOST_DIMENSIONS = 64

# The dtypes of safetensors: the bits of an element, and torch's dtype, or None where torch has none.
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "U16": (16, torch.uint16),
    "I16": (16, torch.int16),
    "U32": (32, torch.uint32),
    "I32": (32, torch.int32),
    "U64": (64, torch.uint64),
    "I64": (64, torch.int64),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "F32": (32, torch.float32),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
}

# The first bytes of files that can run code when they are loaded: pickles, and the archives of torch.save.
_PICKLE_STARTS = {b"\x80\x02": "a pickle", b"\x80\x03": "a pickle", b"\x80\x04": "a pickle"}
_PICKLE_STARTS |= {b"\x80\x05": "a pickle", b"PK": "an archive of torch.save, which is a pickle"}
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file, as the header describes it. Its bytes were not read."""

    name: str  # the name in the file
    file: Path  # the file that holds it
    dtype: str  # the dtype, as the header writes it: `BF16`, `F32`, …
    shape: tuple[int, ...]  # the shape of the tensor
    begin: int  # the first byte, counted from the start of the file
    nbytes: int  # its size in bytes

    def __str__(self) -> str:
        return f"{self.file.name}: tensor {self.name!r} is {self.dtype}{list(self.shape)}"

    def error(self, found: str, *, expected: str, fix: str) -> CheckpointError:
        """An error about this tensor, whose message is its file and name followed by `found`."""
        return self.error_at(f"{self.file.name}: tensor {self.name!r}{found}", expected=expected, fix=fix)

    def error_at(self, found: str, *, expected: str, fix: str) -> CheckpointError:
        """An error about this tensor, whose message is `found` alone."""
        return CheckpointError(found, expected=expected, fix=fix, file=self.file, tensor=self.name)


def read_header(path: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a safetensors file, and the file's size in bytes. Raises unless the file is complete.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
    ...     _ = file.write(b"\\x80\\x02}q\\x00."), file.flush()
    ...     read_header(Path(file.name))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tokenyard.errors.CheckpointError: ....safetensors is a pickle; expected a safetensors file; fix: ...
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise damaged(path, "is no file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(9)
            refuse_pickle(path, start)
            length = int.from_bytes(start[:8], "little")
            if len(start) < 9 or length > size - 8:
                raise damaged(path, f"has {size} bytes, and a header of {length} bytes is announced")
            if length > LARGEST_HEADER:
                raise damaged(path, f"announces a header of {length} bytes, more than {LARGEST_HEADER}")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        found, fix = f"cannot be read ({error.strerror or error})", "check the path, and who may read it"
        raise refused(path, found, expected="a safetensors file", fix=fix) from error
    first = 8 + length
    entries = _entries(path, text)
    tensors = [_tensor(path, name, entry, first) for name, entry in entries.items()]
    _check_cover(path, tensors, first, size)
    return tensors, size


def parse_json(text: str) -> Any:
    """The value of a JSON text; ValueError also for an object with two equal names, of which readers take either one.

    >>> parse_json('{"experts": {"top_k": 2, "top_k": 8}}')
    Traceback (most recent call last):
    ValueError: the name 'top_k' is there twice
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"the name {shown(name)} is there twice")
            found[name] = value
        return found

    return json.loads(text, object_pairs_hook=once)


def refuse_pickle(path: Path, start: bytes) -> None:
    """Raise if a file is a pickle, by its name or by its first 9 bytes, because loading a pickle can run any code.

    The length of a header may happen to begin with the bytes of a pickle; a `{` in the ninth byte shows that the file
    is a safetensors file all the same.
    """
    kind = next((kind for magic, kind in _PICKLE_STARTS.items() if start.startswith(magic)), None)
    kind = None if start[8:9] == b"{" else kind
    if kind is None and path.suffix in PICKLE_ENDINGS:
        kind = f"a pickle, by its name (*{path.suffix})"
    if kind is not None:
        fix = "convert it on a machine that you do not mind: loading a pickle runs the code that is in it"
        raise refused(path, f"is {kind}", expected="a safetensors file", fix=fix)


def refused(path: Path, found: str, *, expected: str, fix: str) -> CheckpointError:
    """An error about a file or folder, whose message is its path followed by `found`."""
    return CheckpointError(f"{path} {found}", expected=expected, fix=fix, file=path)


def damaged(path: Path, found: str) -> CheckpointError:
    """The error for a file that is not what its header says."""
    fix = "download or copy the file again: it was cut off, or is of another kind"
    return refused(path, found, expected="a whole safetensors file", fix=fix)


def _entries(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = parse_json(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"has a header that is not JSON ({str(error)[:120]})") from error
    if not isinstance(entries, dict):
        raise damaged(path, f"has a header that is a JSON {type(entries).__name__}")
    entries.pop("__metadata__", None)
    for name in entries:
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise damaged(path, f"has a tensor whose name is no text: {shown(name, most=400)}")
    return entries


def _tensor(path: Path, name: str, entry: Any, first: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _wrong(path, name, f"has dtype {shown(dtype)}", f"one of {', '.join(DTYPES)}")
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMENSIONS:
        raise _wrong(path, name, f"has shape {shown(shape)}", f"at most {_MOST_DIMENSIONS} whole numbers")
    if math.prod(filter(None, shape)) >= 2**63:  # for an empty tensor, of its other sizes, as in torch
        raise _wrong(path, name, f"has shape {shape}", "fewer than 2^63 elements")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _wrong(path, name, f"lies at {shown(offsets)}", "[begin, end]")
    bits = math.prod(shape) * DTYPES[dtype][0]
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        raise _wrong(path, name, f"is {dtype}{shape} and has {nbytes} bytes", f"{-(-bits // 8)} bytes")
    return StoredTensor(
        name=name, file=path, dtype=dtype, shape=tuple(shape), begin=first + offsets[0], nbytes=nbytes
    )


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _wrong(path: Path, name: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {shown(name, most=400)} {found}",
        expected=expected,
        fix="download or copy the file again: its header is damaged",
        file=path,
        tensor=name,
    )


def _check_cover(path: Path, tensors: list[StoredTensor], first: int, size: int) -> None:
    """Raise unless each byte after the header belongs to exactly one tensor."""
    end = first
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.nbytes)):
        if tensor.begin + tensor.nbytes > size:
            raise tensor.error_at(
                f"{path} ends at byte {size}, in or before tensor {tensor.name!r}, which ends at "
                f"{tensor.begin + tensor.nbytes}",
                expected="a whole safetensors file",
                fix="download or copy the file again: it was cut off",
            )
        if tensor.begin != end:
            gap = tensor.begin - end
            kind = "overlaps the one before" if gap < 0 else f"leaves {gap} bytes out"
            raise _wrong(path, tensor.name, kind, "tensors that follow each other without a gap")
        end += tensor.nbytes
    if end != size:
        raise damaged(path, f"has {size - end} bytes after its last tensor")
