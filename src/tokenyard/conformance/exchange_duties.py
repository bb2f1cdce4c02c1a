"""What every exchange owes beyond one good round trip: other layers, many rounds, handles, errors that reach all.

Layers here compute with the reference experts, so that a result has one right set of bits: the twin's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.exchange_suite import MOVEMENT_CHECKS, Batch, Trial, batch, expect, layer, send
from tokenyard.conformance.runner import Finding
from tokenyard.conformance.twin import twin
from tokenyard.errors import Drifted, HandleError, InputError, PeerFailed
from tokenyard.formats.base import dtype_name
from tokenyard.layer import MoELayer
from tokenyard.planner import Plan
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows
from tokenyard.spec import LayerSpec

# As in a model whose body is 4-bit and whose head is not: nothing is the same from layer to layer.
LAYERS = (
    layer("body", wire="nvfp4", hidden_size=100),
    layer("head", payloads=(), hidden_size=33, num_experts=3, top_k=1, max_tokens=4),
    layer("wide", wire="mxfp8(alignment=256)", combine_wire="fp8_block128", hidden_size=700, top_k=5),
    layer("exact", dtype=torch.float32, hidden_size=7, placement="round_robin", max_tokens=30),
    layer("half", dtype=torch.float16, wire="fp8_block128", num_experts=1, top_k=2, payloads=()),
)


class _Stack:
    """The layers of a plan on this rank, with what each must give, from the twin."""

    def __init__(self, trial: Trial, specs: Sequence[LayerSpec], tokens: int | None = None) -> None:
        self.plan: Plan = trial.plan(*specs)
        rank = trial.group.rank
        self.layers: dict[str, MoELayer] = {}
        self.batches: dict[str, Batch] = {}
        self.due: dict[str, Tensor] = {}
        for spec in specs:
            weights = random_weights(spec, 0)
            local = weights.select(self.plan.local_experts(spec.name))
            mine = batch(spec, rank, rank % 4 + 1 if tokens is None else tokens)
            self.layers[spec.name] = MoELayer(self.plan, spec.name, local).to(trial.group.device)
            self.batches[spec.name] = mine.to(trial.group.device)
            self.due[spec.name] = twin(self.plan.wiring(spec.name), weights, mine.x_TH, mine.routes, rank)

    def run(self, name: str) -> Tensor:
        """One round trip of a layer."""
        mine = self.batches[name]
        return self.layers[name](mine.x_TH, mine.routes, payloads=mine.extra)  # type: ignore[no-any-return]

    def check(self, name: str, when: str) -> None:
        """Run a layer and compare its bits with the twin's."""
        _same(self.run(name), self.due[name], f"layer {name!r} {when}")


def _same(y_TH: Tensor, due_TH: Tensor, what: str) -> None:
    y_TH = y_TH.cpu()  # what is due was computed there
    if same_bits(y_TH, due_TH):
        return
    if y_TH.dtype != due_TH.dtype or y_TH.shape != due_TH.shape:
        raise Finding(
            f"{what} gave {dtype_name(y_TH.dtype)}{list(y_TH.shape)}",
            f"{dtype_name(due_TH.dtype)}{list(due_TH.shape)}",
        )
    off_T = (y_TH != due_TH).any(dim=1).nonzero().flatten().tolist()
    raise Finding(f"{what} gave other bits than the twin for tokens {off_T[:8]}", "the same bits")


def _raises(
    kind: type[Exception], fn: Callable[..., Any], *args: Any, when: str, **options: Any
) -> Exception:
    """The error that a call must raise."""
    try:
        fn(*args, **options)
    except kind as error:
        return error
    except Exception as error:
        raise Finding(f"{when}: {type(error).__name__}: {error}", kind.__name__) from error
    raise Finding(f"{when}: no error", kind.__name__)


def _zeros(received: ReceivedRows) -> ExpertRows:
    shape = (received.num_rows, received.rows.hidden_size)
    return ExpertRows(rows_RH=torch.zeros(shape, device=received.rows.device))


# -- The checks ----------------------------------------------------------------------------------------------


def heterogeneous_layers(trial: Trial) -> None:
    """Layers of one plan may differ in format, width, experts, top-k, dtype and tokens, and all stay bitwise right."""
    stack = _Stack(trial, LAYERS)
    for spec in (*LAYERS, *reversed(LAYERS)):
        stack.check(spec.name, "beside other layers")
    stack.plan.close()


