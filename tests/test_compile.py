"""Layers under `torch.compile(fullgraph=True)`: one graph, the bits of an eager call, and its errors.

Several ranks are processes here: PyTorch's tracer has state that all threads of a process share, and a thread that
calls a compiled model while another one traces gets an error from it, now and then.
"""

import gc
import inspect

import pytest
import torch
from torch import nn

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tests.products import product
from tokenyard.conformance.cases import same_bits
from tokenyard.exchange import EXCHANGES
from tokenyard.formats import Payload
from tokenyard.layer import compiled as ops
from tokenyard.routing import SoftmaxRouter

BACKENDS = ["aot_eager", "eager"]  # neither needs a C++ compiler
both_backends = pytest.mark.parametrize("backend", BACKENDS)
# "aot_eager" traces what "eager" traces, and more.
one_backend = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("eager", marks=pytest.mark.long)])
ROUTER = SoftmaxRouter(2, renormalize=True)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


class Block(nn.Module):
    """A layer between other operators, as in a model."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x_TH, routes_or_logits, **arguments):
        return self.moe(x_TH * 2, routes_or_logits, **arguments) + x_TH


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self, *moes):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, moes))

    def forward(self, x_TH, routes_or_logits, **arguments):
        for block in self.blocks:
            x_TH = block(x_TH, routes_or_logits, **arguments)
        return x_TH


def logits(tokens, seed=0):
    return torch.randn(tokens, 5, generator=torch.Generator().manual_seed(seed))


def on_processes(fn, *arguments):
    """Two ranks, with time to load the compiler."""
    return on_ranks(2, fn, *arguments, ranks="processes", deadline=120.0)


# -- The same bits as eager --------------------------------------------------------------------------------------


@torch.no_grad()
def model_of_many_layers(group, backend, exchange):
    layers = [
        spec("routes", experts="reference"),
        spec("logits", router=ROUTER, wire="mxfp8"),
        spec("scaled", routed_scaling=2.5),
        spec("payloads", payloads=(Payload(name="position", dtype=torch.int32, width=1),)),
    ]
    plan = ty.plan(layers, group, exchange=exchange)
    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    by_routes, by_logits = build(plan, "routes", shared=shared), build(plan, "logits")
    scaled, with_payloads = build(plan, "scaled"), build(plan, "payloads")

    def model(x_TH, ids_TK, weights_TK, logits_TE, position_T1):
        routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
        x_TH = by_routes(x_TH.relu(), routes, add=x_TH)
        x_TH = by_logits(x_TH, logits_TE, add=x_TH)
        x_TH = scaled(x_TH, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, scaled_by=2.5)) + x_TH
        return with_payloads(x_TH, routes, payloads={"position": position_T1})

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    same = []
    for tokens in (4 + group.rank, 4 + group.rank, 9 - group.rank):
        x_TH, routes = batch(layers[0], tokens, seed=group.rank)
        position_T1 = torch.arange(tokens, dtype=torch.int32).unsqueeze(1)
        arguments = (x_TH, routes.topk_ids_TK, routes.topk_weights_TK, logits(tokens), position_T1)
        same.append(same_bits(compiled(*arguments), model(*arguments)))
    return same


@pytest.mark.parametrize(("exchange", "backend"), product(list(EXCHANGES), BACKENDS))
def test_a_model_is_one_graph_with_the_bits_of_an_eager_call(exchange, backend):
    assert on_ranks(1, model_of_many_layers, backend, exchange) == [[True] * 3]


@pytest.mark.parametrize("exchange", ["one_sided", pytest.param("two_sided", marks=pytest.mark.long)])
def test_ranks_with_different_numbers_of_tokens(exchange):
    assert on_processes(model_of_many_layers, "aot_eager", exchange) == [[True] * 3] * 2


@torch.no_grad()
def routes_from_outside(group, backend):
    """`Routes` as an argument of the compiled model."""
    model = Model(build(ty.plan([spec()], group), "moe"))
    x_TH, routes = batch(spec(), 6)
    return same_bits(torch.compile(model, fullgraph=True, backend=backend)(x_TH, routes), model(x_TH, routes))


@both_backends
def test_routes_may_come_from_outside(backend):
    assert on_ranks(1, routes_from_outside, backend) == [True]


@torch.no_grad()
def results_written_into_out(group, backend):
    layer = build(ty.plan([spec()], group), "moe", shared=torch.relu)
    x_TH, routes = batch(spec(), 5, seed=group.rank)

    def into(x_TH, out_TH, both_TH):
        first = layer(x_TH, routes, out=out_TH)
        second = layer(x_TH, routes, out=both_TH, add=both_TH)  # adds to what is there
        return first, second, first + second

    def tensors():
        return x_TH.clone(), torch.full((32, 5), float("nan")).to(x_TH.dtype).t(), x_TH.clone()

    eager, compiled = tensors(), tensors()
    sums = into(*eager)[2]
    first, second, summed = torch.compile(into, fullgraph=True, backend=backend)(*compiled)
    return (
        first is compiled[1] and second is compiled[2],
        all(map(same_bits, compiled, eager)),
        same_bits(summed, sums),
    )


@both_backends
def test_out_is_written_into_and_returned(backend):
    assert on_ranks(1, results_written_into_out, backend) == [(True, True, True)]


# -- How often it is compiled ------------------------------------------------------------------------------------


@torch.no_grad()
def any_number_of_tokens(group, mark):
    model = Model(build(ty.plan([spec(router=ROUTER)], group), "moe"))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    same = []
    for tokens in (4, 7, 16, 9, 2, 5):
        x_TH, logits_TE = batch(spec(), tokens)[0], logits(tokens)
        if mark:
            torch._dynamo.mark_dynamic(x_TH, 0)
            torch._dynamo.mark_dynamic(logits_TE, 0)
        same.append(same_bits(compiled(x_TH, logits_TE), model(x_TH, logits_TE)))
    return all(same), counter.frame_count


@pytest.mark.parametrize(("mark", "compilations"), [(True, 1), (False, 2)])
def test_a_new_number_of_tokens_is_not_compiled_again(mark, compilations):
    assert on_ranks(1, any_number_of_tokens, mark) == [(True, compilations)]


@torch.no_grad()
def equal_blocks(group):
    names = [f"moe.{n}" for n in range(12)]  # more than Dynamo's limit of recompilations
    plan = ty.plan([spec(name, router=ROUTER) for name in names], group)
    blocks = [Block(build(plan, name, seed)) for seed, name in enumerate(names)]
    counter = torch._dynamo.testing.CompileCounter()
    x_TH, logits_TE = batch(spec(), 4)[0], logits(4)
    same = [
        same_bits(
            torch.compile(block, fullgraph=True, backend=counter)(x_TH, logits_TE), block(x_TH, logits_TE)
        )
        for block in blocks
    ]
    return all(same), counter.frame_count


def test_equal_blocks_share_one_graph():
    assert on_ranks(1, equal_blocks) == [(True, 1)]


# -- What a compiler must not do ---------------------------------------------------------------------------------


@torch.no_grad()
def calls_that_look_needless(group, backend):
    plan = ty.plan([spec("a"), spec("b")], group)
    a, b = build(plan, "a"), build(plan, "b")
    x_TH, routes = batch(spec(), 4)

    def model(x_TH):
        b(x_TH, routes)  # nobody reads it
        return a(x_TH, routes) + a(x_TH, routes)  # two equal calls

    torch.compile(model, fullgraph=True, backend=backend)(x_TH)
    return {name: stats.rounds for name, stats in plan.stats().items()}


@both_backends
def test_every_call_is_made_since_other_ranks_wait_for_it(backend):
    assert on_ranks(1, calls_that_look_needless, backend) == [{"a": 2, "b": 1}]


# -- Errors ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def bad_on_rank_one(group, backend):
    layer = build(ty.plan([spec()], group), "moe")
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x_TH, routes = batch(spec(), 4, seed=group.rank)
    good, bad = compiled(x_TH, routes), group.rank == 1
    errors = [
        raised(compiled, x_TH[:, :31] if bad else x_TH, routes),
        raised(compiled, x_TH, routes, payloads={"what": x_TH} if bad else None),
        raised(compiled, x_TH, routes, out=torch.empty(4, 32) if bad else None),
        raised(compiled, x_TH, routes, out=x_TH[:3].clone() if bad else None),
    ]
    again = same_bits(compiled(x_TH, routes), good)  # nothing was lost, and the group is still usable
    return [(type(error).__name__, str(error)) for error in errors], again


@one_backend
def test_errors_are_those_of_an_eager_call_and_reach_all_ranks(backend):
    (others, _), (found, _) = results = on_processes(bad_on_rank_one, backend)
    assert [kind for kind, _ in others] == ["PeerFailed"] * 4
    assert [kind for kind, _ in found] == ["InputError"] * 4
    for (_, message), expected in zip(
        found, ["bfloat16[4, 31]", "['what']", "float32[4, 32]", "bfloat16[3, 32]"], strict=True
    ):
        assert message.startswith("layer 'moe', rank 1: ")
        assert expected in message
    assert all(again for _, again in results)


def layer_that_is_gone(group):
    plan = ty.plan([spec()], group)
    layer = build(plan, "moe")
    x_TH, routes = batch(spec(), 4)
    key, number, known = layer.key, int(layer.key), int(layer.key) in ops._layers
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x_TH, routes)
    del layer, compiled
    torch._dynamo.reset()
    gc.collect()
    ids_TK, weights_TK = routes.topk_ids_TK, routes.topk_weights_TK
    error = raised(ops.moe_layer, x_TH, ids_TK, weights_TK, 1.0, [], [], None, None, [], key, False)
    return known, number in ops._layers, str(error)


def test_a_layer_that_is_gone_leaves_no_entry_and_its_key_says_so():
    known, still, message = on_ranks(1, layer_that_is_gone)[0]
    assert known
    assert not still
    assert "of a compiled model is gone; expected the layer to live" in message


def unreduced_rows(group):
    layer = build(ty.plan([spec(reduce_ranks="caller")], group), "moe")
    x_TH, routes = batch(spec(), 4)

    def model(x_TH):
        return layer.unreduced(x_TH * 2, routes).reduce().y_TH + 1

    try:
        torch.compile(model, fullgraph=True, backend="eager")(x_TH)
        message = ""
    except torch._dynamo.exc.Unsupported as error:
        message = str(error)
    return message, same_bits(torch.compile(model, backend="eager")(x_TH), model(x_TH))


def test_unreduced_rows_break_the_graph_and_say_why():
    message, same = on_ranks(1, unreduced_rows)[0]
    assert "MoELayer.unreduced returns rows by rank" in message
    assert "compile without fullgraph=True" in message
    assert same


def started(group):
    layer = build(ty.plan([spec()], group), "moe")
    x_TH, routes = batch(spec(), 4)

    def model(x_TH):
        return layer.start(x_TH * 2, routes).finish() + 1

    try:
        torch.compile(model, fullgraph=True, backend="eager")(x_TH)
        message = ""
    except torch._dynamo.exc.Unsupported as error:
        message = str(error)
    return message, same_bits(torch.compile(model, backend="eager")(x_TH), model(x_TH))


def test_a_started_batch_breaks_the_graph_with_a_reason_of_its_own():
    message, same = on_ranks(1, started)[0]
    assert "MoELayer.start returns while rows travel" in message
    assert "call the layer" in message
    assert "unreduced" not in message.split("Developer debug context")[0]
    assert same


# -- Gradients ---------------------------------------------------------------------------------------------------


def backward_through_a_layer(group, backend, trained):
    shared = nn.Linear(32, 32, dtype=torch.bfloat16) if trained == "shared" else None
    model = Model(build(ty.plan([spec(router=ROUTER)], group), "moe", shared=shared))
    x_TH, logits_TE, add_TH = batch(spec(), 4)[0], logits(4), torch.ones(4, 32).bfloat16()
    with torch.no_grad():
        expected = model(x_TH, logits_TE, add=add_TH)
    tensors = {"x": x_TH, "logits": logits_TE, "add": add_TH}
    if trained in tensors:
        tensors[trained].requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    refused = str(raised(compiled, x_TH, logits_TE, add=add_TH))
    y_TH = compiled.eval()(x_TH, logits_TE, add=add_TH)
    return refused, same_bits(y_TH.detach(), expected), str(raised(y_TH.sum().backward))


@both_backends
@pytest.mark.parametrize("trained", ["x", "logits", "add", "shared"])
def test_training_is_refused_and_backward_raises_in_evaluation_mode(trained, backend):
    refused, same, message = on_ranks(1, backward_through_a_layer, backend, trained)[0]
    if trained == "shared":  # whose parameters require gradients in any ordinary module
        assert refused == "None"
    else:
        assert "layer 'moe', rank 0: the layer was called in training mode, with gradients enabled" in refused
    assert same
    assert message.startswith("layer 'moe': backward was called through a layer; expected inference")


# -- The page that shows the way of a token ------------------------------------------------------------------------


def test_no_method_of_the_layer_is_replaced_by_one_of_another_page():
    own = [ty.MoELayer.__init__, ty.MoELayer.forward, inspect.unwrap(ty.MoELayer.unreduced)]
    assert {method.__code__.co_filename for method in own} == {inspect.getfile(ty.MoELayer)}


# -- The operator ------------------------------------------------------------------------------------------------


def operator_is_sound(group):
    layers = [
        spec(),
        spec("logits", router=ROUTER, payloads=(Payload(name="p", dtype=torch.int8, width=2),)),
    ]
    plan = ty.plan(layers, group)
    x_TH, routes = batch(spec(), 4)
    ids_TK, weights_TK = routes.topk_ids_TK, routes.topk_weights_TK
    plain, by_logits = build(plan, "moe"), build(plan, "logits")
    payload = torch.ones(4, 2, dtype=torch.int8)
    op = torch.ops.tokenyard.moe_layer.default
    torch.library.opcheck(
        op, (x_TH, ids_TK, weights_TK, 1.0, [], [], x_TH.clone(), None, [], plain.key, False)
    )
    torch.library.opcheck(
        op, (x_TH, logits(4), None, 1.0, ["p"], [payload], None, x_TH.clone(), [], by_logits.key, False)
    )
    return True


def test_opcheck():
    assert on_ranks(1, operator_is_sound) == [True]
