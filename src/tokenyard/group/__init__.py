"""Groups: the ranks that exchange with each other, and the launcher that starts them."""

from tokenyard.group.base import DEFAULT_DEADLINE, Disagreement, Group
from tokenyard.group.distributed import DistributedGroup
from tokenyard.group.given import GroupLike, as_group, borrowed
from tokenyard.group.launch import launch
from tokenyard.group.readmission import READMISSION
from tokenyard.group.rejoining import rejoin
from tokenyard.group.threads import ThreadGroup, thread_groups
from tokenyard.group.together import make_together

__all__ = [
    "DEFAULT_DEADLINE",
    "READMISSION",
    "Disagreement",
    "DistributedGroup",
    "Group",
    "GroupLike",
    "ThreadGroup",
    "as_group",
    "borrowed",
    "launch",
    "make_together",
    "rejoin",
    "thread_groups",
]
