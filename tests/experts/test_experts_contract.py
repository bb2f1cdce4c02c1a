"""What all experts keep to: one type of result, weights that are checked, copied and replaced in place."""

from dataclasses import replace

import pytest
import torch

from tests.exchange.interpreter import install, only_without_gpu
from tests.experts.expert_cases import Case, receive, run
from tokenyard.conformance.cases import same_bits
from tokenyard.conformance.experts_bound import draw_batch, draw_specs, in_words
from tokenyard.errors import ContractError, InputError, UnknownName
from tokenyard.experts import EXPERTS, Experts, ExpertWeights, GroupedExperts, ReferenceExperts, get
from tokenyard.formats import QuantizedMatrix
from tokenyard.routing import Placement
from tokenyard.rows import ExpertRows, UnfinalizedRows, check_expert_rows

CLASSES = [ReferenceExperts, GroupedExperts]
install()


def test_the_registry() -> None:
    assert set(EXPERTS) == {"reference", "grouped", "fused", "self_routing"}
    assert get("grouped") is get(GroupedExperts) is GroupedExperts
    with pytest.raises(UnknownName, match=r"unknown experts 'refrence'.*did you mean 'reference'"):
        get("refrence")


@pytest.mark.parametrize("cls", CLASSES)
def test_one_type_of_result(cls: type[Experts]) -> None:
    spec, weights, x_RH, routes = Case().build()
    received = receive(x_RH, routes)
    experts = cls(spec, weights)
    assert check_expert_rows(experts(received), received).rows_RH.shape == (20, 32)
    unfinalized = experts(received, finalize=False)
    assert isinstance(unfinalized, UnfinalizedRows)
    assert (unfinalized.num_rows, unfinalized.top_k) == (20, 3)
    taken = routes.ids_RK >= 0
    assert torch.equal(unfinalized.weights_N, routes.weights_RK[taken])
    weighted_before = cls(replace(spec, weight_on="input"), weights)(received, finalize=False)
    assert (weighted_before.weights_N == 1).all()


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_that_was_passed_in_is_changed(cls: type[Experts]) -> None:
    spec, weights, x_RH, routes = Case(bias=True, R=60, weights="fp32").build()
    kept = [t.clone() for t in (x_RH, routes.ids_RK, routes.weights_RK, *weights.by_name().values())]
    experts = cls(spec, weights, adopt=True)
    run(experts, x_RH, routes)
    experts(receive(x_RH, routes), finalize=False)
    now = [x_RH, routes.ids_RK, routes.weights_RK, *weights.by_name().values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def storages(tensors) -> set[int]:
    """Where the memory of tensors starts; of those that have any."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


@only_without_gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
@pytest.mark.parametrize("cls", EXPERTS.values(), ids=EXPERTS)
def test_a_result_shares_no_memory_with_what_was_given(cls: type[Experts], rows: int) -> None:
    """Whatever the shape: rows, routes, the pairs that routes remember, and weights stay those of the caller."""
    for seed, spec in enumerate(draw_specs(cls, count=8)):
        drawn = draw_batch(spec, rows, seed)
        for ids_RK in (
            drawn.routes.ids_RK,
            drawn.routes.ids_RK.clamp(min=0),
            drawn.routes.ids_RK.clamp(max=-1),
        ):
            batch = replace(drawn, routes=replace(drawn.routes, ids_RK=ids_RK))
            experts, received = batch.build(cls, adopt=True), batch.received(cls, batch.routes)
            for finalize in (True, False):
                result = experts(received, finalize=finalize)
                given = [*received.rows.payloads.values(), *vars(received.routes).values(), batch.x_RH]
                given += [*vars(batch.routes).values(), *batch.weights.by_name().values(), *experts.buffers()]
                kept = storages(tensor for tensor in given if isinstance(tensor, torch.Tensor))
                for name, value in vars(result).items():
                    if isinstance(value, torch.Tensor):
                        assert not storages([value]) & kept, (name, finalize, in_words(spec))


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (lambda y: (y, None), "a tuple of 2"),
        (lambda y: [y], "a list of 1"),
        (lambda _: None, "None"),
        (lambda y: y, r"a tensor float32\[20, 32\]"),
    ],
)
@pytest.mark.parametrize("finalize", [True, False])
def test_a_kernel_that_returns_something_else_is_refused(returned, named: str, finalize: bool) -> None:
    class Loose(ReferenceExperts):
        def compute(self, received, *, finalize):
            return returned(super().compute(received, finalize=True).rows_RH)

    spec, weights, x_RH, routes = Case().build()
    wanted = "ExpertRows" if finalize else "UnfinalizedRows"
    message = rf"Loose.compute\(finalize={finalize}\) returned {named}; expected {wanted}: one type"
    with pytest.raises(ContractError, match=message):
        Loose(spec, weights)(receive(x_RH, routes), finalize=finalize)


def test_the_other_type_is_refused_too() -> None:
    class Stubborn(ReferenceExperts):
        def compute(self, received, *, finalize):
            return super().compute(received, finalize=not finalize)

    spec, weights, x_RH, routes = Case().build()
    with pytest.raises(ContractError, match="returned a UnfinalizedRows; expected ExpertRows"):
        Stubborn(spec, weights)(receive(x_RH, routes))
    with pytest.raises(ContractError, match="returned a ExpertRows; expected UnfinalizedRows"):
        Stubborn(spec, weights)(receive(x_RH, routes), finalize=False)


@pytest.mark.parametrize("cls", CLASSES)
def test_weights_are_copied_unless_adopted(cls: type[Experts]) -> None:
    spec, weights, x_RH, routes = Case(bias=True).build()
    copied, adopted = cls(spec, weights), cls(spec, weights, adopt=True)
    for name, tensor in weights.by_name().items():
        assert copied.get_buffer(name).data_ptr() != tensor.data_ptr()
        assert adopted.get_buffer(name).data_ptr() == tensor.data_ptr()
    before_RH = run(copied, x_RH, routes)
    weights.w2.zero_()
    assert torch.equal(run(copied, x_RH, routes), before_RH)
    assert not torch.equal(run(adopted, x_RH, routes), before_RH)
    for tensor in weights.by_name().values():  # parameters of a model
        tensor.requires_grad_()
    for adopt in (True, False):
        experts = cls(spec, weights, adopt=adopt)
        assert not any(tensor.requires_grad for tensor in experts.weights.by_name().values())


@pytest.mark.parametrize("cls", CLASSES)
def test_experts_that_were_cast_since_they_were_built_are_refused(cls: type[Experts]) -> None:
    spec, weights, x_RH, routes = Case().build()
    experts = cls(spec, weights).half()
    with pytest.raises(InputError, match="w13 is float16; expected bfloat16, as the layer was planned"):
        run(experts, x_RH, routes)
    run(experts.bfloat16(), x_RH, routes)
    with pytest.raises(
        InputError, match=r"the weights are on meta, and the rows on cpu; expected one device"
    ):
        run(experts.to("meta"), x_RH, routes)


@pytest.mark.parametrize("given", [3, None, int, Case()], ids=str)
def test_what_is_no_experts_class_is_refused(given: object) -> None:
    with pytest.raises(InputError, match="experts"):
        get(given)


@pytest.mark.parametrize("cls", CLASSES)
def test_adopted_views_stay_views_where_the_kernel_reads_strides(cls: type[Experts]) -> None:
    class Own(cls):  # a kernel that says nothing about strides
        def compute(self, received, *, finalize):
            return super().compute(received, finalize=finalize)

    spec, weights, x_RH, routes = Case(bias=True).build()
    view = replace(weights, w13=weights.w13.mT.contiguous().mT, b2=weights.b2.mT.contiguous().mT)
    assert not view.w13.is_contiguous()
    adopted, copied, own = cls(spec, view, adopt=True), cls(spec, view), Own(spec, view, adopt=True)
    assert adopted.get_buffer("w13").data_ptr() == view.w13.data_ptr()
    assert own.get_buffer("w2").data_ptr() == weights.w2.data_ptr()
    for experts in (copied, own):
        assert all(tensor.is_contiguous() for tensor in experts.weights.by_name().values())
    assert torch.equal(run(own, x_RH, routes), run(copied, x_RH, routes))


@pytest.mark.parametrize("cls", CLASSES)
def test_load_replaces_in_place(cls: type[Experts]) -> None:
    spec, weights, x_RH, routes = Case(bias=True).build()
    _, others, _, _ = Case(bias=True, seed=9).build()
    experts = cls(spec, weights)
    places = {name: tensor.data_ptr() for name, tensor in experts.weights.by_name().items()}
    experts.load_(others)
    assert {name: tensor.data_ptr() for name, tensor in experts.weights.by_name().items()} == places
    assert torch.equal(run(experts, x_RH, routes), run(cls(spec, others), x_RH, routes))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("broken", ["w13", "w2", "b13", "b2", "missing"])
def test_load_checks_everything_before_it_changes_anything(cls: type[Experts], broken: str) -> None:
    spec, weights, _, _ = Case(bias=True).build()
    _, others, _, _ = Case(bias=True, seed=9).build()
    experts = cls(spec, weights)
    if broken == "missing":
        others = replace(others, b13=None)
    else:
        others = replace(others, **{broken: getattr(others, broken)[:-1]})
    with pytest.raises(InputError):
        experts.load_(others)
    for name, tensor in weights.by_name().items():
        assert torch.equal(experts.get_buffer(name), tensor)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("weights", ["fp32", "mxfp8"])
@pytest.mark.parametrize("broken", ["w13", "w2", "b13", "b2"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.to("meta"), "is on the meta device"),
        (lambda tensor: tensor.to_sparse(), "is held in a sparse_coo tensor; expected dense tensors"),
    ],
    ids=["meta", "sparse"],
)
def test_load_refuses_what_cannot_be_copied_before_it_changes_anything(
    cls: type[Experts], weights: str, broken: str, change, message: str
) -> None:
    plain, others = (Case(bias=True, weights="fp32", seed=seed).build()[1] for seed in (0, 9))
    spec = replace(Case(bias=True, weights="fp32").spec(), weights=weights)
    held, others = plain.quantize(weights), others.quantize(weights)
    part = getattr(others, broken)
    if isinstance(part, QuantizedMatrix):
        part = replace(part, payloads={**part.payloads, "scales": change(part.payloads["scales"])})
    else:
        part = change(part)
    experts = cls(spec, held)
    with pytest.raises(InputError, match=message):
        experts.load_(replace(others, **{broken: part}))
    for name, tensor in held.by_name().items():
        assert same_bits(experts.get_buffer(name), tensor)


def test_messages_about_weights() -> None:
    spec, weights, _, _ = Case().build()
    with pytest.raises(
        InputError, match=r"w13 is a tensor bfloat16\[4, 32, 48\]; expected bfloat16\[4, 48, 32\]"
    ):
        GroupedExperts(spec, replace(weights, w13=weights.w13.mT))
    with pytest.raises(InputError, match=r"w2 is a tensor float32\[4, 32, 24\]; expected bfloat16"):
        GroupedExperts(spec, replace(weights, w2=weights.w2.float()))
    with pytest.raises(InputError, match=r"the weights hold b2, w13, w2; expected w13, w2 \(bias=False\)"):
        GroupedExperts(spec, replace(weights, b2=torch.zeros(4, 32)))
    with pytest.raises(InputError, match=r"this rank's 4 experts.*fix: pass this rank's experts only"):
        GroupedExperts(spec, replace(weights, w13=weights.w13.repeat(2, 1, 1)))
    reason = GroupedExperts.supports(replace(spec, weights="mxint3"))
    assert reason is not None
    every = "bf16, fp16, fp32, fp8_block128, mxfp8, nvfp4, mxfp4, mxint4"
    assert str(reason) == f"weights=mxint3: grouped experts hold weights in {every}"
    with pytest.raises(InputError, match="ask `supports` first"):
        GroupedExperts(replace(spec, weights="mxint3"), weights)


@pytest.mark.parametrize("cls", CLASSES)
def test_biases_may_stay_in_float32(cls: type[Experts]) -> None:
    spec, weights, x_RH, routes = Case(bias=True).build()
    wide = replace(weights, b13=weights.b13.float(), b2=weights.b2.float())
    assert torch.equal(run(cls(spec, wide), x_RH, routes), run(cls(spec, weights), x_RH, routes))


def test_select_gives_one_ranks_weights() -> None:
    _, weights, _, _ = Case(bias=True).build()
    some = weights.select([2, 0])
    assert torch.equal(some.w13, weights.w13[[2, 0]])
    assert isinstance(some, ExpertWeights)
    assert set(some.by_name()) == {"w13", "w2", "b13", "b2"}


def test_select_knows_how_many_experts_there_are() -> None:
    weights = ExpertWeights(w13=torch.zeros(3, 8, 4), w2=torch.zeros(3, 4, 4))
    for wrong in (3, -1):
        with pytest.raises(
            InputError, match=f"expert {wrong} was selected of 3; expected experts from 0 to 2"
        ):
            weights.select([0, wrong])


@pytest.mark.parametrize("weights", ["fp32", "mxfp4"])
@pytest.mark.parametrize("rank", range(3))
def test_select_takes_what_a_placement_gives(weights: str, rank: int) -> None:
    """`select(placement.local_experts(rank))`, as it is documented: a tuple; and any other sequence."""
    _, plain, _, _ = Case(bias=True, weights="fp32").build()
    held = plain.quantize(weights)
    owned = Placement.contiguous(4, 3).local_experts(rank)
    assert owned == ((0, 1), (2,), (3,))[rank]
    expected = held.select(list(owned)).by_name()
    for experts in (owned, range(owned[0], owned[-1] + 1), torch.tensor(owned)):
        found = held.select(experts).by_name()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(held.select(owned).decode().w2, held.decode().w2[list(owned)])
    assert len(held.select(()).decode().w13) == 0


def test_results_do_not_share_memory() -> None:
    spec, weights, x_RH, routes = Case().build()
    experts = GroupedExperts(spec, weights)
    first = experts(receive(x_RH, routes))
    assert isinstance(first, ExpertRows)
    kept = first.rows_RH.clone()
    experts(receive(x_RH * 2, routes))
    assert torch.equal(first.rows_RH, kept)


def test_a_kernel_of_ones_own_declares_by_itself_what_it_can():
    class Own(GroupedExperts):
        name = "own"

        def compute(self, received, *, finalize):
            return super().compute(received, finalize=finalize)

    class Renamed(GroupedExperts):
        name = "renamed"

    assert (Own.counts_duties, Own.any_strides, Own.places_results) == (False, False, False)
    assert (Own.inner_formats, Own.batch_invariant) == ((), ())
    assert (Renamed.counts_duties, Renamed.any_strides, Renamed.places_results) == (True, True, True)
