"""How products are cut into tiles: pure functions, whose table may change and whose properties may not."""

import itertools

import pytest

from tokenyard.experts.fused.packing import LARGEST_SCALE
from tokenyard.experts.fused.tile_configs import (
    SPECIALIZED_TILES,
    NumbersTileConfig,
    PackedTileConfig,
    TileConfig,
    TileConfigs,
    choose_packed_tiles,
    choose_tiles,
    expected_pairs,
)
from tokenyard.formats import WEIGHT_FORMATS

PAIRS = [0, 1, 7, 8, 31, 100, 256, 1000, 5000, 8192, 100_000, 3e6]
EXPERTS = [1, 8, 32, 48, 128, 384]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("rows", [None, "bf16"])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_plain_tiles(weights, rows):
    for experts in EXPERTS:
        chosen = [choose_tiles(pairs, experts, weights, rows=rows) for pairs in PAIRS]
        assert chosen == [choose_tiles(pairs, experts, weights, rows=rows) for pairs in PAIRS]
        for tiles in chosen:
            for config in (tiles.inner, tiles.result):
                assert isinstance(config, TileConfig)
                assert all(map(is_power_of_two, (config.out, config.tile, config.block, config.warps)))
                assert config.out >= 16  # gate and up, eight of each
                assert config.block >= 16
                assert config.tail == 0 or (is_power_of_two(config.tail) and config.tail < config.tile)
        rows_of_a_tile = [tiles.inner.tile for tiles in chosen]
        assert rows_of_a_tile == sorted(rows_of_a_tile)  # more rows, wider tiles
        assert rows_of_a_tile[0] < rows_of_a_tile[-1]
    if weights == "fp8_block128":
        # A scale a step, or two where rows have them, too.
        assert all(
            config.block <= (256 if rows is None else 128) for c in chosen for config in (c.inner, c.result)
        )
        assert all(tiles.can_split for tiles in chosen)


@pytest.mark.parametrize("weights", ["bf16", "fp16", "fp8_block128"])
def test_tiles_of_specialized_warps(weights):
    """Both products of a layer have them, or none; where rows or memory do not allow it, plain ones of as many rows."""
    for experts in EXPERTS:
        chosen = [choose_tiles(pairs, experts, weights, specialized=True) for pairs in PAIRS]
        for tiles in chosen:
            assert tiles.specialized == tiles.inner.specialized == tiles.result.specialized
            assert not tiles.specialized or tiles.inner.tile in SPECIALIZED_TILES
            assert weights != "fp8_block128" or tiles.can_split
        rows_of_a_tile = [tiles.inner.tile for tiles in chosen]
        assert rows_of_a_tile == sorted(rows_of_a_tile)
        assert chosen[-1].specialized
        # Batches of any size have these tiles, where bits must not depend on the batch: none of them is transposed.
        assert chosen[-1].without_tails().inner.tail == 0


@pytest.mark.parametrize("weights", LARGEST_SCALE)
def test_packed_tiles(weights):
    for experts in EXPERTS:
        chosen = [choose_packed_tiles(pairs, experts, weights) for pairs in PAIRS]
        for tiles in chosen:
            for config in (tiles.inner, tiles.result):
                assert isinstance(config, PackedTileConfig | NumbersTileConfig)
                if isinstance(config, PackedTileConfig):
                    assert config.warps % 4 == 0  # a warp group, or two
                    widths = config.widths
                else:
                    assert is_power_of_two(config.run)
                    widths = [(rows, 0) for rows in config.widths]
                rows = [sum(runs) for runs in widths]
                assert all(a < b for a, b in itertools.pairwise(rows))
                assert config.tile == rows[-1]
                for first, second in widths:
                    assert is_power_of_two(first)
                    assert second == 0 or is_power_of_two(second)
        rows_of_a_tile = [tiles.inner.tile for tiles in chosen]
        assert rows_of_a_tile == sorted(rows_of_a_tile)
        assert rows_of_a_tile[0] < rows_of_a_tile[-1]


def test_the_same_load_of_an_expert_has_the_same_tiles():
    for weights in WEIGHT_FORMATS:
        assert choose_tiles(64, 8, weights) == choose_tiles(512, 64, weights)


def test_both_products_have_the_same_rows():
    with pytest.raises(AssertionError):
        TileConfigs(TileConfig(64, 16, 128, 4, 3), TileConfig(64, 32, 128, 4, 3))


def test_split_numbers_are_made_of_whole_blocks():
    whole, half = TileConfig(256, 128, 128, 8, 3), TileConfig(128, 128, 128, 8, 3)
    assert TileConfigs(whole, whole).can_split
    assert TileConfigs(whole, half).can_split
    assert not TileConfigs(half, whole).can_split  # half a block of columns
    assert not TileConfigs(whole, TileConfig(256, 128, 64, 8, 3)).can_split  # half a block of inputs
    assert TileConfigs(whole, TileConfig(256, 128, 128, 8, 3, rows_first=True)).can_split
    assert not TileConfigs(whole, TileConfig(128, 128, 128, 8, 3, rows_first=True)).can_split


def test_expected_pairs():
    # All experts are here: every choice is a pair.
    assert expected_pairs(100, 8, 256, 256, may_be_empty=False) == 800
    assert expected_pairs(100, 8, 256, None, may_be_empty=False) == 800
    # Of all slots of a workspace some are empty: the share of the experts that are here.
    assert expected_pairs(100, 8, 32, 256, may_be_empty=True) == 100
    # A row that was received has one expert here for sure.
    for local in (1, 8, 32, 128):
        assert 100 <= expected_pairs(100, 8, local, 256, may_be_empty=False) <= 800
    assert expected_pairs(0, 8, 32, 256, may_be_empty=False) == 0
    # A rank without experts may still get slots that are all empty.
    for may_be_empty in (True, False):
        assert expected_pairs(100, 8, 0, 256, may_be_empty=may_be_empty) == 0
        assert expected_pairs(100, 8, 0, None, may_be_empty=may_be_empty) == 0
    few, more = (expected_pairs(100, 8, local, 256, may_be_empty=False) for local in (16, 64))
    assert few < more
