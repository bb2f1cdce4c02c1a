"""A rank is lost while some wait in the exchange, and others in its last word: all of them name that rank alone."""

import time

import pytest

import tokenyard as ty
from tests.models import WATCHED, batch, build, spec
from tokenyard.exchange.announcement import Phase

LOST = 2
# Seconds: of a wait in the exchange, and of one in the last word. Rank 1 gives up first, on a busy machine too.
SHORT, LONGER = 1.0, 4.0


def falls_asleep_between_two(group, folder):
    """The lost rank tells rank 0 of its results, and does not tell rank 1 before both have raised."""
    layer = spec()
    plan = ty.plan([layer], group, exchange="one_sided", paranoid=True)
    signals = plan.exchange.transport.inner.workspace.signals
    tell = signals.tell

    def tell_some(target, announcement):
        if announcement.phase is Phase.COMBINE:  # the dispatch took as long as it took
            signals.deadline, group.deadline = SHORT, LONGER
            until = time.monotonic() + 60
            while (group.rank, target) == (LOST, 1) and time.monotonic() < until:
                if len(list(folder.iterdir())) == 2:
                    break
                time.sleep(0.02)
        tell(target, announcement)

    signals.tell = tell_some
    with pytest.raises(ty.PeerLost) as lost:
        build(plan, layer.name)(*batch(layer, 3, seed=group.rank))
    (folder / str(group.rank)).touch()
    return lost.value.peers, lost.value.phase, lost.value.waited < 30


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_who_gave_up_first_is_not_blamed(ranks, tmp_path):
    found = ty.launch(3, falls_asleep_between_two, tmp_path, ranks=ranks, deadline=60)
    assert found[0] == ((LOST,), "the end of combine", True)
    assert found[1] == ((LOST,), "combine", True)


def leaves_before_the_last_word(group, exchange):
    """The lost rank has brought its results home, and says no last word."""
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    gather = group.all_gather

    def gather_but_the_last_word(mine, *, phase):
        if group.rank == LOST and phase == "the end of combine":
            raise ZeroDivisionError
        return gather(mine, phase=phase)

    group.all_gather = gather_but_the_last_word
    try:
        build(plan, layer.name)(*batch(layer, 3, seed=group.rank))
    except (ty.PeerLost, ZeroDivisionError) as error:
        return getattr(error, "peers", None), getattr(error, "phase", None)
    return None


@pytest.mark.parametrize("exchange", WATCHED)
def test_who_says_no_last_word_is_lost(exchange):
    found = ty.launch(3, leaves_before_the_last_word, exchange, deadline=20)
    assert found == [((LOST,), "the end of combine")] * 2 + [(None, None)]
