"""Checks of an exchange beyond one round trip: several layers and plans, many rounds, the caller's tensors, handles."""

from __future__ import annotations

import dataclasses
import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from tokenyard.conformance.exchange_layers import (
    CheckedLayers,
    before_compute,
    check_same,
    echo,
    echo_due,
    must_raise,
    round_trip,
    zeros,
)
from tokenyard.conformance.exchange_suite import Batch, Trial, arrived, arriving, layer, send
from tokenyard.conformance.metering import Meter
from tokenyard.conformance.runner import Finding, expect, expect_same, unchanged
from tokenyard.errors import GroupError, HandleError, PlanError, TokenyardError
from tokenyard.formats.base import dtype_name
from tokenyard.planning.planner import Plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import GroupedSigmoidRouter
from tokenyard.rows import ExpertRows

# Rounds of `many_rounds`: more if ranks share memory, whose flags and epochs must stay right over many rounds.
ROUNDS = 50
ROUNDS_SHARED_MEMORY = 1000
# Batches that are used in turns: a prime number, so that a batch does not always get the same flag, slot or region.
_KNOWN_BATCHES = 17

# As in a model whose body is 4-bit and whose head is not: the layers differ in everything.
LAYERS = (
    layer("body", wire="nvfp4", hidden_size=100),
    layer("head", payloads=(), hidden_size=33, num_experts=3, top_k=1, max_tokens=4),
    layer("wide", wire="mxfp8(alignment=256)", combine_wire="fp8_block128", hidden_size=700, top_k=5),
    layer("exact", dtype=torch.float32, hidden_size=7, placement="round_robin", max_tokens=30),
    layer("half", dtype=torch.float16, wire="fp8_block128", num_experts=1, top_k=2, payloads=()),
)
# Layers that differ in their placement only, which a cache with an incomplete key would confuse.
ALIKE = (layer("first", payloads=()), layer("second", payloads=(), placement="round_robin"))


# -- Layers and plans ----------------------------------------------------------------------------------------


def heterogeneous_layers(trial: Trial) -> None:
    """Layers of one plan may differ in format, width, experts, top-k, dtype and tokens, and all stay bitwise right."""
    stack = CheckedLayers(trial, LAYERS)
    for spec in (*LAYERS, *reversed(LAYERS)):
        stack.check(spec.name, "beside other layers")


def alike_layers(trial: Trial) -> None:
    """Layers of the same sizes, but with different placements, are not mistaken for each other."""
    stack = CheckedLayers(trial, ALIKE)
    for spec in ALIKE * 2:
        stack.check(spec.name, "beside one of the same sizes", tokens=4)


def routed_scaling_once(trial: Trial) -> None:
    """A layer with a router gives what its router's routes give: the scaling factor is in the weights once."""
    router = GroupedSigmoidRouter(2, num_groups=3, topk_groups=2, routed_scaling=2.5)
    stack = CheckedLayers(trial, (layer(router=router, top_k=2, payloads=()),))
    for _ in range(2):
        mine = stack.batch("moe")
        logits_TE = mine.x_TH[:, :6].float()
        routed = dataclasses.replace(mine, routes=router(logits_TE))
        y_TH = stack.layers["moe"](mine.x_TH, logits_TE)
        check_same(y_TH, stack.due("moe", routed), "a layer whose router scales its weights")


def alternating_layers(trial: Trial) -> None:
    """Small and large layers in turns, with a rank that is late between dispatch and combine, stay bitwise right."""
    small, large = layer("small", payloads=()), layer("large", wire="mxfp8", hidden_size=3000, top_k=6)
    stack = CheckedLayers(trial, (small, large))
    seconds = 0.003 if trial.group.rank == 1 % trial.group.size else 0.0
    with ExitStack() as late:
        for one in stack.layers.values():
            late.enter_context(before_compute(one.experts, lambda received: time.sleep(seconds)))
        for turn in range(11):
            for name in stack.layers:
                stack.check(name, f"with a late rank, in turn {turn}")


def late_ranks(trial: Trial) -> None:
    """All ranks wait for a late rank in every round: its announcement of an earlier round does not count."""
    stack = CheckedLayers(trial, (layer(payloads=()),))
    for round_ in range(4):
        if trial.group.rank == trial.group.size - 1:
            time.sleep(0.03)
        stack.check("moe", f"with a late rank, in round {round_ + 1},")


