"""Duties that are done twice, by somebody else, or by nobody: each is found by counting, while the layer runs."""

import dataclasses

import pytest
import torch

import tokenyard as ty
from tests.models import WATCHED, batch, build, on_ranks, raised, spec
from tests.paranoid.tampering import told
from tokenyard.duties import Duty, Ledger, Party, acting, aside, record
from tokenyard.exchange import Exchange, RowsAtHome, results
from tokenyard.experts import EXPERTS, ReferenceExperts, workers
from tokenyard.experts.pairs import sort_pairs
from tokenyard.formats.base import EncodedRows
from tokenyard.group import thread_groups
from tokenyard.layer import call
from tokenyard.routing import SoftmaxRouter
from tokenyard.rows import ExpertRows


def alarms(group, layer, *, exchange="two_sided", logits=False, unreduced=False):
    """What every rank says to a batch of a layer, None if nothing."""
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 4 + group.rank, seed=group.rank)
    if logits:
        routes = torch.randn(x_TH.shape[0], layer.num_experts, generator=torch.Generator().manual_seed(1))
    call = built.unreduced if unreduced else built
    error = raised(call, x_TH, routes)
    plan.close()
    return None if error is None else told(error)


def check_duty(by_rank, duty, *words):
    """Every rank found that a duty was not done as it should."""
    for rank, alarm in enumerate(by_rank):
        assert alarm is not None, f"rank {rank} saw nothing"
        assert (alarm["kind"], alarm["place"]) == ("Corrupted", duty), alarm
        assert (alarm["layer"], alarm["rank"]) == ("moe", rank)
        for word in (f"layer 'moe', rank {rank}: duty {duty!r} was done", *words):
            assert word in alarm["text"], alarm["text"]


# -- Experts -------------------------------------------------------------------------------------------------


def unfinished(experts, received, weight_on):
    """The pairs of a batch before they are weighted and summed, with their routing weights."""
    experts.spec = dataclasses.replace(experts.spec, weight_on=weight_on)
    pairs = ReferenceExperts.compute(experts, received, finalize=False)
    weights_N = sort_pairs(received.routes, experts.spec.num_local_experts).weights_N
    return pairs, weights_N


class WeightsOnBothEnds(ReferenceExperts):
    def compute(self, received, *, finalize):
        pairs, weights_N = unfinished(self, received, "input")
        return dataclasses.replace(pairs, weights_N=weights_N).finish()


class NeverWeights(ReferenceExperts):
    counts_duties = True

    def compute(self, received, *, finalize):
        pairs, weights_N = unfinished(self, received, "output")
        return dataclasses.replace(pairs, weights_N=torch.ones_like(weights_N)).finish()


class SumsTwice(ReferenceExperts):
    def compute(self, received, *, finalize):
        pairs, weights_N = unfinished(self, received, "output")
        once = pairs.finish().rows_RH
        again = dataclasses.replace(pairs, weights_N=torch.ones_like(weights_N)).finish().rows_RH
        return ExpertRows(rows_RH=once + again)


class LeavesTheSumToTheReceiver(ReferenceExperts):
    finalizes = False

    def compute(self, received, *, finalize):
        return super().compute(received, finalize=False)


class FinishesThoughTheReceiverDoes(LeavesTheSumToTheReceiver):
    """Returns what looks unfinished, and is weighted already."""

    def compute(self, received, *, finalize):
        pairs, weights_N = unfinished(self, received, "input")
        return dataclasses.replace(pairs, weights_N=weights_N)


class QuantizesAgain(ReferenceExperts):
    def incoming(self, received, dtype):
        rows = received.dense()
        return rows.format.encode(rows.decode(self.spec.dtype)).decode(dtype)


def on_experts(group, experts, changes):
    return alarms(group, spec(experts=experts, **changes))


def test_weights_applied_twice():
    check_duty(on_ranks(2, on_experts, WeightsOnBothEnds, {}), "weight", "by the experts, as the wiring says")


def test_weights_applied_by_nobody():
    check_duty(on_ranks(2, on_experts, NeverWeights, {}), "weight", "was done by nobody")


def test_weights_applied_by_experts_and_receiver():
    by_rank = on_ranks(2, on_experts, FinishesThoughTheReceiverDoes, {})
    check_duty(by_rank, "weight", "rows by the experts and", "rows by the receiver;")


def test_a_sum_over_experts_made_twice():
    check_duty(on_ranks(2, on_experts, SumsTwice, {}), "reduce experts")


