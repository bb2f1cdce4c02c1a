"""The same bits on a GPU as on the CPU, without waiting for the device."""

from __future__ import annotations

import pytest
import torch

from tests.formats.format_twins import ALL, INF, NAN, QUANTIZED, magnitudes, same_bits

pytestmark = pytest.mark.gpu


def rows_with_corners(dtype: torch.dtype, width: int) -> torch.Tensor:
    x = magnitudes(200, width, dtype=dtype)
    x[3] = 0
    x[5, 0], x[6, 0], x[7, 0], x[8] = NAN, INF, -INF, NAN
    x[9] = -0.0
    x[10] = torch.finfo(dtype).max
    x[11] = torch.finfo(dtype).tiny / 4
    x[12] = x[12].float().sign().to(dtype) * 448
    x[12, 0] = torch.nextafter(x[12, 0], x.new_tensor(INF))
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", ALL, ids=str)
def test_cuda_equals_cpu(format, dtype):
    for width in (1, 100, 2880, 7168):
        x = rows_with_corners(dtype, width)
        here, there = format.encode(x), format.encode(x.cuda())
        for name, payload in here.payloads.items():
            if format.quantized or not payload.isnan().any():
                assert same_bits(there.payloads[name].cpu(), payload), (width, name)
        assert same_bits(there.decode().cpu().nan_to_num(1.5), here.decode().nan_to_num(1.5)), width
        if format.name in ("mxfp8", "nvfp4"):
            swizzled = there.swizzled()
            assert same_bits(swizzled.payloads["scales"].cpu(), here.swizzled().payloads["scales"])
            assert same_bits(swizzled.decode().cpu().nan_to_num(1.5), here.decode().nan_to_num(1.5))


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_a_cuda_graph_can_hold_encode_and_decode(format):
    """Nothing asks the device a question: capture refuses that."""
    x = torch.randn(16, 100, device="cuda")
    format.encode(x).decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded = format.encode(x).decode()
    x.copy_(torch.randn(16, 100))
    graph.replay()
    assert same_bits(decoded.cpu(), format.encode(x.cpu()).decode())
