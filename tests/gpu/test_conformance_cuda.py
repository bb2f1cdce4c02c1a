"""The exchange suite and random cases with rows on a GPU that four ranks share, as threads and as processes.

Bits are compared with a twin on the CPU: the reference experts and all formats have the same bits on both
(`test_experts_cuda`, `test_formats_cuda`), so whatever differs was moved wrong. A suite runs once for all its checks
that were selected; each check is a test of its own.

    pytest tests/gpu/test_conformance_cuda.py -k "one_sided and threads and many_rounds"
"""

import pytest

from tokenyard.conformance.campaign import Campaign
from tokenyard.conformance.draws import draw_case
from tokenyard.conformance.suites import EXCHANGE_CHECKS, check_cases, check_exchange
from tokenyard.exchange import EXCHANGES
from tokenyard.formats import FORMATS

pytestmark = pytest.mark.gpu

RANKS = 4
# Between processes without MPS, a kernel that waits for another rank costs 4 to 7 ms.
ROUNDS = 40
CASES = 16  # every one compiles kernels for shapes of its own
# Seconds: the first round of a launch compiles kernels, in each process.
DEADLINE = 60.0

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])
_suites = {}


@pytest.fixture
def finding(request, exchange, ranks, check):
    """What the suite found in one check."""
    if (exchange, ranks) not in _suites:
        params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        mine = [p for p in params if (p.get("exchange"), p.get("ranks")) == (exchange, ranks)]
        results = check_exchange(
            exchange,
            ranks=ranks,
            world=RANKS,
            rounds=ROUNDS,
            only=[p["check"] for p in mine if "check" in p],
            device="cuda",
            deadline=DEADLINE,
        )
        _suites[exchange, ranks] = {result.check: result.finding for result in results}
    return _suites[exchange, ranks][check]


@pytest.mark.parametrize("check", EXCHANGE_CHECKS)
@pytest.mark.parametrize("exchange", ["one_sided", "hierarchical", "two_sided", "allgather"])
@both_kinds
def test_an_exchange_passes(exchange, ranks, check, finding):
    assert finding is None


def one_sided_cases(ranks):
    campaign = Campaign(
        exchanges=[EXCHANGES["one_sided"]],
        formats=list(FORMATS),
        ranks=[ranks],
        cases=CASES,
        seed=7,
        device="cuda",
    )
    return [case for _, case in campaign.draw()]


@both_kinds
def test_random_cases_pass(ranks):
    findings = []
    cases = one_sided_cases(ranks)
    for world in sorted({case.world for case in cases}):
        alike = [case for case in cases if case.world == world]
        verdicts = check_cases(alike, ranks=ranks, device="cuda", deadline=DEADLINE)
        findings += [
            f"{v.finding}\n  {case}" for case, v in zip(alike, verdicts, strict=True) if not v.passed
        ]
    assert not findings, "\n".join([f"{len(findings)} of {len(cases)} cases:", *findings])


@both_kinds
@pytest.mark.parametrize("exchange", ["hierarchical", "two_sided", "allgather"])
def test_a_few_random_cases_of_the_others_pass(exchange, ranks):
    cases = [
        draw_case(seed, exchange=exchange, ranks=ranks, crowded=False, device="cuda") for seed in range(60)
    ]
    some = [case for case in cases if case.world == RANKS][:8]
    findings = [v.finding for v in check_cases(some, ranks=ranks, device="cuda", deadline=DEADLINE)]
    assert findings == [None] * len(some)
