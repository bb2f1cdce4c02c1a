"""Drawn cases: the same for a seed, all of them plannable, every corner reached, and the caps kept."""

from functools import cache

import pytest

from tests.conformance import mutants
from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import Case
from tokenyard.conformance.draws import MOST_PRODUCTS, draw_case, draw_cases, histogram, is_large
from tokenyard.conformance.suites import check_cases
from tokenyard.errors import InputError, Reason
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport
from tokenyard.experts import ACTIVATIONS
from tokenyard.formats import FORMATS, WEIGHT_FORMATS


@cache
def drawn_cases():
    """Not drawn while tests are collected: each worker would do that."""
    return [draw_case(seed, large=seed % 4 == 0) for seed in range(3000)]


def reached(name):
    return {getattr(case, name) for case in drawn_cases()}


def test_a_seed_is_a_case():
    assert draw_case(11) == draw_case(11) != draw_case(12)


def test_large_ones_are_large():
    assert all(is_large(case) for seed, case in enumerate(drawn_cases()) if seed % 4 == 0)


def test_every_choice_is_reached():
    assert reached("exchange") == set(EXCHANGES)
    assert reached("wire") >= {None, *FORMATS, "mxfp8(alignment=256)", "nvfp4(global_scale=8.0)"}
    assert reached("combine_wire") == {None, *FORMATS}
    assert reached("expert_rows") >= {None, "mxfp8", "nvfp4", "fp8_block128"}
    assert reached("activation") == set(ACTIVATIONS)
    assert reached("placement") == {"contiguous", "round_robin", "replicas", "shuffled"}
    assert reached("routes") == {"uniform", "gaps", "duplicates", "one_rank", "one_expert", "nobody"}
    assert reached("data") == {"ordinary numbers", *(name for name, kind in DATA.items() if kind.rows)}
    for name, values in {
        "weights": set(WEIGHT_FORMATS),
        "weight_on": {"output", "input"},
        "dtype": {"bfloat16", "float16", "float32"},
        "id_dtype": {"int32", "int64"},
        "weight_dtype": {"float32", "bfloat16"},
        "bias": {True, False},
        "payloads": {True, False},
    }.items():
        assert reached(name) == values


def test_the_corners_of_the_shapes_are_reached():
    assert set(range(1, 9)) < reached("world")
    assert 32 < max(reached("world")) <= 64
    assert {1, 100, 2880, 7168} < reached("hidden_size")
    assert {1, 2, 32} < reached("top_k")
    assert {1, 384} < reached("num_experts")
    assert any(case.num_experts < case.world for case in drawn_cases())
    assert any(case.num_experts % case.world for case in drawn_cases())
    tokens = {count for case in drawn_cases() for count in case.tokens}
    assert {0, 1} < tokens
    assert 2000 < max(tokens) <= 4096


def test_processes_are_at_most_eight():
    assert max(draw_case(seed, ranks="processes").world for seed in range(1000)) == 8


def test_threads_on_a_gpu_are_at_most_eight_and_draw_what_processes_do():
    drawn = [draw_case(seed, ranks="threads", crowded=False) for seed in range(1000)]
    assert max(case.world for case in drawn) == 8
    assert drawn[:50] == [draw_case(seed, ranks="processes") for seed in range(50)]


def test_what_an_exchange_refuses_on_a_gpu_is_not_drawn_for_one(monkeypatch):
    """A one_sided whose class for GPUs returns no choices; ours does."""

    def sums():
        return {
            device: {draw_case(seed, exchange="one_sided", device=device).sum for seed in range(100)}
            for device in ("cpu", "cuda")
        }

    assert sums() == {"cpu": {"ranks", "choices"}, "cuda": {"ranks", "choices"}}
    monkeypatch.setattr(CudaTransport, "returns_choices", False)
    assert sums() == {"cpu": {"ranks", "choices"}, "cuda": {"ranks"}}


