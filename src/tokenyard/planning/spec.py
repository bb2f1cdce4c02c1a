"""`LayerSpec`: the description of one layer, which a user passes to `plan`, and the checks of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tokenyard import experts as experts_room
from tokenyard.errors import Reason, TokenyardError
from tokenyard.experts import Activation, Experts
from tokenyard.experts.base import TOKEN_NUMBERS
from tokenyard.experts.spec import EXACT, WeightOn
from tokenyard.formats import Format, Payload
from tokenyard.formats.base import PAYLOAD_DTYPES, ROW_DTYPES, dtype_name
from tokenyard.planning.choosing import AUTO
from tokenyard.routing import Placement, Router, is_scaling
from tokenyard.routing.placement import MOST_EXPERTS

Keep = Literal["products", "rows", "nothing"]

# The largest size that a layer may have: a mistyped number must not allocate all memory, nor overflow an offset.
LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One MoE layer. Layers of one plan may differ in every field.

    >>> LayerSpec(name="moe.0", hidden_size=2880, intermediate_size=1024, num_experts=32, top_k=4,
    ...           wire="mxfp8(alignment=256)").top_k
    4
    """

    # Names the layer in errors, statistics and `plan.wiring(name)`. No two layers of a plan share one.
    name: str
    hidden_size: int  # H, the width of a row
    intermediate_size: int  # I, the width between an expert's two products
    num_experts: int  # E, the experts of the layer, on all ranks together
    top_k: int  # K, the experts that a token chooses
    # The most tokens that one rank brings in one call; None takes the plan's.
    max_tokens: int | None = None
    # The dtype of the rows that go in and come out.
    dtype: torch.dtype = torch.bfloat16
    # The format in which rows travel out. None: the layer's own dtype.
    wire: str | Format | None = None
    # The format in which results travel back. None: the layer's own dtype.
    combine_wire: str | Format | None = None
    # The format that the experts compute on. None: the format in which rows arrive. If rows do not arrive in it, the
    # experts quantize them (quantize-after); if they do, the sender has quantized them (quantize-before).
    expert_rows: str | Format | None = None
    # The function between an expert's two products: a name, or an `Activation` with constants of its own.
    activation: str | Activation = "swiglu"
    bias: bool = False  # whether experts have biases, `b13` and `b2`
    # The format that holds the weight matrices; `ExpertWeights.quantize` makes them.
    weights: str = "bf16"
    # How the activation between an expert's two products is held. "exact": in the precision of the products. A format:
    # it is quantized once to that format ("fp8_block128", for weights in that format or in "mxfp4").
    inner: str | Format = EXACT
    # Where the routing weight is applied: on an expert's output, or on its input.
    weight_on: WeightOn = "output"
    # Turns logits into routes. None: every call passes ready `Routes`.
    router: Router | None = None
    # The routed scaling factor that routing weights contain. None: that of the router, or 1 without a router.
    routed_scaling: float | None = None
    # Which rank owns which expert: a name, or a table.
    placement: str | Placement = "contiguous"
    # Slots for further experts that each rank allocates: `plan.rebalance` copies experts into them. All but one of
    # these slots may hold copies of hot experts.
    spare_experts: int = 0
    # What computes the experts: a name, or a class of your own. `auto`: fused on GPUs that run them, else grouped.
    experts: str | type[Experts] = AUTO
    # Further per-token payloads that travel with the rows.
    payloads: tuple[Payload, ...] = ()
    # Who sums a token's results over ranks. With "caller", the caller gets them unreduced, as `RankRows`.
    reduce_ranks: Literal["exchange", "caller"] = "exchange"
    # Which results travel back, and in which order they are summed. "ranks": one row per rank, the sum of its experts
    # of a token; fewest bytes. "choices": one row per choice, summed in the order of a token's choices; the bits of the
    # output then depend on neither the number of ranks, nor the placement, nor the exchange.
    sum: Literal["ranks", "choices"] = "ranks"
    # In a training plan: the format in which gradients of rows travel, out and back. None: the layer's own dtype.
    gradient_wire: str | Format | None = None
    # In a training plan: what a rank keeps of a forward for its backward. "products": the received rows, as they
    # travelled, and their first product. "rows": the rows; the first product is computed again. "nothing": the rows
    # travel again, beside their gradients.
    keep: Keep = "products"
    # Whether a call brings a number for each token (`token_numbers`), of which no two tokens of the group share one.
    # Experts then compute their rows in the order of these numbers, so that sums over rows have the same bits however
    # tokens are dealt out to ranks.
    token_numbers: bool = False


def check_spec(spec: LayerSpec) -> Reason | None:
    """None, or the reason for the first field whose value is invalid in any layer, whatever exchange is planned."""
    for check in (_check_kinds, _check_sizes, _check_choices, _check_router, _check_payloads):
        if (reason := check(spec)) is not None:
            return reason
    return None


