"""`auto` takes the fastest exchange and experts that can do the work, and says why."""

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.errors import PlanError, PlanMismatch, Reason
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.transports.one_sided import declarations
from tokenyard.experts import FusedExperts
from tokenyard.planning.choosing import choose_exchange, choose_experts
from tokenyard.planning.drafting import EXCHANGE_VARIABLE
from tokenyard.routing import SoftmaxRouter


def planned(group, layer, hosts=1, paranoid=False):
    if hosts > 1:
        group.host = lambda: f"host {group.rank % hosts}"
    plan = ty.plan([layer], group, paranoid=paranoid)
    x_TH, routes = batch(layer, 3, seed=group.rank)
    given = routes if layer.router is None else torch.randn(3, layer.num_experts)
    shape = tuple(build(plan, layer.name)(x_TH, given).shape)
    return plan.draft.exchange.name, str(plan).splitlines()[0], str(plan).splitlines()[1], shape


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("paranoid", [False, True])
def test_ranks_that_share_memory_take_one_sided_and_cpus_grouped_experts(ranks, paranoid):
    for name, first, second, shape in ty.launch(2, planned, spec(), 1, paranoid, ranks=ranks):
        assert name == "one_sided"
        assert "exchange one_sided (auto: the ranks share memory), 1 in flight" in first
        assert "; grouped (auto: on CPUs), bf16 weights, " in second
        assert shape == (3, 32)


def test_ranks_on_several_hosts_take_two_sided():
    for name, first, _, shape in on_ranks(2, planned, spec(), 2):
        assert name == "two_sided"
        assert "two_sided (auto: one_sided shares memory, and the ranks run on 2 hosts)" in first
        assert shape == (3, 32)


def test_cpus_that_reorder_stores_take_two_sided(monkeypatch):
    monkeypatch.setattr(declarations.platform, "machine", lambda: "aarch64")
    for name, first, _, _ in on_ranks(2, planned, spec()):
        assert name == "two_sided"
        assert "(auto: one_sided needs stores that stay in order, as on x86, not aarch64)" in first


def test_experts_that_route_by_themselves_take_allgather():
    layer = spec(router=SoftmaxRouter(2, renormalize=True), experts="self_routing")
    for name, first, second, _ in on_ranks(2, planned, layer):
        assert name == "allgather"
        assert "(auto: one_sided sends a row only where its experts are" in first
        assert "self_routing, bf16" in second  # named, not chosen


def names_another(group):
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setenv(EXCHANGE_VARIABLE, "two_sided")
        group.barrier()
        return raised(ty.plan, [spec()], group)


def test_a_rank_that_names_another_exchange_is_a_mismatch_and_no_hang():
    errors = ty.launch(2, names_another, ranks="processes")
    assert [type(error) for error in errors] == [PlanMismatch] * 2
    assert "exchange" in str(errors[0])


def test_what_nobody_supports_has_the_error_of_the_fastest():
    with pytest.raises(PlanError, match="nonsense"):
        ty.draft([spec(placement="nonsense")], 2)


def experts_spec(**changes):
    return ty.draft([spec(**changes)], 2).wirings[0].experts_spec(0)


def test_gpus_that_run_fused_experts_take_them(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(FusedExperts, "runs_on", classmethod(lambda cls, device: None))
    assert choose_experts(experts_spec(hidden_size=256, intermediate_size=128), gpu)[0].name == "fused"
    no_kernel = ty.errors.Reason(field="activation", value="geglu", why="it has no kernel for geglu")
    monkeypatch.setattr(FusedExperts, "supports", classmethod(lambda cls, spec: no_kernel))
    chosen, why = choose_experts(experts_spec(), gpu)
    assert (chosen.name, why) == ("grouped", "not fused: it has no kernel for geglu")
    older = ty.errors.Reason(field="experts", value="fused", why="its kernels need Hopper")
    monkeypatch.setattr(FusedExperts, "runs_on", classmethod(lambda cls, device: older))
    assert choose_experts(experts_spec(), gpu)[1] == "not fused: its kernels need Hopper"


def test_where_all_exchanges_are_refused_it_is_the_fastest_whose_error_is_told():
    refused = Reason(field="top_k", value=3, why="no")
    assert choose_exchange(lambda transport: refused, 2, None) == (
        EXCHANGES["one_sided"],
        "no other one does it",
    )


@pytest.mark.parametrize(
    ("field", "value", "works"), [("sum", "choices", "ranks"), ("reduce_ranks", "caller", "exchange")]
)
def test_the_field_at_fault_is_the_first_that_is_offered_to_be_changed(field, value, works):
    error = raised(ty.draft, [spec(**{field: value})], 2, exchange="hierarchical")
    first, *others = [alternative.changes for alternative in error.alternatives]
    assert first == {field: works}
    assert others
    assert all("exchange" in changes for changes in others)
