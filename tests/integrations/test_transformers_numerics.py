"""How far sharded bf16 models, and quantized wires and weights, may be from the unsharded bf16 model.

**Layers.** One MoE layer computes y = Σ_k w_k · W2_k · h(W13_k · x) on given bf16 inputs, as Transformers does and
sharded. Both round to bf16 in places of their own, each time by at most u = 2⁻⁸ of the number. Per expert:

    pre-activation   once for the product, once for the bias     δpre ≤ 2u·|pre|
    activation       act(gate), (up + 1), their product, …       δh   ≤ |∂h/∂gate|·δgate + |∂h/∂up|·δup + 5u·|h|
    second product   its result, the bias, times the weight      δy_k ≤ |W2|·δh + 3u·|y_k|

and a sum over K terms in bf16, in whatever order, adds at most K·u·Σ|w_k·y_k|. So each of the two is within B of the
exact result, element by element, and they are within 2B of each other. Float32 sums inside of products add a part in
2²⁴ per term, and products of two roundings more: B is raised by 2% for both.

**One differently ordered sum.** With our own experts on both sides, and the same rows for each expert, so that products
are the same to the bit, sharding leaves this: each rank's partial sum p_r is rounded once, by at most u·Σ_r |p_r| ≤ u·S
in all, with S = Σ_k |w_k·y_k|, and the total is rounded once on either side, by at most u·S each: 3·u·S.

**Wires.** A quantized wire costs what its encoding costs and nothing else: to the bit, the layer gives what it gives on
a plain wire for rows that were encoded and decoded before.
"""

import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.transformers_models import FAMILIES, logits_of, prompts, tiny_model
from tests.models import on_ranks, raised
from tokenyard import formats
from tokenyard.checkpoints import TARGETS, convert, open_checkpoint
from tokenyard.errors import CheckpointError
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.integrations.transformers import load_sharded, shard_experts
from tokenyard.integrations.transformers.expert_modules import expert_modules, weights_of

WORLD = 4
# Blocks of 128, which some layouts hold whole, fit.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
U = 2.0**-8  # the largest relative error of rounding to bf16


def recorded(model, ids):
    """What goes into each experts module of a model in a pass, and what comes out."""
    calls = []

    def keep(_, arguments, output):
        calls.append((*(argument.clone() for argument in arguments), output.clone()))

    hooks = [module.module.register_forward_hook(keep) for module in expert_modules(model)]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return calls


def exact(module, x_TH, ids_TK, weights_TK):
    """One layer in float64: its result y, the sum of the absolute terms S, and the bound B of roundings."""
    weights, formula = weights_of(module.module).decode(torch.float64), module.activation
    y = torch.zeros(x_TH.shape, dtype=torch.float64)
    terms, bound = torch.zeros_like(y), torch.zeros_like(y)
    constants = dict(formula.parameters)
    for token, choice in torch.cartesian_prod(*map(torch.arange, ids_TK.shape)).tolist():
        expert, w = ids_TK[token, choice], weights_TK[token, choice].double()
        pre = weights.w13[expert] @ x_TH[token].double()
        if weights.b13 is not None:
            pre = pre + weights.b13[expert].double()
        gate, up = (half.clone() for half in formula.split(pre))
        if constants:
            gate_in, up_in = (
                gate.clamp(max=constants["limit"]),
                up.clamp(-constants["limit"], constants["limit"]),
            )
            act, factor = gate_in * torch.sigmoid(constants["alpha"] * gate_in), up_in + 1
        else:
            act, factor = torch.nn.functional.silu(gate), up
        h = act * factor
        # Neither g·σ(g) nor g·σ(1.702·g) is steeper than 1.1.
        off_h = 2 * U * (1.1 * gate.abs() * factor.abs() + act.abs() * up.abs()) + 5 * U * h.abs()
        y_k = weights.w2[expert] @ h
        off_y = weights.w2[expert].abs() @ off_h
        if weights.b2 is not None:
            y_k = y_k + weights.b2[expert].double()
        y[token] += w * y_k
        terms[token] += (w * y_k).abs()
        bound[token] += w.abs() * (off_y + (3 + ids_TK.shape[1]) * U * y_k.abs())
    return SimpleNamespace(y=y, terms=terms, bound=1.02 * bound)


