"""Rank masks: ranks that are left out are not waited for, their experts get no rows, and everything else goes on."""

import pytest
import torch

import tokenyard as ty
from tests.integrations.flashinfer.round_trips import goes_to, make
from tests.models import on_ranks, raised
from tokenyard.errors import InputError, PeerFailed, PlanBroken
from tokenyard.integrations.flashinfer import MoeAlltoAll, moe_a2a_active_rank_mask

EXPERTS, MOST = 9, 4


def ids_of(rank, seed):
    draw = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(-1, EXPERTS, (3, 2), generator=draw, dtype=torch.int32)


def masked_trip(a2a, active, seed, in_workspace=False, dtype=torch.float32, **options):
    """A round trip of some ranks; the names of all that was not as it must be."""
    world, rank, wrong = a2a.ep_size, a2a.ep_rank, []
    mask = moe_a2a_active_rank_mask(active, world)
    ids_TK, tags_T = ids_of(rank, seed), torch.arange(3) + 10.0 * (rank + 1)
    ids, tags = a2a.dispatch(ids_TK, [ids_TK, tags_T], MOST, -7, 0, active_rank_mask=mask)
    for source in range(world):
        here = goes_to(ids_of(source, seed), rank, world, EXPERTS) if source in active else []
        there = torch.zeros(MOST)
        there[: len(here)] = torch.tensor(here, dtype=torch.float32) + 10 * (source + 1)
        if not torch.equal(tags[source], there):
            wrong.append(f"tags from {source}")
        if not bool((ids[source, len(here) :] == -7).all()):
            wrong.append(f"ids of unused slots from {source}")
        if a2a.unused_slots()[source].tolist() != [slot >= len(here) for slot in range(MOST)]:
            wrong.append(f"unused slots from {source}")
    results = (tags * (rank + 1)).unsqueeze(-1).repeat(1, 1, 3).to(dtype)
    if in_workspace:
        results = a2a.get_combine_payload_tensor_in_workspace(MOST, 3, dtype).copy_(results)
    y_TH = a2a.combine(results, MOST, in_workspace, active_rank_mask=mask, **options)
    expected_T = torch.zeros(3)
    for owner in active:
        here = goes_to(ids_TK, owner, world, EXPERTS)
        expected_T[here] += tags_T[here] * (owner + 1)
    if not torch.equal(y_TH, expected_T.unsqueeze(-1).repeat(1, 3).to(y_TH.dtype)):
        wrong.append("combined rows")
    return wrong


def fewer_and_fewer(group, masks):
    """Round trips with these masks, one after the other; a rank that is left out makes no more calls."""
    a2a, wrong = make(group, num_experts=EXPERTS, enable_rank_mask=True), []
    for seed, active in enumerate(masks):
        if group.rank not in active:
            return wrong
        for in_workspace in (False, True):
            wrong += masked_trip(a2a, active, 2 * seed + in_workspace, in_workspace)
    return wrong


@pytest.mark.parametrize(
    ("world", "masks"),
    [
        (4, [[0, 1, 2, 3], [0, 1, 3], [1, 3], [3]]),
        (4, [[0, 1, 3]]),  # from the first call on
        (8, [[0, 2, 4, 6, 7], [0, 7]]),
        (2, [[1]]),
    ],
)
def test_round_trips_of_the_active_ranks(world, masks):
    assert on_ranks(world, fewer_and_fewer, masks) == [[]] * world


def bf16_results(group):
    a2a = make(group, num_experts=EXPERTS, enable_rank_mask=True)
    if group.rank == 1:
        return []
    wrong = masked_trip(a2a, [0, 2], 0, True, torch.bfloat16)
    return wrong + masked_trip(a2a, [0, 2], 1, False, torch.bfloat16)


def test_results_of_bf16():
    assert on_ranks(3, bf16_results) == [[], [], []]


