"""Checks of how an exchange moves rows. Each is a named function, and can be run on any class of transport.

    check_exchange(MyExchange, ranks="threads")   →  a CheckResult for each check

A check runs on every rank of a small group. Ranks draw their batches from seeds, so each of them knows what the
others sent, and can check all that arrived without asking them. A difference is raised as a `Finding`.
Batches are drawn on the CPU and sent from the group's device; what arrived is compared on the CPU. No two rounds bring
the same rows, routes or results, so that data left over from an earlier round is noticed.

This module has the checks of *movement*, bitwise, on four ranks with 5, 0, 9 and 2 tokens. `exchange_uses` and
`exchange_duties` have those of layers and plans, `exchange_accounts` those of what an exchange declares and counts,
`exchange_failures` those of failed and lost ranks, and `exchange_lasting` those of many rounds and many plans.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import on_two_ranks, same_bits
from tokenyard.conformance.runner import Finding, expect, expect_same
from tokenyard.exchange import RoundTrip, Transport
from tokenyard.formats import Payload
from tokenyard.group import Group
from tokenyard.planning.planner import Plan, plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement, Routes
from tokenyard.rows import ExpertRows, LocalRoutes

TOKENS = (5, 0, 9, 2)
# A wire without scales, one with a scale per block, one with padded rows, and one with two kinds of scales.
WIRES = ("bf16", "fp8_block128", "mxfp8(alignment=256)", "nvfp4")
WHERE = Payload(name="where", dtype=torch.int64, width=2)  # source rank, token
BLOB = Payload(name="blob", dtype=torch.uint8, width=5)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a check is given: this rank's group, the class under test, and the number of rounds of `many_rounds`."""

    group: Group
    exchange: type[Transport]
    rounds: int | None = None  # of `many_rounds`; None: by whether the exchange shares memory
    # Seeds, one for each round. All ranks draw them in the same order, so each knows what the others send.
    seeds: Iterator[int] = field(default_factory=itertools.count)
    plans: list[Plan] = field(default_factory=list)  # those that were made, to be closed at the end

    def plan(self, *layers: LayerSpec, **options: Any) -> Plan:
        """A plan of these layers, through the exchange under test. It is closed when the check has passed."""
        self.plans.append(plan(list(layers), self.group, exchange=self.exchange, **options))
        return self.plans[-1]

    def run(self, check: Callable[[Trial], None]) -> None:
        """Run a check, and close its plans. If it raises, they stay open: other ranks may still use them."""
        check(self)
        for made in self.plans:
            made.close()

    def batch(self, spec: LayerSpec, tokens: int | None = None, kind: str = "ordinary numbers") -> Batch:
        """A new batch of this rank, on the group's device."""
        return draw_batch(spec, self.group.rank, next(self.seeds), tokens, kind).to(self.group.device)

    def batches(
        self, spec: LayerSpec, tokens: Sequence[int | None] = (None,), kind: str = "ordinary numbers"
    ) -> list[Batch]:
        """A new batch of every rank, on the CPU. Rank r has `tokens[r % len(tokens)]` tokens."""
        seed, ranks = next(self.seeds), range(self.group.size)
        return [draw_batch(spec, rank, seed, tokens[rank % len(tokens)], kind) for rank in ranks]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch that one rank sends: rows, routes and further payloads."""

    x_TH: Tensor
    routes: Routes
    extra: dict[str, Tensor]

    def with_ids(self, ids_TK: Tensor) -> Batch:
        """The same rows with other routes."""
        return dataclasses.replace(self, routes=dataclasses.replace(self.routes, topk_ids_TK=ids_TK))

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        extra = {name: tensor.to(device) for name, tensor in self.extra.items()}
        return Batch(x_TH=self.x_TH.to(device), routes=self.routes.to(device), extra=extra)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the batch, by name."""
        routes = {"topk_ids_TK": self.routes.topk_ids_TK, "topk_weights_TK": self.routes.topk_weights_TK}
        return {"x_TH": self.x_TH, **routes, **self.extra}


Reroute = Callable[[Tensor], Tensor]  # other ids for those of a batch


