"""What the kernels of `one_sided` report to the host: how many rows came, and what went wrong.

A kernel that finds something wrong writes a status into the workspace and into the host's memory, where it is read
without a wait. A status holds only numbers; the reason why a rank failed is a text in that rank's workspace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.errors import Drifted, InputError, PeerFailed
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.transports.one_sided.cuda.control import (
    DEPARTURE,
    ROUND,
    STATUS,
    STATUS_WORDS,
    VERDICT,
    ControlLayout,
    Trouble,
    phase_number,
)
from tokenyard.exchange.transports.one_sided.cuda.operands import LAYER_BITS, DispatchSlots
from tokenyard.group.base import Group
from tokenyard.routing import Routes


class KernelReports:
    """Raises what this rank's kernels report in one workspace, and writes there why this rank failed."""

    def __init__(
        self, group: Group, buffers: Sequence[Tensor], control: ControlLayout, host_status: Tensor
    ) -> None:
        self._group, self._buffers, self._control, self._host_status = group, buffers, control, host_status
        words = self.words()
        self._status = words[STATUS : STATUS + STATUS_WORDS]
        # In the host's memory, by region and rank: rows that came, the rank's `max_tokens`, and rows that went there.
        self.host_counts = torch.zeros(
            control.in_flight, group.size, 3, dtype=torch.int32, pin_memory=group.device.type == "cuda"
        )
        self.layers: list[str] = []  # the names of the layers that are served, by their numbers

    def words(self, rank: int | None = None) -> Tensor:
        """The 64-bit words of this rank's control region, or of another's."""
        buffer = self._buffers[self._group.rank if rank is None else rank]
        return buffer[: self._control.nbytes].view(torch.int64)

    def _text(self, rank: int, phase: Phase) -> Tensor:
        """The bytes in which a rank writes why it failed in a phase."""
        return self._control.text(phase_number(phase)).of(self._buffers[rank])

    def _read_text(self, rank: int, phase: Phase) -> str:
        return bytes(self._text(rank, phase).cpu().tolist()).rstrip(b"\0").decode(errors="replace")

    def start_reading_counts(self, slots: DispatchSlots, slots_TW: Tensor) -> None:
        """Start to copy into the host's memory how many rows came from each rank, and went to each."""
        start, end = self._control.counts(slots.region), self._control.counts(slots.region + 1)
        came_W2 = self._buffers[self._group.rank][start:end].view(torch.int32).view(-1, 2)
        sent_W1 = (slots_TW >= 0).sum(dim=0, dtype=torch.int32).unsqueeze(1)
        self.host_counts[slots.region].copy_(torch.cat([came_W2, sent_W1], dim=1), non_blocking=True)

    def read_counts(self, slots: DispatchSlots) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows that came from each rank, and went to each: as they were last copied to the host."""
        self.raise_trouble(Trouble.FAILED)
        came, limits, sent = self.host_counts[slots.region].t().tolist()
        if set(limits) != {slots.max_tokens}:
            by_rank = ", ".join(f"rank {rank} has {limit}" for rank, limit in enumerate(limits))
            raise Drifted(
                f"the ranks dispatch for different numbers of tokens: {by_rank}",
                expected="one max_tokens on every rank",
                fix="give fixed_shapes the same number on all ranks",
                rank=self._group.rank,
            )
        return tuple(came), tuple(sent)

    def raise_trouble(self, least: Trouble = Trouble.BAD_IDS) -> None:
        """Raise what a kernel has reported so far, if it is at least as bad as `least`. Does not wait for kernels."""
        kind, flag, ranks, waited = self._host_status[0].tolist()
        if kind < least:
            return
        phase = list(Phase)[flag & 1]
        layer = self.layers[flag >> 2 & (1 << LAYER_BITS) - 1] if kind != Trouble.BAD_IDS else None
        who = [rank for rank in range(self._group.size) if ranks >> rank & 1]
        if kind == Trouble.LOST:
            raise self._group.lost(who, phase=phase.value, waited=waited / 1e9, layer=layer)
        if kind == Trouble.BAD_IDS:
            self.forget()
            raise self._bad_id(ranks, f"token {flag} or one of the 63 behind it")
        stamp = _stamp(phase, flag >> 24)
        failures = {rank: self._read_text(rank, phase).partition(stamp) for rank in who}
        self.forget()
        for rank, (_, found, why) in failures.items():
            if found:
                raise PeerFailed(rank, why, phase=phase.value, layer=layer, rank=self._group.rank)
        if kind == Trouble.FAILED and phase is Phase.COMBINE:  # its kernel reported it, and writes no text
            why = "InputError: its topk_ids_TK hold an id that no expert has"
            raise PeerFailed(who[0], why, phase=phase.value, layer=layer, rank=self._group.rank)
        names = ", ".join(f"rank {rank}" for rank in who)
        raise Drifted(
            f"in {phase.value}, {names} came with another layer or another max_tokens",
            expected="every rank of the group to call the same layers in the same order",
            fix="an idle rank calls every layer too, with T = 0",
            layer=layer,
            rank=self._group.rank,
        )

    def forget(self) -> None:
        """Clear the status, on the device and in the host's memory."""
        self._status.zero_()
        self._group.wait_for_device()
        self._host_status.zero_()

    def raise_bad_ids(self, arrival: Arrival) -> None:
        """Raise if this rank's kernel has reported in the combine that an id of this rank has no expert."""
        kind, _, ranks, _ = self._host_status[0].tolist()
        if kind != Trouble.FAILED or not ranks >> self._group.rank & 1:
            return
        self.forget()
        routes = arrival.routes.routes
        assert isinstance(routes, Routes)
        ids_TK, most = routes.topk_ids_TK.cpu(), arrival.spec.num_experts
        token, choice = ((ids_TK < -1) | (ids_TK >= most)).nonzero()[0].tolist()
        raise self._bad_id(int(ids_TK[token, choice]), f"token {token}")

    def _bad_id(self, found: int, where: str) -> InputError:
        return InputError(
            f"topk_ids_TK holds id {found} ({where})",
            expected="ids of the layer's experts, or -1 for no expert",
            fix="pass global expert ids of this layer, and -1 for padding",
            rank=self._group.rank,
        )

    def departed(self) -> bool:
        """Whether the ranks that the last report of a loss names are not lost, but have left."""
        kind, _, ranks, _ = self._host_status[0].tolist()
        return bool(kind == Trouble.LOST and ranks & DEPARTURE)

    def leave(self) -> None:
        """Write into every rank's verdict that this rank takes no further part; the first verdict stays."""
        for rank in range(self._group.size):
            verdict = self.words(rank)[VERDICT : VERDICT + 1]
            verdict += torch.where(verdict == 0, DEPARTURE | 1 << self._group.rank, 0)
        self._group.wait_for_device()

    def publish_failure(self, phase: Phase, layer: int, error: str) -> int:
        """Write why this rank fails in the next round of a phase; return the flag that publishes it."""
        number = phase_number(phase)
        round = int(self.words()[ROUND + number]) + 1  # as the device counts
        # The text of an older failure may still be there: this one says of which round it is.
        place = self._text(self._group.rank, phase)
        room = place.numel()
        text = (_stamp(phase, round) + error).encode()[:room].ljust(room, b"\0")
        place.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return round << 24 | layer << 2 | number | 2

    def all_published(self, phase: Phase, flag: int) -> bool:
        """Whether every rank has published this very flag in a phase."""
        flags = self.words()[self._control.flags(phase_number(phase), flag >> 24)]
        return bool((flags == flag).all())


def _stamp(phase: Phase, round: int) -> str:
    """The prefix of the text of a failure: the phase and the round in which it happened."""
    return f"{phase.value} {round}: "
