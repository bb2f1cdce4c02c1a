"""Soaks by episodes, not by the clock: one that passes, and one for each kind of fault, which it finds."""

import gc
import mmap
import os

import pytest
import torch

import tokenyard as ty
from lab.tests.soak import planted
from tokenyard.conformance.cases import Case
from tokenyard.errors import InputError
from tokenyard.exchange import AllgatherTransport
from tokenyard_lab.soaking import Settings, measuring, soak
from tokenyard_lab.soaking.episodes import draw_episode
from tokenyard_lab.soaking.measuring import measure
from tokenyard_lab.soaking.serving import Served, named

CPU = torch.device("cpu")
SEED = 4  # whose first eight episodes are of every kind


def soak_on_threads(exchange, episodes, **changes):
    options = {"ranks": 2, "kind": "threads", "episodes": episodes, "losses": False, "deadline": 20.0}
    return soak(Settings(exchanges=(exchange,), **(options | changes)))


def kinds(report):
    return {finding.kind for finding in report.findings}


def test_processes_come_and_go_and_every_result_is_right():
    heard = []
    settings = Settings(ranks=3, episodes=8, exchanges=("two_sided", "one_sided"), seed=SEED)
    report = soak(settings, heard.append)
    assert report.findings == []
    assert report.counts.episodes == 8
    assert report.counts.lost == 1  # in the sixth episode
    assert report.counts.round_trips > 8 * 10
    assert report.counts.checked > 2 * report.counts.round_trips
    assert [sample.episode for sample in report.samples] == list(range(1, 9))
    assert all(sample.processes >= 1 + 3 for sample in report.samples)
    assert {draw_episode(settings, number).kind for number in range(8)} == {
        "case",
        "growth",
        "split",
        "loss",
    }
    assert heard[-1].counts.episodes > 0
    assert heard[-1].findings == []


def test_threads_leave_and_come_back():
    report = soak_on_threads("allgather", 6, losses=True)
    assert report.findings == []
    assert report.counts.lost == 1


def test_memory_and_descriptors_that_pile_up_are_found():
    try:
        report = soak_on_threads(planted.KeepsEverything, 9)
    finally:
        planted.KeepsEverything.let_go()
    assert kinds(report) == {"memory", "leak"}
    # Behind the warm-up, five episodes of ten round trips and more on each of two ranks. What is freed beside them, and
    # a machine that is quicker in some episodes than in others (a slope is per second), take some of it away.
    assert report.growth["memory"].total > 5 * 10 * 2 * planted.LEAKED * 0.3
    (leak,) = (finding for finding in report.findings if finding.kind == "leak")
    assert leak.what.startswith("descriptors: at least ")


def test_a_wrong_bit_is_found_and_the_soak_goes_on():
    report = soak_on_threads(planted.FlipsABit, 2)
    assert kinds(report) == {"wrong result"}
    assert report.counts.episodes == 2
    assert {finding.episode for finding in report.findings} == {0, 1}
    assert "other bits than in the first round trip" in str(report.findings[0])


def test_an_error_is_found_once_with_its_rank_and_the_ranks_are_started_anew():
    report = soak_on_threads(planted.Raises, 3)
    assert kinds(report) == {"error"}
    assert {finding.rank for finding in report.findings} == {1}
    assert all("a fault that was planted" in finding.what for finding in report.findings)
    assert len(report.findings) == 3  # of three groups, and then it is given up


def test_a_rank_that_does_not_come_is_a_hang():
    report = soak_on_threads(planted.NeverComes, 3, deadline=1.0)
    assert "hang" in kinds(report)
    assert any("rank 1 did not arrive" in finding.what for finding in report.findings)


def test_an_interrupt_ends_it_early_with_what_was_found():
    interrupted = []

    def on_progress(progress):
        if not interrupted:
            interrupted.append(progress)
            raise KeyboardInterrupt

    settings = Settings(ranks=1, kind="threads", episodes=10_000, exchanges=("two_sided",))
    report = soak(settings, on_progress)
    assert report.findings == []
    assert 0 < report.counts.episodes < 10_000


def test_the_same_seed_gives_the_same_episodes():
    one, other = Settings(seed=3), Settings(seed=4)
    first = [draw_episode(one, number) for number in range(40)]
    assert first == [draw_episode(one, number) for number in range(40)]
    assert first != [draw_episode(other, number) for number in range(40)]


def sample_now():
    return measure(os.getpid(), seconds=0.0, episode=0, round_trips_per_s=0.0, device=CPU)


def test_what_this_process_holds_is_seen():
    gc.collect()
    before = sample_now()
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE)  # pages that nobody has had before
    held.write(b"1" * len(held))
    # So many that it does not matter what else this process closes meanwhile: connections do in the background.
    descriptors = [os.dup(0) for _ in range(200)]
    after = sample_now()
    assert after.memory - before.memory > 0.7 * len(held)
    assert after.lasting_memory - before.lasting_memory > 0.7 * len(held)
    assert 180 < after.descriptors - before.descriptors < 220
    assert after.sockets - before.sockets < 20
    for descriptor in descriptors:
        os.close(descriptor)
    held.close()
    assert after.device_memory is None


def test_where_the_kernel_does_not_tell_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "_PROC", tmp_path)
    with pytest.raises(InputError, match="smaps_rollup"):
        soak(Settings(episodes=1))


def small_numbers(group):
    """Squares of numbers that fp16 hardly holds, which fast experts round away between their products."""
    case = Case(
        tokens=(12, 8, 12, 9),
        hidden_size=1,
        intermediate_size=24,
        num_experts=31,
        top_k=1,
        exchange=AllgatherTransport,
        wire="fp16",
        combine_wire="fp8_block128",
        expert_rows="fp32",
        experts="grouped",
        activation="relu2",
        weights="fp16",
        placement="shuffled",
        routes="duplicates",
        payloads=True,
        seed=171927710905,
    )
    served = Served(ty.plan([named(case, "moe")], group, exchange="allgather"), case, "moe")
    batch = served.batch(case.tokens, case.seed)
    y_TH = served(batch)
    return served.complaint(batch, y_TH), served.complaint(batch, y_TH + 1e-4)


def test_what_fp16_is_too_coarse_for_is_no_finding():
    for right, wrong in ty.launch(4, small_numbers, deadline=60):
        assert right is None
        assert "beyond the bound" in wrong
