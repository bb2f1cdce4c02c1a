"""All ranks of an exchange in one place: the workspaces that kernels fill, and others that the twins fill.

Both begin as the same noise, and whole regions are compared: a byte too many is found as well as one too few.
"""

import torch

from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport
from tokenyard.exchange.transports.one_sided.cuda.control import STATUS, STATUS_WORDS, ControlLayout
from tokenyard.exchange.transports.one_sided.cuda.launch import Launcher
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
from tokenyard.exchange.transports.one_sided.kernels.twins import (
    SentBatch,
    place_twin,
    pull_twin,
    push_twin,
    slots_twin,
)
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.formats import get
from tokenyard.routing import Placement


def make_exchange_spec(world, *, wire="bf16", combine_wire="bf16", experts=5, placement=None, **changes):
    """A small layer, number 3 of its plan."""
    fields = {"hidden_size": 33, "top_k": 3, "max_tokens": 5, "dtype": torch.bfloat16}
    return ExchangeSpec(
        layer="moe",
        index=3,
        num_experts=experts,
        wire=get(wire),
        combine_wire=get(combine_wire),
        placement=placement or Placement.contiguous(experts, world),
        **(fields | changes),
    )


def make_batch(spec, tokens, seed=0):
    """Rows of all magnitudes, some of them odd, and routes with nobody, duplicates, and a token that goes nowhere."""
    draw = torch.Generator().manual_seed(seed)
    exponents_T1 = torch.randint(-8, 9, (tokens, 1), generator=draw).float()
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw) * exponents_T1.exp2()
    odd = torch.tensor([0.0, -0.0, 1e-30, -6e4, 3e38, torch.inf, -torch.inf, torch.nan])
    for token in range(2, tokens, 2):  # the other rows have numbers only
        x_TH[token, token % spec.hidden_size] = odd[(token // 2 + seed) % len(odd)]
    ids_TK = torch.randint(-1, spec.num_experts, (tokens, spec.top_k), generator=draw, dtype=torch.int32)
    if tokens > 1:
        ids_TK[1] = ids_TK[1, 0]
    if tokens > 2:
        ids_TK[2] = -1
    weights_TK = torch.rand(tokens, spec.top_k, generator=draw)
    return SentBatch(x_TH=x_TH.to(spec.dtype), ids_TK=ids_TK, weights_TK=weights_TK)


def noise(nbytes, seed):
    """Bytes that are not zero, and not NaN."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 100, (nbytes,), generator=draw, dtype=torch.uint8)


class VirtualRanks:
    """Ranks of one layer; with `together`, one launch serves them all."""

    def __init__(self, spec, *, device="cpu", together=False, deadline=5.0, max_tokens=None, sms=None):
        self.spec, self.world = spec, spec.placement.world
        self.control = ControlLayout(self.world, 1)
        need = SharedMemoryTransport.region_bytes(spec)
        self.layout = WorkspaceLayout(
            control=self.control.nbytes, dispatch=need.dispatch, combine=need.combine
        )
        self.twins = [noise(self.layout.nbytes, seed) for seed in range(self.world)]
        for buffer in self.twins:
            self.layout.control_region().of(buffer).zero_()
        self.buffers = [buffer.clone().to(device) for buffer in self.twins]
        every = [0] if together else range(self.world)
        self.launchers = [
            Launcher(
                self.buffers,
                self.layout,
                self.control,
                rank,
                deadline,
                spec.max_tokens,
                ranks=self.world if together else 1,
                sms=sms,
            )
            for rank in every
        ]
        self.dispatch_slots = DispatchSlots(
            spec=spec,
            region=0,
            max_tokens=spec.max_tokens if max_tokens is None else max_tokens,
        )

    def words(self, rank):
        """A rank's control region as 64-bit words."""
        return self.layout.control_region().of(self.buffers[rank]).view(torch.int64)

    def flags(self, rank, phase=0, round=1):
        """The flags of a phase that stand at a rank where those of a round do, by source; a view."""
        return self.words(rank)[self.control.flags(phase, round)]

    def status(self, rank):
        """A rank's status on the device."""
        return self.words(rank)[STATUS : STATUS + STATUS_WORDS].tolist()

    def counts(self, rank):
        """Rows that come from each rank, and what those take for `max_tokens`."""
        region = self.buffers[rank][self.control.counts(0) : self.control.counts(1)]
        return region.view(torch.int32).view(self.world, 2).tolist()

    def slots(self, buffers, name):
        """The payloads of a region (`dispatch` or `combine`), by rank."""
        layout = getattr(self.spec, f"{name}_slots")
        used = self.world * self.dispatch_slots.max_tokens
        used *= self.spec.results_per_row if name == "combine" else 1
        regions = [getattr(self.layout, f"{name}_region")(0).of(buffer) for buffer in buffers]
        return [{key: view[:used] for key, view in layout.views(region).items()} for region in regions]

    def same_regions(self, name):
        """Whether the kernels left in a region what the twins did, byte for byte."""
        region = getattr(self.layout, f"{name}_region")(0)
        pairs = zip(self.buffers, self.twins, strict=True)
        return all(torch.equal(region.of(mine).cpu(), region.of(twin)) for mine, twin in pairs)

    def push_twins(self, batches, extra=()):
        """Let the twins dispatch; returns the counts of each rank."""
        regions, most = self.slots(self.twins, "dispatch"), self.dispatch_slots.max_tokens
        counts = push_twin(self.spec, batches, regions, most)
        for source, payloads in enumerate(extra):
            slots_TW = slots_twin(self.spec, batches[source].ids_TK, source)
            for name, tensor in payloads.items():
                for target, slots_T in enumerate(slots_TW.unbind(dim=1)):
                    goes = slots_T >= 0
                    regions[target][name][source * most + slots_T[goes].long()] = tensor[goes]
        return counts

    def place_twins(self, results, counts):
        """Let the twins place results, one for each row that came, by rank."""
        regions = self.slots(self.twins, "combine")
        for rows_RH, count, region in zip(results, counts, regions, strict=True):
            place_twin(self.spec, rows_RH, count, region, self.dispatch_slots.max_tokens)

    def pulled_by_twin(self, rank, ids_TK, add=()):
        """What a rank's tokens come home as."""
        out_TH = torch.empty(ids_TK.shape[0], self.spec.hidden_size, dtype=self.spec.dtype)
        regions = self.slots(self.twins, "combine")
        return pull_twin(self.spec, ids_TK, rank, regions, self.dispatch_slots.max_tokens, out_TH, add)
