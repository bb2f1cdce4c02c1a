"""What an exchange declares and counts, compared with what happened: counters, bytes, memory, capabilities.

Every rank draws the batches of all ranks, and computes from them what the counters must be. A `Meter` counts the bytes
that pass through the group. If no rows pass through it, counted bytes must be in the range that the rows can take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tokenyard.conformance.exchange_layers import (
    CheckedLayers,
    check_same,
    echo,
    echo_due,
    must_raise,
    round_trip,
    zeros,
)
from tokenyard.conformance.exchange_suite import Batch, Trial, layer, send
from tokenyard.conformance.metering import Meter
from tokenyard.conformance.runner import Finding, expect, expect_same
from tokenyard.errors import Corrupted, PeerFailed, PlanError
from tokenyard.planning.planner import Plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement, SoftmaxRouter
from tokenyard.rows import ExpertRows, RoutingLogits, describe

TOKENS = (16, 3, 0, 7)
# Bytes that announcements to one rank may take in one phase: a meter counts them, and an exchange does not.
ANNOUNCED = 2048
# Bytes of shared memory that flags and counts may take for each rank, beyond the bytes of the plan.
CONTROL = 4096
# Seconds that one rank is late, and seconds of waiting that others must count: on a busy machine they are late, too.
_LATE, _COUNTED = 0.06, 0.03


# -- Counters ------------------------------------------------------------------------------------------------


def counters_are_right(trial: Trial) -> None:
    """Rounds, tokens, and rows sent and received are counted for each layer and each rank, and waits in seconds."""
    specs = (layer("first"), layer("second", hidden_size=90))
    made, group = trial.plan(*specs), trial.group
    late = group.rank == group.size - 1
    due = {spec.name: _Count(group.size) for spec in specs}
    for spec, tokens in zip((*specs, specs[0]), (TOKENS, (2,), (0, 5)), strict=True):
        sent = trial.batches(spec, tokens)
        due[spec.name].add(made, spec, sent)
        if late and spec is specs[0]:
            time.sleep(_LATE)
        round_trip(made, spec, sent[group.rank])
    stats = made.stats()
    for name, count in due.items():
        for field, meant in vars(count).items():
            found = getattr(stats[name], field)
            expect(found == meant, f"`{field}` of layer {name!r} is {found}", f"{meant}, as it happened")
    waited = stats["first"].wait_s["dispatch"]
    kernels_wait = group.device.type == "cuda"  # and this thread does not
    found = f"`wait_s` of two dispatches, in each of which a rank was {_LATE} s late, is {waited:.3f} s"
    expect(late or kernels_wait or waited >= _COUNTED, found, f"at least {_COUNTED} s")


class _Count:
    """What the counters of a layer must say on this rank."""

    def __init__(self, world: int) -> None:
        self.rounds = self.tokens = 0
        self.rows_sent, self.rows_received = [0] * world, [0] * world

    def add(self, made: Plan, spec: LayerSpec, sent: Sequence[Batch]) -> None:
        """Count one more round."""
        me = made.group.rank
        self.rounds += 1
        self.tokens += sent[me].x_TH.shape[0]
        for rank, one in enumerate(sent):
            self.rows_sent[rank] += _rows(made, spec, sent[me], me)[rank]
            self.rows_received[rank] += _rows(made, spec, one, rank)[me]


def _rows(made: Plan, spec: LayerSpec, one: Batch, source: int) -> list[int]:
    """How many rows of a source rank's batch go to each rank."""
    rank_TK, _ = made.wiring(spec.name).exchange_spec.placement.resolve(one.routes.topk_ids_TK, source)
    return [int((rank_TK == rank).any(dim=1).sum()) for rank in range(made.group.size)]


