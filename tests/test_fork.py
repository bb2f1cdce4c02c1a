"""A process that is forked from a rank can use nothing of its parent, and its parent never notices it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tokenyard as ty
from tests.products import product
from tokenyard.elastic import take_over
from tokenyard.group import thread_groups
from tokenyard.group.own_process import OwnProcess
from tokenyard.layer import PendingBatch
from tokenyard.layer.micro_batches import overlapped
from tokenyard.planning import gather_stats

SPEC = ty.LayerSpec(
    name="moe", hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, max_tokens=8, spare_experts=1
)
# Seconds that a child may take on a busy machine. One that waits for threads or ranks would take forever.
CHILD = 60.0
DEADLINE = 60.0  # seconds: of the waits of ranks for a parent that waits for its child


def weights() -> ty.ExpertWeights:
    draw = torch.Generator().manual_seed(1)
    w13, w2 = torch.randn(4, 32, 32, generator=draw), torch.randn(4, 32, 16, generator=draw)
    return ty.ExpertWeights(w13=w13.bfloat16(), w2=w2.bfloat16())


def batch(seed: int) -> tuple[torch.Tensor, ty.Routes]:
    draw = torch.Generator().manual_seed(seed)  # ranks that are threads share torch's own
    ids_TK = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(5)])
    routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.rand(5, 2, generator=draw))
    return torch.randn(5, 32, generator=draw).bfloat16(), routes


def layer_on(group: ty.Group, **options: Any) -> ty.MoELayer:
    made = ty.plan([replace(SPEC, **options.pop("changes", {}))], group, **options)
    return ty.MoELayer(made, "moe", weights().select(made.local_experts("moe")))


def in_a_fork(do: Callable[[], Any]) -> Any:
    """What `do` returns in a forked process, which then ends at once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = do()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], CHILD)[0]:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the forked process hangs in {do}")
        with open(reader, "rb", closefd=False) as pipe:
            return json.loads(pipe.read() or '"it ended without a word"')
    finally:
        os.close(reader)
        os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """The exit code of a forked process, which is killed if it takes too long."""
    until = time.monotonic() + CHILD
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the forked process hangs")


