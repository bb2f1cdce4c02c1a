"""FlashInfer's functions on a workspace that the caller keeps, and a workspace that is given back for a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.integrations.flashinfer.round_trips import make, round_trip
from tests.models import on_ranks, raised
from tokenyard.errors import InputError
from tokenyard.integrations import flashinfer
from tokenyard.integrations.flashinfer import MoeAlltoAll

IDS = torch.tensor([[0, 4], [3, -1]], dtype=torch.int32)
ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def by_functions(group):
    """Round trips of two layers, through the functions and through the class."""
    place = (group.rank, group.size)
    workspace = MoeAlltoAll.get_workspace(1 << 16, *place, 8, None, 3, group=group)["workspace"]
    metainfo = flashinfer.moe_a2a_initialize(workspace, *place, 8, 3)
    a2a = make(group)
    found = []
    for top_k, num_experts, in_workspace in ((2, 5, False), (1, 7, True), (2, 5, True)):
        ids = IDS[:, :top_k].contiguous()
        stats = torch.full((3,), group.rank, dtype=torch.int32)
        received, offset, gathered = flashinfer.moe_a2a_dispatch(
            ids,
            [ROWS, ids],
            workspace,
            metainfo,
            4,
            *place,
            top_k,
            num_experts,
            None,
            stats,
            recv_view_cache={},
        )
        flashinfer.moe_a2a_sanitize_expert_ids(received[1], workspace, metainfo, group.rank, -5)
        results = received[0] * 10
        if in_workspace:
            end = offset + group.size * 4 * 2 * 4
            wrap = flashinfer.moe_a2a_wrap_payload_tensor_in_workspace
            results = wrap(workspace, [group.size, 4], offset, end, torch.float32).copy_(results)
        y_TH = flashinfer.moe_a2a_combine(
            results, 2, workspace, metainfo, 4, *place, top_k, offset, payload_in_workspace=in_workspace
        )
        layer = a2a if (top_k, num_experts) == (2, 5) else make(group, top_k=top_k, num_experts=num_experts)
        same = layer.dispatch(ids, [ROWS, ids], 4, -5, 1)
        assert all(torch.equal(mine, other) for mine, other in zip(received, same, strict=True))
        assert torch.equal(y_TH, layer.combine(same[0] * 10, 4))
        found.append((received[1].tolist(), gathered.tolist()))
    return found


def test_functions_do_what_the_class_does():
    stats = [[0, 0, 0], [1, 1, 1]]
    # Of 5 experts, 3 are on rank 0; of 7, 4 are.
    two, one = [-5, -5], [-5]
    first = [[[0, 4], two, two, two]] * 2, [[[0], [3], one, one]] * 2
    second = [[[0, 4], [3, -1], two, two]] * 2, [[one, one, one, one]] * 2
    for (with_two, with_one), found in zip((first, second), on_ranks(2, by_functions), strict=True):
        assert found == [(with_two, stats), (with_one, stats), (with_two, stats)]


def with_handles_of_an_instance(group):
    a2a = make(group, num_experts=5)
    handles = (a2a.workspace, a2a.metainfo)
    rank, size = group.rank, group.size
    received, offset, stats = flashinfer.moe_a2a_dispatch(IDS, [ROWS], *handles, 4, rank, size, 2, 5)
    twice = raised(flashinfer.moe_a2a_dispatch, IDS, [ROWS], *handles, 4, rank, size, 2, 5)
    y_TH = flashinfer.moe_a2a_combine(received[0], 2, *handles, 4, rank, size, 2, offset)
    return stats, str(twice), y_TH.tolist(), round_trip(a2a, group, [3, 4])


def test_an_instance_lends_its_handles():
    for stats, twice, y_TH, wrong in on_ranks(2, with_handles_of_an_instance):
        assert (stats, y_TH, wrong) == (None, [[2.0, 4.0], [3.0, 4.0]], [])
        assert "moe_a2a_dispatch was called twice" in twice


def refused(group):
    workspace = MoeAlltoAll.get_workspace(1, group.rank, 2, 8, None, group=group)["workspace"]
    metainfo = flashinfer.moe_a2a_initialize(workspace, group.rank, 2, 8)
    place = (group.rank, 2)
    combine, dispatch = flashinfer.moe_a2a_combine, flashinfer.moe_a2a_dispatch
    wrap = flashinfer.moe_a2a_wrap_payload_tensor_in_workspace
    other = flashinfer.moe_a2a_initialize(make(group).workspace, *place, 8)
    results = torch.ones(2, 4, 3)

    def dispatched():
        return dispatch(IDS, [ROWS, IDS], workspace, metainfo, 4, *place, 2, 5)

    errors = [
        raised(MoeAlltoAll.get_workspace, 1, *place, 8, None),
        raised(flashinfer.moe_a2a_initialize, torch.zeros(2, 10, dtype=torch.uint8), *place, 8),
        raised(flashinfer.moe_a2a_initialize, workspace, 0, 3, 8),
        raised(flashinfer.moe_a2a_initialize, workspace, *place, 8, backend="cake"),
        raised(dispatch, IDS, [ROWS], workspace, other, 4, *place, 2, 5),
        raised(combine, results, 2, workspace, metainfo, 4, *place, 2, 0),
        raised(wrap, workspace, [2, 4], 0, 64, torch.float32),
    ]
    received, _, _ = dispatched()
    errors += [
        raised(wrap, workspace, [2, 4], 128, 192, torch.float32),
        raised(flashinfer.moe_a2a_sanitize_expert_ids, received[1][0], workspace, metainfo, group.rank, -1),
        # What is wrong on rank 1 reaches rank 0.
        raised(combine, results, 2 + group.rank, workspace, metainfo, 4, *place, 2, 0),
    ]
    dispatched()
    errors.append(raised(combine, results, 2, workspace, metainfo, 4, *place, 2, 64 * group.rank))
    dispatched()
    return [str(error) for error in errors], combine(results, 2, workspace, metainfo, 4, *place, 2, 0)[
        :, 0
    ].tolist()


def test_what_makes_no_sense_is_refused_by_name():
    expected = [
        "get_workspace was called without a group",
        "workspace is a tensor uint8[2, 10]; expected a workspace of tokenyard's",
        "ep_size is 3; expected 2",
        "backend is 'cake'",
        "metainfo is of another workspace",
        "moe_a2a_combine was called before a dispatch",
        "a payload was asked for before a dispatch",
        "bytes 128 to 192 of a workspace, as [2, 4]",
        "expert_ids is a tensor int32[4, 2]; expected ids that were received: [2, 4, 2]",
        "local_num_tokens is 3; expected 2, as in the dispatch before",
        "combine_payload_offset is 64; expected 0",
    ]
    for errors, y_T in on_ranks(2, refused):
        assert y_T == [2.0, 1.0]
        for error, text in zip(errors, expected, strict=True):
            assert text in error


# -- Checkpoints -------------------------------------------------------------------------------------------


def checkpoint(group):
    a2a = make(group, hidden_size=6, eplb_stats_num_experts=2)
    wrong = round_trip(a2a, group, [3, 4])
    a2a.dispatch(IDS, [ROWS], 4)
    early = raised(a2a.checkpoint_prepare)
    a2a.combine(torch.ones(2, 4, 3), 4)
    a2a.checkpoint_restore(None)  # nothing was given back: nothing is done
    for _ in range(2):
        a2a.checkpoint_prepare()
    away = raised(a2a.dispatch, IDS, [ROWS], 4)
    errors = [early, away, raised(a2a.combine, torch.ones(2, 4, 3), 4), raised(a2a.checkpoint_restore, None)]
    if group.rank == 0:
        errors.append(raised(a2a.checkpoint_restore, group.subgroup([0])))
    for _ in range(2):
        a2a.checkpoint_restore(group)
    wrong += round_trip(a2a, group, [1, 2], in_workspace=True)
    a2a.dispatch(IDS, [ROWS], 4, eplb_local_stats=torch.ones(2, dtype=torch.int32))
    return wrong, [str(error) for error in errors], a2a.eplb_gathered_stats.tolist()


def test_a_workspace_that_was_given_back_for_a_checkpoint():
    for rank, (wrong, errors, stats) in enumerate(on_ranks(2, checkpoint)):
        assert wrong == []
        assert stats == [[1, 1], [1, 1]]
        assert "between a dispatch and its combine" in errors[0]
        assert all("given back by checkpoint_prepare" in error for error in errors[1:3])
        assert "comm_backend is NoneType" in errors[3]
        assert rank or "ep_size is 2; expected 1, as the group says" in errors[4]


def test_no_checkpoint_on_gpus(monkeypatch):
    def on_gpu(group):
        a2a = make(group)
        monkeypatch.setattr(a2a, "group", SimpleNamespace(device=torch.device("cuda")))
        return raised(a2a.checkpoint_prepare)

    (error,) = ty.launch(1, on_gpu)
    assert "checkpoint_prepare was called on GPUs" in str(error)
    assert "make and capture a new one" in error.fix


def test_a_communicator_of_another_kind_is_refused():
    for config in (None, SimpleNamespace(comm_backend=None), SimpleNamespace(comm_backend=object())):
        with pytest.raises(InputError, match="there is no group, and mnnvl_config"):
            MoeAlltoAll(None, 8, 2, 5, mnnvl_config=config)


def of_a_communicator(group):
    """The group of torch.distributed that FlashInfer's communicators hold."""
    config = SimpleNamespace(comm_backend=SimpleNamespace(_group=group._process_group))
    a2a = MoeAlltoAll(SimpleNamespace(moe_ep_size=2, moe_ep_rank=group.rank), 8, 2, 5, mnnvl_config=config)
    wrong = round_trip(a2a, a2a.group, [3, 4])
    made = a2a.group
    a2a.close()
    return wrong, made is not group, type(raised(a2a.dispatch, IDS, [ROWS], 4)).__name__


def test_ranks_of_a_communicator():
    found = on_ranks(2, of_a_communicator, ranks="processes")
    assert found == [([], True, "HandleError")] * 2
