"""Ranks that hold different batches, different numbers of them, or nothing, and ranks that fail: all end together."""

import contextlib
import copy

import pytest
import torch

from tests.integrations.transformers_models import generated, logits_of, prompts, tiny_model
from tests.models import on_ranks, raised
from tokenyard.errors import ContractError, HandleError, InputError, PeerFailed
from tokenyard.exchange import EXCHANGES
from tokenyard.integrations.transformers import shard_experts

WORLD = 4
SAME = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def whole():
    return tiny_model("qwen3_moe")


def sharded_on(group, model, **options):
    return shard_experts(copy.deepcopy(model), group, **({"max_tokens": 32} | options))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_stop_at_different_tokens(whole, exchange):
    """Two ranks meet their end of sequence after a few tokens, one goes on to the limit, one has no prompt."""
    unsharded = {rank: generated(whole, prompts(rank, length=4 + rank), 12) for rank in range(3)}
    ends = {rank: int(unsharded[rank][0, 4 + rank + 2 * rank + 1]) for rank in range(2)}

    def rank_main(group):
        sharded = sharded_on(group, whole, exchange=exchange)
        if group.rank == 3:
            tokens = sharded.generate()
        else:
            ids = prompts(group.rank, length=4 + group.rank)
            options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends.get(group.rank)}
            tokens = sharded.generate(ids, **options)
        return tokens, sharded.passes_made

    results = on_ranks(WORLD, rank_main)
    for rank, (tokens, _) in enumerate(results[:3]):
        ids = prompts(rank, length=4 + rank)
        assert torch.equal(tokens, generated(whole, ids, 12, eos_token_id=ends.get(rank)))
    assert results[0][0].shape[1] < results[2][0].shape[1]
    assert results[3][0] is None
    # As many passes as the longest needs: nobody guessed.
    assert [passes for _, passes in results] == [12] * WORLD


def test_ranks_make_different_numbers_of_passes(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)
        batches = [prompts(group.rank, seed=number, batch=1 + number % 2) for number in range(group.rank)]
        with sharded.passes() as model:
            found = [logits_of(model, batch) for batch in batches]
        assert sharded.passes_made == WORLD - 1
        sharded.serve()  # everybody does, and leaves at once
        assert sharded.passes_made == WORLD - 1
        return batches, found

    for batches, found in on_ranks(WORLD, rank_main):
        for ids, logits in zip(batches, found, strict=True):
            torch.testing.assert_close(logits, logits_of(whole, ids), **SAME)


def test_an_empty_batch_takes_part(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)
        ids = prompts(group.rank)[: group.rank % 2]
        with torch.no_grad():
            answers = [sharded(ids), sharded(prompts(0)) if group.rank == 0 else sharded()]
        empty = sharded.generate(prompts(0)[:0], max_new_tokens=2)
        with sharded.passes():
            assert sharded(prompts(0)[:0]) is None
        return [None if answer is None else answer.logits for answer in answers], empty

    for rank, ((first, second), empty) in enumerate(on_ranks(WORLD, rank_main)):
        assert (first is not None) == (rank % 2 == 1)
        if first is not None:
            torch.testing.assert_close(first, logits_of(whole, prompts(rank)), **SAME)
        if rank == 0:
            torch.testing.assert_close(second, logits_of(whole, prompts(0)), **SAME)
        assert empty.shape == (0, 5)


def test_nobody_has_anything(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)
        return sharded.generate(), sharded.passes_made

    assert on_ranks(WORLD, rank_main) == [(None, 0)] * WORLD


def test_long_prompts_go_in_parts(whole):
    """A workspace for 8 tokens a rank carries prompts of any length, where ranks agree on the parts first."""

    def rank_main(group):
        sharded = sharded_on(group, whole, max_tokens=8)
        ids = prompts(group.rank, batch=2, length=3 + 9 * group.rank)  # 6, 24, 42 and 60 tokens
        tokens = sharded.generate(ids, max_new_tokens=3, do_sample=False)
        rounds = sharded.report()[0].rounds
        error = raised(lambda: sharded(ids))
        return ids, tokens, rounds, error

    results = on_ranks(WORLD, rank_main)
    for ids, tokens, rounds, error in results:
        assert torch.equal(tokens, generated(whole, ids, 3))
        assert rounds == 8 + 2  # ⌈60 / 8⌉ for the prompts, and one for each token after the first
        if ids.numel() > 8:
            assert isinstance(error, InputError)
            assert "max_tokens=8" in str(error)
        else:
            assert isinstance(error, PeerFailed)


class Broken(RuntimeError):
    """What goes wrong in the model itself."""


def break_at(model, layer, passes):
    """Let attention of a layer fail in a pass."""
    count = {"passes": 0}

    def fail(*_):
        count["passes"] += 1
        if count["passes"] == passes:
            raise Broken("attention is out of order")

    model.model.layers[layer].self_attn.register_forward_pre_hook(fail)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("layer", "passes"), [(0, 1), (0, 3), (2, 1), (2, 4)])