@pytest.mark.parametrize("wire", ["mxfp8", "nvfp4", "fp8_block128"])
def test_rows_quantized_twice(wire):
    by_rank = on_ranks(2, on_experts, QuantizesAgain, {"wire": wire, "hidden_size": 128})
    check_duty(by_rank, "quantize", "rows by the sender and", "rows by the experts;")


def test_weights_of_one_are_not_missed():
    layer = spec(experts=NeverWeights, top_k=1)

    def ones(group):
        plan = ty.plan([layer], group, paranoid=True)
        x_TH, routes = batch(layer, 4, seed=group.rank)
        routes = dataclasses.replace(routes, topk_weights_TK=torch.ones_like(routes.topk_weights_TK))
        return raised(build(plan, "moe"), x_TH, routes)

    assert on_ranks(2, ones) == [None, None]


@pytest.mark.parametrize("experts", ["grouped", "reference"])
def test_weights_on_the_input_are_counted_for_one_row_as_for_several(experts):
    layer = spec(experts=experts, weight_on="input", top_k=1)
    plan = ty.plan([layer], thread_groups(1)[0], exchange="two_sided", paranoid=True)
    built = build(plan, "moe")
    assert [len(built(*batch(layer, tokens))) for tokens in (1, 3)] == [1, 3]


class SaysNothing(ReferenceExperts):
    """As a kernel of somebody's own, in which nothing is written down."""

    def compute(self, received, *, finalize):
        with aside():
            return super().compute(received, finalize=finalize)


def test_a_kernel_that_counts_nothing_is_taken_at_its_word():
    assert on_ranks(2, on_experts, SaysNothing, {}) == [None, None]


# -- Sender, receiver, router --------------------------------------------------------------------------------


def test_rows_quantized_by_nobody(monkeypatch):
    real = Exchange.encode

    def ready(self, exchange_spec, x_TH):  # as if somebody had kept the encoded rows
        with aside():
            return real(self, exchange_spec, x_TH)

    monkeypatch.setattr(Exchange, "encode", ready)
    check_duty(
        on_ranks(2, alarms, spec(wire="mxfp8")), "quantize", "by nobody", "rows by the sender, as the wiring"
    )


def test_rows_padded_by_somebody_else(monkeypatch):
    real = call.run_experts

    def pads(wiring, experts, received, *slots):
        with acting(Party.RECEIVER):
            record(Duty.PAD, received.num_rows)
        return real(wiring, experts, received, *slots)

    monkeypatch.setattr("tokenyard.layer.moe_layer.run_experts", pads)
    layer = spec(wire="mxfp8(alignment=256)", hidden_size=100)
    check_duty(on_ranks(2, alarms, layer), "pad", "rows by the sender and", "rows by the receiver;")


class WantsSwizzledScales(ReferenceExperts):
    scale_layout = "swizzled"


def test_scales_swizzled_by_nobody(monkeypatch):
    layer = spec(wire="mxfp8", experts=WantsSwizzledScales)
    assert on_ranks(2, alarms, layer) == [None, None]
    monkeypatch.setattr(EncodedRows, "swizzled", lambda self: self)
    check_duty(on_ranks(2, alarms, layer), "swizzle", "by nobody")


def scaled(**changes):
    router = SoftmaxRouter(2, renormalize=True, routed_scaling=2.5)
    return spec(router=router, **changes)


def test_routed_scaling_applied_twice(monkeypatch):
    assert on_ranks(2, _logits, scaled()) == [None, None]
    real = call.route

    def routes_twice(wiring, logits):
        real(wiring, logits)
        return real(wiring, logits)

    monkeypatch.setattr("tokenyard.layer.moe_layer.route", routes_twice)
    check_duty(
        on_ranks(2, _logits, scaled()),
        "routed scaling",
        "rows by the router;",
    )


@dataclasses.dataclass(frozen=True)
class NeverScales(SoftmaxRouter):
    def _weights(self, chosen_TK):
        return chosen_TK / chosen_TK.sum(dim=1, keepdim=True)


def test_routed_scaling_applied_by_nobody():
    layer = spec(router=NeverScales(2, renormalize=True, routed_scaling=2.5))
    check_duty(on_ranks(2, _logits, layer), "routed scaling", "by nobody")


def _logits(group, layer):
    return alarms(group, layer, logits=True)


# -- The sum over ranks --------------------------------------------------------------------------------------


def sums_with(monkeypatch, change):
    real = results.sum_over_ranks
    monkeypatch.setattr(results, "sum_over_ranks", lambda *arguments: change(real, *arguments))


