"""Groups of threads and of processes: the same collectives, the same errors, and no wait without an end."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback

import psutil
import pytest
import torch

import tokenyard as ty
from tests.models import raised
from tokenyard.errors import Drifted, GroupError, InputError, PeerLost, RankError
from tokenyard.group import Disagreement, base, thread_groups
from tokenyard.group.failure_detector import FailureDetector
from tokenyard.group.readmission import meet

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])


def _bytes(*shape, value):
    return torch.full(shape, value, dtype=torch.uint8)


def collectives(group):
    W, r = group.size, group.rank
    gathered = group.all_gather(_bytes(5, value=r), phase="test")
    rows = group.all_gather_rows(_bytes(r, 3, value=r), list(range(W)), phase="test")
    # Rank r sends w rows to rank w, each marked with (sender, receiver).
    outgoing = torch.cat([torch.tensor([[r, w]] * w, dtype=torch.uint8).view(-1, 2) for w in range(W)])
    arrived = group.all_to_all_rows(outgoing, list(range(W)), [r] * W, phase="test")
    return (
        gathered.tolist(),
        rows.tolist(),
        arrived.tolist(),
        group.gather_json({"rank": r, "x": [1.5, None]}),
    )


@both_kinds
@pytest.mark.parametrize("world", [1, 2, 5])
def test_collectives_bring_every_byte_in_rank_order(ranks, world):
    for rank, (gathered, rows, arrived, values) in enumerate(ty.launch(world, collectives, ranks=ranks)):
        assert gathered == [[w] * 5 for w in range(world)]
        assert rows == [[w] * 3 for w in range(world) for _ in range(w)]
        assert arrived == [[w, rank] for w in range(world) for _ in range(rank)]
        assert values == [{"rank": w, "x": [1.5, None]} for w in range(world)]


def odd_values(group):
    values = group.gather_json({"b": float("nan"), "a": float("inf"), "c": -0.0})
    return [(list(value), str(list(value.values()))) for value in values]


@both_kinds
def test_json_is_alike_on_all_ranks_and_has_all_numbers_of_python(ranks):
    """Names are in one order, however a rank has written them: what is made of them does not depend on the rank."""
    due = (["a", "b", "c"], "[inf, nan, -0.0]")
    assert ty.launch(2, odd_values, ranks=ranks) == [[due] * 2] * 2


def empty_rows(group):
    nothing = torch.empty(0, 7, dtype=torch.uint8)
    zeros = [0] * group.size
    return (
        tuple(group.all_gather_rows(nothing, zeros, phase="test").shape),
        tuple(group.all_to_all_rows(nothing, zeros, zeros, phase="test").shape),
    )


@both_kinds
def test_no_rows_at_all(ranks):
    assert ty.launch(3, empty_rows, ranks=ranks) == [((0, 7), (0, 7))] * 3


def disagree(group):
    group.agree("the format", "mxfp8")
    try:
        group.agree("the format", "nvfp4" if group.rank == 1 else "mxfp8")
    except Disagreement as error:
        return error.by_rank, str(error), group.gather_json(group.rank)
    return None


@both_kinds
def test_agree_tells_every_rank_who_differs_and_the_group_stays_usable(ranks):
    for by_rank, message, after in ty.launch(3, disagree, ranks=ranks):
        assert by_rank == ["mxfp8", "nvfp4", "mxfp8"]
        assert "ranks disagree on the format" in message
        assert "rank 1 has 'nvfp4'" in message
        assert after == [0, 1, 2]


def only_bytes(group):
    with pytest.raises(InputError, match=r"float32\[3\].*expected a vector of uint8.*view\(torch.uint8\)"):
        group.all_gather(torch.zeros(3), phase="test")
    with pytest.raises(InputError, match="a matrix of 2 rows"):
        group.all_to_all_rows(_bytes(3, 1, value=0), [1] * group.size, [1] * group.size, phase="test")
    return group.gather_json("still here")


@both_kinds
def test_only_bytes_travel(ranks):
    assert ty.launch(2, only_bytes, ranks=ranks) == [["still here"] * 2] * 2


def raises_on_one(group):
    if group.rank == 1:
        raise ValueError("boom")
    group.barrier()


@both_kinds
def test_launch_raises_the_first_error_with_its_rank(ranks):
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: boom") as caught:
        ty.launch(3, raises_on_one, ranks=ranks, deadline=300)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("in raises_on_one\n") == 1  # the traceback of that rank
    assert printed.count("boom") == 3  # its line of code, its error, and the one that launch raises
    assert time.monotonic() - started < 100  # the others do not sit out their deadline


def wait_for(what):
    """Whether it comes true soon."""
    until = time.monotonic() + 30
    while not what() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(what())


def comes_late(group, folder):
    if group.rank == 1:
        return wait_for(lambda: len(list(folder.iterdir())) == 2)
    try:
        group.barrier(phase="a phase")
    except PeerLost as lost:
        with pytest.raises(GroupError):  # what a lost rank leaves behind cannot be trusted
            group.barrier()
        return lost.peers, lost.phase, lost.waited, lost.rank
    finally:
        (folder / str(group.rank)).touch()
    return None


@both_kinds
def test_a_late_rank_is_named_within_the_deadline(ranks, tmp_path):
    results = ty.launch(3, comes_late, tmp_path, ranks=ranks, deadline=1.0)
    for rank in (0, 2):
        peers, phase, waited, own = results[rank]
        assert peers == (1,)
        assert phase == "a phase"
        assert waited < 20
        assert own == rank
    # The first to give up has waited the whole deadline; the other may have come later, and is told at once.
    assert max(results[rank][2] for rank in (0, 2)) >= 1.0


def dies(group):
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        group.barrier()
    except PeerLost as lost:
        return lost.peers, time.monotonic() - started
    return None


def processes():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_killed_process_is_an_error_with_its_rank_and_nothing_stays_behind():
    ty.launch(1, collectives, ranks="processes")  # the forkserver itself stays
    before = processes()
    with pytest.raises(RankError, match=r"rank 2 raised .*exit code -9"):
        ty.launch(3, dies, ranks="processes", deadline=20)
    assert processes() <= before


def closes_and_ends(group, folder):
    group.barrier()
    group.barrier()  # by now every rank knows whose processes the others are
    if group.rank == 1:
        group.close()
        (folder / "closed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if wait_for((folder / "closed").exists) and wait_for(group.gone):
        (folder / "gone").write_text(str(group.gone()))


def test_a_process_that_ends_is_missed_though_it_closed_its_group(tmp_path):
    with pytest.raises(RankError, match="exit code -9"):
        ty.launch(2, closes_and_ends, tmp_path, ranks="processes", deadline=20)
    assert (tmp_path / "gone").read_text() == "{1: 'its process has ended'}"


def test_launch_leaves_no_process_behind():
    ty.launch(4, collectives, ranks="processes")
    before = processes()
    ty.launch(4, collectives, ranks="processes")
    with pytest.raises(RankError):
        ty.launch(4, raises_on_one, ranks="processes")
    assert processes() <= before


_ABANDONED = """
import sys, time
import tokenyard as ty
def sleeps(group):
    import os
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: two ranks write
    time.sleep(600)
