"""One record for every benchmark: what was measured, beside the floor, the target and the peers.

A *document* is one run of a benchmark: what all its figures have in common (`setup`), and a *record* for each figure.
`--out` writes it as JSON, `bench show` prints or draws it, and the tables of the documentation are made from it:

    {"benchmark": "dispatch", "unit": "ms", "x": "tokens", "line": "exchange", "columns": ["out_ms"],
     "setup": {"ranks": 4, "hidden_size": 2048}, "notes": ["…"], "date": "…", "hardware": {…}, "versions": {…},
     "git_commit": "…",
     "results": [{"parameters": {"tokens": 512, "wire": "bf16", "exchange": "one_sided"},
                  "ours": {"median": 12.1, "low": 11.0, "high": 13.2, "least": 10.8, "most": 15.0},
                  "rested": null, "floor": {"median": 6.7}, "target": null, "peers": {"gloo": {"median": 16.8}},
                  "ratios": {"gloo / ours": {"median": 1.4}}, "details": {"out_ms": 7.5}, "note": ""}]}

Figures are times, and less is better; where the unit is one of bytes per second, they are rates, and more is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenyard.errors import InputError

# A figure that takes more than this many times the best peer's time is named in the summary.
MOST_OVER_PEER = 1.15
_MOST_NAMED = 4
_PROVENANCE = ("date", "hardware", "versions", "git_commit")


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, their quartiles and their extremes, as far as they are known."""

    median: float
    low: float | None = None
    high: float | None = None
    least: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of some values, at least one.

        >>> Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0, least=1.0, most=5.0)
        """
        found = list(values)
        if len(found) == 1:
            return cls(found[0])
        low, median, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(median, low, high, min(found), max(found))

    @classmethod
    def ratio(cls, above: Sequence[float], below: Sequence[float]) -> Spread:
        """The spread of ratios, taken round by round."""
        return cls.of(a / b for a, b in zip(above, below, strict=True))

    @property
    def range(self) -> tuple[float, float] | None:
        """The quartiles, or the extremes where only these are known."""
        for low, high in ((self.low, self.high), (self.least, self.most)):
            if low is not None and high is not None:
                return low, high
        return None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One figure."""

    parameters: dict[str, Any]  # what was measured
    ours: Spread | None = None  # None: it failed, and `note` says why
    rested: Spread | None = None  # the same after a rest before each round
    floor: Spread | None = None  # the least that the machine allows; of rates: the most
    target: float | None = None  # what this project set out to reach
    peers: Mapping[str, Spread] = field(default_factory=dict)
    ratios: Mapping[str, Spread] = field(default_factory=dict)  # taken round by round, by what is divided
    details: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        """Its parameters."""
        named = self.parameters.items()
        return ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in named)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        return None if self.ours is None or self.target is None else self.ours.median <= self.target

    @property
    def rested_met(self) -> bool | None:
        """Whether the target is reached after a rest."""
        return None if self.rested is None or self.target is None else self.rested.median <= self.target

    @property
    def best_peer(self) -> float | None:
        """The time of the fastest peer."""
        return min((peer.median for peer in self.peers.values()), default=None)

    def over(self, other: float | None, *, rested: bool = False) -> float | None:
        """How many times as long ours takes as `other`."""
        ours = self.rested if rested else self.ours
        return None if ours is None or other is None else ours.median / other


