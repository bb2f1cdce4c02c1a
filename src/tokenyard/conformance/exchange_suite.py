"""Checks of how an exchange moves rows. Each is a named function, and can be run on any class of transport.

    check_exchange(MyExchange, ranks="threads")   →  a CheckResult for each check

A check runs on every rank of a small group. Ranks draw their batches from seeds, so each of them knows what the
others sent, and can check all that arrived without asking them. A difference is raised as a `Finding`.
Batches are drawn on the CPU and sent from the group's device; what arrived is compared on the CPU. No two rounds bring
the same rows, routes or results, so that data left over from an earlier round is noticed.

This module has the checks of *movement*, bitwise, on four ranks with 5, 0, 9 and 2 tokens. `exchange_duties` has those
of several layers, many rounds and handles, `exchange_errors` those of errors, `exchange_accounts` those of what an
exchange declares and counts, and `exchange_losses` those of what it does after a rank was lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import on_two_ranks, same_bits
from tokenyard.conformance.runner import Finding, expect
from tokenyard.exchange import RoundTrip, Transport
from tokenyard.formats import Payload
from tokenyard.group import Group
from tokenyard.planning.planner import Plan, plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement, Routes
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows

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

    def batch(self, spec: LayerSpec, tokens: int) -> Batch:
        """A new batch of this rank, on the group's device."""
        return batch(spec, self.group.rank, tokens, next(self.seeds)).to(self.group.device)

    def batches_of(self, spec: LayerSpec, kind: str) -> list[Batch]:
        """A new batch of every rank with a kind of data (`batch_data.DATA`), on the CPU."""
        seed = next(self.seeds)
        return [of_kind(kind, spec, rank, seed) for rank in range(self.group.size)]

    def batches(self, spec: LayerSpec, tokens: Sequence[int]) -> list[Batch]:
        """A new batch of every rank, on the CPU. Rank r has `tokens[r % len(tokens)]` tokens."""
        seed = next(self.seeds)
        return [batch(spec, rank, tokens[rank % len(tokens)], seed) for rank in range(self.group.size)]


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


def batch(spec: LayerSpec, rank: int, tokens: int, seed: int) -> Batch:
    """The batch of a rank in the round of a seed, the same wherever it is drawn."""
    draw = torch.Generator().manual_seed(seed * 1009 + rank + 1)
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw)
    x_TH *= torch.exp2(torch.randint(-3, 4, (tokens, 1), generator=draw).float())
    order_TE = torch.rand(tokens, spec.num_experts, generator=draw).argsort(dim=1)
    choice_K = torch.arange(spec.top_k) % spec.num_experts
    weights_TK = torch.rand(tokens, spec.top_k, generator=draw) + 0.25
    blob = torch.randint(0, 256, (tokens, BLOB.width), generator=draw, dtype=torch.uint8)
    where = torch.stack([torch.full((tokens,), rank), torch.arange(tokens)], dim=1)
    extra = {"where": where, "blob": blob}
    return Batch(
        x_TH=x_TH.to(spec.dtype),
        routes=Routes(topk_ids_TK=order_TE[:, choice_K], topk_weights_TK=weights_TK),
        extra={payload.name: extra[payload.name] for payload in spec.payloads},
    )


def of_kind(kind: str, spec: LayerSpec, rank: int, seed: int) -> Batch:
    """The batch of a rank with a kind of data (`batch_data.DATA`), the same wherever it is drawn."""
    assert spec.max_tokens is not None
    one = batch(spec, rank, DATA[kind].tokens(rank, spec.max_tokens), seed)
    routes = one.routes
    x_TH, ids_TK, weights_TK = DATA[kind].change(one.x_TH, routes.topk_ids_TK, routes.topk_weights_TK, seed)
    return Batch(x_TH=x_TH, routes=Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK), extra=one.extra)


