"""Losses that balance experts: the formulas, the shares of ranks, padding; and biases that move without a loss."""

import math

import pytest
import torch

from tests.models import on_ranks
from tokenyard import Routes
from tokenyard.errors import InputError, UnknownName
from tokenyard.routing import GroupedSigmoidRouter, SoftmaxRouter, imbalance
from tokenyard.training import balance_loss, batch_load, update_bias, z_loss

E, K = 8, 2


def draw(tokens, seed=0, padding=(), dtype=torch.float32):
    """Logits that favor some experts, and their routes; tokens in `padding` are routed to nobody."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = (2 * torch.randn(tokens, E, generator=generator) + torch.linspace(0, 2, E)).to(dtype)
    is_token_T = torch.ones(tokens, dtype=torch.bool)
    is_token_T[list(padding)] = False
    return logits_TE, SoftmaxRouter(K, renormalize=True)(logits_TE, valid_T=is_token_T)


def written_out(logits_TE, routes, scores="softmax"):
    """Both losses in float64, token by token."""
    choices, probability, squares, tokens = [0] * E, [0.0] * E, 0.0, 0
    for logits, ids in zip(logits_TE.double().tolist(), routes.topk_ids_TK.tolist(), strict=True):
        if max(ids) < 0:
            continue
        tokens += 1
        for expert in ids:
            choices[expert] += expert >= 0
        score = {
            "softmax": math.exp,
            "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
            "sqrt_softplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
        }[scores]
        found = [score(x) for x in logits]
        for expert in range(E):
            probability[expert] += found[expert] / sum(found)
        squares += math.log(sum(map(math.exp, logits))) ** 2
    balance = E * sum(c / tokens * p / tokens for c, p in zip(choices, probability, strict=True))
    return balance, squares / tokens


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("padding", [(), (0, 5, 6)])
def test_the_losses_are_their_formulas(scores, padding):
    logits_TE, routes = draw(24, padding=padding)
    load = batch_load(routes, E)
    balance, z = written_out(logits_TE, routes, scores)
    assert float(balance_loss(logits_TE, routes, load, scores=scores)) == pytest.approx(balance, rel=1e-6)
    assert float(z_loss(logits_TE, routes, load)) == pytest.approx(z, rel=1e-6)


@pytest.mark.parametrize("padding", [(), (3, 20, 21, 22, 23)])
def test_the_balance_loss_and_its_gradient_are_those_of_transformers(padding):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits_TE, routes = draw(24, padding=padding)
    mask = torch.ones(1, 24, dtype=torch.int64)
    mask[0, list(padding)] = 0
    ours, theirs = logits_TE.clone().requires_grad_(), logits_TE.clone().requires_grad_()
    loss = balance_loss(ours, routes, batch_load(routes, E))
    expected = load_balancing_loss_func((theirs,), E, K, mask if padding else None)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_gradients_are_the_derivatives():
    logits_TE, routes = draw(6)
    load = batch_load(routes, E)
    for loss in (balance_loss, z_loss):
        given = logits_TE.clone().requires_grad_()
        loss(given, routes, load).backward()
        exact = logits_TE.double().requires_grad_()
        number = {"balance_loss": 0, "z_loss": 1}[loss.__name__]
        for token, expert in ((0, 0), (3, 5), (5, 7)):
            step = torch.zeros_like(exact)
            step[token, expert] = 1e-5
            with torch.no_grad():
                high, low = (written_out(exact + sign * step, routes)[number] for sign in (1, -1))
            assert float(given.grad[token, expert]) == pytest.approx((high - low) / 2e-5, rel=1e-3, abs=1e-6)


def shares(group, logits_TE, ids_TK, weights_TK, cut):
    mine = cut(group)
    routes = Routes(topk_ids_TK=ids_TK[mine], topk_weights_TK=weights_TK[mine])
    logits = logits_TE[mine].clone().requires_grad_()
    load = batch_load(routes, E, group)
    losses = balance_loss(logits, routes, load), z_loss(logits, routes, load)
    sum(losses).backward()
    return [loss.item() for loss in losses], logits.grad, load.choices_E.tolist(), int(load.tokens)


def uneven_blocks(group):
    """Rank 0 has no tokens where there are several; the others have different numbers."""
    if group.size == 1:
        return slice(None)
    ends = [0, 0, 3, 10, 24] if group.size == 4 else [0, 0, 24]
    return slice(ends[group.rank], ends[group.rank + 1])


def dealt_out(group):
    return slice(group.rank, None, group.size)


@pytest.mark.parametrize("cut", [uneven_blocks, dealt_out])
def test_shares_add_up_to_the_loss_of_the_batch_and_gradients_have_the_same_bits(cut):
    logits_TE, routes = draw(24, padding=(1, 2, 23))
    given = (logits_TE, routes.topk_ids_TK, routes.topk_weights_TK, cut)
    ((alone, gradient, choices, tokens),) = on_ranks(1, shares, *given)
    assert alone == pytest.approx(written_out(logits_TE, routes), rel=1e-6)
    for world in (2, 4):
        found = on_ranks(world, shares, *given)
        for number, whole in enumerate(alone):
            assert sum(losses[number] for losses, *_ in found) == pytest.approx(whole, rel=1e-6)
        assert all((c, t) == (choices, tokens) for *_, c, t in found)
        parts = [part for _, part, *_ in found]
        if cut is dealt_out:
            joined = torch.empty_like(gradient)
            for rank, part in enumerate(parts):
                joined[rank::world] = part
        else:
            joined = torch.cat(parts)
        assert torch.equal(joined, gradient)


def test_padding_counts_nowhere_even_if_its_logits_are_nan():
    logits_TE, routes = draw(10)
    padded_TE = torch.cat([logits_TE, torch.full((3, E), math.nan)]).requires_grad_()
    padded = Routes(
        topk_ids_TK=torch.cat([routes.topk_ids_TK, torch.full((3, K), -1, dtype=torch.int32)]),
        topk_weights_TK=torch.cat([routes.topk_weights_TK, torch.full((3, K), math.nan)]),
    )
    load, with_padding = batch_load(routes, E), batch_load(padded, E)
    assert load.choices_E.tolist() == with_padding.choices_E.tolist()
    assert int(load.tokens) == int(with_padding.tokens) == 10
    for loss in (balance_loss, z_loss):
        padded_TE.grad, plain_TE = None, logits_TE.clone().requires_grad_()
        loss(padded_TE, padded, with_padding).backward()
        loss(plain_TE, routes, load).backward()
        assert torch.equal(padded_TE.grad[:10], plain_TE.grad)
        assert not padded_TE.grad[10:].any()


def test_a_token_that_lost_one_of_its_choices_is_still_a_token():
    routes = Routes(topk_ids_TK=torch.tensor([[0, -1], [1, 2]]), topk_weights_TK=torch.ones(2, 2))
    load = batch_load(routes, E)
    assert (int(load.tokens), load.choices_E.tolist()) == (2, [1, 1, 1, 0, 0, 0, 0, 0])


def test_a_batch_of_padding_or_of_nothing_has_no_loss():
    for tokens in (0, 3):
        routes = Routes(topk_ids_TK=torch.full((tokens, K), -1), topk_weights_TK=torch.zeros(tokens, K))
        logits_TE = torch.randn(tokens, E).requires_grad_()
        loss = balance_loss(logits_TE, routes, batch_load(routes, E)) + z_loss(
            logits_TE, routes, batch_load(routes, E)
        )
        loss.backward()
        assert loss.item() == 0
        assert not logits_TE.grad.any()


def test_micro_batches_have_the_loss_of_the_batch_that_they_are_of():
    logits_TE, routes = draw(24)
    halves = [routes.of_tokens(slice(0, 9)), routes.of_tokens(slice(9, 24))]
    load = batch_load(halves[0], E) + batch_load(halves[1], E)
    whole = balance_loss(logits_TE, routes, batch_load(routes, E))
    parts = [
        balance_loss(part_TE, half, load)
        for part_TE, half in zip(logits_TE.split([9, 15]), halves, strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_what_does_not_fit_is_refused():
    logits_TE, routes = draw(6)
    load = batch_load(routes, E)
    with pytest.raises(UnknownName, match="did you mean 'softmax'"):
        balance_loss(logits_TE, routes, load, scores="softmx")
    with pytest.raises(
        InputError, match=r"logits_TE is .*; expected a matrix \[T, E\] of the router's logits"
    ):
        balance_loss(logits_TE.unsqueeze(0), routes, load)
    other_TE, others = draw(9)
    with pytest.raises(InputError, match=r"the load is of 6 tokens, and this rank has 9"):
        z_loss(other_TE, others, load)
    with pytest.raises(InputError, match=r"the load is .*; expected the load of the batch .* over 8 experts"):
        balance_loss(logits_TE, routes, batch_load(routes, E + 1))
    with pytest.raises(InputError, match=r"the load is None"):
        balance_loss(logits_TE, routes, None)
    with pytest.raises(InputError, match=r"the routes hold 6 tokens; expected 5"):
        balance_loss(logits_TE[:5], routes, load)
    with pytest.raises(InputError, match=r"make DistributedGroup\(process_group\) once"):
        batch_load(routes, E, object())
    with pytest.raises(InputError, match="topk_ids_TK holds id 7"):
        batch_load(Routes(topk_ids_TK=torch.full((1, 1), 7), topk_weights_TK=torch.ones(1, 1)), 7)


def test_routes_with_a_scaling_factor_have_the_same_load():
    router = GroupedSigmoidRouter(K, routed_scaling=2.5)
    routes = router(draw(6)[0])
    load = batch_load(routes, E)
    assert int(load.choices_E.sum()) == 12
    assert float(balance_loss(draw(6)[0], routes, load, scores="sigmoid")) > 0


# -- Biases ------------------------------------------------------------------------------------------------------


def test_a_bias_moves_by_the_rate_towards_the_mean():
    bias_E = torch.tensor([0.5, 0.0, -0.25, 0.0])
    update_bias(bias_E, torch.tensor([9, 5, 1, 5]), 0.125)
    assert bias_E.tolist() == [0.375, 0.0, -0.125, 0.0]


def test_the_sign_is_exact_where_a_mean_in_float32_is_not():
    choices_E = torch.tensor([2**40 + 1, 2**40, 2**40, 2**40 - 1])
    bias_E = torch.zeros(4)
    update_bias(bias_E, choices_E, 1.0)
    assert bias_E.tolist() == [-1, 0, 0, 1]


def test_biases_balance_a_router_and_leave_its_weights():
    bias_E = torch.zeros(E)
    router = GroupedSigmoidRouter(K, choice_bias_E=bias_E)
    logits_TE, _ = draw(512)
    first = imbalance(batch_load(router(logits_TE), E).choices_E.tolist())
    for _ in range(300):
        update_bias(router.choice_bias_E, batch_load(router(logits_TE), E).choices_E, 0.005)
    last = imbalance(batch_load(router(logits_TE), E).choices_E.tolist())
    assert first > 1.5
    assert last < 1.2
    scores_TE = torch.sigmoid(logits_TE.double()).float()
    routes = router(logits_TE)
    chosen_TK = scores_TE.gather(1, routes.topk_ids_TK.long())
    torch.testing.assert_close(routes.topk_weights_TK, chosen_TK / chosen_TK.sum(1, keepdim=True))


def updated(group):
    _, routes = draw(3 + 5 * group.rank, seed=group.rank)
    bias_E = torch.zeros(E)
    for _ in range(3):
        update_bias(bias_E, batch_load(routes, E, group).choices_E, 1e-3)
    return bias_E


def test_biases_have_the_same_bits_on_all_ranks():
    first, *others = on_ranks(4, updated)
    assert first.any()
    assert all(torch.equal(first, other) for other in others)


def test_what_is_no_bias_or_no_count_is_refused():
    with pytest.raises(InputError, match=r"bias_E is None; expected float32\[E\]"):
        update_bias(None, [1, 2], 1e-3)
    with pytest.raises(InputError, match="bias_E is a tensor bfloat16"):
        update_bias(torch.zeros(2, dtype=torch.bfloat16), [1, 2], 1e-3)
    with pytest.raises(InputError, match="2 whole numbers"):
        update_bias(torch.zeros(2), [0.5, 0.5], 1e-3)
    with pytest.raises(InputError, match="2 whole numbers"):
        update_bias(torch.zeros(2), [1, 2, 3], 1e-3)