def said(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def calls(layer: ty.MoELayer, started: PendingBatch) -> dict[str, Callable[[], Any]]:
    """Every way to use a layer, its plan, its exchange and its group."""
    made, group = layer.plan, layer.plan.group
    exchange, spec = made.exchange, layer.wiring.exchange_spec
    x_TH, routes = batch(99)
    rows = exchange.encode(spec, x_TH)
    none = torch.zeros(0, 4, dtype=torch.uint8)
    zeros = [0] * group.size
    return {
        "layer": lambda: layer(-3 * x_TH, routes),
        "layer.start": lambda: layer.start(x_TH, routes),
        "layer.unreduced": lambda: layer.unreduced(x_TH, routes),
        "layer.take_part": layer.take_part,
        "overlapped": lambda: overlapped(layer, x_TH, routes, parts=1),
        "compiled": lambda: torch.ops.tokenyard.moe_layer(
            x_TH, routes.topk_ids_TK, routes.topk_weights_TK, 1.0, [], [], None, None, [], layer.key, False
        ),
        "batch.compute": started.compute,
        "batch.finish": started.finish,
        "MoELayer": lambda: ty.MoELayer(made, "moe", weights().select(made.local_experts("moe"))),
        "plan": lambda: ty.plan([SPEC], group),
        "plan.extend": lambda: made.extend([]),
        "plan.trim": made.trim,
        "plan.fixed_shapes": made.fixed_shapes,
        "plan.synchronize": made.synchronize,
        "plan.go_on_without": lambda: made.go_on_without([1 - group.rank]),
        "plan.readmit": lambda: made.readmit([1 - group.rank]),
        "plan.stats": made.stats,
        "gather_stats": lambda: gather_stats(made),
        "plan.load": made.load,
        "plan.rebalance": made.rebalance,
        "plan.autobalance": lambda: made.autobalance(every=1),
        "plan.shrink": lambda: made.shrink([1]),
        "plan.grow": lambda: made.grow(1),
        "take_over": lambda: take_over(made),
        "plan.close": made.close,
        "exchange.dispatch": lambda: exchange.dispatch(spec, rows, routes),
        "exchange.serve": lambda: exchange.serve([spec]),
        "exchange.close": exchange.close,
        "group.barrier": group.barrier,
        "group.gather_json": lambda: group.gather_json(1),
        "group.all_gather": lambda: group.all_gather(torch.zeros(1, dtype=torch.uint8), phase="test"),
        "group.all_gather_rows": lambda: group.all_gather_rows(none, zeros, phase="test"),
        "group.all_to_all_rows": lambda: group.all_to_all_rows(none, zeros, zeros, phase="test"),
        "group.share_memory": lambda: group.share_memory(64),
        "group.subgroup": lambda: group.subgroup([group.rank]),
        "group.on_this_host": group.on_this_host,
        "group.in_background": lambda: group.in_background(group.barrier).wait(),
        "group.gone": group.gone,
        "group.lost_elsewhere": lambda: group.lost_elsewhere([1], phase="test", waited=0.0),
        "group.decide": lambda: group.decide("what", "this"),
        "group.decided": lambda: group.decided("what"),
        "group.readmit": lambda: group.readmit([1 - group.rank]),
        "group.admit": lambda: group.admit(1),
        "group.close": group.close,
    }


def check_refused(told: Any, rank: int, size: int) -> None:
    """Raise unless a forked process could make none of the calls."""
    assert isinstance(told, dict), told
    allowed = {name: message for name, message in told.items() if not message.startswith("WrongProcess: ")}
    assert not allowed
    for name in ("layer", "layer.start", "layer.unreduced", "batch.compute", "batch.finish", "compiled"):
        assert told[name].startswith(f"WrongProcess: layer 'moe', rank {rank}: the plan is of process "), name
    for message in told.values():
        assert f"rank {rank}: " in message
        assert f"is of process {os.getpid()}, and process " in message
        assert "; expected calls in the process that made it" in message
        assert "; fix: make the call in that process" in message


def spoil(layer: ty.MoELayer) -> str:
    """Write over all memory of a layer and its plan, and free it, as far as a forked process can."""
    for tensor in layer.experts.movable().values():
        tensor.view(torch.uint8).fill_(0x5A)
    held = [layer.plan.exchange.transport]
    while held:
        transport = held.pop()
        held += [value for value in vars(transport).values() if hasattr(value, "send_back")]
        workspace = getattr(transport, "_workspace", None)
        for buffer in getattr(workspace, "buffers", []):
            buffer.fill_(0x5A)
            assert int(buffer[0]) == 0x5A  # this process sees what it writes
    for module in list(layer.modules()):
        vars(module).clear()
    gc.collect()
    return "spoiled"


def rank_main(group: ty.Group, exchange: str) -> list[str]:
    layer = layer_on(group, exchange=exchange, in_flight=2)
    batches = [batch(10 * group.rank + number) for number in range(3)]
    expected = [layer(*each) for each in batches]

    def check_right(when: str) -> None:
        for each, y_TH in zip(batches, expected, strict=True):
            assert torch.equal(layer(*each), y_TH), f"rank {group.rank}: another result after {when}"

    mine = group.rank == 0
    # In the middle of a batch: its child can neither finish it nor do anything else.
    started = layer.start(*batches[0])
    if mine:
        told = in_a_fork(lambda: {name: said(call) for name, call in calls(layer, started).items()})
        check_refused(told, group.rank, group.size)
    assert torch.equal(started.finish(), expected[0])
    check_right("calls in a forked process")

    if mine:
        assert in_a_fork(lambda: spoil(layer)) == "spoiled"
    check_right("a forked process that writes into its memory, and frees it")

    # An expert forks. Its child leaves the call by an exit, which is announced to nobody.
    compute, codes = layer.experts.compute, []

    def forks(received: Any, *, finalize: bool) -> Any:
        layer.experts.compute = compute  # type: ignore[method-assign]
        pid = os.fork()
        if pid == 0:
            sys.exit(9)
        codes.append(exit_code(pid))
        return compute(received, finalize=finalize)

    if mine:
        layer.experts.compute = forks  # type: ignore[method-assign]
    check_right("an expert whose forked process exits")
    assert codes == ([9] if mine else [])

    # The child of `os.fork` leaves this function: by an exit, by a return.
    if mine:
        if (pid := os.fork()) == 0:
            sys.exit(7)
        assert exit_code(pid) == 7
        if (pid := os.fork()) == 0:
            return ["a result that nobody asked for"]
        assert exit_code(pid) == 0
    check_right("forked processes that leave the function")
    return ["right"]


@pytest.mark.parametrize(
    ("ranks", "exchange"),
    product(["processes", "threads"], ["one_sided", "two_sided", "hierarchical", "allgather"]),
)
def test_a_forked_process_is_refused_and_its_parent_never_notices(ranks, exchange):
    world, hosts = (3, [2, 1]) if exchange == "hierarchical" else (2, 1)
    right = ty.launch(world, rank_main, exchange, ranks=ranks, hosts=hosts, deadline=DEADLINE)
    assert right == [["right"]] * world


def test_a_plan_of_one_rank_is_refused_too():
    (group,) = thread_groups(1)
    layer = layer_on(group, in_flight=2)
    assert layer.plan.draft.exchange.name == "local"
    expected = layer(*batch(0))
    started = layer.start(*batch(0))
    told = in_a_fork(lambda: {name: said(call) for name, call in calls(layer, started).items()})
    check_refused(told, 0, 1)
    assert torch.equal(started.finish(), expected)
    assert torch.equal(layer(*batch(0)), expected)


SCRIPT = """
import os, sys, multiprocessing, atexit
import torch, torch.distributed as dist
import tokenyard as ty
from tests.test_fork import batch, exit_code, layer_on, said

def work(layer):
    print(said(lambda: layer(*batch(0))).split(":")[0], flush=True)

def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = ty.DistributedGroup(deadline=60.0)
    layers = [layer_on(group, exchange=exchange) for exchange in ("one_sided", "two_sided")]
    expected = [layer(*batch(rank)) for layer in layers]
    if rank == 0:
        if (pid := os.fork()) == 0:
            atexit.register(lambda: print("at exit", flush=True))
            sys.exit(5)  # Python ends as usual, and frees everything
        print("exit code", exit_code(pid), flush=True)
        worker = multiprocessing.get_context("fork").Process(target=work, args=(layers[1],))
        worker.start()
        worker.join(60)
        print("exit code", worker.exitcode, flush=True)
    for layer, y_TH in zip(layers, expected):
        for _ in range(3):
            assert torch.equal(layer(*batch(rank)), y_TH)
        layer.plan.close()
    group.close()
    dist.destroy_process_group()
    print("right", flush=True)

main(int(sys.argv[1]), sys.argv[2])
"""


def test_a_child_whose_interpreter_ends_leaves_the_connections_of_its_parent(tmp_path):
    roots = [Path(__file__).parents[1], Path(ty.__file__).parents[1]]
    path = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [out.split("\n")[:-1] for out, _ in ends]
    assert outputs[0] == ["at exit", "exit code 5", "WrongProcess", "exit code 0", "right"], ends[0][1]
    assert outputs[1] == ["right"], ends[1][1]


class Rows(Dataset):
    """A dataset that holds a layer, and may use it."""

    def __init__(self, layer: ty.MoELayer, *, uses: bool) -> None:
        self.layer, self.uses = layer, uses

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.layer(*batch(index)) if self.uses else batch(index)[0]


def test_workers_of_a_data_loader():
    (group,) = thread_groups(1)
    layer = layer_on(group)
    expected = layer(*batch(0))
    loaded = DataLoader(Rows(layer, uses=False), num_workers=1, multiprocessing_context="fork")
    assert [rows[0].equal(batch(index)[0]) for index, rows in enumerate(loaded)] == [True, True]
    with pytest.raises(RuntimeError, match="WrongProcess: layer 'moe', rank 0: the plan is of process"):
        list(DataLoader(Rows(layer, uses=True), num_workers=1, multiprocessing_context="fork"))
    assert torch.equal(layer(*batch(0)), expected)


def test_programs_that_are_started_change_nothing():
    (group,) = thread_groups(1)
    layer = layer_on(group)
    expected = layer(*batch(0))
    subprocess.run([sys.executable, "-c", ""], check=True)
    subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=os.getpid)
    assert torch.equal(layer(*batch(0)), expected)


def test_a_forked_process_makes_groups_and_plans_of_its_own():
    (group,) = thread_groups(1)
    expected = layer_on(group)(*batch(0)).float().tolist()

    def launched() -> Any:
        torch.set_num_threads(1)
        return ty.launch(2, _own_result, expected)

    assert in_a_fork(launched) == [True, True]


def _own_result(group: ty.Group, expected: list[Any]) -> bool:
    y_TH = layer_on(group)(*batch(0))
    return torch.allclose(y_TH.float(), torch.tensor(expected), rtol=0.02, atol=0.05)


def _forks_again(own: OwnProcess) -> list[bool]:
    return [own.is_here, OwnProcess("this").is_here, in_a_fork(lambda: own.is_here)]


def test_each_fork_is_counted():
    own = OwnProcess("this")
    assert own.is_here
    assert in_a_fork(lambda: _forks_again(own)) == [False, True, False]
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=own.check)
    worker.start()
    worker.join(CHILD)
    assert worker.exitcode == 1
