"""Intervals hold the true share as often as they say."""

import random

from tokenyard_lab.evaluation.intervals import paired_difference, wilson


def test_a_share_is_inside_of_its_interval_about_19_times_in_20():
    draw = random.Random(1)
    for share, total in ((0.97, 400), (0.5, 60), (0.2, 200)):
        hits = 0
        for _ in range(600):
            found = wilson(sum(draw.random() < share for _ in range(total)), total)
            hits += found.low <= share <= found.high
        assert 0.92 < hits / 600 < 0.985


def test_a_paired_difference_is_inside_of_its_interval_about_19_times_in_20():
    draw = random.Random(2)
    hits = 0
    for _ in range(600):
        theirs = [draw.random() < 0.95 for _ in range(400)]
        ours = [right and draw.random() >= 0.03 for right in theirs]  # loses 3% of what they have
        found = paired_difference(ours, theirs)
        hits += found.low <= -0.95 * 0.03 <= found.high
    assert 0.91 < hits / 600 < 0.99


def test_pairs_are_known_better_than_shares():
    theirs = [n % 20 != 0 for n in range(2000)]
    ours = [right and n % 400 != 1 for n, right in enumerate(theirs)]
    paired, alone = paired_difference(ours, theirs), wilson(sum(ours), 2000)
    assert paired.high - paired.low < (alone.high - alone.low) / 3
    assert paired.high < 0


def test_corners():
    assert wilson(0, 50).low == 0.0 < wilson(0, 50).high
    assert wilson(50, 50).high == 1.0 > wilson(50, 50).low
    assert paired_difference([True], [True]).value == 0.0
