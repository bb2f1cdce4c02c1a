"""Tests that are imported once and run many times, each time in a fork of the process that imported them.

Importing the package and a file of tests takes seconds; most mutants die in a part of one. So a process imports all
tests and waits. For a mutant it forks, and in the fork the functions of the mutated file get the code of the mutated
source. What runs while modules are imported stays as it was there: mutants of such lines need fresh imports.
"""

import ast
import gc
import multiprocessing
import os
import types
from pathlib import Path

from tests.mutation import processes

UNCLEAR = 99  # the exit code where it is not clear which function has which code


def is_in_a_function(mutant, source):
    """Whether a change is inside the body of a function, so that nothing but a call runs it."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return any(each.body[0].lineno <= mutant.line <= each.body[-1].end_lineno for each in functions)


def codes_of(source, path):
    """The code of every function of a source, by its name and its first line; several where a line has several."""
    found, waiting = {}, [compile(source, path, "exec", dont_inherit=True)]
    while waiting:
        for each in waiting.pop().co_consts:
            if isinstance(each, types.CodeType):
                found.setdefault((each.co_qualname, each.co_firstlineno), []).append(each)
                waiting.append(each)
    return found


def replace_code(functions, changed):
    """Give functions the code of a changed source. Raises ValueError where it is not clear which code is whose."""
    replaced = 0
    for function in functions:
        code = function.__code__
        new = changed.get((code.co_qualname, code.co_firstlineno), [])
        if code not in new:
            if len(new) != 1:
                raise ValueError(f"{code.co_qualname} has {len(new)} codes")
            function.__code__ = new[0]
            replaced += 1
    if not replaced:
        raise ValueError("no function has the code that was changed")


class Server(processes.FirstFailure):
    """A plugin of pytest that runs, of the tests that were collected, those that it is asked for."""

    def __init__(self, connection, folder):
        self._connection = connection
        self._source = str(Path(folder) / "src")
        self._tests, self._functions = {}, {}
        self.folder = folder

    def pytest_runtestloop(self, session):
        self._tests = {item.nodeid: item for item in session.items}
        # Files that could not be imported are left out; from here on, the first failure ends a run.
        session.testsfailed, session.shouldfail, session.config.option.maxfail = 0, False, 1
        gc.unfreeze()  # or what the tests have frozen is not among the objects
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType):
                self._functions.setdefault(each.__code__.co_filename, []).append(each)
        gc.freeze()
        self._connection.send(list(self._tests))
        while (request := self._connection.recv()) is not None:
            self._connection.send(self._meet(session, *request))
        os._exit(0)

    def _meet(self, session, changed, tests, seconds, temporary):
        if (child := os.fork()) == 0:
            code = 1
            try:
                processes.lead_a_group(temporary)
                self.folder = temporary
                code = self._run(session, changed, [self._tests[test] for test in tests])
            finally:
                os._exit(code)
        return processes.wait_and_end(child, seconds)

    def _run(self, session, changed, items):
        """The exit code of a fork, after these tests with the code that a file has now."""
        try:
            if changed is not None:
                replace_code(self._functions.get(changed, ()), codes_of(Path(changed).read_text(), changed))
        except ValueError:
            return UNCLEAR
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                return 1
        return 0


class PreloadedTests:
    """The tests of a copy of the repository, in a process that has imported them."""

    def __init__(self, folder, arguments):
        self._connection, theirs = multiprocessing.Pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.setsid()
                server = Server(theirs, folder)
                go_on = ["--maxfail=0", "--continue-on-collection-errors"]
                processes.run_pytest(folder, [*go_on, *arguments], server)
            finally:
                os._exit(1)
        theirs.close()
        self.names = set(self._connection.recv())  # of all tests that were collected

    def run(self, changed, tests, seconds, temporary):
        """The exit code of these tests, None if they do not end in time, with the present code of a file."""
        self._connection.send((changed, tests, seconds, temporary))
        return self._connection.recv()

    def end(self):
        self._connection.send(None)
        os.waitpid(self.process, 0)