def regions_never_overlap(trial: Trial) -> None:
    """Results are never written where rows of any layer arrive: a fast rank may be a layer ahead of a slow one."""
    specs = (layer("small", payloads=()), layer("large", hidden_size=500, payloads=()))
    made = trial.plan(*specs)
    arriving, leaving = [], []
    for spec in specs:
        received = round_trip(made, spec, trial.batch(spec, 2)).received
        if received.slots_R is not None:  # the rows are where they arrived, in a workspace
            arriving += [(spec.name, _span(payload)) for payload in received.rows.payloads.values()]
        if received.results is not None:
            leaving.append((spec.name, _span(received.results.rows_SH)))
    for (name, (first, last)), (other, (start, end)) in product(leaving, arriving):
        shared = min(last, end) - max(first, start)
        found = f"results of layer {name!r} lie over {shared} bytes of rows of layer {other!r}"
        expect(shared <= 0, found, "regions that never overlap, in any pair of layers")


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def growing_plans(trial: Trial) -> None:
    """Layers stay bitwise right when a plan is extended, and when its first layer is removed."""
    first, second = ALIKE
    stack = CheckedLayers(trial, (first,))
    stack.check("first", "in a plan of one layer")
    wide = layer("wide", hidden_size=300, wire="mxfp8", payloads=())
    for spec in (second, wide):
        stack.plan.extend([spec])
        stack.add(spec)
        for name in stack.layers:
            stack.check(name, f"after the plan has grown by {spec.name!r}")
    stack.plan.trim(keep=["second", "wide"])
    for name in ("second", "wide"):
        stack.check(name, "after the plan has forgotten its first layer")


def plans_in_turns(trial: Trial) -> None:
    """Plans of one group, with layers of the same names, share nothing: each has its own layers and rounds."""
    stacks = [CheckedLayers(trial, [dataclasses.replace(spec, name="moe")]) for spec in ALIKE]
    for stack in stacks * 2:
        stack.check("moe", "beside another plan", tokens=4)
    trial.group.barrier()  # no rank closes while another one still combines
    stacks[0].plan.close()
    stacks[1].check("moe", "after the other plan was closed")


def plans_under_way(trial: Trial) -> None:
    """Rows that have arrived in one plan stay as they are while another plan moves rows of the same shapes."""
    spec = layer(payloads=())
    one, other = trial.plan(spec), trial.plan(spec)
    for first, second in ((one, other), (other, one)):
        batches = [trial.batch(spec, 4) for _ in range(2)]
        flights = [send(made, spec, mine) for made, mine in zip((first, second), batches, strict=True)]
        for made, mine, flight in zip((first, second), batches, flights, strict=True):
            y_TH = flight.combine(echo(flight.received)).y_TH
            check_same(y_TH, echo_due(made, spec, mine), "a batch beside one of another plan")