@dataclass(kw_only=True)
class Document:
    """One run of a benchmark."""

    benchmark: str
    unit: str
    x: str  # the parameter along which a picture is drawn
    line: str | None = None  # the parameter that has a line for each of its values
    columns: tuple[str, ...] = ()  # the details that the table shows
    setup: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    results: list[Record] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(self)
        provenance, results = found.pop("provenance"), found.pop("results")
        return {**found, **provenance, "results": [_without_nothing(result) for result in results]}

    @classmethod
    def from_dict(cls, found: Any, source: str) -> Document:
        """A document that was saved."""
        try:
            fields = {name: value for name, value in found.items() if name not in _PROVENANCE}
            fields["columns"] = tuple(found["columns"])
            fields["results"] = [_record(result) for result in found["results"]]
            return cls(**fields, provenance={name: found[name] for name in _PROVENANCE if name in found})
        except (AttributeError, KeyError, TypeError) as error:
            raise InputError(
                f"{source} holds no finished benchmark ({type(error).__name__}: {error})",
                expected="the figures of a benchmark",
                fix="pass a file that `tokenyard bench … --out` wrote",
            ) from error

    @property
    def is_rate(self) -> bool:
        """Whether figures are rates, and more is better."""
        return self.unit.endswith("/s")

    @property
    def title(self) -> str:
        """The benchmark, the machine, and what all figures have in common."""
        hardware = self.provenance.get("hardware", {})
        machine = self.setup.get("gpu") or hardware.get("cpu", "")
        settings = [f"{_words(name)} {_short(value)}" for name, value in self.setup.items() if name != "gpu"]
        return ", ".join([self.benchmark, *([machine] if machine else []), *settings])

    def find(self, **parameters: Any) -> Record | None:
        """The first record with these parameters."""
        for record in self.results:
            if all(record.parameters.get(name) == value for name, value in parameters.items()):
                return record
        return None

    def failed(self) -> list[str]:
        """The figures that could not be measured, and why."""
        return [f"{record}: {record.note}" for record in self.results if record.note]

    def table(self) -> dict[str, list[str]]:
        """The cells of a table by heading. A column that would be empty is left out."""
        floor = "ceiling" if self.is_rate else "floor"
        over_floor = "ceiling / ours" if self.is_rate else "ours / floor"
        found = self.results
        measured_ratios = dict.fromkeys(name for record in found for name in record.ratios)
        cells: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for record in found for name in record.parameters):
            cells[_words(name)] = [_short(record.parameters.get(name)) for record in found]
        cells[f"ours, {self.unit}"] = [_figure(record.ours) or "failed" for record in found]
        cells["spread"] = [_range(record.ours) for record in found]
        cells["rested"] = [_figure(record.rested) for record in found]
        cells[f"{floor}, {self.unit}"] = [_figure(record.floor) for record in found]
        if over_floor not in measured_ratios:
            cells[over_floor] = [_ratio(self._over_floor(record)) for record in found]
        cells["target"] = [figure(record.target) for record in found]
        cells["met"] = [{None: "", True: "yes", False: "no"}[record.met] for record in found]
        for name in dict.fromkeys(name for record in found for name in record.peers):
            cells[f"{name}, {self.unit}"] = [_figure(record.peers.get(name)) for record in found]
        if not measured_ratios:
            cells["ours / best peer"] = [_ratio(record.over(record.best_peer)) for record in found]
        for name in measured_ratios:
            cells[name] = [_ratio(record.ratios.get(name)) for record in found]
        for name in self.columns:
            cells[_words(name)] = [_short(record.details.get(name)) for record in found]
        return {heading: column for heading, column in cells.items() if any(column)}

    @property
    def less_needed(self) -> tuple[str, ...]:
        """The headings that a narrow terminal leaves out, in this order."""
        details = [_words(name) for name in reversed(self.columns)]
        peers = [f"{name}, {self.unit}" for record in self.results for name in record.peers]
        return (*details, "spread", "rested", *dict.fromkeys(reversed(peers)), "target", "met")

    def _over_floor(self, record: Record) -> float | None:
        over = record.over(record.floor.median if record.floor else None)
        return 1 / over if over and self.is_rate else over

    def summary(self) -> list[str]:
        """Notes, and sentences on how many targets were met and how the figures compare with peers; failures last."""
        held = [record for record in self.results if record.met is not None]
        beside = [record for record in self.results if record.over(record.best_peer) is not None]
        lines = [f"{sum(bool(record.met) for record in held)} of {len(held)} targets met"] if held else []
        if beside:
            faster = sum((record.over(record.best_peer) or 0) <= 1 for record in beside)
            lines.append(f"{faster} of {len(beside)} at least as fast as the best peer{_slow(beside)}")
        if any(record.rested for record in held):
            reached = sum(bool(record.rested_met) for record in held)
            lines.append(f"after a rest {reached} targets met{_slow(beside, rested=True)}")
        return [*self.notes, *lines, *(f"failed: {line}" for line in self.failed())]


def _slow(records: Sequence[Record], *, rested: bool = False) -> str:
    """The figures that are far slower than the best peer, if there are any."""
    slow = [r for r in records if (r.over(r.best_peer, rested=rested) or 0) > MOST_OVER_PEER]
    named = "; ".join([*map(str, slow[:_MOST_NAMED]), *(["…"] if len(slow) > _MOST_NAMED else [])])
    return f", {len(slow)} slower than {MOST_OVER_PEER} × it: {named}" if slow else ""


def _without_nothing(result: dict[str, Any]) -> dict[str, Any]:
    """A record without the parts of spreads that are not known."""

    def known(value: Any) -> Any:
        return {name: part for name, part in value.items() if part is not None} if value else value

    by_name = {name: {key: known(one) for key, one in result[name].items()} for name in ("peers", "ratios")}
    return result | {name: known(result[name]) for name in ("ours", "rested", "floor")} | by_name


def _record(result: dict[str, Any]) -> Record:
    spreads = {name: Spread(**result[name]) if result[name] else None for name in ("ours", "rested", "floor")}
    by_name = {name: {k: Spread(**v) for k, v in result[name].items()} for name in ("peers", "ratios")}
    return Record(**result | spreads | by_name)


# -- For people --------------------------------------------------------------------------------------------


def figure(value: float | None) -> str:
    """A time or a rate with two or three significant digits; an empty text for None.

    >>> figure(9.46), figure(0.0834), figure(12_284.7), figure(None)
    ('9.5', '0.083', '12,285', '')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _figure(spread: Spread | None) -> str:
    return "" if spread is None else figure(spread.median)


def _range(spread: Spread | None) -> str:
    if spread is None or spread.range is None:
        return ""
    low, high = spread.range
    return f"{figure(low)}–{figure(high)}"


def _ratio(ratio: Spread | float | None) -> str:
    if ratio is None:
        return ""
    if isinstance(ratio, float):
        return f"{ratio:.2f}"
    range_ = "" if ratio.range is None else f" ({ratio.range[0]:.2f}–{ratio.range[1]:.2f})"
    return f"{ratio.median:.2f}{range_}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _words(name: str) -> str:
    """The name of a parameter or a detail as words.

    >>> _words("hidden_size"), _words("copy_TB_per_s")
    ('hidden size', 'copy TB/s')
    """
    return name.replace("_per_", "/").replace("_", " ")
