"""Train the model that ships with tokenyard, in minutes on one GPU.

    python3 -m tokenyard_lab.training.train --seconds 165 --out model --log train.jsonl

Worker processes make fresh problems without end, so no problem is seen twice (but for chance), and none that is
held out is ever seen (`tokenyard_lab.training.problems`). The loss counts the solution only. Experts see their rows
with noise of up to 10% of a row's size: a model that is to run on coarse wires should not hang on the last bits of a
row. The learning rate follows the clock (or, with `--steps`, the steps): it reaches zero when the time is over.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Full

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tokenyard_lab.training.network import Parameters, Shape, forward, generate, initialize, save
from tokenyard_lab.training.problems import held_out, read_answer, stream
from tokenyard_lab.training.vocabulary import END, PAD, encode, vocabulary

Batch = tuple["np.ndarray", "np.ndarray"]
MOST_WRITTEN = 128
PAD_ID, END_ID = vocabulary()[PAD], vocabulary()[END]


def make_batches(queue: Queue[Batch], seed: int, batch: int, length: int) -> None:
    """A worker: fill the queue with batches of (tokens [batch, length], where each solution starts)."""
    problems = stream("training", seed)
    while True:
        tokens = np.full((batch, length), PAD_ID, dtype=np.int16)
        starts = np.empty(batch, dtype=np.int16)
        row = 0
        while row < batch:
            problem = next(problems)
            question, solution = encode(problem.question), encode(problem.solution)
            ids = [*question, *solution, END_ID]
            if len(ids) <= length:
                tokens[row, : len(ids)] = ids
                starts[row] = len(question)
                row += 1
        while True:
            try:
                queue.put((tokens, starts), timeout=5)
                break
            except Full:
                if os.getppid() == 1:  # whoever started this worker is gone
                    return


class Batches:
    """Batches from worker processes, in an order that does not depend on their speed."""

    def __init__(self, workers: int, seed: int, batch: int, length: int) -> None:
        context = multiprocessing.get_context("fork")
        self._queues: list[Queue[Batch]] = [context.Queue(maxsize=6) for _ in range(workers)]
        self._workers: list[BaseProcess] = [
            context.Process(target=make_batches, args=(queue, seed + 1 + index, batch, length), daemon=True)
            for index, queue in enumerate(self._queues)
        ]
        for worker in self._workers:
            worker.start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for queue in self._queues:
                yield queue.get()

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


def loss_of(
    parameters: Parameters, tokens: Tensor, starts: Tensor, noise: Tensor, shape: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cross-entropy on the solutions, and the unevenness of the experts."""
    weights = {name: value.to(dtype) for name, value in parameters.items()}
    logits, uneven = forward(weights, tokens, shape, noise)
    targets = tokens[:, 1:]
    places = torch.arange(1, tokens.shape[1], device=tokens.device)
    wanted = (places >= starts[:, None]) & (targets != PAD_ID)
    each = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none")
    return (each * wanted.flatten()).sum() / wanted.sum(), uneven


def accuracy(
    parameters: Parameters, shape: Shape, count: int, dtype: torch.dtype, show: int = 0
) -> tuple[float, float]:
    """The share of held-out problems whose answer, and whose whole solution, is right; greedy, as it is shipped."""
    weights = {name: value.detach().bfloat16().to(dtype) for name, value in parameters.items()}
    problems = held_out(count)
    answers = solutions = 0
    token_of = {index: token for token, index in vocabulary().items()}
    for first in range(0, count, 500):
        chunk = problems[first : first + 500]
        written = generate(weights, [encode(problem.question) for problem in chunk], shape, MOST_WRITTEN)
        for problem, ids in zip(chunk, written, strict=True):
            text = " ".join(token_of[index] for index in ids)
            answers += read_answer(text) == problem.answer
            solutions += ids == encode(problem.solution)
            if show > 0:
                print(problem.question, "\n  wanted", problem.solution, "\n  wrote ", text, file=sys.stderr)
                show -= 1
    return answers / count, solutions / count


