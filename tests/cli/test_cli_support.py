"""`tokenyard support`."""

from __future__ import annotations

from tests.cli.runner import call, call_json
from tokenyard.support import support_tables


def test_tables():
    assert call_json("support") == {"tables": [table.as_dict() for table in support_tables()]}
    shown = call("support").stdout
    for table in support_tables():
        assert table.title in shown
    assert "`" not in shown
