"""EPLB statistics: a row of counts from each rank, gathered in the course of a dispatch.

Each rank writes its counts into memory that all ranks map, before it dispatches. A dispatch returns after every rank
has announced its own, so every row is there. No rank can write the counts of its next dispatch before all others have
read these: it has to combine first, and the others come to that combine after they have read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.group.base import Group


class GatheredStatistics:
    """The counts of all ranks of a group, `[ranks, num_experts]`, int32. Making one is collective."""

    def __init__(self, group: Group, num_experts: int) -> None:
        self._rank = group.rank
        with torch.inference_mode(False):  # what is made there could not be written elsewhere
            self._rows = [buffer.view(torch.int32) for buffer in group.share_memory(4 * num_experts)]

    def bring(self, mine: Tensor) -> None:
        """Write the counts of this rank, before a dispatch."""
        self._rows[self._rank].copy_(mine)

    def gathered(self) -> Tensor:
        """A copy of the counts of all ranks, after that dispatch."""
        return torch.stack(self._rows)
