"""The lab's commands without processes that share memory, as on macOS."""

import pytest

from tests.group.test_other_systems import check_it_says_which_ranks_work


@pytest.mark.parametrize("command", [["run"], ["soak", "--minutes", "0.01"]])
def test_commands_say_which_ranks_work(command):
    check_it_says_which_ranks_work(*command)