def lost_experts_are_counted(trial: Trial) -> None:
    """Choices of an expert that was lost with its rank are dropped and counted; all other choices are summed."""
    world = trial.group.size
    lost = Placement.contiguous(world + 1, world + 1).without([world])  # no rank owns the last expert
    spec = layer(placement=lost, num_experts=world + 1, top_k=min(3, world + 1), payloads=())
    stack = CheckedLayers(trial, (spec,))
    mine = [stack.batch("moe", 6) for _ in range(2)]
    for one in mine:
        gone_TK = one.routes.topk_ids_TK == world
        kept = one.with_ids(one.routes.topk_ids_TK.masked_fill(gone_TK, -1))
        check_same(stack.run("moe", one), stack.due("moe", kept), "a layer with a lost expert")
    found = stack.plan.stats()["moe"].dropped
    meant = sum(int((one.routes.topk_ids_TK == world).sum()) for one in mine)
    expect(found == meant, f"`dropped` is {found}", f"{meant} choices of the expert that was lost")


def load_is_counted(trial: Trial) -> None:
    """`plan.load()` has the choices of all ranks that fell on each expert, small batches and large ones."""
    spec, group = layer(payloads=(), max_tokens=40), trial.group
    made, due = trial.plan(spec), [0] * spec.num_experts
    for tokens in (TOKENS, (40,), (1,)):
        sent = trial.batches(spec, tokens)
        for one in sent:
            one.routes.topk_ids_TK[:1, :1] = -1
            for expert in one.routes.topk_ids_TK.flatten().tolist():
                due[expert] += expert >= 0
        round_trip(made, spec, sent[group.rank])
    found = made.load()["moe"]
    expect(found == due, f"`plan.load()` is {found}", f"{due}, the choices of all ranks")


# -- Bytes and memory ----------------------------------------------------------------------------------------


def bytes_are_counted(trial: Trial) -> None:
    """`bytes_sent`, and the bytes of results, are those that rows took on the wire, for each rank, itself included."""
    spec, group = layer(wire="mxfp8", hidden_size=700), trial.group
    made = trial.plan(spec)
    exchange_spec, stats = made.wiring("moe").exchange_spec, made.stats()["moe"]
    out = exchange_spec.wire.bytes_per_row(700) + sum(payload.nbytes for payload in exchange_spec.extra)
    back = exchange_spec.combine_wire.bytes_per_row(700)
    region = made.draft.exchange.region_bytes(exchange_spec)
    sent = trial.batches(spec, TOKENS)
    mine = sent[group.rank]
    with Meter(group) as way_out:
        flight = send(made, spec, mine.to(group.device))
    with Meter(group) as way_back:
        flight.combine(zeros(flight.received))
    hosts = exchange_spec.hosts
    most = mine.x_TH.shape[0] * region.dispatch_row  # an exchange may send all tokens to all ranks
    for rank, rows in enumerate(_rows_on_wire(made, spec, mine, group.rank)):
        least = rows * out
        _compare("dispatch_bytes", rank, stats.dispatch_bytes[rank], (least, most), way_out, hosts)
    for rank, one in enumerate(sent):
        rows = _rows_on_wire(made, spec, one, rank)[group.rank]
        least, most = rows * back, rows * region.combine_row
        _compare("combine_bytes", rank, stats.combine_bytes[rank], (least, most), way_back, hosts)


def _rows_on_wire(made: Plan, spec: LayerSpec, one: Batch, source: int) -> list[int]:
    """How many rows of a source rank's batch are sent to each rank; if hosts sum, a host's rows go to its relay."""
    exchange_spec = made.wiring(spec.name).exchange_spec
    rows, hosts = _rows(made, spec, one, source), exchange_spec.hosts
    rank_TK, _ = exchange_spec.placement.resolve(one.routes.topk_ids_TK, source)
    for host in set(hosts) - {hosts[source] if hosts else -1}:
        there = [rank for rank, other in enumerate(hosts) if other == host]
        place = [rank for rank, other in enumerate(hosts) if other == hosts[source]].index(source)
        for rank in there:
            rows[rank] = 0
        crossing = torch.isin(rank_TK, torch.tensor(there)).any(dim=1)
        rows[there[place % len(there)]] = int(crossing.sum())
    return rows


