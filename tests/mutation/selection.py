"""Which tests a mutant meets: those that run its line, the quickest first, within a limit of time."""

import itertools
import json
from pathlib import Path

import coverage

_END = 10**9  # behind the last line of any file
# Tests of what runs while modules are imported: constants, attributes of classes, defaults.
_OF_DECLARATIONS = (
    "tests/test_declarations.py",
    "tests/test_huggingface.py::test_defaults_are_those_of_transformers",
    "tests/test_reference.py::test_the_pages_are_what_the_sources_give",
)


class Record:
    """Which test runs which line, how long it takes, and whether it starts processes."""

    def __init__(self, folder):
        folder = Path(folder)
        self.tests = {}
        for path in sorted(folder.glob("tests.*.json")):
            self.tests.update(json.loads(path.read_text()))
        self._lines = {}
        for file in sorted(folder.glob("coverage.*")):
            data = coverage.CoverageData(str(file))
            data.read()
            for path in data.measured_files():
                lines = self._lines.setdefault("src/tokenyard" + path.rsplit("src/tokenyard", 1)[1], {})
                for line, tests in data.contexts_by_lineno(path).items():
                    lines.setdefault(line, set()).update(tests)

    def covering(self, path, first, last):
        """Tests that ran one of these lines, and passed when they were recorded."""
        lines = self._lines.get(path, {})
        found = {test for line, tests in lines.items() if first <= line <= last for test in tests}
        return {test for test in found if self.tests.get(test, {}).get("passed")}

    def starting_processes(self):
        return {test for test, facts in self.tests.items() if facts["processes"] and facts["passed"]}

    def may_fail_by_itself(self):
        """Tests in which ranks wait for each other, and may do so too long where a machine is busy."""
        group = {path for path in self._lines if "/group/" in path}
        return self.starting_processes().union(*(self.covering(path, 1, _END) for path in group))


def choose(record, mutant, limit):
    """The tests for a mutant: each test function in turn gives its quickest case, until the time is used up.

    Lines that run while modules are imported, or in other processes, are not recorded, and some run only once in a
    process. So behind the tests of a line come tests that start processes, if the folder of tests has the name of the
    mutant's folder; then tests of the same file; then the others that start processes. Lines that no test runs may be
    declarations: tests of these come first there.
    """
    last = mutant.line + mutant.before.count("\n")
    of_line = record.covering(mutant.path, mutant.line, last)
    of_file = record.covering(mutant.path, 1, _END)
    package = mutant.path.split("/")[2].removesuffix(".py")
    started = record.starting_processes()
    near = {test for test in started if f"tests/{package}/" in test or f"test_{package}" in test}
    declared = {test for test in record.tests if test.startswith(_OF_DECLARATIONS)}
    kinds = (of_line, near, of_file, started) if of_line else (declared, of_file, near, started)
    ordered = [test for kind in kinds for test in _in_turn(record, kind)]
    return _within(record, list(dict.fromkeys(ordered)), limit)


def _in_turn(record, tests):
    """One case of each function, then the second of each, and so on."""
    cases = {}
    for test in sorted(tests, key=lambda test: (record.tests[test]["seconds"], test)):
        cases.setdefault(test.split("[")[0], []).append(test)
    rounds = itertools.zip_longest(*cases.values())
    return [test for each in rounds for test in each if test is not None]


def _within(record, tests, limit):
    used, chosen = 0.0, []
    for test in tests:
        seconds = record.tests[test]["seconds"]
        if used + seconds <= limit:
            used += seconds
            chosen.append(test)
    return chosen