def layer(name: str = "moe", **changes: object) -> LayerSpec:
    """A small layer whose further payloads say which rank and token a row comes from."""
    fields: dict[str, object] = {
        "hidden_size": 40,
        "intermediate_size": 4,
        "num_experts": 6,
        "top_k": 3,
        "max_tokens": 16,
        "experts": "reference",
        "payloads": (WHERE, BLOB),
    }
    return LayerSpec(name=name, **(fields | changes))  # type: ignore[arg-type]


def draw_batch(
    spec: LayerSpec, rank: int, seed: int, tokens: int | None, kind: str = "ordinary numbers"
) -> Batch:
    """The batch of a rank in the round of a seed, the same wherever it is drawn, with a kind of data (`DATA`).

    If `tokens` is None, their number is one that belongs to the kind.
    """
    if tokens is None:
        assert spec.max_tokens is not None
        tokens = DATA[kind].tokens(rank, spec.max_tokens)
    draw = torch.Generator().manual_seed(seed * 1009 + rank + 1)
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw)
    x_TH *= torch.exp2(torch.randint(-3, 4, (tokens, 1), generator=draw).float())
    order_TE = torch.rand(tokens, spec.num_experts, generator=draw).argsort(dim=1)
    choice_K = torch.arange(spec.top_k) % spec.num_experts
    weights_TK = torch.rand(tokens, spec.top_k, generator=draw) + 0.25
    blob = torch.randint(0, 256, (tokens, BLOB.width), generator=draw, dtype=torch.uint8)
    where = torch.stack([torch.full((tokens,), rank), torch.arange(tokens)], dim=1)
    extra = {"where": where, "blob": blob}
    x_TH, ids_TK, weights_TK = DATA[kind].change(x_TH.to(spec.dtype), order_TE[:, choice_K], weights_TK, seed)
    return Batch(
        x_TH=x_TH,
        routes=Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK),
        extra={payload.name: extra[payload.name] for payload in spec.payloads},
    )


def send(made: Plan, spec: LayerSpec, mine: Batch) -> RoundTrip:
    """Encode and dispatch."""
    wiring = made.wiring(spec.name)
    rows = made.exchange.encode(wiring.exchange_spec, mine.x_TH)
    return made.exchange.dispatch(wiring.exchange_spec, rows, mine.routes, mine.extra)


def expect_on(found: torch.device, device: torch.device, what: str) -> None:
    """Raise a finding unless `found`, the device of `what`, is of the type of the group's device."""
    expect(found.type == device.type, f"{what} on {found}", f"{device}, the device of the group's rows")


def arrived(trip: RoundTrip, device: torch.device) -> dict[str, Tensor]:
    """What a dispatch brought to this rank, by name: copies on the CPU, since the next phase may write over it."""
    received, routes = trip.received, trip.received.routes
    expect_on(received.rows.device, device, "rows arrived")
    if not isinstance(routes, LocalRoutes):
        raise Finding(f"dispatch delivered {type(routes).__name__}", "LocalRoutes, since routes were sent")
    found = {
        **{f"rows ({name})": tensor for name, tensor in received.dense().payloads.items()},
        "ids": routes.ids_RK,
        "weights": torch.where(routes.ids_RK < 0, 0.0, routes.weights_RK),
        **{f"payloads ({name})": tensor for name, tensor in received.extra.items()},
    }
    return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}


def arriving(made: Plan, spec: LayerSpec, sent: Sequence[Batch]) -> dict[str, Tensor]:
    """What must arrive on this rank of what all ranks sent, by name, in (source, token) order."""
    exchange_spec, parts = made.wiring(spec.name).exchange_spec, []
    for source, one in enumerate(sent):
        rank_TK, local_TK = _destinations(exchange_spec.placement, one.routes.topk_ids_TK, source)
        here_TK = rank_TK == made.group.rank
        goes_T = here_TK.any(dim=1)
        ids_TK = torch.where(here_TK, local_TK, -1)
        weights_TK = torch.where(here_TK, one.routes.topk_weights_TK, 0.0)
        parts.append([t[goes_T] for t in (one.x_TH, ids_TK, weights_TK, *one.extra.values())])
    x_RH, ids_RK, weights_RK, *extra = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return {
        **{f"rows ({name})": t for name, t in exchange_spec.wire.encode(x_RH).payloads.items()},
        "ids": ids_RK.int(),
        "weights": weights_RK,
        **{f"payloads ({name})": t for name, t in zip(sent[0].extra, extra, strict=True)},
    }


