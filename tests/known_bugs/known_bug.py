"""What is kept of a known bug: its story, the same bug put into our own code, and the check that catches it.

A mutant patches a function that every layer runs through, never a copy beside it. It must be *alive*: a plain bf16
layer runs with it as if nothing were wrong (`smoke`). And it must be *killed*, by the check that is named for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.runner import DEADLINE
from tokenyard.conformance.suites import check_exchange, check_experts, check_format

# -- What catches a mutant -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExchangeCheck:
    """A named check of the exchange suite, on as many ranks as `tokenyard check` has."""

    name: str
    exchange: str = "one_sided"
    world: int = 4
    deadline: float = DEADLINE  # seconds; fewer where the mutant makes ranks wait for the whole of it

    def finding(self):
        """What it finds; None, if all is well."""
        (result,) = check_exchange(
            self.exchange, world=self.world, rounds=10, only=[self.name], deadline=self.deadline
        )
        return result.finding

    def __str__(self):
        return f"`{self.name}` of the exchange suite, on `{self.exchange}`"


@dataclass(frozen=True, kw_only=True)
class ExpertsCheck:
    """A named check of the experts suite."""

    name: str
    experts: str = "grouped"

    def finding(self):
        (result,) = check_experts(self.experts, only=[self.name])
        return result.finding

    def __str__(self):
        return f"`{self.name}` of the experts suite, on `{self.experts}` experts"


@dataclass(frozen=True, kw_only=True)
class FormatCheck:
    """A named check of the format suite."""

    name: str
    format: str

    def finding(self):
        (result,) = check_format(self.format, only=[self.name])
        return result.finding

    def __str__(self):
        return f"`{self.name}` of the format suite, on `{self.format}`"


@dataclass(frozen=True, kw_only=True)
class AlwaysOn:
    """An error that is raised wherever the mutant runs, in production too: no suite is needed."""

    name: str
    when: str
    run: Callable  # of a group; raises under the mutant
    world: int = 2

    def finding(self):
        """What the first rank raises; None, if no rank raises anything."""
        errors = on_ranks(self.world, self._attempt)
        if all(error is None for error in errors):
            return None
        told = [f"{type(error).__name__}: {error}" for error in errors]
        assert all(text.startswith(f"{self.name}: ") for text in told), told  # the same on every rank
        return told[0]

    def _attempt(self, group):
        return raised(self.run, group)

    def __str__(self):
        return f"`{self.name}`, {self.when}"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A call that must be refused. Under the mutant it is not."""

    name: str
    when: str
    run: Callable  # of a group; must raise the error of that name

    def finding(self):
        for error in on_ranks(2, lambda group: raised(self.run, group)):
            if type(error).__name__ != self.name:
                return f"{'no error' if error is None else error}; expected {self.name}"
        return None

    def __str__(self):
        return f"the refusal `{self.name}`, {self.when}"


@dataclass(frozen=True, kw_only=True)
class TrainerCheck:
    """A number of a step that must be the same on one rank and on three."""

    name: str  # what is compared
    run: Callable  # of a group; the number

    def finding(self):
        """What differs; None, if nothing does."""
        (alone,) = on_ranks(1, self.run)
        found = on_ranks(3, self.run)
        if found == [alone] * 3:
            return None
        shown = ", ".join(f"{number:.4f}" for number in found)
        return f"{shown} on 3 ranks; expected {alone:.4f}, as on 1 rank"

    def __str__(self):
        return f"`tests/training`: {self.name}"


SuiteCheck = ExchangeCheck | ExpertsCheck | FormatCheck
Check = SuiteCheck | AlwaysOn | Refusal | TrainerCheck


# -- Bugs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KnownBug:
    """A bug, its mutant, and what catches it."""

    name: str
    story: str
    mutate: Callable[[pytest.MonkeyPatch], None]
    caught_by: Check
    says: str  # a part of what the check says, which only this fault makes it say
    seen: str = ""  # where the bug was met, as far as that is known
    # Where an error catches it wherever it runs: what of `tokenyard check` finds it, too. None: nothing on a CPU.
    in_check: SuiteCheck | None = None
    # What must run under the mutant beside the plain layer, where that does not come by the patched code; of a group.
    also_alive: Callable | None = None

    @property
    def id(self):
        """The name in one word."""
        return self.mutate.__name__


@dataclass(frozen=True, kw_only=True)
class BugKind:
    """Bugs of one kind."""

    name: str
    about: str
    bugs: tuple[KnownBug, ...]


# -- Layers --------------------------------------------------------------------------------------------------

# Even shares, powers of two, one format, no -1: whatever can hide, hides.
PLAIN = spec(num_experts=4)


def smoke(exchange):
    """A plain bf16 layer on two ranks; what each of them got."""
    return on_ranks(2, _run_plain, exchange)


def _run_plain(group, exchange):
    plan = ty.plan([PLAIN], group, exchange=exchange)
    x_TH, routes = batch(PLAIN, 8, seed=group.rank)
    choice_K = torch.arange(2) + group.rank  # two experts of each token, never the same one twice
    routes = replace(routes, topk_ids_TK=(torch.arange(8).unsqueeze(1) + choice_K) % 4)
    y_TH = build(plan, PLAIN.name)(x_TH, routes)
    plan.close()
    return y_TH


def trains(group, tokens=8):
    """A step of a plain layer in a training plan: its model, with finite gradients."""
    plain = replace(PLAIN, num_experts=6, max_tokens=16, sum="choices")
    plan = ty.plan([plain], group, exchange="two_sided", training=True)
    built = build(plan, PLAIN.name)
    x_TH, routes = batch(plain, tokens * group.size)
    mine = slice(tokens * group.rank, tokens * (group.rank + 1))
    x_TH = x_TH[mine].requires_grad_()
    built(x_TH, routes.of_tokens(mine)).float().square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in (x_TH, *built.parameters()))
    return built


def batches(layer, *tokens):
    """A function that runs batches of so many tokens through a layer, for `AlwaysOn`."""

    def run(group):
        plan = ty.plan([layer], group, exchange="one_sided")
        built = build(plan, layer.name)
        for count in tokens:
            built(*batch(layer, count, seed=group.rank))
        plan.close()

    return run


def planning(*layers):
    """A function that makes and closes a plan, for `AlwaysOn`."""

    def run(group):
        ty.plan(list(layers), group, exchange="one_sided").close()

    return run
