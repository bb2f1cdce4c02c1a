"""`MoeAlltoAll` on a GPU, with virtual ranks: what arrives and comes home, what is refused, and graphs of it."""

from types import SimpleNamespace

import pytest
import torch

from tests.integrations.flashinfer.all_arguments import all_arguments, check_all_arguments
from tests.integrations.flashinfer.round_trips import batch, goes_to, make, round_trip
from tests.models import on_ranks, raised
from tokenyard.conformance.cases import same_bits

pytestmark = pytest.mark.gpu


def one_trip(group, tokens, sizes, in_workspace):
    return round_trip(make(group, **sizes), group, tokens, in_workspace=in_workspace)


def trips(group, batches):
    a2a = make(group)
    wrong = {
        (*tokens, in_workspace): round_trip(a2a, group, tokens, most=most, in_workspace=in_workspace)
        for tokens, most in batches
        for in_workspace in (False, True)
    }
    a2a._exchange.exchange.synchronize()
    a2a.close()
    return wrong


def test_rows_arrive_and_come_home_bitwise_from_uneven_and_from_empty_ranks():
    batches = [([5, 0, 8], None), ([0, 0, 0], None), ([1, 1, 1], 8), ([2, 3, 0], 4)]
    for wrong in on_ranks(3, trips, batches, device="cuda"):
        assert len(wrong) == 8
        assert not any(wrong.values()), wrong


@pytest.mark.parametrize("top_k", [1, 3, 8, 32])
def test_any_top_k(top_k):
    sizes = {"top_k": top_k, "num_experts": 40}
    assert on_ranks(2, one_trip, [4, 7], sizes, top_k % 2 == 0, device="cuda") == [[], []]


def test_long_batches():
    sizes = {"max_num_tokens": 700, "num_experts": 11, "top_k": 4}
    assert on_ranks(4, one_trip, [700, 3, 65, 400], sizes, False, device="cuda") == [[]] * 4


def many_rounds(group, rounds):
    a2a = make(group)
    wrong = []
    for turn in range(rounds):
        tokens = [(turn * 3 + rank * 5) % 9 for rank in range(group.size)]
        dtype = [torch.float32, torch.bfloat16][turn % 2]
        wrong += round_trip(a2a, group, tokens, seed=turn, in_workspace=turn % 5 < 2, dtype=dtype)
    a2a._exchange.exchange.synchronize()
    return wrong, len(a2a._exchange.specs)


def test_100_rounds_of_changing_sizes():
    for wrong, known in on_ranks(3, many_rounds, 100, device="cuda"):
        assert wrong == []
        assert (
            known == 4
        )  # agreement rounds, one kind of rows, two of results: other numbers of tokens are not new


def both_ways(group):
    a2a = make(group)
    ids_TK, payloads = batch(group.rank, 6, 2, 5)
    ids_TK, tags_T = ids_TK.cuda(), payloads[5].float().cuda()
    outcomes = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for in_workspace in (False, True):
            (received,) = a2a.dispatch(ids_TK, [tags_T], 6)
            results = (received / 7).unsqueeze(-1).repeat(1, 1, 10).to(dtype)
            if in_workspace:
                results = a2a.get_combine_payload_tensor_in_workspace(6, 10, dtype).copy_(results)
            output = torch.full((6, 10), 3.0, dtype=dtype, device="cuda")
            y_TH = a2a.combine(results, 6, payload_in_workspace=in_workspace, output=output)
            outcomes.append((y_TH.cpu(), y_TH.data_ptr() == output.data_ptr()))
    return outcomes


def test_results_in_the_workspace_give_the_same_bits_and_output_is_written_in_place():
    for outcomes in on_ranks(2, both_ways, device="cuda"):
        for (copied, in_place), (placed, in_place_too) in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert same_bits(copied, placed)
            assert in_place
            assert in_place_too


IDS = torch.tensor([[0, 4], [3, -1]])
ROWS = torch.ones(2, 4)
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
        a2a.dispatch(ids_TK.cuda(), [payload.cuda() for payload in payloads], most)
        return a2a.combine(torch.ones(group.size, most, 3, device="cuda"), most)[:, 0].tolist()

    good = (IDS, [ROWS], 4)
    for name in names:
        given = BAD[name] if group.rank == 1 else good
        if name == "an id too large":  # goes nowhere, and is reported by the next call
            trip(*given)
            given = good
        error = raised(lambda given=given: (trip(*given), a2a._exchange.exchange.synchronize()))
        errors.append((type(error).__name__, str(error)))
        group.barrier()
        assert trip(*good) == [2.0, 1.0], name
    return errors


