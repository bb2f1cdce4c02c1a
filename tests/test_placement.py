"""Placement: every expert has an owner, and a token's replica depends on nothing but the token."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenyard.errors import InputError, UnknownName
from tokenyard.routing.placement import MOST_EXPERTS, MOST_RANKS, Placement, placement_for

thrifty = settings(deadline=None, max_examples=60)


def resolve_slowly(placement: Placement, topk_ids_TK: Tensor, source_rank: int) -> tuple[Tensor, Tensor]:
    """The rule in plain Python, one choice at a time."""
    ranks, locals_ = [], []
    for ids in topk_ids_TK.tolist():
        id_sum = sum(expert for expert in ids if expert >= 0)
        row = []
        for expert in ids:
            if expert == -1:
                row.append((-1, -1))
                continue
            holders = [rank for rank in range(placement.world) if expert in placement.table[rank]]
            others = [rank for rank in range(placement.world) if rank not in holders]
            if source_rank in holders:
                rank = source_rank
            else:
                rank = holders[(others.index(source_rank) + id_sum) % len(holders)]
            row.append((rank, placement.table[rank].index(expert)))
        ranks.append([rank for rank, _ in row])
        locals_.append([local for _, local in row])
    shape = tuple(topk_ids_TK.shape)
    return (
        torch.tensor(ranks, dtype=torch.int64).reshape(shape),
        torch.tensor(locals_, dtype=torch.int32).reshape(shape),
    )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_experts, world = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["contiguous", "round_robin", "explicit"]))
    if kind != "explicit":
        base = placement_for(kind, num_experts, world)
    else:
        table: list[list[int]] = [[] for _ in range(world)]
        for expert in draw(st.permutations(range(num_experts))):
            table[draw(st.integers(0, world - 1))].append(expert)
        base = Placement.explicit(num_experts, table)
    replicas = {}
    for expert in draw(st.sets(st.integers(0, num_experts - 1), max_size=4)):
        free = [rank for rank in range(world) if expert not in base.table[rank]]
        if free:
            replicas[expert] = sorted(draw(st.sets(st.sampled_from(free), max_size=len(free))))
    return Placement.replicated(base, replicas)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Placement, Tensor, int]:
    placement = draw(placements())
    num_tokens, top_k = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    ids = st.integers(-1, placement.num_experts - 1)  # -1 and duplicates included
    rows = draw(
        st.lists(st.lists(ids, min_size=top_k, max_size=top_k), min_size=num_tokens, max_size=num_tokens)
    )
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    topk_ids_TK = torch.tensor(rows, dtype=dtype).reshape(num_tokens, top_k)
    return placement, topk_ids_TK, draw(st.integers(0, placement.world - 1))


@thrifty
@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from(["contiguous", "round_robin"]))
def test_named_placements_own_each_expert_once_and_evenly(num_experts: int, world: int, name: str) -> None:
    placement = placement_for(name, num_experts, world)
    held = [expert for rank in range(world) for expert in placement.local_experts(rank)]
    assert sorted(held) == list(range(num_experts))
    assert not placement.has_replicas
    counts = [placement.num_local(rank) for rank in range(world)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)  # the first E mod W ranks hold one more
    if name == "contiguous":
        assert held == list(range(num_experts))
    else:
        assert all(
            expert % world == rank for rank in range(world) for expert in placement.local_experts(rank)
        )


@thrifty
@given(placements())
def test_owners_and_local_experts_are_two_views_of_one_table(placement: Placement) -> None:
    for expert in range(placement.num_experts):
        owners = placement.owners(expert)
        assert owners
        assert list(owners) == sorted(owners)
        assert all(placement.local_experts(rank)[local] == expert for rank, local in owners)
    pairs = sum(len(placement.owners(expert)) for expert in range(placement.num_experts))
    assert pairs == sum(placement.num_local(rank) for rank in range(placement.world))


@thrifty
@given(batches())
def test_resolve_agrees_with_its_slow_twin(batch: tuple[Placement, Tensor, int]) -> None:
    placement, topk_ids_TK, source_rank = batch
    before = topk_ids_TK.clone()
    rank_TK, local_TK = placement.resolve(topk_ids_TK, source_rank)
    slow_rank_TK, slow_local_TK = resolve_slowly(placement, topk_ids_TK, source_rank)
    assert (rank_TK.dtype, local_TK.dtype) == (torch.int64, torch.int32)
    assert torch.equal(rank_TK, slow_rank_TK)
    assert torch.equal(local_TK, slow_local_TK)
    assert torch.equal(topk_ids_TK, before)


@thrifty
@given(batches(), st.randoms(use_true_random=False))
def test_a_token_keeps_its_replicas_in_any_batch(batch: tuple[Placement, Tensor, int], random) -> None:
    placement, topk_ids_TK, source_rank = batch
    num_tokens = topk_ids_TK.shape[0]
    order = random.sample(range(num_tokens), num_tokens)
    start = random.randint(0, num_tokens)
    whole = placement.resolve(topk_ids_TK, source_rank)
    permuted = placement.resolve(topk_ids_TK[order], source_rank)
    sliced = placement.resolve(topk_ids_TK[start:], source_rank)
    for all_TK, permuted_TK, sliced_TK in zip(whole, permuted, sliced, strict=True):
        assert torch.equal(all_TK[order], permuted_TK)
        assert torch.equal(all_TK[start:], sliced_TK)


@thrifty
@given(batches())
def test_one_expert_in_one_row_is_one_replica(batch: tuple[Placement, Tensor, int]) -> None:
    placement, topk_ids_TK, source_rank = batch
    rank_TK, _ = placement.resolve(topk_ids_TK, source_rank)
    for ids, ranks in zip(topk_ids_TK.tolist(), rank_TK.tolist(), strict=True):
        met = set(zip(ids, ranks, strict=True))
        assert len(met) == len(set(ids))
        for expert, rank in met:
            if expert in placement.local_experts(source_rank):
                assert rank == source_rank  # a row whose expert is at home does not travel


def test_replicas_share_the_tokens_of_other_ranks() -> None:
    placement = Placement.replicated(Placement.contiguous(8, 4), {0: [1, 2]})
    topk_ids_TK = torch.tensor([[0, other] for other in range(1, 7)])
    assert placement.resolve(topk_ids_TK, 3)[0][:, 0].tolist() == [1, 2, 0, 1, 2, 0]
    assert placement.resolve(topk_ids_TK, 2)[0][:, 0].tolist() == [2] * 6


def test_replicas_share_tokens_that_all_have_the_same_ids() -> None:
    placement = Placement.replicated(Placement.contiguous(8, 8), {0: [3]})
    ids_TK = torch.tensor([[0, 5]])
    went = [int(placement.resolve(ids_TK, source)[0][0, 0]) for source in range(8)]
    assert sorted(went) == [0] * 4 + [3] * 4


def test_more_ranks_than_experts_leaves_ranks_empty() -> None:
    for name in ("contiguous", "round_robin"):
        placement = placement_for(name, 2, 5)
        assert placement.table == ((0,), (1,), (), (), ())
        assert placement.num_local(4) == 0
        rank_TK, local_TK = placement.resolve(torch.tensor([[1, 0], [-1, 1]]), source_rank=4)
        assert rank_TK.tolist() == [[1, 0], [-1, 1]]
        assert local_TK.tolist() == [[0, 0], [-1, 0]]


def test_lookups_are_built_once_and_do_not_travel() -> None:
    ids_TK = torch.tensor([[0, 3]])
    placement = Placement.replicated(Placement.contiguous(4, 2), {0: [1]})
    placement.resolve(ids_TK, 0)
    built = placement._replica_lookup(ids_TK.device, 0)
    placement.resolve(ids_TK, 0)
    assert placement._replica_lookup(ids_TK.device, 0) is built
    for twin in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert twin == placement
        assert hash(twin) == hash(placement)
        assert "_lookups" not in vars(twin)
        assert torch.equal(twin.resolve(ids_TK, 0)[0], placement.resolve(ids_TK, 0)[0])


def test_description_is_json_and_tells_placements_apart() -> None:
    contiguous, round_robin = Placement.contiguous(4, 2), Placement.round_robin(4, 2)
    assert json.loads(json.dumps(contiguous.fields())) == {"num_experts": 4, "table": [[0, 1], [2, 3]]}
    assert contiguous.fields() != round_robin.fields()
    assert str(round_robin) == "4 experts on 2 ranks, round_robin"
    assert str(Placement.explicit(2, [[1], [0]])) == "2 experts on 2 ranks, explicit"
    assert str(Placement.replicated(contiguous, {0: [1]})) == "4 experts on 2 ranks, 1 replica"


def test_replicated_does_not_depend_on_the_order_of_its_arguments() -> None:
    base = Placement.contiguous(6, 3)
    assert Placement.replicated(base, {0: [2], 3: [2, 0]}) == Placement.replicated(base, {3: [0, 2], 0: [2]})
    assert Placement.replicated(base, {}) == base


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.explicit(4, [[0, 1], [3]]), "no rank owns expert 2;"),
        (lambda: Placement.explicit(20, [[0]]), "no rank owns experts 1, 2, 3, 4, 5, 6, 7, 8 and 11 more"),
        (lambda: Placement.explicit(2, [[0, 1], [2]]), "rank 1 holds expert 2; expected ids from 0 to 1"),
        (lambda: Placement.explicit(2, [[0, -1], [1]]), "rank 0 holds expert -1; expected ids from 0 to 1"),
        (lambda: Placement.explicit(2, [[0, 1, 0]]), "rank 0 holds expert 0 more than once"),
        (lambda: Placement.explicit(2, [[0, 1.5]]), "expected whole numbers"),
        (lambda: Placement.explicit(2, []), "a placement of 2 experts on 0 ranks"),
        (lambda: Placement.contiguous(0, 2), "a placement of 0 experts on 2 ranks"),
        (lambda: Placement.contiguous(4, 0), "a placement of 4 experts on 0 ranks"),
        (
            lambda: Placement.replicated(Placement.contiguous(2, 2), {0: [2]}),
            "expert 0 on rank 2; expected ranks",
        ),
        (
            lambda: Placement.replicated(Placement.contiguous(2, 2), {0: [0]}),
            "rank 0 holds expert 0 more than",
        ),
        (lambda: Placement.replicated(Placement.contiguous(2, 2), {7: [0]}), "rank 0 holds expert 7"),
        (lambda: Placement.replicated(Placement.contiguous(2, 2), [[0]]), "replicas are"),
        (lambda: Placement.replicated([[0], [1]], {0: [1]}), "added to a list of 2"),
        (lambda: Placement.contiguous(4, 2).owners(4), "expert 4; expected ids from 0 to 3"),
        (lambda: Placement.contiguous(4, 2).owners(-1), "expert -1; expected ids from 0 to 3"),
        (lambda: Placement.contiguous(4, 2).local_experts(2), "rank 2; expected ranks from 0 to 1"),
        (lambda: Placement.contiguous(4, 2).resolve(torch.zeros(1, 2).long(), -1), "rank -1; expected ranks"),
        (lambda: Placement.contiguous(4, 2).resolve(torch.zeros(1, 2), 0), "topk_ids_TK is a tensor float32"),
        (lambda: Placement.contiguous(4, 2).resolve(torch.zeros(2).long(), 0), "expected a matrix"),
        (lambda: placement_for(Placement.contiguous(4, 2), 8, 2), "expected 8 experts on 2 ranks"),
        (lambda: placement_for(Placement.contiguous(4, 2), 4, 4), "expected 4 experts on 4 ranks"),
        (
            lambda: placement_for([[0], [1]], 2, 2),
            "placement is a list of 2; expected a Placement, or one of",
        ),
    ],
)
def test_errors_name_the_value(make, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
    assert "; fix: " in str(caught.value)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'round_robin'"):
        placement_for("roundrobin", 4, 2)


def test_an_instance_that_fits_is_returned_as_it_is() -> None:
    placement = Placement.explicit(3, [[2], [1, 0]])
    assert placement_for(placement, 3, 2) is placement


# --- At the limits -----------------------------------------------------------------------------------------


def test_the_largest_sizes_are_taken_and_larger_ones_are_not() -> None:
    assert Placement.contiguous(MOST_EXPERTS, 1).num_local(0) == MOST_EXPERTS
    assert Placement.round_robin(1, MOST_RANKS).world == MOST_RANKS
    for experts, ranks in ((MOST_EXPERTS + 1, 1), (1, MOST_RANKS + 1), (0, 1), (1, 0)):
        with pytest.raises(InputError, match=f"a placement of {experts} experts on {ranks} ranks"):
            Placement.contiguous(experts, ranks)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (1, "no rank owns expert 1;"),
        (8, "no rank owns experts 1, 2, 3, 4, 5, 6, 7, 8;"),
        (9, "no rank owns experts 1, 2, 3, 4, 5, 6, 7, 8 and 1 more;"),
    ],
)
def test_experts_without_an_owner_are_listed_up_to_eight(lost: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        Placement.explicit(lost + 1, [[0]])
    assert words in str(caught.value)


def test_a_placement_that_lost_experts_travels_to_another_process() -> None:
    left = Placement.contiguous(4, 2).without([1])
    assert pickle.loads(pickle.dumps(left)) == left
    assert pickle.loads(pickle.dumps(left)).lost_experts == [2, 3]


def test_replicas_are_seen_where_other_experts_are_lost() -> None:
    """Three places for two experts that are left, of three; and two places for two."""
    assert Placement(num_experts=3, table=((0, 1), (0,)), allow_lost=True).has_replicas
    assert not Placement(num_experts=3, table=((0,), (1,)), allow_lost=True).has_replicas


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "two", None, MOST_EXPERTS + 1])
def test_sizes_that_no_placement_has_are_refused(wrong):
    for sizes in ((wrong, 2), (4, wrong)):
        with pytest.raises(InputError, match="experts, on 1 to 65536 ranks"):
            Placement.contiguous(*sizes)


def test_experts_that_were_lost_and_choices_of_nobody_have_no_rank_and_no_number():
    left = Placement.contiguous(4, 2).without([1])
    rank_TK, local_TK = left.resolve(torch.tensor([[0, 3, -1]]), 0)
    assert rank_TK.tolist() == [[0, -1, -1]]
    assert local_TK.tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("experts", [[0, 1, 2], [2, 0, 1]])
def test_local_ids_are_fresh_also_where_they_are_the_ids(experts: list[int]) -> None:
    ids_TK = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32)
    local_TK = Placement.explicit(3, [experts]).local_ids(ids_TK)
    local_TK.fill_(7)
    assert ids_TK.tolist() == [[0, 2], [1, 1]]


def test_integers_of_numpy_become_plain_ones() -> None:
    placement = Placement(num_experts=np.int64(3), table=[list(np.array([0, 2])), [np.int32(1)]])  # type: ignore[arg-type]
    assert json.dumps([placement.num_experts, placement.table]) == "[3, [[0, 2], [1]]]"
    assert hash(placement) == hash(Placement(num_experts=3, table=((0, 2), (1,))))
