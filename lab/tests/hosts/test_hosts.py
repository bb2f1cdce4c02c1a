"""Ranks on several hosts, which torchrun starts: the same bits as on one, and an end in time when a link is cut.

Hosts are network namespaces with a link each (`tokenyard_lab.hosts`). `make test` cuts one link; `make test-all` tells
one story with everything in it; TOKENYARD_FAULTS=20 (`make test-faults`) cuts twenty links, of any host, at any moment.
"""

import json
import os
import random
from pathlib import Path

import psutil
import pytest
import torch

import tokenyard as ty
from lab.tests.hosts.ranks import EXCHANGES, LAYERS, SHORT_DEADLINE, digest, outputs, through, wide_routes
from lab.tests.hosts.torchrun import torchrun
from tests.models import batch, build
from tokenyard_lab.hosts.network import start_ranks, why_not

TIMES = int(os.environ.get("TOKENYARD_FAULTS", "1"))
SLACK = 20.0  # seconds beyond a deadline, on a machine that does much else

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())


ROOT = Path(__file__).resolve().parents[3]


def run_job(folder, ranks_by_host, job, *, start=torchrun, **options):
    """Let ranks on hosts do a job of `ranks.py`."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    program = [str(Path(__file__).with_name("ranks.py")), job, str(folder)]
    return start(folder, ranks_by_host, program, environment=environment, **options)


def on_threads(ranks_by_host, fn, *arguments):
    """What threads find that stand for ranks on such hosts."""
    world = sum(ranks_by_host)
    return ty.launch(world, fn, *arguments, hosts=ranks_by_host, threads_per_rank=1, deadline=60.0)


def bits(ranks_by_host):
    """The bits of each rank's tokens, by exchange."""
    return on_threads(ranks_by_host, through, EXCHANGES)


def stage(group, layers, rounds):
    plan = ty.plan(layers, group)
    built = [build(plan, layer.name) for layer in layers]
    return [
        digest(layer(*batch(layer.wiring.spec, 2, seed=turn))) for turn in range(rounds) for layer in built
    ]


def without(group, exchange, lost):
    plan = ty.plan(LAYERS, group, exchange=exchange)
    if group.rank in lost:
        return None
    plan.go_on_without(lost)
    return outputs(plan, plan.group.rank)


def found_by_rank(folder, world, what, logs):
    assert len(list(folder.glob(f"rank*.{what}"))) == world, logs
    return [json.loads((folder / f"rank{rank}.{what}").read_text()) for rank in range(world)]


def networks():
    """The network namespaces of this machine that a process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(process.stat().st_ino)
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def check_nothing_is_left(reports, interfaces):
    for report in reports:
        assert report.left == []
        assert report.network not in networks()
    assert set(psutil.net_if_addrs()) == interfaces
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "unshare"]


def check_cut(found, ranks_by_host, host, exchange):
    """What every rank says when a host's link was cut, and that those go on who can."""
    first = sum(ranks_by_host[:host])
    cut_off = list(range(first, first + ranks_by_host[host]))
    everybody = list(range(sum(ranks_by_host)))
    beside = [rank for rank in everybody if rank not in cut_off]
    with_store = cut_off if host == 0 else beside  # the store is on host 0
    lost = [rank for rank in everybody if rank not in with_store]
    goes_on = on_threads(ranks_by_host, without, exchange, lost)
    for rank, cut in enumerate(found):
        where = f"rank {rank}: {cut}"
        assert cut["error"] == "PeerLost", where
        assert cut["phase"] in ("dispatch", "combine"), where
        assert cut["layer"] in [layer.name for layer in LAYERS], where
        assert cut["seconds"] < SHORT_DEADLINE + SLACK, where
        if rank in with_store:
            assert cut["peers"] == lost, where
            assert cut["refusal"] is None, where
            assert cut["goes on"] == goes_on[rank], where
        else:
            assert cut["peers"] == [], where
            assert "the group's store does not answer" in cut["message"], where
            assert "cannot find each other" in cut["refusal"], where
            assert cut["refused after"] < SLACK, where


def rows_between(ranks_by_host, source, target, *, tokens, top_k, once):
    """Rows of one host's tokens that have experts on another: once for each host, or for each rank of it."""
    hosts = [host for host, ranks in enumerate(ranks_by_host) for _ in range(ranks)]
    rows = 0
    for rank, host in enumerate(hosts):
        if host == source:
            ids_TK = wide_routes(rank, tokens, top_k).topk_ids_TK
            there = [(ids_TK == expert).any(-1) for expert, other in enumerate(hosts) if other == target]
            rows += int((torch.stack(there).any(0) if once else torch.stack(there)).sum())
    return rows