def forced(sharded, calls):
    """Each experts module of a sharded model on recorded inputs."""
    with torch.no_grad():
        return [experts(*call[:3]) for experts, call in zip(sharded.experts, calls, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_in_bf16_are_within_the_roundings(family):
    whole = tiny_model(family, torch.bfloat16)
    calls = [recorded(whole, prompts(rank)) for rank in range(WORLD)]
    modules = expert_modules(whole)

    def rank_main(group):
        return forced(shard_experts(copy.deepcopy(whole), group, max_tokens=32), calls[group.rank])

    for rank, results in enumerate(on_ranks(WORLD, rank_main)):
        for module, (x, ids, weights, theirs), ours in zip(modules, calls[rank], results, strict=True):
            truth = exact(module, x, ids, weights)
            assert ((ours.double() - truth.y).abs() <= truth.bound).all()
            assert ((theirs.double() - truth.y).abs() <= truth.bound).all()
            # The bound is one: what was reduced twice is outside of it.
            assert ((2 * ours.double() - truth.y).abs() > truth.bound).float().mean() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_one_differently_ordered_sum(family):
    """Against our experts on one rank: partial sums that are rounded once, and nothing else."""
    whole = tiny_model(family, torch.bfloat16)
    whole.set_experts_implementation("tokenyard")
    ids = torch.cat([prompts(rank, length=3) for rank in range(WORLD)])
    calls = recorded(whole, ids)

    def rank_main(group):
        mine = slice(3 * group.rank, 3 * group.rank + 3)
        share = [tuple(tensor[mine] for tensor in call) for call in calls]
        return forced(shard_experts(copy.deepcopy(whole), group, max_tokens=32), share)

    by_rank = on_ranks(WORLD, rank_main)
    for layer, (module, (x, chosen, weights, one_rank)) in enumerate(
        zip(expert_modules(whole), calls, strict=True)
    ):
        found = torch.cat([results[layer] for results in by_rank])
        terms = exact(module, x, chosen, weights).terms
        # Terms are those of exact arithmetic, to within the roundings of an expert: a hundredth.
        assert ((found.double() - one_rank.double()).abs() <= 3 * U * 1.03 * terms).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bf16_are_as_near_to_the_truth_as_the_models_own(family):
    whole = tiny_model(family, torch.bfloat16)
    truth = copy.deepcopy(whole).float()

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=64)
        return logits_of(sharded.model, prompts(group.rank, batch=4, length=8))

    ours = torch.stack(on_ranks(WORLD, rank_main))
    batches = [prompts(rank, batch=4, length=8) for rank in range(WORLD)]
    theirs = torch.stack([logits_of(whole, ids) for ids in batches])
    expected = torch.stack([logits_of(truth, ids) for ids in batches])
    # The median over tokens: one whose choice of experts flips is as far off in either.
    error_ours, error_theirs = ((found - expected).norm(dim=-1).median() for found in (ours, theirs))
    assert error_ours <= 1.25 * error_theirs
    assert error_ours < 0.05 * expected.norm(dim=-1).median()


WIRES = ["mxfp8", "fp8_block128", "nvfp4", "mxfp8(alignment=256)"]


@pytest.mark.parametrize("wire", WIRES)
def test_a_wire_costs_its_encoding_and_nothing_else(wire):
    whole = tiny_model("qwen3_moe", torch.bfloat16)
    format = formats.get(wire)
    calls = [recorded(whole, prompts(rank, batch=2)) for rank in range(WORLD)]

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32, wire=wire)
        found = forced(sharded, calls[group.rank])
        sharded.close()
        plain = shard_experts(copy.deepcopy(whole), group, max_tokens=32)
        encoded = [(format.encode(x).decode(torch.bfloat16), *others) for x, *others in calls[group.rank]]
        return found, forced(plain, encoded)

    for rank, (found, expected) in enumerate(on_ranks(WORLD, rank_main)):
        for ours, theirs, call in zip(found, expected, calls[rank], strict=True):
            assert torch.equal(ours, theirs)
            assert not torch.equal(ours, call[-1])


# Relative L2 errors of a SwiGLU layer on Gaussian rows: 3.8% with mxfp8 rows, 13.6% with nvfp4 rows; blocks of 128 with
# float32 scales are as good as mxfp8. Three layers and residuals around them stay within twice that.
@pytest.mark.parametrize(("wire", "most"), [("mxfp8", 0.076), ("fp8_block128", 0.076), ("nvfp4", 0.272)])
@pytest.mark.parametrize("back", [False, True], ids=["out", "out and back"])
def test_logits_through_quantized_wires(wire, most, back):
    whole = tiny_model("deepseek_v3")

    def rank_main(group):
        options = {"wire": wire, "combine_wire": "mxfp8" if back else None}
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=64, **options)
        return logits_of(sharded.model, prompts(group.rank, batch=4, length=8))

    found = torch.stack(on_ranks(WORLD, rank_main))
    expected = torch.stack([logits_of(whole, prompts(rank, batch=4, length=8)) for rank in range(WORLD)])
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-3 < errors.median() < most