def is_size(value: object, *, most: int = LARGEST_SIZE) -> bool:
    """Whether `value` is an int from 1 to `most`. Booleans do not count.

    >>> is_size(1), is_size(True), is_size(10**15)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


# The types that each field may have, with the words for errors. The other fields are checked by the functions below,
# and names by the module that resolves them.
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "name": ("a name", (str,)),
    "dtype": ("a torch.dtype", (torch.dtype,)),
    "wire": ("a format or its name", (str, Format, type(None))),
    "combine_wire": ("a format or its name", (str, Format, type(None))),
    "expert_rows": ("a format or its name", (str, Format, type(None))),
    "activation": ("an activation or its name", (str, Activation)),
    "bias": ("True or False", (bool,)),
    "weights": ("the name of a weight format", (str,)),
    "inner": ('"exact", or a format or its name', (str, Format)),
    "weight_on": ("a name", (str,)),
    "router": ("a Router", (Router, type(None))),
    "placement": ("a placement or its name", (str, Placement)),
    "experts": ("experts or their name", (str, type)),
    "payloads": ("a tuple of payloads", (tuple, list)),
    "reduce_ranks": ("a name", (str,)),
    "sum": ("a name", (str,)),
    "gradient_wire": ("a format or its name", (str, Format, type(None))),
    "keep": ("a name", (str,)),
    "token_numbers": ("True or False", (bool,)),
}


def _check_kinds(spec: LayerSpec) -> Reason | None:
    for field, (words, kinds) in _KINDS.items():
        value = getattr(spec, field)
        if not isinstance(value, kinds):
            return Reason(field=field, value=value, why=f"must be {words}")
    return None


def _check_sizes(spec: LayerSpec) -> Reason | None:
    for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
        most = MOST_EXPERTS if name == "num_experts" else LARGEST_SIZE
        value = getattr(spec, name)
        if not is_size(value, most=most):
            return Reason(
                field=name, value=value, why=f"must be a whole number of at least 1, at most {most}"
            )
    spare = spec.spare_experts
    if not (isinstance(spare, int) and spare == 0) and not is_size(spare, most=MOST_EXPERTS):
        why = f"must be a whole number from 0 to {MOST_EXPERTS}"
        return Reason(field="spare_experts", value=spare, why=why)
    return None


def _check_choices(spec: LayerSpec) -> Reason | None:
    if spec.dtype not in ROW_DTYPES:
        known = ", ".join(map(dtype_name, ROW_DTYPES))
        return Reason(field="dtype", value=dtype_name(spec.dtype), why=f"rows are {known}")
    for name, choices in (
        ("weight_on", ("output", "input")),
        ("reduce_ranks", ("exchange", "caller")),
        ("sum", ("ranks", "choices")),
        ("keep", ("products", "rows", "nothing")),
    ):
        if getattr(spec, name) not in choices:
            return Reason(field=name, value=getattr(spec, name), why=f"choose {' or '.join(choices)}")
    if (spec.sum, spec.reduce_ranks) == ("choices", "caller"):
        why = 'with sum="choices" there is one sum, of choices, and the exchange makes it'
        return Reason(field="reduce_ranks", value="caller", why=why)
    return None


def _check_router(spec: LayerSpec) -> Reason | None:
    scaling = spec.routed_scaling
    if scaling is not None and not is_scaling(scaling):
        return Reason(field="routed_scaling", value=scaling, why="must be a positive number")
    router = spec.router
    if router is None:
        if spec.experts != AUTO and experts_room.get(spec.experts).routes_itself:
            return Reason(field="router", value=None, why="experts that route by themselves need one")
        return None
    try:
        router.check_experts(spec.num_experts)
    except TokenyardError as error:
        return Reason(field="router", value=error.found, why=f"expected {error.expected}")
    if router.top_k != spec.top_k:
        return Reason(field="top_k", value=spec.top_k, why=f"the layer's router chooses {router.top_k}")
    if scaling is not None and scaling != router.routed_scaling:
        why = f"the layer's router scales its weights by {router.routed_scaling} already"
        return Reason(field="routed_scaling", value=scaling, why=why)
    return None


def _check_payloads(spec: LayerSpec) -> Reason | None:
    taken = {"data", "scales", "global_scale", "ids", "weights", "logits", "checksums", TOKEN_NUMBERS}
    for payload in spec.payloads:
        if not isinstance(payload, Payload):
            return Reason(field="payloads", value=payload, why="must be a Payload")
        if not isinstance(payload.name, str) or payload.name in taken:
            why = "a packet has a payload of this name already, or it is no name"
            return Reason(field="payloads", value=payload.name, why=why)
        taken.add(payload.name)
        if payload.dtype not in PAYLOAD_DTYPES:
            known = ", ".join(map(dtype_name, PAYLOAD_DTYPES))
            why = f"payload {payload.name!r} may be {known}"
            return Reason(field="payloads", value=payload.dtype, why=why)
        if not is_size(payload.width):
            why = f"the width of payload {payload.name!r} must be from 1 to {LARGEST_SIZE}"
            return Reason(field="payloads", value=payload.width, why=why)
    return None
