"""Exchanges that damage what they move, once, in one place, and what the ranks of a paranoid plan say to it."""

import dataclasses

import torch

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.errors import Corrupted
from tokenyard.exchange import EXCHANGES, Results
from tokenyard.formats import Payload

# Ranks on several hosts, where an exchange sums inside each: rank 1 relays what rank 0 sends to ranks 1 and 2.
HOSTS = {"hierarchical": [1, 2]}
TAG = Payload(name="tag", dtype=torch.int64, width=2)
SOURCE, VICTIM = 0, 1  # rows of rank SOURCE are damaged on their way to rank VICTIM, and back
DAMAGED_ROUND = 2


def layer_spec(**changes):
    """A layer whose rows have all kinds of payloads."""
    fields = {"hidden_size": 40, "experts": "reference", "wire": "nvfp4", "payloads": (TAG,), "top_k": 3}
    return spec(**(fields | changes))


def flip(row):
    """Change one bit of a row of a payload."""
    row.view(torch.uint8)[0] ^= 1


def damaging(exchange, out=None, back=None):
    """A class of this exchange that damages rows: `out` gets them on the way out, `back` on the way back.

    They are given as matrices by payload: the rows that rank SOURCE sent to rank VICTIM, or their results, where they
    stand between being written and being read. In a workspace these are all slots for SOURCE, used or not. Where ranks
    are on several hosts, they are damaged where they cross.
    """
    base = EXCHANGES[exchange]

    class Damaging(base):
        name = f"damaging {exchange}"

        def push(self, batch, firsts):
            super().push(batch, firsts)
            if out is not None and batch.round == DAMAGED_ROUND and self.group.rank == SOURCE:
                slots = self.workspace.dispatch(VICTIM, batch.spec, batch.region)
                first = SOURCE * batch.spec.max_tokens
                out({name: slots[name][first : first + batch.spec.max_tokens] for name in slots})

        def pack(self, batch, *packets_by_rank):
            packed = super().pack(batch, *packets_by_rank)
            if out is not None and batch.round == DAMAGED_ROUND and self.group.rank == SOURCE:
                tokens = batch.routes.tokens_by_rank[VICTIM]
                # allgather packs every token once, two_sided those of rank after rank.
                packets = packed if exchange == "allgather" else packets_by_rank[0][VICTIM]
                where = tokens if exchange == "allgather" else torch.arange(tokens.numel())
                rows = {name: p[where] for name, p in batch.spec.dispatch_layout.unpack(packets).items()}
                out(rows)
                for name, payload in batch.spec.dispatch_layout.unpack(packets).items():
                    payload.view(torch.uint8)[where] = rows[name].view(torch.uint8)
            return packed

        def _write(self, batch, tokens_by_host, packets_by_rank):
            super()._write(batch, tokens_by_host, packets_by_rank)
            if out is not None and batch.round == DAMAGED_ROUND and self.group.rank == SOURCE:
                host = self.hosts.host_of_rank[VICTIM]
                crossing = batch.spec.dispatch_layout.unpack(packets_by_rank[self.hosts.relay(SOURCE, host)])
                goes_N = torch.isin(tokens_by_host[host], batch.routes.tokens_by_rank[VICTIM])
                rows = {name: payload[goes_N] for name, payload in crossing.items()}
                out(rows)
                for name, payload in crossing.items():
                    payload.view(torch.uint8)[goes_N] = rows[name].view(torch.uint8)

        def _sum(self, arrival, packets_by_rank, watch):
            own = super()._sum(arrival, packets_by_rank, watch)
            if back is not None and arrival.round == DAMAGED_ROUND and self.group.rank == VICTIM:
                back(arrival.spec.combine_layout.unpack(packets_by_rank[SOURCE]))
            return own

        def send_back(self, results):
            arrival = results.arrival
            if exchange == "hierarchical":  # its sums are damaged
                return super().send_back(results)
            if back is None or arrival.round != DAMAGED_ROUND or self.group.rank != VICTIM:
                return super().send_back(results)
            if exchange != "one_sided":
                return super().send_back(DamagedResults(**vars(results)))

            def damage():
                slots = self.workspace.combine(VICTIM, arrival.spec, arrival.region)
                first = SOURCE * arrival.spec.max_tokens
                back({name: slots[name][first : first + arrival.spec.max_tokens] for name in slots})
                results.on_results_written()

            return super().send_back(dataclasses.replace(results, on_results_written=damage))

    class DamagedResults(Results):
        def write(self, packets_by_rank):
            super().write(packets_by_rank)
            back(self.arrival.spec.combine_layout.unpack(packets_by_rank[SOURCE]))

    return Damaging


def told(error):
    """What an error says, as plain values."""
    known = {"kind": type(error).__name__, "text": str(error), "layer": error.layer, "rank": error.rank}
    if isinstance(error, Corrupted):
        known |= {"source": error.source, "token": error.token, "place": error.place}
    return known


def three_rounds(group, exchange, *, layer=None, tokens=(6, 5, 0), **options):
    """A good round, the damaged one, a good one: True where the bits are right, else what the error tells."""
    layer = layer or layer_spec()
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True, **options)
    built, outcomes = build(plan, layer.name), []
    for round in range(1, 4):
        x_TH, routes = batch(layer, tokens[group.rank], seed=100 * round + group.rank)
        extra = {"tag": torch.full((x_TH.shape[0], 2), round)} if layer.payloads else None
        outcomes.append(outcome(plan, built, x_TH, routes, extra))
    plan.close()
    return outcomes


def outcome(plan, built, x_TH, routes, extra=None):
    """Of one round trip: True where the bits are right, else what the error tells."""
    results = []
    error = raised(lambda: results.append(built(x_TH, routes, payloads=extra)))
    if error is not None:
        return told(error)
    if not isinstance(routes, ty.Routes):
        return True
    spec = plan.wiring(built.name).spec
    due = twin(plan.wiring(built.name), random_weights(spec, 0), x_TH, routes, plan.group.rank)
    return same_bits(results[0], due)


def check_alarm(by_rank, finders, *, place, token="some", source=SOURCE, words=()):
    """The second round is an error on every rank: `Corrupted` on those who saw it, `PeerFailed` on the others.

    `finders` None: at least one rank saw it, whoever that is.
    """
    for rank, (before, alarm, after) in enumerate(by_rank):
        assert (before, after) == (True, True), f"rank {rank}"
        assert alarm is not True, f"rank {rank} saw nothing"
        assert (alarm["layer"], alarm["rank"]) == ("moe", rank)
    saw = [rank for rank, (_, alarm, _) in enumerate(by_rank) if alarm["kind"] == "Corrupted"]
    assert saw == finders if finders is not None else saw
    for rank, (_, alarm, _) in enumerate(by_rank):
        if rank not in saw:
            assert alarm["kind"] == "PeerFailed", alarm
            assert f"rank {saw[0]} failed in combine: Corrupted" in alarm["text"]
            continue
        assert (alarm["source"], alarm["place"]) == (source, place), alarm
        if token == "some":
            assert alarm["token"] is not None
            assert f"token {alarm['token']}" in alarm["text"]
        else:
            assert alarm["token"] == token, alarm
        for word in ("layer 'moe'", f"rank {rank}", *words):
            assert word in alarm["text"], alarm["text"]
