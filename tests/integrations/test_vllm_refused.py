"""What `tokenyard.integrations.vllm` refuses: a second reduction, a second quantization, bad input on one rank.

An error reaches all ranks, and the next round trip works.
"""

from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.integrations.stubs import weight_and_reduce
from tests.integrations.vllm_kernel import UnfinishedExperts, moe_config
from tests.integrations.vllm_ranks import WORLD, Rank, finished
from tests.models import batch, on_ranks, raised, spec
from tokenyard.errors import ContractError, HandleError, InputError, PeerFailed

# -- Nothing is reduced twice --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Contiguous", "Delegate"])
@pytest.mark.parametrize("shape", ["[R, K, H]", "[R·K, H]"])
def test_experts_that_leave_the_sum_to_finalize(vllm, kind, shape):
    """It is done once, in the order of the choices; NaN in places of nobody is not read."""

    def rank_main(group):
        finalizer = getattr(weight_and_reduce, f"TopKWeightAndReduce{kind}")()
        rank = Rank(vllm, group, foreign=lambda layer: UnfinishedExperts(layer, finalizer, shape=shape))
        return rank.is_right(expert_map=rank.expert_map)

    assert on_ranks(WORLD, rank_main) == [True] * WORLD


TWICE = {
    "summed rows, said not to be": ("Contiguous", "[R, H]", "would be reduced twice"),
    "summed rows, and it is left open": ("Delegate", "[R, H]", "would be reduced twice"),
    "rows per choice, said to be summed": ("NoOP", "[R, K, H]", "nothing sums it later"),
    "batches per expert": ("NaiveBatched", "[R, K, H]", "does not say who weights and reduces"),
}


@pytest.mark.parametrize(("kind", "shape", "message"), TWICE.values(), ids=TWICE)
def test_a_wrong_reducer_is_refused_on_every_rank(vllm, kind, shape, message):
    def rank_main(group):
        finalizer = getattr(weight_and_reduce, f"TopKWeightAndReduce{kind}")()
        right = weight_and_reduce.TopKWeightAndReduceDelegate()
        rank = Rank(vllm, group, foreign=lambda layer: UnfinishedExperts(layer, right))
        if group.rank == 2:
            rank.experts.finalizer, rank.experts.shape = finalizer, shape
        error = raised(rank.call, *rank.batch(), expert_map=rank.expert_map)
        rank.experts.finalizer, rank.experts.shape = right, "[R, K, H]"
        return error, rank.is_right(expert_map=rank.expert_map)

    outcomes = on_ranks(WORLD, rank_main)
    assert [type(error) for error, _ in outcomes] == [PeerFailed, PeerFailed, ContractError]
    assert message in str(outcomes[2][0])
    assert message in str(outcomes[0][0])
    assert all(usable for _, usable in outcomes)


def test_our_experts_are_never_reduced_again(vllm):
    def rank_main(group):
        rank = Rank(vllm, group)
        rank.experts.finalize_weight_and_reduce_impl = weight_and_reduce.TopKWeightAndReduceContiguous
        error = raised(rank.call, *rank.batch())
        del rank.experts.finalize_weight_and_reduce_impl
        return error, rank.is_right()

    for error, usable in on_ranks(2, rank_main):
        assert isinstance(error, ContractError)
        assert "weighted and summed already: the results would be reduced twice" in str(error)
        assert usable


def test_a_hook_that_would_sum_instead_is_refused(vllm):
    def rank_main(group):
        rank = Rank(vllm, group)
        rank.experts.post_gemm2_hook = lambda unfinalized, output: None
        error = raised(rank.call, *rank.batch())
        del rank.experts.post_gemm2_hook
        return str(error), rank.is_right()

    for error, usable in on_ranks(2, rank_main):
        assert "post_gemm2_hook is set" in error
        assert usable


