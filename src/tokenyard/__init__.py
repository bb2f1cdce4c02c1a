"""tokenyard: an expert-parallel Mixture-of-Experts (MoE) layer for PyTorch that cannot be wired wrong.

It sends every token row to the ranks that own its experts, runs the experts there, and brings the results
home.

The shapes, by letter; a tensor that crosses a function carries them in its name (`x_TH`):

    T  tokens on this rank           W  ranks in the group
    H  hidden size                   R  rows received by this rank
    P  hidden size, padded           L  experts on this rank
    K  experts per token             I  intermediate size
    E  experts in the layer          N  (received row, expert) pairs
"""

from tokenyard.errors import (
    ContractError,
    Drifted,
    GroupError,
    HandleError,
    InputError,
    PeerFailed,
    PeerLost,
    PlanError,
    PlanMismatch,
    RankError,
    TokenyardError,
    UnknownName,
)
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS, Experts, ExpertsSpec, ExpertWeights
from tokenyard.formats import FORMATS, EncodedRows, Format, Payload
from tokenyard.group import DistributedGroup, Group, ThreadGroup, launch, thread_groups
from tokenyard.layer import MoELayer
from tokenyard.placement import Placement
from tokenyard.plan import Draft, Plan, draft, plan
from tokenyard.routing import (
    GroupedSigmoidRouter,
    Router,
    Routes,
    SoftmaxRouter,
    SqrtSoftplusRouter,
    TopLogitsRouter,
)
from tokenyard.rows import CombinedRows, ExpertRows, RankRows, ReceivedRows, UnfinalizedRows
from tokenyard.spec import LayerSpec
from tokenyard.version import __version__
from tokenyard.wiring import Duty, Party, Wiring

__all__ = [
    "EXCHANGES",
    "EXPERTS",
    "FORMATS",
    "CombinedRows",
    "ContractError",
    "DistributedGroup",
    "Draft",
    "Drifted",
    "Duty",
    "EncodedRows",
    "ExpertRows",
    "ExpertWeights",
    "Experts",
    "ExpertsSpec",
    "Format",
    "Group",
    "GroupError",
    "GroupedSigmoidRouter",
    "HandleError",
    "InputError",
    "LayerSpec",
    "MoELayer",
    "Party",
    "Payload",
    "PeerFailed",
    "PeerLost",
    "Placement",
    "Plan",
    "PlanError",
    "PlanMismatch",
    "RankError",
    "RankRows",
    "ReceivedRows",
    "Router",
    "Routes",
    "SoftmaxRouter",
    "SqrtSoftplusRouter",
    "ThreadGroup",
    "TokenyardError",
    "TopLogitsRouter",
    "UnfinalizedRows",
    "UnknownName",
    "Wiring",
    "__version__",
    "draft",
    "launch",
    "plan",
    "thread_groups",
]
