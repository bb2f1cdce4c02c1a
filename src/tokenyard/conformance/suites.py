"""The suites, by the kind of part: what every exchange, every format and every experts class must satisfy.

    check_exchange(MyExchange)    check_format(MyFormat())    check_experts(MyExperts)

Each takes a class (or an object), also one from outside of this package, runs every named check on it, and returns a
`CheckResult` per check. Findings are returned, not raised. In a test, `assert_passed` turns them into one error.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from tokenyard import formats
from tokenyard.conformance import (
    exchange_accounts,
    exchange_duties,
    exchange_failures,
    exchange_lasting,
    exchange_suite,
    exchange_uses,
    experts_suite,
    experts_uses,
    format_suite,
    gradient_experts,
    gradient_suite,
)
from tokenyard.conformance.cases import Case, run_case
from tokenyard.conformance.draws import RankKind, hosts_for
from tokenyard.conformance.exchange_suite import Trial
from tokenyard.conformance.runner import DEADLINE, Finding, Verdict, attempt, checks_of, judge, run_on_ranks
from tokenyard.errors import InputError, unknown_name
from tokenyard.exchange import Transport
from tokenyard.exchange import resolve as resolve_exchange
from tokenyard.experts import Experts
from tokenyard.experts import get as experts_named
from tokenyard.formats import Format
from tokenyard.group import Group

_Checks = dict[str, Callable[..., None]]
# All checks by name: those that every exchange, every format and every experts class must pass.
_MOVEMENT = (exchange_suite, exchange_uses, exchange_duties)
# Those of gradients are asked of parts that declare that they train.
EXCHANGE_GRADIENT_CHECKS = checks_of(gradient_suite, parameters=["trial"])
EXCHANGE_CHECKS = (
    checks_of(*_MOVEMENT, exchange_accounts, exchange_failures, exchange_lasting, parameters=["trial"])
    | EXCHANGE_GRADIENT_CHECKS
)
FORMAT_CHECKS = checks_of(format_suite, parameters=["format"])
EXPERTS_GRADIENT_CHECKS = checks_of(gradient_experts, parameters=["cls", "device"])
EXPERTS_CHECKS = (
    checks_of(experts_suite, experts_uses, parameters=["cls", "device"]) | EXPERTS_GRADIENT_CHECKS
)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one named check of one part."""

    check: str  # the name of the check
    what: str  # the property that the check tests
    finding: str | None = None  # what is wrong; None: nothing

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return self.finding is None


def check_exchange(
    exchange: str | type[Transport],
    *,
    ranks: RankKind = "threads",
    world: int = 4,
    rounds: int | None = None,
    only: Sequence[str] = (),
    device: str | torch.device | None = None,
    deadline: float = DEADLINE,
) -> list[CheckResult]:
    """Run the exchange suite on `world` ranks, or the most it serves; rows live on `device`, the CPU if left out.

    `only` names some checks. `rounds` are those of the check `many_rounds`: 50 if left out, and 1000 where the exchange
    shares memory between ranks; and at most those of `thousands_of_rounds`. `deadline` is that of the group.

    >>> [result.passed for result in check_exchange("two_sided", only=["one_copy_per_rank"])]
    [True]
    """
    cls = resolve_exchange(exchange)
    world = min(world, cls.most_ranks or world)
    trains = cls.trains_on(torch.device(device or "cpu")) is None
    checks = _chosen(EXCHANGE_CHECKS, only, EXCHANGE_GRADIENT_CHECKS, trains)
    jobs, hosts = [(name, cls, rounds) for name in checks], hosts_for(cls, world)
    verdicts = run_on_ranks(
        world, _run_exchange_check, jobs, ranks=ranks, hosts=hosts, device=device, deadline=deadline
    )
    return _results(checks, verdicts)


def _run_exchange_check(group: Group, job: tuple[str, type[Transport], int | None]) -> None:
    name, exchange, rounds = job
    Trial(group=group, exchange=exchange, rounds=rounds).run(EXCHANGE_CHECKS[name])


def check_format(format: str | Format | type[Format], *, only: Sequence[str] = ()) -> list[CheckResult]:
    """Run the format suite.

    >>> all(result.passed for result in check_format("mxfp8(alignment=256)"))
    True
    """
    found = format() if isinstance(format, type) else formats.get(format)
    checks = _chosen(FORMAT_CHECKS, only)
    return _results(checks, [judge([attempt(check, found)]) for check in checks.values()])


def check_experts(
    experts: str | type[Experts], *, only: Sequence[str] = (), device: str | torch.device = "cpu"
) -> list[CheckResult]:
    """Run the experts suite, with rows on `device`. Experts that do not run there are refused: `InputError`.

    >>> all(result.passed for result in check_experts("reference", only=["one_type_returned"]))
    True
    """
    cls, device = experts_named(experts), torch.device(device)
    if (reason := cls.runs_on(device)) is not None:
        raise InputError(
            str(reason), expected=f"experts that run on {device}", fix="check them where they do"
        )
    checks = _chosen(EXPERTS_CHECKS, only, EXPERTS_GRADIENT_CHECKS, device.type in cls.trains)
    return _results(checks, [judge([attempt(check, cls, device)]) for check in checks.values()])


def check_cases(
    cases: Sequence[Case],
    *,
    ranks: RankKind = "threads",
    device: str | torch.device | None = None,
    deadline: float = DEADLINE,
) -> Iterable[Verdict]:
    """Run cases of one exchange and world on one group: bitwise against the twin, inside the oracle's bound."""
    world = cases[0].world
    hosts = hosts_for(resolve_exchange(cases[0].exchange), world)
    return run_on_ranks(world, judge_case, cases, ranks=ranks, hosts=hosts, device=device, deadline=deadline)


def judge_case(group: Group, case: Case) -> None:
    """Run a case on this rank; raise a finding if its result is wrong."""
    complaints = run_case(group, case, end_to_end=False).complaints()
    if complaints:
        found, _, expected = complaints[0].partition("; expected ")
        raise Finding(found, expected)


def assert_passed(results: Iterable[CheckResult]) -> None:
    """Raise one `AssertionError` with every finding, or return."""
    findings = [f"{result.check}: {result.finding}" for result in results if not result.passed]
    if findings:
        raise AssertionError("\n".join(findings))


def _chosen(
    checks: _Checks, only: Sequence[str], of_gradients: Container[str] = (), trains: bool = True
) -> _Checks:
    """The checks that `only` names, or all; those of gradients only if the part trains."""
    for name in only:
        if name not in checks:
            raise unknown_name("check", name, checks)
    asked = {name: check for name, check in checks.items() if trains or name not in of_gradients}
    return {name: check for name, check in asked.items() if not only or name in only}


def _results(checks: _Checks, verdicts: Iterable[Verdict]) -> list[CheckResult]:
    return [
        CheckResult(check=name, what=(check.__doc__ or "").strip(), finding=verdict.finding)
        for (name, check), verdict in zip(checks.items(), verdicts, strict=True)
    ]
