"""Passes of a model that ranks make together, though each has its own number of them.

A pass is one forward of the model: all its MoE layers, in order, each of them collective. Ranks that hold different
batches make different numbers of passes (one has generated its last token, another needs ten more; a third holds
nothing), and a rank that stops calling would leave the others waiting. So ranks gather before each pass how many
tokens each of them brings:

    rank 0:  37   1   1   1   1   done
    rank 1:   9   1   done             (takes part with no tokens)
    rank 2:  done                      (takes part with no tokens)
             │    │   │   │   │   └── all ranks are done, and leave together
             └────┴───┴───┴───┴────── one pass each

The cost is one small gather a pass, and no rank runs a pass that is not needed. It also decides into how many
parts a pass is cut: where a rank brings more tokens than the plan's `max_tokens`, every layer of the pass
makes several round trips on all ranks, so that a long prompt needs no larger workspace.

A rank that raises between two layers announces its error in the layer in which the other ranks wait; a rank that raises
between two passes reports it in the next gather. All ranks then raise, and the group stays usable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tokenyard.errors import ContractError, Drifted, GroupError, HandleError, PeerFailed
from tokenyard.planning.planner import Plan

# What a rank brings to a gather instead of a number of tokens.
_DONE, _FAILED = -1, -2


class SynchronizedPasses:
    """Tracks the next layer of a pass on this rank; inside `synchronized`, ranks agree before each pass."""

    def __init__(self, plan: Plan, layers: Sequence[str]) -> None:
        self.plan, self.layers = plan, list(layers)
        self.max_tokens = plan.wiring(self.layers[0]).exchange_spec.max_tokens
        self.passes = 0  # that this rank took part in
        self.synchronizing = False
        self._next = 0  # the layer that comes next
        self._inside = False  # whether a layer is running: its errors have reached the other ranks already
        self.parts = 1  # round trips of each layer in the pass that has been agreed on

    def begin_layer(self, index: int, num_tokens: int) -> int:
        """Begin a layer, which runs until `end_layer`; return the number of parts that its tokens are split into."""
        if self.synchronizing and index != self._next and not (index == 0 and self._inside):
            raise ContractError(
                f"layer {self.layers[index]!r} was called where {self.layers[self._next]!r} is next",
                expected="every pass to call all MoE layers, in order",
                fix="call the whole model inside of `passes()`",
                rank=self.plan.group.rank,
            )
        if index == 0:
            self._next = 0
            self._inside = False
            self.parts = self._agree_on_parts(num_tokens) if self.synchronizing else 1
            self.passes += 1
        self._inside = True
        return self.parts

    def end_layer(self, index: int) -> None:
        """Record that a layer is done. It is not called for a layer that raised."""
        self._inside = False
        self._next = (index + 1) % len(self.layers)

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Inside, ranks agree before each pass. A rank without tokens makes empty passes there until `all_done`."""
        if self.synchronizing:
            raise HandleError(
                "this rank is making passes together with the others already",
                expected="one `passes()` at a time",
                fix="leave the first one before",
                rank=self.plan.group.rank,
            )
        self.synchronizing, self._next, self._inside = True, 0, False
        try:
            yield
        except Exception as error:
            if not isinstance(error, GroupError):  # all ranks raise these already
                self._report(error)
            raise
        finally:
            self.synchronizing = False

    def all_done(self) -> bool:
        """Report that this rank is done; return whether all are. If not, it must make an empty pass in `parts`."""
        if self._next != 0 and not self._inside:
            raise ContractError(
                f"a pass ended before layer {self.layers[self._next]!r}",
                expected="every pass to call all MoE layers, in order",
                fix="let an error of the model leave `passes()`: it reaches all ranks",
                rank=self.plan.group.rank,
            )
        self._next, self._inside = 0, False
        self.parts = self._agree_on_parts(_DONE)
        return self.parts == 0

    @contextmanager
    def empty_pass(self) -> Iterator[None]:
        """A pass that was agreed on already, in which this rank has no tokens."""
        self.passes += 1
        self._inside = True
        yield
        self._inside = False

    def _agree_on_parts(self, mine: int) -> int:
        """Gather how many tokens ranks bring; return into how many parts the pass is cut, 0 if all are done."""
        tokens = self._gather(mine)
        if _FAILED in tokens:
            self._gather_errors(None)
        if all(number == _DONE for number in tokens):
            return 0
        return max(1, *(-(-number // self.max_tokens) for number in tokens))

    def _gather(self, mine: int) -> list[int]:
        """The numbers that all ranks bring."""
        group = self.plan.group
        word = torch.tensor([mine], dtype=torch.int64).view(torch.uint8)
        gathered = group.all_gather(word.to(group.device), phase="the gather before a pass")
        numbers: list[int] = gathered.cpu().view(torch.int64).flatten().tolist()
        return numbers

    def _report(self, error: Exception) -> None:
        """Report this rank's error to the other ranks, which wait for it in a layer or in a gather."""
        if self._inside:
            return
        if self._next == 0:
            self._gather(_FAILED)
            self._gather_errors(error)
            return
        exchange_spec = self.plan.wiring(self.layers[self._next]).exchange_spec
        with self.plan.exchange.begin(exchange_spec):
            raise error

    def _gather_errors(self, error: Exception | None) -> None:
        """Gather the errors of all ranks after a failure; raise, unless `error` shows that this rank has one itself."""
        group = self.plan.group
        mine = None if error is None else f"{type(error).__name__}: {error}"
        errors = group.gather_json(mine, phase="the gather before a pass")
        if error is not None:
            return
        for rank, other in enumerate(errors):
            if other is not None:
                raise PeerFailed(rank, other, phase="a pass of the model", rank=group.rank)
        raise Drifted(
            "a rank reported that it failed, and then gave no error",
            expected="every rank of the group to make the same calls",
            fix="look for a branch that only some ranks take",
            rank=group.rank,
        )
