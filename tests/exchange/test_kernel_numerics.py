"""The formats inside the kernels: tiles of awkward numbers, bit for bit as `tokenyard.formats` has them."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exchange import interpreter
from tokenyard.conformance.cases import same_bits
from tokenyard.exchange.transports.one_sided.kernels import numerics
from tokenyard.formats import EncodedRows, get

pytestmark = interpreter.only_without_gpu
interpreter.install()

WIDTH = 256
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
DTYPES = pytest.mark.parametrize("dtype", KINDS)
# Of every kind that a cast, a scale or a quotient can stumble over; each with either sign.
CORNERS = [
    0.0, 1.0, 6.0, 448.0, 464.0, 65504.0, 65520.0, 2688.0, 1e-10, 1.2e-38, 1e-39, 1e-45, 2.0**-126, 2.0**-133,
    2.0**-149, 1.75 * 2.0**-119, 3.0e38, 3.3895e38, 3.4028234663852886e38, float("inf"), float("nan"),
]  # fmt: skip
# Half way between two e2m1 codes, and between two e4m3 codes.
TIES = [
    0.25,
    0.75,
    1.25,
    1.75,
    2.5,
    3.5,
    5.0,
    1.0625,
    1.1875,
    17.0,
    19.0,
    232.0,
    248.0,
    2.0**-10,
    3 * 2.0**-10,
]


@st.composite
def tiles(draw):
    """A row of `WIDTH` float32 numbers around some magnitude, or of any bits, sprinkled with corners and ties."""
    noise = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "normal", "bits", "ties", "zeros"]))
    scale = 2.0 ** draw(st.integers(-140, 120) | st.integers(108, 120))
    if kind == "bits":
        values = noise.integers(0, 2**32, WIDTH, dtype=np.uint32).view(np.float32)
    elif kind == "ties":
        values = noise.choice(np.array(TIES), WIDTH) * scale
    else:
        values = noise.standard_normal(WIDTH) * scale * (kind == "normal")
    values = np.where(noise.random(WIDTH) < 0.5, -values, values).astype(np.float32)
    for at, corner in draw(
        st.lists(st.tuples(st.integers(0, WIDTH - 1), st.sampled_from(CORNERS)), max_size=6)
    ):
        values[at] = corner if at % 2 else -corner
    return torch.from_numpy(values)


@triton.jit
def encode_tile(
    x, data, scales, row_scale, g,
    FORMAT: tl.constexpr, OPTION: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile through the function of a format; codes, scales and nvfp4's scale of the row come out."""
    values = tl.load(x + tl.arange(0, WIDTH))
    if FORMAT == "mxfp8":
        codes, steps = numerics.encode_mxfp8(values.to(tl.float32), WIDTH, values.dtype == tl.float32)
    elif FORMAT == "fp8_block128":
        codes, steps = numerics.encode_fp8_block(values.to(tl.float32), WIDTH, OPTION == 1)
    elif OPTION == 0:
        g = numerics.row_global_scale(numerics.finite_amax(values.to(tl.float32), WIDTH))
        tl.store(row_scale, g)
        if numerics.is_easy(g):
            codes, steps = numerics.encode_nvfp4(values.to(tl.float32), g, WIDTH, True)
        else:
            codes, steps = numerics.encode_nvfp4(values.to(tl.float32), g, WIDTH, False)
    else:
        codes, steps = numerics.encode_nvfp4(values.to(tl.float32), g, WIDTH, OPTION == 2)
    tl.store(data + tl.arange(0, WIDTH // GROUP), codes)
    tl.store(scales + tl.arange(0, WIDTH // BLOCK), steps)


def encoded(name, x_H):
    """A row as the kernel's function encodes it, by payload."""
    format = get(name)
    payloads = format.empty_payloads(1, WIDTH, x_H.device)
    option, group, g = 0, 1, 1.0
    if format.name == "fp8_block128":
        option = int(format.power_of_two_scales)
    elif format.name == "nvfp4":
        group = 8
        if format.global_scale is not None:
            g = format.global_scale
            option = 2 if 2.0**-60 <= g <= 2.0**60 else 1
    data = payloads["data"].view(torch.int32) if group == 8 else payloads["data"]
    row_scale = payloads.get("global_scale", torch.empty(1))
    encode_tile[(1,)](
        x_H, data, payloads["scales"], row_scale, g,
        FORMAT=format.name, OPTION=option, GROUP=group, BLOCK=format.block, WIDTH=WIDTH,
    )  # fmt: skip
    return payloads


FORMATS = [
    "mxfp8",
    "fp8_block128",
    "fp8_block128(power_of_two_scales=True)",
    "nvfp4",
    "nvfp4(global_scale=448.0)",
    "nvfp4(global_scale=1e+30)",
    "nvfp4(global_scale=1e-30)",
    "nvfp4(global_scale=1e-35)",
]


@DTYPES
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(row=tiles())
def test_tiles_are_encoded_bit_for_bit(name, dtype, row):
    x_H = row.to(dtype)
    found = encoded(name, x_H)
    for payload, expected in get(name).encode(x_H.unsqueeze(0)).payloads.items():
        assert same_bits(found[payload], expected), payload


@DTYPES
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block128(power_of_two_scales=True)"])
def test_scales_move_on_exactly_where_they_should(name, dtype):
    """Blocks whose largest number is a power of two times 448, and its neighbors; the first scale included."""
    for exponent in (-127, -126, -100, -15, -9, 0, 7, 100, 119):
        edge = torch.tensor(448.0 * 2.0**exponent)
        bits = edge.view(torch.int32) + torch.arange(-3, 5, dtype=torch.int32) * (
            1 if dtype == torch.float32 else 1 << 16
        )
        x_H = torch.zeros(8, 32).to(dtype)
        x_H[:, 5] = torch.cat([bits[:7].view(torch.float32), edge.view(1)]).to(dtype)
        found = encoded(name, x_H.flatten())
        for payload, expected in get(name).encode(x_H.view(1, WIDTH)).payloads.items():
            assert same_bits(found[payload], expected), (exponent, payload)


@triton.jit
def cast_tile(x, out, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """One tile through `cast_within`."""
    at = tl.arange(0, WIDTH)
    tl.store(out + at, numerics.cast_within(tl.load(x + at), KIND))


@DTYPES
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@settings(max_examples=20)
@given(row=tiles())
def test_casts_saturate_and_their_own_type_stays_as_it_is(name, dtype, row):
    x_H, format = row.to(dtype), get(name)
    expected = format.encode(x_H.unsqueeze(0)).payloads["data"].squeeze(0)
    out = torch.empty_like(expected)
    cast_tile[(1,)](x_H, out, KIND=KINDS[out.dtype], WIDTH=WIDTH)
    if dtype == out.dtype:
        assert same_bits(out, expected)
    assert same_bits(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(), expected.nan_to_num())  # which NaN a cast makes is the device's choice


@triton.jit
def decode_tile(
    data, scales, row_scale, out,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes and scales of one tile as float32."""
    codes = tl.load(data + tl.arange(0, WIDTH // GROUP))
    steps = tl.load(scales + tl.arange(0, WIDTH // BLOCK))
    if FORMAT == "mxfp8":
        tl.store(out + tl.arange(0, WIDTH), numerics.decode_mxfp8(codes, steps, WIDTH))
    elif FORMAT == "nvfp4":
        tl.store(out + tl.arange(0, WIDTH), numerics.decode_nvfp4(codes, steps, tl.load(row_scale), WIDTH))
    else:
        tl.store(out + tl.arange(0, WIDTH), numerics.decode_fp8_block(codes, steps, WIDTH))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block128", "nvfp4"])
@settings(max_examples=30)
@given(row=tiles())
def test_tiles_are_decoded_bit_for_bit(name, row):
    rows = get(name).encode(row.unsqueeze(0))
    check_decoded(rows)


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 253, 254, 255])
def test_every_code_is_decoded_with_every_kind_of_scale(byte):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    scales = torch.full((1, 8), byte, dtype=torch.uint8)
    check_decoded(
        EncodedRows(format=get("mxfp8"), hidden_size=256, payloads={"data": codes, "scales": scales})
    )


@pytest.mark.parametrize("g", [2.0**-117, 1.0, 2688.0, 3.0e38])
def test_every_code_of_nvfp4_is_decoded_with_every_scale(g):
    row = torch.arange(256, dtype=torch.uint8)
    for first in range(0, 256, 16):  # each scale once, and each pair of codes with some of them
        scales = torch.arange(first, first + 16, dtype=torch.uint8).view(1, 16).view(torch.float8_e4m3fn)
        data = row.roll(first)[:128].view(1, 128)
        payloads = {"data": data, "scales": scales, "global_scale": torch.tensor([[g]])}
        check_decoded(EncodedRows(format=get("nvfp4"), hidden_size=256, payloads=payloads))


def check_decoded(rows):
    out = torch.empty(WIDTH)
    format = rows.format
    data, scales = rows.payloads["data"], rows.payloads["scales"]
    words, group = (data.view(torch.int32), 8) if format.name == "nvfp4" else (data, 1)
    decode_tile[(1,)](
        words, scales, rows.payloads.get("global_scale", torch.ones(1)), out,
        FORMAT=format.name, GROUP=group, BLOCK=format.block, WIDTH=WIDTH,
    )  # fmt: skip
    expected = rows.decode(torch.float32).squeeze(0)
    assert same_bits(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(), expected.nan_to_num())
