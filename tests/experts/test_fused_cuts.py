"""How products are cut into tiles: pure functions, whose table may change and whose properties may not."""

import itertools

import pytest

from tokenyard.experts.fused.cuts import (
    Cut,
    Cuts,
    PackedCut,
    choose_cuts,
    choose_packed_cuts,
    expected_pairs,
)
from tokenyard.experts.fused.packing import LARGEST_SCALE
from tokenyard.formats import WEIGHT_FORMATS

PAIRS = [0, 1, 7, 8, 31, 100, 256, 1000, 5000, 8192, 100_000, 3e6]
EXPERTS = [1, 8, 32, 48, 128, 384]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("rows", [None, "bf16"])
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_plain_cuts(weights, rows):
    for experts in EXPERTS:
        chosen = [choose_cuts(pairs, experts, weights, rows=rows) for pairs in PAIRS]
        assert chosen == [choose_cuts(pairs, experts, weights, rows=rows) for pairs in PAIRS]
        for cuts in chosen:
            for cut in (cuts.inner, cuts.result):
                assert isinstance(cut, Cut)
                assert all(map(is_power_of_two, (cut.out, cut.tile, cut.block, cut.warps)))
                assert cut.out >= 16  # gate and up, eight of each
                assert cut.block >= 16
                assert cut.tail == 0 or (is_power_of_two(cut.tail) and cut.tail < cut.tile)
        tiles = [cuts.inner.tile for cuts in chosen]
        assert tiles == sorted(tiles)  # more rows, wider tiles
        assert tiles[0] < tiles[-1]
    if weights == "fp8_block128":
        # A scale a step, or two where rows have them, too.
        assert all(cut.block <= (256 if rows is None else 128) for c in chosen for cut in (c.inner, c.result))
        assert all(cuts.can_split for cuts in chosen)


@pytest.mark.parametrize("weights", LARGEST_SCALE)
def test_packed_cuts(weights):
    for experts in EXPERTS:
        chosen = [choose_packed_cuts(pairs, experts, weights) for pairs in PAIRS]
        for cuts in chosen:
            for cut in (cuts.inner, cuts.result):
                assert isinstance(cut, PackedCut)
                assert cut.warps % 4 == 0  # a warp group, or two
                rows = [sum(widths) for widths in cut.widths]
                assert all(a < b for a, b in itertools.pairwise(rows))
                assert cut.tile == rows[-1]
                for first, second in cut.widths:
                    assert is_power_of_two(first)
                    assert second == 0 or is_power_of_two(second)
        tiles = [cuts.inner.tile for cuts in chosen]
        assert tiles == sorted(tiles)
        assert tiles[0] < tiles[-1]


def test_the_same_load_of_an_expert_has_the_same_cuts():
    for weights in WEIGHT_FORMATS:
        assert choose_cuts(64, 8, weights) == choose_cuts(512, 64, weights)


def test_both_products_have_the_same_rows():
    with pytest.raises(AssertionError):
        Cuts(Cut(64, 16, 128, 4, 3), Cut(64, 32, 128, 4, 3))


def test_digits_are_made_of_whole_blocks():
    whole, half = Cut(256, 128, 128, 8, 3), Cut(128, 128, 128, 8, 3)
    assert Cuts(whole, whole).can_split
    assert Cuts(whole, half).can_split
    assert not Cuts(half, whole).can_split  # half a block of columns
    assert not Cuts(whole, Cut(256, 128, 64, 8, 3)).can_split  # half a block of inputs
    assert Cuts(whole, Cut(256, 128, 128, 8, 3, rows_first=True)).can_split
    assert not Cuts(whole, Cut(128, 128, 128, 8, 3, rows_first=True)).can_split


def test_expected_pairs():
    # All experts are here: every choice is a pair.
    assert expected_pairs(100, 8, 256, 256, all_slots=False) == 800
    assert expected_pairs(100, 8, 256, None, all_slots=False) == 800
    # Of all slots of a workspace some are empty: the share of the experts that are here.
    assert expected_pairs(100, 8, 32, 256, all_slots=True) == 100
    # A row that was received has one expert here for sure.
    for local in (1, 8, 32, 128):
        assert 100 <= expected_pairs(100, 8, local, 256, all_slots=False) <= 800
    assert expected_pairs(0, 8, 32, 256, all_slots=False) == 0
    # A rank without experts may still get slots that are all empty.
    for all_slots in (True, False):
        assert expected_pairs(100, 8, 0, 256, all_slots=all_slots) == 0
        assert expected_pairs(100, 8, 0, None, all_slots=all_slots) == 0
    few, more = (expected_pairs(100, 8, local, 256, all_slots=False) for local in (16, 64))
    assert few < more
