"""How ranks agree on a draft: each makes its own, and all compare them before anything is allocated.

Ranks that disagree all raise `PlanMismatch`, and an error on one rank reaches the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from tokenyard.errors import Alternative, PeerFailed, PlanError, PlanMismatch, Reason, TokenyardError
from tokenyard.exchange import EXCHANGES, Transport, number_hosts
from tokenyard.group import Group
from tokenyard.planning.choosing import choose_exchange
from tokenyard.planning.drafting import Draft, draft_ignoring_env
from tokenyard.version import __version__

_log = logging.getLogger("tokenyard")


def make_plan_id(agreed: Draft, number: int) -> int:
    """A number for a plan: the same on all ranks, and different for each plan of a group."""
    return (agreed.fingerprint() + number) & (2**63 - 1)


def agree_on_draft(group: Group, make: Callable[[], Draft], *, survive: bool = False) -> tuple[Draft, int]:
    """Make a draft on every rank and compare them; return the draft and the plan's number, or raise on all ranks."""
    drafted: Draft | None = None
    error: Exception | None = None
    fields: dict[str, Any] = {}
    try:
        drafted = make()
        fields = drafted.fields()
    except Exception as raised:
        error = raised.at(rank=group.rank) if isinstance(raised, TokenyardError) else raised
    number = group.count_plan()
    fields = {"plans made": number, "survive": survive, **fields}
    report = {
        "host": group.host(),
        "version": __version__,
        "torch": str(torch.__version__),
        "error": f"{type(error).__name__}: {error}" if error else None,
        "fields": fields,
    }
    # A rank that runs another version of tokenyard may leave out some of these keys.
    by_rank = [
        {"host": "", "version": None, "torch": None, "error": None, "fields": {}} | other
        for other in group.gather_json(report, phase="agreement on the plan")
    ]
    if error is not None:
        raise error
    assert drafted is not None
    for rank, other in enumerate(by_rank):
        if other["error"] is not None:
            raise PeerFailed(rank, other["error"], phase="plan", rank=group.rank)
    # Another version of tokenyard may move or round rows differently: an error. Another torch differs only in rounding.
    differences = _differences(["version"], [{"version": other["version"]} for other in by_rank])
    differences |= _differences(fields, [other["fields"] for other in by_rank])
    if differences:
        raise PlanMismatch(differences, rank=group.rank)
    for by_torch in _differences(["torch"], [{"torch": other["torch"]} for other in by_rank]).values():
        versions = ", ".join(f"rank {rank} has torch {version}" for rank, version in by_torch.items())
        _log.warning("the ranks of group %r run different versions: %s", group.name, versions)
    hosts = [other["host"] for other in by_rank]
    group.num_hosts = len(set(hosts))
    return _check_reach(drafted, group, hosts), number


def _check_reach(drafted: Draft, group: Group, hosts: list[str]) -> Draft:
    """The draft, if its exchange reaches all ranks, and can be checked in a paranoid plan; else all ranks raise.

    If the exchange was chosen by `auto`, another one may be chosen here.
    """
    exchange_specs = drafted.exchange_specs

    def refusal(exchange: type[Transport]) -> Reason | None:
        reason = exchange.reaches(group, hosts) or (exchange.watches(group) if drafted.paranoid else None)
        # The transport class for this group's kind of device may support less than the class that was named.
        used = exchange.for_device(group.device)
        if reason is None and drafted.sms is not None and not used.limits_sms:
            why = f"{used.name} on {group.device.type} launches no kernels whose multiprocessors could be bounded"
            reason = Reason(field="sms", value=drafted.sms, why=why)
        return reason or next(filter(None, map(used.supports, exchange_specs)), None)

    if drafted.exchange_reason is not None:
        chosen, why = choose_exchange(
            lambda exchange: refusal(exchange) or exchange.why_not_auto(hosts), group.size, group.device
        )
        if chosen is not drafted.exchange:
            drafted = draft_ignoring_env(
                drafted.specs,
                drafted.world,
                exchange=chosen,
                in_flight=drafted.in_flight,
                max_rows=drafted.max_rows,
                sms=drafted.sms,
                training=drafted.training,
                paranoid=drafted.paranoid,
                renormalize_dropped=drafted.renormalize_dropped,
                device=group.device,
            )
        drafted = replace(drafted, exchange_reason=why)
    reason = refusal(drafted.exchange)
    if reason is None:
        return drafted.on_hosts(number_hosts(hosts)) if drafted.exchange.sums_in_hosts else drafted
    others = [
        Alternative(changes={"exchange": name}) for name, cls in EXCHANGES.items() if refusal(cls) is None
    ]
    raise PlanError(
        str(reason),
        expected="an exchange that reaches all ranks of the group, and supports its layers there"
        + (", and can be watched" if drafted.paranoid else ""),
        fix="" if others else reason.why,
        rank=group.rank,
        alternatives=others,
    )


def _differences(first: Iterable[str], by_rank: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """The fields that differ, those in `first` first, with every rank's value: None, if a rank lacks the field."""
    names = dict.fromkeys([*first, *(name for fields in by_rank for name in fields)])
    values = {name: {rank: fields.get(name) for rank, fields in enumerate(by_rank)} for name in names}
    return {
        name: ranks for name, ranks in values.items() if any(value != ranks[0] for value in ranks.values())
    }
