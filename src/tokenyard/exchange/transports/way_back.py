"""Sending results back in messages, to the ranks that own their tokens: for transports that move rows by messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tokenyard.exchange.announcement import Announcement, not_due
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.results import Results, ResultsAtHome, RowsAtHome
from tokenyard.exchange.transports.messages import HOME, Mailbox, Outgoing
from tokenyard.group.base import Pending


def send_back(mailbox: Mailbox, results: Results[Outgoing | None] | Results[None]) -> Pending[ResultsAtHome]:
    """Start to send results back to their source ranks; `wait` returns those of this rank's tokens."""
    arrival = results.arrival
    layout = arrival.spec.combine_layout
    if results.encoded is None:
        assert arrival.way_back is not None
        outgoing: Outgoing = arrival.way_back  # the experts have written there
    else:
        outgoing = Outgoing(mailbox, layout.stride, arrival.results_due, into=HOME)
        results.write(outgoing.packets_by_rank)
    results.on_results_written()
    mine = replace(results.announcements.mine, counts=tuple(arrival.results_due))
    told = replace(results.announcements, say=lambda: mine)
    coming = outgoing.start(told, partial(_announced, arrival, mailbox.group.rank))

    def come_home() -> ResultsAtHome:
        came = coming.wait()
        return RowsAtHome.of(arrival, [layout.unpack(packets) for packets in came.packets_by_rank])

    return Pending(come_home)


def _announced(arrival: Arrival, rank: int, heard: Sequence[Announcement]) -> list[int]:
    """The results that come from each rank: as many as it was sent rows (or choices); raise if it announces others."""
    due = arrival.routes.result_counts
    for source, (word, count) in enumerate(zip(heard, due, strict=True)):
        if len(word.counts) != len(due):
            found, expected = f"{len(word.counts)} counts of results", f"{len(due)}, one for each rank"
            raise not_due(source, found, expected=expected, rank=rank)
        if word.counts[rank] != count:
            found, expected = f"{word.counts[rank]} results", f"{count}, as it was sent"
            raise not_due(source, found, expected=expected, rank=rank)
    return list(due)
