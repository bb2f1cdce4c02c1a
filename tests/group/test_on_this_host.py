"""Which ranks share a host, and the group of those that do."""

import os
import threading

import pytest

import tokenyard as ty
from tests.models import batch, build, spec
from tokenyard.errors import InputError, PlanError
from tokenyard.group import ThreadGroup
from tokenyard.group import hosts as host_names
from tokenyard.group.hosts import this_host

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])


def the_same_host(group):
    here = group.on_this_host()
    return group.hosts(), here.name, here.rank, here.size


@both_kinds
def test_ranks_that_share_memory_are_on_one_host(ranks):
    outcomes = ty.launch(3, the_same_host, ranks=ranks, deadline=20)
    name = "threads/host 0" if ranks == "threads" else "world/host 0"
    assert outcomes == [([[0, 1, 2]], name, rank, 3) for rank in range(3)]


def hosts_in_turn(group):
    here = group.on_this_host()
    layer = spec("moe", experts="reference")
    with pytest.raises(PlanError, match=r"the ranks run on 2 hosts.*exchange=two_sided"):
        ty.plan([layer], group, exchange="one_sided")
    built = build(ty.plan([layer], here, exchange="one_sided"), "moe")
    y_TH = built(*batch(layer, 4, seed=group.rank))
    return group.hosts(), here.name, here.gather_json(group.rank), tuple(y_TH.shape)


def test_ranks_of_two_hosts_part_into_two_groups(monkeypatch):
    def host(group):
        return f"host {int(threading.current_thread().name.split()[1]) % 2}"  # launch names a rank's thread

    monkeypatch.setattr(ThreadGroup, "host", host)
    for rank, (hosts, name, here, shape) in enumerate(ty.launch(5, hosts_in_turn, deadline=20)):
        assert hosts == [[0, 2, 4], [1, 3]]
        assert name == f"threads/host {rank % 2}"
        assert here == hosts[rank % 2]
        assert shape == (4, 32)


def test_a_host_has_a_name_that_lasts():
    assert this_host() == this_host()
    assert "/" in this_host()  # a machine, and the processes that see each other on it


@pytest.mark.parametrize("hosts", [0, 4, True, "2", [2, 2], [3, 0], [1, "2"], None])
def test_hosts_that_do_not_make_up_the_ranks_are_refused(hosts):
    with pytest.raises(
        InputError, match="for 3 ranks; expected from 1 to 3 hosts, or the number of ranks of each"
    ):
        ty.launch(3, names, hosts=hosts)


def names(group):
    return group.host(), group.hosts()


def test_ranks_of_one_machine_stand_for_hosts():
    by_threads = ty.launch(3, names, hosts=2)
    assert [hosts for _, hosts in by_threads] == [[[0, 1], [2]]] * 3
    assert len({host for host, _ in by_threads}) == 2


def test_a_process_may_be_told_the_name_of_its_host(monkeypatch):
    here = this_host()
    monkeypatch.setenv("TOKENYARD_HOST", "rack 3")
    assert this_host() == f"{here}/rack 3"


@pytest.mark.parametrize(("told", "end"), [("rack 3", "/rack 3"), ("", "")])
def test_where_linux_does_not_say_the_name_of_the_machine_is_taken(told, end, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no such file")

    monkeypatch.setenv("TOKENYARD_HOST", told)
    monkeypatch.setattr(host_names, "open", refuse, raising=False)
    assert this_host() == os.uname().nodename + end
