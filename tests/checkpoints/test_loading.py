"""Loading on all ranks: each its own experts, and one that fails ends the call for all, at once."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import references
from tests.checkpoints.small import Small, same_bits, save
from tokenyard import LayerSpec, MoELayer, Routes, launch, plan
from tokenyard.checkpoints import load_experts, open_checkpoint, open_together
from tokenyard.errors import CheckpointError, InputError, PeerFailed
from tokenyard.formats import QuantizedMatrix
from tokenyard.group import Disagreement
from tokenyard.routing import Placement

MODEL = Small(num_experts=7)


@pytest.fixture
def folders(tmp_path):
    """A copy of the same checkpoint for each of four ranks, as on four hosts."""
    config = MODEL.config() | {"quantization_config": references.compressed_config("mxfp4")}
    first = save(tmp_path / "0", MODEL.tensors(lambda w: references.compress("mxfp4", w)), config, files=2)
    others = [shutil.copytree(first, tmp_path / str(rank)) for rank in range(1, 4)]
    return [first, *others]


@pytest.mark.parametrize("placement", ["contiguous", "round_robin", [[6], [0, 1, 2], [], [3, 4, 5, 6]]])
def test_each_rank_gets_the_experts_that_it_owns(folders, placement):
    table = placement if isinstance(placement, str) else Placement.explicit(7, placement)

    def rank(group):
        checkpoint = open_together(folders[group.rank], group)
        return load_experts(checkpoint, "model.layers.1.mlp", group, table), checkpoint.bytes_read

    whole = open_checkpoint(folders[0]).experts(1)
    everything = open_checkpoint(folders[0]).layer(1).nbytes
    placed = table if isinstance(table, Placement) else getattr(Placement, placement)(7, 4)
    for number, (weights, read) in enumerate(launch(4, rank, ranks="threads")):
        mine = list(placed.local_experts(number))
        assert 7 * read == len(mine) * everything
        for ours, all_of_it in ((weights.w13, whole.w13), (weights.w2, whole.w2)):
            assert isinstance(ours, QuantizedMatrix)
            expected = all_of_it.select(mine)
            assert all(same_bits(ours.payloads[name], expected.payloads[name]) for name in ours.payloads)


def sums_of(group, folder):
    weights = load_experts(open_together(folder, group), 0, group)
    return weights.w2.decode().sum(dim=(1, 2)).tolist()


def test_in_processes(folders):
    sums = [number for mine in launch(2, sums_of, folders[0], ranks="processes") for number in mine]
    assert sums == open_checkpoint(folders[0]).experts(0).w2.decode().sum(dim=(1, 2)).tolist()


def outcome(group, function):
    """What a rank raised, when, and whether the group still works afterwards."""
    started = time.monotonic()
    try:
        function(group)
    except Exception as error:
        waited = time.monotonic() - started
        group.barrier()
        return error, waited
    return None, 0.0


def assert_all_end(results, failed: int, kind: type, words: str) -> None:
    for rank, (error, waited) in enumerate(results):
        assert waited < 20
        assert error.rank == rank
        if rank == failed:
            assert isinstance(error, kind)
        else:
            assert isinstance(error, PeerFailed)
            assert error.peer == failed
        assert words in str(error)


def test_a_damaged_file_on_one_rank_ends_the_opening_for_all(folders):
    path = folders[2] / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    results = launch(
        4, lambda group: outcome(group, lambda g: open_together(folders[g.rank], g)), ranks="threads"
    )
    assert_all_end(results, 2, CheckpointError, "it was cut off")


def test_nan_scales_on_one_rank_end_the_loading_for_all_before_weights_are_read(folders):
    for path in folders[3].glob("*.safetensors"):
        held = load_file(path)
        for name, tensor in held.items():
            if ".1.mlp.experts.6." in name and name.endswith("weight_scale"):
                tensor[0, 0] = 255
        save_file(held, path)
    read = {}

    def load(group):
        checkpoint = open_together(folders[group.rank], group)
        try:
            load_experts(checkpoint, 1, group)
        finally:
            read[group.rank] = checkpoint.bytes_read

    results = launch(4, lambda group: outcome(group, load), ranks="threads")
    assert_all_end(results, 3, CheckpointError, "layers.1.mlp.experts.6.")
    everything = open_checkpoint(folders[0]).layer(1).nbytes
    assert max(read.values()) < everything / 4 / 8  # scales only


@pytest.mark.parametrize("failed", [0, 3])
def test_any_error_of_one_rank_ends_it_for_all(folders, failed):
    def load(group):
        checkpoint = open_together(folders[0], group)
        placement = Placement.contiguous(5, 4) if group.rank == failed else "contiguous"
        load_experts(checkpoint, 0, group, placement)

    results = launch(4, lambda group: outcome(group, load), ranks="threads")
    assert_all_end(results, failed, InputError, "a placement of 5 experts on 4 ranks")


def test_ranks_with_different_checkpoints_all_raise(folders, tmp_path):
    other = Small(num_experts=7, intermediate_size=64)
    config = other.config() | {"quantization_config": references.compressed_config("mxfp4")}
    folders[1] = save(tmp_path / "other", other.tensors(lambda w: references.compress("mxfp4", w)), config)
    results = launch(
        4, lambda group: outcome(group, lambda g: open_together(folders[g.rank], g)), ranks="threads"
    )
    assert all(isinstance(error, Disagreement) for error, _ in results)
    placements = ["contiguous", "contiguous", "round_robin", "contiguous"]

    def load(group):
        load_experts(open_checkpoint(folders[0]), 0, group, placements[group.rank])

    results = launch(4, lambda group: outcome(group, load), ranks="threads")
    assert all(isinstance(error, Disagreement) and "rank 2 has" in str(error) for error, _ in results)


def test_a_layer_computes_with_what_was_loaded(folders):
    """From the files through a plan on four ranks to a result, beside one rank that holds all."""
    layer = open_checkpoint(folders[0]).layers[0]
    spec = LayerSpec(
        name=layer.name, hidden_size=layer.hidden_size, intermediate_size=layer.intermediate_size,
        num_experts=layer.num_experts, top_k=2, weights=layer.weights,
    )  # fmt: skip

    def rank(group):
        checkpoint = open_together(folders[group.rank], group)
        agreed = plan([spec], group, max_tokens=5)
        moe = MoELayer(agreed, spec.name, load_experts(checkpoint, spec.name, group))
        generator = torch.Generator().manual_seed(0)
        x_TH = torch.randn(5, spec.hidden_size, generator=generator).bfloat16()
        ids = torch.tensor([[0, 6], [1, 2], [3, 5], [4, 0], [6, 2]])
        return moe(x_TH, Routes(topk_ids_TK=ids, topk_weights_TK=torch.full((5, 2), 0.5))).float()

    (alone,) = launch(1, rank, ranks="threads")
    for y in launch(4, rank, ranks="threads"):
        assert (y - alone).norm() <= 2**-7 * alone.norm()
    assert alone.norm() > 0
