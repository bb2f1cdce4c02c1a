"""What counts as a leak: the line through the samples, and what comes back to where it was."""

import random

import pytest

from tokenyard_lab.soaking.measuring import Sample
from tokenyard_lab.soaking.verdict import MB, fit, judge

COUNTS = {"descriptors": 100, "sockets": 40, "threads": 30, "processes": 7}


def samples(minutes=30, every=5.0, memory=lambda seconds: 0.0, noise=2 * MB, **changes):
    """Samples with a noise of 2 MB; `memory` and what else is given are added, as functions of the seconds."""
    chance = random.Random(0)
    made = []
    for number in range(int(minutes * 60 / every)):
        seconds = number * every
        held = int(600 * MB + chance.uniform(-noise, noise) + memory(seconds))
        counts = {
            name: count + int(changes.get(name, lambda s: 0)(seconds)) for name, count in COUNTS.items()
        }
        made.append(
            Sample(
                seconds=seconds,
                episode=number,
                memory=held,
                lasting_memory=held // 2,
                shared_memory=1000,
                round_trips_per_s=50.0,
                device_memory=None,
                **counts,
            )
        )
    return made


def kinds(found):
    return [(finding.kind, finding.what.partition(" grows")[0].partition(":")[0]) for finding in found]


def test_what_only_wavers_is_no_leak():
    growth, findings = judge(samples())
    assert findings == []
    assert abs(growth["memory"].value) < 0.5 * MB
    assert growth["memory"].low < 0 < growth["memory"].high
    assert set(growth) == {"memory", "lasting_memory", "shared_memory"}  # there is no GPU


def test_growth_of_more_than_a_megabyte_in_ten_minutes_is_found():
    growth, findings = judge(samples(memory=lambda seconds: 1.5 * MB * seconds / 600))
    assert kinds(findings) == [("memory", "memory")]
    assert growth["memory"].value == pytest.approx(1.5 * MB, rel=0.2)
    assert "expected less than 1" in findings[0].what


def test_growth_below_that_is_none():
    assert judge(samples(memory=lambda seconds: 0.6 * MB * seconds / 600))[1] == []


def test_the_warm_up_does_not_count():
    assert judge(samples(memory=lambda seconds: min(seconds, 500) * MB))[1] == []


def test_odd_samples_do_not_count():
    # In every tenth sample, somebody had just come.
    assert judge(samples(memory=lambda seconds: 300 * MB * (seconds % 50 == 0)))[1] == []


def test_a_short_soak_tells_large_leaks_only():
    assert judge(samples(minutes=1, memory=lambda seconds: 0.05 * MB * seconds))[1] == []
    found = judge(samples(minutes=1, memory=lambda seconds: MB * seconds))[1]
    assert ("memory", "memory") in kinds(found)


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_opened_and_not_closed_is_found(name):
    findings = judge(samples(**{name: lambda seconds: seconds // 300}))[1]
    assert kinds(findings) == [("leak", name)]


def test_what_comes_and_goes_is_no_leak():
    assert judge(samples(**{name: lambda seconds: (seconds // 20) % 3 for name in COUNTS}))[1] == []


def test_too_few_samples_say_nothing():
    assert judge(samples(minutes=0.5, memory=lambda seconds: 100 * MB * seconds)) == ({}, [])


def test_the_fit_is_over_all_of_the_time():
    growth = fit(list(range(3000)), [2.0 * seconds for seconds in range(3000)])
    assert growth.value == pytest.approx(1200)
    assert growth.low == pytest.approx(growth.high)
    assert growth.seconds > 2900
