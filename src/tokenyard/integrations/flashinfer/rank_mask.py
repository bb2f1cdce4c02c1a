"""Rank masks: which of the EP ranks take part in a round trip, and what tensors look like when not all do.

A mask is FlashInfer's: one uint64 on the CPU, bit r for rank r. Ranks whose bit is not set are waited for no more, and
choices of their experts are dropped. The tensors of a round trip keep a place for every rank; that of a masked rank is
empty. The exchange underneath knows active ranks only, numbered in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import InputError, PeerFailed, PeerLost, PlanBroken, TokenyardError, shown
from tokenyard.formats.base import is_tensor
from tokenyard.routing import Placement
from tokenyard.rows import describe

# Ranks that a mask has a bit for.
MASK_BITS = 64


def moe_a2a_active_rank_mask(active_ranks: Sequence[int], ep_size: int) -> Tensor:
    """The mask in which the bits of these ranks are set, for `active_rank_mask=`.

    >>> moe_a2a_active_rank_mask([0, 1, 3], 4).tolist()
    [11]
    """
    check_bits(ep_size)
    mask = 0
    for rank in map(int, active_ranks):
        if not 0 <= rank < ep_size:
            raise InputError(
                f"rank {rank} among active_ranks",
                expected=f"ranks from 0 to {ep_size - 1}",
                fix="pass the EP ranks that are alive",
            )
        mask |= 1 << rank
    return torch.tensor([mask], dtype=torch.uint64)


@dataclass(frozen=True)
class ActiveRanks:
    """The EP ranks that take part, in ascending order, out of `size`."""

    ranks: tuple[int, ...]
    size: int

    @classmethod
    def all_of(cls, size: int) -> ActiveRanks:
        """Every rank."""
        return cls(tuple(range(size)), size)

    @property
    def is_all(self) -> bool:
        """Whether every rank takes part."""
        return len(self.ranks) == self.size

    @property
    def masked(self) -> list[int]:
        """The ranks that do not take part."""
        return [rank for rank in range(self.size) if rank not in self.ranks]

    def keep(self, placement: Placement) -> Placement:
        """A placement without the masked ranks, and without the experts that only they own."""
        return placement if self.is_all else placement.without(self.masked)

    def spread(self, slots_A: Tensor) -> Tensor:
        """`[active ranks, …]` → `[ranks, …]`: zeros in the places of masked ranks. As it is, if all take part."""
        if self.is_all:
            return slots_A
        shape = (self.size, *slots_A.shape[1:])
        # As bytes: torch does not fill every dtype that a payload may have.
        nbytes = math.prod(shape) * slots_A.dtype.itemsize
        slots_W = torch.zeros(nbytes, dtype=torch.uint8, device=slots_A.device).view(slots_A.dtype)
        slots_W = slots_W.view(shape)
        for number, rank in enumerate(self.ranks):
            slots_W[rank].copy_(slots_A[number])
        return slots_W

    def pick(self, slots_W: Tensor) -> Tensor:
        """`[ranks, …]` → `[active ranks, …]`."""
        return slots_W if self.is_all else torch.stack([slots_W[rank] for rank in self.ranks])

    @contextmanager
    def naming(self, rank: int) -> Iterator[None]:
        """Inside, errors of the exchange name EP ranks (`rank` is this one), not numbers among active ones."""
        try:
            yield
        except TokenyardError as error:
            if self.is_all:
                raise
            raise self._renamed(error, rank) from error

    def _renamed(self, error: TokenyardError, rank: int) -> TokenyardError:
        if isinstance(error, PeerFailed):
            peer = self.ranks[error.peer]
            return PeerFailed(peer, error.message, phase=error.phase, layer=error.layer, rank=rank)
        if isinstance(error, PeerLost):
            peers = [self.ranks[peer] for peer in error.peers]
            lost = PeerLost(peers, phase=error.phase, waited=error.waited, layer=error.layer, rank=rank)
            if not isinstance(error, PlanBroken):
                return lost
            broken = PlanBroken(lost, layer=error.layer, rank=rank)
            broken.fix = error.fix
            return broken
        error.rank = rank
        return error


def check_bits(ep_size: int) -> None:
    """Raise if there are more ranks than bits in a mask."""
    if ep_size > MASK_BITS:
        raise InputError(
            f"a rank mask for {ep_size} ranks",
            expected=f"at most {MASK_BITS}: a mask is one uint64, as FlashInfer's is",
            fix="make a new MoeAlltoAll on a group of the ranks that are left",
        )


def read_mask(mask: object, enabled: bool, now: ActiveRanks, rank: int) -> ActiveRanks:
    """The active ranks of a mask. Raise unless each is active `now`, and `rank`, the calling one, is among them."""
    if not enabled and mask is None:
        return now
    if not enabled or mask is None:
        raise InputError(
            f"active_rank_mask is {'not given' if mask is None else 'given'}, and enable_rank_mask is {enabled}",
            expected="a mask in every call of a MoeAlltoAll that was made with enable_rank_mask=True, else none",
            fix="pass moe_a2a_active_rank_mask(active_ranks, ep_size)"
            if enabled
            else "make it with enable_rank_mask=True",
        )
    if not is_tensor(mask, shape=(1,), dtypes=(torch.uint64,), device=torch.device("cpu")):
        raise InputError(
            f"active_rank_mask is {describe(mask)}",
            expected="uint64[1] on the CPU",
            fix="make it with moe_a2a_active_rank_mask(active_ranks, ep_size)",
        )
    bits = int(mask.item())
    ranks = tuple(each for each in range(now.size) if bits >> each & 1)
    if rank not in ranks:
        raise InputError(
            f"active_rank_mask {shown(list(ranks))} leaves out rank {rank}, which calls",
            expected="a mask in which the bit of the calling rank is set",
            fix="do not call on a rank that is masked",
        )
    if back := [each for each in ranks if each not in now.ranks]:
        raise InputError(
            f"active_rank_mask {shown(list(ranks))} has rank {back[0]}, which was masked before",
            expected=f"some of the ranks {list(now.ranks)}, which are active now",
            fix="let a rank come back with a new MoeAlltoAll, on a group of all ranks",
        )
    return ActiveRanks(ranks, now.size)
