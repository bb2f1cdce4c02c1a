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
        self._cases = {}  # by function: the cases that ran
        for test in self.tests:
            self._cases.setdefault(test.split("[")[0], []).append(test)
        self._others = {}  # by function: the cases that were left out
        for path in sorted(folder.glob("others.*.json")):
            for test in json.loads(path.read_text()):
                self._add_case(test)
        self._lines = {}
        for file in sorted(folder.glob("coverage.*")):
            data = coverage.CoverageData(str(file))
            data.read()
            for path in data.measured_files():
                lines = self._lines.setdefault("src/tokenyard" + path.rsplit("src/tokenyard", 1)[1], {})
                for line, tests in data.contexts_by_lineno(path).items():
                    lines.setdefault(line, set()).update(tests)

    def _add_case(self, test):
        """Take a case that did not run to be like those of its function that did."""
        function = test.split("[")[0]
        if test in self.tests or function not in self._cases:
            return
        ran = [self.tests[case] for case in self._cases[function]]
        self._others.setdefault(function, []).append(test)
        self.tests[test] = {
            "seconds": sum(case["seconds"] for case in ran) / len(ran),
            "processes": any(case["processes"] for case in ran),
            "passed": all(case["passed"] for case in ran),
        }

    def others_like(self, tests):
        """The cases of the same functions that did not run: they may run the same lines, with other values."""
        functions = {test.split("[")[0] for test in tests}
        return {case for function in functions for case in self._others.get(function, ())}

    def covering(self, path, first, last):
        """Tests that ran one of these lines, and passed when they were recorded."""
        lines = self._lines.get(path, {})
        found = {test for line, tests in lines.items() if first <= line <= last for test in tests}
        return {test for test in found if self.tests.get(test, {}).get("passed")}

    def runs_while_imported(self, path, first, last):
        """Whether one of these lines ran outside of all tests."""
        lines = self._lines.get(path, {})
        return any("" in tests for line, tests in lines.items() if first <= line <= last)

    def starting_processes(self):
        return {test for test, facts in self.tests.items() if facts["processes"] and facts["passed"]}

    def may_fail_by_itself(self):
        """Tests in which ranks wait for each other, and may do so too long where a machine is busy."""
        group = {path for path in self._lines if "/group/" in path}
        found = self.starting_processes().union(*(self.covering(path, 1, _END) for path in group))
        return found | self.others_like(found)


def choose(record, mutant, limit, declares=True):
    """The tests for a mutant: each test function in turn gives its quickest case, until the time is used up.

    Lines that run while modules are imported, or in other processes, are not recorded, and some run only once in a
    process. So behind the tests of a line come tests that start processes in a file of the mutant's name; cases that
    were not recorded; further tests that start processes, if their folder has the name of the mutant's; then tests of
    the same file; then the others that start processes. Lines that no test runs may be declarations (`declares`:
    outside of functions): tests of these come first there. Others run in processes: first there are tests whose file
    has the name of the mutant's file.
    """
    last = mutant.line + mutant.before.count("\n")
    of_line = record.covering(mutant.path, mutant.line, last)
    of_file = record.covering(mutant.path, 1, _END)
    package = mutant.path.split("/")[2].removesuffix(".py")
    started = record.starting_processes()
    near = {test for test in started if f"tests/{package}/" in test or f"test_{package}" in test}
    mirrored = {test for test in near if f"/test_{mutant.path.split('/')[-1]}::" in test}
    declared = {test for test in record.tests if test.startswith(_OF_DECLARATIONS)}
    others = record.others_like(of_line), record.others_like(of_file)
    kinds = (of_line, mirrored, others[0], near, of_file, others[1], started)
    if not of_line:
        in_file = (of_file, others[1], near) if declares else (mirrored, near, of_file, others[1])
        kinds = (declared, *in_file, started) if declares else (*in_file, started, declared)
    return _within(record, [_in_turn(record, kind) for kind in kinds], limit)


def _in_turn(record, tests):
    """One case of each function, then the second of each, and so on."""
    cases = {}
    for test in sorted(tests, key=lambda test: (record.tests[test]["seconds"], test)):
        cases.setdefault(test.split("[")[0], []).append(test)
    rounds = itertools.zip_longest(*cases.values())
    return [test for each in rounds for test in each if test is not None]


def _within(record, kinds, limit):
    """Of each kind the first tests, for half as long as of the kind before; then whatever else there is time for."""
    chosen, left = {}, limit
    shares = [limit / 2 ** (place + 1) for place in range(len(kinds))] + [limit] * len(kinds)
    for share, kind in zip(shares, [*kinds, *kinds], strict=True):
        until = left - share
        for test in kind:
            seconds = record.tests[test]["seconds"]
            if test not in chosen and left - seconds >= max(until, 0):
                chosen[test] = seconds
                left -= seconds
    return list(chosen)
