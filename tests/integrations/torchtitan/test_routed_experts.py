"""torchtitan's debug model, unchanged, with its own dispatcher and with our override, on CPU ranks."""

import pytest
import torch

from tests.integrations.torchtitan.ranks import OURS, Batch, differentiate, model_config, train_step
from tokenyard import launch
from tokenyard.errors import InputError

CHOICES = f'{OURS}={{"sum": "choices"}}'


def on_ranks(world, fn, *arguments):
    return launch(world, fn, *arguments, ranks="processes", threads_per_rank=1, deadline=120)


def differentiated(world, imports, seed):
    """Result and gradients: rows of all ranks, in their order; and the gradients of all experts."""
    by_rank = on_ranks(world, differentiate, imports, seed)
    found = {name: torch.cat([rank[name] for rank in by_rank]) for name in ("y", "x", "scores")}
    return found | {name: by_rank[0][name] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}


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


def test_results_and_gradients_are_those_of_the_oracle_and_no_worse_than_torchtitans_own():
    true, ours, theirs = oracle(Batch.drawn(3)), differentiated(2, [OURS], 3), differentiated(2, [], 3)
    for name, value in true.items():
        assert error(ours[name], value) < 2**-7, name  # a bf16 number is off by up to 2**-9
        assert error(ours[name], value) < 1.25 * error(theirs[name], value), name


def test_a_layer_has_the_same_bits_on_one_rank_and_on_two_and_four():
    alone = differentiated(1, [CHOICES], 4)
    for world in (2, 4):
        found = differentiated(world, [CHOICES], 4)
        assert all(torch.equal(found[name], value) for name, value in alone.items())


@pytest.mark.parametrize(("world", "expert_parallel"), [(2, 2), (4, 2)])
def test_the_debug_model_has_the_loss_and_the_gradients_of_torchtitans_own_dispatcher(world, expert_parallel):
    (ours, gradients), *_ = on_ranks(world, train_step, [OURS], expert_parallel)
    (theirs, of_theirs), *_ = on_ranks(world, train_step, [], expert_parallel)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert gradients.keys() == of_theirs.keys()
    for name, value in of_theirs.items():
        assert error(gradients[name], value.double()) < 2**-5, name


def test_only_the_sums_of_fsdp_depend_on_how_ranks_are_divided():
    (loss, gradients), *_ = on_ranks(4, train_step, [CHOICES], 2)
    (other_loss, others), *_ = on_ranks(4, train_step, [CHOICES], 4)
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