def _compare(
    name: str, rank: int, counted: int, bounds: tuple[int, int], meter: Meter, hosts: Sequence[int]
) -> None:
    """Raise a finding unless the counted bytes went through the group, or are within what the rows can take.

    If hosts sum, rows for ranks of this rank's own host go through shared memory. With any exchange, rows for the rank
    itself may do so.
    """
    low, high = bounds
    through_memory = hosts and hosts[rank] == hosts[meter.group.rank]
    metered = meter.carried_rows and not through_memory and (rank != meter.group.rank or meter.sent[rank] > 0)
    if metered:
        low, high = max(low, meter.sent[rank] - ANNOUNCED), meter.sent[rank]
    expected = f"from {low} to {high} bytes, as {'went through the group' if metered else 'its rows take'}"
    expect(low <= counted <= high, f"`{name}` for rank {rank} is {counted}", expected)


def memory_as_planned(trial: Trial) -> None:
    """A rank needs the bytes that its plan says: as shared memory, or as bytes of rows in a full batch."""
    spec, group = layer(wire="mxfp8", hidden_size=700, num_experts=3 * trial.group.size), trial.group
    with Meter(group) as planning:
        made = trial.plan(spec)
    region, last = made.draft.exchange.region_bytes(made.wiring("moe").exchange_spec), group.size - 1
    sent = [one.with_ids(3 * last + one.routes.topk_ids_TK % 3) for one in trial.batches(spec, (16,))]
    with Meter(group) as way_out:
        flight = send(made, spec, sent[group.rank].to(group.device))
    with Meter(group) as way_back:
        flight.combine(zeros(flight.received))
    planned = made.draft.workspace_bytes
    # Some hosts may share less memory than others.
    shared = max(group.gather_json(planning.shared, phase="comparing memory"))
    if shared:
        _expect_near("shares", shared, "a workspace", planned, CONTROL * (group.size + 1))
    sent_there = [sent[last] for sent in group.gather_json(way_out.sent, phase="comparing memory")]
    if not shared and way_out.carried_rows and group.rank == last:  # the rank that all rows go to
        slack = ANNOUNCED * group.size
        # What a rank sends to itself need not pass through the group.
        own_out, own_back = (
            0 if meter.sent[last] else nbytes // group.size
            for meter, nbytes in ((way_out, region.dispatch), (way_back, region.combine))
        )
        _expect_near("received", own_out + sum(sent_there), "a dispatch region", region.dispatch, slack)
        _expect_near("returned", own_back + sum(way_back.sent), "a combine region", region.combine, slack)


def _expect_near(did: str, found: int, what: str, planned: int, slack: int) -> None:
    words = f"the plan says {what} of {planned} bytes, and a rank {did} {found}"
    more = f"as many, and at most {slack} more for announcements and flags"
    expect(planned <= found <= planned + slack, words, more)


def terms_as_declared(trial: Trial) -> None:
    """A combine adds as many tensors as `most_terms` allows, each once, in their order, before the rounding."""
    spec, group = layer(dtype=torch.float32, payloads=()), trial.group
    made, mine = trial.plan(spec), trial.batch(layer(dtype=torch.float32, payloads=()), 4)
    declared = trial.exchange.for_device(group.device).most_terms
    for count in range(1, (4 if declared is None else declared) + 1):
        terms = [torch.full_like(mine.x_TH, 10.0**-power) for power in range(count)]
        flight = send(made, spec, mine)
        y_TH = flight.combine(echo(flight.received), add=terms).y_TH
        due_TH = echo_due(made, spec, mine)
        for term_TH in terms:
            due_TH += term_TH.cpu()
        check_same(y_TH, due_TH, f"a combine that adds {count} tensors")


# -- Capabilities --------------------------------------------------------------------------------------------


