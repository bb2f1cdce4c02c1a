"""Ctrl-C in the lab's commands, as in those of the library."""

import re
import signal
import time

import pytest

from tests.cli import test_interrupts as interrupts
from tests.cli.test_interrupts import Command, check_it_ends_in_time, started

folder = interrupts.folder

# With processes, and in a command without ranks.
MOMENTS = [
    ("run --problems 500", Command.has_ranks, 1.0),
    ("bench experts --rounds 5000", Command.measures, 1.0),
]
LONG_MOMENTS = [
    ("run", Command.has_forkserver, 0.5),
    ("eval --kind threads", Command.has_folder, 1.0),
    ("soak", Command.has_ranks, 1.0),
    ("soak --threads", Command.has_folder, 1.0),
    ("bench dispatch", Command.has_forkserver, 0.0),
    ("bench dispatch --rounds 5000", Command.has_ranks, 1.0),
]


@pytest.mark.parametrize(
    ("arguments", "ready", "seconds"),
    [*MOMENTS, *(pytest.param(*moment, marks=pytest.mark.long) for moment in LONG_MOMENTS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_interrupted_command_ends_in_time_with_a_line_and_leaves_nothing(
    arguments, ready, seconds, folder
):
    check_it_ends_in_time(arguments, ready, seconds, folder)


def test_a_soak_that_is_interrupted_says_what_it_has_done(folder):
    with started("soak --threads --exchange two_sided", folder / "soak") as command:
        command.wait_until(lambda c: list(c.folder.glob("*/progress.json")))
        time.sleep(0.6)  # it looks every quarter of a second
        command.send(signal.SIGINT)
        assert command.process.wait(30) == 130
        assert re.search(r"interrupted after .*: .* episodes?, .* 0 findings\n", command.stderr.read_text())