def test_the_work_of_a_case_is_capped():
    for case in drawn_cases():
        of_a_token = 3 * case.top_k * case.hidden_size * case.intermediate_size
        assert sum(case.tokens) * of_a_token <= max(8 * MOST_PRODUCTS, case.world * of_a_token)  # one each


def test_cells_take_turns_and_a_quarter_is_large():
    cells = [
        (EXCHANGES["two_sided"], "bf16", "threads"),
        (EXCHANGES["allgather"], "nvfp4", "processes"),
    ]
    drawn = draw_cases(80, 3, cells)
    assert [cell for cell, _ in drawn] == [0, 1] * 40
    assert sum(is_large(case) for _, case in drawn) >= 20
    assert all(case.wire is None or "nvfp4" in str(case.wire) for cell, case in drawn if cell == 1)


def test_the_histogram_counts_every_case_once():
    for counts in histogram(drawn_cases()).values():
        assert sum(counts.values()) == len(drawn_cases())


def test_a_part_that_carries_nothing_is_named():
    class Refuses(mutants.changing.Renamed):
        @classmethod
        def supports(cls, exchange_spec):
            return Reason(field="wire", value=exchange_spec.wire, why="never")

    with pytest.raises(InputError, match="never"):
        draw_case(0, exchange=Refuses)


def test_a_wrong_exchange_fails_its_cases_and_they_name_themselves():
    cases = [draw_case(seed, exchange=mutants.rows.ReducesTwice, wire="bf16") for seed in range(60)]
    some = [case for case in cases if case.world == 4 and sum(case.tokens) and case.routes == "uniform"]
    verdicts = list(check_cases(some))
    assert len(verdicts) == len(some) > 0
    assert all("other bits than the twin" in str(verdict.finding) for verdict in verdicts)
    assert str(some[0]).startswith("Case(tokens=(")
    assert "exchange=ReducesTwice" in str(some[0])


# Results of these layers are smaller than the smallest float16, and a rank alone has them: they round to -0 and +0.
TINY = [
    {"tokens": (6, 0, 0, 0, 24), "hidden_size": 500, "intermediate_size": 1, "num_experts": 8, "top_k": 1,
     "exchange": "one_sided", "wire": "mxfp8", "combine_wire": "bf16", "expert_rows": "mxfp8", "activation": "relu2",
     "weights": "fp16", "placement": "shuffled", "dtype": "float16", "sum": "choices", "seed": 286},
    {"tokens": (3877,), "hidden_size": 16, "intermediate_size": 1, "num_experts": 7, "top_k": 1, "wire": "nvfp4",
     "combine_wire": "fp8_block128", "expert_rows": "nvfp4", "weight_on": "input", "dtype": "float16",
     "id_dtype": "int32", "weight_dtype": "bfloat16", "sum": "choices", "seed": 689},
    {"tokens": (3125,), "hidden_size": 16, "intermediate_size": 1, "num_experts": 64, "top_k": 1,
     "exchange": "allgather", "wire": "mxfp8(alignment=256)", "combine_wire": "mxfp8", "weights": "mxint4",
     "placement": "replicas", "dtype": "float16", "id_dtype": "int32", "seed": 1252},
    {"tokens": (3474,), "hidden_size": 2, "intermediate_size": 2, "num_experts": 2, "top_k": 1,
     "exchange": "allgather", "combine_wire": "fp8_block128", "expert_rows": "fp32", "activation": "relu2",
     "weights": "mxfp8", "weight_on": "input", "routes": "one_expert", "dtype": "float16", "id_dtype": "int32",
     "payloads": True, "seed": 1687},
]  # fmt: skip


@pytest.mark.parametrize("fields", TINY, ids=lambda fields: str(fields["seed"]))
def test_results_that_round_to_zeros_have_the_signs_of_the_twin(fields):
    (verdict,) = check_cases([Case(**fields)])
    assert verdict.finding is None
