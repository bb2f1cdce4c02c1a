"""`tokenyard.integrations.vllm`: the calls of vLLM's modular kernel give what `MoELayer` gives, bit for bit.

Everything runs without vLLM, and with a stub of the signatures of each version that the plugin takes. `make test-vllm`
runs it with vLLM itself, whose kernel then makes the calls.
"""

import inspect
from types import FunctionType, SimpleNamespace

import pytest
import torch

from tests.integrations.stubs import vllm_0_32, vllm_0_33
from tests.integrations.vllm_ranks import WORLD, Rank, finished
from tests.models import on_ranks
from tokenyard.exchange import EXCHANGES
from tokenyard.routing import Placement

LAYERS = {
    "bf16": {},
    "fp16": {"dtype": torch.float16, "weights": "fp16"},
    "float32 rows": {"dtype": torch.float32, "weights": "fp32"},
    "nvfp4": {"wire": "nvfp4(global_scale=448.0)"},
    "padded mxfp8, odd width": {"wire": "mxfp8(alignment=64)", "hidden_size": 40},
    "fp8 blocks, and back": {"wire": "fp8_block128", "combine_wire": "mxfp8", "hidden_size": 128},
    "quantized by the experts": {"expert_rows": "mxfp8"},
    "grouped": {"experts": "grouped"},
    "placed by hand": {"placement": Placement.explicit(5, [[3, 0], [4], [1, 2]])},
    "a rank without experts": {"placement": Placement.explicit(5, [[3, 0], [], [1, 2, 4]])},
    "replicas": {"placement": Placement.replicated(Placement.contiguous(5, 3), {0: [2]})},
    "weighted on the input": {"weight_on": "input", "top_k": 1},
    "scaled": {"routed_scaling": 2.5},
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)
def test_a_round_trip_is_that_of_the_layer(vllm, exchange, changes):
    def rank_main(group):
        rank = Rank(vllm, group, exchange, **changes)
        return [
            rank.is_right(seed=10 * turn, expert_map=rank.expert_map if turn else None) for turn in range(2)
        ]

    assert on_ranks(WORLD, rank_main) == [[True, True]] * WORLD


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2_no_mul",
    "swiglu_clamped": "swigluoai",
}


@pytest.mark.parametrize(("ours", "theirs"), ACTIVATIONS.items())
def test_activations_by_their_names(vllm, ours, theirs):
    """As strings, and as values of an enum."""

    def rank_main(group):
        rank = Rank(vllm, group, activation=ours, bias=ours == "swiglu_clamped")
        names = (theirs, SimpleNamespace(value=theirs))
        return [rank.is_right(activation=name) for name in names]

    assert on_ranks(2, rank_main) == [[True, True]] * 2


def test_what_prepare_hands_over(vllm):
    """Rows in (rank, token) order; global ids; for another rank's choice, one that the map puts elsewhere."""

    def rank_main(group):
        rank = Rank(vllm, group, num_experts=4)
        ids_TK = torch.tensor([[0, 3], [2, 3], [1, -1]], dtype=torch.int32)
        x_TH = torch.arange(3.0).repeat_interleave(32).view(3, 32).bfloat16() + 10 * group.rank
        handed = []
        for expert_map in (None, rank.expert_map):
            a1q, scale, meta, ids, weights = rank.mover.prepare(
                x_TH, torch.full((3, 2), 0.5), ids_TK, 4, expert_map, False, None
            )
            handed += [a1q[:, 0].tolist(), ids.tolist(), weights.tolist(), meta.expert_num_tokens.tolist()]
            assert scale is None
            assert ids.dtype == rank.mover.topk_indices_dtype()
            assert meta.expert_num_tokens_cpu.tolist() == meta.expert_num_tokens.tolist()
            rank.mover.finalize(torch.empty_like(x_TH), a1q, weights, ids, False, finished(vllm))
        return handed

    first, second = on_ranks(2, rank_main)
    assert first[:4] == [
        [0, 2, 10, 12],
        [[0, -1], [1, -1]] * 2,
        [[0.5, 0], [0.5, 0]] * 2,
        [2, 2],
    ]
    assert first[5] == [[0, 2], [1, 2]] * 2  # expert 2 is elsewhere
    assert second[:4] == [[0, 1, 10, 11], [[-1, 3], [2, 3]] * 2, [[0, 0.5], [0.5, 0.5]] * 2, [2, 4]]
    assert second[5] == [[0, 3], [2, 3]] * 2  # expert 0 is elsewhere


