"""Every kind of fault at least once, and that the campaign would notice what it looks for.

`make test-faults` runs all of it.
"""

import ast
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tokenyard
import tokenyard as ty
from tests.faults import runner
from tests.faults.campaign import ROOT
from tests.faults.cases import DEADLINE, SLACK, Fault, Session, draw_sessions
from tests.faults.judge import Finding, judge
from tests.faults.kinds import EXCHANGES, KINDS
from tests.faults.report import is_good, markdown, summarize
from tests.faults.timestamps import Timestamps
from tokenyard.errors import RankError

PAGE = ROOT / "docs" / "guide" / "faults.md"
RESULTS = ROOT / "bench" / "results" / "faults-cpu.json"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["killed", "exception"], id="two kinds"),
        pytest.param([kind.name for kind in KINDS], id="every kind", marks=pytest.mark.long),
    ],
)
def test_every_kind_of_fault_gives_the_right_errors_and_leaves_nothing_behind(kinds, tmp_path):
    written = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.faults.campaign", "--scale", "0.001", "--workers", "2"]
    command += ["--patience", "3"]  # other tests run beside it, on machines of which nothing is known
    command += [word for kind in kinds for word in ("--kind", kind)]
    done = subprocess.run(
        [*command, "--write", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(written.read_text())["results"]
    assert {row["kind"] for row in results["kinds"]} == set(kinds)
    assert results["faults"] == results["right"] >= len(kinds)


# -- The campaign itself -----------------------------------------------------------------------------------------


def test_a_whole_campaign_has_500_faults_and_30_of_each_kind():
    sessions = draw_sessions(1, {kind.name: kind.share for kind in KINDS})
    faults = [fault for session in sessions for fault in session.faults]
    assert len(faults) >= 500
    for kind in KINDS:
        drawn = [fault.variant for fault in faults if fault.kind == kind.name]
        assert len(drawn) == kind.share >= 30
        assert set(drawn) == {variant.name for variant in kind.variants}
    assert {session.exchange for session in sessions} == set(EXCHANGES)
    assert {session.world for session in sessions} == {2, 3, 4}


def test_what_the_kernel_refuses_is_made_up_for_by_other_variants():
    refused = {"full /dev/shm", "another monotonic clock"}
    counts = {"clock": 10, "disk full": 10}
    faults = [fault for session in draw_sessions(1, counts, refused) for fault in session.faults]
    assert len(faults) == 20
    assert not refused & {fault.variant for fault in faults}


def test_a_seed_gives_the_same_sessions():
    counts = {kind.name: 3 for kind in KINDS}
    assert draw_sessions(5, counts) == draw_sessions(5, counts) != draw_sessions(6, counts)


KILLED = Fault(kind="killed", variant="after dispatch", victim=1, rounds=1)
SESSION = Session(seed=0, world=3, exchange="one_sided", layers=(), faults=(KILLED,))


def written(folder, **changes):
    """The records of a session in which everything was right, but for some changes of what rank 2 met."""
    Timestamps(folder).put("struck-0", 100.0)
    for rank in (0, 2):
        entry = {
            "fault": 0,
            "error": "PeerLost",
            "text": "…",
            "names": [1],
            "layer": "moe.0",
            "phase": "combine",
            "waited": DEADLINE,
            "place": {"layer": "moe.0", "phase": "combine"},
            "at": 100.0 + DEADLINE,
        }
        done = {"fault": 0, "wrong": 0, "more": {}, "done": True}
        for name, value in changes.items() if rank == 2 else ():
            (done if name in done else entry)[name] = value
        lines = [entry, done, {"end": True}]
        (folder / f"record-{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return judge(SESSION, folder, error=RankError(0, ValueError("…")))


def test_what_is_right_is_found_right(tmp_path):
    (finding,) = written(tmp_path)
    assert finding.right
    assert finding.seconds == DEADLINE


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"error": None}, "expected PeerLost"),
        ({"error": "GroupError"}, "expected PeerLost"),
        ({"names": [0, 1]}, "names ranks [0, 1]; expected [1]"),
        ({"names": []}, "names ranks []"),
        ({"phase": "dispatch"}, "names phase dispatch; expected combine"),
        ({"layer": None}, "names layer None; expected moe.0"),
        ({"wrong": 1}, "1 wrong results"),
        ({"more": {"mappings": 4}}, "{'mappings': 4} more than before"),
        ({"at": 101.0 + DEADLINE + SLACK}, "an error came after"),
    ],
    ids=str,
)
def test_what_is_wrong_is_found(changes, complaint, tmp_path):
    (finding,) = written(tmp_path, **changes)
    assert complaint in "; ".join(finding.complaints)
    assert not finding.right