def groups_side_by_side(trial: Trial) -> None:
    """Two groups side by side, such as pipeline stages, plan, extend and run without waiting for each other.

    The first half of the ranks makes a plan, and runs it once. The other half extends its plan twice, and runs it three
    times.
    """
    size, rank = trial.group.size, trial.group.rank
    first = rank < (size + 1) // 2
    stage = trial.group.subgroup([r for r in range(size) if (r < (size + 1) // 2) == first])
    stack = CheckedLayers(dataclasses.replace(trial, group=stage), (layer(payloads=()),))
    for more in range(0 if first else 2):
        stack.plan.extend([layer(f"wider {more}", hidden_size=100 * (more + 1), payloads=())])
    if trial.group.device.type == "cuda":  # a kernel cannot be loaded while another one waits
        trial.group.barrier()
    for round_ in range(1 if first else 3):
        try:
            stack.check("moe", "beside another group")
        except GroupError as error:
            found = f"round {round_ + 1} beside another group that makes one: {error}"
            raise Finding(found, "waits for its own group only") from error
    stack.plan.close()
    stage.close()


def closed_plans_make_room(trial: Trial) -> None:
    """A group can make and close plans repeatedly; a closed plan refuses calls, and holds no memory."""
    with Meter(trial.group) as meter:
        for _ in range(5):
            stack = CheckedLayers(trial, (layer(),))
            stack.check("moe", "in a new plan", tokens=2)
            trial.group.barrier()
            stack.plan.close()
    must_raise(HandleError, stack.run, "moe", stack.batch("moe"), when="a layer of a closed plan")
    del stack
    gc.collect()
    trial.group.barrier()  # ranks that are threads refer to the memory of all ranks
    held = meter.held() if trial.group.device.type == "cpu" else 0  # GPUs may free it later
    expect(held == 0, f"{held} shared buffers of 5 closed plans are still there", "all of them given back")


# -- Rounds --------------------------------------------------------------------------------------------------


def rounds_are_counted(trial: Trial) -> None:
    """A plan's dispatches are numbered from 1, on every rank, across layers; a failed dispatch has a number, too."""
    specs = (layer("first", payloads=()), layer("second", payloads=(), max_tokens=4))
    made = trial.plan(*specs)
    rounds = [round_trip(made, spec, trial.batch(spec, 2)).arrival.round for spec in specs * 2]
    bad = trial.batch(specs[1], 5 if trial.group.rank == 0 else 1)
    must_raise(TokenyardError, send, made, specs[1], bad, when="5 tokens of at most 4")
    rounds.append(round_trip(made, specs[0], trial.batch(specs[0], 2)).arrival.round)
    found = f"five dispatches, with a failed one before the last, have the rounds {rounds}"
    expected = "[1, 2, 3, 4, 6]: every dispatch in which the ranks met counts"
    expect(rounds == [1, 2, 3, 4, 6], found, expected)


def many_rounds(trial: Trial) -> None:
    """Every round brings its own rows, routes, payloads and results, however many rounds went before."""
    spec, device = layer(wire="mxfp8", hidden_size=24), trial.group.device
    with Meter(trial.group) as meter:
        made = trial.plan(spec)
    many = ROUNDS_SHARED_MEMORY if meter.shared else ROUNDS
    batches = [_KnownBatch.drawn(trial, made, spec) for _ in range(_KNOWN_BATCHES)]
    for number in range(1, (many if trial.rounds is None else trial.rounds) + 1):
        known = batches[number % _KNOWN_BATCHES].in_round(number)
        dispatched = send(made, spec, known.mine.to(device))
        seen = arrived(dispatched, device)
        seen["results"] = dispatched.combine(echo(dispatched.received)).y_TH
        for what, tensor in seen.items():
            found = f"round {number} brought other {what} than were sent in it"
            expect_same(tensor.cpu(), known.due[what], found)
        round = dispatched.arrival.round
        expect(round == number, f"dispatch {number} has the round {round}", number)


@dataclass(frozen=True, kw_only=True)
class _KnownBatch:
    """A batch of this rank, and what must arrive here of all ranks' batches; computed once, for many rounds."""

    mine: Batch
    due: dict[str, Tensor]

    @classmethod
    def drawn(cls, trial: Trial, made: Plan, spec: LayerSpec) -> _KnownBatch:
        sent = trial.batches(spec, (1, 2, 3, 4))
        mine = sent[trial.group.rank]
        return cls(mine=mine, due=arriving(made, spec, sent) | {"results": echo_due(made, spec, mine)})

    def in_round(self, number: int) -> _KnownBatch:
        """The same batch with rows (times a power of two, which is exact) and payloads that no other round has."""
        power = number // _KNOWN_BATCHES % 64 - 32
        extra = self.mine.extra | {"where": self.mine.extra["where"] + 100 * number}
        mine = dataclasses.replace(self.mine, x_TH=self.mine.x_TH * 2.0**power, extra=extra)
        due = self.due | {
            "rows (scales)": self.due["rows (scales)"] + power,
            "payloads (where)": self.due["payloads (where)"] + 100 * number,
            "results": self.due["results"] * 2.0**power,
        }
        return _KnownBatch(mine=mine, due=due)


# -- Tensors of the caller -----------------------------------------------------------------------------------


def input_untouched(trial: Trial) -> None:
    """Rows, routes, further payloads and the experts' results are not changed by a round trip."""
    spec = layer()
    made, mine = trial.plan(spec), trial.batch(spec, 6)
    # The weight of a choice of -1 is not used, and must not be changed either.
    mine.routes.topk_ids_TK[1, 0], mine.routes.topk_weights_TK[1, 0] = -1, 0.5
    wiring = made.wiring("moe")
    rows = wiring.wire.encode(mine.x_TH)
    tensors = mine.tensors() | {f"encoded {name}": tensor for name, tensor in rows.payloads.items()}
    untouched = "nothing of the caller's to be changed"
    with unchanged(tensors, expected=untouched):
        dispatched = made.exchange.dispatch(wiring.exchange_spec, rows, mine.routes, mine.extra)
        result_RH = torch.randn(dispatched.received.num_rows, spec.hidden_size).to(trial.group.device)
        with unchanged({"the experts' result": result_RH}, expected=untouched):
            dispatched.combine(ExpertRows(rows_RH=result_RH))


def output_dtype(trial: Trial) -> None:
    """The output has the input's dtype, shape and device, whatever the wire."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wire in ("bf16", "mxfp8"):
            stack = CheckedLayers(trial, (layer(dtype=dtype, wire=wire),))
            stack.check("moe", f"of {dtype_name(dtype)} rows on the {wire} wire", tokens=3)


def output_is_kept(trial: Trial) -> None:
    """An output is the caller's: later rounds do not write into it, also where all of it came from one rank."""
    stack = CheckedLayers(trial, (layer(), layer("other", hidden_size=300)))
    apart, together = stack.batch("moe"), stack.batch("moe")
    together = together.with_ids(torch.zeros_like(together.routes.topk_ids_TK))  # all to the rank of expert 0
    kept = [(mine, stack.run("moe", mine)) for mine in (apart, together)]
    for name in ("other", "moe", "other"):
        stack.run(name, stack.batch(name))
    for mine, y_TH in kept:
        check_same(y_TH, stack.due("moe", mine), "an output that was kept over three rounds")


def out_and_add(trial: Trial) -> None:
    """A result can be written into the caller's tensor, and added to what that holds, with one rounding."""
    stack = CheckedLayers(trial, (layer(dtype=torch.float32, payloads=()),))
    for residual in (3.0, 5.0):
        mine = stack.batch("moe")
        out = torch.full_like(mine.x_TH, residual)
        returned = stack.layers["moe"](mine.x_TH, mine.routes, out=out, add=out)
        is_out = returned.data_ptr() == out.data_ptr()
        expect(is_out, "combine(out=…) returned another tensor", "`out` itself")
        check_same(out, stack.due("moe", mine) + residual, "combine(out=y, add=(y,))")
    mine = stack.batch("moe")
    added = stack.layers["moe"](mine.x_TH, mine.routes, add=torch.ones_like(mine.x_TH))
    check_same(added, stack.due("moe", mine) + 1.0, "combine(add=(y,)), after one with `out`,")
    stack.check("moe", "after a combine with `add`")


def unreduced_rows(trial: Trial) -> None:
    """Where the caller sums over ranks, it gets a row per (token, rank), which stay valid and sum to the same bits."""
    spec = layer(reduce_ranks="caller", wire="mxfp8")
    if trial.exchange.sums_in_hosts:
        must_raise(PlanError, trial.plan, spec, when="a layer whose caller sums over ranks")
        return
    stack = CheckedLayers(trial, (spec,))
    kept = []
    for _ in range(2):
        mine = stack.batch("moe")
        rows = stack.layers["moe"].unreduced(mine.x_TH, mine.routes, payloads=mine.extra)
        ranks, size = len(rows.rows_by_rank), trial.group.size
        expect(ranks == size, f"rows of {ranks} ranks came home", f"an entry for each of the {size} ranks")
        kept.append((mine, rows))
    for mine, rows in kept:
        check_same(rows.reduce().y_TH, stack.due("moe", mine), "the sum of unreduced rows")


# -- Handles -------------------------------------------------------------------------------------------------


def several_in_flight(trial: Trial) -> None:
    """A plan made for two or three dispatches in flight carries them, also of one layer, combined in their order."""
    first, second = layer("first"), layer("second", hidden_size=90, wire="mxfp8")
    for specs in ((first, first), (first, second), (first, second, first), (second, first, first)):
        made = trial.plan(first, second, in_flight=len(specs))
        sent = [(spec, trial.batch(spec, 4)) for spec in specs]
        flights = [send(made, spec, mine) for spec, mine in sent]
        for number, (flight, (spec, mine)) in enumerate(zip(flights, sent, strict=True)):
            y_TH = flight.combine(echo(flight.received)).y_TH
            what = f"dispatch {number + 1} of {len(specs)} in flight, of layer {spec.name!r},"
            check_same(y_TH, echo_due(made, spec, mine), what)


def stale_handles(trial: Trial) -> None:
    """A round trip is combined once, in its turn, and not after its plan was closed."""
    spec = layer()
    made = trial.plan(spec)
    first, again = send(made, spec, trial.batch(spec, 3)), trial.batch(spec, 3)
    must_raise(HandleError, send, made, spec, again, when="a second dispatch while one is in flight")
    result = zeros(first.received)
    first.combine(result)
    must_raise(HandleError, first.combine, result, when="a round trip combined twice")
    second = send(made, spec, again)
    must_raise(HandleError, first.combine, result, when="an old round trip while a new one is in flight")
    second.combine(zeros(second.received))
    last = send(made, spec, again)
    result = zeros(last.received)
    trial.group.barrier()  # no rank closes while another one still dispatches
    made.close()
    must_raise(HandleError, last.combine, result, when="a round trip of a closed plan")