def train(options: argparse.Namespace) -> float:
    started = time.monotonic()
    shape = Shape()
    if options.tiny:
        shape = Shape(hidden=96, layers=3, heads=4, kv_heads=4, experts=16, expert_width=32)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batches = Batches(
        options.workers, options.seed * 1000, options.batch, options.length
    )  # before CUDA is touched
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    parameters = initialize(shape, device, options.seed)
    print(f"{sum(p.numel() for p in parameters.values()):,} parameters", file=sys.stderr)
    decayed = [p for p in parameters.values() if p.dim() > 1]
    plain = [p for p in parameters.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    compute = torch.compile(loss_of, dynamic=False, fullgraph=True) if options.compile else loss_of
    log = Path(options.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    out = Path(options.out)
    every_log, every_score, every_save = (options.seconds / part for part in (40, 8, 5))
    next_log, next_score, next_save = 0.0, every_score, every_save
    first_done = reached = 0.0
    with log.open("w") as lines:

        def note(**values: object) -> None:
            lines.write(json.dumps(values) + "\n")
            lines.flush()
            print(json.dumps(values), file=sys.stderr)

        note(
            seed=options.seed,
            shape=vars(shape),
            torch=torch.__version__,
            batch=options.batch,
            rate=options.rate,
        )
        for index, (tokens_np, starts_np) in enumerate(batches):
            now = time.monotonic() - started
            if options.steps:
                progress = index / options.steps
            else:
                progress = (now - first_done) / (options.seconds - first_done) if first_done else 0.0
            if progress >= 1:
                break
            rate = options.rate * min(1.0, (index + 1) / options.warmup) * _decay(progress)
            for group in optimizer.param_groups:
                group["lr"] = rate
            tokens = torch.from_numpy(tokens_np).to(device, torch.int64, non_blocking=True)
            starts = torch.from_numpy(starts_np).to(device, torch.int64, non_blocking=True)
            noise = torch.rand(options.batch, device=device) * options.noise
            loss, uneven = compute(parameters, tokens, starts, noise, shape, dtype)
            (loss + options.balance * uneven).backward()
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            last = index + 1 == options.steps
            if index % 16 and not last:
                continue  # the device is left alone in between
            value = float(loss.detach())
            now = time.monotonic() - started
            if index == 0:
                first_done = now
            if not math.isfinite(value):
                raise SystemExit(f"step {index}: the loss is {value}")
            if now >= next_log or last:
                note(
                    step=index,
                    seconds=round(now, 1),
                    loss=round(value, 5),
                    uneven=round(float(uneven.detach()), 3),
                    rate=rate,
                )
                next_log = now + every_log
            if now >= next_score:
                answers, solutions = accuracy(parameters, shape, options.scored, dtype)
                seconds = round(time.monotonic() - started, 1)
                note(step=index, seconds=seconds, held_out_answers=answers, held_out_solutions=solutions)
                next_score = now + every_score
            if now >= next_save:
                save(parameters, shape, out)
                next_save = now + every_save
        save(parameters, shape, out)
        batches.close()
        reached, solutions = accuracy(parameters, shape, options.scored_last, dtype, show=3)
        seconds = round(time.monotonic() - started, 1)
        note(
            steps=index,
            seconds=seconds,
            problems=options.scored_last,
            held_out_answers=reached,
            held_out_solutions=solutions,
        )
        # Experts must matter: without them nothing works, and their results in another size cost something.
        for factor in (0.0, 0.5, 2.0, 4.0):
            scaled = {
                name: value.detach() * (factor if name.endswith("down_proj") else 1.0)
                for name, value in parameters.items()
            }
            answers, _ = accuracy(scaled, shape, options.scored, dtype)
            note(experts_times=factor, problems=options.scored, held_out_answers=answers)
    return reached


def _decay(progress: float) -> float:
    """Full rate for a fifth of the time, then a cosine down to zero."""
    return 0.5 * (1 + math.cos(math.pi * max(0.0, (progress - 0.2) / 0.8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300, help="wall time, all but the last measurement")
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps instead, however long")
    parser.add_argument("--out", default="model", help="folder of the checkpoint")
    parser.add_argument("--log", default="train.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a smaller model, to try the script on a CPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--length", type=int, default=168, help="longer problems are left out (1 in 10,000)")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--scored", type=int, default=500)
    parser.add_argument("--scored-last", type=int, default=2000)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.compile = not on_cpu if options.compile is None else options.compile
    options.workers = (1 if on_cpu else 14) if options.workers is None else options.workers
    options.batch = (32 if on_cpu else 512) if options.batch is None else options.batch
    if options.tiny:
        options.scored, options.scored_last = min(options.scored, 50), min(options.scored_last, 100)
    train(options)


if __name__ == "__main__":
    main()
