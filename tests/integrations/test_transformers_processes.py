"""Ranks as processes: the same tokens, and no more memory than a rank has to have."""

import pytest
import torch

from tests.integrations.transformers_models import generated, logits_of, tiny_model
from tests.integrations.transformers_ranks import RUNS, everything
from tests.models import on_ranks
from tokenyard.checkpoints import open_checkpoint

WORLD = 4
MODELS = ("qwen3_moe", "deepseek_v3")
# 472 MB of experts and 11 MB of what all ranks hold: a percent is more than what Python adds here and there, and ten
# are more than what the system adds now and then.
LARGE = {
    "hidden_size": 512,
    "moe_intermediate_size": 320,
    "num_hidden_layers": 10,
    "num_experts": 48,
    "mlp_only_layers": [],
    "vocab_size": 4096,
}


def saved(folder, family, dtype=torch.float32, **changes):
    """A model in a folder of its own."""
    tiny_model(family, dtype, **changes).save_pretrained(folder)
    return folder


@pytest.mark.long  # ranks that are threads do the same in the other files, and in docs/guide/transformers.md
def test_processes_generate_what_one_rank_does_and_hold_their_share(tmp_path):
    """One test, since importing Transformers takes each process seconds."""
    folders = {family: saved(tmp_path / family, family) for family in MODELS}
    large = saved(tmp_path / "large", "qwen3_moe", torch.bfloat16, **LARGE)
    ranks = on_ranks(WORLD, everything, folders, large, ranks="processes", deadline=60.0)
    for family, exchange in RUNS:
        check_tokens(tiny_model(family), [found[family, exchange] for found, _ in ranks])
    check_memory(open_checkpoint(large), [memory for _, memory in ranks])


def check_tokens(whole, ranks):
    for rank, (ids, tokens, logits) in enumerate(ranks[:3]):
        assert torch.equal(tokens, generated(whole, ids, 5 + rank))
        torch.testing.assert_close(logits, logits_of(whole, ids), rtol=1e-5, atol=2e-5)
    assert ranks[3] == (None, None, None)


def check_memory(checkpoint, ranks):
    """Resident memory of a process at its peak, from before loading to after a pass, against what it has to hold."""
    for memory in ranks:
        assert memory["experts"] * WORLD == checkpoint.experts_nbytes
        assert memory["shared"] <= checkpoint.shared_nbytes * 1.01
        needed = memory["shared"] + memory["experts"] + memory["workspace"]
        assert memory["tensors"] <= memory["shared"] + memory["experts"] + 4096
        assert memory["peak"] <= 1.15 * needed
        # The measure sees something, and a rank with all experts would be far over.
        assert memory["peak"] >= 0.9 * (memory["shared"] + memory["experts"])
        assert checkpoint.experts_nbytes > 1.5 * needed
