"""tokenyard: an expert-parallel Mixture-of-Experts (MoE) layer for PyTorch that cannot be wired wrong.

It sends every token row to the ranks that own its experts, runs the experts there, and brings the results
home.

Letters stand for sizes. A tensor that is passed between functions has the letters of its shape in its name (`x_TH`):

    T  tokens on this rank           W  ranks in the group
    H  hidden size                   R  rows received by this rank
    P  hidden size, padded           L  experts on this rank
    K  experts per token             I  intermediate size
    E  experts in the layer          N  (received row, expert) pairs

Public names are imported when they are first used. `import tokenyard` alone does not load torch, and the command
line therefore starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenyard.version import __version__

if TYPE_CHECKING:
    from tokenyard.checkpoints import Checkpoint as Checkpoint
    from tokenyard.checkpoints import load_experts as load_experts
    from tokenyard.checkpoints import open_checkpoint as open_checkpoint
    from tokenyard.checkpoints import open_together as open_together
    from tokenyard.duties import Duty as Duty
    from tokenyard.duties import Party as Party
    from tokenyard.elastic.joining import join_plan as join_plan
    from tokenyard.errors import CheckpointError as CheckpointError
    from tokenyard.errors import ConcurrentUse as ConcurrentUse
    from tokenyard.errors import ContractError as ContractError
    from tokenyard.errors import Corrupted as Corrupted
    from tokenyard.errors import Drifted as Drifted
    from tokenyard.errors import GroupError as GroupError
    from tokenyard.errors import HandleError as HandleError
    from tokenyard.errors import InputError as InputError
    from tokenyard.errors import PeerFailed as PeerFailed
    from tokenyard.errors import PeerLost as PeerLost
    from tokenyard.errors import PlanBroken as PlanBroken
    from tokenyard.errors import PlanError as PlanError
    from tokenyard.errors import PlanMismatch as PlanMismatch
    from tokenyard.errors import RankError as RankError
    from tokenyard.errors import TokenyardError as TokenyardError
    from tokenyard.errors import UnknownName as UnknownName
    from tokenyard.errors import WrongProcess as WrongProcess
    from tokenyard.exchange import EXCHANGES as EXCHANGES
    from tokenyard.experts import EXPERTS as EXPERTS
    from tokenyard.experts import Experts as Experts
    from tokenyard.experts import ExpertsSpec as ExpertsSpec
    from tokenyard.experts import ExpertWeights as ExpertWeights
    from tokenyard.formats import FORMATS as FORMATS
    from tokenyard.formats import EncodedRows as EncodedRows
    from tokenyard.formats import Format as Format
    from tokenyard.formats import Payload as Payload
    from tokenyard.group import Disagreement as Disagreement
    from tokenyard.group import DistributedGroup as DistributedGroup
    from tokenyard.group import Group as Group
    from tokenyard.group import ThreadGroup as ThreadGroup
    from tokenyard.group import launch as launch
    from tokenyard.group import rejoin as rejoin
    from tokenyard.group import thread_groups as thread_groups
    from tokenyard.layer import MoELayer as MoELayer
    from tokenyard.layer import PendingBatch as PendingBatch
    from tokenyard.layer import overlapped as overlapped
    from tokenyard.planning.drafting import Draft as Draft
    from tokenyard.planning.drafting import draft as draft
    from tokenyard.planning.planner import Plan as Plan
    from tokenyard.planning.planner import plan as plan
    from tokenyard.planning.spec import LayerSpec as LayerSpec
    from tokenyard.planning.wiring import Wiring as Wiring
    from tokenyard.routing import GroupedSigmoidRouter as GroupedSigmoidRouter
    from tokenyard.routing import Placement as Placement
    from tokenyard.routing import Router as Router
    from tokenyard.routing import Routes as Routes
    from tokenyard.routing import SoftmaxRouter as SoftmaxRouter
    from tokenyard.routing import SqrtSoftplusRouter as SqrtSoftplusRouter
    from tokenyard.routing import TopLogitsRouter as TopLogitsRouter
    from tokenyard.rows import CombinedRows as CombinedRows
    from tokenyard.rows import ExpertRows as ExpertRows
    from tokenyard.rows import RankRows as RankRows
    from tokenyard.rows import ReceivedRows as ReceivedRows
    from tokenyard.rows import UnfinalizedRows as UnfinalizedRows

# The public names of each module, in one string separated by spaces.
_HOMES = {
    "checkpoints": "Checkpoint load_experts open_checkpoint open_together",
    "duties": "Duty Party",
    "errors": "CheckpointError ConcurrentUse ContractError Corrupted Drifted GroupError HandleError InputError "
    "PeerFailed PeerLost PlanBroken PlanError PlanMismatch RankError TokenyardError UnknownName WrongProcess",
    "exchange": "EXCHANGES",
    "experts": "EXPERTS Experts ExpertsSpec ExpertWeights",
    "formats": "FORMATS EncodedRows Format Payload",
    "group": "Disagreement DistributedGroup Group ThreadGroup launch rejoin thread_groups",
    "layer": "MoELayer PendingBatch overlapped",
    "planning.drafting": "Draft draft",
    "elastic.joining": "join_plan",
    "planning.planner": "Plan plan",
    "routing": "GroupedSigmoidRouter Placement Router Routes SoftmaxRouter SqrtSoftplusRouter TopLogitsRouter",
    "rows": "CombinedRows ExpertRows RankRows ReceivedRows UnfinalizedRows",
    "planning.spec": "LayerSpec",
    "planning.wiring": "Wiring",
}
_HOME_OF = {name: room for room, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tokenyard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tokenyard.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604
