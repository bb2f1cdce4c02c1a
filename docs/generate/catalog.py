"""What the API reference holds: its pages, and the public names on each of them."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of the reference: the names of some packages, each in its order."""

    name: str
    title: str
    about: str
    names: dict[str, tuple[str, ...]]  # by the package that one imports them from


PAGES = (
    Page(
        name="layers",
        title="Layers and plans",
        about="What a layer is, the plan that all ranks agree on, and the layer that runs. "
        "[A first layer](../guide/first-layer.md) shows them at work.",
        names={
            "tokenyard": ("LayerSpec", "plan", "Plan", "MoELayer", "draft", "__version__"),
            "tokenyard.layer": ("PendingBatch", "overlapped"),
            "tokenyard.planning": ("Draft", "Wiring", "gather_stats"),
            "tokenyard.duties": ("Duty", "Party"),
            "tokenyard.elastic": ("join_plan", "take_over", "Rebalance"),
            "tokenyard.exchange.stats": ("LayerStats", "MoveStats"),
        },
    ),
    Page(
        name="groups",
        title="Groups",
        about="The ranks that exchange, and how they are started. [Groups](../guide/groups.md) is the guide.",
        names={
            "tokenyard": ("launch", "Group", "DistributedGroup"),
            "tokenyard.group": (
                *(
                    "ThreadGroup",
                    "thread_groups",
                    "rejoin",
                    "make_together",
                    "GroupLike",
                    "as_group",
                    "borrowed",
                    "DEFAULT_DEADLINE",
                    "READMISSION",
                ),
            ),
        },
    ),
    Page(
        name="routing",
        title="Routing and placement",
        about="Which experts take a token, and which rank owns an expert. The guide is "
        "[Routing and placement](../guide/routing-and-placement.md).",
        names={
            "tokenyard": ("Routes",),
            "tokenyard.routing": (
                *("Router", "SoftmaxRouter", "TopLogitsRouter", "GroupedSigmoidRouter", "SqrtSoftplusRouter"),
                "Placement",
                "ROUTERS",
                "router_class",
                "is_scaling",
                "balance",
                "moves",
                "Move",
                "rank_loads",
                "imbalance",
            ),
            "tokenyard.routing.placement": ("PLACEMENTS", "placement_for"),
        },
    ),
    Page(
        name="rows",
        title="Rows on their way",
        about="Each station of a row has a type of its own. [Concepts](../concepts.md#each-step-has-a-type) shows the "
        "stations in their order.",
        names={
            "tokenyard.formats": ("EncodedRows", "Payload"),
            "tokenyard.rows": (
                *("ReceivedRows", "ExpertRows", "UnfinalizedRows", "CombinedRows", "RankRows"),
                *("LocalRoutes", "RoutingLogits", "ChoiceRows", "CombineBuffer", "PlacedRows"),
            ),
        },
    ),
    Page(
        name="formats",
        title="Formats",
        about="How rows and weights are encoded. [Formats](../guide/formats.md) has their rules and their errors.",
        names={
            "tokenyard.formats": (
                *("FORMATS", "Format"),
                *("get", "for_dtype", "PlainFormat", "Bf16", "Fp16", "Fp32", "Fp8Block128", "Mxfp8", "Nvfp4"),
                *("WEIGHT_FORMATS", "weight_format", "WeightFormat", "PlainWeights", "Mxfp4Weights"),
                *("QuantizedMatrix", "swizzle_scales", "e2m1_to_float32"),
            ),
        },
    ),
    Page(
        name="experts",
        title="Experts",
        about="What computes on the rows that a rank received. The guide is "
        "[Experts of your own](../guide/experts.md).",
        names={
            "tokenyard": ("ExpertWeights",),
            "tokenyard.experts": (
                *("ExpertsSpec", "Experts", "EXPERTS"),
                *("get", "GroupedExperts", "FusedExperts", "ReferenceExperts", "SelfRoutingExperts"),
                *("ACTIVATIONS", "Activation", "activation"),
            ),
        },
    ),
    Page(
        name="exchanges",
        title="Exchanges",
        about="What moves rows between ranks. A layer calls them; programs that overlap batches, or bring an exchange "
        "of their own, do so too. The guides are [Exchanges](../guide/exchanges.md) and "
        "[Computing while rows travel](../guide/overlap.md).",
        names={
            "tokenyard.exchange": (
                *("EXCHANGES", "ALIASES", "resolve", "Exchange", "ExchangeSpec", "RoundTrip"),
                *("Transport", "Pending", "BatchRoutes", "Batch", "Arrival", "received_rows"),
                *("Results", "ResultsAtHome", "RowsAtHome", "Failure", "Announcements", "Announcement"),
                *(
                    "AllgatherTransport",
                    "LocalTransport",
                    "TwoSidedTransport",
                    "HierarchicalTransport",
                    "LocalTransport",
                    "SharedMemoryTransport",
                ),
                *("HostMap", "number_hosts"),
            ),
        },
    ),
    Page(
        name="checkpoints",
        title="Checkpoints",
        about="Experts on disk. The guide is [Checkpoints](../guide/checkpoints.md).",
        names={
            "tokenyard": ("load_experts",),
            "tokenyard.checkpoints": (
                *("open_checkpoint", "Checkpoint", "open_together"),
                *("CheckpointLayer", "StoredTensor", "convert", "Conversion", "ConvertedLayer", "TARGETS"),
                *("recipe_inner", "CONFIG", "read_json", "text_config", "read_tensors", "write_tensors"),
                *("declared_layout", "Layout", "PackedMatrix"),
            ),
            "tokenyard_lab.shipped": ("shipped_model",),
        },
    ),
    Page(
        name="training",
        title="Training",
        about="What a trainer needs beside the layers of a training plan. The guide is "
        "[Training](../guide/training.md).",
        names={
            "tokenyard.training": (
                *("BatchLoad", "batch_load", "balance_loss", "z_loss", "update_bias"),
                *("gradient_norm", "clip_gradients"),
            ),
        },
    ),
    Page(
        name="transformers",
        title="Models of Transformers",
        about="One call shards a model. The guides are [Transformers models](../guide/transformers.md) and "
        "[Adding a model family](../guide/model-families.md).",
        names={
            "tokenyard.integrations.transformers": (
                *("shard_experts", "load_sharded", "ShardedModel", "ShardedExperts", "LayerReport"),
                *("experts_left_out", "load_without_experts"),
            ),
            "tokenyard.integrations.huggingface": ("layers_from_config", "FAMILIES"),
            "tokenyard.checkpoints.families": ("Family", "Config"),
        },
    ),
    Page(
        name="engines",
        title="Engines",
        about="Classes with the methods that engines call. The guide is [Engines](../guide/engines.md).",
        names={
            "tokenyard.integrations.flashinfer": (
                *(
                    "MoeAlltoAll",
                    "SfLayout",
                    "moe_a2a_active_rank_mask",
                    "moe_a2a_get_workspace_size_per_rank",
                ),
                *("moe_a2a_initialize", "moe_a2a_dispatch", "moe_a2a_sanitize_expert_ids"),
                *("moe_a2a_wrap_payload_tensor_in_workspace", "moe_a2a_combine"),
            ),
            "tokenyard.integrations.vllm": ("TokenyardPrepareAndFinalize", "TokenyardExperts"),
        },
    ),
    Page(
        name="conformance",
        title="Checks",
        about="What every exchange, format and experts class is held to. The guide is "
        "[Checking parts](../guide/check.md).",
        names={
            "tokenyard.conformance.suites": (
                *(
                    "check_exchange",
                    "check_format",
                    "check_experts",
                    "check_cases",
                    "assert_passed",
                    "CheckResult",
                ),
            ),
            "tokenyard.conformance.oracle": ("oracle", "relative_error"),
            "tokenyard.conformance.twin": ("twin",),
        },
    ),
    Page(
        name="errors",
        title="Errors",
        about="Each error with its attributes. [Errors](../guide/errors.md) has the messages, and what to do.",
        names={
            "tokenyard": ("TokenyardError", "PeerLost"),
            "tokenyard.errors": (
                *(
                    "PlanError",
                    "PlanMismatch",
                    "UnknownName",
                    "InputError",
                    "CheckpointError",
                    "ContractError",
                ),
                *("HandleError", "ConcurrentUse", "WrongProcess", "GroupError", "PeerFailed", "PlanBroken"),
                *("Drifted", "Corrupted", "RankError", "Reason", "Alternative"),
            ),
            "tokenyard.group": ("Disagreement",),
        },
    ),
)

