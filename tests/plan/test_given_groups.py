"""Plans of process groups and meshes, which engines and trainers have in hand, on ranks that are real processes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.errors import GroupError, InputError, PlanError
from tokenyard.group import as_group, borrowed

LAYER = spec(num_experts=4, sum="choices", experts="reference")


def served(given, rank=None):
    """The ranks of a plan of this group, its bits for one batch, and what is left of it once it is closed."""
    plan = ty.plan([LAYER], given)
    y_TH = build(plan, "moe")(*batch(LAYER, 3, seed=plan.group.rank))
    found = plan.group.rank, plan.group.size, y_TH.sum().item()
    plan.close()
    return *found, isinstance(raised(plan.group.barrier), GroupError)


def process_groups(group):
    """The world, twice; a process group of ranks 1 and 2, refused on rank 0; a mesh, one of its dimensions."""
    world = served(dist.group.WORLD), served(dist.group.WORLD)
    pair = dist.new_group([1, 2])
    part = served(pair) if group.rank in (1, 2) else str(raised(ty.plan, [LAYER], pair))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    refused = str(raised(ty.plan, [LAYER], mesh))
    row = served(mesh["ep"])
    line = DeviceMesh("cpu", [1, 2])
    outside = None if group.rank in (1, 2) else str(raised(ty.plan, [LAYER], line))
    kept = served(group)  # a group that a plan is given stays open
    group.barrier()
    return world, part, refused, row, outside, kept


def test_plans_of_process_groups_and_meshes():
    found = ty.launch(4, process_groups, ranks="processes")
    in_threads = {size: on_ranks(size, served) for size in (2, 4)}
    for rank, (world, part, refused, row, outside, kept) in enumerate(found):
        expected = in_threads[4][rank][:3]
        assert world == ((*expected, True), (*expected, True))
        assert kept == (*expected, False)
        if rank in (1, 2):
            assert part == (*in_threads[2][rank - 1][:3], True)
        else:
            assert "this rank is not in the process group; expected a Group, a process group of" in part
            assert f"rank {rank}" in part
        assert "the mesh has 2 dimensions, ('dp', 'ep'); expected a mesh of one dimension" in refused
        assert 'pass mesh["ep"]' in refused
        assert outside is None or "this rank is not in the mesh; expected one of ranks [1, 2]" in outside
        assert row == (*in_threads[2][rank % 2][:3], True)


def plans_at_once(group):
    """The numbers of two equal plans of one process group, and what a rank hears that is in the other one of them."""
    first, second = (ty.plan([LAYER], dist.group.WORLD, exchange="two_sided") for _ in range(2))
    layers = build(first, "moe"), build(second, "moe")
    error = raised(layers[group.rank], *batch(LAYER, 3))
    refused = raised(ty.plan, [spec(num_experts=group.rank + 4)], dist.group.WORLD)
    with borrowed(dist.group.WORLD) as ranks:
        told = ranks.gather_json(group.rank)
    return (
        first.exchange.announcer.plan_id != second.exchange.announcer.plan_id,
        type(error).__name__,
        type(refused).__name__,
        told,
        "it was closed" in str(raised(ranks.barrier)),
    )


def test_plans_of_one_process_group_are_told_apart():
    found = ty.launch(2, plans_at_once, ranks="processes", deadline=20.0)
    assert found == [(True, "Drifted", "PlanMismatch", [0, 1], True)] * 2


@pytest.mark.parametrize("wrong", [None, 3, "world", torch.ones(2)])
def test_what_is_no_group_is_refused(wrong):
    error = str(raised(ty.plan, [LAYER], wrong))
    assert "the group is " in error
    assert "expected a Group, a process group of torch.distributed, or a mesh of one dimension" in error
    assert "pass DistributedGroup()" in error
    assert isinstance(raised(as_group, wrong), InputError)


def test_a_group_of_the_caller_stays_open_when_no_plan_comes_of_it():
    def refused(group):
        error = raised(ty.plan, [spec(placement="nowhere")], group)
        group.barrier()
        return isinstance(error, (PlanError, ValueError))

    assert on_ranks(2, refused) == [True, True]
