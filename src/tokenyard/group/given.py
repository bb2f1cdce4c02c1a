"""What functions take as a group: one of ours, or what engines and trainers have in hand.

    plan(layers, DistributedGroup(…))    plan(layers, process_group)    plan(layers, mesh["ep"])

Of a process group or a mesh, a `DistributedGroup` is made. All ranks of it do so in one order, as they make plans.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenyard.errors import InputError, shown
from tokenyard.group.base import Group
from tokenyard.group.distributed import DistributedGroup

# What `plan` and others take: a group, a process group of torch.distributed, or a mesh of one dimension.
GroupLike = Group | dist.ProcessGroup | DeviceMesh

# How many groups `as_group` has made of each process group.
_made_of: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def as_group(given: GroupLike) -> Group:
    """A group of the ranks in `given`: a group as it is, else a `DistributedGroup`, which the caller closes.

    It has the default deadline and device: to choose these, pass `DistributedGroup(process_group, deadline=…)`.
    """
    if isinstance(given, Group):
        return given
    process_group: object = given
    device = None
    if isinstance(given, DeviceMesh):
        _check_mesh(given)
        process_group, device = given.get_group(), given.device_type
    if not isinstance(process_group, dist.ProcessGroup):
        # `new_group` returns this number on the other ranks.
        outside = isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER
        raise InputError(
            "this rank is not in the process group" if outside else f"the group is {shown(given)}",
            expected="a Group, a process group of torch.distributed, or a mesh of one dimension, with this rank in it",
            fix="call this on the ranks that `new_group` was given" if outside
            else "call it inside a function that `launch` runs on every rank, or pass DistributedGroup()",
            rank=dist.get_rank() if outside else None,
        )  # fmt: skip
    made = DistributedGroup(process_group, device=device, name=process_group.group_name)
    earlier = _made_of.get(process_group, 0)
    _made_of[process_group] = earlier + 1
    for _ in range(earlier):  # plans of one process group have different numbers: each has a group of its own
        made.count_plan()
    return made


@contextmanager
def borrowed(given: GroupLike) -> Iterator[Group]:
    """A group of the ranks in `given` for a block. If it was made for the block, it is closed at the end."""
    group = as_group(given)
    try:
        yield group
    finally:
        if group is not given:
            group.close()


def _check_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names
    if mesh.ndim != 1:
        name = "ep" if names is None or "ep" in names else names[-1]
        raise InputError(
            f"the mesh has {mesh.ndim} dimensions, {shown(names or tuple(mesh.shape))}",
            expected="a mesh of one dimension: the ranks that share the experts of a layer",
            fix=f'pass mesh["{name}"]' + ("" if names else ", of a mesh with mesh_dim_names"),
            rank=dist.get_rank(),
        )
    if mesh.get_coordinate() is None:
        raise InputError(
            "this rank is not in the mesh",
            expected=f"one of ranks {shown(mesh.mesh.tolist())}",
            fix="call this on the ranks of the mesh",
            rank=dist.get_rank(),
        )