def check_bytes(found, ranks_by_host):
    """What crossed from each host to each other one, by the switch's own count: the rows that must, and no other."""
    for exchange, once in (("hierarchical", True), ("two_sided", False)):
        out, back = found[exchange]["strides"]
        counted = {
            name: {(source, target): crossed for source, target, crossed in links}
            for name, links in found[exchange]["counted"].items()
        }
        assert len(counted["one"]) == len(ranks_by_host) * (len(ranks_by_host) - 1)
        for source, target in counted["one"]:
            expected = {}
            for name, tokens, top_k in (("full", 24, 5), ("random", 24, 2), ("one", 1, 5)):
                drawn = {"tokens": tokens, "top_k": top_k, "once": once}
                gone = rows_between(ranks_by_host, source, target, **drawn)
                returned = rows_between(ranks_by_host, target, source, **drawn)
                expected[name] = gone * out + returned * back
            for name in ("full", "random"):
                more = counted[name][source, target] - counted["one"][source, target]
                assert more == expected[name] - expected["one"], (exchange, name, source, target)
            if once:
                planned = {(link["from"], link["to"]): link for link in found[exchange]["planned"]}
                most = planned[source, target]["dispatch"] + planned[target, source]["combine"]
                assert expected["full"] == most
                # Announcements, beside rows.
                assert most <= counted["full"][source, target] <= 1.05 * most


def check_doctor(found):
    """All ranks say the same: what is well, and of the link that is not, in both directions, why."""
    good, bad = found[0]["doctor"]
    assert all(mine["doctor"] == [good, bad] for mine in found)
    assert [one["detail"] for one in good if one["section"] == "reach"] == [
        "host0: ranks 0 to 1, reached by all",
        "host1: ranks 2 to 3, reached by all",
        "host2: rank 4, reached by all",
    ]
    assert len([one for one in good if one["section"] == "links"]) == 6
    assert all(one["ok"] for one in good if one["section"] != "links")  # a busy machine is slow
    wrong = {one["name"]: one["detail"] for one in bad if one["ok"] is False}
    for name in ("host 0 to host 2", "host 2 to host 0", "host 1 to host 2", "host 2 to host 1"):
        assert "more than 5 ms: overlap batches" in wrong[name]
        assert "is GLOO_SOCKET_IFNAME the interface" in wrong[name]


MOMENTS = ("inside dispatch", "between levels", "inside combine", "before sums")
# A leader of its host, on either level; a host; and a link: all that is left then is the first host.
LOSSES = [
    {"kind": "killed", "victims": [3], "moment": "between levels", "host": 1},
    {"kind": "stopped", "victims": [2], "moment": "inside combine", "host": 1},
    {"kind": "cut", "victims": [4], "moment": "inside dispatch", "host": 2},
]


def check_losses(folder, ranks_by_host, losses, logs):
    """Ranks were lost one after the other; all that were left have said so each time, and gone on."""
    host_of_rank = [host for host, ranks in enumerate(ranks_by_host) for _ in range(ranks)]
    there = list(range(len(host_of_rank)))
    for number, loss in enumerate(losses):
        left = [rank for rank in there if rank not in loss["victims"]]
        for rank in left:
            found = json.loads((folder / f"rank{rank}.losses").read_text())[number]
            where = f"rank {rank}, {loss}: {found}\n{logs}"
            assert found["error"] == "PeerLost", where
            assert found["peers"] == loss["victims"], where
            assert found["phase"] in ("dispatch", "combine"), where
            assert found["seconds"] < SHORT_DEADLINE + SLACK, where
            assert found["right"] == [True, True], where
            hosts = list(dict.fromkeys(host_of_rank[rank] for rank in left))
            assert found["hosts"] == [hosts.index(host_of_rank[rank]) for rank in left], where
        if loss["kind"] == "cut":
            for rank in loss["victims"]:
                found = json.loads((folder / f"rank{rank}.losses").read_text())[number]
                assert (found["error"], found["peers"]) == ("PeerLost", []), f"rank {rank}: {found}\n{logs}"
                assert "the group's store does not answer" in found["message"]
        there = left


