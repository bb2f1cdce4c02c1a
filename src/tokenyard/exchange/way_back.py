"""Results as messages to the ranks that own their tokens, for transports that move rows by messages."""

from __future__ import annotations

from dataclasses import replace

from tokenyard.errors import GroupError
from tokenyard.exchange.batch import Arrival, Results, ResultsAtHome, RowsAtHome
from tokenyard.exchange.messages import HOME, Mailbox, Outgoing
from tokenyard.group.base import Pending


def send_back(mailbox: Mailbox, results: Results) -> Pending[ResultsAtHome]:
    """Start to return results to their source ranks."""
    arrival = results.arrival
    layout = arrival.spec.combine_layout
    if results.encoded is None:
        outgoing: Outgoing = arrival.way_back  # the experts have written there
    else:
        outgoing = mailbox.write(layout.stride, arrival.results_due, into=HOME)
        results.write(outgoing.packets_by_rank)
    results.before_telling()
    mine = replace(results.announcements.mine, counts=tuple(arrival.results_due))
    coming = outgoing.start(replace(results.announcements, say=lambda: mine))

    def come_home() -> ResultsAtHome:
        came = coming.wait()
        _check_counts(arrival, came.counts, mailbox.group.rank)
        return RowsAtHome.of(arrival, [layout.unpack(packets) for packets in came.packets_by_rank])

    return Pending(come_home)


def _check_counts(arrival: Arrival, announced: list[int], rank: int) -> None:
    """Raise unless each rank returns as many results as it was sent rows, or choices."""
    for source, (count, due) in enumerate(zip(announced, arrival.routes.result_counts, strict=True)):
        if count != due:
            raise GroupError(
                f"rank {source} announces {count} results",
                expected=f"{due}, as it was sent",
                fix=f"look for what wrote into the announcements of rank {source}",
                rank=rank,
            )
