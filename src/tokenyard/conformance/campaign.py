"""A campaign: every exchange × wire format × kind of ranks, many random cases each, and the named checks once.

Cases of one exchange, one kind of ranks and one W share launches, of a portion of cases each, so that progress is seen.
If groups of a row of the grid (exchange × kind of ranks) broke three times, its other cases are not run. They are
counted as not run, and cells with such cases have not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Literal

from tokenyard.conformance.cases import Case
from tokenyard.conformance.draws import RankKind, draw_cases, is_large
from tokenyard.conformance.suites import CheckResult, check_cases, check_exchange, check_experts, check_format
from tokenyard.exchange import Transport
from tokenyard.experts import Experts
from tokenyard.formats import Format, get

# Cases of one launch. Eight processes start in about 0.3 s: with this number of cases, at most a tenth of the time.
PORTION = 64
MOST_BREAKS = 3

# Called before each portion, with what is run and 0, and after it, with what was run and the number of its cases.
Progress = Callable[[str, int], None]


@dataclass(kw_only=True)
class Cell:
    """The results of the cases of one exchange × kind of ranks × wire."""

    exchange: str
    ranks: RankKind
    wire: str
    total: int = 0
    passed: int = 0
    not_run: int = 0
    findings: list[tuple[Case, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all its cases were run, and passed."""
        return self.passed == self.total


@dataclass(frozen=True, kw_only=True)
class CheckedPart:
    """The results of the named checks of an exchange on one kind of ranks, of a format, or of experts."""

    kind: Literal["exchange", "format", "experts"]
    name: str
    ranks: RankKind | None = None  # of an exchange
    results: list[CheckResult]

    def __str__(self) -> str:
        return self.name if self.ranks is None else f"{self.name} on {self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """Which exchanges, wires and kinds of ranks are checked, and with how many random cases."""

    exchanges: Sequence[type[Transport]]
    formats: Sequence[str | Format]
    ranks: Sequence[RankKind]
    cases: int
    seed: int
    device: str = "cpu"  # where rows live

    def cells(self) -> list[tuple[type[Transport], str | Format, RankKind]]:
        """Every exchange × kind of ranks × wire."""
        rows = product(self.exchanges, self.ranks, self.formats)
        return [(exchange, wire, ranks) for exchange, ranks, wire in rows]

    def draw(self) -> list[tuple[int, Case]]:
        """All cases, each with the number of its cell."""
        return draw_cases(self.cases if self.cells() else 0, self.seed, self.cells(), device=self.device)

    def run(
        self, drawn: Sequence[tuple[int, Case]], progress: Progress, rounds: int | None = None
    ) -> tuple[list[CheckedPart], list[Cell]]:
        """Run the named checks and all cases of each exchange on each kind of ranks; return their results.

        Ranks that are threads and ranks that are processes run side by side, since threads use one interpreter. On a
        GPU they run one after the other, since waiting kernels of one kind would block those of the other.
        """
        grid = self.cells()
        cells = [
            Cell(exchange=exchange.name, ranks=ranks, wire=str(get(wire))) for exchange, wire, ranks in grid
        ]

        def run_kind(ranks: RankKind) -> list[CheckedPart]:
            parts = []
            for exchange in self.exchanges:
                check = partial(check_exchange, exchange, ranks=ranks, rounds=rounds, device=self.device)
                what = f"{exchange.name} on {ranks}: named checks"
                results = _reported(what, check, progress)
                parts.append(CheckedPart(kind="exchange", name=exchange.name, ranks=ranks, results=results))
                of_row = [n for n, cell in enumerate(grid) if (cell[0], cell[2]) == (exchange, ranks)]
                mine = [(cells[number], case) for number, case in drawn if number in of_row]
                self._run_row(exchange, ranks, mine, progress)
            return parts

        with ThreadPoolExecutor(max(1, len(self.ranks)) if self.device == "cpu" else 1) as pool:
            by_kind = list(pool.map(run_kind, self.ranks))
        return [part for parts in zip(*by_kind, strict=True) for part in parts], cells

    def _run_row(
        self, exchange: type[Transport], ranks: RankKind, row: Sequence[tuple[Cell, Case]], progress: Progress
    ) -> None:
        """Run the cases of one exchange × kind of ranks, and count the results in their cells."""
        breaks = 0
        for portion in _portions(row):
            what = f"{exchange.name} on {portion[0][1].world} {ranks}"
            progress(what, 0)
            for cell, _ in portion:
                cell.total += 1
            if breaks >= MOST_BREAKS:
                for cell, _ in portion:
                    cell.not_run += 1
            else:
                verdicts = check_cases([case for _, case in portion], ranks=ranks, device=self.device)
                for (cell, case), verdict in zip(portion, verdicts, strict=True):
                    breaks += verdict.broke_group
                    if verdict.finding is None:
                        cell.passed += 1
                    else:
                        cell.findings.append((case, verdict.finding))
            progress(what, len(portion))


def _portions(row: Sequence[tuple[Cell, Case]]) -> Iterator[list[tuple[Cell, Case]]]:
    """The cases in lists, one for each launch: at most `PORTION` cases, all with the same number of ranks."""
    for world in sorted({case.world for _, case in row}):
        alike = [(cell, case) for cell, case in row if case.world == world]
        for start in range(0, len(alike), PORTION):
            yield alike[start : start + PORTION]


def share_of_large(cases: Sequence[Case]) -> float:
    """The share of cases with W ≥ 4, H ≥ 2048 and uneven T."""
    return sum(map(is_large, cases)) / len(cases) if cases else 0.0


def check_parts(
    formats: Sequence[str | Format],
    experts: Sequence[type[Experts]],
    device: str = "cpu",
    progress: Progress = lambda what, steps: None,
) -> list[CheckedPart]:
    """Run the named checks of formats and of experts, the latter with rows on `device`."""
    parts = []
    for one in formats:
        name = str(get(one))
        results = _reported(f"format {name}", partial(check_format, one), progress)
        parts.append(CheckedPart(kind="format", name=name, results=results))
    for cls in experts:
        results = _reported(f"experts {cls.name}", partial(check_experts, cls, device=device), progress)
        parts.append(CheckedPart(kind="experts", name=cls.name, results=results))
    return parts


def _reported(what: str, check: Callable[[], list[CheckResult]], progress: Progress) -> list[CheckResult]:
    """Run named checks, and report their start and their end to `progress`."""
    progress(what, 0)
    results = check()
    progress(what, 1)
    return results
