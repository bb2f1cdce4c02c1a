"""Placements for uneven load: never worse than the published greedy algorithm, legal, near the present one, in time."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenyard.balancing.forecast import LayerForecast, forecast, steps_to_pay
from tokenyard.balancing.recorded_routes import RecordedRoutes
from tokenyard.errors import InputError
from tokenyard.routing import Move, Placement, balance, imbalance, moves, rank_loads
from tokenyard.routing.balancing import _Search


def zipf(num_experts: int, power: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(1e6 / np.arange(1, num_experts + 1) ** power)


def greedy_busiest(load: np.ndarray, world: int, total: int) -> float:
    """The busiest rank of the published algorithm, which asks that copies divide by ranks.

    The expert with the largest load per copy gets one more; copies, the heaviest first, go to the least loaded rank
    that has room. Two copies of an expert may meet on a rank there.
    """
    copies = np.ones(len(load))
    for _ in range(total - len(load)):
        copies[(load / copies).argmax()] += 1
    shares = sorted(np.repeat(load / copies, copies.astype(int)), reverse=True)
    ranks = [[0.0, 0] for _ in range(world)]
    for share in shares:
        rank = min((rank for rank in ranks if rank[1] < total // world), key=lambda rank: rank[0])
        rank[0] += share
        rank[1] += 1
    return max(rank[0] for rank in ranks)


LOADS = {
    "uniform": np.random.default_rng(1).poisson(1000, 256).astype(float),
    "zipf 0.6": zipf(256, 0.6),
    "zipf 1.2": zipf(256, 1.2),
    "one hot expert": np.r_[100_000.0, np.full(255, 1000.0)],
    "nothing": np.zeros(256),
}


@pytest.mark.parametrize("copies", [0, 64, 256])
@pytest.mark.parametrize("name", LOADS)
def test_never_worse_than_the_published_algorithm_and_in_time(name, copies):
    load, present = LOADS[name], Placement.contiguous(256, 64)
    start = time.thread_time()
    found = balance(load, present, copies=copies)
    balanced = time.thread_time()
    published = greedy_busiest(load, 64, 256 + copies)
    ended = time.thread_time()
    assert max(rank_loads(load, found)) <= published * (1 + 1e-9)
    assert max(map(len, found.table)) <= -(-(256 + copies) // 64)
    assert sum(map(len, found.table)) <= 256 + copies
    assert balanced - start < 20 * (ended - balanced) + 0.01, "slower than 20 times the published algorithm"


# The choices that fell on the experts of the model that ships, layer by layer: `tokenyard run --record`.
SHIPPED = [
    [702, 99, 265, 249, 645, 841, 341, 305, 479, 835, 700, 381, 558, 857, 487, 488],
    [16, 858, 434, 743, 64, 135, 207, 653, 445, 349, 635, 703, 749, 853, 580, 808],
    [553, 817, 333, 85, 339, 856, 694, 717, 493, 82, 463, 434, 464, 586, 600, 716],
    [538, 389, 170, 406, 406, 324, 460, 330, 369, 568, 823, 753, 603, 803, 828, 462],
]


@pytest.mark.parametrize("world", [3, 4, 8])
def test_never_worse_on_the_model_that_ships(world):
    for load in SHIPPED:
        for copies in (-len(load) % world, -len(load) % world + world):
            found = balance(load, Placement.contiguous(len(load), world), copies=copies)
            published = greedy_busiest(np.asarray(load, float), world, len(load) + copies)
            assert max(rank_loads(load, found)) <= published * (1 + 1e-9)


def test_sums_that_round_otherwise_on_renumbered_ranks_are_as_good():
    load, present = np.random.default_rng(241).lognormal(0, 2, 13), Placement.contiguous(13, 3)
    found = balance(load, present, copies=2)
    assert max(rank_loads(load, found)) <= greedy_busiest(load, 3, 15) * (1 + 1e-9)


def test_two_hot_layers_each_get_a_placement_of_their_own():
    loads = [np.full(64, 10.0), np.full(64, 10.0)]
    loads[0][3], loads[1][60] = 500.0, 500.0
    for load in loads:
        found = balance(load, Placement.contiguous(64, 8), copies=8)
        assert max(rank_loads(load, found)) <= greedy_busiest(load, 8, 72) * (1 + 1e-9)
        assert len(found.owners(int(load.argmax()))) > 1


def test_a_load_that_drifts_moves_fewer_experts_than_packing_anew():
    rng = np.random.default_rng(4)
    load, near, moved, anew = zipf(64, 0.8), Placement.contiguous(64, 8), 0, 0
    for _ in range(8):
        load = load * rng.uniform(0.9, 1.1, size=64)
        found = balance(load, near, copies=8)
        assert max(rank_loads(load, found)) <= greedy_busiest(load, 8, 72) * (1 + 1e-9)
        packed = balance(load, Placement.round_robin(64, 8), copies=8)
        moved, anew, near = moved + len(moves(near, found)), anew + len(moves(near, packed)), found
    assert moved < anew / 2


def test_zipf_on_eight_ranks_is_even_after_one_step():
    load = zipf(64, 1.2)
    assert imbalance(rank_loads(load, balance(load, Placement.contiguous(64, 8), copies=8))) < 1.05


def rows_by_rank(placement: Placement, ids_NK: torch.Tensor) -> list[int]:
    """The choices that each rank gets, of tokens that all ranks bring as many of."""
    parts = ids_NK.chunk(placement.world)
    ranks = [placement.resolve(ids_TK, source)[0] for source, ids_TK in enumerate(parts)]
    return torch.cat(ranks).flatten().bincount(minlength=placement.world).tolist()


@pytest.mark.parametrize("power", [2.0, 3.0])
@pytest.mark.parametrize(("top_k", "copies"), [(4, 8), (4, 64), (8, 16)])
def test_copies_get_what_they_are_promised_where_few_experts_have_nearly_all_the_load(power, top_k, copies):
    draw = torch.Generator().manual_seed(1)
    chances_E = torch.from_numpy(zipf(64, power))
    ids_NK = torch.multinomial(chances_E.expand(8192, 64), top_k, generator=draw)
    load = ids_NK.flatten().bincount(minlength=64).numpy().astype(float)
    found = balance(load, Placement.contiguous(64, 8), copies=copies)
    busiest = max(rows_by_rank(found, ids_NK))
    assert busiest <= max(rank_loads(load, found)) * 1.05
    assert busiest <= greedy_busiest(load, 8, 64 + copies) * 1.05


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sizes_give_a_legal_placement(data):
    num_experts, world = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 7))
    load = data.draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    copies = data.draw(st.integers(0, num_experts * (world - 1)))
    # Each rank has room for its share, and some for more.
    share = -(-(num_experts + copies) // world)
    slots = data.draw(st.lists(st.integers(share, share + 3), min_size=world, max_size=world))
    present = data.draw(st.sampled_from([Placement.contiguous, Placement.round_robin]))(num_experts, world)
    found = balance(
        load, present, copies=copies, slots=slots
    )  # a Placement checks that every expert has an owner
    assert (found.num_experts, found.world) == (num_experts, world)
    assert all(len(held) <= room for held, room in zip(found.table, slots, strict=True))
    assert sum(map(len, found.table)) <= num_experts + copies
    assert max(rank_loads(load, found)) <= max(rank_loads(load, present)) + 1e-9


def test_a_placement_that_is_as_good_stays():
    present = Placement.explicit(4, [[3, 0], [1, 2]])
    assert balance([1, 1, 1, 1], present) == present


def test_experts_that_stay_keep_their_place():
    present = Placement.explicit(6, [[0, 1, 2], [3, 4, 5]])
    found = balance([8, 8, 1, 1, 1, 1], present)
    for before, after in zip(present.table, found.table, strict=True):
        for place, expert in enumerate(before):
            assert expert not in after or after.index(expert) == place
    assert rank_loads([8, 8, 1, 1, 1, 1], found) == [10.0, 10.0]


def test_memory_limits_of_each_rank_hold():
    found = balance([1.0] * 6, Placement.contiguous(6, 3), slots=[1, 2, 3])
    assert [len(held) for held in found.table] == [1, 2, 3]


def test_copies_come_from_the_same_host():
    present = Placement.explicit(4, [[0, 1], [2, 3], [0, 2], [1, 3]])
    wanted = Placement.explicit(4, [[0, 1], [2, 3, 0], [0, 2], [1, 3, 0]])
    assert moves(present, wanted, hosts=[0, 0, 1, 1]) == (
        Move(expert=0, source=0, target=1),
        Move(expert=0, source=2, target=3),
    )
    assert moves(present, wanted, hosts=[0, 1, 0, 1])[1] == Move(expert=0, source=0, target=3)


def test_fewer_experts_cross_between_hosts_where_hosts_are_known():
    load = zipf(32, 0.7, seed=3)
    present, hosts = Placement.contiguous(32, 8), [0] * 4 + [1] * 4

    def crossing(known):
        found = balance(load, present, copies=8, hosts=known)
        return sum(hosts[move.source] != hosts[move.target] for move in moves(present, found, hosts))

    assert crossing(hosts) <= crossing(None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"load_E": [1, 2, 3]}, "a load of"),
        ({"load_E": [1, 2, 3, -1]}, "a load of"),
        ({"load_E": [1, 2, 3, float("nan")]}, "a load of"),
        ({"load_E": "abcd"}, "a load of"),
        ({"slots": 1}, "4 copies of 4 experts on ranks with room for 2"),
        ({"copies": -1}, "3 copies of 4 experts"),
        ({"slots": [2, 2, 2]}, "slots="),
        ({"slots": [4, -1]}, "slots="),
        ({"slots": [2, 2.5]}, "slots="),
        ({"hosts": [0]}, "hosts="),
    ],
)
def test_what_does_not_fit_is_refused(arguments, said):
    with pytest.raises(InputError) as raised:
        balance(**{"load_E": [1, 2, 3, 4], "present": Placement.contiguous(4, 2), **arguments})
    assert said in str(raised.value)
    assert "fix:" in str(raised.value)


# -- What it gains and costs -------------------------------------------------------------------------------


def recorded(ids, counts, num_experts=4) -> RecordedRoutes:
    import torch

    ids_NK = torch.tensor(ids, dtype=torch.int32)
    return RecordedRoutes(
        layer="moe",
        ids_NK=ids_NK,
        weights_NK=torch.ones(ids_NK.shape),
        counts_SW=torch.tensor(counts, dtype=torch.int32),
        num_experts=num_experts,
        hidden_size=10,
        intermediate_size=20,
        expert_bytes=1200,
    )


def test_a_forecast_counts_rows_bytes_and_steps_by_hand():
    # Two ranks, two steps. Experts 0 and 1 live on rank 0, and get 3 + 3 of 8 choices; 2 and 3 get one each.
    routes = recorded([[0, 1], [0, 1], [0, 1], [2, 3]], [[1, 1], [2, 0]])
    (layer,) = forecast([routes], 2, copies=0, bytes_per_s=1200.0, flops_per_s=6 * 10 * 20.0)
    assert (layer.rows_before, layer.before) == ([6, 2], 1.5)
    assert (layer.rows_after, layer.after) == ([4, 4], 1.0)
    assert (layer.experts_moved, layer.moved_bytes) == (2, 2400)
    assert layer.move_s == 1.0  # each rank sends one expert and receives one
    assert layer.saved_s == 1.0  # two rows less, a second each, in two steps
    assert steps_to_pay([layer]) == 1
    assert layer.as_dict()["placement"]["num_experts"] == 4


def test_a_move_that_gains_nothing_never_pays():
    present = Placement.contiguous(2, 2)
    same = {"layer": "moe", "present": present, "placement": present, "moved_between_hosts": 0}
    rows = {"rows_before": [1, 1], "rows_after": [1, 1]}
    moved = LayerForecast(**same, **rows, experts_moved=1, moved_bytes=8, move_s=1.0, saved_s=0.0)
    still = LayerForecast(**same, **rows, experts_moved=0, moved_bytes=0, move_s=0.0, saved_s=0.0)
    assert steps_to_pay([moved]) is None
    assert steps_to_pay([still]) == 0


def test_a_rank_may_have_room_for_no_expert():
    assert balance([1.0] * 4, Placement.contiguous(4, 2), slots=[4, 0]).table == ((0, 1, 2, 3), ())


# -- The steps of the search, by hand ----------------------------------------------------------------------


def search_from(load, table, *, copies=None, slots=None, hosts=None, allow_lost=False):
    present = Placement(num_experts=len(load), table=table, allow_lost=allow_lost)
    return _Search.of(load, present, copies=copies, slots=slots, hosts=hosts)


def matrix(num_experts, table):
    return np.array([[expert in held for expert in range(num_experts)] for held in table])


def held(holds):
    return [np.flatnonzero(row).tolist() for row in holds]


def test_of_too_many_copies_the_busiest_ranks_drop_theirs():
    """Ranks 0 and 1 hold expert 0; rank 0 has 8 of load, rank 1 has 5. Expert 2 is on the idlest rank, and stays."""
    table = [[0, 1], [0, 3], [2]]
    search = search_from([3, 5, 1, 2], table, copies=0, slots=2)
    assert held(search.adapt(search.copies_E)) == [[1], [0, 3], [2]]
    assert held(search.present) == table


def test_a_rank_with_less_room_than_before_gives_away_what_does_not_fit():
    search = search_from([1, 1, 1, 1], [[0, 1, 2], [3]], slots=2)
    assert held(search.adapt(search.copies_E)) == [[0, 1], [2, 3]]


def test_where_ranks_with_room_hold_the_expert_they_take_another_one_and_loads_follow():
    """Copies: 3 of expert 0 and 2 of expert 2, of 2 of load each. Only rank 1 has room, and it holds expert 0."""
    search = search_from([6, 1, 4], [[2], [0], [0, 1, 2]], copies=3, slots=[1, 2, 3])
    assert search.copies_E.tolist() == [3, 1, 2]
    holds, loads = search.present.copy(), np.array([2.0, 2.0, 5.0])
    search._place(holds, loads, 0, 2.0)
    assert held(holds) == [[0], [0, 2], [0, 1, 2]]
    assert loads.tolist() == [2.0, 4.0, 5.0]


def test_a_new_copy_goes_where_the_shares_of_copies_are_least():
    """Rank 1 holds one of two copies of expert 1, half of 6; rank 2 the only one of expert 2, all of 4."""
    search = search_from([8, 6, 4], [[0, 1], [1], [2]], copies=2, slots=2)
    assert held(search.adapt(search.copies_E)) == [[0, 1], [0, 1], [2]]


def test_a_placement_as_good_as_the_greedy_one_is_left_for_a_better_one():
    """The greedy one has 7 and 5 of load, as the present one has; 3 + 3 and 2 + 2 + 2 are even."""
    load, present = [3, 3, 2, 2, 2], Placement.explicit(5, [[0, 2, 4], [1, 3]])
    assert rank_loads(load, balance(load, present)) == [6.0, 6.0]


def test_a_small_gain_counts_only_on_the_way_to_a_goal():
    """A quarter of 1000.5 is less than 0.05%. At the goal nothing moves."""
    table = [[0, 1, 2], [3]]
    search = search_from([1000, 0.25, 0.25, 1000], table, slots=3)
    assert held(search.swap(search.present)) == table
    assert held(search.swap(search.present, goal=1000.5)) == table
    assert held(search.swap(search.present, goal=1000.25)) == [[0, 2], [1, 3]]
    assert held(search.present) == table


def test_no_rank_takes_back_an_expert_that_it_holds():
    """Expert 1 for the copy of expert 0 would be 4 and 9 of load instead of 10 and 3, with a copy less."""
    search = search_from([4, 8, 1], [[0, 1], [0, 2]], slots=2)
    assert held(search.swap(search.present)) == [[0, 1], [0, 2]]


def test_the_first_expert_is_swapped_as_any_other():
    """5 for 1 gives 5 and 5; 4 for 1 would give 6 and 4. No rank has room."""
    search = search_from([1, 5, 4], [[1, 2], [0]], slots=[2, 1])
    assert held(search.swap(search.present, goal=6.0)) == [[0, 2], [1]]


def test_shares_go_where_most_of_them_is_and_then_to_the_same_host():
    """Experts 0 and 2 are both on host 0: they go to rank 0 before 1 and 4 do, of which rank 2 holds as much."""
    present = [[0, 1], [2, 3], [4, 5], [6, 7]]
    search = search_from([1] * 8, present, hosts=[0, 0, 1, 1])
    packed = matrix(8, [[0, 2], [1, 4], [3, 5], [6, 7]])
    assert held(search.renumber(packed)) == [[0, 2], [3, 5], [1, 4], [6, 7]]


def test_what_a_rank_holds_counts_more_than_what_its_host_holds():
    """Of experts 0 to 4 rank 0 holds two; the other host holds three, on three ranks."""
    search = search_from([1] * 6, [[0, 1], [5], [2], [3], [4]], hosts=[0, 0, 1, 1, 1])
    packed = matrix(6, [[5], [0, 1, 2, 3, 4], [], [], []])
    assert held(search.renumber(packed)) == [[0, 1, 2, 3, 4], [5], [], [], []]


def test_moves_between_hosts_and_between_ranks_are_counted():
    search = search_from([1] * 4, [[0], [1], [2], [3]], hosts=[0, 0, 1, 1])
    assert search.moved(matrix(4, [[1], [3], [2], [0]])) == (2, 3)
    assert search.moved(search.present) == (0, 0)


def test_a_placement_serves_if_it_fits_and_nobody_is_missing():
    search = search_from([1, 1, 0], [[0], [1]], copies=0, slots=2, allow_lost=True)
    assert not search.serves(search.present)  # nobody holds expert 2
    assert search.serves(matrix(3, [[0, 2], [1]]))
    assert not search.serves(matrix(3, [[0, 2], [1, 2]]))  # a copy more than asked for
    assert not search.serves(matrix(3, [[0, 1, 2], []]))  # more than rank 0 has room for


def test_nothing_moves_where_nothing_was_counted():
    present = Placement.contiguous(2, 2)
    assert balance([0, 0], present, copies=1, slots=2) == present


def test_one_rank_holds_an_expert_once_however_much_room_it_has():
    assert balance([1.0, 2.0], Placement.contiguous(2, 1), copies=1, slots=3).table == ((0, 1),)


def test_a_load_below_one_is_a_load():
    assert imbalance([0.5, 0.25]) == 0.5 / 0.375
    assert imbalance([0, 0]) == 1.0


def test_a_load_that_is_no_number_is_refused_for_one_expert_too():
    with pytest.raises(InputError, match="a load of"):
        balance(["a"], Placement.contiguous(1, 1))