@needs_hosts
@pytest.mark.long
def test_three_hosts_find_the_bits_of_one_and_all_say_in_time_who_is_lost(tmp_path):
    interfaces = set(psutil.net_if_addrs())
    (tmp_path / "losses.json").write_text(json.dumps(LOSSES))
    reports = run_job(tmp_path, [2, 2, 1], "story", start=start_ranks)
    logs = "\n".join(report.log for report in reports)
    found = found_by_rank(tmp_path, 5, "story", logs)

    three_hosts, two_hosts = bits([2, 2, 1]), bits([2, 2])
    a_host, alone = bits([2]), bits([1])
    stages = [on_threads([2], stage, LAYERS, 2), on_threads([2], stage, LAYERS[:1], 9)]
    inside = [found["two_sided"] for found in (*a_host, *a_host, *alone)]
    for rank, mine in enumerate(found):
        assert mine["hosts"] == [[0, 1], [2, 3], [4]]
        assert mine["three hosts"] == three_hosts[rank]
        across = three_hosts[rank]["hierarchical"]  # what `auto` takes
        assert mine["inside and across"] == {"inside": 2 * inside[rank], "across": 2 * across}
        assert "one_sided shares memory, and the ranks run on 3 hosts" in mine["refused"]["error"]
        assert sorted(mine["refused"]["offered"]) == sorted(EXCHANGES)
        assert mine["refused"]["work"] == three_hosts[rank]
        assert mine["bad link"]["bits"] == three_hosts[rank]
        assert sum(link["lost"] for link in mine["bad link"]["links"]) > 0
        if rank < 4:
            assert mine["two hosts"] == two_hosts[rank]
            assert mine["stages"] == stages[rank // 2][rank % 2]
    check_bytes(found[0]["bytes"], [2, 2, 1])
    check_doctor(found)
    check_losses(tmp_path, [2, 2, 1], LOSSES, logs)
    check_nothing_is_left(reports, interfaces)


@needs_hosts
@pytest.mark.long
def test_a_model_answers_on_two_hosts_under_torchrun(tmp_path):
    """As the guide says. `auto` would take `two_sided`: no two ranks share a host here."""
    program = ["-m", "tokenyard", "run", "--problems", "2", "--exchange", "hierarchical"]
    first, second = torchrun(tmp_path, [1, 1], program)
    assert (first.status, second.status) == (0, 0), first.log + second.log
    assert "2 of 2 problems are right" in first.log
    assert "on 2 ranks" in first.log
    assert "problems are right" not in second.log
    assert "hierarchical" in first.log


@needs_hosts
@pytest.mark.parametrize("seed", range(TIMES))
def test_a_link_is_cut_at_any_moment(seed, tmp_path):
    draw = random.Random(seed)
    ranks_by_host = draw.choice([[2, 2], [1, 1, 1], [2, 1, 1], [1, 2, 1]])
    host = draw.randrange(len(ranks_by_host))
    strike = [host, draw.choice(["silent", "down"]), draw.choice(EXCHANGES), seed]
    (tmp_path / "cut.json").write_text(json.dumps(strike))
    interfaces = set(psutil.net_if_addrs())
    reports = run_job(tmp_path, ranks_by_host, "cut", interface=draw.choice(["eth0", None]))
    logs = "\n".join(report.log for report in reports)
    found = found_by_rank(tmp_path, sum(ranks_by_host), "cut", logs)
    check_cut(found, ranks_by_host, host, strike[2])
    assert all(report.status != 0 for report in reports), logs
    check_nothing_is_left(reports, interfaces)


if TIMES > 1:

    @needs_hosts
    @pytest.mark.parametrize("seed", range(TIMES))
    def test_any_loss_at_any_moment_of_two_levels(seed, tmp_path):
        draw = random.Random(seed)
        losses = [
            {
                "kind": draw.choice(["stopped", "cut"]),
                "victims": [2 * host, 2 * host + 1],
                "moment": draw.choice(MOMENTS),
                "host": host,
            }
            for host in draw.sample([1, 2], 2)
        ]
        if draw.random() < 0.5:  # one of its ranks goes before
            first = losses[0]
            victim = first["victims"].pop(draw.randrange(2))
            losses.insert(0, {**first, "kind": "killed", "victims": [victim], "moment": draw.choice(MOMENTS)})
        (tmp_path / "losses.json").write_text(json.dumps(losses))
        interfaces = set(psutil.net_if_addrs())
        reports = run_job(tmp_path, [2, 2, 2], "losses", start=start_ranks)
        check_losses(tmp_path, [2, 2, 2], losses, "\n".join(report.log for report in reports))
        check_nothing_is_left(reports, interfaces)