def test_results_are_combined_once(vllm):
    def rank_main(group):
        rank = Rank(vllm, group)
        x_TH, routes = rank.batch(tokens=4)
        arguments = (x_TH, routes.topk_weights_TK, routes.topk_ids_TK, 5, None, False, None)
        early = raised(rank.mover.finalize, x_TH, x_TH, None, None, False, finished(vllm))
        a1q, _, _, ids, weights = rank.mover.prepare(*arguments)
        second = raised(rank.mover.prepare, *arguments)
        rank.mover.finalize(torch.empty_like(x_TH), a1q, weights, ids, False, finished(vllm))
        late = raised(rank.mover.finalize, x_TH, a1q, weights, ids, False, finished(vllm))
        return early, second, late, rank.is_right()

    for early, second, late, usable in on_ranks(2, rank_main):
        assert all(isinstance(error, HandleError) for error in (early, second, late))
        assert "finalize was called before prepare, or twice" in str(late)
        assert usable


def test_layers_that_do_not_fit_are_refused_before_the_first_token(vllm):
    bad = {
        'reduce_ranks="caller"': {"reduce_ranks": "caller"},
        "data, scales, global_scale": {"wire": "nvfp4"},
        "further payloads": {"payloads": (ty.formats.Payload(name="p", dtype=torch.int32, width=1),)},
    }

    def rank_main(group):
        plans = {found: ty.plan([spec(**changes)], group) for found, changes in bad.items()}
        return {
            found: [
                raised(vllm.TokenyardPrepareAndFinalize, plan, "moe"),
                raised(vllm.TokenyardExperts, plan, "moe", moe_config=None),
            ]
            for found, plan in plans.items()
        }

    for found, errors in on_ranks(1, rank_main)[0].items():
        for error in errors:
            assert isinstance(error, ContractError)
            assert found in str(error)


def test_experts_of_another_layer(vllm):
    def rank_main(group):
        plan = ty.plan([spec("one"), spec("two", weight_on="input")], group)
        one, two = (vllm.TokenyardPrepareAndFinalize(plan, name) for name in ("one", "two"))
        foreign = UnfinishedExperts(None, weight_and_reduce.TopKWeightAndReduceContiguous())
        x_TH, routes = batch(spec(), 3)
        return (
            raised(
                one.post_init_setup, vllm.TokenyardExperts(plan, "two", moe_config=moe_config(spec(), group))
            ),
            raised(two.post_init_setup, foreign),
            raised(one.prepare, x_TH, routes.topk_weights_TK, routes.topk_ids_TK, 5, None, False, None),
        )

    other, weight, unknown = on_ranks(1, rank_main)[0]
    assert "the experts belong to layer 'two'" in str(other)
    assert 'weight_on="input", with experts of class UnfinishedExperts' in str(weight)
    assert isinstance(unknown, HandleError)
    assert "before post_init_setup" in str(unknown)


# -- Who quantizes -------------------------------------------------------------------------------------------


def quantization(quant_dtype, block_shape=None):
    return SimpleNamespace(quant_dtype=quant_dtype, block_shape=block_shape)


FP8 = torch.float8_e4m3fn
QUANTIZERS = {
    "twice": ({"wire": "mxfp8"}, quantization("mxfp8"), True, "they would be quantized twice"),
    "never": ({}, quantization("nvfp4"), False, "quant_dtype=nvfp4, and the rows travel in bf16"),
    "into another format": ({"wire": "mxfp8"}, quantization("nvfp4"), False, "expected quant_dtype=mxfp8"),
    "into whole rows": ({"wire": "fp8_block128"}, quantization(FP8), False, r"block_shape=\[128, 128\]"),
    "though experts are plain": ({"wire": "mxfp8"}, quantization(None), False, "travel in mxfp8"),
}


@pytest.mark.parametrize(("changes", "config", "deferred", "message"), QUANTIZERS.values(), ids=QUANTIZERS)
def test_rows_are_quantized_once(vllm, changes, config, deferred, message):
    """Before the first token, if the experts say so; and in the call, if that says so."""

    def rank_main(group):
        rank = Rank(vllm, group, **changes)
        x_TH, routes = rank.batch(tokens=4)
        tensors = (x_TH, routes.topk_weights_TK, routes.topk_ids_TK)
        in_call = raised(rank.mover.prepare, *tensors, 5, None, False, config, deferred)
        experts = SimpleNamespace(quant_config=config, expects_unquantized_inputs=deferred)
        return in_call, raised(rank.mover.post_init_setup, experts), rank.is_right()

    for in_call, earlier, usable in on_ranks(2, rank_main):
        for error in (in_call, earlier):
            assert isinstance(error, ContractError)
            with pytest.raises(ContractError, match=message):
                raise error
        assert usable


