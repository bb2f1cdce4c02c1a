"""What is damaged on each of the hops that only `hierarchical` has, and who sees it.

Rank 0 is alone on its host, ranks 1 and 2 share one. Rank 1 relays rank 0's rows, and is its own relay:

    out    0 ──► 1 (test_seals) ──► 2      back    2 ──► 1, which sums ──► 0 (test_seals)
"""

from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised
from tests.paranoid.tampering import DAMAGED_ROUND, HOSTS, check_alarm, flip, layer_spec, three_rounds
from tokenyard.exchange import HierarchicalTransport
from tokenyard.exchange.integrity.workspace_guards import GUARD
from tokenyard.exchange.results import RowsAtHome
from tokenyard.exchange.spec import TOKEN

SOURCE, RELAY, OTHER = 0, 1, 2
EVERYWHERE = {"num_experts": 3, "top_k": 3}  # every token has an expert on every rank


def on_hosts(fn, *arguments):
    return on_ranks(3, fn, *arguments, hosts=HOSTS["hierarchical"])


class Tampering(HierarchicalTransport):
    """Calls `act` with what stands in rank 2's memory for rank 1, on the way out or back, in one round."""

    name = "tampering"
    when, act = "", staticmethod(lambda rows, transport: None)

    def serve(self, specs):
        super().serve(specs)
        inside = self.inside
        push, mark = type(inside).push, type(inside).mark

        def push_some(batch, firsts):
            push(inside, batch, firsts)
            if (self.group.rank, self.when, batch.round) == (RELAY, "out", DAMAGED_ROUND):
                self.act(
                    self.rows_at(inside.workspace.dispatch(1, batch.spec, batch.region), batch.spec), self
                )

        def mark_some(round):
            if (self.group.rank, self.when, round) == (OTHER, "back", DAMAGED_ROUND):
                spec = self._forwarding[0].spec
                self.act(self.rows_at(inside.workspace.combine(1, spec, 0), spec), self)
            mark(inside, round)

        inside.push, inside.mark = push_some, mark_some

    @staticmethod
    def rows_at(slots, spec):
        """The slots for the first rank of the host."""
        return {name: payload[: spec.max_tokens] for name, payload in slots.items()}


def tampered(group, moment, what, combine_wire=None):
    class Now(Tampering):
        when, act = moment, staticmethod(what)

    return three_rounds(group, Now, layer=layer_spec(**EVERYWHERE, combine_wire=combine_wire))


def flip_first(rows, transport):
    flip(rows["data"][0])


@pytest.mark.parametrize("payload", ["data", "scales", "tag", "ids", "weights"])
def test_a_row_that_is_damaged_when_it_is_forwarded(payload):
    def damage(rows, transport):
        flip(rows[payload][1])

    by_rank = on_hosts(tampered, "out", damage)
    check_alarm(by_rank, [OTHER], place=payload, source=SOURCE, words=[f"payload {payload!r} of token"])


def write_unused(rows, transport):
    rows["data"].view(torch.uint8)[-1, 0] = 0


def write_beyond(rows, transport):
    workspace = transport.inside.workspace
    workspace.buffers[1][workspace.layout.regions()["dispatch 0"].end] = GUARD ^ 1


def test_a_slot_that_holds_no_row_and_a_byte_beyond_a_region():
    by_rank = on_hosts(tampered, "out", write_unused)
    check_alarm(by_rank, [OTHER], place="dispatch", source=0, token=None, words=["holds no row"])
    by_rank = on_hosts(tampered, "out", write_beyond)
    check_alarm(by_rank, [OTHER], place="dispatch 0", source=None, token=None)


# -- The way back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine_wire", [None, "nvfp4"])
def test_a_result_that_is_damaged_inside_the_host(combine_wire):
    by_rank = on_hosts(tampered, "back", flip_first, combine_wire)
    words = [f"payload 'data' of the result of token 0 of rank {SOURCE} that rank {OTHER} returned"]
    check_alarm(by_rank, [RELAY], place="data", source=OTHER, words=words)