def test_what_is_wrong_on_one_rank_reaches_all_and_the_next_round_trip_works():
    names = [*BAD, "too many tokens"]
    answers = on_ranks(3, refused, names, device="cuda")
    own = ["6 tokens", "brings float16[4] a row", "", "holds id 9", "6 tokens"]
    assert [kind for kind, _ in answers[1]] == [
        "InputError",
        "Drifted",
        "Drifted",
        "InputError",
        "InputError",
    ]
    for rank in (0, 2):
        assert [kind for kind, _ in answers[rank]] == ["PeerFailed"] * 2 + ["Drifted"] + ["PeerFailed"] * 2
    for answer in answers:
        assert all(expected in message for expected, (_, message) in zip(own, answer, strict=True))


def growth_between(group):
    a2a = make(group)
    (received,) = a2a.dispatch(IDS.cuda(), [ROWS.cuda() * 7], 4)
    before = a2a.workspace_size_per_rank
    there = a2a.get_combine_payload_tensor_in_workspace(4, 5000, torch.float32)
    grown = a2a.workspace_size_per_rank > before
    count = int((received == 7).all(dim=-1).sum())  # what was received is still there
    there.fill_(2.0)
    y_TH = a2a.combine(there, 4, payload_in_workspace=True)
    copied = raised(lambda: (a2a.dispatch(IDS.cuda(), [ROWS.cuda()], 4), a2a.combine(there.clone(), 4, True)))
    return grown, count, y_TH[:, -1].tolist(), type(copied).__name__


def test_the_workspace_may_grow_between_dispatch_and_combine():
    answers = on_ranks(2, growth_between, device="cuda")
    assert answers == [(True, 2, [4.0, 2.0], "InputError"), (True, 4, [4.0, 2.0], "InputError")]


def captured(group, replays):
    """A round trip in a graph, with other ids and rows each time."""
    tokens, hidden, top_k, experts = 9, 16, 3, 7
    a2a = make(group, max_num_tokens=12, top_k=top_k, num_experts=experts)
    ids_TK = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    x_TH = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    y_TH = torch.empty_like(x_TH)

    def trip():
        rows, ids = a2a.dispatch(ids_TK, [x_TH, ids_TK], tokens, -1, 1)
        there = a2a.get_combine_payload_tensor_in_workspace(tokens, hidden, torch.bfloat16)
        torch.mul(rows, (ids >= 0).any(dim=-1, keepdim=True), out=there)  # an unused slot counts as zero
        a2a.combine(there, tokens, payload_in_workspace=True, output=y_TH)

    trip()
    a2a._exchange.exchange.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = None
    for rank in range(group.size):  # threads of one process capture one after the other
        group.barrier()
        if rank == group.rank:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                trip()
                refused = raised(a2a.dispatch, ids_TK, [x_TH.float()], tokens)
    group.barrier()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(replays):
        draw = torch.Generator().manual_seed(replay * group.size + group.rank)
        fresh_TK = torch.randint(-1, experts, (tokens, top_k), generator=draw, dtype=torch.int32)
        fresh_TH = torch.randint(-64, 65, (tokens, hidden), generator=draw).bfloat16()
        ids_TK.copy_(fresh_TK)
        x_TH.copy_(fresh_TH)
        graph.replay()
        ranks_T1 = torch.zeros(tokens, 1)
        for rank in range(group.size):
            ranks_T1[goes_to(fresh_TK, rank, group.size, experts)] += 1
        wrong += (y_TH != (fresh_TH * ranks_T1).bfloat16().cuda()).sum()
    a2a._exchange.exchange.synchronize()
    return int(wrong), type(refused).__name__, str(refused)


def test_round_trips_can_be_captured_and_replayed_with_other_ids():
    for wrong, kind, message in on_ranks(2, captured, 40, device="cuda"):
        assert wrong == 0
        assert kind == "HandleError"
        assert "before capturing" in message


def two_doors(group):
    mapping = SimpleNamespace(moe_ep_size=2, moe_ep_rank=group.rank)
    first, second = make(group), make(group, mapping=mapping)
    return round_trip(second, group, [3, 4]) + round_trip(first, group, [3, 4])


def test_two_of_them_share_a_group():
    assert on_ranks(2, two_doors, device="cuda") == [[], []]


def on_the_cpu(group):
    a2a = make(group)
    error = raised(a2a.dispatch, IDS, [ROWS], 4)
    return type(error).__name__, round_trip(a2a, group, [3, 4])


def test_tensors_of_the_cpu_are_refused():
    assert on_ranks(2, on_the_cpu, device="cuda") == [("InputError", [])] * 2


def test_all_arguments_of_flashinfer():
    check_all_arguments(on_ranks(2, all_arguments, device="cuda"))
