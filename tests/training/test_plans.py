"""What a training plan says, counts and holds: its text, duties and statistics, state dicts, copies."""

import copy

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tests.training.batches import Training, errors, trained
from tokenyard import formats
from tokenyard.duties import Duty, Party
from tokenyard.errors import Corrupted, HandleError, InputError
from tokenyard.experts import GroupedExperts, gradients
from tokenyard.formats import Payload

CASE = Training(trained(dtype=torch.float32, bias=True))


def test_a_plan_shows_the_round_trip_of_gradients():
    moe = trained("moe", gradient_wire="mxfp8", keep="rows")
    text = str(ty.draft([moe], 2, training=True))
    assert "in flight, training" in text
    assert "gradients mxfp8 (" in text
    assert "a forward keeps rows" in text
    assert "quantize: sender, weight: experts, reduce experts: receiver" in text
    assert "weight gradient: experts" in text
    assert "gradients" not in str(ty.draft([moe], 2))


def test_the_workspace_has_room_for_gradients():
    """Rows that travel again beside their gradients are wider than in the forward."""
    rows, nothing = (
        ty.draft([trained(keep=keep)], 2, exchange="one_sided", training=True) for keep in ("rows", "nothing")
    )
    inference = ty.draft([trained()], 2, exchange="one_sided")
    assert nothing.dispatch_bytes == rows.dispatch_bytes + 2 * 64 * 64 * 2  # slots of two ranks, H bf16
    assert rows.combine_bytes == inference.combine_bytes + 2 * 64 * 2 * 4  # K float32 beside each row
    assert [spec.index for spec in rows.exchange_specs] == [0, 1]


def counted(group):
    plan, layer = CASE.make(group, paranoid=True)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    y_TH = layer(x_TH, routes)
    done, record = [], gradients.record

    def recorded(duty, rows):
        done.append((duty, rows() if callable(rows) else rows))
        record(duty, rows)

    with pytest.MonkeyPatch.context() as patch:
        if group.size == 1:
            patch.setattr(gradients, "record", recorded)
        y_TH.backward(dy_TH)
    stats = plan.stats()
    return done, {name: (one.rounds, sum(one.rows_sent)) for name, one in stats.items()}


def test_the_gradient_of_each_routing_weight_is_one_duty_and_gradients_are_counted_apart():
    ((done, stats),) = on_ranks(1, counted)
    pairs = int((CASE.batch[1] >= 0).sum())
    assert done == [(Duty.WEIGHT_GRADIENT, pairs)]
    rows = int((CASE.batch[1] >= 0).any(dim=1).sum())
    assert stats == {"moe": (1, rows), "moe (gradients)": (1, rows)}
    wiring = ty.draft([CASE.spec], 1, training=True).wirings[0]
    assert wiring.duties[Duty.WEIGHT_GRADIENT] is Party.NOBODY
    assert wiring.gradients.duties[Duty.WEIGHT_GRADIENT] is Party.EXPERTS


class Forgets(GroupedExperts):
    """Computes the gradients of routing weights for some pairs only, and says so."""

    name = "forgets"

    def differentiate(self, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "record", lambda *_: None)
            return super().differentiate(*arguments)


def forgetful(group):
    case = Training(trained(dtype=torch.float32, experts=Forgets))
    _, layer = case.make(group, paranoid=True)
    x_TH, routes, _, dy_TH = case.inputs(group)
    error = raised(layer(x_TH, routes).backward, dy_TH)
    return type(error), str(error)


def test_a_duty_of_a_backward_that_nobody_did_is_noticed():
    ((kind, text),) = on_ranks(1, forgetful)
    assert kind is Corrupted
    assert "duty 'weight gradient' was done by nobody" in text


def held(group):
    _, layer = CASE.make(group)
    inference = ty.plan([CASE.spec], group).layer("moe", CASE.weights)
    state = layer.state_dict()
    same = all(torch.equal(state[name], tensor) for name, tensor in inference.state_dict().items())
    inference.load_state_dict(state)
    copied = copy.deepcopy(layer)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    copied(x_TH, routes).backward(dy_TH)
    own = layer.experts.w13.grad is None and copied.experts.w13.grad is not None
    layer.experts.load_(CASE.weights.select(range(8)) if group.size == 1 else layer.experts.weights)
    with torch.no_grad():
        bits = torch.equal(layer(x_TH, routes), inference(x_TH, routes))
    names = [name for name, _ in layer.named_parameters()]
    return list(state) == list(inference.state_dict()), same, own, bits, names


def test_parameters_have_the_names_layouts_and_results_of_the_weights_of_inference():
    names = ["experts.w13", "experts.w2", "experts.b13", "experts.b2"]
    assert on_ranks(2, held) == [(True, True, True, True, names)] * 2


def with_payload(group):
    layer = trained(dtype=torch.float32, payloads=(Payload(name="tag", dtype=torch.float32, width=1),))
    case = Training(layer)
    _, built = case.make(group)
    x_TH, routes, _, dy_TH = case.inputs(group)
    tag = torch.zeros(len(x_TH), 1)
    built(x_TH, routes, payloads={"tag": tag}).backward(dy_TH)
    refused = raised(built, x_TH, routes, payloads={"tag": tag.requires_grad_()})
    return x_TH.grad is not None, type(refused), str(refused)


def test_further_payloads_travel_and_are_not_differentiated():
    for found, refused, text in on_ranks(2, with_payload):
        assert found
        assert refused is HandleError
        assert "payload 'tag' requires a gradient" in text


def without_numbers(group):
    case = Training(trained(token_numbers=True))
    _, layer = case.make(group)
    x_TH, routes, extra, _ = case.inputs(group)
    found = [
        raised(layer, x_TH, routes),
        raised(layer, x_TH, routes, token_numbers=extra["token_numbers"].int()),
        raised(layer, x_TH, routes, token_numbers=extra["token_numbers"][1:]),
    ]
    return [(type(error), str(error)) for error in found]


def test_numbers_of_tokens_are_checked():
    (found,) = on_ranks(1, without_numbers)
    for kind, text in found:
        assert kind is InputError
        assert "token_numbers" in text


@pytest.mark.parametrize(("wire", "bound"), [("mxfp8", 0.08), ("fp8_block128", 0.08)])
def test_a_named_gradient_wire_quantizes_gradients_once_each_way(wire, bound):
    case = Training(trained(gradient_wire=wire, hidden_size=128))
    found = errors(case.on(2), case.oracle)
    assert found["y"] < 0.02
    assert 0.005 < found["x"] < bound
    assert 0.005 < found["w2"] < bound


def test_rows_that_were_quantized_have_the_gradients_of_what_the_experts_saw():
    case = Training(trained(wire="mxfp8"))
    seen = Training(case.spec)
    x_TH = formats.get("mxfp8").encode(case.batch[0]).decode(torch.bfloat16)
    seen.__dict__["batch"] = (x_TH, *case.batch[1:])
    assert max(errors(case.on(2), seen.oracle).values()) < 2e-2


def test_a_plan_that_does_not_train_says_how_to():
    def backward(group):
        plan = ty.plan([spec()], group)
        x_TH, routes = batch(spec(), 4)
        built = build(plan, "moe").eval()
        error = raised(built(x_TH.requires_grad_(), routes).sum().backward)
        return plan.training, str(error)

    ((training, text),) = on_ranks(1, backward)
    assert not training
    assert "fix: plan(..., training=True) to train" in text
