"""Holds what the ranks of a session recorded against what they had to raise."""

import json
from dataclasses import dataclass

from tests.faults.starting import FINDING, GRACE
from tests.faults.timestamps import Timestamps


@dataclass
class Finding:
    """What came of one fault."""

    kind: str
    variant: str
    struck: bool
    complaints: list[str]
    # Seconds from the strike to the last rank's error; None where there was to be no error.
    seconds: float | None = None
    # What that is held against, slack not included.
    deadline: float | None = None

    @property
    def right(self):
        return self.struck and not self.complaints


def judge(session, folder, error):
    """A finding for each fault. `error` is what the launching process got from the whole session."""
    timestamps = Timestamps(folder)
    if session.faults[0].kind == "never starts":
        return [_judge_start(session, timestamps, folder)]
    records = {rank: _read(folder / f"record-{rank}.jsonl") for rank in range(session.world)}
    there = list(range(session.world))
    findings = []
    for index, fault in enumerate(session.faults):
        findings.append(_judge_fault(session, index, fault, there, records, timestamps))
        if fault.declared.lethal and fault.kind != "replaced":
            there.remove(fault.victim)
    last = findings[-1].complaints
    for rank in there:
        last += (
            [] if any("end" in entry for entry in records[rank]) else [f"rank {rank} did not reach the end"]
        )
    killed = any(fault.kind == "killed" for fault in session.faults)
    if (error is None) == (killed and not session.bare):
        last.append(f"launch raised {error!r}")
    failed = [timestamps.get(f"failed-{rank}") for rank in there]
    last += [f"rank failed: {text}" for text in failed if text is not None]
    return findings


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _judge_fault(session, index, fault, there, records, timestamps):
    declared, struck_at = fault.declared, timestamps.get(f"struck-{index}")
    complaints, seconds, raised = [], [], []
    for rank in there:
        role = "victim" if rank == fault.victim else "other"
        expected = getattr(declared, role)
        entries = [entry for entry in records[rank] if entry.get("fault") == index]
        met = [entry for entry in entries if "error" in entry]
        if role == "victim" and fault.kind in ("killed", "replaced"):
            complaints += ["the victim lives"] if met else []
            continue
        if not met:
            complaints.append(f"rank {rank} did not come through")
            continue
        complaints += [f"rank {rank}: {text}" for text in _off(session, fault, expected, met[0], role)]
        woken = declared.lethal and role == "victim"  # it raises when it is let
        if met[0]["at"] is not None and struck_at is not None and not woken:
            seconds.append(met[0]["at"] - struck_at)
            raised.append(met[0])
    for rank in [r for r in there if not declared.lethal or r != fault.victim]:
        done = [entry for entry in records[rank] if entry.get("fault") == index and "done" in entry]
        wrong = done[0]["wrong"] if done else None
        complaints += [] if wrong == 0 else [f"rank {rank}: {wrong} wrong results afterwards"]
        complaints += (
            [f"rank {rank} has {done[0]['more']} more than before"] if done and done[0]["more"] else []
        )
    # One rank has waited for all of its deadline, whatever its clock says; only a closed connection tells earlier.
    waits = [entry["waited"] for entry in raised if entry["waited"] is not None]
    if waits and _needs_a_deadline(session, fault) and max(waits) < 0.99 * session.deadline:
        complaints.append(f"gave up after {max(waits):.2f} s, with a deadline of {session.deadline} s")
    late = [s for s in seconds if s > session.deadline + session.slack]
    complaints += [f"an error came after {s:.1f} s" for s in late]
    return Finding(
        kind=fault.kind,
        variant=fault.variant,
        struck=struck_at is not None,
        complaints=complaints,
        seconds=max(seconds) if seconds else None,
        deadline=session.deadline if seconds else None,
    )


def _needs_a_deadline(session, fault):
    """Whether a loss shows in nothing but silence. The last word of a plan that watches itself is a message."""
    return fault.kind == "stopped for good" and not session.paranoid


def _off(session, fault, expected, entry, role="other"):
    """What is wrong with what one rank raised, in words."""
    if expected is None:
        return [] if entry["error"] is None else [f"raised {entry['text']}"]
    off = []
    if entry["error"] != expected.error:
        return [f"raised {entry['error']}: {entry['text']}; expected {expected.error}"]
    # In a plan that watches itself, one that was given up may wake up in a last word, which the others have left.
    left = session.paranoid and role == "victim"
    if expected.names and entry["names"] != [fault.victim] and not left:
        off.append(f"names ranks {entry['names']}; expected [{fault.victim}]")
    phase = entry["place"]["phase"] if expected.phase == "here" else expected.phase
    last_word = session.paranoid and entry["phase"] == f"the end of {phase}"
    if phase is not None and entry["phase"] != phase and not last_word:
        off.append(f"names phase {entry['phase']}; expected {phase}")
    if expected.layer and entry["layer"] != entry["place"]["layer"]:
        off.append(f"names layer {entry['layer']}; expected {entry['place']['layer']}")
    off += [
        f"does not say {words!r}: {entry['text']}" for words in expected.says if words not in entry["text"]
    ]
    return off


def _judge_start(session, timestamps, folder):
    """A session in which one rank never starts."""
    (fault,) = session.faults
    expected, complaints, waits, limit = fault.declared.other, [], [], FINDING
    struck_at, told = timestamps.get("struck-0"), timestamps.get("told")
    if fault.variant in ("exits", "sleeps"):
        complaints += _off_start(fault, expected, told)
        if fault.variant == "exits" and told and struck_at:
            # `launch` gives the others their deadline and a little more, twice.
            waits, limit = [told["at"] - struck_at], session.deadline + 2 * GRACE
        elif told:
            waits = [told["waited"] or 0.0]
    else:
        limit = session.deadline if fault.variant == "does not plan" else FINDING
        for rank in [r for r in range(session.world) if r != fault.victim]:
            entries = _read(folder / f"record-{rank}.jsonl")
            if not entries:
                complaints.append(f"rank {rank} did not come through")
                continue
            complaints += [f"rank {rank}: {text}" for text in _off(session, fault, expected, entries[0])]
            waits.append(entries[0]["waited"] or 0.0)
    seconds = max(waits, default=None)
    if seconds is not None and seconds > limit + session.slack:
        complaints.append(f"took {seconds:.1f} s, and {limit} are allowed")
    return Finding(
        fault.kind, fault.variant, struck_at is not None, complaints, seconds=seconds, deadline=limit
    )


def _off_start(fault, expected, told):
    if not told:
        return ["launch said nothing"]
    if expected.error == "ended":
        said = told["error"] == "ProcessLookupError" and all(words in told["text"] for words in expected.says)
        return [] if said and told["rank"] == fault.victim else [f"launch said: {told['text']}"]
    off = [] if told["error"] == expected.error else [f"launch said: {told['text']}"]
    off += (
        [] if told["peers"] == [fault.victim] else [f"names ranks {told['peers']}; expected [{fault.victim}]"]
    )
    return off + ([] if told["phase"] == expected.phase else [f"names phase {told['phase']}"])
