"""A model's experts over several processes: through tokenyard, and through Transformers' own expert parallelism.

Both load one checkpoint (a Qwen3-MoE with random bf16 weights, made here), and answer one batch: a pass over the
prompts (prefill), then some passes of one token per sequence with a cache (decode). Results are compared first. Rounds
alternate between the two, ranks meet before each, and the slowest rank counts. The figures are the median of the ratios
of each round, and their quartiles.

Transformers offers several layouts, and which is fastest depends on the machine. Each is tried, with each of its own
implementations of experts, and the fastest is the peer of the rounds:

    dispatch, FSDP          each rank its own sequences, attention's weights gathered layer by layer; all-to-all
    dispatch, replicated    every rank all sequences, attention computed by all; each rank sends its part of the rows
    dispatch, split         every rank all sequences, attention split by heads
    all-reduce, replicated  every rank all sequences; each computes its experts for all rows, and results are summed

The same peer with our experts in the place of its own shows how much of the difference comes from the exchange. The
model is also measured without any exchange: every rank holds all experts, and answers its own sequences alone.

The floor is the arithmetic of the model's products over the best rate that this machine shows for a plain square
product on all its cores, or the bytes of the weights that a pass must read over the rate of reading, whichever takes
longer. Nothing else is in it: no attention scores, no norms, no exchange.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.group import Group, launch
from tokenyard.machine_rates import host_clock
from tokenyard.temporary_folders import temporary_folder
from tokenyard_lab.bench.experts_peers import check_transformers
from tokenyard_lab.bench.machine_rates import Rates, measure_rates
from tokenyard_lab.bench.rank_rounds import slowest_ms
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.evaluation.models import load_whole, quietly

OURS, PEER = "ours", "Transformers"
NOTE = (
    "prefill: a pass over the prompts; decode: a token of each sequence; with our experts: the peer's exchange and our "
    "experts; no exchange: every rank holds all experts"
)
VOCABULARY, HEAD = 1024, 64  # sizes of the model

# Version 5.19 has `DistributedConfig(ep_size=…)` with the layouts that are compared here.
OLDEST_PEER = (5, 19)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model and the batch."""

    ranks: int = 4
    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 32
    top_k: int = 4
    num_layers: int = 6
    sequences: int = 4  # of each rank
    length: int = 32  # of a prompt
    steps: int = 8  # tokens that are decoded
    rounds: int = 7
    exchange: str = "one_sided"


@dataclass(frozen=True)
class Seconds:
    """The seconds of one round on one rank."""

    prefill: float
    decode: float


def measure_transformers_ep(work: Workload) -> list[Record]:
    """Measure, and return a record for prefill and one for decode: ms of a pass, or of one token of every sequence.

    `Transformers / ours` is above 1 where ours is faster, the median over rounds.
    """
    _check_peer(work)
    with temporary_folder("tokenyard-bench-") as folder:
        _save_model(work, folder)
        by_rank = launch(work.ranks, _rank_main, work, folder, ranks="processes", deadline=300.0)
    rates = measure_rates(torch.device("cpu"), host_clock(4))
    details = {
        "peer": by_rank[0]["peer"],
        "difference": max(rank["difference"] for rank in by_rank),
        **rates.as_setup(),
    }
    records = []
    for phase, passes, tokens in (("prefill", 1, work.length), ("decode", work.steps, 1)):
        ms = {
            name: slowest_ms(
                [getattr(one, phase) / passes for one in rank["seconds"][name]] for rank in by_rank
            )
            for name in by_rank[0]["seconds"]
        }
        others = {name: found for name, found in ms.items() if name != OURS}
        medians = {f"{name}_ms": statistics.median(found) for name, found in others.items() if name != PEER}
        records.append(
            Record(
                parameters={"phase": phase},
                ours=Spread.of(ms[OURS]),
                floor=Spread(1e-3 * _floor(work, work.ranks * work.sequences * tokens, rates)),
                peers={PEER: Spread.of(ms[PEER])},
                ratios={f"{name} / ours": Spread.ratio(found, ms[OURS]) for name, found in others.items()},
                details=details | medians,
            )
        )
    return records