def send(made: Plan, spec: LayerSpec, mine: Batch) -> RoundTrip:
    """Encode and dispatch."""
    wiring = made.wiring(spec.name)
    rows = made.exchange.encode(wiring.exchange_spec, mine.x_TH)
    return made.exchange.dispatch(wiring.exchange_spec, rows, mine.routes, mine.extra)


def expect_on(found: torch.device, device: torch.device, what: str) -> None:
    """Raise a finding unless `found`, the device of `what`, is of the type of the group's device."""
    expect(found.type == device.type, f"{what} on {found}", f"{device}, where the rows of the group live")


class _Movement:
    """One round trip seen from this rank: what all ranks sent, what arrived, what came home."""

    def __init__(
        self, trial: Trial, made: Plan, spec: LayerSpec, sent: Sequence[Batch], reroute: Reroute | None
    ) -> None:
        group = trial.group
        self.rank, self.sent = group.rank, sent
        self.mark = float(next(trial.seeds) % 16)  # what results of this round have in their third column
        if reroute is not None:
            self.sent = [one.with_ids(reroute(one.routes.topk_ids_TK.clone())) for one in self.sent]
        self.placement = made.wiring(spec.name).exchange_spec.placement
        self.due = [  # (source, token) of each row that must be here, in order
            (source, token)
            for source, one in enumerate(self.sent)
            for token, ids in enumerate(one.routes.topk_ids_TK.tolist())
            if any(rank == group.rank for rank, _ in _destinations(self.placement, ids, source))
        ]
        dispatched = send(made, spec, self.sent[group.rank].to(group.device))
        self.received = _copy(dispatched.received, group.device)  # before the next phase may write over it
        # Small whole numbers: exact in every dtype, and their sums name the ranks, the token and the round.
        rows_RH = torch.zeros(self.received.num_rows, spec.hidden_size)
        rows_RH[:, 0], rows_RH[:, 2] = 2.0 ** (group.rank % 4), self.mark
        if self.received.num_rows == len(self.due):
            rows_RH[:, 1] = torch.tensor([float(token + 1) for _, token in self.due])
        result = ExpertRows(rows_RH=rows_RH.to(group.device))
        self.y_TH, self.error = torch.empty(0, spec.hidden_size), None  # what the way back gave, or raised
        try:
            self.y_TH = dispatched.combine(result).y_TH.cpu()
        except Exception as error:
            self.error = error

    def check_order(self) -> None:
        """Raise a finding unless the rows that are due are here, each once, in (source, token) order."""
        here = [(int(source), int(token)) for source, token in self.received.extra["where"].tolist()]
        if here != self.due:
            first = next(
                (n for n, (a, b) in enumerate(zip(here, self.due, strict=False)) if a != b),
                min(len(here), len(self.due)),
            )
            raise Finding(
                f"{len(here)} rows arrived, and row {first} is {_row_name(here, first)}",
                f"{len(self.due)} rows in (source, token) order, of which row {first} is "
                f"{_row_name(self.due, first)}",
            )
        counts = tuple(sum(source == rank for source, _ in self.due) for rank in range(self.placement.world))
        found = tuple(self.received.counts_W)
        expect(found == counts, f"counts_W is {found}", f"{counts}, the rows from each source rank")

    def check_row(self, row: int) -> None:
        """Raise a finding unless a row arrived with the bits, further payloads, ids and weights it was sent with."""
        received, (source, token) = self.received, self.due[row]
        sent, name = self.sent[source], _row_name(self.due, row)
        encoded = received.rows.format.encode(sent.x_TH)
        for payload, tensor in received.rows.payloads.items():
            same = same_bits(tensor[row], encoded.payloads[payload][token])
            expect(same, f"payload {payload!r} of {name} arrived with other bits", "the bits that were sent")
        found, meant = received.extra["blob"][row].tolist(), sent.extra["blob"][token].tolist()
        expect(found == meant, f"the further payload 'blob' of {name} arrived as {found}", meant)
        pairs = _destinations(self.placement, sent.routes.topk_ids_TK[token].tolist(), source)
        local = [expert if rank == self.rank else -1 for rank, expert in pairs]
        assert isinstance(received.routes, LocalRoutes)
        ids = received.routes.ids_RK[row].tolist()
        expect(ids == local, f"{name} has local ids {ids}", f"{local}: -1 where an expert lives elsewhere")
        for choice, expert in enumerate(local):
            weight = float(sent.routes.topk_weights_TK[token, choice])
            arrived = float(received.routes.weights_RK[row, choice])
            fine = expert < 0 or arrived == weight
            expect(fine, f"{name} has weight {arrived} for choice {choice}", weight)

    def check_results(self) -> None:
        """Raise a finding unless each output is the sum over the ranks that its token went to; zero without any."""
        mine = self.sent[self.rank].routes.topk_ids_TK
        for token, ids in enumerate(mine.tolist()):
            went = sorted({rank for rank, _ in _destinations(self.placement, ids, self.rank) if rank >= 0})
            each = (token + 1.0, self.mark)
            meant = [sum(2.0 ** (rank % 4) for rank in went), *(len(went) * number for number in each)]
            home = self.y_TH[token, :3].tolist()
            expect(
                home == meant,
                f"token {token} of rank {self.rank} came home as {home}",
                f"{meant}: the sum of one row from each of the ranks {went}",
            )
            expect(not bool(self.y_TH[token, 3:].any()), "something was added to zeros", "zeros")