@pytest.mark.parametrize("exchange", WATCHED)
def test_a_sum_over_ranks_that_is_made_twice(monkeypatch, exchange):
    def twice(real, home, tokens_by_rank, out_TH, add):
        real(home, tokens_by_rank, out_TH, add)
        return real(home, tokens_by_rank, out_TH, add)

    sums_with(monkeypatch, twice)
    check_duty(on_ranks(2, _through, exchange), "reduce ranks", "each once")


def _through(group, exchange):
    return alarms(group, spec(), exchange=exchange)


def doubled(real, home, tokens_by_rank, out_TH, add):
    return real(home, tokens_by_rank, out_TH, add).mul_(2)


def left_out(real, home, tokens_by_rank, out_TH, add):
    real(home, tokens_by_rank, out_TH, add)
    return out_TH.copy_(home[0].decode(out_TH.dtype).new_zeros(out_TH.shape))


@pytest.mark.parametrize("wrong", [doubled, left_out])
def test_a_sum_that_is_not_the_sum_of_what_came_home(monkeypatch, wrong):
    sums_with(monkeypatch, wrong)
    for rank, alarm in enumerate(on_ranks(2, alarms, spec())):
        assert (alarm["kind"], alarm["place"], alarm["token"]) == ("Corrupted", "sum over ranks", 0)
        assert f"layer 'moe', rank {rank}: the result of token 0 is not the sum" in alarm["text"]


def test_a_wrong_sum_on_one_rank_reaches_all(monkeypatch):
    def wrong(real, home, tokens_by_rank, out_TH, add):
        y_TH = real(home, tokens_by_rank, out_TH, add)
        return y_TH.mul_(2) if len(y_TH) == 5 else y_TH  # rank 1 has five tokens

    sums_with(monkeypatch, wrong)
    other, alarm = on_ranks(2, alarms, spec())
    assert (other["kind"], alarm["kind"]) == ("PeerFailed", "Corrupted")
    assert "rank 1 failed in combine: Corrupted: layer 'moe', rank 1: the result of token 0" in other["text"]


def test_a_caller_who_reduces_is_left_to_it(monkeypatch):
    layer = spec(reduce_ranks="caller")

    def unreduced(group):
        return alarms(group, layer, unreduced=True)

    assert on_ranks(2, unreduced) == [None, None]
    real = RowsAtHome.by_rank

    def reduces_too(self):
        num_tokens = max((int(tokens.max()) + 1 for tokens in self.tokens_by_rank if len(tokens)), default=0)
        results.sum_over_ranks(self.rows_by_rank, self.tokens_by_rank, torch.empty(num_tokens, 32), ())
        return real(self)

    monkeypatch.setattr(RowsAtHome, "by_rank", reduces_too)
    check_duty(on_ranks(2, unreduced), "reduce ranks", "and the caller sums them")


# -- The ledger ----------------------------------------------------------------------------------------------


def test_a_ledger_writes_down_what_is_done_inside_and_nothing_else():
    record(Duty.PAD, 1)
    with Ledger().open() as ledger:
        record(Duty.PAD, 2)
        with acting(Party.EXPERTS):
            record(Duty.PAD, 3)
            with aside():
                record(Duty.PAD, 4)
        with Ledger().open() as inner:
            record(Duty.PAD, lambda: 5)
    record(Duty.PAD, 6)
    assert ledger.rows(Duty.PAD) == {Party.CALLER: 2, Party.EXPERTS: 3}
    assert inner.rows(Duty.PAD) == {Party.CALLER: 5}
    assert ledger.rows(Duty.WEIGHT) == {}


def test_threads_that_help_write_into_the_same_ledger():
    with Ledger().open() as ledger, acting(Party.EXPERTS):
        workers.for_each(lambda rows: record(Duty.WEIGHT, rows), range(10), threads=2)
    assert ledger.rows(Duty.WEIGHT) == {Party.EXPERTS: 45}


def test_experts_of_the_package_count_their_duties():
    """What does not count is not held to it."""
    assert {name for name, cls in EXPERTS.items() if cls.counts_duties} >= {
        "reference",
        "grouped",
        "self_routing",
    }


def test_ready_routes_are_scaled_already_though_the_layer_has_a_router_that_scales():
    layer = spec(router=SoftmaxRouter(top_k=2, renormalize=True, routed_scaling=2.5), experts="reference")
    plan = ty.plan([layer], thread_groups(1)[0], exchange="two_sided", paranoid=True)
    x_TH, routes = batch(layer, 4, scaled_by=2.5)
    built = build(plan, "moe")
    assert built(x_TH, routes).shape == (4, 32)
    assert built(x_TH, torch.randn(4, 5)).shape == (4, 32)
