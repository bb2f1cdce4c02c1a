"""An unmodified engine with the plugin answers as vLLM does in one process: its tokens, and their probabilities."""

import pytest

from tests.vllm_engines.conftest import PROMPTS
from tests.vllm_engines.launching import run_engine
from tokenyard.exchange import EXCHANGES
from tokenyard_lab.shipped import shipped_model

PARALLEL = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
}
# float32 sums in another order: seen up to 1.5e-5.
TOLERANCE = 1e-4


def job(parallel, **more):
    options = {
        "model": str(shipped_model()),
        "enable_expert_parallel": True,
        "distributed_executor_backend": "external_launcher",
        **parallel,
    }
    return {"options": options, "prompts": PROMPTS} | more


def check(ended, plain, exchanges):
    assert ended.codes == [0], ended.said[0][-3000:]
    assert len(ended.answers) == 2
    for exchange in exchanges:
        given = [answer for rank in ended.answers for answer in rank[exchange]]
        assert {answer["prompt"] for answer in given} == set(PROMPTS)
        for answer in given:
            wanted = plain[answer["prompt"]]
            assert answer["ids"] == wanted["ids"], exchange
            for ours, theirs in zip(answer["logprobs"], wanted["logprobs"], strict=True):
                shared = ours.keys() & theirs.keys()
                assert len(shared) >= 2  # rivals that are equally likely may change places
                assert all(abs(ours[token] - theirs[token]) < TOLERANCE for token in shared), exchange


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_every_exchange_with_our_experts(plain, parallel, tmp_path):
    exchanges = ["auto", *EXCHANGES]
    ended = run_engine(tmp_path / "engine", job(parallel, exchanges=exchanges), TOKENYARD_VLLM="experts")
    check(ended, plain, exchanges)
    said = ended.said[0]
    assert said.count("tokenyard: TOKENYARD_VLLM=experts") == len(
        exchanges
    )  # by one rank, once for each plan
    assert "plan of 4 layers on 2 ranks, exchange one_sided (auto: the ranks share memory)" in said
    assert "16 experts on 2 ranks" in said


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_experts_of_vllm_behind_our_exchange(plain, parallel, tmp_path):
    ended = run_engine(tmp_path / "engine", job(parallel), TOKENYARD_VLLM="exchange")
    check(ended, plain, ["auto"])
    assert ended.said[0].count("tokenyard: TOKENYARD_VLLM=exchange") == 1


def test_a_rank_that_dies_is_named_and_the_engine_ends(tmp_path):
    """Rank 1 is killed inside a layer. Rank 0 says so, and ends: long before the deadline."""
    dying = job(PARALLEL["data parallel"], dies_in=30)
    ended = run_engine(tmp_path / "engine", dying, torchrun=False, TOKENYARD_VLLM="experts")
    assert ended.codes[0] == 1
    assert ended.codes[1] == -9
    assert "tokenyard.errors.PeerLost: " in ended.said[0]
    assert "rank 1" in ended.said[0].rpartition("tokenyard.errors.PeerLost: ")[2]
    assert ended.answers == []
