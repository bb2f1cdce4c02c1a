"""One message for each rank: the announcement of this rank, and behind it the rows that go there.

    ┌──────────────┬───────────────────────┐
    │ announcement │ packets [rows, stride] │   to each rank, its own included
    └──────────────┴───────────────────────┘

Both leave at once: no rank has to know first how many rows come. A receiver has memory for the longest message that a
layer of the group's plans may send (`Group.allow_messages`), and reads in the announcement how many rows follow. That
memory, a *room*, is kept from round to round: to allocate it anew costs more than to copy rows into it.

Rows that do not fit into a message follow in a variable all-to-all of their own, after all announcements were received.
If rows are on GPUs, or have a bound (`plan(max_rows=…)`), all of them follow in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from tokenyard.exchange.announcement import ANNOUNCEMENT_BYTES, Announcement, Announcements
from tokenyard.exchange.batch import numbered
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import bytes_tensor
from tokenyard.exchange.workspace import RowLayout, round_up
from tokenyard.group.base import Group, Pending
from tokenyard.rows import CombineBuffer

HOME = "home"  # the name of the room for results that come home
_PAGE = 4096  # bytes: every room starts at a multiple of this


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """The received rows, and the announcements of all ranks."""

    heard: Sequence[Announcement]
    packets: Tensor  # `[N, stride]`: the rows of all ranks, with unused ones in between
    starts: list[int]  # by rank: the index of its first row among `packets`
    counts: list[int]  # by rank: how many rows came
    # By rank: its rows, if they are not among `packets`.
    elsewhere: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def packets_by_rank(self) -> list[Tensor]:
        """The rows of each rank."""
        return [
            self.elsewhere.get(rank, self.packets[start : start + count])
            for rank, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
        ]

    def slots(self) -> Tensor | None:
        """The index of each row among `packets`, rank after rank; None if `packets` holds nothing else."""
        if len(self.packets) == sum(self.counts) and not self.elsewhere:
            return None
        return numbered(self.starts, self.counts).to(self.packets.device)


class Outgoing:
    """Messages with `counts[w]` rows for rank w: rows are written into `packets_by_rank`, then `start` sends them.

    Messages of other ranks are received into the room `into`. `bounded`: announcements are sent first, so that all
    ranks know whether one would get too many rows, and rows follow. `out`: the name of a room of their own, for
    messages that are written while others are sent; else all messages share one room.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        stride: int,
        counts: Sequence[int],
        into: Hashable,
        *,
        bounded: bool = False,
        out: Hashable = None,
    ) -> None:
        self._mailbox, self._stride = mailbox, stride
        # Whether rows leave with the announcement; else all of them follow it.
        self._at_once = bool(mailbox.group.longest_message) and not bounded
        group, me = mailbox.group, mailbox.group.rank
        first = mailbox.head_rows(stride) * stride  # where rows start in a message
        self._late = self._followers(counts)
        sizes = [
            first + count * stride if count and not late else mailbox.head_bytes
            for count, late in zip(counts, self._late, strict=True)
        ]
        self._most, self._own, kept = mailbox.most(stride), 0, 0
        if self._at_once:
            # This rank's message to itself is not sent but written where it is read: in front of the received messages,
            # or if messages have a room of their own (`out`), in front of those.
            own, sizes[me] = first + counts[me] * stride, 0
            self._own, kept = (own, 0) if out is None else (0, own)
        self._room = mailbox.room(into, self._own + self._most * group.size)
        space, self._sent = mailbox.room("out" if out is None else out, kept + sum(sizes)), sizes
        self._content = space[kept:]
        messages = list(self._content.split_with_sizes(sizes))
        if self._at_once:
            messages[me] = self._room[: self._own] if self._own else space[:kept]
        self._kept = {me: messages[me][first:].view(-1, stride)} if kept else {}
        # The room of messages as a matrix of rows, if every row in it starts at a multiple of the stride.
        self._rows = space.view(-1, stride) if kept and not any(n % stride for n in sizes) else None
        self._heads = [message[: mailbox.head_bytes] for message in messages]
        self._late_rows = torch.empty(sum(self._late), stride, dtype=torch.uint8, device=group.device)
        # Where the rows for each rank are written.
        self.packets_by_rank = [
            message[first:].view(-1, stride) if message.shape[0] > first else late
            for message, late in zip(messages, self._late_rows.split_with_sizes(self._late), strict=True)
        ]

    def places(self, layout: RowLayout) -> CombineBuffer | None:
        """The buffer into which experts write the rows for all ranks; None if these do not lie in one matrix."""
        if self._rows is None or [payload.nbytes for payload in layout.payloads] != [layout.stride]:
            return None
        first = self._rows.data_ptr()
        starts = [(packets.data_ptr() - first) // layout.stride for packets in self.packets_by_rank]
        slots_R = numbered(starts, [packets.shape[0] for packets in self.packets_by_rank])
        return CombineBuffer(rows_SH=self._rows.view(layout.payloads[0].dtype), slots_R=slots_R)

    def _followers(self, counts: Sequence[int]) -> list[int]:
        """Of `counts[w]` rows for, or from, rank w: the number that is sent only after all announcements."""
        if not self._at_once:
            return list(counts)
        fits, me = self._mailbox.fits, self._mailbox.group.rank
        return [0 if rank == me or fits(n, self._stride) else n for rank, n in enumerate(counts)]

    def start(
        self,
        announcements: Announcements,
        arriving: Callable[[Sequence[Announcement]], list[int]] | None = None,
    ) -> Pending[Incoming]:
        """Send the messages; `wait` returns the received rows, or raises if a rank announced that it failed.

        `arriving` computes from all announcements how many rows come here from each rank; by default it is the count
        for this rank. The largest count that a rank announces must not be below the rows that it sends to any one rank.
        """
        mailbox, group, stride = self._mailbox, self._mailbox.group, self._stride
        word = bytes_tensor(announcements.for_all().encode(mailbox.head_bytes)).to(group.device)
        for head in self._heads:
            head.copy_(word)
        phase = announcements.mine.phase.value
        room = self._room[self._own :]
        came = group.start_messages(self._content, self._sent, self._most, room, phase=phase)

        def finish() -> Incoming:
            messages = came.wait()
            starts = [self._own + start for start in messages]
            if self._own:
                starts[group.rank] = 0
            heads = [self._room[start : start + mailbox.head_bytes] for start in starts]
            if self._kept:
                heads[group.rank] = self._heads[group.rank]
            heard = announcements.heard(mailbox.read(heads))
            if announcements.mine.error:
                return Incoming(heard=heard, packets=self._late_rows, starts=[], counts=[])
            counts = [word.counts[group.rank] for word in heard] if arriving is None else arriving(heard)
            # All ranks see the same numbers: either all of them take part in the all-to-all of late rows, or none.
            all_fit = mailbox.fits(max(max(word.counts) for word in heard), stride)
            if not (all_fit and self._at_once):
                return self._with_late(starts, heard, counts, phase)
            head = mailbox.head_rows(stride)
            starts = [start // stride + head for start in starts]
            packets = self._room.view(-1, stride)
            return Incoming(heard=heard, packets=packets, starts=starts, counts=counts, elsewhere=self._kept)

        return Pending(finish)

    def _with_late(
        self, starts: list[int], heard: Sequence[Announcement], arriving: list[int], phase: str
    ) -> Incoming:
        """Receive the rows that did not fit into messages, and join them with those that came, in rank order."""
        mailbox, stride = self._mailbox, self._stride
        late = self._followers(arriving)
        followed = mailbox.group.all_to_all_rows(self._late_rows, self._late, late, phase=phase)
        packets = followed
        if late != arriving:
            parts = []
            for rank, (start, count, part) in enumerate(
                zip(starts, arriving, followed.split(late), strict=True)
            ):
                first = start + mailbox.head_rows(stride) * stride
                came = self._room[first:][: count * stride].view(-1, stride)
                parts.append(part if len(part) else self._kept.get(rank, came))
            packets = torch.cat(parts)
        return Incoming(heard=heard, packets=packets, starts=[0, *accumulate(arriving)][:-1], counts=arriving)


class Mailbox:
    """Writes messages to all ranks of a group and reads theirs, in memory that it keeps.

    At most one message to each rank is on its way at a time. `serve` makes room for the counts of announcements.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.head_bytes = ANNOUNCEMENT_BYTES  # of an announcement, with its counts
        self._rooms: dict[Hashable, Tensor] = {}

    def serve(self, specs: Sequence[ExchangeSpec], num_counts: Callable[[ExchangeSpec], int]) -> None:
        """Make room for the messages of these layers, as far as the group allows.

        `num_counts` gives the number of counts that are announced of a layer's pass; with `max_rows` it is doubled.
        """
        counts = max(num_counts(spec) * (1 if spec.max_rows is None else 2) for spec in specs)
        self.head_bytes = round_up(ANNOUNCEMENT_BYTES + 8 * counts)
        ways = [(spec.dispatch_layout.stride, spec.max_tokens) for spec in specs]
        ways += [(spec.combine_layout.stride, spec.max_tokens * spec.results_per_row) for spec in specs]
        self.group.allow_messages(max((self.head_rows(way) + rows) * way for way, rows in ways))

    def announce(self, announcements: Announcements) -> Pending[Sequence[Announcement]]:
        """Send this rank's announcement to all ranks, without rows; `wait` returns those of all ranks."""
        none = [0] * self.group.size
        coming = Outgoing(self, self.head_bytes, none, into=HOME).start(announcements, lambda heard: none)
        return Pending(lambda: coming.wait().heard)

    def head_rows(self, stride: int) -> int:
        """The number of rows of this stride whose bytes an announcement takes up at the head of a message."""
        return -(-self.head_bytes // stride)

    def fits(self, count: int, stride: int) -> bool:
        """Whether so many rows fit into a message to another rank."""
        return count == 0 or (self.head_rows(stride) + count) * stride <= self.group.longest_message

    def most(self, stride: int) -> int:
        """Bytes of room for the longest message of any layer, in rows of this stride."""
        longest = self.group.longest_message
        return max(-(-longest // stride), self.head_rows(stride)) * stride if longest else self.head_bytes

    def read(self, heads: Sequence[Tensor]) -> list[Announcement]:
        """Decode the announcements at the heads of all ranks' messages."""
        together = torch.stack(list(heads)).cpu().numpy()
        return [Announcement.decode(head.tobytes(), rank) for rank, head in enumerate(together)]

    def room(self, name: Hashable, nbytes: int) -> Tensor:
        """The memory of this name, `nbytes` of it: the same as in the call before, if that suffices."""
        found = self._rooms.get(name)
        if found is None or found.numel() < nbytes:
            with torch.inference_mode(False):  # inference tensors could not be written outside of it
                found = torch.empty(nbytes + _PAGE, dtype=torch.uint8, device=self.group.device)
            # With rooms at multiples of a page, rows of two of them that are summed lie on common lines (`reduce`).
            self._rooms[name] = found = found[-found.data_ptr() % _PAGE :][:nbytes]
        return found[:nbytes]

    def clear(self) -> None:
        """Give the memory back."""
        self._rooms.clear()
