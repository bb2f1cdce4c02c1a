"""Checksums without an exchange: which rows are believed, and what is said of the first that is not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tokenyard.errors import Corrupted
from tokenyard.exchange.integrity import checksums
from tokenyard.exchange.integrity.checksums import ResultNumbers, check_back, check_out, checksums_back
from tokenyard.exchange.integrity.workspace_guards import _check_unused, _cut, _first_written, _unused, _used
from tokenyard.exchange.workspace import SlotLayout
from tokenyard.formats import Bf16, Payload
from tokenyard.routing import Placement, Routes
from tokenyard.rows import LocalRoutes

SPEC = SimpleNamespace(max_tokens=4, layer="moe", results_per_row=1)
SOURCES = torch.tensor([0, 0, 2])
GOOD = [[0, 0, 7], [0, 3, 7], [2, 0, 7]]


def test_rows_in_the_order_of_ranks_and_tokens_are_believed():
    checksums._check_heads(SPEC, 7, SOURCES, torch.tensor(GOOD))
    checksums._check_heads(SPEC, 7, SOURCES[:0], torch.zeros(0, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("row", "head", "words"),
    [
        (0, [1, 0, 7], "row 0 from rank 0 is token 0 of rank 1: not the one that belongs there"),
        (0, [0, -1, 7], "row 0 from rank 0 is token -1 of rank 0"),
        (1, [0, 4, 7], "row 1 from rank 0 is token 4 of rank 0"),
        (1, [0, 0, 7], "row 1 from rank 0 is token 0 of rank 0"),  # twice
        (1, [0, 3, 6], "row 1 from rank 0 is token 3 of round 6: it was left there"),
        (2, [2, 0, 8], "row 0 from rank 2 is token 0 of round 8"),
        (2, [0, 1, 7], "row 0 from rank 2 is token 1 of rank 0"),
        (2, [-1, -1, -1], "row 0 from rank 2 is an unused slot: no rank wrote it in round 7"),
    ],
)
def test_the_first_row_that_does_not_belong_there_is_named(row, head, words):
    found = torch.tensor(GOOD)
    found[row] = torch.tensor(head)
    with pytest.raises(Corrupted) as caught:
        checksums._check_heads(SPEC, 7, SOURCES, found)
    assert words in str(caught.value)
    assert caught.value.source == int(SOURCES[row])
    assert caught.value.token == (None if head[2] == -1 else head[1])


def test_other_rows_than_were_announced_are_no_batch():
    received = SimpleNamespace(counts_W=(2, 0))
    with pytest.raises(Corrupted, match="3 rows arrived, and 2 were announced"):
        check_out(SPEC, 0, 7, received, torch.zeros(3, 5, dtype=torch.int64))


ROUTED = SimpleNamespace(top_k=2, num_experts=5, placement=Placement.contiguous(5, 2))


def routed(ids, arrived=None):
    """Rows of rank 0 with these choices: their heads with a copy of the routes, and the routes on rank 1.

    `arrived`: the choices that these are made of, where they are others.
    """
    weights_TK = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    routes = Routes(topk_ids_TK=torch.tensor(ids), topk_weights_TK=weights_TK)
    rank_TK, local_TK = ROUTED.placement.resolve(torch.tensor(arrived or ids), 0)
    local = LocalRoutes(
        ids_RK=torch.where(rank_TK == 1, local_TK, -1).int(),
        weights_RK=torch.where(rank_TK == 1, weights_TK, 0.0),
    )
    return torch.cat([torch.tensor([[0, 1, 7], [0, 3, 7]]), checksums._copy_routes(routes)], dim=1), local


def check_routes(copy, local):
    checksums._check_routes(ROUTED, 1, local, (2, 0), torch.zeros(2, dtype=torch.int64), copy)


def test_routes_that_follow_from_their_copy_are_believed():
    check_routes(*routed([[0, 4], [3, 4]]))
    check_routes(*routed([[-1, 4], [4, -1]]))


@pytest.mark.parametrize(("choice", "arrived"), [(5, -1), (5, 4), (-2, -1), (-2, 4), (2**31 - 1, -1)])
@pytest.mark.parametrize("row", [0, 1])
def test_a_copy_with_an_expert_that_is_none_is_named_whatever_has_arrived(row, choice, arrived):
    ids, others = [[0, 4], [3, 4]], [[0, 4], [3, 4]]
    ids[row][0], others[row][0] = choice, arrived
    with pytest.raises(Corrupted, match=r"payload 'ids' of token \d of rank 0 is") as caught:
        check_routes(*routed(ids, others))
    assert (caught.value.place, caught.value.source, caught.value.token) == ("ids", 0, (1, 3)[row])


@pytest.mark.parametrize("name", ["ids", "weights"])
@pytest.mark.parametrize("row", [0, 1])
def test_routes_that_do_not_follow_from_their_copy_are_named(name, row):
    copy, local = routed([[0, 4], [3, 4]])
    getattr(local, f"{name}_RK")[row, 1] += 1
    with pytest.raises(Corrupted, match=f"payload '{name}' of token {(1, 3)[row]} of rank 0 is") as caught:
        check_routes(copy, local)
    assert (caught.value.place, caught.value.source, caught.value.token) == (name, 0, (1, 3)[row])


def results(tokens, rank=1, round=7):
    """What a rank returns for these tokens."""
    rows = Bf16().encode(torch.arange(4.0).expand(len(tokens), 4).bfloat16())
    sealed = checksums_back(rank, round, tokens, rows.payloads)
    return replace(rows, payloads={**rows.payloads, "checksums": sealed})


def test_results_are_taken_with_their_seals_and_without_them_no_more():
    tokens = torch.tensor([1, 3])
    opened = check_back(1, 7, tokens, results(tokens), ResultNumbers())
    assert list(opened.payloads) == ["data"]
    assert opened.decode().tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    none = torch.zeros(0, dtype=torch.int64)
    assert check_back(1, 7, none, results(none), ResultNumbers()).num_rows == 0


@pytest.mark.parametrize(
    ("given", "words", "token"),
    [
        ({"tokens": [1, 2]}, "what rank 1 computed for token 2 in round 7 as the result of token 3", 3),
        ({"tokens": [1, 3], "rank": 0}, "what rank 0 computed for token 1 in round 7", 1),
        ({"tokens": [1, 3], "round": 6}, "what rank 1 computed for token 1 in round 6", 1),
        ({"tokens": [1]}, "what rank 1 computed for token 1 in round 7 as the result of token 1", 1),
        ({"tokens": []}, "rank 1 returned nothing as the result of token 1", 1),
    ],
)
def test_results_of_others_are_not_taken(given, words, token):
    given = given | {"tokens": torch.tensor(given["tokens"], dtype=torch.int64)}
    with pytest.raises(Corrupted) as caught:
        check_back(1, 7, torch.tensor([1, 3]), results(**given), ResultNumbers())
    assert words in str(caught.value)
    assert (caught.value.source, caught.value.token, caught.value.place) == (1, token, "order")


def test_a_result_that_was_changed_is_named_by_its_token():
    tokens = torch.tensor([1, 3])
    rows = results(tokens)
    rows.payloads["data"].view(torch.uint8)[1, 2] ^= 1
    with pytest.raises(
        Corrupted, match="payload 'data' of the result of token 3 that rank 1 returned"
    ) as caught:
        check_back(1, 7, tokens, rows, ResultNumbers())
    assert (caught.value.source, caught.value.token) == (1, 3)


def test_results_of_single_choices_are_named_by_their_tokens():
    by_choice = ResultNumbers(per_token=4)
    due, swapped = (
        torch.tensor([5, 6, 12]),
        torch.tensor([6, 5, 12]),
    )  # two choices of token 1, one of token 3
    with pytest.raises(
        Corrupted, match="computed for choice 2 of token 1 in round 7 as the result of token 1"
    ):
        check_back(1, 7, due, results(swapped), by_choice)
    rows = results(due)
    rows.payloads["data"].view(torch.uint8)[2, 2] ^= 1
    with pytest.raises(Corrupted, match="payload 'data' of the result of token 3 that rank 1") as caught:
        check_back(1, 7, due, rows, by_choice)
    assert caught.value.token == 3


def test_results_at_a_relay_are_those_of_tokens_of_several_ranks():
    numbers = ResultNumbers(with_source=True)
    due = numbers.of(torch.tensor([[0, 5, 7], [2, 5, 7]]))  # token 5 of rank 0, and token 5 of rank 2
    words = "what rank 1 computed for token 5 of rank 2 in round 7 as the result of token 5 of rank 0"
    with pytest.raises(Corrupted, match=words) as caught:
        check_back(1, 7, due, results(due.flip(0)), numbers)
    assert (caught.value.source, caught.value.token) == (1, 5)
    rows = results(due)
    rows.payloads["data"].view(torch.uint8)[1, 2] ^= 1
    with pytest.raises(Corrupted, match="payload 'data' of the result of token 5 of rank 2 that rank 1"):
        check_back(1, 7, due, rows, numbers)


def test_two_choices_of_a_token_are_told_apart():
    due, swapped = torch.tensor([2, 3]), torch.tensor([3, 2])
    with pytest.raises(
        Corrupted, match="computed for choice 1 of token 1 in round 7 as the result of token 1"
    ):
        check_back(1, 7, due, results(swapped), ResultNumbers(per_token=2))


def test_a_number_at_a_relay_holds_a_token_and_the_rank_that_it_is_of():
    numbers = ResultNumbers(with_source=True)
    heads = [[source, token, 7] for source in (0, 1, 2, 3) for token in (0, 1, 2, 2**32 - 1)]
    made = numbers.of(torch.tensor(heads)).tolist()
    assert [numbers.token(number) for number in made] == [token for _, token, _ in heads]
    assert [numbers.name(number) for number in made] == [f"token {t} of rank {s}" for s, t, _ in heads]


# -- Slots of a workspace ------------------------------------------------------------------------------------

LAYOUT = SlotLayout.of(
    [Payload(name="a", dtype=torch.uint8, width=3), Payload(name="b", dtype=torch.int16, width=1)], slots=8
)


def test_slots_with_and_without_rows():
    starts, counts = (0, 4), (1, 4)
    assert _used(starts, counts) == [range(1), range(4, 8)]
    assert _unused(LAYOUT, starts, counts) == [range(1, 4), range(8, 8)]
    places = torch.arange(LAYOUT.nbytes)
    cut = [(name, run.tolist()) for name, run in _cut(places, LAYOUT, [range(1), range(6, 8)])]
    assert cut == [
        ("a", [0, 1, 2]),
        ("a", [*range(18, 24)]),
        ("b", [128, 129]),
        ("b", [140, 141, 142, 143]),
    ]


def test_the_first_byte_that_is_no_poison():
    run = torch.full((4,), 255, dtype=torch.uint8)
    assert _first_written(run) is None
    assert _first_written(run[:0]) is None
    run[2:] = 0
    assert _first_written(run) == 2


@pytest.mark.parametrize(
    ("byte", "words"),
    [
        (2, None),  # of a row
        (3, "slot 1 for rank 0 of region 'dispatch' holds no row in this round, and payload 'a'"),
        (11, "slot 3 for rank 0 of region 'dispatch'"),
        (12, None),
        (23, None),
        (24, "byte 1 behind the slots of payload 'a' in region 'dispatch'"),
        (127, "byte 104 behind the slots of payload 'a'"),
        (129, None),
        (130, "slot 1 for rank 0 of region 'dispatch' holds no row in this round, and payload 'b'"),
        (144, "byte 1 behind the slots of payload 'b'"),
        (255, "byte 112 behind the slots of payload 'b'"),
    ],
)
def test_every_byte_that_belongs_to_no_row_is_looked_at(byte, words):
    region = torch.full((256,), 255, dtype=torch.uint8)
    region[byte] = 0
    if words is None:
        _check_unused("dispatch", region, LAYOUT, (0, 4), (1, 4))
        return
    with pytest.raises(Corrupted) as caught:
        _check_unused("dispatch", region, LAYOUT, (0, 4), (1, 4))
    assert words in str(caught.value)
    assert caught.value.place == "dispatch"


@pytest.mark.parametrize(("byte", "slot"), [(15, 1), (20, 2), (23, 3), (138, 1), (143, 3)])
def test_slots_are_counted_from_the_first_one_of_their_rank(byte, slot):
    region = torch.full((256,), 255, dtype=torch.uint8)
    region[byte] = 0
    with pytest.raises(
        Corrupted, match=f"slot {slot} for rank 1 of region 'dispatch' holds no row"
    ) as caught:
        _check_unused("dispatch", region, LAYOUT, (0, 4), (4, 1))
    assert caught.value.source == 1
    assert "rows from rank 1 in its first 1 slots only" in str(caught.value)


def test_every_factor_of_a_checksum_is_odd():
    """Whatever is added to a word changes its product then; an even one would lose the highest bit."""
    for width in (1, 7, 512):
        assert (checksums._factors(width, torch.device("cpu")) & 1 == 1).all()
    words = torch.zeros(1, 8, dtype=torch.uint8)
    changed = words.clone()
    changed[0, 7] = 128
    assert checksums.checksums(words).tolist() != checksums.checksums(changed).tolist()
