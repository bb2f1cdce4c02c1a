"""`MoeAlltoAll` by the kernels that serve GPUs, run by Triton's interpreter in two processes."""

import time

import torch

import tokenyard as ty
from tests.exchange import interpreter
from tests.exchange.streams import no_streams
from tests.integrations.flashinfer.all_arguments import all_arguments, check_all_arguments
from tests.integrations.flashinfer.round_trips import make, round_trip
from tests.models import raised
from tokenyard.errors import HandleError
from tokenyard.exchange.transports.one_sided.kernels import flags
from tokenyard.integrations.flashinfer import agreed_exchange
from tokenyard.integrations.flashinfer.device_carrier import DeviceCarrier

pytestmark = interpreter.only_without_gpu
interpreter.install()

IDS = torch.tensor([[0, 4], [3, -1]])
ROWS = torch.ones(2, 4)


def by_kernels(group, fn, *arguments):
    """A rank whose rows are moved by kernels, though it has no GPU."""
    tl = flags.tl
    flags.globaltimer = lambda: tl.full([], time.monotonic_ns(), tl.int64)
    torch.cuda.is_current_stream_capturing = lambda: False
    agreed_exchange.carrier_for = DeviceCarrier
    with no_streams():
        return fn(group, *arguments)


def on_two_processes(fn, *arguments):
    return ty.launch(2, by_kernels, fn, *arguments, ranks="processes", deadline=20.0)


def trips(group):
    a2a = make(group)
    wrong = round_trip(a2a, group, [3, 1], most=8)
    known = len(a2a._exchange.specs)
    wrong += round_trip(a2a, group, [1, 2], seed=1, in_workspace=True)
    wrong += round_trip(a2a, group, [0, 0], seed=2)
    a2a._exchange.exchange.synchronize()
    return wrong, len(a2a._exchange.specs) - known


def test_rows_arrive_and_come_home_and_other_sizes_need_no_agreement():
    assert on_two_processes(trips) == [([], 0), ([], 0)]


def results_and_growth(group):
    a2a = make(group)
    (received,) = a2a.dispatch(IDS, [ROWS * 7], 4)
    there = a2a.get_combine_payload_tensor_in_workspace(4, 500, torch.float32)  # the workspace grows
    count = int((received == 7).all(dim=-1).sum())
    there.fill_(2.0)
    y_TH = a2a.combine(there, 4, payload_in_workspace=True)
    output = torch.zeros(2, 500)
    a2a.dispatch(IDS, [ROWS], 4)
    a2a.combine(torch.ones(2, 4, 500), 4, output=output)
    outside = raised(two_calls, a2a, torch.ones(2, 4, 500))
    return count, y_TH[:, -1].tolist(), output[:, 0].tolist(), str(outside)


def two_calls(a2a, results):
    a2a.dispatch(IDS, [ROWS], 4)
    a2a.combine(results, 4, payload_in_workspace=True)


def test_the_workspace_may_grow_between_dispatch_and_combine():
    for rank, (count, *sums, error) in enumerate(on_two_processes(results_and_growth)):
        assert count == (2, 4)[rank]
        assert sums == [[4.0, 2.0], [2.0, 1.0]]
        assert "is not in the workspace" in error


BAD = {
    "too many tokens": (IDS.repeat(3, 1), [ROWS.repeat(3, 1)], 4),
    "another dtype": (IDS, [ROWS.half()], 4),
    "another maximum": (IDS, [ROWS], 5),
    "an id too large": (torch.tensor([[0, 9], [3, -1]]), [ROWS], 4),
}


def refused(group, names):
    """Rank 1's bad batches; a good round trip after each."""
    a2a, errors = make(group), []

    def trip(ids_TK, payloads, most):
        a2a.dispatch(ids_TK, payloads, most)
        y_TH = a2a.combine(torch.ones(2, most, 3), most)
        return y_TH[:, 0].tolist()

    good = (IDS, [ROWS], 4)
    for name in names:
        given = BAD[name] if group.rank == 1 else good
        if name == "an id too large":  # goes nowhere, and is reported by the next call
            assert trip(*given) == ([2.0, 1.0] if group.rank == 0 else [1.0, 1.0])
            given = good
        error = raised(lambda given=given: (trip(*given), a2a._exchange.exchange.synchronize()))
        errors.append((type(error).__name__, str(error)))
        assert trip(*good) == [2.0, 1.0], name
    return errors


def test_what_is_wrong_on_one_rank_reaches_the_other_and_the_next_round_trip_works():
    # At the first one nothing is known, and all ranks meet. Later ones end the round by its flags alone.
    names = [
        "too many tokens",
        "too many tokens",
        "another dtype",
        "another maximum",
        "an id too large",
        "too many tokens",
    ]
    mine, bad = on_two_processes(refused, names)
    own = ["6 tokens on this rank"] * 2 + [
        "brings float16[4] a row",
        "",
        "holds id 9",
        "6 tokens on this rank",
    ]
    assert [kind for kind, _ in bad] == ["InputError"] * 2 + ["Drifted"] * 2 + ["InputError"] * 2
    assert [kind for kind, _ in mine] == ["PeerFailed"] * 3 + ["Drifted"] + ["PeerFailed"] * 2
    for expected, (_, message), (_, heard) in zip(own, bad, mine, strict=True):
        assert expected in message
        assert expected in heard


def disagreement(group):
    a2a = make(group)
    found = raised(a2a.dispatch, IDS, [ROWS.half() if group.rank == 1 else ROWS], 4)
    a2a.dispatch(IDS, [ROWS], 4)
    other = raised(a2a.combine, torch.ones(2, 4, 3 + group.rank), 4)
    return type(found).__name__, type(other).__name__


def test_ranks_that_bring_different_new_things_disagree():
    assert on_two_processes(disagreement) == [("Disagreement", "Disagreement")] * 2


def test_no_agreement_in_a_graph(monkeypatch):
    def capturing(group):
        a2a = make(group)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        return raised(a2a.dispatch, IDS, [ROWS], 4)

    monkeypatch.setattr(agreed_exchange, "carrier_for", DeviceCarrier)
    with no_streams():
        (error,) = ty.launch(1, capturing)
    assert isinstance(error, HandleError)
    assert "float32[4] a row" in str(error)
    assert "before capturing" in str(error)


def test_all_arguments_of_flashinfer():
    check_all_arguments(on_two_processes(all_arguments))