def swap_sources(rows, transport):
    """The results of a token of rank 0, and of the token of rank 1 that has the same number."""
    numbers = rows["checksums"][:, TOKEN].tolist()
    places = [
        (first, numbers.index(number | 1 << 32))
        for first, number in enumerate(numbers)
        if number >= 0 and number | 1 << 32 in numbers and number < 1 << 32
    ]
    first, second = places[0]
    for payload in rows.values():
        some = payload.view(torch.uint8)
        some[[first, second]] = some[[second, first]]


def test_results_of_the_same_token_of_two_ranks_in_each_others_place():
    by_rank = on_hosts(tampered, "back", swap_sources)
    token = by_rank[RELAY][1]["token"]
    words = [f"rank {OTHER} returned what rank {OTHER} computed for token {token} of rank 1 in round 2"]
    check_alarm(by_rank, [RELAY], place="order", source=OTHER, words=words)


class SumsWrong(RowsAtHome):
    """Results of which the last is added twice."""

    def sum_into(self, out_TH, add):
        super().sum_into(out_TH, add)
        out_TH[0] += self.rows_by_rank[-1].decode(torch.float32)[0].to(out_TH.dtype)
        return out_TH


def sums_wrong(group, combine_wire):
    class Wrong(HierarchicalTransport):
        name = "wrong"
        wrong = False

        def serve(self, specs):
            super().serve(specs)
            at_home = self.inside.at_home
            self.inside.at_home = lambda arrival: (
                SumsWrong(**vars(at_home(arrival))) if self.wrong else at_home(arrival)
            )

        def send_back(self, results):
            self.wrong = results.arrival.round == DAMAGED_ROUND and self.group.rank == RELAY
            return super().send_back(results)

    return three_rounds(group, Wrong, layer=layer_spec(**EVERYWHERE, combine_wire=combine_wire))


@pytest.mark.parametrize("combine_wire", [None, "mxfp8"])
def test_a_relay_that_sums_wrong(combine_wire):
    words = [f"the result of token 0 of rank {SOURCE} is not the sum of what came to its relay (1 tokens"]
    by_rank = on_hosts(sums_wrong, combine_wire)
    check_alarm(by_rank, [RELAY], place="sum over ranks", source=None, words=words)


def stale_sums(group):
    """A relay returns the sums of the last round."""
    last = []

    class Stale(HierarchicalTransport):
        name = "stale"

        def _sum(self, arrival, packets_by_rank, watch):
            own = super()._sum(arrival, packets_by_rank, watch)
            if self.group.rank == RELAY:
                sums = packets_by_rank[SOURCE].clone()
                if arrival.round == DAMAGED_ROUND:
                    packets_by_rank[SOURCE].copy_(last[-1])
                last.append(sums)
            return own

    return three_rounds(group, Stale, layer=layer_spec(**EVERYWHERE))


def test_sums_of_the_last_round():
    words = [f"rank {RELAY} returned what rank {RELAY} computed for token 0 in round 1"]
    check_alarm(on_hosts(stale_sums), [SOURCE], place="order", source=RELAY, words=words)


def fails_in_the_experts(group, rank):
    """A rank fails before its results are in their place: no relay takes what stands there for wrong."""
    layer = layer_spec(**EVERYWHERE, payloads=())
    plan = ty.plan([layer], group, exchange="hierarchical", paranoid=True, in_flight=2)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 4, seed=group.rank)
    before_TH, compute = built(x_TH, routes), built.experts.compute
    if group.rank == rank:
        built.experts.compute = lambda received, **_: replace(compute(received, **_), rows_RH=None)
    error = raised(built, x_TH, routes)
    built.experts.compute = compute
    return type(error).__name__, torch.equal(built(x_TH, routes), before_TH)


@pytest.mark.parametrize("rank", [RELAY, OTHER])
def test_a_rank_that_fails_is_no_false_alarm(rank):
    found = on_hosts(fails_in_the_experts, rank)
    assert [kind == "PeerFailed" for kind, _ in found] == [other != rank for other in range(3)]
    assert all(worked for _, worked in found)
