"""What every format promises, whatever its numbers: widths, payloads, independence, names, layouts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.format_twins import ALL, QUANTIZED, same_bits
from tokenyard import formats
from tokenyard.duties import Duty, Ledger
from tokenyard.errors import ContractError, InputError, UnknownName
from tokenyard.formats import Bf16, Fp8Block128, Fp16, Fp32, Mxfp8, Nvfp4
from tokenyard.formats.swizzle import swizzle_scales, unswizzle_scales

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SWIZZLABLE = [Mxfp8(), Mxfp8(alignment=256), Nvfp4(), Nvfp4(global_scale=448.0)]


def random_rows(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_payloads(left, right) -> bool:
    return left.payloads.keys() == right.payloads.keys() and all(
        same_bits(left.payloads[name], right.payloads[name]) for name in left.payloads
    )


@pytest.mark.parametrize("width", [1, 100, 2880, 7168])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("format", ALL, ids=str)
def test_every_width_comes_back(format, rows, width):
    for dtype in DTYPES:
        x = random_rows(rows, width, dtype)
        before = x.clone()
        encoded = format.encode(x)
        encoded.check()  # the payloads are what the format declares
        assert encoded.num_rows == rows
        assert all(payload.is_contiguous() for payload in encoded.payloads.values())
        decoded = encoded.decode()
        assert (decoded.shape, decoded.dtype) == ((rows, width), torch.float32)
        assert torch.allclose(decoded, x.float(), rtol=0.3, atol=0.5)
        assert same_bits(x, before)
        for other in (*DTYPES, torch.float64):
            assert torch.equal(encoded.decode(other), decoded.to(other))


@pytest.mark.parametrize("format", ALL, ids=str)
def test_strided_rows_encode_like_contiguous_ones(format):
    wide = random_rows(7, 200, torch.bfloat16)
    for strided in (wide[:, ::2], wide[:, 3:103], wide.t(), wide[::2], wide[:1].expand(4, 200)):
        before = strided.clone()
        assert same_payloads(format.encode(strided), format.encode(strided.contiguous()))
        assert same_bits(strided, before)


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_a_row_does_not_depend_on_its_neighbors(format):
    x = random_rows(60, 7168, torch.bfloat16)
    x[3] *= 1e4
    x[7] = float("nan")
    x[11, 5] = float("inf")
    together = format.encode(x)
    for row in (0, 3, 4, 7, 8, 11, 12, 17, 18, 59):
        alone = format.encode(x[row : row + 1])
        for name, payload in alone.payloads.items():
            assert same_bits(together.payloads[name][row : row + 1], payload), (row, name)


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_the_number_of_threads_does_not_matter(format):
    x = random_rows(64, 7168, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = format.encode(x)
        torch.set_num_threads(4)
        four = format.encode(x)
    finally:
        torch.set_num_threads(before)
    assert same_payloads(one, four)
    assert same_bits(one.decode(), four.decode())


def test_rows_that_require_gradients_encode_too():
    x = random_rows(3, 64).requires_grad_()
    for format in QUANTIZED:
        assert not format.encode(x).decode().requires_grad


def test_bytes_per_row():
    expected = {
        Bf16(): 14336,
        Fp16(): 14336,
        Fp32(): 28672,
        Fp8Block128(): 7168 + 4 * 56,
        Mxfp8(): 7168 + 224,
        Nvfp4(): 3584 + 448 + 4,
        Nvfp4(global_scale=2.0): 3584 + 448,
    }
    for format, nbytes in expected.items():
        assert format.bytes_per_row(7168) == nbytes
        encoded = format.encode(random_rows(3, 7168))
        assert sum(p.nbytes for p in encoded.payloads.values()) == 3 * nbytes


def test_alignment_widens_the_row_and_not_the_result():
    encoded = Mxfp8(alignment=256).encode(random_rows(2, 2880))
    assert encoded.payloads["data"].shape == (2, 3072)
    assert encoded.payloads["scales"].shape == (2, 96)
    assert not encoded.payloads["data"].view(torch.uint8)[:, 2880:].any()
    assert not encoded.payloads["scales"][:, 90:].any()
    assert same_bits(encoded.decode(), Mxfp8().encode(random_rows(2, 2880)).decode())


def test_which_way_a_format_may_travel():
    for format in ALL:
        wire = (torch.float32,) if format == Fp32() else tuple(DTYPES)
        assert [dtype for dtype in DTYPES if format.carries(dtype) is None] == list(wire)
        assert [dtype for dtype in DTYPES if format.returns(dtype) is None] == list(wire)
        assert format.quantized == (format in QUANTIZED)


def test_a_format_of_somebodys_own_may_refuse_results():
    class OutOnly(Nvfp4):
        combine_dtypes = ()

    assert OutOnly().carries(torch.bfloat16) is None
    refused = "combine_wire=nvfp4: results do not travel back in this format"
    assert str(OutOnly().returns(torch.bfloat16)) == refused


@pytest.mark.parametrize("format", ALL, ids=str)
@pytest.mark.parametrize("width", [256, 250])
def test_rows_that_are_encoded_are_counted_once_also_by_a_class_that_inherits_it(format, width):
    class Inherited(type(format)):
        pass

    class Twice(Inherited):
        def encode(self, x_TH):
            return super().encode(x_TH)

    due = {Duty.QUANTIZE: 3, Duty.PAD: 3} if format.quantized else {}
    if format.padded_size(width) == width:
        due.pop(Duty.PAD, None)
    for kind in (type(format), Inherited, Twice):
        made = kind(**{field.name: getattr(format, field.name) for field in dataclasses.fields(format)})
        with Ledger().open() as ledger:
            made.encode(random_rows(3, width))
        assert {duty: sum(rows.values()) for duty, rows in ledger.done.items()} == due


@pytest.mark.parametrize("format", [Mxfp8(), Nvfp4(), Bf16()], ids=str)
def test_rows_whose_scales_are_swizzled_are_counted(format):
    rows = format.encode(random_rows(3, 256))
    with Ledger().open() as ledger:
        rows.swizzled()
    assert sum(ledger.rows(Duty.SWIZZLE).values()) == (3 if format.quantized else 0)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 0), torch.ones(2, 3, dtype=torch.int32)])
@pytest.mark.parametrize("format", ALL, ids=str)
def test_what_is_not_rows_is_refused(format, bad):
    with pytest.raises(InputError, match=r"x_TH is .*; expected a matrix"):
        format.encode(bad)


# --- names ---


@pytest.mark.parametrize("format", ALL, ids=str)
def test_get_reads_what_str_writes(format):
    assert formats.get(str(format)) == format
    assert hash(formats.get(str(format))) == hash(format)
    assert formats.get(format) is format


@given(st.integers(1, 4096), st.floats(1e-35, 3e38), st.booleans())
def test_get_reads_all_parameters(multiple, global_scale, flag):
    for format in (
        Mxfp8(alignment=32 * multiple),
        Nvfp4(global_scale=global_scale),
        Fp8Block128(power_of_two_scales=flag),
    ):
        assert formats.get(str(format)) == format


def test_get_is_lenient_about_spaces_and_ints():
    assert formats.get(" nvfp4( global_scale = 2 ) ") == Nvfp4(global_scale=2.0)
    assert formats.get("mxfp8()") == Mxfp8()


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("mxpf8", UnknownName, "unknown format 'mxpf8'; .* did you mean 'mxfp8'"),
        ("", UnknownName, "unknown format ''"),
        (
            "mxfp8(aligment=64)",
            UnknownName,
            "unknown parameter of mxfp8 'aligment'.*did you mean 'alignment'",
        ),
        ("mxfp8(alignment=33)", InputError, "alignment=33; expected a positive multiple of 32"),
        ("mxfp8(alignment=0)", InputError, "alignment=0"),
        ("mxfp8(alignment=-32)", InputError, "alignment=-32"),
        ("mxfp8(alignment=64.0)", InputError, r"alignment=64\.0"),
        ("mxfp8(alignment=True)", InputError, "alignment=True"),
        ("mxfp8(alignment='64')", InputError, "alignment='64'"),
        ("mxfp8(64)", InputError, "cannot be read; expected name"),
        ("mxfp8(alignment=64", InputError, "cannot be read"),
        ("mxfp8(alignment=open('x'))", InputError, "cannot be read"),
        ("mxfp8(**{'alignment': 64})", InputError, "cannot be read"),
        ("mxfp8(alignment=64, alignment=64)", InputError, "cannot be read"),
        ("mxfp8(2=64)", InputError, "cannot be read"),
        ("bf16(x=1)", InputError, "sets 'x'; expected bf16 without parameters"),
        ("fp8_block128(power_of_two_scales=1)", InputError, "power_of_two_scales=1; expected True or False"),
        ("nvfp4(global_scale=-1.0)", InputError, r"global_scale=-1\.0"),
        (torch.bfloat16, InputError, "a format was given as dtype"),
    ],
)
def test_get_says_what_it_cannot_read(spec, error, message):
    with pytest.raises(error, match=message):
        formats.get(spec)


def test_the_plain_format_of_a_dtype():
    assert [formats.for_dtype(dtype) for dtype in DTYPES] == [Bf16(), Fp16(), Fp32()]
    with pytest.raises(InputError, match="rows are int8; expected bfloat16 or float16 or float32"):
        formats.for_dtype(torch.int8)


# --- swizzled scales ---


def test_swizzled_positions():
    """Row r, column c of M×C scales stands where the 128×4 layout says, tile by tile."""
    rows, columns = 200, 10
    scales = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) + 1
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == (256, 12)
    flat = swizzled.flatten()
    expected = torch.zeros_like(flat)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (12 // 4) + c // 4
            expected[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c]
    assert torch.equal(flat, expected)


def test_swizzled_scales_equal_torchao():
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.randint(0, 255, (300, 22), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(swizzle_scales(scales).flatten(), to_blocked(scales).flatten())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 300),
    st.integers(1, 20),
    st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int16, torch.float32]),
)
def test_unswizzling_undoes_swizzling(rows, columns, dtype):
    scales = torch.randint(0, 100, (rows, columns * dtype.itemsize), dtype=torch.uint8).view(dtype)
    assert same_bits(unswizzle_scales(swizzle_scales(scales), rows, columns), scales)


@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("format", SWIZZLABLE, ids=str)
def test_swizzled_rows(format, rows):
    encoded = format.encode(random_rows(rows, 100))
    swizzled = encoded.swizzled()
    assert swizzled.scale_layout == "swizzled"
    assert swizzled.num_rows == rows
    assert swizzled.payloads["scales"].shape[0] % 128 == 0
    assert encoded.scale_layout == "linear"
    assert same_bits(swizzled.decode(), encoded.decode())
    assert same_payloads(swizzled.linear(), encoded)
    assert encoded.linear() is encoded
    with pytest.raises(InputError, match="the rows carry swizzled scales"):
        swizzled.check()
    with pytest.raises(ContractError, match="are swizzled already; expected linear scales"):
        swizzled.swizzled()


def test_layouts_that_do_not_exist():
    encoded = Fp8Block128().encode(random_rows(2, 128))
    with pytest.raises(ContractError, match="theirs are float32; expected one-byte scales"):
        encoded.swizzled()
    plain = Bf16().encode(random_rows(2, 128))
    assert plain.swizzled() is plain
    with pytest.raises(ContractError, match=r"swizzled scales have shape \[128, 4\]; expected \[256, 4\]"):
        unswizzle_scales(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)


# --- properties ---

float32_numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(float32_numbers.filter(lambda number: abs(number) < 3e38), min_size=1, max_size=40))
def test_any_finite_row_decodes_near_itself(numbers):
    """Within the coarsest step of the format around the largest number; never Inf, never NaN.

    (From 3.3e38 on the nearest e4m3 number times its scale is 2^128, which float32 does not have.)
    """
    x = torch.tensor([numbers], dtype=torch.float32)
    amax = x.double().abs().max()
    for format, relative in ((Fp8Block128(), 2**-4), (Mxfp8(), 2**-4), (Nvfp4(), 0.25)):
        error = (format.encode(x).decode().double() - x.double()).abs().max()
        assert error <= max(relative * amax, 1e-12 if format.name == "fp8_block128" else 1e-37), format


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40), st.integers(-60, 60))
def test_mxfp8_commutes_with_powers_of_two(numbers, exponent):
    x = torch.tensor([numbers], dtype=torch.float32)
    x[x.abs() < 2**-20] = 0
    scaled = Mxfp8().encode(x * 2.0**exponent)
    plain = Mxfp8().encode(x)
    assert same_bits(scaled.payloads["data"], plain.payloads["data"])
    assert torch.equal(scaled.decode(), plain.decode() * 2.0**exponent)


@settings(max_examples=60, deadline=None)
@given(st.lists(float32_numbers, min_size=1, max_size=40))
def test_decoded_rows_encode_to_themselves(numbers):
    """What mxfp8 sends is a fixed point: a second trip loses nothing."""
    x = torch.tensor([numbers], dtype=torch.float32)
    once = Mxfp8().encode(x).decode()
    assert torch.equal(Mxfp8().encode(once).decode(), once)
