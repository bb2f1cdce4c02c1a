"""Ranks that run vLLM's FlashInfer one-sided manager, and its prepare and finalize, as they are, on our `MoeAlltoAll`.

vLLM imports `flashinfer`, which needs a GPU. In its place stands a package whose `Mapping` and `CommBackend` are those
of FlashInfer's wheel, and whose `MoeAlltoAll` is ours. Beside that, `torch.accelerator.empty_cache`, which vLLM calls
before it allocates and which raises without a GPU, does nothing.
"""

import os
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.integrations.flashinfer.signatures import WHEEL
from tokenyard.conformance.cases import same_bits

HIDDEN, EXPERTS, TOP_K, MOST = 64, 5, 2, 8
TOKENS = [5, 3]

_MODULES = {
    "flashinfer_cubin/__init__.py": "",
    "flashinfer/__init__.py": "",
    "flashinfer/comm/__init__.py": "from .mapping import Mapping\n",
    "flashinfer/comm/mnnvl.py": """
from dataclasses import dataclass
from .abstractions import CommBackend
class MnnvlMemory: ...
@dataclass
class MnnvlConfig:
    comm_backend: CommBackend | None = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29
""",
    "flashinfer/comm/trtllm_alltoall.py": "class MnnvlMoe: ...\nclass MoEAlltoallInfo: ...\n",
    "flashinfer/comm/trtllm_moe_alltoall.py": "from tokenyard.integrations.flashinfer import *\n",
}


def wheel():
    """Where the Makefile keeps FlashInfer's wheel: in vLLM's environment, not installed, or vLLM would compile it."""
    return Path(sys.prefix, WHEEL)


def stand_in(folder):
    """Write the package that stands for FlashInfer."""
    with zipfile.ZipFile(wheel()) as files:
        taken = {
            name: files.read(name).decode()
            for name in ("flashinfer/comm/mapping.py", "flashinfer/comm/abstractions.py")
        }
    for name, text in (_MODULES | taken).items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextmanager
def vllm_of(group, **environment):
    """vLLM's groups for ranks with data and expert parallelism; what it needs of its configuration."""
    os.environ.update(environment)
    torch.accelerator.empty_cache = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        stand_in(folder)
        sys.path.insert(0, folder)
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state

        config = VllmConfig()
        parallel = config.parallel_config
        parallel.data_parallel_size, parallel.data_parallel_rank = group.size, group.rank
        parallel.distributed_executor_backend = "external_launcher"  # its processes are there already
        parallel.enable_expert_parallel = parallel.is_moe_model = True
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(group.size, group.rank, "env://", group.rank, "gloo")
            parallel_state.initialize_model_parallel(1)
            from vllm.distributed.device_communicators.all2all import FlashInferNVLinkOneSidedManager

            ep_group = parallel_state.get_ep_group()
            # Its communicator for GPUs makes the manager; that for CPUs does not know it.
            manager = FlashInferNVLinkOneSidedManager(ep_group.cpu_group)
            ep_group.device_communicator.all2all_manager = manager
            yield config, manager


def batch_of(rank):
    draw = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    x_TH = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
    ids_TK = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=draw, dtype=torch.int32)
    return x_TH, ids_TK, torch.rand(tokens, TOP_K, generator=draw)


def experts_of_rank(rank):
    return range(3) if rank == 0 else range(3, EXPERTS)  # the first ranks have one more


def expert_rows(x_RH, ids_RK, weights_RK, rank):
    """Stand-ins for the experts of a rank: expert e multiplies by e + 1. Weighted, summed in float32, in bf16."""
    sums_RH = torch.zeros_like(x_RH, dtype=torch.float32)
    for choice in range(TOP_K):
        here_R = torch.isin(ids_RK[:, choice], torch.tensor(experts_of_rank(rank)))
        factor_R = torch.where(here_R, (ids_RK[:, choice] + 1) * weights_RK[:, choice], 0.0)
        sums_RH += x_RH.float() * factor_R.unsqueeze(1)
    return sums_RH.bfloat16()


def expected(rank, *, encode=lambda x_TH: x_TH, low_precision=False):
    """What must come home to a rank: the rows of both ranks' experts, summed in float32, rounded once."""
    x_TH, ids_TK, weights_TK = batch_of(rank)
    sums_TH = torch.zeros(x_TH.shape)
    for owner in range(2):
        rows_TH = expert_rows(encode(x_TH), ids_TK, weights_TK, owner)
        sums_TH += (rows_TH.to(torch.float8_e4m3fn) if low_precision else rows_TH).float()
    return sums_TH.bfloat16()


