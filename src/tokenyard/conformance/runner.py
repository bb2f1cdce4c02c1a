"""Run many jobs on one group of ranks. A job that fails, or even breaks the group, does not stop the others.

A launch costs more than a case, so ranks are started once for many jobs. After every job the ranks meet and compare
its number. If they do meet, a failure concerns this job only. If they do not, they have left the job at different
places: the group is broken, and the remaining jobs get a new one.

Each rank writes a log, a file with a line per job: what it found, and that all ranks have met. A rank may die without
a report (a collective library that is called out of step ends the process), and its log still says how far it came.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.cases import same_bits
from tokenyard.conformance.draws import RankKind
from tokenyard.errors import Drifted, GroupError, RankError
from tokenyard.group import Group, launch
from tokenyard.temporary_folders import temporary_folder

# Seconds that ranks wait for each other before a group counts as broken.
DEADLINE = 20.0
_MET = "met"


class Finding(AssertionError):
    """What a check found, and what it expected instead."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = found, expected

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}"


def expect(fine: bool, found: object, expected: object) -> None:
    """Raise a finding unless `fine` is True."""
    if not fine:
        raise Finding(str(found), str(expected))


def expect_same(
    tensor: Tensor,
    due: Tensor,
    found: str,
    expected: str = "the same bits",
    same: Callable[[Tensor, Tensor], bool] = same_bits,
) -> None:
    """Raise a finding unless two tensors are the same, bit for bit or as `same` compares them."""
    expect(same(tensor, due), found, expected)


@contextmanager
def unchanged(tensors: Mapping[str, Tensor], by: str = "", expected: str = "it untouched") -> Iterator[None]:
    """Raise a finding if the block changes one of these tensors."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        expect_same(tensor, before[name], f"{name} was changed{by}", expected)


def checks_of(*modules: ModuleType, parameters: Sequence[str]) -> dict[str, Callable[..., None]]:
    """The checks of some modules by name, in their order: the public functions with these parameters and no result."""
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and tuple(function.__annotations__) == (*parameters, "return")
        and function.__annotations__["return"] == "None"
    }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one job, on all ranks."""

    finding: str | None = None  # None: passed
    broke_group: bool = False

    @property
    def passed(self) -> bool:
        """Whether nothing was found on any rank."""
        return self.finding is None


# What one rank reports of one job: None, or a precedence and a text. 0: a finding; 1: an error that was not expected;
# 2: an error of the group, mostly caused by another rank.
_Entry = tuple[int, str] | None


def attempt(fn: Callable[..., Any], *args: Any, where: str = "") -> _Entry:
    """Run a check, or a job; return its finding, or the error that was not expected, or None."""
    try:
        fn(*args)
    except Finding as finding:
        return 0, f"{where}{finding}"
    except Exception as error:
        precedence = 2 if isinstance(error, GroupError) else 1
        return precedence, f"{where}{type(error).__name__}: {error}"
    return None


def run_on_ranks(
    world: int,
    fn: Callable[[Group, Any], Any],
    jobs: Sequence[Any],
    *,
    ranks: RankKind,
    hosts: int = 1,
    device: str | torch.device | None = None,
    deadline: float = DEADLINE,
) -> Iterator[Verdict]:
    """Run `fn(group, job)` on every rank for each job; give the verdicts in the order of the jobs."""
    rest = list(jobs)
    options: dict[str, Any] = {"ranks": ranks, "hosts": hosts, "device": device, "deadline": deadline}
    while rest:
        with temporary_folder("tokenyard-check-") as folder:
            died = None
            try:
                launch(world, _run_jobs, fn, rest, folder, threads_per_rank=1, **options)
            except RankError as error:
                died = str(error)
            logs = [_read(_log_of(folder, rank)) for rank in range(world)]
        met = min(met for _, met in logs)
        for number in range(met):
            yield judge([entries[number] for entries, _ in logs])
        rest = rest[met:]
        if rest:  # the group broke in the first of these
            words = [entries[met] for entries, _ in logs if len(entries) > met]
            verdict = judge(words)
            apart = died or "the ranks left this check at different places"
            yield Verdict(finding=verdict.finding or apart, broke_group=True)
            rest = rest[1:]


def _run_jobs(group: Group, fn: Callable[[Group, Any], Any], jobs: Sequence[Any], folder: Path) -> None:
    """Run the jobs on this rank, up to the first one that breaks the group."""
    with _log_of(folder, group.rank).open("w") as log:
        for number, job in enumerate(jobs):
            entry = attempt(fn, group, job, where=f"rank {group.rank}: ")
            print(json.dumps(entry), file=log, flush=True)
            try:
                _meet(group, number)
            except Exception:
                return
            print(_MET, file=log, flush=True)


def _meet(group: Group, number: int) -> None:
    mine = torch.tensor([number], dtype=torch.int64, device=group.device).view(torch.uint8)
    numbers = group.all_gather(mine, phase="the end of a check").view(torch.int64).flatten().tolist()
    if set(numbers) != {number}:
        raise Drifted(f"the ranks are at checks {numbers}", expected=f"all at {number}", fix="start again")


def _log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def _read(log: Path) -> tuple[list[_Entry], int]:
    """The entries of a log, and after how many of them all ranks have met."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    whole = [line.strip() for line in lines if line.endswith("\n")]
    return [json.loads(line) for line in whole if line != _MET], whole.count(_MET)


def judge(entries: Sequence[_Entry]) -> Verdict:
    """The verdict with the finding of the lowest precedence number: errors that other ranks caused come last."""
    found = [entry for entry in entries if entry is not None]
    return Verdict(finding=min(found, key=lambda entry: entry[0])[1] if found else None)
