"""The formats as plain formulas: one row of torch per rule, no chunks, no in-place work, no tricks."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.formats import Bf16, Format, Fp8Block128, Fp16, Fp32, Mxfp8, Nvfp4

QUANTIZED: list[Format] = [
    Fp8Block128(),
    Fp8Block128(power_of_two_scales=True),
    Mxfp8(),
    Mxfp8(alignment=256),
    Nvfp4(),
    Nvfp4(global_scale=448.0),
]
ALL: list[Format] = [Bf16(), Fp16(), Fp32(), *QUANTIZED]
INF, NAN = float("inf"), float("nan")


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality: NaN equals NaN, and -0.0 differs from 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def magnitudes(rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian rows, each times its own power of two: from 2^-120 to 2^110, in fp16 from 2^-12 to 2^8."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    exponent = torch.linspace(-120, 110, rows) if dtype != torch.float16 else torch.linspace(-12, 8, rows)
    return (x * torch.exp2(exponent.round()).unsqueeze(1)).to(dtype)


def blocks_of(x_TH: Tensor, alignment: int, block: int) -> Tensor:
    """float32 `[rows, blocks, block]`, zero-padded."""
    pad = -x_TH.shape[1] % alignment
    return torch.nn.functional.pad(x_TH.float(), (0, pad)).unflatten(1, (-1, block))


def e2m1_by_thresholds(v: Tensor) -> Tensor:
    """e2m1 codes by comparing with the midpoints; a tie goes to the even code. Sign bit where v < 0."""
    u = v.abs()
    code = (u > 0.25).int() + (u >= 0.75) + (u > 1.25) + (u >= 1.75) + (u > 2.5) + (u >= 3.5) + (u > 5)
    return (code + 8 * (v < 0)).to(torch.uint8)


def twin_fp8_block128(x_TH: Tensor, power_of_two_scales: bool = False) -> dict[str, Tensor]:
    v = blocks_of(x_TH, 128, 128)
    scale = v.abs().amax(-1).clamp(min=1e-10) / torch.tensor(448.0)
    if power_of_two_scales:
        mantissa, exponent = torch.frexp(scale)  # 0.5 ≤ mantissa < 1
        scale = torch.exp2((exponent - (mantissa == 0.5).int()).double()).float()
    data = (v / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    return {"data": data, "scales": scale}


def twin_mxfp8(x_TH: Tensor, alignment: int = 32) -> dict[str, Tensor]:
    v = blocks_of(x_TH, alignment, 32)
    mantissa, exponent = torch.frexp((v.abs().amax(-1) / torch.tensor(448.0)).double())
    power = exponent - (mantissa == 0.5).int()  # ceil(log2), exactly
    byte = torch.where(mantissa == 0, 0, (power + 127).clamp(0, 254))
    data = v.double() * torch.exp2(127 - byte.double()).unsqueeze(-1)
    return {"data": data.float().to(torch.float8_e4m3fn).flatten(1), "scales": byte.to(torch.uint8)}


def twin_nvfp4(x_TH: Tensor, global_scale_T: Tensor) -> dict[str, Tensor]:
    v = blocks_of(x_TH, 16, 16)
    g = global_scale_T.reshape(-1, 1)
    scales = (g * (v.abs().amax(-1) / torch.tensor(6.0))).clamp(max=448).to(torch.float8_e4m3fn)
    step = (scales.float() / g).unsqueeze(-1)
    codes = torch.where(step == 0, 0, e2m1_by_thresholds(v / step)).flatten(1)
    return {"data": codes[:, ::2] | (codes[:, 1::2] << 4), "scales": scales}
