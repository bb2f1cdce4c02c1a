"""A rank is lost while some wait in the exchange, and others in its last word: all of them name that rank alone."""

import time

import pytest

import tokenyard as ty
from tests.models import batch, build, spec
from tokenyard.exchange.announcement import Phase

LOST = 2


def falls_asleep_between_two(group):
    """The lost rank tells rank 0 of its results, and never tells rank 1."""
    layer = spec()
    plan = ty.plan([layer], group, exchange="one_sided", paranoid=True)
    signals = plan.exchange.workspace.signals
    tell = signals.tell

    def tell_some(target, announcement):
        if announcement.phase is Phase.COMBINE and target == 1:
            time.sleep(3 * group.deadline + 2)
        tell(target, announcement)

    if group.rank == LOST:
        signals.tell = tell_some
    started = time.monotonic()
    with pytest.raises(ty.PeerLost) as lost:
        build(plan, layer.name)(*batch(layer, 3, seed=group.rank))
    return lost.value.peers, lost.value.phase, time.monotonic() - started < 2 * group.deadline + 4


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_who_gave_up_first_is_not_blamed(ranks):
    found = ty.launch(3, falls_asleep_between_two, ranks=ranks, deadline=1.5)
    assert found[0] == ((LOST,), "the last word of combine", True)
    assert found[1] == ((LOST,), "combine", True)
