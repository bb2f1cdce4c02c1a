"""torchtitan's debug model, unchanged, with its own dispatcher and with our override, on CPU ranks."""

import pytest
import torch

from tests.integrations.torchtitan.ranks import OURS, Batch, differentiate, model_config, run, train_step
from tokenyard import launch
from tokenyard.errors import InputError

CHOICES = f'{OURS}={{"sum": "choices"}}'


SEED = 3


@pytest.fixture(scope="module")
def alone():
    """The module on one rank, with choices summed at home."""
    ((found,),) = launch(1, run, [(differentiate, [CHOICES], SEED)])
    return found


@pytest.fixture(scope="module")
def on_two():
    """By name, the results of both ranks."""
    return on_ranks(
        2,
        ours=(differentiate, [OURS], SEED),
        theirs=(differentiate, [], SEED),
        choices=(differentiate, [CHOICES], SEED),
        our_step=(train_step, [OURS], 2),
        their_step=(train_step, [], 2),
    )


@pytest.fixture(scope="module")
def on_four():
    """By name, the results of four ranks."""
    return on_ranks(
        4,
        choices=(differentiate, [CHOICES], SEED),
        our_step=(train_step, [OURS], 2),
        their_step=(train_step, [], 2),
        step_of_two=(train_step, [CHOICES], 2),
        step_of_four=(train_step, [CHOICES], 4),
    )


def on_ranks(world, **jobs):
    """Start ranks once for all jobs: each imports torchtitan first, for seconds."""
    by_rank = launch(world, run, [*jobs.values()], ranks="processes", threads_per_rank=1, deadline=120)
    return dict(zip(jobs, zip(*by_rank, strict=True), strict=True))


def joined(by_rank):
    """Result and gradients: rows of all ranks, in their order; and the gradients of all experts."""
    rows = {name: torch.cat([rank[name] for rank in by_rank]) for name in ("y", "x", "scores")}
    return by_rank[0] | rows


def oracle(batch):
    """The same in float64, written out."""
    leaves = {"x": batch.x_BLD, "scores": batch.scores_BLK, **batch.weights}
    leaves = {name: value.double().requires_grad_() for name, value in leaves.items()}
    x, scores, w1, w2, w3 = leaves.values()
    each = torch.einsum("bld,efd->blef", x, w1)
    hidden = torch.nn.functional.silu(each) * torch.einsum("bld,efd->blef", x, w3)
    results = torch.einsum("blef,edf->bled", hidden, w2)
    chosen = results.gather(2, batch.ids_BLK.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
    y = (chosen * scores.unsqueeze(-1)).sum(2)
    y.backward(batch.dy_BLD.double())
    return {"y": y.detach()} | {name: value.grad for name, value in leaves.items()}


def error(found, true):
    return float((found.double() - true).norm() / true.norm())


def test_results_and_gradients_are_those_of_the_oracle_and_no_worse_than_torchtitans_own(on_two):
    true, ours, theirs = oracle(Batch.drawn(SEED)), joined(on_two["ours"]), joined(on_two["theirs"])
    for name, value in true.items():
        assert error(ours[name], value) < 2**-7, name  # a bf16 number is off by up to 2**-9
        assert error(ours[name], value) < 1.25 * error(theirs[name], value), name


def test_a_layer_has_the_same_bits_on_one_rank_and_on_two(alone, on_two):
    assert_equal(alone, joined(on_two["choices"]))


@pytest.mark.long
def test_a_layer_has_the_same_bits_on_four_ranks(alone, on_four):
    assert_equal(alone, joined(on_four["choices"]))


def assert_equal(one, other):
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def test_the_debug_model_has_the_loss_and_the_gradients_of_torchtitans_own_dispatcher(on_two):
    assert_close(on_two["our_step"][0], on_two["their_step"][0])


@pytest.mark.long
def test_the_debug_model_does_so_with_fsdp_over_two_groups_of_experts(on_four):
    assert_close(on_four["our_step"][0], on_four["their_step"][0])


def assert_close(ours, theirs):
    (loss, gradients), (their_loss, of_theirs) = ours, theirs
    assert loss == pytest.approx(their_loss, rel=1e-3)
    assert gradients.keys() == of_theirs.keys()
    for name, value in of_theirs.items():
        assert error(gradients[name], value.double()) < 2**-5, name


@pytest.mark.long
def test_only_the_sums_of_fsdp_depend_on_how_ranks_are_divided(on_four):
    (loss, gradients), (other_loss, others) = on_four["step_of_two"][0], on_four["step_of_four"][0]
    assert loss == other_loss
    differ = [name for name, value in gradients.items() if not torch.equal(value, others[name])]
    assert all("inner_experts" in name for name in differ)


def test_parameters_are_torchtitans_own():
    found = model_config([OURS]).layers[1].moe.routed_experts.build()
    assert [name for name, _ in found.named_parameters()] == [
        "inner_experts.w1_EFD",
        "inner_experts.w2_EDF",
        "inner_experts.w3_EFD",
    ]


def test_experts_of_another_kind_are_refused():
    class Other:
        inner_experts = model_config([]).layers[1].moe

    from tokenyard.integrations.torchtitan import routed_experts

    with pytest.raises(
        InputError, match=r"the experts are MoE\.Config; expected torchtitan's GroupedExperts"
    ):
        routed_experts(Other)


def test_experts_that_are_cut_by_tensor_parallelism_are_refused():
    class Cut:
        tp, tp_enabled, ep_enabled, spmd_backend = 2, True, False, "partial_dtensor"

    config = model_config([OURS], expert_parallel=False).layers[1].moe.routed_experts
    config.sharding_config = config.inner_experts.sharding_config = None
    with pytest.raises(InputError, match="tensor parallelism over 2 ranks cuts each expert in parts"):
        config.build().parallelize(Cut)