def after_a_loss(group):
    """Rank 2 ends after a round trip; the others wait for it once, then go on without it."""
    a2a = make(group, num_experts=EXPERTS, enable_rank_mask=True)
    wrong = masked_trip(a2a, [0, 1, 2, 3], 0)
    if group.rank == 2:
        return wrong, None, None
    lost = raised(masked_trip, a2a, [0, 1, 2, 3], 1)
    broken = raised(masked_trip, a2a, [0, 1, 2, 3], 2)
    left = [rank for rank in range(4) if rank not in lost.peers]
    wrong += masked_trip(a2a, left, 3)
    # The ranks of the group are 0, 1, 3 now; errors name them so.
    ids = torch.zeros(1, 2, dtype=torch.int32)
    mask = moe_a2a_active_rank_mask(left, 4)
    failed = raised(a2a.dispatch, ids, [ids], MOST + 5 * (group.rank == 3), active_rank_mask=mask)
    wrong += masked_trip(a2a, left, 4)
    return wrong, (lost, broken), failed


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_ranks_go_on_after_a_loss(ranks):
    for rank, (wrong, loss, failed) in enumerate(on_ranks(4, after_a_loss, ranks=ranks)):
        assert wrong == []
        if rank == 2:
            continue
        lost, broken = loss
        assert isinstance(lost, ty.PeerLost)
        assert lost.peers == (2,)
        assert isinstance(broken, PlanBroken)
        assert "pass an active_rank_mask without the ranks that were lost" in str(broken)
        assert f"rank {rank}" in str(failed)
        assert isinstance(failed, InputError if rank == 3 else PeerFailed)
        assert rank == 3 or failed.peer == 3


def refused(group):
    a2a = make(group, num_experts=EXPERTS, enable_rank_mask=True)
    ids = torch.zeros(1, 2, dtype=torch.int32)
    masks = {
        "none": None,
        "ints": [3],
        "int64": torch.tensor([3]),
        "this rank": moe_a2a_active_rank_mask([0], 2),
    }
    both = moe_a2a_active_rank_mask([0, 1], 2)
    errors = {}
    for name, mask in masks.items():
        error = raised(a2a.dispatch, ids, [ids], 2, active_rank_mask=mask if group.rank else both)
        errors[name] = f"{type(error).__name__}: {error}"
    a2a.dispatch(ids, [ids], 2, active_rank_mask=both)
    other = moe_a2a_active_rank_mask([1], 2) if group.rank else both
    errors["combine"] = str(raised(a2a.combine, torch.ones(2, 2, 3), 2, active_rank_mask=other))
    plain = make(group)
    errors["not enabled"] = str(raised(plain.dispatch, ids, [ids], 2, active_rank_mask=both))
    wrong = masked_trip(a2a, [0, 1], 0)
    if group.rank == 0:
        wrong += masked_trip(a2a, [0], 1)
        errors["back"] = str(raised(a2a.dispatch, ids, [ids], 2, active_rank_mask=both))
    return errors, wrong


def test_masks_that_do_not_fit_are_refused():
    expected = {
        "none": "active_rank_mask is not given, and enable_rank_mask is True",
        "ints": "active_rank_mask is a list of 1",
        "int64": "active_rank_mask is a tensor int64[1]",
        "this rank": "active_rank_mask [0] leaves out rank 1, which calls",
        "combine": "active_rank_mask is another one than that of the dispatch; expected the ranks [0, 1]",
        "not enabled": "active_rank_mask is given, and enable_rank_mask is False",
        "back": "active_rank_mask [0, 1] has rank 1, which was masked before",
    }
    for rank, (errors, wrong) in enumerate(on_ranks(2, refused)):
        assert wrong == []
        assert set(errors) == set(expected) - ({"back"} if rank else set())
        for name, error in errors.items():
            assert expected[name] in error, name


def test_masks():
    mask = moe_a2a_active_rank_mask((0, 31, 32, 63), 64)
    assert (mask.dtype, mask.device.type) == (torch.uint64, "cpu")
    assert mask.tolist() == [1 << 63 | 1 << 32 | 1 << 31 | 1]
    assert moe_a2a_active_rank_mask(torch.tensor([1]), 2).tolist() == [2]
    with pytest.raises(InputError, match="rank 4 among active_ranks"):
        moe_a2a_active_rank_mask([4], 4)
    with pytest.raises(InputError, match="a rank mask for 65 ranks"):
        moe_a2a_active_rank_mask([4], 65)