def _floor(work: Workload, tokens: int, rates: Rates) -> float:
    """µs that a pass over this number of tokens, of all ranks together, takes at least."""
    attention = work.hidden_size * HEAD * 6 * work.ranks  # 2·W heads for q and o, W for k and v
    expert = 3 * work.hidden_size * work.intermediate_size
    dense = (
        work.num_layers * (attention + work.hidden_size * work.num_experts) + work.hidden_size * VOCABULARY
    )
    flops = 2 * tokens * (dense + work.num_layers * work.top_k * expert)
    # Every rank reads its own copy of the dense weights; of the experts, at least those of one token are read.
    weights = 2 * (work.ranks * dense + work.num_layers * work.top_k * expert)
    return max(flops / rates.product, weights / rates.read)


# --- Each rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to answer the batch: a model on this rank, and its share of the sequences."""

    model: Any
    batch: Tensor  # the sequences that this rank's model is given
    own: slice  # which of these sequences are this rank's own
    steps: int
    experts: str | None = None  # the implementation of experts; None: they are ours, and sharded

    def answer(self) -> tuple[Seconds, Tensor]:
        """Make a pass over the prompts, and decode some tokens; return seconds, and logits of this rank's prompts."""
        if self.experts is not None:
            self.model.set_experts_implementation(self.experts)
        with torch.no_grad():
            started = time.perf_counter()
            output = self.model(self.batch, use_cache=True)
            prefilled = time.perf_counter()
            logits = first = output.logits
            for _ in range(self.steps):
                tokens = logits[:, -1:].argmax(dim=-1)
                output = self.model(tokens, past_key_values=output.past_key_values, use_cache=True)
                logits = output.logits
            decoded = time.perf_counter()
        return Seconds(prefilled - started, decoded - prefilled), first[self.own]


def _rank_main(group: Group, work: Workload, folder: Path) -> dict[str, Any]:
    from tokenyard.integrations.transformers import load_sharded

    whole = load_whole(folder)
    batch = _prompts(work)
    own = slice(group.rank * work.sequences, (group.rank + 1) * work.sequences)

    def alone(model: Any, experts: str | None) -> Candidate:
        return Candidate(model=model, batch=batch[own], own=slice(None), steps=work.steps, experts=experts)

    max_tokens = work.sequences * work.length
    ours = alone(load_sharded(folder, group, exchange=work.exchange, max_tokens=max_tokens).model, None)
    name, peer = _fastest_peer(group, work, folder, batch, own)
    candidates = {
        OURS: ours,
        PEER: peer,
        "with our experts": replace(peer, experts="tokenyard"),
        "no exchange": alone(whole, "tokenyard"),
    }
    difference = _compare(ours.answer()[1], peer.answer()[1])
    return {"peer": name, "difference": difference, "seconds": alternate(group, candidates, work.rounds)}