if __name__ == "__main__":
    ty.launch(2, sleeps, ranks="processes")
"""


def test_ranks_end_when_whoever_launched_them_is_killed(tmp_path):
    script = tmp_path / "abandoned.py"
    script.write_text(_ABANDONED)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(_alive, pids))
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not any(map(_alive, pids)))


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def drifts(group):
    try:
        if group.rank == 0:
            group.all_gather(_bytes(2, value=0), phase="test")
        else:
            group.all_gather_rows(_bytes(1, 2, value=0), [1, 1], phase="test")
    except Drifted as error:
        return str(error)
    return None


def test_thread_ranks_that_make_different_calls_all_find_out():
    for message in ty.launch(2, drifts):
        assert "rank 0 gathers bytes, rank 1 gathers rows" in message


def two_stages(group):
    stage = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
    again = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
    rounds = 3 if group.rank < 2 else 11  # stages that do different amounts of work never wait for each other
    seen = [stage.gather_json([group.rank, i]) for i in range(rounds)]
    return len(seen), seen[-1], again.gather_json(group.rank), (stage.rank, stage.size)


@both_kinds
def test_two_groups_side_by_side_never_wait_for_each_other(ranks):
    results = ty.launch(4, two_stages, ranks=ranks, deadline=20)
    assert results[0] == (3, [[0, 2], [1, 2]], [0, 1], (0, 2))
    assert results[3] == (11, [[2, 10], [3, 10]], [2, 3], (1, 2))


def two_doors(group):
    """A second group of the same processes: one has its own subgroup, and is closed while the other is in use."""
    other = ty.DistributedGroup(deadline=20)
    pair = group.subgroup([0, 1])
    if group.rank == 1:
        time.sleep(0.5)  # rank 0 must not find what rank 1 left at the first pair's meeting
    other_pair = other.subgroup([0, 1])
    met = pair.gather_json(["one", group.rank]), other_pair.gather_json(["other", group.rank])
    addresses = [one.address for one in (group, other, pair, other_pair)]
    other.close()
    group.barrier()
    enrolled = [group._detector._get("who", rank) is not None for rank in range(2)]
    return met, addresses, enrolled


def test_two_groups_of_the_same_processes_do_not_meddle_with_each_other():
    first, second = ty.launch(2, two_doors, ranks="processes", deadline=20)
    assert first == second
    met, addresses, enrolled = first
    assert met == ([["one", 0], ["one", 1]], [["other", 0], ["other", 1]])
    assert len(set(addresses)) == 4
    assert enrolled == [True, True]


def stages_of_one_name(group):
    stage = group.subgroup([0, 1] if group.rank < 2 else [2, 3], name="stage")
    return stage.address, stage.subgroup([0, 1]).gather_json(group.rank)


def test_stages_of_one_name_do_not_meet_each_other():
    results = ty.launch(4, stages_of_one_name, ranks="processes", deadline=20)
    assert [met for _, met in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert len({address for address, _ in results}) == 2


def dies_as_the_others_regroup(group, folder, arrives):
    group.barrier()
    if group.rank == 1:

        def die(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)

        torch.distributed.ProcessGroupGloo = die  # when it has come, and is not connected yet
        if not arrives:
            die()
    with pytest.raises(PeerLost) as lost:
        group.subgroup([0, 1, 2])
    found = [lost.value.peers, lost.value.phase, lost.value.waited < 25]
    (folder / str(group.rank)).write_text(json.dumps(found))


@pytest.mark.parametrize("arrives", [False, True])
def test_a_rank_that_dies_as_the_others_regroup_is_named_at_once(arrives, tmp_path):
    with pytest.raises(RankError, match="exit code -9"):
        ty.launch(3, dies_as_the_others_regroup, tmp_path, arrives, ranks="processes", deadline=30)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found == {rank: [[1], "finding each other", True] for rank in "02"}


def test_what_goes_wrong_as_ranks_connect_is_a_loss(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("Connection refused\nand a stack")

    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", refuse)
    times = {"seconds": 20, "connecting": 20, "timeout": 20}
    store = torch.distributed.HashStore()
    detector = FailureDetector(store, "a meeting", 0, 1, "a host")
    with pytest.raises(
        PeerLost, match=r"a rank of the group did not arrive in a phase .*Connection refused\)"
    ):
        meet(store, "a meeting", 0, 1, phase="a phase", detector=detector, gone=dict, **times)


def asks_for_others(group):
    with pytest.raises(InputError, match="distinct ranks that include the caller's own"):
        group.subgroup([(group.rank + 1) % group.size])
    with pytest.raises(InputError, match="distinct ranks"):
        group.subgroup([group.rank, group.rank])
    return True


@both_kinds
def test_a_subgroup_belongs_to_its_members(ranks):
    assert ty.launch(2, asks_for_others, ranks=ranks) == [True, True]


def intra_op_threads(group):
    return torch.get_num_threads()


@both_kinds
def test_intra_op_threads_are_set_for_the_ranks_and_given_back(ranks):
    before = torch.get_num_threads()
    assert ty.launch(2, intra_op_threads, ranks=ranks, threads_per_rank=3) == [3, 3]
    assert ty.launch(64 if ranks == "threads" else 2, intra_op_threads, ranks=ranks)[0] == 1
    assert torch.get_num_threads() == before


def parent_of_this_process(group):
    return os.getppid()


def test_processes_come_from_one_forkserver_that_has_torch_loaded():
    first, second = (ty.launch(2, parent_of_this_process, ranks="processes") for _ in range(2))
    (forkserver,) = set(first + second)
    assert forkserver != os.getpid()
    assert any("libtorch" in mapped.path for mapped in psutil.Process(forkserver).memory_maps())


@pytest.mark.parametrize("world", [0, -1])
def test_a_group_has_at_least_one_rank(world):
    with pytest.raises(InputError, match=f"world is {world}"):
        ty.launch(world, collectives)
    with pytest.raises(InputError, match=f"world is {world}"):
        thread_groups(world)


def test_an_unknown_kind_of_ranks_is_refused():
    with pytest.raises(InputError, match="'threads' or 'processes'"):
        ty.launch(2, collectives, ranks="fibers")


def test_errors_come_back_from_processes_with_all_they_know():
    import pickle

    lost = PeerLost([3], phase="combine", waited=1.5, layer="moe.0", rank=1)
    again = pickle.loads(pickle.dumps(lost))
    assert type(again) is PeerLost
    assert (again.peers, again.phase, again.waited, again.layer, str(again)) == (
        (3,), "combine", 1.5, "moe.0", str(lost),
    )  # fmt: skip


def test_a_group_needs_torch_distributed_to_be_initialized():
    with pytest.raises(GroupError, match=r"init_process_group first, or use tokenyard\.launch"):
        ty.DistributedGroup()


def closed(group):
    group.close()
    with pytest.raises(GroupError, match="closed"):
        group.barrier()
    return True


@both_kinds
def test_a_closed_group_says_so(ranks):
    assert ty.launch(2, closed, ranks=ranks) == [True, True]


def test_patience_lasts_for_a_while_only():
    (group,) = thread_groups(1, deadline=2.0)
    with group.patience(30.0):
        assert group.deadline == 30.0
        with group.patience(1.0):
            assert group.deadline == 30.0
    assert group.deadline == 2.0


def interrupted_while_it_waits(group):
    def interrupted(*_):
        raise KeyboardInterrupt

    group._wait = interrupted
    try:
        group.barrier(phase="loading weights")
    except KeyboardInterrupt:
        return str(raised(group.barrier))
    return "went on"


def test_an_interrupt_leaves_the_wait_and_the_group_is_broken():
    (told,) = ty.launch(1, interrupted_while_it_waits, ranks="processes")
    assert "is broken: KeyboardInterrupt while this rank waited in loading weights" in told


def bytes_with_gaps(group):
    """What is given lies in memory with gaps, or by columns."""
    W, r = group.size, group.rank
    vector = torch.arange(10, dtype=torch.uint8)[::2] + 10 * r
    spread = torch.stack([vector, vector], dim=1)[:, 0]
    matrix = (torch.arange(6, dtype=torch.uint8).view(3, 2) + 10 * r).t()
    assert not spread.is_contiguous()
    assert not matrix.is_contiguous()
    return (
        group.all_gather(spread, phase="test").tolist(),
        group.all_gather_rows(matrix, [2] * W, phase="test").tolist(),
        group.all_to_all_rows(matrix, [1, 1], [1, 1], phase="test").tolist(),
    )


@both_kinds
def test_collectives_take_bytes_that_do_not_lie_side_by_side(ranks):
    for rank, (gathered, rows, arrived) in enumerate(ty.launch(2, bytes_with_gaps, ranks=ranks)):
        assert gathered == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
        assert rows == [[0, 2, 4], [1, 3, 5], [10, 12, 14], [11, 13, 15]]
        assert arrived == [[rank, rank + 2, rank + 4], [rank + 10, rank + 12, rank + 14]]


def json_of_the_largest_size(group):
    base.LARGEST_JSON = 10
    return group.gather_json("x" * 8), str(raised(group.gather_json, "x" * 9))


def test_json_of_the_largest_size_travels_and_longer_one_does_not():
    ((found,), told) = ty.launch(1, json_of_the_largest_size, ranks="processes")[0]
    assert found == "x" * 8
    assert "rank 0 sent 11 bytes in gather_json; expected from 1 to 10 bytes" in told


def test_patience_is_never_less_than_the_deadline_and_ends_with_its_block():
    (group,) = thread_groups(1, deadline=5.0)
    with group.patience(9.0):
        assert group.deadline == 9.0
    with group.patience(1.0):
        assert group.deadline == 5.0
    assert group.deadline == 5.0


@pytest.mark.parametrize("world", [1, 3])
def test_calls_that_are_over_are_forgotten(world):
    def calls(group):
        for _ in range(3):
            group.gather_json(group.rank)
        group.barrier()
        return group

    groups = ty.launch(world, calls)
    assert all(not group._meeting_point.calls for group in groups)


def overwritten_at_once(group):
    """Rank 0 has finished each call, and uses its memory again, before rank 1 has read what was brought."""
    read = group._read

    def read_late(posted):
        time.sleep(0.1)
        return read(posted)

    if group.rank == 1:
        group._read = read_late
    found = []
    for collective in (
        lambda mine: group.all_gather(mine.view(-1), phase="test"),
        lambda mine: group.all_gather_rows(mine, [2, 2], phase="test"),
        lambda mine: group.all_to_all_rows(mine, [1, 1], [1, 1], phase="test"),
    ):
        mine = _bytes(2, 3, value=group.rank)
        result = collective(mine)
        mine.fill_(9)
        found.append(result.unique().tolist())
    return found


def test_threads_may_use_their_memory_again_before_others_have_read_it():
    assert ty.launch(2, overwritten_at_once, ranks="threads") == [[[0, 1]] * 3] * 2


def announces_too_many(group):
    rows = torch.zeros(group.size, 4, dtype=torch.uint8)
    with pytest.raises(Drifted, match="1 rows came in test where 2 were announced"):
        group.all_to_all_rows(rows, [1] * group.size, [2] * group.size, phase="test")


def test_other_rows_than_were_announced_are_refused():
    ty.launch(2, announces_too_many)


def messages_of_any_length(group):
    """Rank r sends r + w + 1 bytes of its number to rank w; there is room for 8 of each."""
    lengths = [group.rank + other + 1 for other in range(group.size)]
    content = torch.full((sum(lengths),), group.rank, dtype=torch.uint8)
    room = torch.full((8 * group.size,), 99, dtype=torch.uint8)
    group.allow_messages(8)
    starts = group.start_messages(content, lengths, 8, room, phase="dispatch").wait()
    return [room[start:][: group.rank + other + 1].tolist() for other, start in enumerate(starts)]


@both_kinds
def test_messages_whose_length_nobody_knows_arrive_where_it_is_said(ranks):
    found = ty.launch(2, messages_of_any_length, ranks=ranks)
    assert multiprocessing.active_children() == []  # `launch` waits for the end of its processes
    assert found == [[[other] * (rank + other + 1) for other in range(2)] for rank in range(2)]


def messages_of_one_byte(group):
    """Each rank sends a byte, its number, to the others, and nothing to itself."""
    group.allow_messages(1)
    content = torch.full((group.size - 1,), group.rank, dtype=torch.uint8)
    room = torch.full((group.size,), 99, dtype=torch.uint8)
    lengths = [int(other != group.rank) for other in range(group.size)]
    starts = group.start_messages(content, lengths, 1, room, phase="dispatch").wait()
    return [room[start].item() for other, start in enumerate(starts) if other != group.rank]


def test_a_message_may_have_one_byte_or_none():
    assert ty.launch(3, messages_of_one_byte) == [[1, 2], [0, 2], [0, 1]]
