"""The same between processes: what is shared there is memory of the machine, and messages go over sockets."""

from tests.models import WATCHED, on_ranks
from tests.paranoid.tampering import HOSTS, SOURCE, VICTIM, check_alarm
from tests.paranoid.test_guards import unused, writes_beyond
from tests.paranoid.test_no_false_alarms import both_ways
from tests.paranoid.test_seals import check_lost_id, damaged_back, flip_data, flipped_out, lost_id

ON_ONE_HOST = [exchange for exchange in WATCHED if exchange not in HOSTS]


def every_way(group, exchanges):
    return {
        "out": {exchange: flipped_out(group, exchange, "scales") for exchange in exchanges},
        "back": {exchange: damaged_back(group, exchange, flip_data, None) for exchange in exchanges},
        "same bits": [both_ways(group, exchange) for exchange in exchanges],
    }


def check_every_way(by_rank, exchanges):
    for exchange in exchanges:
        finders = None if exchange in ("allgather", *HOSTS) else [VICTIM]
        check_alarm([found["out"][exchange] for found in by_rank], finders, place="scales")
        check_alarm([found["back"][exchange] for found in by_rank], [SOURCE], place="data", source=VICTIM)
    assert [found["same bits"] for found in by_rank] == [[True] * len(exchanges)] * 3


def everything(group):
    """All in one, since starting processes is slow."""
    return every_way(group, ON_ONE_HOST) | {
        "lost id": lost_id(group),
        "byte": writes_beyond(group, "behind the rows that arrive"),
        "slot": unused(group, "data"),
    }


def test_between_processes_it_is_the_same():
    by_rank = on_ranks(3, everything, ranks="processes", deadline=120.0)
    check_every_way(by_rank, ON_ONE_HOST)
    check_lost_id([found["lost id"] for found in by_rank])
    beyond = [found["byte"] for found in by_rank]
    check_alarm(beyond, [VICTIM], place="dispatch 0", source=None, token=None)
    check_alarm([found["slot"] for found in by_rank], [VICTIM], place="dispatch", token=None)


def test_between_processes_of_several_hosts_it_is_the_same():
    for exchange, hosts in HOSTS.items():
        by_rank = on_ranks(3, every_way, [exchange], ranks="processes", hosts=hosts, deadline=120.0)
        check_every_way(by_rank, [exchange])