# -- EPLB statistics ---------------------------------------------------------------------------------------


def statistics(group, rounds):
    a2a = make(group, num_experts=EXPERTS, eplb_stats_num_experts=6)
    ids, rows, found = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 4), []
    for turn in range(rounds):
        mine = torch.arange(6, dtype=torch.int32) + 100 * group.rank + 1000 * turn
        a2a.dispatch(ids, [rows], 2, eplb_local_stats=mine)
        found.append(a2a.eplb_gathered_stats.tolist())
        a2a.combine(torch.ones(group.size, 2, 3), 2)
        found.append(a2a.eplb_gathered_stats)
    a2a.dispatch(ids, [rows], 2)
    found.append(a2a.eplb_gathered_stats)
    a2a.combine(torch.ones(group.size, 2, 3), 2)
    return found


@pytest.mark.parametrize(("world", "ranks"), [(2, "processes"), (4, "threads"), (8, "threads")])
def test_statistics_of_all_ranks_are_there_until_combine(world, ranks):
    expected = []
    for turn in range(3):
        rows = [[100 * rank + 1000 * turn + expert for expert in range(6)] for rank in range(world)]
        expected += [rows, None]
    assert on_ranks(world, statistics, 3, ranks=ranks) == [[*expected, None]] * world


def masked_statistics(group):
    a2a = make(group, num_experts=EXPERTS, eplb_stats_num_experts=2, enable_rank_mask=True)
    if group.rank == 1:
        return None
    ids, mine = torch.zeros(2, 2, dtype=torch.int32), torch.full((2,), 5 + group.rank, dtype=torch.int32)
    mask = moe_a2a_active_rank_mask([0, 2], 3)
    a2a.dispatch(ids, [ids], 2, eplb_local_stats=mine, active_rank_mask=mask)
    return a2a.eplb_gathered_stats.tolist()


def test_statistics_of_masked_ranks_are_zero():
    assert on_ranks(3, masked_statistics) == [[[5, 5], [0, 0], [7, 7]], None, [[5, 5], [0, 0], [7, 7]]]


def refused_statistics(group):
    a2a = make(group, num_experts=EXPERTS, eplb_stats_num_experts=6)
    ids, good = torch.zeros(2, 2, dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    cases = {"none": None, "int64": good.long(), "short": good[:5], "list": good.tolist()}
    errors = {}
    for name, stats in cases.items():
        errors[name] = str(
            raised(a2a.dispatch, ids, [ids], 2, eplb_local_stats=stats if group.rank else good)
        )
    errors["not made for"] = str(raised(make(group).dispatch, ids, [ids], 2, eplb_local_stats=good))
    a2a.dispatch(ids, [ids], 2, eplb_local_stats=good)
    return errors, a2a.eplb_gathered_stats.sum().item()


def test_statistics_that_do_not_fit_are_refused_on_all_ranks():
    expected = {
        "none": "with eplb_local_stats",
        "int64": "eplb_local_stats is a tensor int64[6] on cpu; expected int32[6]",
        "short": "eplb_local_stats is a tensor int32[5]",
        "list": "eplb_local_stats is a list of 6",
        "not made for": "eplb_stats_num_experts is 0",
    }
    for errors, total in on_ranks(2, refused_statistics):
        assert total == 30
        assert all(expected[name] in error for name, error in errors.items()), errors


def test_sizes_of_a_workspace():
    size = MoeAlltoAll.get_moe_workspace_size_per_rank
    assert size(4, 2, 10, 64) == 4 * 10 * (128 + 16) + 4 * 10 * 128
    assert size(4, 2, 10, 64, extra_payload_bytes_per_token=16) == 4 * 10 * (128 + 32) + 4 * 10 * 128
    assert size(4, 2, 10, 64, eplb_stats_num_experts=33) == size(4, 2, 10, 64) + 256
    with pytest.raises(InputError, match="backend is 'cake'"):
        size(4, 2, 10, 64, backend="cake")