# Packages of which every exported name is in the reference.
COMPLETE = (
    "tokenyard",
    "tokenyard.elastic",
    "tokenyard.layer",
    "tokenyard.planning",
    "tokenyard.formats",
    "tokenyard.experts",
    "tokenyard.exchange",
    "tokenyard.group",
    "tokenyard.routing",
    "tokenyard.training",
    "tokenyard.checkpoints",
    "tokenyard.integrations.transformers",
    "tokenyard.integrations.huggingface",
    "tokenyard.integrations.vllm",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Name:
    """A public name, and what stands behind it."""

    name: str
    package: str
    page: Page
    value: Any

    @property
    def kind(self) -> str:
        """What it is, in the word before its name."""
        if not isinstance(self.value, type):
            return "function" if callable(self.value) else "constant"
        return "exception" if issubclass(self.value, BaseException) else "class"

    @property
    def heading(self) -> str:
        """How it is called in its heading: `draft` and `Draft` have one anchor without the word before it."""
        return f"{self.kind} {self.name}"

    @property
    def anchor(self) -> str:
        """Where a link to it leads, within its page."""
        return self.heading.lower().replace(" ", "-")


@functools.cache
def names() -> tuple[Name, ...]:
    """All names of the reference, in the order of its pages."""
    return tuple(
        Name(name=name, package=package, page=page, value=getattr(importlib.import_module(package), name))
        for page in PAGES
        for package, listed in page.names.items()
        for name in listed
    )


def missing() -> list[str]:
    """What a package exports and no page has."""
    there = {id(name.value) for name in names() if isinstance(name.value, type) or callable(name.value)}
    listed = {name.name for name in names()}
    return [
        f"{package}.{name}"
        for package in COMPLETE
        for name in importlib.import_module(package).__all__
        if name not in listed and id(getattr(importlib.import_module(package), name)) not in there
    ]
