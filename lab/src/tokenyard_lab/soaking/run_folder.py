"""The folder into which the ranks of a soak write progress and findings, so that none are lost when a rank dies.

    progress.json     rank 0, after every episode: how far it is, and what was counted
    samples.jsonl     rank 0, a line per sample
    findings.jsonl    any rank, a line per finding
    expected.json     rank 0, while a rank is lost: the episode that the fresh one joins
    stop              any process that wants the soak to end
    pid-3             rank 3: its process

Nothing is kept in memory: what ranks remember for the report would look like a leak.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tokenyard_lab.soaking.measuring import Sample

FindingKind = Literal["wrong result", "hang", "error", "leak", "memory"]
# Characters of a finding's text; an error may hold a whole table.
_LONGEST = 1000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that went wrong in a soak."""

    kind: FindingKind
    what: str
    episode: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        where = [] if self.episode is None else [f"episode {self.episode}"]
        where += [] if self.rank is None else [f"rank {self.rank}"]
        return f"{self.kind}{' in ' + ', '.join(where) if where else ''}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How much was done, by all ranks together."""

    episodes: int = 0
    round_trips: int = 0  # calls of a layer, counted once for all ranks
    checked: int = 0  # results, one for each rank that took part
    lost: int = 0  # ranks that were killed, and came back

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})


class RunFolder:
    """The folder of a soak."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write_progress(self, counts: Counts) -> None:
        """Write how far the ranks are."""
        self._replace("progress.json", asdict(counts))

    def progress(self) -> Counts | None:
        """How far the ranks are; None before the first episode has ended."""
        found = self._read("progress.json")
        return None if found is None else Counts(**found)

    def expect_episode(self, episode: int | None) -> None:
        """Write down the episode that a fresh rank will join; None: no rank is expected any more."""
        if episode is None:
            (self.folder / "expected.json").unlink(missing_ok=True)
        else:
            self._replace("expected.json", episode)

    def expected_episode(self) -> int | None:
        """The episode that a fresh rank joins, if one is expected."""
        found: int | None = self._read("expected.json")
        return found

    def add_sample(self, sample: Sample) -> None:
        """Append a sample."""
        self._append("samples.jsonl", asdict(sample))

    def samples(self) -> list[Sample]:
        """All samples."""
        return [Sample(**line) for line in self._lines("samples.jsonl")]

    def last_sample(self) -> Sample | None:
        """The latest sample, without reading those before."""
        try:
            with (self.folder / "samples.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                whole = [line for line in file.read().split(b"\n")[:-1] if line.endswith(b"}")]
        except OSError:
            return None
        return Sample(**json.loads(whole[-1])) if whole else None

    def add_finding(self, finding: Finding) -> None:
        """Append a finding."""
        self._append("findings.jsonl", asdict(finding) | {"what": finding.what[:_LONGEST]})

    def findings(self) -> list[Finding]:
        """All findings."""
        return [Finding(**line) for line in self._lines("findings.jsonl")]

    def write_pid(self, rank: int) -> None:
        """Write down that this process is the rank of this number."""
        self._replace(f"pid-{rank}", os.getpid())

    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [json.loads(path.read_text()) for path in self.folder.glob("pid-*")]

    def stop(self) -> None:
        """Let the soak end after the episode that it is in."""
        (self.folder / "stop").touch()

    def stopped(self) -> bool:
        """Whether the soak was asked to end."""
        return (self.folder / "stop").exists()

    def _replace(self, name: str, value: Any) -> None:
        """Replace a file in one step: readers see the old one or the new one."""
        draft = self.folder / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(value))
        draft.replace(self.folder / name)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def _append(self, name: str, value: dict[str, Any]) -> None:
        """Append a line by one write, which the kernel does not mix with another's."""
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write(json.dumps(value).encode() + b"\n")

    def _lines(self, name: str) -> Iterator[Any]:
        path = self.folder / name
        for line in path.read_text().splitlines() if path.exists() else []:
            yield json.loads(line)