def alternating_layers(trial: Trial) -> None:
    """Small and large layers in turns, with a rank that is late between dispatch and combine, stay bitwise right."""
    small, large = layer("small", payloads=()), layer("large", wire="mxfp8", hidden_size=3000, top_k=6)
    stack = _Stack(trial, (small, large))
    late = 1 % trial.group.size
    for name, layer_ in stack.layers.items():
        compute = layer_.experts.compute

        def dawdle(received: ReceivedRows, *, finalize: bool, compute: Any = compute) -> Any:
            if trial.group.rank == late:
                time.sleep(0.003)
            return compute(received, finalize=finalize)

        object.__setattr__(layer_.experts, "compute", dawdle)
        stack.check(name, "with a late rank")
    for round_ in range(10):
        for name in ("small", "large"):
            stack.check(name, f"in turn {round_}")
    stack.plan.close()


def late_ranks(trial: Trial) -> None:
    """A rank that is late is waited for, in every round: nobody takes its word of an earlier round for this one."""
    stack = _Stack(trial, (layer(payloads=()),))
    for round_ in range(4):
        if trial.group.rank == trial.group.size - 1:
            time.sleep(0.03)
        stack.check("moe", f"with a late rank, in round {round_ + 1},")
    stack.plan.close()


def regions_never_overlap(trial: Trial) -> None:
    """Results are put down nowhere where rows of any layer arrive: a fast rank may be a layer ahead of a slow one."""
    specs = (layer("small", payloads=()), layer("large", hidden_size=500, payloads=()))
    made = trial.plan(*specs)
    arriving, leaving = {}, {}
    for spec in specs:
        flight = send(made, spec, trial.batch(spec, 2))
        buffer = getattr(made.exchange, "combine_buffer", lambda _: None)(flight)
        if flight.received.slots_R is not None:  # the rows are where they arrived, in a workspace
            arriving[spec.name] = [_span(payload) for payload in flight.received.rows.payloads.values()]
        if buffer is not None:
            leaving[spec.name] = _span(buffer.rows_SH)
        made.exchange.combine(flight, _zeros(flight.received))
    made.close()
    for name, (first, last) in leaving.items():
        for other, spans in arriving.items():
            for start, end in spans:
                shared = min(last, end) - max(first, start)
                expect(
                    shared <= 0,
                    f"results of layer {name!r} lie over {shared} bytes of rows of layer {other!r}",
                    "regions that never overlap, in any pair of layers",
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def groups_side_by_side(trial: Trial) -> None:
    """Two groups side by side, as pipeline stages are, plan and grow as they like: neither waits for the other.

    The first half of the ranks makes one plan. The other half makes it, and lets it grow twice.
    """
    size, rank = trial.group.size, trial.group.rank
    first = rank < (size + 1) // 2
    stage = trial.group.subgroup([r for r in range(size) if (r < (size + 1) // 2) == first])
    stack = _Stack(dataclasses.replace(trial, group=stage), (layer(payloads=()),))
    for more in range(0 if first else 2):
        stack.plan.extend([layer(f"wider {more}", hidden_size=100 * (more + 1), payloads=())])
    if trial.group.device.type == "cuda":  # plans load kernels, which must not meet kernels that wait
        trial.group.barrier()
    stack.check("moe", "beside another group")
    stack.plan.close()
    stage.close()


def many_rounds(trial: Trial) -> None:
    """The bits of a round trip do not drift, however many rounds went before."""
    spec = layer(wire="mxfp8", hidden_size=24)
    made = trial.plan(spec)
    wiring, mine = made.wiring("moe"), trial.batch(spec, trial.group.rank % 4 + 1)
    rows = wiring.wire.encode(mine.x_TH)
    first: tuple[Tensor, ...] = ()
    for round_ in range(trial.rounds):
        dispatched = made.exchange.dispatch(wiring.cargo, rows, mine.routes, mine.extra)
        received = dispatched.received
        assert isinstance(received.routes, LocalRoutes)
        decoded_RH = received.dense().decode(torch.float32)
        seen = (decoded_RH, received.routes.ids_RK.clone(), received.extra["where"].clone())
        y_TH = made.exchange.combine(dispatched, ExpertRows(rows_RH=decoded_RH)).y_TH
        first = first or (*seen, y_TH)
        for name, now, then in zip(("rows", "ids", "payload", "result"), (*seen, y_TH), first, strict=True):
            expect(
                same_bits(now, then), f"the {name} of round {round_ + 1} are not those of round 1", "the same"
            )
    made.close()


def input_untouched(trial: Trial) -> None:
    """Rows, routes, further payloads and the experts' results are not changed by a round trip."""
    spec = layer()
    made, mine = trial.plan(spec), trial.batch(spec, 6)
    # What stands beside nobody means nothing, and is the caller's all the same.
    mine.routes.topk_ids_TK[1, 0], mine.routes.topk_weights_TK[1, 0] = -1, 0.5
    wiring = made.wiring("moe")
    rows = wiring.wire.encode(mine.x_TH)
    tensors = mine.tensors() | {f"encoded {name}": tensor for name, tensor in rows.payloads.items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    dispatched = made.exchange.dispatch(wiring.cargo, rows, mine.routes, mine.extra)
    result_RH = torch.randn(dispatched.received.num_rows, spec.hidden_size).to(trial.group.device)
    tensors["the experts' result"], before["the experts' result"] = result_RH, result_RH.clone()
    made.exchange.combine(dispatched, ExpertRows(rows_RH=result_RH))
    made.close()
    for name, tensor in tensors.items():
        expect(
            same_bits(tensor, before[name]), f"{name} was changed", "nothing of the caller's to be changed"
        )


def output_dtype(trial: Trial) -> None:
    """The output has the input's dtype and shape, whatever the wire."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wire in ("bf16", "mxfp8"):
            stack = _Stack(trial, (layer(dtype=dtype, wire=wire),), tokens=3)
            stack.check("moe", f"of {dtype_name(dtype)} rows on the {wire} wire")
            stack.plan.close()


def output_is_kept(trial: Trial) -> None:
    """An output is the caller's: later rounds do not write into it."""
    spec, other = layer(), layer("other", hidden_size=300)
    stack = _Stack(trial, (spec, other))
    kept = stack.run("moe")
    for name in ("other", "moe", "other"):
        stack.run(name)
    _same(kept, stack.due["moe"], "an output that was kept over three rounds")
    stack.plan.close()


def out_and_add(trial: Trial) -> None:
    """A result can be written into the caller's tensor, and added to what is there, with one rounding."""
    spec = layer(dtype=torch.float32, payloads=())
    stack = _Stack(trial, (spec,))
    mine, due = stack.batches["moe"], stack.due["moe"]
    out = torch.full_like(mine.x_TH, 3.0)
    returned = stack.layers["moe"](mine.x_TH, mine.routes, out=out, add=out)
    expect(returned.data_ptr() == out.data_ptr(), "combine(out=…) returned another tensor", "`out` itself")
    _same(out, due + 3.0, "combine(out=y, add=(y,))")
    stack.plan.close()


def unreduced_rows(trial: Trial) -> None:
    """Where the caller sums over ranks, rows come home one per (token, rank), and sum up to the same bits."""
    spec = layer(reduce_ranks="caller", wire="mxfp8")
    stack = _Stack(trial, (spec,))
    mine = stack.batches["moe"]
    rows = stack.layers["moe"].unreduced(mine.x_TH, mine.routes, payloads=mine.extra)
    expect(
        len(rows.rows_by_rank) == trial.group.size,
        f"rows of {len(rows.rows_by_rank)} ranks came home",
        f"an entry for each of the {trial.group.size} ranks",
    )
    _same(rows.reduce().y_TH, stack.due["moe"], "the sum of unreduced rows")
    stack.plan.close()


def two_in_flight(trial: Trial) -> None:
    """A plan made for two dispatches in flight carries two, combined in their order."""
    specs = (layer("first"), layer("second", hidden_size=90, wire="mxfp8"))
    made, rank = trial.plan(*specs, in_flight=2), trial.group.rank
    flights = [send(made, spec, trial.batch(spec, 4)) for spec in specs]
    for spec, flight in zip(specs, flights, strict=True):
        rows_RH = flight.received.dense().decode(torch.float32)
        y_TH = made.exchange.combine(flight, ExpertRows(rows_RH=rows_RH)).y_TH
        mine = batch(spec, rank, 4)
        ranks_TK = made.wiring(spec.name).cargo.placement.resolve(mine.routes.topk_ids_TK, rank)[0]
        times_T1 = torch.tensor([[len(set(ranks))] for ranks in ranks_TK.tolist()])
        back = made.wiring(spec.name).cargo.combine_wire
        decoded_TH = made.wiring(spec.name).wire.encode(mine.x_TH).decode(torch.float32)
        one_TH = back.encode(decoded_TH).decode(torch.float32)
        due_TH = torch.zeros_like(one_TH)
        for time_ in range(int(times_T1.max())):  # a sum, not a product: that is the order of roundings
            due_TH += torch.where(times_T1 > time_, one_TH, 0.0)
        _same(y_TH, due_TH.to(spec.dtype), f"dispatch {spec.name!r} of two in flight")
    made.close()


def stale_handles(trial: Trial) -> None:
    """A handle is combined once, in its turn, and not after its plan was closed."""
    spec = layer()
    made, mine = trial.plan(spec), trial.batch(spec, 3)
    first = send(made, spec, mine)
    _raises(HandleError, send, made, spec, mine, when="a second dispatch while one is in flight")
    result = _zeros(first.received)
    made.exchange.combine(first, result)
    _raises(HandleError, made.exchange.combine, first, result, when="a handle combined twice")
    again = send(made, spec, mine)
    _raises(
        HandleError, made.exchange.combine, first, result, when="an old handle while a new one is in flight"
    )
    made.exchange.combine(again, _zeros(again.received))
    last = send(made, spec, mine)
    result = _zeros(last.received)
    trial.group.barrier()  # nobody closes while another one still dispatches
    made.close()
    _raises(HandleError, made.exchange.combine, last, result, when="a handle of a closed plan")


def over_capacity(trial: Trial) -> None:
    """Too many tokens on one rank is an error on every rank, and the next round is right again."""
    spec = layer(max_tokens=4, payloads=())
    stack = _Stack(trial, (spec,))
    _fails_on_one_rank(trial, stack, trial.batch(spec, 5), InputError, "5 tokens of at most 4")


def bad_input_reaches_all(trial: Trial) -> None:
    """An id that no expert has, on one rank, is an error on every rank, and the next round is right again."""
    spec = layer(payloads=())
    stack = _Stack(trial, (spec,))
    mine = trial.batch(spec, 3)
    bad = mine.with_ids(torch.full_like(mine.routes.topk_ids_TK, spec.num_experts))
    _fails_on_one_rank(trial, stack, bad, InputError, f"expert id {spec.num_experts} of {spec.num_experts}")


def _fails_on_one_rank(trial: Trial, stack: _Stack, bad: Batch, kind: type[Exception], what: str) -> None:
    """The last rank brings a bad batch: it raises `kind`, the others `PeerFailed`; then all goes on."""
    culprit = trial.group.size - 1
    guilty = trial.group.rank == culprit
    mine = bad if guilty else stack.batches["moe"]
    when = f"{what} on {'this rank' if guilty else f'rank {culprit}'}"
    error = _raises(kind if guilty else PeerFailed, stack.layers["moe"], mine.x_TH, mine.routes, when=when)
    _names(error, culprit)
    stack.check("moe", "after an error")
    stack.plan.close()


def _names(error: Exception, culprit: int) -> None:
    if isinstance(error, PeerFailed):
        expect(error.peer == culprit, f"PeerFailed names rank {error.peer}", f"rank {culprit}, which failed")


def failing_experts_reach_all(trial: Trial) -> None:
    """Experts that raise on one rank, after dispatch, are an error on every rank, and the next round is right."""
    stack = _Stack(trial, (layer(payloads=()),))
    guilty = trial.group.rank == 0
    experts = stack.layers["moe"].experts
    compute = experts.compute

    def fail(received: ReceivedRows, *, finalize: bool) -> ExpertRows:
        raise ZeroDivisionError("these experts fail")

    if guilty:
        object.__setattr__(experts, "compute", fail)
    kind = ZeroDivisionError if guilty else PeerFailed
    _names(_raises(kind, stack.run, "moe", when="experts that fail on rank 0"), 0)
    if guilty:
        object.__setattr__(experts, "compute", compute)
    stack.check("moe", "after an error")
    stack.plan.close()


def drifted_ranks(trial: Trial) -> None:
    """Ranks that call different layers all raise, and the next round is right again."""
    if trial.group.size == 1:
        return
    stack = _Stack(trial, (layer("moe", payloads=()), layer("other", payloads=())))
    astray = "other" if trial.group.rank == 1 else "moe"
    _raises(Drifted, stack.run, astray, when="rank 1 in another layer")
    stack.check("moe", "after a drift")
    stack.plan.close()


def closed_plans_make_room(trial: Trial) -> None:
    """Plans can be made, closed and made again on one group; a closed one refuses to run."""
    for _ in range(5):
        stack = _Stack(trial, (layer(),), tokens=2)
        stack.check("moe", "in a new plan")
        trial.group.barrier()
        stack.plan.close()
    _raises(HandleError, stack.run, "moe", when="a layer of a closed plan")


DUTY_CHECKS: tuple[Callable[[Trial], None], ...] = (
    heterogeneous_layers,
    alternating_layers,
    late_ranks,
    regions_never_overlap,
    groups_side_by_side,
    many_rounds,
    input_untouched,
    output_dtype,
    output_is_kept,
    out_and_add,
    unreduced_rows,
    two_in_flight,
    stale_handles,
    over_capacity,
    bad_input_reaches_all,
    failing_experts_reach_all,
    drifted_ranks,
    closed_plans_make_room,
)

EXCHANGE_CHECKS = {check.__name__: check for check in (*MOVEMENT_CHECKS, *DUTY_CHECKS)}
