"""Thousands of replays of one captured round trip, with other rows and routes each time: every bit as the twins say.

Four virtual ranks share each launch, so that one graph holds a whole round trip of all of them. What is wrong is
counted on the device: the host waits only at the end.
"""

import pytest
import torch

from tests.exchange.virtual_ranks import VirtualRanks, make_batch, make_exchange_spec
from tokenyard.exchange.transports.one_sided.cuda.control import COMBINED, ROUND
from tokenyard.formats import EncodedRows

pytestmark = pytest.mark.gpu

WORLD, TOKENS, REPLAYS, SETS = 4, 24, 10_000, 16


class RoundTrip:
    """A round trip of all ranks that can be captured: the experts of a rank return the rows that they get."""

    def __init__(self, exchange_spec, device):
        self.ranks = VirtualRanks(exchange_spec, device=device, together=True)
        self.launcher, self.exchange_spec = self.ranks.launchers[0], exchange_spec
        rows, wide = WORLD * TOKENS, exchange_spec.hidden_size
        self.x_TH = torch.zeros(rows, wide, dtype=exchange_spec.dtype, device=device)
        self.ids_TK = torch.zeros(rows, exchange_spec.top_k, dtype=torch.int32, device=device)
        self.weights_TK = torch.zeros(rows, exchange_spec.top_k, device=device)
        self.out_TH = torch.zeros_like(self.x_TH)
        self.received = self.ranks.slots(self.ranks.buffers, "dispatch")
        self.results = [slots["data"] for slots in self.ranks.slots(self.ranks.buffers, "combine")]

    def load(self, batch):
        """Make this the batch of the next round trip."""
        for there, fresh in zip((self.x_TH, self.ids_TK, self.weights_TK), batch, strict=True):
            there.copy_(fresh)

    def go(self, waits=True):
        """Dispatch, experts, combine."""
        crossing = self.ranks.dispatch_slots
        slots_TW = self.launcher.dispatch(crossing, self.x_TH, self.ids_TK, self.weights_TK, {}, waits=waits)
        for slots, results_SH in zip(self.received, self.results, strict=True):
            results_SH.copy_(decoded(self.exchange_spec, slots))
        self.launcher.sum(crossing, slots_TW, self.out_TH, just_placed=False, waits=waits)


def decoded(exchange_spec, slots):
    """The rows of all slots of a rank."""
    names = [payload.name for payload in exchange_spec.wire.payloads(exchange_spec.hidden_size)]
    payloads = {name: slots[name] for name in names}
    rows = EncodedRows(format=exchange_spec.wire, hidden_size=exchange_spec.hidden_size, payloads=payloads)
    return rows.decode(torch.bfloat16)


def prepared(exchange_spec, seed, device):
    """A batch of all ranks on the device, the ids that must arrive with it, and the sums that must come home."""
    batches = [make_batch(exchange_spec, TOKENS, seed=100 * seed + rank) for rank in range(WORLD)]
    for batch in batches:
        batch.x_TH.nan_to_num_(1.0, 2.0, -2.0).clamp_(
            -1e4, 1e4
        )  # which NaN a sum gives, is the device's choice
    twins = VirtualRanks(exchange_spec)
    counts = twins.push_twins(batches)
    arrived = twins.slots(twins.twins, "dispatch")
    most = twins.dispatch_slots.max_tokens
    rows = []
    for slots, count in zip(arrived, counts, strict=True):
        taken = torch.cat([torch.arange(n) + source * most for source, n in enumerate(count.tolist())])
        rows.append(decoded(exchange_spec, {name: tensor[taken] for name, tensor in slots.items()}))
    twins.place_twins(rows, counts)
    ends = [twins.pulled_by_twin(rank, batch.ids_TK) for rank, batch in enumerate(batches)]
    batch = tuple(
        torch.cat([getattr(batch, name) for batch in batches]).to(device)
        for name in ("x_TH", "ids_TK", "weights_TK")
    )
    return batch, torch.stack([slots["ids"] for slots in arrived]).to(device), torch.cat(ends).to(device)


def count_wrong(trip, wrong, ids_WSK, end_TH):
    """Count ids and sums that have other bits than they should."""
    for rank, slots in enumerate(trip.received):
        wrong += (slots["ids"] != ids_WSK[rank]).sum()
    wrong += (trip.out_TH.view(torch.int16) != end_TH.view(torch.int16)).sum()


def layer(wire):
    return make_exchange_spec(WORLD, wire=wire, hidden_size=256, top_k=4, experts=10, max_tokens=TOKENS)


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_10_000_replays_with_changing_routes_have_the_bits_of_the_twins(wire):
    exchange_spec = layer(wire)
    trip = RoundTrip(exchange_spec, "cuda")
    sets = [prepared(exchange_spec, seed, "cuda") for seed in range(SETS)]
    trip.launcher.launch_each_kernel(exchange_spec)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    trip.load(sets[0][0])
    trip.go()
    count_wrong(trip, wrong, *sets[0][1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trip.go()
    order = torch.randint(0, SETS, (REPLAYS,), generator=torch.Generator().manual_seed(1)).tolist()
    for number in order:
        batch, ids_WSK, end_TH = sets[number]
        trip.load(batch)
        graph.replay()
        count_wrong(trip, wrong, ids_WSK, end_TH)
    torch.cuda.synchronize()
    assert trip.launcher.host_status.tolist() == [[0] * 4] * WORLD
    assert int(wrong) == 0
    for rank in range(WORLD):
        assert trip.ranks.words(rank)[[ROUND, COMBINED]].tolist() == [REPLAYS + 1] * 2
        assert trip.ranks.status(rank) == [0, 0, 0, 0]


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_two_runs_of_a_batch_leave_the_same_bits(wire):
    exchange_spec = layer(wire)
    batch, _, _ = prepared(exchange_spec, 3, "cuda")
    runs = [RoundTrip(exchange_spec, "cuda") for _ in range(2)]
    for trip in runs:
        trip.launcher.launch_each_kernel(exchange_spec)
        trip.load(batch)
        trip.go()
    torch.cuda.synchronize()
    first, second = runs
    assert torch.equal(first.out_TH.view(torch.int16), second.out_TH.view(torch.int16))
    assert all(map(torch.equal, first.ranks.buffers, second.ranks.buffers))
