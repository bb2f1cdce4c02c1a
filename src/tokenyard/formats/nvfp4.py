"""nvfp4: e2m1 elements two a byte, an e4m3 scale per 16 columns, and a float32 global scale g.

    data          uint8   [T, P / 2]    codes of x / (sf / g), low nibble first
    scales        e4m3    [T, P / 16]   sf = e4m3(clamp(g · (amax / 6), ±448))
    global_scale  float32 [T, 1]        g, only where each row has its own
    value = e2m1 · (sf / g)

A 4-bit element reaches 6 and an e4m3 scale 448, so `g = 2688 / amax` uses the whole range of both. But the
amax of *what*? Not of the batch: the receiver needs g to decode, and a row's code must not depend on its
neighbors. So g is static (`Nvfp4(global_scale=…)`, a checkpoint's input scale, the same on all ranks), or per
row, and then it travels with the row: 4 bytes more. Results on their way back have one per row, because
no checkpoint says how large the sums of a rank's experts are.

g is a factor of the scales, as in compressed-tensors. ModelOpt stores the reciprocal, `amax / 2688`.

The order of the operations is that of compressed-tensors fed float32: `amax / 6`, then times g; `sf / g`,
then x divided by it. Other orders change a few percent of the scales. Negative numbers that round to zero
get code 8 (minus zero) and an exact zero of either sign gets code 0, as there.

Corners: a block whose scale rounds to zero (a zero block above all) has scale 0 and code 0 everywhere, where
compressed-tensors writes a scale of 0.125. NaN in a block: the scale is NaN, the codes are 0, and it decodes
to NaN. Inf in a block: scale 448, Inf elements saturate to ±6. The per-row g looks at finite elements only;
it is 1 for a row without any but zeros, and at most the largest float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats import bits, blocks
from tokenyard.formats.base import EncodedRows, InfBecomes, Payload, check_rows, dtype_name

# g of a row whose amax is 1: the largest e4m3 scale times the largest e2m1 element, 2688.
GLOBAL_RANGE = bits.E4M3_MAX * bits.E2M1_MAX
# No row needs a smaller g, since that of a row with the largest float32 is 7.9e-36. `448 / g` must not overflow.
SMALLEST_GLOBAL_SCALE = 2.0**-117


@dataclass(frozen=True, kw_only=True)
class Nvfp4(blocks.BlockFormat):
    """e2m1 with an e4m3 scale per 16 columns and a global scale, static or (`None`) per row.

    >>> rows = Nvfp4(global_scale=448.0).encode(torch.tensor([[6.0, -3.0, 0.3]]))
    >>> rows.payloads["scales"].float(), rows.decode()
    (tensor([[448.]]), tensor([[ 6.0000, -3.0000,  0.5000]]))
    >>> Nvfp4().bytes_per_row(7168), Nvfp4(global_scale=448.0).bytes_per_row(7168)
    (4036, 4032)
    """

    name = "nvfp4"
    scale_layouts = ("linear", "swizzled")
    _code = blocks.NVFP4
    block = _code.block
    # the factor g for all rows; None: each row has its own, which travels with it
    global_scale: float | None = None

    @property
    def inf(self) -> InfBecomes:
        """± the largest finite magnitude of its row; with a global scale g, ± the largest code at it, 2688 / g."""
        return "the largest of its row" if self.global_scale is None else "the largest code"

    def __post_init__(self) -> None:
        given = self.global_scale
        if given is None:
            return
        good = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not good or not SMALLEST_GLOBAL_SCALE <= given <= bits.FLOAT32_MAX:
            raise InputError(
                f"nvfp4 was given global_scale={given!r}",
                expected=f"a finite number > 0, at least {SMALLEST_GLOBAL_SCALE:.2g}, or None (one per row)",
                fix="pass 2688 / amax (a ModelOpt scale is the reciprocal: pass 1 / scale)",
            )
        object.__setattr__(self, "global_scale", float(given))

    def payloads(self, hidden_size: int) -> tuple[Payload, ...]:
        linear = super().payloads(hidden_size)
        if self.global_scale is not None:
            return linear
        return (*linear, Payload(name="global_scale", dtype=torch.float32, width=1))

    def encode(self, x_TH: Tensor, *, global_scale_T: Tensor | None = None) -> EncodedRows:
        """Encode rows; `global_scale_T` gives each row's g, where the format does not fix one."""
        check_rows(x_TH)
        num_rows, hidden_size = x_TH.shape
        given_T1 = None if global_scale_T is None else self._checked_global_scale(global_scale_T, num_rows)
        payloads = self.empty_payloads(num_rows, hidden_size, x_TH.device)
        data, scales = payloads["data"], payloads["scales"]
        padded_size = 2 * data.shape[1]
        amax = blocks.block_amax(x_TH, padded_size, self.block)
        if self.global_scale is not None:
            g_T1 = bits.constant(self.global_scale, x_TH.device)
        else:
            g_T1 = payloads["global_scale"]
            g_T1.copy_(row_global_scale(amax, x_TH) if given_T1 is None else given_T1)
        scales.copy_((amax / bits.constant(bits.E2M1_MAX, x_TH.device)).mul_(g_T1).clamp_(max=bits.E4M3_MAX))
        scale = bits.e4m3_to_float32(scales)
        # Dividing by Inf gives the zeros that a block with scale 0 must have.
        blocks.write_e2m1(x_TH, (scale / g_T1).masked_fill_(scale == 0, torch.inf), data)
        return EncodedRows(format=self, hidden_size=hidden_size, payloads=payloads)

    def _scale_values(self, payloads: Mapping[str, Tensor]) -> Tensor:
        scales, static = super()._scale_values(payloads), self.global_scale
        return scales / (payloads["global_scale"] if static is None else bits.constant(static, scales.device))

    def _checked_global_scale(self, given: Tensor, num_rows: int) -> Tensor:
        if self.global_scale is not None:
            raise InputError(
                f"global_scale_T was given to {self}, whose global scale is static",
                expected="one source of the global scale",
                fix="encode with nvfp4 (one per row), or leave global_scale_T out",
            )
        if given.numel() != num_rows or given.dim() > 2 or not given.is_floating_point():
            raise InputError(
                f"global_scale_T is {dtype_name(given.dtype)}{list(given.shape)}",
                expected=f"a float tensor [{num_rows}]: one scale per row",
                fix="pass 2688 / amax of each row, or leave it out",
            )
        scale_T1 = given.detach().float().reshape(num_rows, 1)
        # On a GPU the values are not checked, because that would wait for the device.
        if given.device.type == "cpu":
            bad = ~((scale_T1 >= SMALLEST_GLOBAL_SCALE) & (scale_T1 <= bits.FLOAT32_MAX))
            if bool(bad.any()):
                row = int(bad.squeeze(1).nonzero()[0])
                raise InputError(
                    f"global_scale_T holds {scale_T1[row].item()} at row {row}",
                    expected=f"finite numbers > 0, at least {SMALLEST_GLOBAL_SCALE:.2g}",
                    fix="pass 2688 / amax of each row, or leave it out",
                )
        return scale_T1


def row_global_scale(amax: Tensor, x_TH: Tensor) -> Tensor:
    """2688 over the largest finite magnitude of each row, `[T, 1]`; 1 for a row of zeros.

    `amax` is that of each block, `[T, blocks]`; `x_TH` is read only if a block holds Inf or NaN.

    >>> x_TH = torch.tensor([[2.0, 1.0], [0.0, 0.0], [float("inf"), 4.0]])
    >>> row_global_scale(x_TH.amax(1, keepdim=True), x_TH).squeeze(1).tolist()
    [1344.0, 1.0, 672.0]
    """
    if bits.some(~amax.isfinite()):
        amax = torch.where(x_TH.isfinite(), x_TH, 0.0).detach().abs().float()
    amax_T1 = amax.amax(1, keepdim=True)
    scale_T1 = (bits.constant(GLOBAL_RANGE, amax.device) / amax_T1).clamp_(max=bits.FLOAT32_MAX)
    return scale_T1.masked_fill_(amax_T1 == 0, 1.0)
