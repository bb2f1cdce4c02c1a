"""What is declared in one place and relied upon elsewhere, in numbers: limits, the bytes of the protocol, defaults.

Other tests ask the declarations themselves, and would follow a change without a word. Here a change is seen.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from tokenyard import MoELayer, launch
from tokenyard.checkpoints.compressed_tensors import CompressedTensorsLayout
from tokenyard.checkpoints.families import Config, Family, family_config, unknown_family
from tokenyard.checkpoints.files import _Map
from tokenyard.checkpoints.header import DTYPES
from tokenyard.checkpoints.layers import QUANTIZED_LAYOUTS
from tokenyard.checkpoints.layout import PLAIN_LAYOUTS, Layout, PlainLayout
from tokenyard.checkpoints.vendor_layouts import DeepSeekFp8, GptOssMxfp4
from tokenyard.elastic.expert_moves import ExpertMoves
from tokenyard.elastic.rebalancing import Progress
from tokenyard.elastic.recovery import Recovery
from tokenyard.exchange import (
    AllgatherTransport,
    Exchange,
    ExchangeSpec,
    HierarchicalTransport,
    LocalTransport,
    SharedMemoryTransport,
    Transport,
    TwoSidedTransport,
)
from tokenyard.exchange.announcement import Announcement
from tokenyard.exchange.batch import Batch
from tokenyard.exchange.batch_maker import check_batch
from tokenyard.exchange.integrity.checksums import ResultNumbers
from tokenyard.exchange.integrity.watched import WatchedTransport
from tokenyard.exchange.open_trips import Usability
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.stats import LayerStats
from tokenyard.exchange.transports.hierarchical import DeviceHierarchicalTransport
from tokenyard.exchange.transports.messages import Outgoing
from tokenyard.exchange.transports.one_sided.cpu.signals import Signals
from tokenyard.exchange.transports.one_sided.cuda.control import Trouble
from tokenyard.exchange.transports.one_sided.declarations import layout_for, reaches
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.experts import Experts, ExpertsSpec, GroupedExperts, ReferenceExperts, SelfRoutingExperts
from tokenyard.experts.activations import ACTIVATIONS, Activation
from tokenyard.experts.grouped import product_path
from tokenyard.experts.tiles import product_by_tiles
from tokenyard.formats import FORMATS, WEIGHT_FORMATS, Format, PlainFormat, PlainWeights, WeightFormat
from tokenyard.group import DistributedGroup, Group, thread_groups
from tokenyard.group.process_ranks import _Processes
from tokenyard.group.shared_memory import _mapping
from tokenyard.group.threads import _Call
from tokenyard.layer import overlapped
from tokenyard.planning.agreement import agree_on_draft
from tokenyard.planning.drafting import Draft, draft, draft_ignoring_env
from tokenyard.planning.planner import Plan, plan, plan_draft
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.state import WholePlan
from tokenyard.routing import ROUTERS, Placement, Router, Routes
from tokenyard.rows import CombineBuffer

# The largest value that is taken, by the constant that says so.
LIMITS = {
    "checkpoints.compressed_tensors.SIGN_BITS": 0x88,
    "checkpoints.config._LARGEST_JSON": 256_000_000,
    "checkpoints.vendor_layouts.BLOCK": 128,
    "checkpoints.families._LARGEST": 2_147_483_647,
    "checkpoints.files._COME_ALONG": 2_097_152,
    "checkpoints.header.LARGEST_HEADER": 100_000_000,
    "checkpoints.header._MOST_DIMENSIONS": 64,
    "checkpoints.layers._MOST_EXPERTS": 65_536,
    "checkpoints.writer.LARGEST_FILE": 5_000_000_000,
    "checkpoints.writer._AT_ONCE": 1_073_741_824,
    "exchange.transports.one_sided.cuda.control.MOST_RANKS": 63,
    "exchange.transports.messages._PAGE": 4096,
    "exchange.results.NARROWEST_LINE": 512,
    "experts.grouped.GROUPED_MM_ALIGNMENT": 16,
    "experts.slots._ALIGNMENT": 64,
    "experts.grouped.UPCAST_ROWS": {torch.bfloat16: 16, torch.float16: 8},
    "formats.nvfp4.SMALLEST_GLOBAL_SCALE": 2.0**-117,
    "formats.nvfp4.GLOBAL_RANGE": 2688.0,
    "exchange.stats._FEW_CHOICES": 64,
    "group.base.LARGEST_JSON": 67_108_864,
    "group.base.MESSAGE_BYTES": 268_435_456,
    "group.devices.MOST_THREADS_ON_CUDA": 32,
    "group.launch._MOST_RANKS": 1024,
    "group.shared_memory._FAILED": 2**64 - 1,
    "planning.drafting._LARGEST_WORKSPACE": 140_737_488_355_328,
    "planning.alternatives._MOST_ALTERNATIVES": 6,
    "planning.drafting._MOST_IN_FLIGHT": 1024,
    "planning.draft_text._MOST_LINKS": 6,
    "elastic.move_under_way.CALLS_BETWEEN_QUESTIONS": 16,
    "elastic.moving.PIECE": 16_777_216,
    "planning.spec.LARGEST_SIZE": 2_147_483_647,
    "routing.placement.MOST_EXPERTS": 65_536,
    "routing.placement.MOST_RANKS": 65_536,
    "routing.routes._FEW_IDS": 64,
}
# What ranks of one version must share, to the byte. Whoever changes one of these raises `version.PROTOCOL`.
PROTOCOL = {
    "version.PROTOCOL": 5,
    "exchange.announcement.ANNOUNCEMENT_BYTES": 512,
    "exchange.announcement._NUMBERS": 10,
    "exchange.integrity.checksums._TOKEN_BITS": 32,
    "exchange.integrity.checksums._WORD": 8,
    "exchange.integrity.watched._REPORT_BYTES": 512,
    "exchange.integrity.workspace_guards.GUARD": 165,
    "exchange.integrity.workspace_guards.GUARD_BYTES": 1024,
    "exchange.integrity.workspace_guards.POISON": 255,
    "exchange.transports.one_sided.cuda.control.DEPARTURE": -(2**63),
    "exchange.transports.one_sided.cuda.control.FLAGS": 16,
    "exchange.transports.one_sided.cuda.control.LEFT": 6,
    "exchange.transports.one_sided.cuda.control.ROWS_ALIGNMENT": 1024,
    "exchange.transports.one_sided.cuda.control.STATUS": 8,
    "exchange.transports.one_sided.cuda.control.STATUS_WORDS": 4,
    "exchange.transports.one_sided.cuda.control.TEXT_BYTES": 512,
    "exchange.transports.one_sided.cuda.control.WORD": 8,
    "exchange.transports.one_sided.cpu.signals._DEPARTURE": 2,
    "exchange.transports.one_sided.cpu.signals._LINE": 128,
    "exchange.transports.one_sided.cpu.signals._LOSS": 1,
    "exchange.transports.one_sided.cpu.signals._MAIL": 640,
    "exchange.transports.one_sided.cpu.signals._MARK": 2,
    "exchange.transports.one_sided.cpu.signals._TURNS": 2,
    "exchange.spec.CHECKSUM_HEAD": 3,
    "exchange.workspace.ALIGNMENT": 16,
    "exchange.workspace.REGION_ALIGNMENT": 128,
    "formats.bits.E4M3_NAN_CODE": 127,
    "formats.bits.E8M0_LARGEST": 254,
    "formats.bits.E8M0_NAN": 255,
    "formats.bits._EXPONENT_MASK": 2_139_095_040,
    "formats.bits._INF_BITS": 2_139_095_040,
    "formats.bits._MANTISSA_BITS": 23,
    "formats.bits._NAN_BITS": 2_143_289_344,
    "formats.bits._TWO_TO_MINUS_127_BITS": 4_194_304,
    "formats.swizzle.TILE_COLUMNS": 4,
    "formats.swizzle.TILE_ROWS": 128,
}


@pytest.mark.parametrize(("name", "value"), [*LIMITS.items(), *PROTOCOL.items()])
def test_limits_and_bytes(name, value):
    module, _, constant = name.rpartition(".")
    assert getattr(importlib.import_module(f"tokenyard.{module}"), constant) == value


def test_what_a_status_on_a_gpu_tells():
    assert {trouble.name: trouble.value for trouble in Trouble} == {
        "BAD_IDS": 1,
        "FAILED": 2,
        "DRIFTED": 3,
        "LOST": 4,
    }


def test_the_dtypes_of_safetensors_have_the_bits_of_those_of_torch():
    known = {name: bits for name, (bits, dtype) in DTYPES.items() if dtype is None}
    assert known == {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    for bits, dtype in DTYPES.values():
        assert dtype is None or bits == 8 * dtype.itemsize


# What a class declares, by attribute. The first of each kind is what a class of one's own has that declares nothing.
DECLARED = {
    Transport: {
        "carries_logits": False,
        "reads_values": True,
        "encodes_results": False,
        "waits_in_sum": False,
        "sums_in_hosts": False,
        "returns_choices": True,
        "counts_choices": False,
        "bounds_rows": False,
        "works_ahead": False,
        "limits_sms": False,
        "sms": None,
        "most_terms": None,
        "most_ranks": None,
        "devices": ("cpu", "cuda"),
        "carries_gradients": ("cpu",),
    },
    HierarchicalTransport: {
        "carries_logits": False,
        "encodes_results": True,
        "returns_choices": False,
        "sums_in_hosts": True,
        "waits_in_sum": False,
        "bounds_rows": True,
        "works_ahead": True,
        "devices": ("cpu", "cuda"),
    },
    DeviceHierarchicalTransport: {"bounds_rows": False, "sums_in_hosts": True, "reads_values": True},
    LocalTransport: {
        "carries_logits": True,
        "encodes_results": False,
        "most_ranks": 1,
        "sums_in_hosts": False,
        "bounds_rows": True,
        "devices": ("cpu",),
    },
    AllgatherTransport: {
        "name": "allgather",
        "carries_logits": True,
        "reads_values": True,
        "bounds_rows": True,
        "works_ahead": True,
    },
    TwoSidedTransport: {
        "name": "two_sided",
        "carries_logits": False,
        "waits_in_sum": False,
        "bounds_rows": True,
    },
    SharedMemoryTransport: {
        "name": "one_sided",
        "looks_up_ids": False,
        "carries_logits": False,
        "waits_in_sum": False,
        "bounds_rows": True,
    },
    WatchedTransport: {"name": "watched", "waits_in_sum": True, "reads_values": True},
    Format: {"block": 1, "quantized": True, "scale_layouts": ()},
    PlainFormat: {"block": 1, "quantized": False, "scale_layouts": ()},
    FORMATS["fp8_block128"]: {"block": 128, "quantized": True, "power_of_two_scales": False},
    FORMATS["mxfp8"]: {"block": 32, "quantized": True, "alignment": 32},
    FORMATS["nvfp4"]: {"block": 16, "quantized": True, "global_scale": None},
    WeightFormat: {"block": 1, "quantized": True, "row_formats": (), "inner_formats": ()},
    PlainWeights: {"block": 1, "quantized": False},
    WEIGHT_FORMATS["fp8_block128"]: {"block": 128, "quantized": True},
    WEIGHT_FORMATS["mxfp8"]: {"block": 32, "quantized": True},
    WEIGHT_FORMATS["nvfp4"]: {"block": 16, "quantized": True},
    WEIGHT_FORMATS["mxfp4"]: {"block": 32, "quantized": True, "scale_rule": "even"},
    WEIGHT_FORMATS["mxint4"]: {"block": 32, "quantized": True},
    Experts: {
        "finalizes": True,
        "routes_itself": False,
        "counts_duties": False,
        "any_strides": False,
        "places_results": False,
        "skips_empty_slots": False,
        "scale_layout": "linear",
        "inner_formats": (),
        "devices": ("cpu", "cuda"),
        "batch_invariant": (),
        "trains": (),
    },
    GroupedExperts: {
        "counts_duties": True,
        "any_strides": True,
        "places_results": True,
        "routes_itself": False,
        "batch_invariant": ("cpu",),
        "trains": ("cpu",),
    },
    ReferenceExperts: {
        "counts_duties": True,
        "any_strides": True,
        "places_results": True,
        "routes_itself": False,
        "batch_invariant": ("cpu", "cuda"),
        "trains": ("cpu",),
    },
    SelfRoutingExperts: {"counts_duties": True, "any_strides": False, "routes_itself": True},
    Layout: {"numbers": {}, "constants": {}, "fused": False},
    PlainLayout: {"fused": False, "transposed": False},
    GptOssMxfp4: {"fused": True},
    DeepSeekFp8: {"fused": False},
    CompressedTensorsLayout: {"fused": False, "spellings": {"strategy": "group", "dynamic": False}},
    # Fields of dataclasses, with their defaults.
    LayerSpec: {
        "max_tokens": None,
        "bias": False,
        "weights": "bf16",
        "inner": "exact",
        "weight_on": "output",
        "placement": "contiguous",
        "spare_experts": 0,
        "reduce_ranks": "exchange",
        "sum": "ranks",
        "gradient_wire": None,
        "keep": "products",
        "token_numbers": False,
    },
    ExchangeSpec: {
        "routed_scaling": 1.0,
        "carries_logits": False,
        "extra": (),
        "reduces_ranks": True,
        "sums_choices": False,
        "renormalizes_dropped": False,
        "checksummed": False,
        "max_rows": None,
        "movable": False,
        "returns": (),
        "of_gradients": False,
    },
    ExpertsSpec: {
        "bias": False,
        "weights": "bf16",
        "weight_on": "output",
        "num_experts": None,
        "batch_invariant": False,
        "trains": False,
    },
    Batch: {"ahead": False, "takes_slots": False},
    ResultNumbers: {"per_token": 1, "with_source": False},
    CombineBuffer: {"is_watched": False},
    Group: {"longest_message": 0, "num_hosts": 1},
    WholePlan: {"lost": (), "made_here": False},
    _Call: {"taken": 0},
    _Map: {"readers": 0},
    Announcement: {"error": "", "notice": 0, "forward": 0},
    DistributedGroup: {"_known_to_torch": True, "_written": ()},
    WorkspaceLayout: {"in_flight": 1, "guard": 0},
    Activation: {"gated": True, "interleaved": False, "parameters": ()},
    Draft: {"paranoid": False, "renormalize_dropped": False, "exchange_reason": None, "training": False},
    Family: {"intermediate_size": "moe_intermediate_size", "bias": False, "prediction_layers": None},
    Placement: {"allow_lost": False},
    Routes: {"scaled_by": 1.0},
    Router: {"renormalize": True, "routed_scaling": 1.0},
    ROUTERS["grouped_sigmoid"]: {"choice_bias_E": None, "num_groups": 1, "topk_groups": 1},
    ROUTERS["sqrt_softplus"]: {"choice_bias_E": None, "renormalize": True},
    ROUTERS["softmax"]: {"order": "softmax_topk"},
}


@pytest.mark.parametrize("cls", DECLARED, ids=lambda cls: cls.__name__)
def test_what_classes_declare(cls):
    assert {name: getattr(cls, name) for name in DECLARED[cls]} == DECLARED[cls]


# The arguments that may be left out, and what they are then.
LEFT_OUT = {
    plan: {
        "exchange": "auto",
        "max_tokens": None,
        "in_flight": 1,
        "max_rows": None,
        "sms": None,
        "paranoid": False,
        "survive": False,
        "training": False,
    },
    draft: {
        "exchange": "auto",
        "max_tokens": None,
        "in_flight": 1,
        "max_rows": None,
        "sms": None,
        "paranoid": False,
        "training": False,
        "device": None,
    },
    plan_draft: {"survive": False, "made_group": False, "mesh": None},
    agree_on_draft: {"survive": False},
    draft_ignoring_env: {
        "max_tokens": None,
        "max_rows": None,
        "sms": None,
        "renormalize_dropped": False,
        "training": False,
    },
    Plan: {"survive": False, "made_group": False},
    Plan.shrink: {"wait": True},
    Plan.grow: {"seconds": 60.0, "wait": True},
    Plan.go_on_without: {"renormalize": False},
    Recovery.go_on_without: {"renormalize": False},
    Plan.autobalance: {"threshold": 1.1},
    Plan.load: {"reset": False},
    Plan.rebalance: {"placements": None, "threshold": 1.1, "wait": True},
    Plan.trim: {"keep": None},
    ExpertMoves.rebalance: {"placements": None, "threshold": 1.1, "wait": True},
    MoELayer: {"shared": None, "adopt": False},
    overlapped: {"parts": 2, "payloads": None, "out": None, "add": None, "token_numbers": None},
    launch: {
        "ranks": "threads",
        "device": None,
        "deadline": 60.0,
        "threads_per_rank": None,
        "replacements": 0,
        "hosts": 1,
    },
    thread_groups: {"device": None, "name": "threads", "deadline": 60.0, "hosts": 1},
    _Processes.start: {"fresh": False},
    _mapping: {"flags": 0},
    Plan.readmit: {"lost": (), "group": None, "seconds": 60.0},
    Exchange: {"in_flight": 1, "plan_id": 0, "paranoid": False, "sms": None},
    Exchange.in_use: {"layer": None, "alone": False},
    Exchange.begin: {"takes_slots": False, "forward": 0},
    Exchange.open: {"takes_slots": False},
    RoundTrip.send: {"extra": None, "ahead": False},
    RoundTrip.send_back: {"out": None, "add": (), "returns": None, "ahead": False},
    RoundTrip.redirect: {"received": None, "again": False},
    LayerStats.count_dispatch: {"is_next": False},
    Usability.close: {"left": False},
    Usability.waiting: {"spec": None},
    Usability.end_wait: {"spec": None, "for_others": True},
    Outgoing: {"bounded": False, "out": None},
    check_batch: {"values": True},
    Routes.check: {"top_k": None, "num_tokens": None, "scaled_by": 1.0, "device": None, "values": True},
    layout_for: {"guard": 0},
    reaches: {"in_each": False},
    Signals._set_state: {"turn": 0},
    Transport.__init__: {"in_flight": 1, "guard": 0},
    AllgatherTransport: {"in_flight": 1, "guard": 0},
    HierarchicalTransport: {"in_flight": 1, "guard": 0},
    SharedMemoryTransport: {"in_flight": 1, "guard": 0},
    TwoSidedTransport: {"in_flight": 1, "guard": 0},
    WatchedTransport: {"in_flight": 1},
    Experts.__init__: {"adopt": False},
    Experts.forward: {"finalize": True},
    Experts._apply: {"recurse": True},
    product_path: {"native": False},
    product_by_tiles: {"row_by_row": False},
    Config.whole: {"least": 1, "most": 2_147_483_647},
    family_config: {"experts": False},
    unknown_family: {"experts": False, "why": ""},
    SelfRoutingExperts: {"inner": "grouped", "adopt": False},
}


@pytest.mark.parametrize("call", LEFT_OUT, ids=lambda call: call.__qualname__)
def test_what_is_meant_by_an_argument_that_is_left_out(call):
    arguments = inspect.signature(call).parameters.values()
    given = {one.name: one.default for one in arguments if one.default is not inspect.Parameter.empty}
    assert given == LEFT_OUT[call]


def test_how_far_a_rank_is_with_a_move_takes_two_bits():
    assert [(each.name, each.value) for each in Progress] == [("PREPARING", 0), ("READY", 1), ("FAILED", 2)]


def test_activations_of_models():
    assert {name: (known.gated, known.interleaved) for name, known in ACTIVATIONS.items()} == {
        "swiglu": (True, False),
        "gelu": (True, False),
        "gelu_tanh": (True, False),
        "relu2": (False, False),
        "swiglu_clamped": (True, True),
    }


def test_plain_weights_lie_one_by_one_or_all_in_one_tensor_either_way_round():
    found = [(layout.dtype, layout.fused, layout.transposed) for layout in PLAIN_LAYOUTS]
    ways = [(False, False), (True, False), (True, True)]
    assert found == [(dtype, *way) for way in ways for dtype in ("BF16", "F16", "F32")]


# What a checkpoint says of its weights, where we write it, and how it stores a matrix of 256 outputs and 384 inputs.
STORED = {
    "compressed-tensors nvfp4": (
        {
            "num_bits": 4,
            "type": "float",
            "group_size": 16,
            "symmetric": True,
            "strategy": "tensor_group",
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        {"weight_packed": (256, 192), "weight_scale": (256, 24), "weight_global_scale": (1,)},
    ),
    "compressed-tensors mxfp4": (
        {
            "num_bits": 4,
            "type": "float",
            "group_size": 32,
            "symmetric": True,
            "strategy": "group",
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        },
        {"weight_packed": (256, 192), "weight_scale": (256, 12)},
    ),
    "compressed-tensors mxfp8": (
        {
            "num_bits": 8,
            "type": "float",
            "group_size": 32,
            "symmetric": True,
            "strategy": "group",
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        },
        {"weight": (256, 384), "weight_scale": (256, 12)},
    ),
    "compressed-tensors mxint4": (
        {
            "num_bits": 4,
            "type": "int",
            "group_size": 32,
            "symmetric": True,
            "strategy": "group",
            "dynamic": False,
        },
        {"weight_packed": (256, 48), "weight_scale": (256, 12)},
    ),
    "compressed-tensors fp8_block128": (
        {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block",
            "block_structure": [128, 128],
            "dynamic": False,
        },
        {"weight": (256, 384), "weight_scale": (2, 3)},
    ),
    "ModelOpt nvfp4": (None, {"weight": (256, 192), "weight_scale": (256, 24), "weight_scale_2": ()}),
    "gpt-oss mxfp4": (None, {"blocks": (256, 12, 16), "scales": (256, 12)}),
    "DeepSeek fp8_block128": (None, {"weight": (256, 384), "weight_scale_inv": (2, 3)}),
}


@pytest.mark.parametrize("layout", QUANTIZED_LAYOUTS, ids=str)
def test_what_checkpoints_hold_and_say_of_it(layout):
    said, shapes = STORED[str(layout)]
    assert {piece.suffix: piece.shape for piece in layout.pieces(256, 384).values()} == shapes
    if said is not None:
        assert layout.quantization_config(["lm_head"]) == {
            "quant_method": "compressed-tensors",
            "format": layout.config_format,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": said,
                    "input_activations": None,
                    "output_activations": None,
                    "format": layout.config_format,
                }
            },
            "ignore": ["lm_head"],
        }


def test_statistics_begin_at_zero():
    fresh = LayerStats(3).as_dict()
    assert fresh == {
        "world": 3,
        "rounds": 0,
        "passes": 0,
        "tokens": 0,
        "dropped": 0,
        "rows_sent": [0, 0, 0],
        "rows_received": [0, 0, 0],
        "dispatch_bytes": [0, 0, 0],
        "combine_bytes": [0, 0, 0],
        "lost": [],
        "moves": {
            "experts": 0,
            "nbytes": 0,
            "copy_s": 0.0,
            "switches": 0,
            "switch_s": 0.0,
            "given_up": 0,
            "looks": 0,
            "imbalance": 0.0,
            "imbalance_before": 0.0,
            "imbalance_expected": 0.0,
            "refused": "",
        },
        "wait_s": {"dispatch": 0.0, "combine": 0.0},
    }
