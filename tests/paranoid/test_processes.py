"""The same between processes: what is shared there is memory of the machine, and messages go over sockets."""

from tests.models import WATCHED, on_ranks
from tests.paranoid.tampering import SOURCE, VICTIM, check_alarm
from tests.paranoid.test_guards import unused, writes_beyond
from tests.paranoid.test_no_false_alarms import both_ways
from tests.paranoid.test_seals import check_lost_id, damaged_back, flip_data, flipped_out, lost_id


def everything(group):
    """All in one, since starting processes is slow."""
    return {
        "out": {exchange: flipped_out(group, exchange, "scales") for exchange in WATCHED},
        "back": {exchange: damaged_back(group, exchange, flip_data, None) for exchange in WATCHED},
        "lost id": lost_id(group),
        "byte": writes_beyond(group, "behind the rows that arrive"),
        "slot": unused(group, "data"),
        "same bits": [both_ways(group, exchange) for exchange in WATCHED],
    }


def test_between_processes_it_is_the_same():
    by_rank = on_ranks(3, everything, ranks="processes", deadline=120.0)
    for exchange in WATCHED:
        finders = None if exchange == "allgather" else [VICTIM]
        check_alarm([found["out"][exchange] for found in by_rank], finders, place="scales")
        check_alarm([found["back"][exchange] for found in by_rank], [SOURCE], place="data", source=VICTIM)
    check_lost_id([found["lost id"] for found in by_rank])
    beyond = [found["byte"] for found in by_rank]
    check_alarm(beyond, [VICTIM], place="dispatch 0", source=None, token=None)
    check_alarm([found["slot"] for found in by_rank], [VICTIM], place="dispatch", token=None)
    assert [found["same bits"] for found in by_rank] == [[True] * len(WATCHED)] * 3
