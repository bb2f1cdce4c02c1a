"""`MoeAlltoAll` by FlashInfer's names: what it moves, bit by bit, what it refuses, and that it goes on afterwards."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integrations.flashinfer.round_trips import batch, make, round_trip
from tests.models import on_ranks, raised
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import HandleError, InputError
from tokenyard.integrations.flashinfer import MoeAlltoAll

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])


def one_trip(group, tokens, sizes, in_workspace):
    return round_trip(make(group, **sizes), group, tokens, in_workspace=in_workspace)


def trips(group, batches):
    return {
        (*tokens, in_workspace): round_trip(make(group), group, tokens, in_workspace=in_workspace)
        for tokens in batches
        for in_workspace in (False, True)
    }


@both_kinds
def test_rows_arrive_and_come_home_bitwise_from_uneven_and_from_empty_ranks(ranks):
    for wrong in on_ranks(3, trips, [[5, 0, 8], [0, 0, 0], [1, 1, 1]], ranks=ranks):
        assert len(wrong) == 6
        assert not any(wrong.values()), wrong


@pytest.mark.parametrize("top_k", range(1, 33))
def test_any_top_k(top_k):
    sizes = {"top_k": top_k, "num_experts": 40}
    assert on_ranks(2, one_trip, [4, 7], sizes, top_k % 2 == 0) == [[], []]


@settings(max_examples=25)
@given(data=st.data())
def test_any_sizes(data):
    world = data.draw(st.integers(1, 6), label="world")
    tokens = [data.draw(st.integers(0, 8), label=f"tokens of rank {rank}") for rank in range(world)]
    sizes = {
        "num_experts": data.draw(st.integers(1, 13), label="experts"),
        "top_k": data.draw(st.integers(1, 5), label="top_k"),
    }
    assert on_ranks(world, one_trip, tokens, sizes, data.draw(st.booleans())) == [[]] * world


def many_rounds(group, rounds):
    a2a = make(group)
    wrong = []
    for turn in range(rounds):
        tokens = [(turn * 3 + rank * 5) % 9 for rank in range(group.size)]
        most = 8 if turn % 3 else max(tokens)
        dtype = [torch.float32, torch.bfloat16][turn % 2]
        wrong += round_trip(a2a, group, tokens, seed=turn, most=most, in_workspace=turn % 5 < 2, dtype=dtype)
    return wrong, a2a.workspace_size_per_rank


@both_kinds
def test_100_rounds_of_changing_sizes(ranks):
    results = on_ranks(3, many_rounds, 100, ranks=ranks)
    assert [wrong for wrong, _ in results] == [[], [], []]
    assert len({nbytes for _, nbytes in results}) == 1


def both_ways(group):
    a2a = make(group)
    ids_TK, payloads = batch(group.rank, 6, 2, 5)
    outcomes = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for in_workspace in (False, True):
            (received,) = a2a.dispatch(ids_TK, [payloads[5].float()], 6)
            results = (received / 7).unsqueeze(-1).repeat(1, 1, 10).to(dtype)
            if in_workspace:
                results = a2a.get_combine_payload_tensor_in_workspace(6, 10, dtype).copy_(results)
            output = torch.full((6, 10), 3.0, dtype=dtype)
            y_TH = a2a.combine(results, 6, payload_in_workspace=in_workspace, output=output)
            outcomes.append((y_TH.clone(), y_TH.data_ptr() == output.data_ptr()))
    return outcomes


@both_kinds
def test_results_in_the_workspace_give_the_same_bits_and_output_is_written_in_place(ranks):
    for outcomes in on_ranks(2, both_ways, ranks=ranks):
        for (copied, in_place), (placed, in_place_too) in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert same_bits(copied, placed)
            assert in_place
            assert in_place_too


def no_invalid_id(group):
    a2a = make(group, num_experts=2, top_k=1)
    stale = []
    for tokens in (8, 2):
        ids_TK = torch.zeros(tokens, 1, dtype=torch.int64)  # all to rank 0
        (received,) = a2a.dispatch(ids_TK, [torch.full((tokens, 4), 5.0)], 8)
        stale.append(int((received != 0).any(dim=-1).sum()))
        a2a.combine(received, 8)
    return stale


def test_unused_slots_hold_no_rows_of_an_earlier_round():
    assert on_ranks(2, no_invalid_id) == [[16, 4], [0, 0]]


# -- What is refused, on all ranks, and goes on afterwards -------------------------------------------------


def first(group, good, bad):
    """`bad` on rank 1, `good` elsewhere."""
    return bad if group.rank == 1 else good


IDS = torch.tensor([[0, 4], [3, -1]])
ROWS = torch.ones(2, 4)
DISPATCHES = {
    "more tokens than the runtime maximum": ((IDS.repeat(3, 1), [ROWS.repeat(3, 1)], 4), "6 tokens"),
    "a runtime maximum over max_num_tokens": ((IDS, [ROWS], 9), "9; expected 0 to max_num_tokens=8"),
    "more tokens than max_num_tokens": ((IDS.repeat(5, 1), [ROWS.repeat(5, 1)], 10), "max_num_tokens=8"),
    "an id too large": ((torch.tensor([[0, 4], [5, 1]]), [ROWS], 4), "holds id 5 (token 1, choice 0)"),
    "an id below -1": ((torch.tensor([[0, -2], [3, 1]]), [ROWS], 4), "holds id -2 (token 0, choice 1)"),
    "another top-k": ((IDS[:, :1], [ROWS], 4), "int64[2, 1]"),
    "float ids": ((IDS.float(), [ROWS], 4), "float32[2, 2]"),
    "no payloads": ((IDS, [], 4), "input_payloads is a list of 0"),
    "a payload of other tokens": ((IDS, [ROWS[:1]], 4), "input_payloads[0] is a tensor float32[1, 4]"),
    "a payload that is no tensor": ((IDS, [[1, 2]], 4), "input_payloads[0] is a list of 2"),
    "an invalid id without an index": ((IDS, [ROWS], 4, -1), "expert_id_payload_index is None"),
    "an invalid id for a float payload": ((IDS, [ROWS], 4, -1, 0), "a payload of float32"),
    "an index beyond the payloads": ((IDS, [ROWS], 4, -1, 1), "expert_id_payload_index is 1"),
    "an invalid id that does not fit": ((IDS, [ROWS.byte()], 4, -1, 0), "invalid_token_expert_id is -1"),
    "another dtype": ((IDS, [ROWS.half()], 4), "float16[4] a row"),
    "another shape": ((IDS, [ROWS[:, :3]], 4), "float32[3] a row"),
    "another number of payloads": ((IDS, [ROWS, ROWS], 4), "float32[4], float32[4] a row"),
    "another runtime maximum": ((IDS, [ROWS], 5), "runtime_max_tokens_per_rank 5"),
}


def refused_dispatches(group):
    a2a, errors, wrong = make(group), {}, []
    for known in (False, True):  # before and after the good batch, and the bad one's shapes, are known
        for name, (arguments, _) in DISPATCHES.items():
            error = raised(a2a.dispatch, *first(group, (IDS, [ROWS], 4), arguments))
            errors[name, known] = f"{type(error).__name__}: {error}"
        wrong += round_trip(a2a, group, [2, 8, 0], seed=int(known), in_workspace=known)
        for payloads, most in (([ROWS], 4), ([ROWS.half()], 4), ([ROWS[:, :3]], 4), ([ROWS], 5)):
            a2a.combine(torch.zeros(group.size, most, 2), len(a2a.dispatch(IDS, payloads, most)[0][0]))
    return errors, wrong


@both_kinds
def test_bad_dispatches_raise_on_all_ranks_and_the_next_one_works(ranks):
    results = on_ranks(3, refused_dispatches, ranks=ranks)
    for rank, (errors, wrong) in enumerate(results):
        assert wrong == []
        for (name, _), error in errors.items():
            assert DISPATCHES[name][1] in error, name
            assert f"rank {rank}" in error, name
            assert error.startswith(("InputError", "PeerFailed: ", "Disagreement")), name


def refused_combines(group):
    a2a, errors, wrong = make(group), {}, []
    good = {"payload": torch.ones(group.size, 4, 3), "runtime_max_tokens_per_rank": 4}
    cases = {
        "another runtime maximum": good | {"runtime_max_tokens_per_rank": 5},
        "another shape": good | {"payload": torch.ones(group.size, 5, 3)},
        "two dimensions": good | {"payload": torch.ones(group.size * 4, 3)},
        "no tensor": good | {"payload": None},
        "another width": good | {"payload": torch.ones(group.size, 4, 2)},
        "another dtype": good | {"payload": torch.ones(group.size, 4, 3).half()},
        "integers": good | {"payload": torch.ones(group.size, 4, 3, dtype=torch.int32)},
        "not in the workspace": good | {"payload_in_workspace": True},
        "output of another shape": good | {"output": torch.ones(1, 3)},
        "output of another dtype": good | {"output": torch.ones(2, 3).half()},
    }
    for turn in range(2):
        for name, arguments in cases.items():
            (received,) = a2a.dispatch(IDS, [ROWS], 4)
            error = raised(a2a.combine, **first(group, good, arguments))
            errors[name, turn] = f"{type(error).__name__}: {error}"
        (received,) = a2a.dispatch(IDS, [ROWS], 4)
        error = raised(a2a.combine, **first(group, good, good | {"output": received[0, :2, :3]}))
        errors["output in the workspace", turn] = f"{type(error).__name__}: {error}"
        wrong += round_trip(a2a, group, [2, 8, 0], seed=turn)
        for other in (torch.ones(group.size, 4, 2), torch.ones(group.size, 4, 3).half()):
            a2a.dispatch(IDS, [ROWS], 4)
            a2a.combine(other, 4)
    return errors, wrong


@both_kinds
def test_bad_combines_raise_on_all_ranks_and_the_next_round_trip_works(ranks):
    for rank, (errors, wrong) in enumerate(on_ranks(3, refused_combines, ranks=ranks)):
        assert wrong == []
        for name, error in errors.items():
            assert error.startswith(("InputError", "PeerFailed", "Disagreement")), name
            assert f"rank {rank}" in error, name


def wrong_workspace_tensors(group):
    a2a, errors = make(group), []

    def attempt(change):
        a2a.dispatch(IDS, [ROWS], 4)
        there = a2a.get_combine_payload_tensor_in_workspace(4, 3, torch.float32).fill_(1.0)
        errors.append(raised(a2a.combine, change(there), 4, payload_in_workspace=True))

    attempt(torch.clone)
    attempt(lambda there: torch.as_strided(there, there.shape, (1, there.shape[0], there.shape[1] * 4)))
    stale = []
    attempt(lambda there: stale.append(there) or there)
    a2a.dispatch(IDS, [torch.ones(2, 4000)], 4)  # the workspace grows
    a2a.combine(torch.zeros(group.size, 4, 3), 4)
    attempt(lambda there: stale[0])
    attempt(lambda there: there)
    return errors


@both_kinds
def test_only_the_tensor_of_the_workspace_is_taken_for_it(ranks):
    for copied, strided, right, stale, right_again in on_ranks(2, wrong_workspace_tensors, ranks=ranks):
        for error in (copied, strided, stale):
            assert isinstance(error, InputError)
            assert "is not in the workspace" in str(error)
        assert right is None
        assert right_again is None


def order(group):
    a2a = make(group)
    errors = [
        raised(a2a.combine, torch.zeros(2, 4, 3), 4),
        raised(a2a.get_combine_payload_tensor_in_workspace, 4, 3, torch.float32),
    ]
    a2a.dispatch(IDS, [ROWS], 4)
    errors.append(raised(a2a.dispatch, IDS, [ROWS], 4))
    y_TH = a2a.combine(torch.ones(2, 4, 3), 4)  # the first dispatch is still good
    errors.append(raised(a2a.combine, torch.zeros(2, 4, 3), 4))
    a2a.close()
    errors.append(raised(a2a.dispatch, IDS, [ROWS], 4))
    return errors, y_TH


def test_the_wrong_order_raises_and_changes_nothing():
    for errors, y_TH in on_ranks(2, order):
        assert all(isinstance(error, HandleError) for error in errors)
        assert "dispatch was called twice" in str(errors[2])
        assert y_TH[:, 0].tolist() == [2.0, 1.0]


# -- The workspace -----------------------------------------------------------------------------------------


def growth(group):
    a2a, sizes, buffers = make(group), [], []

    def trip(width, hidden, most=4):
        a2a.dispatch(IDS, [torch.ones(2, width)], most)
        y_TH = a2a.combine(torch.ones(group.size, most, hidden), most)
        sizes.append(a2a.workspace_size_per_rank)
        buffers.append(a2a._exchange.exchange.transport.workspace)
        assert y_TH.shape == (2, hidden)

    for width, hidden, most in [(4, 4, 4), (400, 4, 4), (400, 900, 4), (4, 4, 2), (400, 900, 8)]:
        trip(width, hidden, most)
    return sizes, [buffers[n] is buffers[n + 1] for n in range(4)]


@both_kinds
def test_the_workspace_grows_when_it_must_and_never_else(ranks):
    for sizes, same in on_ranks(2, growth, ranks=ranks):
        assert same == [False, False, True, True]
        assert sizes[0] < sizes[1] < sizes[2] == sizes[3] == sizes[4]


def growth_between(group):
    a2a = make(group)
    (received,) = a2a.dispatch(IDS, [ROWS * 7], 4)
    before = a2a._exchange.exchange.transport.workspace
    there = a2a.get_combine_payload_tensor_in_workspace(4, 5000, torch.float32)
    grown = a2a._exchange.exchange.transport.workspace is not before
    count = int((received == 7).all(dim=-1).sum())  # what was received is still there
    there.fill_(2.0)
    y_TH = a2a.combine(there, 4, payload_in_workspace=True)
    return grown, count, y_TH[:, -1].tolist()


@both_kinds
def test_the_workspace_may_grow_between_dispatch_and_combine(ranks):
    assert on_ranks(2, growth_between, ranks=ranks) == [(True, 2, [4.0, 2.0]), (True, 4, [4.0, 2.0])]


def one_asks(group):
    a2a = make(group)
    a2a.dispatch(IDS, [ROWS], 4)
    in_workspace = group.rank == 0
    if in_workspace:
        results = a2a.get_combine_payload_tensor_in_workspace(4, 9, torch.bfloat16).fill_(3)
    else:
        results = torch.full((2, 4, 9), 3.0, dtype=torch.bfloat16)
    return a2a.combine(results, 4, payload_in_workspace=in_workspace)[:, 8].tolist()


@both_kinds
def test_ranks_may_differ_in_whether_results_stand_in_the_workspace(ranks):
    assert on_ranks(2, one_asks, ranks=ranks) == [[6.0, 3.0], [6.0, 3.0]]


def dropped(group):
    """Whether an object that nobody holds any more has given its memory back, without a garbage collection."""
    gc.disable()
    try:
        a2a = make(group, hidden_size=3)
        a2a.dispatch(IDS, [ROWS], 4)  # new: an agreement
        a2a.combine(torch.ones(group.size, 4, 5), 4)
        memory = weakref.ref(a2a._exchange.exchange.transport.workspace)
        del a2a
        return memory() is None
    finally:
        gc.enable()


def test_memory_is_given_back_with_the_last_reference():
    assert on_ranks(1, dropped) == [True]


# -- Making one --------------------------------------------------------------------------------------------


def constructed(group):
    place = {"moe_ep_size": 2, "moe_ep_rank": group.rank}
    a2a = MoeAlltoAll(SimpleNamespace(**place), 8, 2, 5, 1 << 20, 64, object(), group=group)
    sizes = [a2a.workspace_size_per_rank]
    a2a.dispatch(IDS, [ROWS], 4)
    sizes.append(a2a.workspace_size_per_rank)
    a2a.combine(torch.ones(2, 4, 64, dtype=torch.bfloat16), 4)
    sizes.append(a2a.workspace_size_per_rank)
    other = first(group, {}, {"max_num_tokens": 9})
    errors = [
        raised(make, group, mapping=SimpleNamespace(moe_ep_size=3, moe_ep_rank=group.rank)),
        raised(make, group, mapping=SimpleNamespace()),
        raised(make, group, mapping=SimpleNamespace(moe_ep_size=2, moe_ep_rank=0) if group.rank else None),
        raised(make, group, **first(group, {}, {"top_k": 0})),
        raised(make, group, **first(group, {}, {"num_experts": 2.5})),
        raised(make, group, **other),
    ]
    second = make(group, mapping=SimpleNamespace(**place))
    assert (second.ep_size, second.ep_rank) == (2, group.rank)
    wrong = round_trip(second, group, [3, 4]) + round_trip(make(group), group, [3, 4])
    return sizes, [str(error) for error in errors], wrong


@both_kinds
def test_arguments_are_checked_together(ranks):
    for rank, (sizes, errors, wrong) in enumerate(on_ranks(2, constructed, ranks=ranks)):
        assert wrong == []
        assert sizes[0] < sizes[1] == sizes[2]  # room for results of `hidden_size` was there from the start
        for error, expected in zip(
            errors,
            [
                "ep_size is 3",
                "ep_size is None",
                "ep_rank is 0",
                "top_k is 0",
                "num_experts is 2.5",
                "max_num_tokens 9",
            ],
            strict=True,
        ):
            assert expected in error
            assert f"rank {rank}" in error