def _destinations(placement: Placement, ids_TK: Tensor, source: int) -> tuple[Tensor, Tensor]:
    """The rank and the local id of each choice, -1 for an id of -1, found without `Placement.resolve`."""
    pairs_TK2 = torch.full((*ids_TK.shape, 2), -1)
    for token, ids in enumerate(ids_TK.tolist()):
        number = sum(expert for expert in ids if expert >= 0)
        for choice, expert in enumerate(ids):
            owners = [(rank, own.index(expert)) for rank, own in enumerate(placement.table) if expert in own]
            near = [pair for pair in owners if pair[0] == source]
            nth = number + sum(expert not in own for own in placement.table[:source])
            if owners:
                pairs_TK2[token, choice] = torch.tensor(near[0] if near else owners[nth % len(owners)])
    return pairs_TK2[..., 0], pairs_TK2[..., 1]


def check_movement(
    trial: Trial,
    spec: LayerSpec,
    *,
    tokens: Sequence[int | None] = TOKENS,
    kind: str = "ordinary numbers",
    reroute: Reroute | None = None,
    made: Plan | None = None,
) -> None:
    """Send a batch from every rank and results back, and compare all that arrived with all that was sent.

    Batches go through the plan `made`, or through a new one.
    """
    group, made, sent = trial.group, made or trial.plan(spec), trial.batches(spec, tokens, kind)
    if reroute is not None:
        sent = [one.with_ids(reroute(one.routes.topk_ids_TK.clone())) for one in sent]
    trip = send(made, spec, sent[group.rank].to(group.device))
    found, due = arrived(trip, group.device), arriving(made, spec, sent)
    # Small whole numbers: exact in every dtype, and their sums name the ranks, the token and the round.
    mark, token_R = float(next(trial.seeds) % 16), due["payloads (where)"][:, 1]
    rows_RH = torch.zeros(trip.received.num_rows, spec.hidden_size)
    rows_RH[:, 0], rows_RH[:, 2] = 2.0 ** (group.rank % 4), mark
    if len(rows_RH) == len(token_R):
        rows_RH[:, 1] = token_R + 1.0
    raised, y_TH = None, torch.empty(0, spec.hidden_size)
    try:
        y_TH = trip.combine(ExpertRows(rows_RH=rows_RH.to(group.device))).y_TH.cpu()
    except Exception as error:
        raised = error
    _check_arrival(found, due, trip.received.counts_W)
    if raised is not None:  # wrong arrivals were reported first, since they may be the cause
        raise raised
    placement, due_TH = trip.arrival.spec.placement, torch.zeros(y_TH.shape)
    rank_TK, _ = _destinations(placement, sent[group.rank].routes.topk_ids_TK, group.rank)
    for rank in range(group.size):
        goes_T = (rank_TK == rank).any(dim=1)
        due_TH[:, 0] += goes_T * 2.0 ** (rank % 4)
        due_TH[:, 1] += goes_T * (torch.arange(len(y_TH)) + 1.0)
        due_TH[:, 2] += goes_T * mark
    if wrong := (y_TH != due_TH).any(dim=1).nonzero().flatten().tolist():
        home, meant = (tensor[wrong[0], :3].tolist() for tensor in (y_TH, due_TH))
        raise Finding(
            f"token {wrong[0]} of rank {group.rank} came home as {home}, …",
            f"{meant}, 0, …: the sum of one row from each rank that it went to",
        )


def _check_arrival(found: dict[str, Tensor], due: dict[str, Tensor], counts_W: Sequence[int]) -> None:
    """Raise a finding unless all rows are here, each once, in order, with the bits that they were sent with."""
    here, sent = (
        [f"token {token} of rank {source}" for source, token in one["payloads (where)"].tolist()]
        for one in (found, due)
    )
    for row, (name, due_name) in enumerate(zip_longest(here, sent, fillvalue="not there")):
        expect(
            name == due_name,
            f"{len(here)} rows arrived, and row {row} is {name}",
            f"{len(sent)} rows in (source, token) order, of which row {row} is {due_name}",
        )
    counts = torch.bincount(due["payloads (where)"][:, 0], minlength=len(counts_W)).tolist()
    expect(list(counts_W) == counts, f"counts_W is {counts_W}", f"{counts}, the rows from each source rank")
    for what, tensor in due.items():
        if same_bits(found[what], tensor):
            continue
        why = ": -1 where an expert lives elsewhere" if what == "ids" else ", the bits that were sent"
        for row, name in enumerate(sent):
            words = f"{what} of {name} arrived with other bits: {found[what][row, :8].tolist()}"
            expect_same(found[what][row], tensor[row], words, f"{tensor[row, :8].tolist()}{why}")


