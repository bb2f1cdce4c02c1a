"""Triton's interpreter, made to round as a GPU does: what it needs to run the kernels bit for bit on a CPU.

The interpreter computes with NumPy, which knows neither bf16 nor fp8, rounds a fused multiply-add twice, and lets the
smaller of a number and NaN be NaN. And it is slow: it calls the function of a reduction for each
element, prepares the language anew for each function that a kernel calls, and makes its tables and the shapes of
tensors anew for each operation.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.float32}
_POINTER = np.dtype(np.uint64)
_convert_float = interpreter._convert_float
_known_dtype = cache(interpreter._get_np_dtype)
_init_block_type = tl.block_type.__init__
_blocks = {}  # what a type of blocks holds, by its elements and sizes
_call = interpreter.InterpretedFunction.__call__
_launch = interpreter.GridExecutor.__call__

only_without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: tests/gpu runs the kernels themselves"
)


def _cast(data, source, target, rounding):
    """Casts by torch: nearest, ties to even, and e4m3 saturates as on a GPU."""
    if source not in _TORCH or target not in _TORCH:
        return _convert_float(data, source, target, rounding)
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).reshape(-1).copy()).view(
        _TORCH[source]
    )
    numbers = numbers.float()
    if target == tl.float8e4nv:
        numbers = numbers.clamp(-448, 448)
        codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(numbers.isnan(), 0x7F)
        return codes.numpy().reshape(data.shape)
    return (
        numbers.to(_TORCH[target])
        .view(torch.uint8)
        .numpy()
        .view(_BITS[_TORCH[target].itemsize])
        .reshape(data.shape)
    )


def _fused(self, x, y, z):
    """One rounding, but for the rare double rounding of float64."""
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


def _reduced_by_slices(self, input):
    """A reduction of one tensor along an axis by a function of the kernel's: a call for each slice."""
    (tensor,), axis = input, self.axis
    first, *others = np.moveaxis(tensor.handle.data, axis, 0)
    total = self.to_tensor(first, tensor.dtype)
    for other in others:
        total = self.combine_fn.fn(total, self.to_tensor(other, tensor.dtype))
    data = np.expand_dims(total.handle.data, axis) if self.keep_dims else total.handle.data
    return [self.to_tensor(data, tensor.dtype)]


def _launched(self, *arguments, **named):
    """A launch without NumPy's warnings: a GPU divides by zero without a word."""
    with np.errstate(all="ignore"):
        return _launch(self, *arguments, **named)


def _called(self, *arguments, **named):
    """A function that a kernel calls, which has prepared the language already.

    Triton's own functions read another module of it, which stays prepared after their first call.
    """
    if self.fn.__module__.startswith("triton.") and tl.core.is_builtin(tl.core.load):
        return _call(self, *arguments, **named)
    return self.rewrite()(*arguments, **named)


def _numpy_dtype(type_):
    """How NumPy holds a type. The interpreter makes its table of all types in every call."""
    element = type_.element_ty if isinstance(type_, tl.block_type) else type_
    return _POINTER if isinstance(element, tl.pointer_type) else _known_dtype(element)


def _make_block_type(self, element_ty, shape):
    """A type of blocks: what follows from its sizes is found out once for each."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    known = _blocks.get((element_ty.name, *sizes))
    if known is None:
        _init_block_type(self, element_ty, shape)
        _blocks[element_ty.name, *sizes] = self.shape, self.numel, self.name
    else:
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, known


def _make_tensor(self, handle, type):
    """A tensor: its shape, as kernels see it, is made once for all tensors that have it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


@cache
def _shape_of(sizes):
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _with_bool_mask(access, at):
    """A masked access whose mask, an argument at a place, may have become integers on its way.

    (Accesses by a tensor descriptor name some of their arguments.)
    """

    def accessed(self, *arguments, **named):
        arguments = [*arguments, *named.values()]
        mask = arguments[at]
        arguments[at] = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype.scalar)
        return access(self, *arguments)

    return accessed


def install() -> None:
    """Mend the interpreter. It interprets kernels where TRITON_INTERPRET=1 was set before Triton was imported."""
    builder = interpreter.InterpreterBuilder
    if torch.cuda.is_available() or builder.create_fma is _fused:
        return
    interpreter._convert_float = _cast
    interpreter._get_np_dtype = _numpy_dtype
    tl.block_type.__init__ = _make_block_type
    tl.tensor.__init__ = _make_tensor
    builder.create_fma = _fused
    interpreter.GridExecutor.__call__ = _launched
    interpreter.InterpretedFunction.__call__ = _called
    interpreter.ReduceOps.generic_reduce = _reduced_by_slices
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_masked_load = _with_bool_mask(builder.create_masked_load, 1)
    builder.create_masked_store = _with_bool_mask(builder.create_masked_store, 2)
    builder.create_atomic_rmw = _with_bool_mask(builder.create_atomic_rmw, 3)