def test_a_wait_that_was_cut_short_is_found(tmp_path):
    """A rank that is stopped shows in nothing but its silence: whoever gives it up early has not waited."""
    written(tmp_path)
    stopped = replace(SESSION, faults=(replace(KILLED, kind="stopped for good"),))
    early = "gave up after 0.20 s"
    (finding,) = judge(stopped, tmp_path, error=None)
    assert early not in "; ".join(finding.complaints)
    for rank in (0, 2):
        path = tmp_path / f"record-{rank}.jsonl"
        path.write_text(path.read_text().replace(f'"waited": {DEADLINE}', '"waited": 0.2'))
    (finding,) = judge(stopped, tmp_path, error=None)
    assert early in "; ".join(finding.complaints)


def test_a_rank_without_a_record_is_found(tmp_path):
    written(tmp_path)
    (tmp_path / "record-2.jsonl").unlink()
    (finding,) = judge(SESSION, tmp_path, error=RankError(0, ValueError("…")))
    assert "rank 2 did not come through" in finding.complaints


STOPPED = Fault(kind="stopped", variant="after dispatch", victim=1, rounds=1)


@pytest.mark.parametrize(("ago", "overslept"), [(0.6 * DEADLINE, False), (DEADLINE, True)])
def test_a_rank_that_was_woken_too_late_is_noticed(ago, overslept, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "kill", lambda pid, number: None)
    monkeypatch.setattr(runner, "stamp", lambda: 100.0 + ago)
    Timestamps(tmp_path).put("struck-0", 100.0)
    watch = runner._Watch(replace(SESSION, faults=(STOPPED,)), Timestamps(tmp_path), runner.Belongings.now())
    assert watch._wake(0, STOPPED)
    assert watch.overslept == overslept


@pytest.mark.parametrize(
    ("overslept", "right", "tries"), [(True, False, 2), (True, True, 1), (False, False, 1)]
)
def test_a_session_in_which_a_rank_was_woken_too_late_says_nothing(overslept, right, tries, monkeypatch):
    wrong = Finding("stopped", "after dispatch", struck=True, complaints=[] if right else ["a complaint"])
    first, second = runner.Outcome([wrong], overslept=overslept), runner.Outcome([])
    outcomes = [first, second]
    monkeypatch.setattr(runner, "_run_once", lambda session: outcomes.pop(0))
    assert runner.run_session(SESSION) is (first, second)[tries - 1]


def waits_forever(group, folder):
    faulthandler.register(signal.SIGUSR1, file=open(Path(folder) / f"stack-{group.rank}", "w"))  # noqa: SIM115
    Timestamps(folder).put(f"pid-{group.rank}", os.getpid())
    time.sleep(1000)


def lose_patience(folder):
    """Let the watch give up as soon as the ranks are there."""
    for rank in range(2):
        Timestamps(folder).wait(f"pid-{rank}")
    watch = next(thread for thread in threading.enumerate() if thread.name == "watch")
    watch.until = 0.0


def test_a_hang_and_a_leak_are_found(monkeypatch, tmp_path):
    runner.warm_up()
    gc.collect()
    held = []

    def start(session, folder):
        held.append(open(tmp_path / "held", "w"))  # noqa: SIM115
        threading.Thread(target=lose_patience, args=(folder,)).start()
        ty.launch(2, waits_forever, folder, ranks="processes", deadline=1.0)

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "_GIVING_BACK", 0.2)
    outcome = runner.run_session(SESSION)
    held.pop().close()
    assert outcome.hung
    assert outcome.stacks.count("in waits_forever") == 2
    assert f"open file {tmp_path / 'held'}" in outcome.leaks
    assert not is_good(summarize([outcome]) | {"not_struck": 0, "faults": 1, "right": 1})


# -- What the documentation says ---------------------------------------------------------------------------------


def test_the_page_quotes_the_last_campaign():
    document = json.loads(RESULTS.read_text())
    results = document["results"]
    assert document["scale"] >= 1
    assert is_good(results)
    assert results["faults"] >= 500
    assert all(row["faults"] >= 30 for row in results["kinds"])
    assert {row["kind"] for row in results["kinds"]} == {kind.name for kind in KINDS}
    assert markdown(results) in PAGE.read_text()


# -- Clocks ------------------------------------------------------------------------------------------------------


def test_no_wait_looks_at_the_clock_of_the_wall():
    """`time.time` jumps when the clock is set; only dates, which nobody waits for, come from it."""
    package = Path(tokenyard.__file__).parent
    users = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            wall = isinstance(node, ast.Attribute) and (
                (node.attr in ("time", "time_ns") and ast.unparse(node.value) == "time")
                or (node.attr in ("now", "utcnow", "today") and "date" in ast.unparse(node.value))
            )
            named = isinstance(node, ast.ImportFrom) and node.module == "time"
            if wall or (named and any(alias.name in ("time", "time_ns") for alias in node.names)):
                users.add(str(path.relative_to(package)))
    assert users == {"cli/machine.py"}
