"""Flags, as the kernels publish them and wait for them, run by Triton's interpreter."""

import pytest
import torch

from tests.exchange import interpreter
from tests.exchange.virtual_ranks import VirtualRanks, make_batch, make_exchange_spec
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports.one_sided.cuda.control import (
    COMBINED,
    ROUND,
    STATE,
    STATUS,
    VERDICT,
    Trouble,
)
from tokenyard.exchange.transports.one_sided.kernels import flags

pytestmark = interpreter.only_without_gpu
interpreter.install()


@pytest.fixture
def clock(monkeypatch):
    """A GPU's clock, in nanoseconds: a millisecond passes from one look to the next."""
    looks = iter(range(10**6))
    tl = flags.tl
    monkeypatch.setattr(flags, "globaltimer", lambda: tl.full([], next(looks) * 10**6, tl.int64))


def test_meeting_publishes_round_layer_phase_and_failure():
    yard = VirtualRanks(make_exchange_spec(3))
    for _ in range(2):
        for phase in Phase:
            yard.launchers[1].signal_and_wait(77, phase, waits=False)
        yard.launchers[2].signal_and_wait(4095, Phase.COMBINE, fails=True, waits=False)
    for rank in range(3):
        for n in (1, 2):
            assert yard.flags(rank, 0, n).tolist() == [0, n << 24 | 77 << 2, 0]
            assert yard.flags(rank, 1, n).tolist() == [0, n << 24 | 77 << 2 | 1, n << 24 | 4095 << 2 | 3]
    assert yard.words(1)[[ROUND, COMBINED]].tolist() == [2, 2]
    assert yard.words(2)[[ROUND, COMBINED]].tolist() == [0, 2]
    assert yard.words(0)[[ROUND, COMBINED]].tolist() == [0, 0]


@pytest.mark.parametrize("trouble", list(Trouble))
def test_nobody_meets_after_a_round_has_failed(trouble):
    yard = VirtualRanks(make_exchange_spec(2))
    yard.words(1)[STATUS] = int(trouble)
    yard.launchers[1].signal_and_wait(5, Phase.DISPATCH, waits=False)
    goes_on = trouble == Trouble.BAD_IDS
    assert yard.flags(0).tolist() == [0, 1 << 24 | 5 << 2 if goes_on else 0]
    assert yard.words(1)[ROUND] == int(goes_on)


def test_who_comes_last_does_not_wait():
    yard = VirtualRanks(make_exchange_spec(2))  # and there is no clock, without the fixture
    yard.launchers[0].signal_and_wait(5, Phase.DISPATCH, waits=False)
    yard.launchers[1].signal_and_wait(5, Phase.DISPATCH)
    assert yard.status(1) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("layer", "fails", "trouble"), [(6, False, Trouble.DRIFTED), (5, True, Trouble.FAILED)]
)
def test_a_rank_that_drifts_or_fails_is_found_by_its_flag(layer, fails, trouble):
    yard = VirtualRanks(make_exchange_spec(3))
    yard.launchers[0].signal_and_wait(5, Phase.DISPATCH, waits=False)
    yard.launchers[2].signal_and_wait(layer, Phase.DISPATCH, fails=fails, waits=False)
    yard.launchers[1].signal_and_wait(5, Phase.DISPATCH)
    assert yard.status(1) == [trouble, 1 << 24 | 5 << 2, 0b100, 0]
    assert yard.launchers[1].host_status[0].tolist() == yard.status(1)


@pytest.mark.parametrize("bad", [True, False])
def test_a_rank_whose_ids_were_bad_tells_so_where_all_meet(bad):
    yard = VirtualRanks(make_exchange_spec(3))
    yard.words(2)[STATUS] = Trouble.BAD_IDS * bad
    for rank in (0, 2):
        yard.launchers[rank].signal_and_wait(5, Phase.COMBINE, fails=2, waits=False)
    yard.launchers[1].signal_and_wait(5, Phase.COMBINE, fails=2)
    assert yard.status(1) == ([Trouble.FAILED, 1 << 24 | 5 << 2 | 1, 0b100, 0] if bad else [0, 0, 0, 0])
    yard.launchers[2].signal_and_wait(5, Phase.DISPATCH, waits=False)  # in which such ids go nowhere
    assert yard.flags(1).tolist() == [0, 0, 1 << 24 | 5 << 2]


def test_a_failure_is_found_by_who_looks_when_the_next_round_has_begun():
    yard = VirtualRanks(make_exchange_spec(2))
    yard.launchers[1].signal_and_wait(5, Phase.DISPATCH, fails=True, waits=False)
    yard.launchers[1].signal_and_wait(
        5, Phase.DISPATCH, waits=False
    )  # it has heard of rank 0, which has not looked yet
    yard.launchers[0].signal_and_wait(5, Phase.DISPATCH)
    assert yard.status(0)[:3] == [Trouble.FAILED, 1 << 24 | 5 << 2, 0b10]


@pytest.mark.usefixtures("clock")
def test_a_wait_ends_at_its_deadline_and_every_rank_gets_the_verdict():
    yard = VirtualRanks(make_exchange_spec(4), deadline=0.01)
    flag = 1 << 24 | 5 << 2
    yard.launchers[0].signal_and_wait(5, Phase.DISPATCH, waits=False)
    yard.words(3)[STATE] = flag  # rank 3 is missing as well, but only since it waits for rank 2
    yard.launchers[1].signal_and_wait(5, Phase.DISPATCH)
    kind, told, who, waited = yard.status(1)
    assert (kind, told, who) == (Trouble.LOST, flag, 0b100)
    assert 0.01e9 <= waited <= 0.02e9
    assert [int(yard.words(rank)[VERDICT]) for rank in range(4)] == [0b100] * 4
    assert yard.words(1)[STATE] == 0
    yard.launchers[0].signal_and_wait(
        5, Phase.COMBINE
    )  # finds the verdict, and does not wait for its deadline
    assert yard.status(0)[:3] == [Trouble.LOST, 1 << 24 | 5 << 2 | 1, 0b100]
    assert yard.status(0)[3] < 0.01e9


def test_who_waits_only_for_itself_is_not_excused(clock):
    yard = VirtualRanks(make_exchange_spec(3), deadline=0.01)
    yard.words(2)[STATE] = 1 << 24
    for rank in range(3):
        yard.flags(2)[rank] = (rank != 2) << 24
    yard.launchers[0].signal_and_wait(0, Phase.DISPATCH)
    assert yard.status(0)[2] == 0b110


@pytest.mark.parametrize("trouble", [Trouble.FAILED, Trouble.LOST])
def test_bad_ids_do_not_hide_what_ends_the_round(trouble, clock):
    spec = make_exchange_spec(2, hidden_size=4)
    batch = make_batch(spec, 3)
    batch.ids_TK[0, 0] = 77
    yard = VirtualRanks(spec, deadline=0.01)
    if trouble is Trouble.FAILED:
        yard.launchers[1].signal_and_wait(yard.dispatch_slots.layer, Phase.DISPATCH, fails=True, waits=False)
    slots_TW = yard.launchers[0].dispatch(yard.dispatch_slots, batch.x_TH, batch.ids_TK, batch.weights_TK, {})
    assert yard.status(0)[:3] == [trouble, 1 << 24 | yard.dispatch_slots.layer << 2, 0b10]
    assert yard.launchers[0].host_status[0].tolist() == yard.status(0)
    out_TH = torch.zeros_like(batch.x_TH)
    yard.launchers[0].sum(yard.dispatch_slots, slots_TW, out_TH, just_placed=False)
    assert bool(out_TH.isnan().all())
