"""Exchanges that send messages: collectives of a group, each behind an announcement from every rank.

Subclasses say how the rows of a checked and announced batch travel (`_move`). Results return in one variable
all-to-all, the announcement in front of the rows, in the same message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.exchange.announcement import (
    ANNOUNCEMENT_BYTES,
    Announcement,
    Phase,
    check_counts,
    check_failures,
    check_places,
)
from tokenyard.exchange.base import Exchange
from tokenyard.exchange.spec import Dispatched, ExchangeSpec, Outgoing
from tokenyard.formats.base import EncodedRows
from tokenyard.rows import ReceivedRows


class MessageExchange(Exchange):
    """Moves rows in collective calls of the group."""

    @abstractmethod
    def _pack(self, spec: ExchangeSpec, outgoing: Outgoing) -> Tensor:
        """The packets of a checked batch, `[rows, stride]`, in the order in which they are sent."""

    @abstractmethod
    def _move(
        self, spec: ExchangeSpec, outgoing: Outgoing, packets: Tensor, heard: Sequence[Announcement]
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        """Move an announced batch; return what arrived, and how many rows this rank owes each source rank."""

    def _load_out(self, spec: ExchangeSpec, round: int, outgoing: Outgoing) -> Tensor:
        return self._pack(spec, outgoing)

    def _send_out(
        self, spec: ExchangeSpec, round: int, outgoing: Outgoing, loaded: Any
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        mine = self._announcement(spec, Phase.DISPATCH, round, outgoing.num_tokens, outgoing.counts, None)
        heard = self._announce(mine)
        check_counts(self.group, mine, heard, spec.max_tokens)
        return self._move(spec, outgoing, loaded, heard)

    def _fail_out(self, spec: ExchangeSpec, round: int, error: BaseException) -> None:
        counts = [0] * self.group.size
        self._announce(self._announcement(spec, Phase.DISPATCH, round, 0, counts, error))

    def _announce(self, mine: Announcement) -> list[Announcement]:
        """Tell every rank what this one is about to do, and hear the same of them."""
        encoded = bytes_tensor(mine.encode(ANNOUNCEMENT_BYTES + 8 * self.group.size))
        gathered = self.group.all_gather(encoded.to(self.group.device), phase=mine.phase.value)
        heard = [Announcement.decode(tensor_bytes(part), rank) for rank, part in enumerate(gathered)]
        check_places(self.group, mine, heard, self._names)
        self._round = max(self._round, mine.round)  # all ranks were in this round, whatever comes of it
        check_failures(self.group, mine, heard)
        return heard

    def _load_back(self, dispatched: Dispatched, encoded: EncodedRows) -> Tensor:
        return dispatched.spec.combine_layout.pack(encoded.payloads, encoded.num_rows, encoded.device)

    def _send_back(self, dispatched: Dispatched, loaded: Any) -> list[EncodedRows]:
        spec, path = dispatched.spec, dispatched.return_path
        return [
            EncodedRows(
                format=spec.combine_wire,
                hidden_size=spec.hidden_size,
                payloads=spec.combine_layout.unpack(part),
            )
            for part in self._return(dispatched, loaded.split(path.received_counts), None)
        ]

    def _fail_back(self, dispatched: Dispatched, error: BaseException) -> None:
        stride = dispatched.spec.combine_layout.stride
        nothing = [
            torch.zeros(count, stride, dtype=torch.uint8, device=self.group.device)
            for count in dispatched.return_path.received_counts
        ]
        self._return(dispatched, nothing, error)

    def _return(
        self, dispatched: Dispatched, packets_by_rank: Sequence[Tensor], error: BaseException | None
    ) -> list[Tensor]:
        """Send every source rank its rows, behind an announcement; return what came home, by rank."""
        spec, path = dispatched.spec, dispatched.return_path
        stride = spec.combine_layout.stride
        front = -(-ANNOUNCEMENT_BYTES // stride)  # rows that the announcement takes
        mine = self._announcement(spec, Phase.COMBINE, dispatched.round, path.num_tokens, [], error)
        head = bytes_tensor(mine.encode(front * stride)).view(front, stride).to(self.group.device)
        expected = [front + tokens.numel() for tokens in path.tokens_by_rank]
        arrived = self.group.all_to_all_rows(
            torch.cat([part for packets in packets_by_rank for part in (head, packets)]),
            [front + count for count in path.received_counts],
            expected,
            phase="combine",
        )
        parts = arrived.split(expected)
        heard = [Announcement.decode(tensor_bytes(part[:front]), rank) for rank, part in enumerate(parts)]
        check_places(self.group, mine, heard, self._names)
        check_failures(self.group, mine, heard)
        return [part[front:] for part in parts]


def bytes_tensor(encoded: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    """What a tensor of bytes holds."""
    return tensor.cpu().contiguous().numpy().tobytes()