def test_quantized_rows_come_with_their_scales(vllm):
    def rank_main(group):
        rank = Rank(vllm, group, wire="mxfp8(alignment=64)", hidden_size=40)
        x_TH, routes = rank.batch(tokens=3)
        a1q, scale, *_ = rank.mover.prepare(
            x_TH, routes.topk_weights_TK, routes.topk_ids_TK, 5, None, False, rank.experts.quant_config
        )
        rank.mover.abandon(RuntimeError("seen enough"))
        return a1q.dtype, a1q.shape[1], scale.dtype, scale.shape[1], a1q.is_contiguous()

    assert on_ranks(1, rank_main) == [(torch.float8_e4m3fn, 64, torch.uint8, 2, True)]


def test_what_is_declared(vllm):
    def rank_main(group):
        rank = Rank(vllm, group, wire="mxfp8(alignment=64)", hidden_size=40, combine_wire="mxfp8")
        mover, experts = rank.mover, rank.experts
        assert mover.output_is_reduced()
        assert mover.num_dispatchers() == 2
        assert mover.max_num_tokens_per_rank() == 16
        assert not mover.supports_async()
        assert not mover.supports_deferred_moe_finalize()
        assert not experts.is_monolithic()
        assert experts.activation_format() == mover.activation_format
        assert not experts.expects_unquantized_inputs
        # The width of results is the layer's, not that of a padded row.
        assert experts.workspace_shapes(7, 16, 64, 2, 5, 3, None, "silu") == ((0,), (0,), (7, 40))
        assert experts.workspace_dtype(torch.bfloat16) == torch.float32  # rounded once, to the combine wire
        assert experts._supports_activation("silu")
        assert not experts._supports_activation("relu2")
        assert experts._supports_parallel_config(SimpleNamespace(tp_size=1))
        assert not experts._supports_parallel_config(SimpleNamespace(tp_size=2))
        assert experts._supports_quant_scheme(None, None)
        assert not experts._supports_quant_scheme("fp8", None)
        return True

    assert on_ranks(2, rank_main) == [True, True]


@pytest.mark.parametrize("stub", [vllm_0_32, vllm_0_33], ids=lambda stub: stub.__name__.rpartition(".")[2])
def test_signatures_are_those_of_vllm(vllm, stub):
    """Every method takes the arguments of vLLM's, by the same names in the same order, and is of the same kind."""
    pairs = {
        vllm.TokenyardPrepareAndFinalize: stub.FusedMoEPrepareAndFinalizeModular,
        vllm.TokenyardExperts: stub.FusedMoEExpertsModular,
    }
    for mine, theirs in pairs.items():
        assert theirs.__abstractmethods__ <= vars(mine).keys()
        for name in vars(mine).keys() & vars(theirs).keys():
            own, method = (inspect.getattr_static(cls, name) for cls in (mine, theirs))
            if name.startswith("__") or not isinstance(own, property | staticmethod | FunctionType):
                continue
            assert type(own) is type(method), name
            if not isinstance(method, property):
                names = list(inspect.signature(getattr(theirs, name)).parameters)
                assert list(inspect.signature(getattr(mine, name)).parameters) == names, name


def test_subclasses_where_vllm_is_there(vllm, version):
    mover, experts = vllm.TokenyardPrepareAndFinalize, vllm.TokenyardExperts
    if version is None:
        assert mover.__bases__ == (object,)
        assert not experts.__base__.__module__.startswith("vllm.")
        return
    assert mover.__base__.__module__.startswith("vllm.")
    assert experts.__base__.__module__.startswith("vllm.")
    assert type(experts.activation_format()).__module__.startswith("vllm.")
    assert not mover.__abstractmethods__
    assert not experts.__abstractmethods__


def test_weights_are_not_copied_and_may_change(vllm):
    def rank_main(group):
        rank = Rank(vllm, group)
        x_TH, routes = rank.batch(tokens=5)
        rank.call(x_TH, routes)
        held = rank.experts._built[1]
        with torch.no_grad():
            rank.weights.w13.mul_(2)
        rank.layer.experts.load_(rank.weights)
        assert held.weights.w13.data_ptr() == rank.weights.w13.data_ptr()
        return rank.is_right(), rank.experts._built[1] is held

    assert on_ranks(2, rank_main) == [(True, True)] * 2


def test_nobody_has_tokens(vllm):
    def rank_main(group):
        rank = Rank(vllm, group, wire="nvfp4(global_scale=448.0)")
        return tuple(rank.call(*rank.batch(tokens=0)).shape)

    assert on_ranks(2, rank_main) == [(0, 32)] * 2
