"""The kernels that sort pairs by expert and cut them into tiles, against their twin in torch."""

import pytest
import torch

from tests.exchange.interpreter import install, only_without_gpu
from tokenyard.experts.fused import launch
from tokenyard.experts.fused.kernels import twins

pytestmark = only_without_gpu
install()


def drawn(rows: int, top_k: int, experts: int, routing: str, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    ids_RK = torch.randint(-1, experts, (rows, top_k), generator=draw)
    if routing == "one expert":
        ids_RK.fill_(experts - 1)
    elif routing == "skewed":  # half of all pairs to expert 0, some experts get nothing
        ids_RK = torch.where(torch.rand(ids_RK.shape, generator=draw) < 0.5, 0, ids_RK // 2 * 2)
    elif routing == "sparse":
        ids_RK[torch.rand(ids_RK.shape, generator=draw) < 0.9] = -1
    elif routing == "nobody":
        ids_RK.fill_(-1)
    elif routing == "beyond":  # ids that no expert here has are nobody's
        ids_RK[::3] = experts + 5
    return ids_RK.int()


def agree(ids_RK: torch.Tensor, experts: int, tile: int) -> None:
    found = launch.sort_on_device(ids_RK, experts, tile, early=False)
    order_N, tiles = twins.sort_pairs(ids_RK, experts, tile)
    how_many = int(found.how_many)
    assert how_many == len(tiles) <= found.max_tiles
    *by_field, done = found.tiles[: 6 * found.max_tiles].view(6, found.max_tiles)[:, :how_many]
    assert torch.stack(by_field).T.tolist() == tiles.tolist()
    # Products count from zero: what is done of each tile and expert, and the items that blocks have taken.
    assert done.tolist() == [0] * how_many
    many, *taken = found.tiles[6 * found.max_tiles :].tolist()
    assert (many, taken[:2]) == (how_many, [0, 0])
    tiles_of_experts = torch.bincount(tiles[:, 0], minlength=experts).tolist()
    assert taken[2:] == [number for many in tiles_of_experts for number in (many, 0)]
    assert found.order_N[: len(order_N)].tolist() == order_N.tolist()


@pytest.mark.parametrize("routing", ["any", "one expert", "skewed", "sparse", "nobody", "beyond"])
@pytest.mark.parametrize(("rows", "top_k", "experts", "tile"), [(1, 1, 1, 8), (37, 3, 5, 16), (60, 8, 33, 8)])
def test_one_chunk(rows, top_k, experts, tile, routing):
    assert rows * top_k <= launch.CHUNK
    agree(drawn(rows, top_k, experts, routing), experts, tile)


@pytest.mark.parametrize("rows", [1, 5, 16, 20, 300])
def test_kernels_are_compiled_for_one_kind_of_numbers(rows):
    """Triton compiles a kernel anew for a number that is 1, and for numbers and addresses that 16 divides, or not."""
    found = launch.sort_on_device(drawn(rows, 3, 5, "any"), 5, 16, early=False)
    assert found.max_tiles % 16 == 0
    assert found.how_many.data_ptr() % 16 == 0


@pytest.mark.parametrize("routing", ["any", "one expert", "skewed", "sparse"])
@pytest.mark.parametrize(("rows", "top_k"), [(1025, 1), (700, 3), (1500, 5)])
def test_chunks_that_are_counted_first(rows, top_k, routing):
    """Two, three and eight chunks: fewer than the parts that share them, and more."""
    assert rows * top_k > launch.CHUNK
    agree(drawn(rows, top_k, 3, routing, seed=rows), 3, 64)


def test_more_chunks_than_are_read_at_a_time():
    agree(drawn(17 * launch.CHUNK + 3, 1, 2, "skewed"), 2, 128)


def test_many_experts_in_many_chunks():
    """An odd number of experts, most of whose tiles are written by other blocks than the first."""
    agree(drawn(3000, 3, 77, "any"), 77, 16)


def test_more_tiles_of_an_expert_than_are_written_at_a_time():
    agree(drawn(300, 1, 2, "one expert"), 2, 8)
    agree(drawn(1100, 1, 2, "one expert"), 2, 8)
