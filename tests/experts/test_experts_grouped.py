"""The grouped experts: which product they choose, all choices in agreement, and experts that route."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.experts.expert_cases import Case, build_experts, oracle, receive, run, run_unfinalized
from tokenyard import formats
from tokenyard.duties import Duty, Ledger, Party
from tokenyard.errors import ContractError, InputError, UnknownName
from tokenyard.experts import ExpertsSpec, GroupedExperts, SelfRoutingExperts, activation, get, grouped
from tokenyard.experts.grouped import cpu_multiplies, product_path, sum_choices
from tokenyard.experts.pairs import sort_pairs
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows, RoutingLogits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "dtype", "device", "expected"),
    [
        (64, 2048, 1024, torch.bfloat16, CPU, "upcast"),
        (16, 2048, 1024, torch.bfloat16, CPU, "upcast"),
        (15, 2048, 1024, torch.bfloat16, CPU, "grouped_mm"),
        (8, 2048, 1024, torch.float16, CPU, "upcast"),
        (7, 2048, 1024, torch.float16, CPU, "grouped_mm"),
        (64, 2048, 1024, torch.float32, CPU, "grouped_mm"),
        (4, 100, 1024, torch.bfloat16, CPU, "mm"),
        (4, 1, 8, torch.float32, CPU, "mm"),
        (4, 100, 4, torch.float32, CPU, "grouped_mm"),
        (4, 8, 7, torch.bfloat16, CPU, "mm"),
        (64, 2048, 1024, torch.bfloat16, CUDA, "grouped_mm"),
        (64, 2048, 1024, torch.float16, CUDA, "grouped_mm"),
        (64, 2048, 1023, torch.bfloat16, CUDA, "mm"),
        (0, 2048, 1024, torch.bfloat16, CPU, "grouped_mm"),
    ],
)
def test_product_path(
    rows: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device, expected: str
) -> None:
    assert product_path(rows, hidden, inner, dtype, device) == expected


@pytest.mark.parametrize("dtype", list(grouped.UPCAST_ROWS))
def test_weights_are_widened_from_so_many_rows_on(dtype: torch.dtype) -> None:
    enough = grouped.UPCAST_ROWS[dtype]
    assert product_path(enough, 2048, 1024, dtype, CPU) == "upcast"
    assert product_path(enough - 1, 2048, 1024, dtype, CPU) == "grouped_mm"


def test_a_cpu_that_multiplies_16_bits_does_not_widen() -> None:
    assert product_path(64, 2048, 1024, torch.bfloat16, CPU, native=True) == "grouped_mm"
    assert product_path(64, 100, 1024, torch.float16, CPU, native=True) == "mm"
    assert not cpu_multiplies(torch.float32)


@pytest.mark.parametrize("path", ["grouped_mm", "upcast", "mm"])
@pytest.mark.parametrize("case", [Case(R=70, bias=True), Case(R=70, L=9, weight_on="input")], ids=str)
def test_every_path_computes_the_same_layer(path: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "product_path", lambda *_, **__: path)
    monkeypatch.setattr(grouped, "UPCAST_TILE", 300)  # several tiles, the last one not full
    experts, x_RH, routes = build_experts("grouped", case)
    expected_RH, bound_RH = oracle(case)
    assert ((run(experts, x_RH, routes) - expected_RH).abs() <= bound_RH).all()
    assert torch.equal(run_unfinalized(experts, x_RH, routes).finish().rows_RH, run(experts, x_RH, routes))


@pytest.mark.parametrize("path", ["grouped_mm", "upcast", "mm"])
@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_a_rank_that_has_hardly_any_pairs(path: str, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "product_path", lambda *_, **__: path)
    experts, x_RH, routes = build_experts("grouped", Case(R=5))
    routes.ids_RK.fill_(-1)
    routes.ids_RK[3, 1 : 1 + pairs] = 2
    y_RH = run(experts, x_RH, routes)
    expected_RH = run(build_experts("reference", Case(R=5))[0], x_RH, routes)
    assert y_RH.shape == (5, 32)
    assert torch.allclose(y_RH, expected_RH, atol=0.02, rtol=0.02)
    assert bool(y_RH[3].any()) == (pairs > 0)
    assert not y_RH[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("path", ["grouped_mm", "upcast", "mm"])
def test_rows_that_are_wider_than_a_tile_or_a_block(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "product_path", lambda *_, **__: path)
    monkeypatch.setattr(grouped, "UPCAST_TILE", 5)
    monkeypatch.setattr(grouped, "SUM_BLOCK", 5)
    case = Case(R=9, ids="first")
    experts, x_RH, routes = build_experts("grouped", case)
    expected_RH, bound_RH = oracle(case)
    assert ((run(experts, x_RH, routes) - expected_RH).abs() <= bound_RH).all()


def test_uneven_loads_choose_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(R=40, L=3, K=1)
    experts, x_RH, routes = build_experts("grouped", case)
    routes.ids_RK.zero_()
    routes.ids_RK[-2:, 0] = 2
    monkeypatch.setattr(grouped, "cpu_multiplies", lambda _: False)
    dtypes = []
    product = grouped._product
    monkeypatch.setattr(
        grouped, "_product", lambda x, w, **out: dtypes.append(x.dtype) or product(x, w, **out)
    )
    run(experts, x_RH, routes)
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize("native", [True, False])
def test_weights_are_widened_only_by_a_cpu_that_cannot_multiply_them(native: bool, monkeypatch) -> None:
    asked: list[bool] = []
    path = grouped.product_path
    monkeypatch.setattr(grouped, "cpu_multiplies", lambda _: native)
    monkeypatch.setattr(
        grouped, "product_path", lambda *sizes, native: asked.append(native) or path(*sizes, native=native)
    )
    experts, x_RH, routes = build_experts("grouped", Case(R=70))
    run(experts, x_RH, routes)
    assert set(asked) == {native}


def test_weights_that_grouped_mm_cannot_take() -> None:
    case = Case(R=6)
    spec, weights, x_RH, routes = case.build()
    odd = torch.empty(weights.w13.numel() + 1, dtype=torch.bfloat16)[1:].view(weights.w13.shape)
    turned = torch.empty_like(weights.w2.transpose(1, 2)).contiguous().transpose(1, 2)
    adopted = replace(weights, w13=odd.copy_(weights.w13), w2=turned.copy_(weights.w2))
    expected_RH, bound_RH = oracle(case)
    y_RH = run(GroupedExperts(spec, adopted, adopt=True), x_RH, routes)
    assert ((y_RH - expected_RH).abs() <= bound_RH).all()


@pytest.mark.parametrize("ids", ["random", "first", "duplicate", "sparse", "nobody"])
def test_sum_choices_is_finish(ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "SUM_BLOCK", 100)
    experts, x_RH, routes = build_experts("grouped", Case(ids=ids, R=33))
    pairs = sort_pairs(routes, 4)
    unfinalized = run_unfinalized(experts, x_RH, routes)
    y_NH = unfinalized.rows_NH[pairs.by_expert_N]
    summed = sum_choices(y_NH, unfinalized.weights_N, pairs, None)
    due_RH = unfinalized.finish().rows_RH
    assert torch.equal(summed.rows_RH.view(torch.int32), due_RH.view(torch.int32))
    # Into a place: each row into its slot, in the dtype of the wire, and nothing beside them.
    slots_R = torch.randperm(40)[:33]
    place = CombineBuffer(rows_SH=torch.full((40, 32), torch.nan, dtype=torch.bfloat16), slots_R=slots_R)
    assert sum_choices(y_NH, unfinalized.weights_N, pairs, place).buffer is place
    assert torch.equal(place.rows_SH[slots_R], due_RH.bfloat16())
    assert place.rows_SH.isnan().all(1).sum() == 7
    if ids != "nobody":  # the sums of a GPU, one choice after the other
        by_passes_RH = grouped._sum_by_passes(y_NH, unfinalized.weights_N, pairs)
        assert torch.equal(by_passes_RH.view(torch.int32), due_RH.view(torch.int32))


@pytest.mark.parametrize("rows", [1, 6])
def test_weights_are_put_together_once_and_anew_where_one_is_another_tensor(rows: int) -> None:
    experts, x_RH, routes = build_experts("grouped", Case(R=rows, weights="fp32", ids="first"))
    y_RH, before = run(experts, x_RH, routes), experts.weights
    assert experts.weights is before
    for name in ("w2", "w13", "w2"):
        tensor = experts.get_buffer(name)
        setattr(experts, name, torch.zeros_like(tensor))
        assert not run(experts, x_RH, routes).any()
        assert getattr(experts.weights, name) is experts.get_buffer(name)
        setattr(experts, name, tensor)
        assert torch.equal(run(experts, x_RH, routes), y_RH)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", ["grouped", "reference"])
def test_rows_without_an_expert_here_have_no_results(name: str, rows: int) -> None:
    experts, x_RH, routes = build_experts(name, Case(R=rows))
    routes.ids_RK.fill_(-1)
    unfinalized = run_unfinalized(experts, x_RH, routes)
    assert (unfinalized.rows_NH.shape, unfinalized.weights_N.shape) == ((0, 32), (0,))
    assert unfinalized.index_N.tolist() == []
    for y_RH in (unfinalized.finish().rows_RH, run(experts, x_RH, routes)):
        assert torch.equal(y_RH, torch.zeros(rows, 32))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("finalize", [True, False])
def test_results_have_no_gradient_though_routing_weights_want_one(rows: int, finalize: bool) -> None:
    experts, x_RH, routes = build_experts("grouped", Case(R=rows))
    routes.ids_RK.clamp_(min=0)
    due = experts(receive(x_RH, routes), finalize=finalize)
    wanting = LocalRoutes(ids_RK=routes.ids_RK, weights_RK=routes.weights_RK.clone().requires_grad_())
    found = experts(receive(x_RH, wanting), finalize=finalize)
    assert torch.is_grad_enabled()
    name = "rows_RH" if finalize else "rows_NH"
    assert not getattr(found, name).requires_grad
    assert torch.equal(getattr(found, name), getattr(due, name))


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("finalize", [True, False])
@pytest.mark.parametrize("name", ["grouped", "reference"])
def test_what_is_weighted_and_summed_is_written_down(
    name: str, finalize: bool, weight_on: str, rows: int
) -> None:
    """A weight of 1 changes nothing, and does not count; neither does a choice of an expert elsewhere."""
    experts, x_RH, routes = build_experts(name, Case(R=rows, weight_on=weight_on))
    routes.ids_RK.clamp_(min=0)
    routes.ids_RK[0, 0] = -1
    routes.weights_RK.fill_(0.5)
    routes.weights_RK[0, 1] = 1.0
    with Ledger().open() as ledger:
        experts(receive(x_RH, routes), finalize=finalize)
    pairs = 3 * rows - 1
    assert ledger.rows(Duty.REDUCE_EXPERTS) == ({Party.EXPERTS: pairs} if finalize else {})
    weighted = finalize or weight_on == "input"
    assert ledger.rows(Duty.WEIGHT) == ({Party.EXPERTS: pairs - 1} if weighted else {})


@pytest.mark.parametrize("rows", [1, 20])
def test_ids_out_of_range_are_refused(rows: int) -> None:
    experts, x_RH, routes = build_experts("grouped", Case(R=rows))
    routes.ids_RK[-1, 1] = 3  # the last
    run(experts, x_RH, routes)
    routes.ids_RK[-1, 1] = 4
    with pytest.raises(InputError, match="holds local expert id 4; expected ids from -1 to 3"):
        run(experts, x_RH, routes)
    with pytest.raises(InputError, match="one id and one weight"):
        run(experts, x_RH, LocalRoutes(ids_RK=routes.ids_RK, weights_RK=routes.weights_RK[:, :1]))


def test_rows_in_another_format_than_asked_for_are_encoded_once() -> None:
    mxfp8 = formats.get("mxfp8")
    case = Case(H=64, R=40)
    spec, weights, x_RH, routes = case.build()
    quantized_RH = mxfp8.decode(mxfp8.encode(x_RH), torch.bfloat16)
    for name in ("reference", "grouped"):
        on_codes = get(name)(replace(spec, rows=mxfp8), weights)
        expected_RH = run(get(name)(spec, weights), quantized_RH, routes)
        assert torch.equal(run(on_codes, x_RH, routes), expected_RH)
        sent = ReceivedRows(rows=mxfp8.encode(x_RH), routes=routes, counts_W=(40,))
        assert torch.equal(on_codes(sent).rows_RH, expected_RH)


# --- Experts that route by themselves ---------------------------------------------------------------------


def top2(logits_RE: torch.Tensor) -> SimpleNamespace:
    weights, ids = logits_RE.float().softmax(-1).topk(2)
    return SimpleNamespace(topk_ids_TK=ids, topk_weights_TK=weights)


def second_half(ids_RK: torch.Tensor, counts_W: tuple[int, ...]) -> torch.Tensor:
    """This rank owns experts 4 to 7 of 8."""
    assert sum(counts_W) == len(ids_RK)
    return torch.where(ids_RK >= 4, ids_RK - 4, -1)


@pytest.mark.parametrize("inner", ["reference", "grouped"])
@pytest.mark.parametrize("finalize", [True, False])
def test_self_routing_is_routing_and_then_experts(inner: str, finalize: bool) -> None:
    spec, weights, x_RH, _ = Case(K=2, R=30).build()
    logits_RE = torch.randn(30, 8, generator=torch.Generator().manual_seed(3))
    experts = SelfRoutingExperts(spec, weights, router=top2, to_local=second_half, inner=inner)
    assert experts.routes_itself
    received = receive(x_RH, RoutingLogits(logits_RE=logits_RE))
    chosen = top2(logits_RE)
    routes = LocalRoutes(ids_RK=second_half(chosen.topk_ids_TK, (30,)), weights_RK=chosen.topk_weights_TK)
    expected_RH = run(get(inner)(spec, weights), x_RH, routes)
    result = experts(received, finalize=finalize)
    assert torch.equal((result if finalize else result.finish()).rows_RH, expected_RH)


def test_self_routing_holds_one_copy_of_the_weights() -> None:
    spec, weights, x_RH, routes = Case().build()
    experts = SelfRoutingExperts(spec, weights, router=top2, to_local=second_half, adopt=True)
    assert experts.weights.w13.data_ptr() == weights.w13.data_ptr()
    assert len(list(experts.buffers())) == 2
    experts.load_(replace(weights, w13=weights.w13 * 2))
    assert torch.equal(experts.inner.weights.w13, weights.w13)
    with pytest.raises(ContractError, match="these experts route by themselves"):
        experts(receive(x_RH, routes))
    with pytest.raises(UnknownName, match="did you mean 'grouped'"):
        SelfRoutingExperts(spec, weights, router=top2, to_local=second_half, inner="groupd")
    wrong = SelfRoutingExperts(spec, weights, router=top2, to_local=lambda ids, _: ids[:, :1])
    with pytest.raises(ContractError, match=r"gave local ids \[20, 1\] and weights \[20, 2\]"):
        wrong(receive(x_RH, RoutingLogits(logits_RE=torch.zeros(20, 8))))


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
def test_fixed_shapes_give_the_same_bits(bias: bool, weight_on: str) -> None:
    experts, x_RH, routes = build_experts("grouped", Case(bias=bias, weight_on=weight_on, weights="fp32"))
    routes.ids_RK[::3] = -1
    routes.weights_RK[routes.ids_RK < 0] = float("nan")
    x_RH[::3] = float("nan")  # rows that nobody takes hold anything
    received = receive(x_RH, routes)
    fixed = experts.compute_fixed(received, finalize=True).rows_RH
    assert torch.equal(fixed, experts.compute(received, finalize=True).rows_RH)
    with pytest.raises(ContractError, match="run this layer outside of the CUDA graph"):
        experts.compute_fixed(received, finalize=False)


def test_logits_are_refused_by_experts_that_take_routes() -> None:
    experts, x_RH, _ = build_experts("grouped", Case())
    with pytest.raises(ContractError, match="the batch carries a RoutingLogits; expected LocalRoutes"):
        experts(receive(x_RH, RoutingLogits(logits_RE=torch.zeros(20, 4))))


def test_gpt_oss_experts_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    spec = ExpertsSpec(
        hidden_size=24, intermediate_size=16, num_local_experts=4, top_k=2,
        activation=activation("swigluoai"), bias=True, weights="fp32", dtype=torch.float32,
    )  # fmt: skip
    case = Case(H=24, I=16, L=4, K=2, activation="swiglu_clamped", bias=True, weights="fp32")
    _, weights, x_RH, routes = case.build()
    routes.ids_RK.clamp_(min=0)
    peer = modeling.GptOssExperts(GptOssConfig(hidden_size=24, intermediate_size=16, num_local_experts=4))
    with torch.no_grad():
        peer.gate_up_proj.copy_(weights.w13.mT)
        peer.gate_up_proj_bias.copy_(weights.b13)
        peer.down_proj.copy_(weights.w2.mT)
        peer.down_proj_bias.copy_(weights.b2)
        expected_RH = peer(x_RH, routes.ids_RK.long(), routes.weights_RK)
    for name in ("reference", "grouped"):
        torch.testing.assert_close(
            run(get(name)(spec, weights), x_RH, routes), expected_RH, rtol=1e-5, atol=1e-5
        )


def test_a_cpu_that_says_nothing_multiplies_no_16_bits(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert not cpu_multiplies.__wrapped__(torch.bfloat16)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert cpu_multiplies.__wrapped__(torch.bfloat16)
    assert not cpu_multiplies.__wrapped__(torch.float16)


def test_pairs_of_an_expert_keep_their_order_however_many_there_are() -> None:
    ids_RK = torch.randint(-1, 3, (300, 4), generator=torch.Generator().manual_seed(1))
    pairs = sort_pairs(LocalRoutes(ids_RK=ids_RK, weights_RK=torch.ones(300, 4)), 3)
    experts = [expert for expert in ids_RK.flatten().tolist() if expert >= 0]
    due = sorted(range(len(experts)), key=lambda pair: experts[pair])  # Python's own sort is stable
    assert pairs.by_expert_N.tolist() == due
    assert pairs.expert_N.tolist() == sorted(experts)
