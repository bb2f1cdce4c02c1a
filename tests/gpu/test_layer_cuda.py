"""A layer on a GPU, through NCCL: one rank, which is what one GPU allows (NCCL refuses two ranks on one GPU)."""

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from tests.models import batch, build, on_ranks, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import InputError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def group():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    group = ty.DistributedGroup(deadline=60)
    yield group
    group.close()
    dist.destroy_process_group()


def on_cpu(group, layer, exchange):
    x_TH, routes = batch(layer, 9)
    return build(ty.plan([layer], group, exchange=exchange), layer.name)(x_TH, routes)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("exchange", ["allgather", "two_sided"])
def test_the_same_bits_as_on_the_cpu(group, exchange, wire):
    layer = spec(wire=wire, hidden_size=100, experts="reference")
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, layer.name).cuda()
    x_TH, routes = batch(layer, 9)
    there = ty.Routes(topk_ids_TK=routes.topk_ids_TK.cuda(), topk_weights_TK=routes.topk_weights_TK.cuda())
    y_TH = built(x_TH.cuda(), there)
    assert y_TH.is_cuda
    assert same_bits(y_TH.cpu(), on_ranks(1, on_cpu, layer, exchange)[0])


def test_values_and_collectives_through_nccl(group):
    assert group.device.type == "cuda"
    assert group.gather_json({"a": [1, None]}) == [{"a": [1, None]}]
    group.agree("something", 3)
    rows = torch.arange(12, dtype=torch.uint8, device="cuda").view(4, 3)
    assert torch.equal(group.all_to_all_rows(rows, [4], [4], phase="test"), rows)
    assert torch.equal(group.all_gather_rows(rows, [4], phase="test"), rows)


def test_rows_on_the_cpu_are_refused_before_anything_moves(group):
    layer = spec()
    built = build(ty.plan([layer], group), layer.name).cuda()
    x_TH, routes = batch(layer, 3)
    with pytest.raises(InputError, match="x_TH is on cpu; expected cuda"):
        built(x_TH, routes)