def logits_as_declared(trial: Trial) -> None:
    """With `carries_logits` every rank sees every token's logits, bit for bit; without, such a layer is refused."""
    group, router = trial.group, SoftmaxRouter(3, renormalize=True)
    spec = layer(experts="self_routing", router=router, wire="bf16")
    if not trial.exchange.carries_logits:
        must_raise(PlanError, trial.plan, spec, when="a layer whose experts route by themselves")
        return
    made = trial.plan(spec)
    exchange_spec = made.wiring("moe").exchange_spec
    for _ in range(2):
        sent = trial.batches(spec, TOKENS)
        logits = [one.x_TH[:, : spec.num_experts].float().contiguous() for one in sent]
        mine = sent[group.rank].to(group.device)
        rows = made.exchange.encode(exchange_spec, mine.x_TH)
        routes = RoutingLogits(logits_RE=logits[group.rank].to(group.device))
        try:
            flight = made.exchange.dispatch(exchange_spec, rows, routes, mine.extra)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            found = f"`carries_logits` is True, and a dispatch of logits raised {why}"
            raise Finding(found, "logits to travel, as declared") from error
        received, found = flight.received, f"dispatch delivered {describe(flight.received.routes)}"
        if not isinstance(received.routes, RoutingLogits):
            raise Finding(found, "RoutingLogits, since logits were sent")
        arrived_RE, arrived_RH = received.routes.logits_RE.cpu(), received.dense().decode(spec.dtype).cpu()
        all_tokens = "those of all tokens, in (source, token) order"
        expect_same(arrived_RE, torch.cat(logits), "logits arrived with other bits", all_tokens)
        due_RH = torch.cat([one.x_TH for one in sent])
        expect_same(arrived_RH, due_RH, "rows arrived with other bits", all_tokens)
        ones = torch.ones(received.num_rows, spec.hidden_size, device=group.device)
        y_TH = flight.combine(ExpertRows(rows_RH=ones)).y_TH.cpu()
        check_same(y_TH, torch.full_like(mine.x_TH.cpu(), group.size), "the sum of a one from each rank")


def rows_bounded_as_declared(trial: Trial) -> None:
    """With `bounds_rows` a rank never receives more than `max_rows` at a time, and results are right; else refused."""
    spec, group = layer(), trial.group
    most = 2 * group.size
    if not trial.exchange.for_device(group.device).bounds_rows:
        must_raise(PlanError, trial.plan, spec, max_rows=most, when="a plan that bounds the rows of a pass")
        return
    made = trial.plan(spec, max_rows=most)
    for number, tokens in enumerate((TOKENS, (1,), (16,), (0,))):
        sent = trial.batches(spec, tokens)
        if number == 2:  # all to one rank
            sent = [one.with_ids(torch.zeros_like(one.routes.topk_ids_TK)) for one in sent]
        mine = sent[group.rank].to(group.device)
        flight, passes, y_TH = send(made, spec, mine), 0, None
        while True:
            came = flight.received.num_rows
            expect(came <= most, f"{came} rows came to a rank in a pass", f"at most max_rows={most}")
            y_TH = flight.combine(echo(flight.received), out=y_TH).y_TH
            passes += 1
            if not flight.has_more:
                break
            flight.dispatch_next()
        check_same(y_TH, echo_due(made, spec, mine), f"a batch in {passes} passes")


def paranoid_as_declared(trial: Trial) -> None:
    """A plan that watches itself raises no false alarm, and notices a received row that was changed."""
    if trial.exchange.for_device(trial.group.device).watches(trial.group) is not None:
        must_raise(PlanError, trial.plan, layer(), paranoid=True, when="a plan that watches itself")
        return
    stack = CheckedLayers(trial, (layer(), layer("other", wire="mxfp8", hidden_size=90)), paranoid=True)
    for name in ("moe", "other", "moe"):
        stack.check(name, "in a plan that watches itself")
    made, mine = stack.plan, stack.batch("moe", 4)
    spec = made.wiring("moe").spec
    flight = send(made, spec, mine.with_ids(torch.zeros_like(mine.routes.topk_ids_TK)))
    result, owns = echo(flight.received), 0 in made.local_experts("moe")
    if owns:
        payload, slots_R = next(iter(flight.received.rows.payloads.values())), flight.received.slots_R
        payload[0 if slots_R is None else int(slots_R[0])].view(torch.uint8)[0] ^= 1
    kind = Corrupted if owns else PeerFailed
    must_raise(kind, flight.combine, result, when="a received row that was changed")
    stack.check("moe", "after a row was changed")
