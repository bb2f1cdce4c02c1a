"""Watches: they look on while an exchange moves rows, and raise when something is not what it must be.

An exchange calls its watch at the stations of a round trip, whatever the plan was made for. A plain `Watch` does
nothing at any of them. A `ParanoidWatch` seals rows and looks at the seals on the other end:

    seal          a batch is about to be sent                      seals are added to it
    arrived       what the others sent is here                     every row is compared with its seal
    seal_results  results are about to be written or sent          seals are added to them
    leaving       results are ready, the others are told next      the rows that the experts had are compared again
    conclusion    results came home, and are summed                each is compared with its seal, the sum with its twin

What is found on the way out, or before results are sent, reaches the others in place of this rank's results. What is
found at home is told in a last word at the end of the round: an error on one rank is an error on all, also here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenyard.duties import Duty, Ledger, aside
from tokenyard.errors import Corrupted, PeerFailed, PeerLost, TokenyardError
from tokenyard.exchange.seals import TOKEN, check_back, check_out, seal_back, seal_out
from tokenyard.exchange.spec import SEAL, Dispatched, ExchangeSpec, Outgoing
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Group
from tokenyard.rows import RankRows

# Bytes of the last word of a round: the text of an error, or nothing.
_LAST_WORD = 512


class Watch:
    """Looks on while rows move. This one sees nothing, and changes nothing."""

    guard = 0  # bytes that must lie between the regions of a workspace

    def workspace_made(self, workspace: Any, round: int) -> None:
        """A workspace was made, after so many rounds. Collective."""

    def seal(self, spec: ExchangeSpec, round: int, outgoing: Outgoing) -> Outgoing:
        """A batch as it is to be sent."""
        return outgoing

    def arrived(self, dispatched: Dispatched) -> Dispatched:
        """A batch as it is handed to the experts."""
        return dispatched

    def seal_results(self, dispatched: Dispatched, encoded: EncodedRows) -> EncodedRows:
        """Results as they are to be written or sent."""
        return encoded

    def leaving(self, dispatched: Dispatched, *, placed: bool) -> None:
        """All results are ready, `placed` by the experts themselves or not; the other ranks will be told."""

    @contextmanager
    def conclusion(self, dispatched: Dispatched) -> Iterator[None]:
        """The end of a round, in which what came home is looked at and summed."""
        yield

    def open_results(self, dispatched: Dispatched, home: list[EncodedRows]) -> list[EncodedRows]:
        """What came home, by rank, as it is to be summed."""
        return home

    def due_sum(
        self, dispatched: Dispatched, home: list[EncodedRows], add: Sequence[Tensor]
    ) -> Tensor | None:
        """What the sum over ranks must give, if that is looked at."""
        return None

    def check_sum(self, dispatched: Dispatched, due_TH: Tensor | None, y_TH: Tensor) -> None:
        """The sum was made."""


class ParanoidWatch(Watch):
    """Compares every row on both ends, and every sum with its plain twin."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def seal(self, spec: ExchangeSpec, round: int, outgoing: Outgoing) -> Outgoing:
        seals_TC = seal_out(spec, self.group.rank, round, outgoing)
        return replace(outgoing, extra={**outgoing.extra, SEAL: seals_TC})

    def arrived(self, dispatched: Dispatched) -> Dispatched:
        received = dispatched.received
        seals_RC = received.extra[SEAL].clone()
        extra = {name: payload for name, payload in received.extra.items() if name != SEAL}
        opened = replace(dispatched, received=replace(received, extra=extra), seals_RC=seals_RC)
        self._check_rows(opened)
        return opened

    def _check_rows(self, dispatched: Dispatched) -> None:
        assert dispatched.seals_RC is not None  # `arrived` has put it there
        check_out(
            dispatched.spec,
            self.group.rank,
            dispatched.round,
            dispatched.received,
            dispatched.seals_RC,
        )

    def seal_results(self, dispatched: Dispatched, encoded: EncodedRows) -> EncodedRows:
        seals_RC = self._seals_back(dispatched, encoded)
        return replace(encoded, payloads={**encoded.payloads, SEAL: seals_RC})

    def _seals_back(self, dispatched: Dispatched, encoded: EncodedRows) -> Tensor:
        assert dispatched.seals_RC is not None
        tokens_R = dispatched.seals_RC[:, TOKEN]
        return seal_back(self.group.rank, dispatched.round, tokens_R, encoded.payloads)

    def leaving(self, dispatched: Dispatched, *, placed: bool) -> None:
        self._check_rows(dispatched)  # nobody has written into them while the experts ran

    @contextmanager
    def conclusion(self, dispatched: Dispatched) -> Iterator[None]:
        error: Exception | None = None
        try:
            with Ledger().open() as ledger:
                yield
            _check_reduction(dispatched, ledger)
        except Exception as raised:
            error = raised
        if isinstance(error, TokenyardError):
            error.at(layer=dispatched.spec.layer, rank=self.group.rank)
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_LAST_WORD]
        word = torch.frombuffer(bytearray(text.ljust(_LAST_WORD, b"\0")), dtype=torch.uint8)
        heard = self._tell_all(word.to(self.group.device)).cpu()
        if error is not None:
            raise error
        for rank, other in enumerate(heard):
            if why := bytes(other.tolist()).rstrip(b"\0").decode(errors="replace"):
                raise PeerFailed(rank, why, phase="combine", rank=self.group.rank)

    def _tell_all(self, word: Tensor) -> Tensor:
        try:
            return self.group.all_gather(word, phase="the last word of combine")
        except PeerLost as lost:
            # Who missed somebody within the exchange has left, and is not lost for that.
            if named := self.given_up(lost):
                raise PeerLost(named, phase=lost.phase, waited=lost.waited, rank=self.group.rank) from lost
            raise

    def given_up(self, lost: PeerLost) -> list[int]:
        """Who is lost by the verdict of the exchange itself, as the group has lost somebody; nobody, if it has none."""
        return []

    def open_results(self, dispatched: Dispatched, home: list[EncodedRows]) -> list[EncodedRows]:
        return [
            check_back(dispatched.spec, rank, dispatched.round, tokens_N, rows)
            for rank, (rows, tokens_N) in enumerate(
                zip(home, dispatched.return_path.tokens_by_rank, strict=True)
            )
        ]

    def due_sum(
        self, dispatched: Dispatched, home: list[EncodedRows], add: Sequence[Tensor]
    ) -> Tensor | None:
        path = dispatched.return_path
        with aside():  # this is the twin, not the sum
            sums_TH = RankRows(
                rows_by_rank=tuple(rows.decode(torch.float32) for rows in home),
                tokens_by_rank=path.tokens_by_rank,
                num_tokens=path.num_tokens,
                dtype=dispatched.spec.dtype,
            ).sum()
        for term_TH in add:
            sums_TH += term_TH.float()
        return sums_TH.to(dispatched.spec.dtype)

    def check_sum(self, dispatched: Dispatched, due_TH: Tensor | None, y_TH: Tensor) -> None:
        assert due_TH is not None
        if torch.equal(y_TH, due_TH):
            return
        wrong_T = ~((y_TH == due_TH) | (y_TH.isnan() & due_TH.isnan())).all(dim=1)
        if bool(wrong_T.any()):
            token = int(wrong_T.nonzero()[0])
            raise Corrupted(
                f"the result of token {token} is not the sum of what came home ({int(wrong_T.sum())} tokens are off)",
                expected="one row from each rank that has one of its experts, each added once, in rank order",
                token=token,
                place="sum over ranks",
            )


def _check_reduction(dispatched: Dispatched, ledger: Ledger) -> None:
    """Raise unless the exchange has summed over ranks as often as it should: each row that came home, once."""
    came = sum(tokens.numel() for tokens in dispatched.return_path.tokens_by_rank)
    due = came if dispatched.spec.reduces_ranks else 0
    done = sum(ledger.rows(Duty.REDUCE_RANKS).values())
    if done != due:
        raise Corrupted(
            f"duty {Duty.REDUCE_RANKS.value!r} was done on {done} rows",
            expected=f"{due}: {came} came home, and the "
            + ("exchange sums each once" if due or not came else "caller sums them"),
            fix="sum over ranks in one place, the one that the wiring names",
            place=Duty.REDUCE_RANKS.value,
        )
