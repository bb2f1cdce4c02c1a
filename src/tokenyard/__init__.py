"""tokenyard: an expert-parallel Mixture-of-Experts (MoE) layer for PyTorch that cannot be wired wrong.

It sends every token row to the ranks that own its experts, runs the experts there, and brings the results
home.

Letters stand for sizes. A tensor that is passed between functions has the letters of its shape in its name (`x_TH`):

    T  tokens on this rank           W  ranks in the group
    H  hidden size                   R  rows received by this rank
    P  hidden size, padded           L  experts on this rank
    K  experts per token             I  intermediate size
    E  experts in the layer          N  (received row, expert) pairs

The names below are what most programs need. Others are in the module of their topic, for example
`tokenyard.routing.Placement` and `tokenyard.errors.PlanError`.

Public names are imported when they are first used. `import tokenyard` alone does not load torch, and the command
line therefore starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenyard.version import __version__

if TYPE_CHECKING:
    from tokenyard.checkpoints import load_experts as load_experts
    from tokenyard.errors import PeerLost as PeerLost
    from tokenyard.errors import TokenyardError as TokenyardError
    from tokenyard.experts import ExpertWeights as ExpertWeights
    from tokenyard.group import DistributedGroup as DistributedGroup
    from tokenyard.group import Group as Group
    from tokenyard.group import launch as launch
    from tokenyard.layer import MoELayer as MoELayer
    from tokenyard.planning.drafting import draft as draft
    from tokenyard.planning.planner import Plan as Plan
    from tokenyard.planning.planner import plan as plan
    from tokenyard.planning.spec import LayerSpec as LayerSpec
    from tokenyard.routing import Routes as Routes

# The module of each public name.
_HOME_OF = {
    "plan": "planning.planner",
    "draft": "planning.drafting",
    "launch": "group",
    "MoELayer": "layer",
    "LayerSpec": "planning.spec",
    "Routes": "routing",
    "ExpertWeights": "experts",
    "Group": "group",
    "DistributedGroup": "group",
    "Plan": "planning.planner",
    "load_experts": "checkpoints",
    "TokenyardError": "errors",
    "PeerLost": "errors",
}

# Names that are imported from the module of their topic, so that the error for `tokenyard.Placement` can say where.
_ELSEWHERE = {
    "checkpoints": "Checkpoint open_checkpoint open_together",
    "duties": "Duty Party",
    "elastic": "join_plan",
    "errors": "CheckpointError ConcurrentUse ContractError Corrupted Drifted GroupError HandleError InputError "
    "PeerFailed PlanBroken PlanError PlanMismatch RankError UnknownName WrongProcess",
    "exchange": "EXCHANGES",
    "experts": "EXPERTS Experts ExpertsSpec",
    "formats": "FORMATS EncodedRows Format Payload",
    "group": "Disagreement ThreadGroup rejoin thread_groups",
    "layer": "PendingBatch overlapped",
    "planning": "Draft Wiring",
    "routing": "GroupedSigmoidRouter Placement Router SoftmaxRouter SqrtSoftplusRouter TopLogitsRouter",
    "rows": "CombinedRows ExpertRows RankRows ReceivedRows UnfinalizedRows",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"tokenyard.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    where = next((topic for topic, names in _ELSEWHERE.items() if name in names.split()), None)
    fix = f"; write `from tokenyard.{where} import {name}`" if where else ""
    raise AttributeError(f"module 'tokenyard' has no attribute {name!r}{fix}")


def __dir__() -> list[str]:
    return __all__


__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604
