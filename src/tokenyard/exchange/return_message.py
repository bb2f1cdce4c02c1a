"""Results in one variable all-to-all, with the announcement of each rank in front of its rows, in the same message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.exchange.announcement import ANNOUNCEMENT_BYTES, Announcement, Announcements
from tokenyard.exchange.batch import Arrival, Failure, Results, ResultsAtHome, RowsAtHome
from tokenyard.exchange.transport import bytes_tensor, tensor_bytes
from tokenyard.group.base import Group, Pending


def send_back(group: Group, results: Results) -> Pending[ResultsAtHome]:
    """Start to return results to their source ranks."""
    arrival = results.arrival
    packets_by_rank = results.packets_by_rank()
    results.before_telling()
    home = _start(group, arrival, packets_by_rank, results.announcements)
    layout = arrival.spec.combine_layout
    return Pending(lambda: RowsAtHome.of(arrival, [layout.unpack(part) for part in home.wait()]))


def fail_back(group: Group, failure: Failure) -> None:
    """Send rows of zeros behind an announcement that says why: the others have sized their messages for rows."""
    assert failure.arrival is not None
    stride = failure.arrival.spec.combine_layout.stride
    nothing = [
        torch.zeros(count, stride, dtype=torch.uint8, device=group.device)
        for count in failure.arrival.results_due
    ]
    _start(group, failure.arrival, nothing, failure.announcements).wait()


def _start(
    group: Group, arrival: Arrival, packets_by_rank: Sequence[Tensor], announcements: Announcements
) -> Pending[list[Tensor]]:
    stride = arrival.spec.combine_layout.stride
    front = -(-ANNOUNCEMENT_BYTES // stride)  # rows that the announcement takes
    mine = announcements.for_all().encode(front * stride)
    head = bytes_tensor(mine).view(front, stride).to(group.device)
    expected = [front + count for count in arrival.routes.result_counts]
    arriving = group.start_all_to_all_rows(
        torch.cat([part for packets in packets_by_rank for part in (head, packets)]),
        [front + count for count in arrival.results_due],
        expected,
        phase="combine",
    )

    def finish() -> list[Tensor]:
        parts = arriving.wait().split(expected)
        announcements.heard(
            [Announcement.decode(tensor_bytes(part[:front]), rank) for rank, part in enumerate(parts)]
        )
        return [part[front:] for part in parts]

    return Pending(finish)
