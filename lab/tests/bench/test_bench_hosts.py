"""`tokenyard bench hosts`: what must cross, what is measured, and where it cannot be."""

import pytest

from tests.cli.runner import call, call_json
from tokenyard_lab.bench import hosts as bench
from tokenyard_lab.bench import hosts_overlap
from tokenyard_lab.hosts import network

TINY = bench.Job(ranks_by_host=(2, 1), num_tokens=3, hidden_size=32, num_experts=3, top_k=2)


def test_a_row_crosses_once_to_a_host_or_once_to_each_of_its_ranks():
    for source, target, experts in ((0, 1, [2]), (1, 0, [0, 1])):
        ids = [row for rank in TINY.hosts.ranks[source] for row in TINY.routes(rank).topk_ids_TK.tolist()]
        once = sum(any(expert in row for expert in experts) for row in ids)
        often = sum(expert in row for row in ids for expert in experts)
        assert bench.rows_between(TINY, source, target, once=True) == once
        assert bench.rows_between(TINY, source, target, once=False) == often


@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not())
def test_a_layer_over_links_between_hosts_has_the_bits_of_the_twin_and_a_floor():
    shape = ("--ranks", 1, "--tokens", 8, "--hidden-size", 512, "--num-experts", 4, "--top-k", 2)
    found = call_json("bench", "hosts", *shape, "--rate", 10, "--delay", 4, "--rounds", 2)
    assert (found["benchmark"], found["setup"]["hosts"], found["setup"]["rate"]) == ("hosts", 2, 10.0)
    two_sided, hierarchical = found["results"]
    assert [one["parameters"]["exchange"] for one in found["results"]] == ["two_sided", "hierarchical"]
    # A rank on each host: both send the same rows. At 10 Mbit/s they take longer than anything else is off.
    for record in (two_sided, hierarchical):
        assert record["floor"]["median"] > 8.0  # the delay of both ways, and some bytes
        assert record["ours"]["least"] >= record["floor"]["median"]
        assert record["details"]["crossed_MB"] > record["details"]["least_MB"] > 0
    assert hierarchical["target"] == two_sided["ours"]["median"] / 2
    assert set(hierarchical["ratios"]) == {"two_sided / ours"}


def test_without_namespaces_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(network, "_way", lambda: (None, "the program ip is not installed"))
    result = call("bench", "hosts")
    assert result.exit_code == 2
    assert "the program ip is not installed" in result.stderr
    assert "user namespaces or root" in result.stderr


def test_ranks_that_fail_are_quoted(monkeypatch):
    report = network.HostReport(status=1, seconds=1.0, left=[], network=1, log="ValueError: no such wire")
    monkeypatch.setattr(bench, "start_ranks", lambda *_, **__: [report])
    with pytest.raises(bench.GroupError, match="ranks on hosts failed:\nValueError: no such wire"):
        bench.measure_hosts(TINY)


@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not())
def test_what_overlaps_is_measured_beside_travel_and_computation():
    shape = ("--ranks", 1, "--tokens", 4, "--hidden-size", 64, "--num-experts", 4, "--top-k", 2)
    links = ("--rate", 1000, "--delay", 10, "--compute", 10, "--rounds", 2, "--exchange", "two_sided")
    found = {one["parameters"]["call"]: one for one in call_json("bench", "hosts", *shape, *links)["results"]}
    assert set(found) == {"one after another", "overlapped", *hosts_overlap.SHARED}
    travel = found["overlapped"]["details"]["travel_ms"]
    assert travel > 40  # two batches, out and back
    assert found["one after another"]["floor"]["median"] == travel + 20
    assert found["overlapped"]["floor"]["median"] == max(travel, 20)
    assert found["overlapped"]["target"] == 1.15 * max(travel, 20)