def round_trip(config, prepare_finalize, group, quant_config, decode=None):
    """vLLM's prepare, experts, vLLM's finalize: the rows that came home, and the shapes that prepare returned."""
    from vllm.forward_context import get_forward_context, set_forward_context
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    x_TH, ids_TK, weights_TK = batch_of(group.rank)
    tokens = torch.tensor(TOKENS)
    context = set_forward_context(None, config, num_tokens=len(x_TH), num_tokens_across_dp=tokens)
    with context, get_forward_context().dp_metadata.sp_local_sizes(1):
        rows, scales, _, ids, weights = prepare_finalize.prepare(
            x_TH, weights_TK, ids_TK, EXPERTS, None, False, quant_config
        )
        results = expert_rows(rows if decode is None else decode(rows, scales), ids, weights, group.rank)
        y_TH = torch.full_like(x_TH, torch.nan)
        prepare_finalize.finalize(y_TH, results, weights, ids, False, TopKWeightAndReduceNoOP())
    return y_TH, [tuple(part.shape) for part in (rows, ids)] + [
        scales if scales is None else tuple(scales.shape)
    ]


def layer(hidden, quant_config, most=MOST):
    """Prepare and finalize of a layer, as vLLM makes them: it lets the manager initialize its workspace."""
    from vllm.model_executor.layers.fused_moe.all2all_utils import flashinfer_one_sided_dispatch_layout
    from vllm.model_executor.layers.fused_moe.prepare_finalize.flashinfer_nvlink_one_sided import (
        FlashInferNVLinkOneSidedPrepareAndFinalize,
    )

    sizes = flashinfer_one_sided_dispatch_layout(hidden, quant_config)
    return FlashInferNVLinkOneSidedPrepareAndFinalize(
        most, TOP_K, EXPERTS, hidden, sizes.x_bytes_per_token, sizes.x_sf_bytes_per_token, num_dispatchers=2
    )


def managed(group):
    """Layers of bf16 and mxfp8 on one manager, which grows; a workspace given back and set up again."""
    with vllm_of(group) as (config, manager):
        from vllm.model_executor.layers.fused_moe.config import (
            FUSED_MOE_UNQUANTIZED_CONFIG,
            FusedMoEQuantConfig,
        )
        from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
            dequant_mxfp8_to_bf16,
            mxfp8_e4m3_quantize,
        )

        found = {}
        plain = layer(HIDDEN, FUSED_MOE_UNQUANTIZED_CONFIG)
        first = manager.moe_alltoall
        found["class"] = f"{type(first).__module__}.{type(first).__qualname__}"
        found["output"], found["low"] = manager._combine_supports_output, manager.low_precision_combine
        y_TH, found["shapes"] = round_trip(config, plain, group, FUSED_MOE_UNQUANTIZED_CONFIG)
        found["bf16"] = same_bits(y_TH, expected(group.rank))

        in_mxfp8 = FusedMoEQuantConfig.make("mxfp8", is_scale_swizzled=False)
        quantized = layer(HIDDEN, in_mxfp8)
        found["same workspace"] = manager.moe_alltoall is first
        y_TH, found["mxfp8 shapes"] = round_trip(config, quantized, group, in_mxfp8, dequant_mxfp8_to_bf16)
        encode = lambda x_TH: dequant_mxfp8_to_bf16(*mxfp8_e4m3_quantize(x_TH))  # noqa: E731
        found["mxfp8"] = same_bits(y_TH, expected(group.rank, encode=encode))

        layer(HIDDEN, FUSED_MOE_UNQUANTIZED_CONFIG, most=2 * MOST)  # vLLM makes the manager's object anew
        found["rebuilt"] = manager.moe_alltoall is not first
        manager.checkpoint_prepare()
        manager.checkpoint_restore()
        y_TH, _ = round_trip(config, plain, group, FUSED_MOE_UNQUANTIZED_CONFIG)
        found["after a checkpoint"] = same_bits(y_TH, expected(group.rank))
        manager.cleanup()
        found["cleaned up"] = manager.moe_alltoall is None
        return found


def managed_low_precision(group):
    """vLLM's switch for a combine in low precision."""
    with vllm_of(group, VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE="1") as (config, manager):
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

        plain = layer(HIDDEN, FUSED_MOE_UNQUANTIZED_CONFIG)
        y_TH, _ = round_trip(config, plain, group, FUSED_MOE_UNQUANTIZED_CONFIG)
        return manager.low_precision_combine, same_bits(y_TH, expected(group.rank, low_precision=True))
