"""Exchanges that damage what they move, once, in one place, and what the ranks of a paranoid plan say to it."""

import torch

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin

TAG = ty.Payload(name="tag", dtype=torch.int64, width=2)
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
    stand between being written and being read. In a workspace these are all slots for SOURCE, used or not.
    """
    base = ty.EXCHANGES[exchange]

    class Damaging(base):
        name = f"damaging {exchange}"

        def _load_out(self, exchange_spec, round, outgoing):
            loaded = super()._load_out(exchange_spec, round, outgoing)
            here = out is not None and round == DAMAGED_ROUND and self.group.rank == SOURCE
            if here and exchange == "one_sided":
                slots = self.workspace.dispatch(VICTIM, exchange_spec, self._in_flight.free)
                first = SOURCE * exchange_spec.max_tokens
                out({name: slots[name][first : first + exchange_spec.max_tokens] for name in slots})
            elif here:
                tokens = outgoing.tokens_by_rank[VICTIM]
                # allgather packs every token once, two_sided those of rank after rank.
                first = sum(t.numel() for t in outgoing.tokens_by_rank[:VICTIM])
                where = tokens if exchange == "allgather" else torch.arange(first, first + tokens.numel())
                rows = {name: p[where] for name, p in exchange_spec.dispatch_layout.unpack(loaded).items()}
                out(rows)
                for name, payload in exchange_spec.dispatch_layout.unpack(loaded).items():
                    payload.view(torch.uint8)[where] = rows[name].view(torch.uint8)
            return loaded

        def _load_back(self, dispatched, encoded):
            loaded = super()._load_back(dispatched, encoded)
            here = back is not None and dispatched.round == DAMAGED_ROUND and self.group.rank == VICTIM
            exchange_spec, counts = dispatched.spec, dispatched.return_path.received_counts
            if here and exchange == "one_sided":
                slots = self.workspace.combine(VICTIM, exchange_spec, dispatched.flight)
                first = SOURCE * exchange_spec.max_tokens
                back({name: slots[name][first : first + exchange_spec.max_tokens] for name in slots})
            elif here:
                first = sum(counts[:SOURCE])
                rows = loaded[first : first + counts[SOURCE]]
                back(exchange_spec.combine_layout.unpack(rows))
            return loaded

    return Damaging


def told(error):
    """What an error says, as plain values."""
    known = {"kind": type(error).__name__, "text": str(error), "layer": error.layer, "rank": error.rank}
    if isinstance(error, ty.Corrupted):
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
