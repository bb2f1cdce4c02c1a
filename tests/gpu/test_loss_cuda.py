"""A process is killed while it exchanges rows on a GPU: the others say who, in time, and their GPU still serves them.

Four plain processes share one GPU, without MPS: there the fault of one context is not that of the others.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.errors import RankError
from tokenyard.exchange import Pending, SharedMemoryTransport

pytestmark = pytest.mark.gpu

WORLD, LOST, DEADLINE = 4, 2, 3.0
MOMENTS = [
    "inside dispatch",  # its rows stand in the others' memory, and nobody was told
    "waiting in dispatch",  # it has told the others, and its kernel waits for them
    "after dispatch",
]


def mortal_exchange(group):
    """The exchange of a group on a GPU, with a rank that is struck when its moment comes."""
    parent = SharedMemoryTransport.for_device(group.device)

    class Mortal(parent):
        name = "mortal"
        moment = ""

        def strike(self, moment):
            if self.group.rank == LOST and moment == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)

        def send(self, batch):
            if self.group.rank != LOST and self.moment == "waiting in dispatch":
                time.sleep(1.0)  # it comes first
            pending = super().send(batch)

            def wait():
                arrival = pending.wait()
                self.strike("after dispatch")
                return arrival

            return Pending(wait)

        def _start_reading_counts(self, slots, slots_TW):
            time.sleep(0.3 if self.group.rank == LOST else 0.0)
            self.strike("waiting in dispatch")
            super()._start_reading_counts(slots, slots_TW)

        def arm(self, moment):
            """From now on: short waits, and a rank that dies."""
            self.moment = moment
            self.launcher.deadline = int(DEADLINE * 1e9)
            if moment == "inside dispatch":
                signal_and_wait = self.launcher.signal_and_wait

                def struck(*arguments, **options):
                    torch.cuda.synchronize()  # the rows have arrived
                    self.strike(moment)
                    signal_and_wait(*arguments, **options)

                self.launcher.signal_and_wait = struck

    return Mortal


def live_through(group, directory, moment):
    layer = spec("moe", experts="reference", num_experts=8, hidden_size=64, max_tokens=100)
    plan = ty.plan([layer], group, exchange=mortal_exchange(group))
    built = build(plan, "moe").to(group.device)
    x_TH, routes = batch(layer, 70, seed=group.rank)  # enough for a launch of its own for each step
    there = ty.Routes(
        topk_ids_TK=routes.topk_ids_TK.to(group.device),
        topk_weights_TK=routes.topk_weights_TK.to(group.device),
    )
    rows_TH = x_TH.to(group.device)
    whole_TH = built(rows_TH, there)  # a good round first
    group.barrier()
    plan.exchange.transport.arm(moment)
    error, waited, until = None, 0.0, time.monotonic() + 20
    while error is None and time.monotonic() < until:
        started = time.monotonic()
        error = raised(built, rows_TH, there)
        waited = time.monotonic() - started
    again = raised(built, rows_TH, there)
    ones = torch.ones(64, 64, device=group.device)
    found = {
        "error": type(error).__name__,
        "peers": list(getattr(error, "peers", [])),
        "layer": getattr(error, "layer", None),
        "waited": waited,
        "again": type(again).__name__,
        "context lives": float((ones @ ones).sum()) == 64.0**3,
        "whole": relative_error(whole_TH.cpu(), oracle(layer, random_weights(layer, 0), x_TH, routes))
        < 2**-7,
    }
    plan.go_on_without([LOST])
    y_TH = built(rows_TH, there)
    lost = [2 * LOST, 2 * LOST + 1]
    kept = ~torch.isin(routes.topk_ids_TK, torch.tensor(lost))
    left = ty.Routes(
        topk_ids_TK=routes.topk_ids_TK.masked_fill(~kept, -1), topk_weights_TK=routes.topk_weights_TK
    )
    expected_TH = oracle(layer, random_weights(layer, 0), x_TH, left)
    found["went on"] = relative_error(y_TH.cpu(), expected_TH) < 2**-7
    found["same again"] = same_bits(built(rows_TH, there).cpu(), y_TH.cpu())
    found["dropped"] = plan.stats()["moe"].dropped == 2 * int((~kept).sum())
    Path(directory, f"{group.rank}.json").write_text(json.dumps(found))
    return "survived"


# Bytes: another process of the GPU may have come meanwhile; a context alone takes five times as much.
A_LITTLE = 100 * 2**20


@pytest.mark.parametrize("moment", MOMENTS)
def test_survivors_name_the_killed_rank_in_time_and_go_on_with_their_contexts(moment, tmp_path):
    torch.cuda.init()
    before, _ = torch.cuda.mem_get_info()
    with pytest.raises(RankError) as caught:
        ty.launch(WORLD, live_through, str(tmp_path), moment, ranks="processes", device="cuda", deadline=60.0)
    assert caught.value.rank == LOST
    until = time.monotonic() + 10  # the driver takes back what a killed process had
    while torch.cuda.mem_get_info()[0] < before - A_LITTLE and time.monotonic() < until:
        time.sleep(0.1)
    assert torch.cuda.mem_get_info()[0] >= before - A_LITTLE
    for rank in set(range(WORLD)) - {LOST}:
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["error"] == "PeerLost"
        assert found["peers"] == [LOST]
        assert found["layer"] == "moe"
        assert found["waited"] < DEADLINE + 2 + (
            moment == "waiting in dispatch"
        )  # which the test itself waits
        assert found["again"] == "PlanBroken"
        assert found["context lives"]
        assert found["whole"]
        assert found["went on"]
        assert found["same again"]
        assert found["dropped"]
