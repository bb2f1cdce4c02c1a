"""What may come in: values of any kind, tensors of any kind, any JSON, and files that were damaged on the way."""

from __future__ import annotations

import json
import warnings

import numpy as np
import torch
from hypothesis import strategies as st

import tokenyard as ty
from tokenyard.formats.base import PAYLOAD_DTYPES, ROW_DTYPES


class Rude:
    """An object that refuses everything that a check might ask of it, even to be written down."""

    refuses_repr = False  # only while a target runs: hypothesis wants to print what it found

    def _refuse(self, *_: object) -> bool:
        raise ValueError("no")

    def __repr__(self) -> str:
        if self.refuses_repr:
            raise ValueError("no")
        return "Rude()"

    __eq__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = _refuse
    __hash__ = None


def ours(function, *args, **options):
    """What a call returns, or the error of ours that it raises. Anything else is a bug, and is raised.

    An error of ours says what it found, what it expected and the fix, and is no essay.
    """
    Rude.refuses_repr = True
    try:
        return function(*args, **options)
    except ty.TokenyardError as error:
        message = str(error)
        assert "; expected " in message, message
        assert "; fix: " in message, message
        assert len(message) < 5_000, f"{len(message)} letters: {message[:500]}"
        return error
    finally:
        Rude.refuses_repr = False


def mostly(good: st.SearchStrategy, *bad: st.SearchStrategy) -> st.SearchStrategy:
    """Good nine times out of ten: where all is garbage, the first check is all that ever runs."""
    return st.integers(0, 9).flatmap(lambda number: st.one_of(*bad) if number == 5 else good)


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**12, 10**15, 10**30, -(10**30)]),
    st.floats(),
    st.booleans(),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "moe", "bf16", "mxfp8(alignment=256)", "mxfp8(", "nvfp4(global_scale=0)", "grouped"]
    ),
    st.sampled_from(["contiguous", "one_sided", "\ud800", "\0", "mxfp8(alignment=9999999999999999999968)"]),
    st.just("long").map(lambda word: word * 800),
)


def _can_be_shown(dtype: torch.dtype) -> bool:
    """Whether torch can make and print a tensor: of some dtypes it knows the name only."""
    try:
        return bool(repr(torch.zeros(2, 2, dtype=dtype)) + repr(torch.zeros((), dtype=dtype)))
    except (RuntimeError, NotImplementedError):
        return False


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some dtypes are on their way in, or out
    DTYPES = st.sampled_from(
        [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and _can_be_shown(dtype)]
    )


def plain() -> st.SearchStrategy:
    """Any value that needs no library."""
    leaves = st.one_of(st.none(), NUMBERS, TEXTS, st.binary(max_size=8))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
        ),
        max_leaves=6,
    )


@st.composite
def tensors(draw, rows: int = 6, columns: int = 40, dtypes: st.SearchStrategy = DTYPES) -> torch.Tensor:
    """A tensor of any shape, dtype, layout and device that this machine has; it may hold anything."""
    usual = st.tuples(st.integers(0, rows), st.integers(0, columns))
    shape = draw(st.one_of(usual, st.lists(st.integers(0, 4), max_size=4).map(tuple)))
    dtype = draw(dtypes)
    value = draw(st.sampled_from([0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e30, 1.0]))
    made = torch.zeros(shape, dtype=dtype)
    if made.dtype in ROW_DTYPES:
        made = torch.full(shape, value).to(made.dtype)
    if made.dtype in (torch.int32, torch.int64) and made.numel():
        made.fill_(draw(st.sampled_from([-1, 0, 4, 5, -2, 2**31 - 1, -(2**31)])))
    if made.dtype not in PAYLOAD_DTYPES:  # torch can hold them, and do little else with them
        return made
    kinds = ["plain"] * 4 + [*PECULIAR]
    return PECULIAR.get(draw(st.sampled_from(kinds)), torch.clone)(made)


def _as_matrix(change):
    """A change that only matrices with rows can go through; other tensors stay as they are."""
    return lambda tensor: change(tensor) if tensor.dim() == 2 and tensor.numel() else tensor


def _for_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


SPARSE_DTYPES = (*ROW_DTYPES, torch.int32, torch.int64)

# Tensors with the right shape and dtype that are still not what most code has in mind.
PECULIAR = {
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": _as_matrix(lambda tensor: tensor.to_sparse() if tensor.dtype in SPARSE_DTYPES else tensor),
    "by columns": _as_matrix(lambda tensor: tensor.t().contiguous().t()),
    "one row for all": _as_matrix(lambda tensor: tensor[:1].expand(tensor.shape)),
    "every second row": _as_matrix(
        lambda tensor: torch.cat([tensor, tensor], 1).view(-1, tensor.shape[1])[::2]
    ),
    "wants a gradient": lambda tensor: (
        tensor.clone().requires_grad_() if tensor.dtype.is_floating_point else tensor
    ),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.clone(), requires_grad=False),
    "has a gradient": lambda tensor: (
        tensor.clone().requires_grad_() * 1 if tensor.dtype in ROW_DTYPES else tensor
    ),
    "overlaps itself": _as_matrix(lambda tensor: tensor.clone().flatten().as_strided(tensor.shape, (1, 1))),
    "for inference": _for_inference,
}


def peculiar(tensor: torch.Tensor) -> st.SearchStrategy:
    """A tensor, or the same in a peculiar form."""
    return st.sampled_from([*PECULIAR]).map(lambda kind: PECULIAR[kind](tensor))


def anything() -> st.SearchStrategy:
    """A value of any kind."""
    others = [Rude(), object(), Rude, type, int, len, torch.float32, torch.device("meta"), range(10**9)]
    return st.one_of(
        plain(),
        st.sampled_from(others),
        tensors(rows=2, columns=3),
        st.lists(st.integers(0, 3), max_size=3).map(np.array),
        st.sets(st.integers(0, 3), max_size=2),
    )


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 70),
        st.sampled_from([2**31, 2**63, 10**30, 1e308]),
        st.floats(),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw, value, *, times: int = 3):
    """A JSON value in which some parts, at any depth, were replaced, removed, or said twice."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(0, times))):
        place = value
        while isinstance(place, (dict, list)) and place:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.integers(0, 3)) == 0:
                del place[key]
            else:
                place[key] = draw(JSON)
            break
    return value
