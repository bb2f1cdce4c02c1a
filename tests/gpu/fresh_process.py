"""A user's program on a GPU: `launch`, a plan, a layer on the device, calls with many numbers of rows.

`python -m tests.gpu.fresh_process '{"world": 4, "ranks": "threads"}'` runs it in a fresh process, and prints JSON:
seconds, which kernels were compiled or loaded after the layer was on its device, and how far results are from products
in float32. Nothing is warmed, and no variable is set.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, fields

import torch
import triton

import tokenyard as ty
from tokenyard.conformance.cases import random_weights


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One program."""

    world: int = 1
    ranks: str = "threads"
    exchange: str = "one_sided"
    experts: str = "fused"
    weights: str = "bf16"
    wire: str | None = None
    inner: str | None = None
    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 8
    top_k: int = 2
    max_tokens: int = 1024
    numbers: tuple[int, ...] = (1, 8, 64, 128, 300, 777)  # tokens of a rank
    drawn: int = 0  # further numbers of tokens, drawn at random
    choices: bool = False
    adopt: bool = False
    deadline: float = 30.0
    seed: int = 0

    @property
    def spec(self) -> ty.LayerSpec:
        return ty.LayerSpec(
            name="moe",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            weights=self.weights,
            experts=self.experts,
            **({} if self.wire is None else {"wire": self.wire}),
            **({} if self.inner is None else {"inner": self.inner}),
            **({"sum": "choices"} if self.choices else {}),
        )


class Counted:
    """Counts what Triton compiles (or reads from its cache), and loads, from now on."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.loaded: list[str] = []
        runtime = triton.knobs.runtime
        self._hooks = runtime.jit_post_compile_hook
        runtime.jit_post_compile_hook = lambda **given: self.compiled.append(given["repr"][:200])
        runtime.kernel_load_start_hook.add(lambda *given: self.loaded.append(str(given[2])))


def expected(weights: ty.ExpertWeights, x_TH: torch.Tensor, routes: ty.Routes) -> torch.Tensor:
    """Products in float32, without an exchange."""
    plain = weights.decode(torch.float32)
    y_TH = torch.zeros(x_TH.shape, device=x_TH.device)
    for expert in range(len(plain.w13)):
        token_N, choice_N = (routes.topk_ids_TK == expert).nonzero(as_tuple=True)
        if len(token_N):
            gate, up = (x_TH[token_N].float() @ plain.w13[expert].to(x_TH.device).T).chunk(2, dim=1)
            result = (torch.nn.functional.silu(gate) * up) @ plain.w2[expert].to(x_TH.device).T
            y_TH.index_add_(0, token_N, result * routes.topk_weights_TK[token_N, choice_N, None])
    return y_TH


def rank_main(group: ty.Group, trial: Trial) -> dict[str, object]:
    start = time.monotonic()
    plan = ty.plan([trial.spec], group, exchange=trial.exchange)
    planned = time.monotonic()
    everything = random_weights(trial.spec, trial.seed)
    own = everything.select(plan.local_experts("moe"))
    if trial.adopt:
        own = ty.MoELayer(plan, "moe", own).cuda().experts.weights
    layer = ty.MoELayer(plan, "moe", own, adopt=trial.adopt).cuda()
    built = time.monotonic()
    counted = Counted() if group.rank == 0 or trial.ranks == "processes" else None
    group.barrier()
    draw = random.Random(trial.seed)
    numbers = [*trial.numbers, *(draw.randint(0, trial.max_tokens) for _ in range(trial.drawn))]
    furthest, seconds = 0.0, []
    for nth, number in enumerate(numbers):
        tokens = number if nth < len(trial.numbers) else random.Random(number + group.rank).randint(0, number)
        generator = torch.Generator("cuda").manual_seed(nth * 100 + group.rank)
        x_TH = torch.randn(tokens, trial.hidden_size, device="cuda", generator=generator).bfloat16()
        scores_TE = torch.rand(tokens, trial.num_experts, device="cuda", generator=generator)
        weights_TK, ids_TK = scores_TE.topk(trial.top_k)
        routes = ty.Routes(topk_ids_TK=ids_TK.int(), topk_weights_TK=weights_TK)
        torch.cuda.current_stream().synchronize()
        begun = time.monotonic()
        y_TH = layer(x_TH, routes)
        torch.cuda.current_stream().synchronize()
        seconds.append(time.monotonic() - begun)
        if nth < 8 and tokens:
            exact_TH = expected(everything, x_TH, routes)
            furthest = max(furthest, float((y_TH.float() - exact_TH).norm() / exact_TH.norm()))
        assert bool(y_TH.isfinite().all())
    text = str(plan)
    group.barrier()
    plan.close()
    return {
        "plan": planned - start,
        "layer": built - planned,
        "first call": seconds[0],
        "slowest later call": max(seconds[1:], default=0.0),
        "calls": len(seconds),
        "compiled": [] if counted is None else counted.compiled,
        "loaded": [] if counted is None else counted.loaded,
        "error": furthest,
        "text": text.splitlines()[-1].strip(),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    known = {field.name for field in fields(Trial)}
    assert given.keys() <= known, given.keys() - known
    trial = Trial(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )
    start = time.monotonic()
    try:
        found = ty.launch(
            trial.world, rank_main, trial, ranks=trial.ranks, device="cuda", deadline=trial.deadline
        )
        result: dict[str, object] = {"ranks": found}
    except Exception as error:  # told to whoever started this program
        result = {"failed": f"{type(error).__name__}: {str(error)[:1500]}"}
    print(json.dumps({"trial": given, "seconds": time.monotonic() - start, **result}))


if __name__ == "__main__":
    main()