def check_movement(
    trial: Trial,
    spec: LayerSpec,
    *,
    tokens: Sequence[int] = TOKENS,
    kind: str | None = None,
    reroute: Reroute | None = None,
    made: Plan | None = None,
) -> None:
    """Send a batch from every rank and results back, and compare all that arrived with all that was sent.

    Rows have ordinary numbers, or a `kind` of data. They go through the plan `made`, or through a new one.
    """
    sent = trial.batches(spec, tokens) if kind is None else trial.batches_of(spec, kind)
    moved = _Movement(trial, made or trial.plan(spec), spec, sent, reroute)
    moved.check_order()
    for row in range(len(moved.due)):
        moved.check_row(row)
    # Combine raised. Wrong arrivals were reported first, since they may be the cause.
    if moved.error is not None:
        raise moved.error
    moved.check_results()


def _destinations(placement: Placement, ids: Sequence[int], source: int) -> list[tuple[int, int]]:
    """The (rank, local id) of each choice of a token, (-1, -1) for an id of -1, found without `Placement.resolve`."""
    number, pairs = sum(expert for expert in ids if expert >= 0), []
    for expert in ids:
        owners = [(rank, own.index(expert)) for rank, own in enumerate(placement.table) if expert in own]
        near = [pair for pair in owners if pair[0] == source]
        nth = number + sum(expert not in own for own in placement.table[:source])
        pairs.append(near[0] if near else owners[nth % len(owners)] if owners else (-1, -1))
    return pairs


def _copy(received: ReceivedRows, device: torch.device) -> ReceivedRows:
    """A copy, on the CPU, of rows that were received on `device`."""
    expect_on(received.rows.device, device, "rows arrived")
    routes = received.routes
    if not isinstance(routes, LocalRoutes):
        raise Finding(f"dispatch delivered {type(routes).__name__}", "LocalRoutes, since routes were sent")
    rows = received.dense()

    def copied(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True)

    payloads = {name: copied(tensor) for name, tensor in rows.payloads.items()}
    return dataclasses.replace(
        received,
        slots_R=None,
        rows=dataclasses.replace(rows, payloads=payloads),
        routes=LocalRoutes(ids_RK=copied(routes.ids_RK), weights_RK=copied(routes.weights_RK)),
        extra={name: copied(tensor) for name, tensor in received.extra.items()},
    )


def _row_name(rows: Sequence[tuple[int, int]], row: int) -> str:
    """The token and rank of a row, for a finding."""
    return f"token {rows[row][1]} of rank {rows[row][0]}" if row < len(rows) else "not there"


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
