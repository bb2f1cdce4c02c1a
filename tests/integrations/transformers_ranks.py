"""What each rank does where ranks are processes: load, generate, and measure its own memory."""

import gc
from pathlib import Path

from tests.integrations.transformers_models import logits_of, prompts
from tests.memory import resident
from tokenyard.exchange import EXCHANGES
from tokenyard.integrations.transformers import load_sharded


def forget_peak() -> None:
    """From now on, `VmHWM` is the peak since now."""
    Path("/proc/self/clear_refs").write_text("5")


# One family goes through all of them.
RUNS = [*(("qwen3_moe", exchange) for exchange in EXCHANGES), ("deepseek_v3", "one_sided")]


def generate_everywhere(group, folders):
    """Logits and tokens of the runs. Rank 3 has no prompt."""
    found = {}
    for family, exchange in RUNS:
        folder = folders[family]
        sharded = load_sharded(folder, group, exchange=exchange, max_tokens=16)
        ids = prompts(group.rank, batch=2, length=4 + 3 * group.rank) if group.rank < 3 else None
        tokens = sharded.generate(ids, max_new_tokens=5 + group.rank, do_sample=False)
        with sharded.passes() as model:
            logits = None if ids is None else logits_of(model, ids)
        found[family, exchange] = ids, tokens, logits
        sharded.close()
    return found


def load_and_run(group, folder):
    sharded = load_sharded(folder, group, max_tokens=64)
    with sharded.passes() as model:
        logits_of(model, prompts(group.rank, batch=2, length=16))
    return sharded


def measure_peak(group, folder):
    """The peak of a rank that loads a model and runs it, over what it had before, and what it has to hold.

    It did so once before: what libraries keep of all that they have computed is in memory then. (Where a CPU has
    products of bf16, oneDNN makes code for each number of rows that an expert gets: 36 MB, whatever the model's size.)
    """
    load_and_run(group, folder).close()
    gc.collect()
    group.barrier()
    before = resident("VmRSS")
    forget_peak()
    sharded = load_and_run(group, folder)
    peak = resident("VmHWM") - before
    local = [experts.layer.experts.weights.nbytes for experts in sharded.experts]
    experts = {buffer.data_ptr() for part in sharded.experts for buffer in part.buffers()}
    tensors = {t.data_ptr(): t.nbytes for t in [*sharded.model.parameters(), *sharded.model.buffers()]}
    shared = sum(nbytes for place, nbytes in tensors.items() if place not in experts)
    return {
        "peak": peak,
        "tensors": sum(tensors.values()),
        "shared": shared,
        "experts": sum(local),
        "workspace": sharded.plan.draft.workspace_bytes,
    }


def everything(group, folders, large):
    return generate_everywhere(group, folders), measure_peak(group, large)