def test_a_rank_that_fails_between_layers_ends_all(whole, exchange, layer, passes):
    """Before the first MoE layer of a pass, or between two; in the first pass, or later. The group stays usable."""

    def rank_main(group):
        sharded = sharded_on(group, whole, exchange=exchange)
        if group.rank == 2:
            break_at(sharded.model, layer, passes)
        ids = prompts(group.rank)
        try:
            sharded.generate(ids, max_new_tokens=6, do_sample=False)
            error = None
        except Exception as found:
            error = found
        return error, sharded.generate(ids, max_new_tokens=4, do_sample=False), ids

    for rank, (error, tokens, ids) in enumerate(on_ranks(WORLD, rank_main)):
        assert isinstance(error, Broken if rank == 2 else PeerFailed)
        assert "attention is out of order" in str(error)
        assert torch.equal(tokens, generated(whole, ids, 4))


def test_an_error_that_is_swallowed_in_the_middle_of_a_pass_ends_all(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)
        if group.rank == 0:
            break_at(sharded.model, 2, 1)

        def swallow():
            with sharded.passes() as model, contextlib.suppress(Broken):
                logits_of(model, prompts(group.rank))

        return raised(swallow), sharded.generate(prompts(group.rank), max_new_tokens=2, do_sample=False)

    for rank, (error, tokens) in enumerate(on_ranks(WORLD, rank_main)):
        assert isinstance(error, PeerFailed if rank else ContractError)
        assert "a pass ended before layer 'model.layers.2.mlp'" in str(error)
        assert torch.equal(tokens, generated(whole, prompts(rank), 2))


def test_an_error_inside_of_a_layer_may_be_swallowed_by_all(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)
        with sharded.passes() as model:
            with contextlib.suppress(IndexError, PeerFailed):
                if group.rank == 0:
                    sharded.experts[0].layer.experts.register_forward_pre_hook(fail_once())
                logits_of(model, prompts(group.rank))
            found = logits_of(model, prompts(group.rank))
        return found

    for rank, found in enumerate(on_ranks(WORLD, rank_main)):
        torch.testing.assert_close(found, logits_of(whole, prompts(rank)), **SAME)


def fail_once():
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 1:
            raise IndexError("experts are out of order")

    return fail


def test_a_rank_that_fails_inside_of_a_layer_ends_all(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)
        if group.rank == 1:
            block = sharded.model.model.layers[2].mlp
            gate = block.gate.forward

            def out_of_range(x):
                logits, weights, ids = gate(x)
                return logits, weights, ids + 10

            block.gate.forward = out_of_range
        error = raised(sharded.generate, prompts(group.rank), max_new_tokens=3, do_sample=False)
        if group.rank == 1:
            block.gate.forward = gate
        return error, sharded.generate(prompts(group.rank), max_new_tokens=3, do_sample=False)

    for rank, (error, tokens) in enumerate(on_ranks(WORLD, rank_main)):
        assert isinstance(error, InputError if rank == 1 else PeerFailed)
        assert "topk_ids_TK holds id" in str(error)
        assert torch.equal(tokens, generated(whole, prompts(rank), 3))


def test_calls_that_do_not_fit_are_refused(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole)

        def nested():
            with sharded.passes(), sharded.passes():
                pass

        def a_layer_alone():
            with sharded.passes() as model, torch.no_grad():
                model.model.layers[2].mlp(torch.zeros(1, 2, 64))

        return [raised(nested), raised(a_layer_alone)], logits_of(sharded.model, prompts(group.rank))

    for rank, (errors, logits) in enumerate(on_ranks(WORLD, rank_main)):
        assert isinstance(errors[0], HandleError)
        assert isinstance(errors[1], ContractError)
        assert "'model.layers.0.mlp' is next" in str(errors[1])
        torch.testing.assert_close(logits, logits_of(whole, prompts(rank)), **SAME)


def test_reports_add_up(whole):
    def rank_main(group):
        sharded = sharded_on(group, whole, wire="mxfp8")
        sharded.generate(prompts(group.rank, length=3 + group.rank), max_new_tokens=4, do_sample=False)
        return [report.as_dict() for report in sharded.report()], sharded.layers

    (reports, layers), *others = on_ranks(WORLD, rank_main)
    assert all(other == (reports, layers) for other in others)
    assert [report["layer"] for report in reports] == layers == ["model.layers.0.mlp", "model.layers.2.mlp"]
    for report in reports:
        assert report["rounds"] == 4
        assert report["tokens"] == [6 + rank for rank in range(WORLD)]
        assert sum(report["rows_sent"]) == sum(report["rows_received"])
        for tokens, rows, nbytes in zip(
            report["tokens"], report["rows_sent"], report["dispatch_bytes"], strict=True
        ):
            assert (
                tokens <= rows <= 3 * tokens
            )  # a row goes once to each rank that owns one of its three experts
            assert nbytes >= rows * (64 + 2)
        assert report["rows_received"][report["busiest_rank"]] == max(report["rows_received"])
        assert report["imbalance"] >= 1
        for phase in ("dispatch_s", "experts_s", "combine_s"):
            assert all(seconds > 0 for seconds in report[phase])