def alternate(group: Group, candidates: dict[str, Candidate], rounds: int) -> dict[str, list[Seconds]]:
    """Seconds of each candidate on this rank, round by round; every second round runs in the opposite order."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate.answer()
    for number in range(rounds):
        order = list(candidates.items())
        for name, candidate in order if number % 2 == 0 else reversed(order):
            group.barrier(phase="a round of the benchmark")
            seconds[name].append(candidate.answer()[0])
    return seconds


# --- The peer ---------------------------------------------------------------------------------------------


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """The arguments of `DistributedConfig` for each layout."""
    from transformers import Qwen3MoeConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    if "ep_implementation" in DistributedConfig.__dataclass_fields__:  # from 5.23 on
        # Ranks that share a batch need a rule for each module; this one leaves the module as it is in every rank.
        kept = {
            f"model.{name}": "replicated_with_grad_allreduce" for name in Qwen3MoeConfig.base_model_tp_plan
        }
        shared = {"tp_size": ranks, "ep_size": ranks}
        return {
            "dispatch, FSDP": {"fsdp_size": ranks, "ep_size": ranks, "ep_implementation": "all_to_all"},
            "dispatch, replicated": {**shared, "tp_plan": kept, "ep_implementation": "all_to_all"},
            "dispatch, split": {**shared, "tp_plan": "auto", "ep_implementation": "all_to_all"},
            "all-reduce, replicated": {**shared, "tp_plan": kept, "ep_implementation": "all_reduce"},
        }
    masked = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
    return {
        "dispatch, FSDP": {"fsdp_size": ranks, "ep_size": ranks},
        "dispatch, replicated": {"tp_size": ranks, "tp_plan": {}, "ep_size": ranks},
        "dispatch, split": {"tp_size": ranks, "tp_plan": "auto", "ep_size": ranks},
        "all-reduce, replicated": {"tp_size": ranks, "tp_plan": {}, "ep_size": ranks, "ep_plan": masked},
    }


def _fastest_peer(
    group: Group, work: Workload, folder: Path, batch: Tensor, own: slice
) -> tuple[str, Candidate]:
    """The layout and implementation of Transformers that is fastest here, by two answers each after a first one."""
    from transformers.distributed.configuration_utils import DistributedConfig

    os.environ["LOCAL_RANK"] = str(group.rank)
    found: dict[str, tuple[float, Candidate]] = {}
    for layout, arguments in layouts(group.size).items():
        model = load_whole(folder)
        config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(**arguments))
        model = type(model).maybe_distribute_model(model, config, mesh)
        apart = "fsdp_size" in arguments
        for experts in ("grouped_mm", "eager"):
            candidate = Candidate(
                model=model,
                batch=batch[own] if apart else batch,
                own=slice(None) if apart else own,
                steps=work.steps,
                experts=experts,
            )
            candidate.answer()
            found[f"{layout}, {experts}"] = min(_trial(group, candidate) for _ in range(2)), candidate
    name = min(found, key=lambda key: found[key][0])
    return name, found[name][1]


def _trial(group: Group, candidate: Candidate) -> float:
    """Seconds of one answer, of the slowest rank."""
    phase = "a trial of the benchmark"
    group.barrier(phase=phase)
    seconds, _ = candidate.answer()
    return float(max(group.gather_json(seconds.prefill + seconds.decode, phase=phase)))


def _compare(ours: Tensor, theirs: Tensor) -> float:
    """The relative L2 difference of the logits; raise if it is too large for two runs of one model.

    Both round to bf16 in every layer, and a token whose choice of experts is nearly a tie may choose differently.
    """
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not difference < 0.1:
        raise InputError(
            f"our logits differ from Transformers' by {difference:.1%}",
            expected="the same model from both, to a few bf16 roundings",
            fix="compare only what agrees: try another version of Transformers",
        )
    return difference


def _check_peer(work: Workload) -> None:
    check_transformers("5.19", "expert parallelism is")
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST_PEER:
        raise InputError(
            f"transformers is {transformers.__version__}",
            expected="5.19 or newer, whose expert parallelism is the peer of this benchmark",
            fix="pip install --upgrade transformers",
        )
    if work.num_experts % work.ranks:
        raise InputError(
            f"{work.num_experts} experts on {work.ranks} ranks",
            expected=f"a multiple of {work.ranks}: Transformers splits experts evenly (tokenyard need not)",
            fix=f"choose {work.ranks * max(1, work.num_experts // work.ranks)} experts",
        )


# --- The model and the batch ------------------------------------------------------------------------------


def _save_model(work: Workload, folder: Path) -> None:
    """Save a Qwen3-MoE of the workload's sizes, with random weights."""
    torch.manual_seed(0)
    with quietly() as transformers:
        config = transformers.AutoConfig.for_model(
            "qwen3_moe",
            vocab_size=VOCABULARY,
            hidden_size=work.hidden_size,
            moe_intermediate_size=work.intermediate_size,
            num_hidden_layers=work.num_layers,
            num_attention_heads=2 * work.ranks,
            num_key_value_heads=work.ranks,
            head_dim=HEAD,
            num_experts=work.num_experts,
            num_experts_per_tok=work.top_k,
            norm_topk_prob=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder)


def _prompts(work: Workload) -> Tensor:
    """The sequences of all ranks."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(2, VOCABULARY, (work.ranks * work.sequences, work.length), generator=draw)
