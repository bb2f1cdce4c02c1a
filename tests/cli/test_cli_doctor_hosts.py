"""`tokenyard doctor --hosts`: what is compared between hosts, and what is said when it is wrong.

Real links are those of `lab/tests/hosts`.
"""

import pytest
import torch.distributed as dist

from tests.cli.runner import call
from tests.models import on_ranks
from tokenyard.cli import doctor_hosts as doctor
from tokenyard.cli.doctor_hosts import Link, judge_clocks, judge_links, judge_versions
from tokenyard.errors import GroupError


def test_ranks_on_two_hosts_find_the_same_and_nothing_wrong():
    first, second, third = on_ranks(3, doctor.examine_hosts, hosts=[2, 1])
    assert first == second == third
    by_section = {}
    for finding in first:
        by_section.setdefault(finding.section, []).append(finding)
    assert list(by_section) == ["reach", "versions", "clock", "links", "layer"]
    assert [finding.name for finding in by_section["links"]] == ["host 0 to host 1", "host 1 to host 0"]
    assert all(
        finding.ok for section in ("reach", "versions", "clock", "layer") for finding in by_section[section]
    )


def test_one_host_has_no_links():
    (findings,) = on_ranks(1, doctor.examine_hosts)
    assert [finding.detail for finding in findings if finding.section == "links"] == []


def test_versions_that_differ_are_named_by_rank():
    torch_, same = judge_versions([{"torch": v, "protocol": "9"} for v in ("2.13", "2.12", "2.13")])
    assert (torch_.name, torch_.ok) == ("torch", False)
    assert torch_.detail == "2.13 on ranks 0, 2; 2.12 on ranks 1: install the same everywhere"
    assert same.ok


def test_clocks_that_are_apart_are_named():
    assert judge_clocks([100.0, 100.2]).ok
    finding = judge_clocks([100.0, 107.5, 100.1])
    assert not finding.ok
    assert finding.detail == "host 1 is 7.5 s ahead of host 0: let NTP set them, or logs cannot be compared"


def test_a_link_that_is_far_thinner_than_the_others_is_named():
    links = [
        Link(source="a", target=t, latency=1e-4, rate=r) for t, r in (("b", 1e9), ("c", 2e8), ("d", 1e9))
    ]
    findings = list(judge_links(links))
    assert [finding.ok for finding in findings] == [True, False, True]
    assert "0.10 ms, " in findings[1].detail
    assert "the median link carries" in findings[1].detail


def test_without_torchrun_it_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = call("doctor", "--hosts")
    assert result.exit_code == 2
    assert "--hosts without torchrun" in result.stderr
    assert "-m tokenyard doctor --hosts" in result.stderr


def test_ranks_that_do_not_reach_each_other_are_told_what_to_set(monkeypatch):
    def no_way(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed\nmore")

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", no_way)
    with pytest.raises(GroupError, match="do not reach each other: Gloo connectFullMesh failed;") as caught:
        doctor.join()
    assert "set GLOO_SOCKET_IFNAME" in caught.value.fix