# -- The checks ----------------------------------------------------------------------------------------------


def bitwise_movement(trial: Trial) -> None:
    """Rows arrive bit for bit, in every format, with their ids and weights."""
    for wire in WIRES:
        check_movement(trial, layer(wire=wire))


def source_and_token_order(trial: Trial) -> None:
    """Rows arrive in (source rank, token) order, whatever the placement."""
    for placement in ("contiguous", "round_robin"):
        check_movement(trial, layer(placement=placement, num_experts=7), tokens=(12, 7, 3, 16))


def one_copy_per_rank(trial: Trial) -> None:
    """A token goes once to a rank, however many of its experts live there."""
    spec = layer(num_experts=4 * trial.group.size, top_k=4)
    check_movement(trial, spec, reroute=lambda ids_TK: (ids_TK[:, :1] // 4) * 4 + torch.arange(4))


def empty_ranks(trial: Trial) -> None:
    """Ranks without tokens take part, and so does a group in which no rank has any."""
    for tokens in ((0, 6), (6, 0, 0), (0,)):
        check_movement(trial, layer(), tokens=tokens)


def ranks_without_experts(trial: Trial) -> None:
    """With fewer experts than ranks, some ranks receive nothing."""
    check_movement(trial, layer(num_experts=max(1, trial.group.size - 2), top_k=1))


def uneven_experts(trial: Trial) -> None:
    """With E mod W ≠ 0 the first ranks own one expert more, and the ids of the other ranks' experts follow theirs."""
    check_movement(trial, layer(num_experts=2 * trial.group.size + trial.group.size // 2))


def many_experts(trial: Trial) -> None:
    """A rank may hold hundreds of experts, more than a byte can count."""
    check_movement(trial, layer(num_experts=300 * trial.group.size))


def smaller_batches(trial: Trial) -> None:
    """A batch that is smaller than the one before brings its own rows, and none left over from that one."""
    spec = layer()
    made = trial.plan(spec)
    for tokens in ((16, 9), (2, 5), (0, 3), (7, 0)):
        check_movement(trial, spec, tokens=tokens, made=made)


def all_tokens_to_one_rank(trial: Trial) -> None:
    """One rank can receive the tokens of all ranks, with full batches."""
    last = trial.group.size - 1
    spec = layer(num_experts=3 * trial.group.size, max_tokens=16)
    check_movement(trial, spec, tokens=(16,), reroute=lambda ids_TK: 3 * last + (ids_TK % 3))


def one_hot_expert(trial: Trial) -> None:
    """All tokens may name one expert, in all their choices."""
    check_movement(trial, layer(), tokens=(16, 3), reroute=lambda ids_TK: torch.full_like(ids_TK, 2))


def nobody_is_not_sent(trial: Trial) -> None:
    """A choice of -1 goes nowhere; a token of which all are -1 is not sent, and its result is zero."""

    def gaps(ids_TK: Tensor) -> Tensor:
        ids_TK[::2, 0] = -1
        ids_TK[1::3] = -1
        return ids_TK

    check_movement(trial, layer(), reroute=gaps)
    check_movement(trial, layer(), reroute=lambda ids_TK: torch.full_like(ids_TK, -1))


def duplicate_choices(trial: Trial) -> None:
    """An expert that a token names twice gets one row, with both choices in it."""

    def twice(ids_TK: Tensor) -> Tensor:
        ids_TK[:, 1] = ids_TK[:, 0]
        return ids_TK

    check_movement(trial, layer(), reroute=twice)


def replicated_experts(trial: Trial) -> None:
    """A choice of a replicated expert goes to one of its ranks, as the placement says."""
    check_movement(trial, layer(placement=on_two_ranks(6, trial.group.size)))


def many_choices(trial: Trial) -> None:
    """K may be 32, and larger than E; ids may be int32."""
    check_movement(trial, layer(num_experts=5, top_k=32), reroute=lambda ids_TK: ids_TK.int())