@pytest.mark.parametrize("weights", ["mxfp8", "mxfp4", "nvfp4", "mxint4"])
def test_quantized_weights_are_those_of_the_whole_layer(weights):
    """A rank quantizes its own experts: the model is the one whose experts were all quantized, then decoded."""
    whole = tiny_model("qwen3_moe")
    decoded = copy.deepcopy(whole)
    for module in expert_modules(decoded):
        kept = weights_of(module.module).quantize(weights).decode()
        module.module.gate_up_proj.copy_(kept.w13)
        module.module.down_proj.copy_(kept.w2)

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32, weights=weights)
        held = sharded.experts[0].layer.experts.weights.nbytes
        return logits_of(sharded.model, prompts(group.rank)), held

    for rank, (logits, held) in enumerate(on_ranks(WORLD, rank_main)):
        torch.testing.assert_close(logits, logits_of(decoded, prompts(rank)), rtol=1e-4, atol=1e-4)
        assert held < 0.3 * 3 * (2 * 32 * 64 + 64 * 32) * 4


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        *product(["qwen3_moe", "mixtral"], sorted(TARGETS)),
        ("gpt_oss", "mxfp4"),
    ],  # which has a layout of its own
)
def test_a_converted_checkpoint_is_the_same_as_quantizing_while_sharding(family, weights, tmp_path):
    """Codes go from the file into the experts as they are: to the bit, the model that `weights=` makes.

    What stands between the products is what the recipe says: fp8 activations, where weights are fp8 in blocks.
    """
    inner = "fp8_block128" if weights == "fp8_block128" else "exact"
    whole = tiny_model(family, torch.bfloat16, **WIDE)
    whole.save_pretrained(tmp_path / "plain")
    convert(open_checkpoint(tmp_path / "plain"), weights, tmp_path / "quantized")

    def rank_main(group):
        ids = prompts(group.rank)
        quantized = shard_experts(copy.deepcopy(whole), group, max_tokens=32, weights=weights, inner=inner)
        expected = logits_of(quantized.model, ids)
        sharded = load_sharded(tmp_path / "quantized", group, max_tokens=32)
        specs = [sharded.plan.wiring(layer).spec for layer in sharded.layers]
        return logits_of(sharded.model, ids), expected, {(spec.weights, spec.inner) for spec in specs}

    for rank, (found, expected, held) in enumerate(on_ranks(WORLD, rank_main)):
        assert held == {(weights, inner)}
        assert torch.equal(found, expected)
        assert not torch.equal(found, logits_of(whole, prompts(rank)))


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "plain")
    convert(open_checkpoint(tmp_path / "plain"), "mxfp4", tmp_path / "quantized")

    def rank_main(group):
        return raised(load_sharded, tmp_path / "quantized", group, weights="mxint4")

    for error in on_ranks(2, rank_main):
        assert isinstance(error, CheckpointError)
        assert "quantizing twice loses twice" in error.expected


@pytest.mark.parametrize("plain", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_quantized_checkpoint_is_decoded_where_plain_weights_are_asked_for(family, plain, tmp_path):
    """The experts are plain then, with the numbers of the quantized ones: all of them are numbers of bf16."""
    tiny_model(family, torch.bfloat16, **WIDE).save_pretrained(tmp_path / "plain")
    convert(open_checkpoint(tmp_path / "plain"), "mxfp4", tmp_path / "quantized")

    def rank_main(group):
        quantized = load_sharded(tmp_path / "quantized", group, max_tokens=32)
        decoded = load_sharded(tmp_path / "quantized", group, max_tokens=32, weights=plain)
        held = {decoded.plan.wiring(layer).spec.weights for layer in decoded.layers}
        pairs = [
            (one.layer.experts.weights.decode(), other.layer.experts.weights)
            for one, other in zip(quantized.experts, decoded.experts, strict=True)
        ]
        logits_of(decoded.model, prompts(group.rank))
        return held, [(one.by_name(), other.by_name()) for one, other in pairs]

    for held, layers in on_ranks(2, rank_main):
        assert held == {plain}
        for expected, found in layers:
            assert set(found) == set(expected)
            for name, tensor in found.items():
                assert tensor.dtype == WEIGHT_DTYPES[plain]
                assert torch.equal(tensor.float(), expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_plain_checkpoint_is_loaded_in_another_dtype(dtype, tmp_path):
    """Biases, which gpt-oss has, are of the dtype that the matrices get."""
    whole = tiny_model("gpt_oss", torch.bfloat16)
    whole.save_pretrained(tmp_path)

    def rank_main(group):
        ids = prompts(group.rank)
        sharded = load_sharded(tmp_path, group, max_tokens=32, dtype=dtype)
        held = {
            t.dtype for experts in sharded.experts for t in experts.layer.experts.weights.by_name().values()
        }
        return ids, held, logits_of(sharded.model, ids)

    expected = copy.deepcopy(whole).float()
    for ids, held, found in on_ranks(2, rank_main):
        assert held == {dtype}
        assert found.dtype == dtype
        distance = (found.float() - logits_of(expected, ids)).norm() / logits_of(expected, ids).norm()
        assert distance < (1e-5 if dtype == torch.float32 else 2**-8)


def test_experts_of_a_model_are_taken_over_in_another_dtype():
    whole = tiny_model("gpt_oss", torch.bfloat16)

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32, weights="fp32")
        return {
            t.dtype for experts in sharded.experts for t in experts.layer.experts.weights.by_name().values()
        }

    assert on_ranks(2, rank_main) == [{torch.float32}] * 2