@pytest.mark.parametrize("block_shape", [[128, 128], [1, 128]])
def test_blocks_of_128_are_what_fp8_rows_travel_in(vllm, block_shape):
    def rank_main(group):
        rank = Rank(vllm, group, wire="fp8_block128", hidden_size=128)
        rank.experts.quant_config = quantization(FP8, block_shape)
        return rank.is_right()

    assert on_ranks(2, rank_main) == [True, True]


# -- Bad input on one rank -----------------------------------------------------------------------------------


def turned(map_E):
    return map_E.roll(1)


BAD = {
    "float ids": (lambda r, x, t: {"ids": t.topk_ids_TK.float()}, "expected a matrix .* of int32 or int64"),
    "ids of 16 bits": (lambda r, x, t: {"ids": t.topk_ids_TK.short()}, "topk_ids_TK is a tensor int16"),
    "an id beyond the experts": (lambda r, x, t: {"ids": t.topk_ids_TK + 5}, "topk_ids_TK holds id"),
    "weights of whole numbers": (lambda r, x, t: {"weights": t.topk_ids_TK}, "topk_weights_TK is a tensor"),
    "too many tokens": (lambda r, x, t: {"tokens": 17}, "17 tokens; expected at most max_tokens=16"),
    "rows of another dtype": (lambda r, x, t: {"x": x.float()}, "x_TH is a tensor float32"),
    "another number of experts": (lambda r, x, t: {"num_experts": 6}, "num_experts is 6; expected 5"),
    "a map of another placement": (
        lambda r, x, t: {"expert_map": turned(r.expert_map)},
        "expert_map has .* for expert .*, where the layer's placement has",
    ),
    "a map of fewer experts": (lambda r, x, t: {"expert_map": r.expert_map[:4]}, r"int32\[4\]"),
    "weights on the input": (lambda r, x, t: {"on_input": True}, "twice, or never"),
    "another activation": (
        lambda r, x, t: {"activation": "gelu"},
        "activation is 'gelu'.*expected 'silu'",
    ),
    "an unknown activation": (lambda r, x, t: {"activation": "swiglustep"}, "activation is 'swiglustep'"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
def test_an_error_on_one_rank_reaches_all(vllm, bad, message):
    def rank_main(group):
        rank = Rank(vllm, group)
        options = {}
        x_TH, routes = rank.batch(tokens=5)
        if group.rank == 1:
            options = bad(rank, x_TH, routes)
            if "tokens" in options:
                x_TH, routes = rank.batch(tokens=options.pop("tokens"))
            x_TH = options.pop("x", x_TH)
        return raised(rank.call, x_TH, routes, **options), rank.is_right()

    outcomes = on_ranks(WORLD, rank_main)
    assert [type(error) is PeerFailed for error, _ in outcomes] == [True, False, True]
    with pytest.raises((InputError, ContractError), match=message):
        raise outcomes[1][0]
    assert "rank 1" in str(outcomes[0][0])
    assert all(usable for _, usable in outcomes)


def test_wrong_weights_and_scales_reach_all_ranks(vllm):
    def rank_main(group):
        rank = Rank(vllm, group)
        errors = []
        whole = rank.weights
        for changes in ({"w13": whole.w13[:, :-1]}, {"w2": whole.w2.float()}):
            rank.weights = SimpleNamespace(**(whole.by_name() | (changes if group.rank == 0 else {})))
            errors.append(raised(rank.call, *rank.batch(tokens=5)))
        rank.weights = whole
        if group.rank == 0:
            rank.experts.quant_config = SimpleNamespace(quant_dtype=None, a2_scale=torch.ones(1))
        errors.append(raised(rank.call, *rank.batch(tokens=5)))
        rank.experts.quant_config = None
        return errors, rank.is_right()

    (mine, mended), (heard, usable) = on_ranks(2, rank_main)
    assert [type(error) for error in mine] == [InputError, InputError, ContractError]
    assert [type(error) for error in heard] == [PeerFailed] * 3
    assert mended
    assert usable
