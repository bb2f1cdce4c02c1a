"""Cases, experts and checks that the tests of fused experts on a GPU share."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.experts.fused_cases import FusedCase
from tokenyard.experts import FusedExperts
from tokenyard.experts.fused.tile_configs import TileConfig

# Neither is a multiple of a tile; rows of both can be copied 16 bytes at a time.
BASE = FusedCase(H=544, I=272, L=8, K=4, R=16, device="cuda")
MANY = TileConfig(256, 128, 128, 8, 3, 64, True, False, True)
CODES = FusedCase(
    weights="fp8_block128",
    rows="fp8_block128",
    inner="fp8_block128",
    H=512,
    I=256,
    L=4,
    K=2,
    R=700,
    device="cuda",
)
# More than one column of 256 outputs, and of several tiles the last has few rows.
NUMBERS = FusedCase(H=512, I=256, L=4, K=2, R=700, device="cuda")
# Packed weights that can be expanded to blocks of e4m3.
EXPANDED = replace(CODES, weights="mxfp4", rows="mxfp8")


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def multiplies_e4m3() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def built(case: FusedCase) -> FusedExperts:
    return FusedExperts(case.spec, case.held)


def in_lines(case: FusedCase) -> FusedExperts:
    """Experts that hold bf16, fp16 and fp8_block128 weights line by line, as they do with adopted ones."""
    return FusedExperts(case.spec, case.held, adopt=True)


def within(case: FusedCase, experts: FusedExperts) -> torch.Tensor:
    """The result of a case, inside its bound."""
    y_RH, (exact_RH, bound_RH) = experts(case.received()).rows_RH, case.exact()
    over = float(((y_RH - exact_RH).abs() - bound_RH).amax()) if case.R else -1.0
    assert over <= 0, (case, over)
    return y_RH


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
