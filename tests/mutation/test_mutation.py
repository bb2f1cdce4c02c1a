"""The tool that changes the core: what it changes, which tests it chooses, and what it calls killed."""

import json
import re
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import pytest

from tests.mutation import __main__ as tool
from tests.mutation import trial
from tests.mutation.mutants import draw, mutants_of
from tests.mutation.preloaded import codes_of, is_in_a_function, replace_code
from tests.mutation.recorder import chosen_cases
from tests.mutation.selection import Record, choose

ROOT = Path(__file__).parents[2]


def changes(source):
    return [(mutant.before, mutant.after) for mutant in mutants_of("file.py", source)]


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("a < b", ("a < b", "(a <= b)")),
        ("time.monotonic() < b", ("time.monotonic() < b", "(time.monotonic() >= b)")),
        ("a is None", ("a is None", "(a is not None)")),
        ("a * b", ("a * b", "(a // b)")),
        ("a and b", ("a and b", "(a or b)")),
        ("not a", ("not a", "a")),
        ("a[0]", ("0", "1")),
        ("f(a=True)", ("True", "False")),
        ("b = a.clone()", ("a.clone()", "a")),
        ("f(a)", ("f(a)", "pass")),
        ("raise ValueError('a')", ("raise ValueError('a')", "pass")),
    ],
)
def test_a_change_of_each_kind(source, change):
    assert change in changes(source)


@pytest.mark.parametrize(
    "source",
    [
        "x: Literal[1] = y",
        "def f(a: Literal[1]) -> Literal[2]: return a",
        "@cached(1)\ndef f(a): return a",
        "x = f'{a + 1}'",
        "x = 'a' + b",
        "'a docstring'",
    ],
)
def test_what_only_speaks_is_left_alone(source):
    assert [after for _, after in changes(source) if after != "pass"] == []


def test_line_numbers_stay_and_so_does_the_rest():
    source = "# é → ü\nx = f(\n    1,\n    2,\n)\ny = 3\n"
    for mutant in mutants_of("file.py", source):
        changed = mutant.apply(source)
        assert changed.count("\n") == source.count("\n")
        assert changed.splitlines()[0] == "# é → ü"
        assert changed != source


def test_a_draw_is_the_same_for_the_same_seed_and_takes_a_line_once():
    mutants = mutants_of("file.py", "\n".join(f"a{n} = {n} < {n} + 1" for n in range(50)))
    assert draw(mutants, 20, seed=1) == draw(mutants, 20, seed=1) != draw(mutants, 20, seed=2)
    assert len({mutant.line for mutant in draw(mutants, 20, seed=1)}) == 20


class SmallRecord:
    """Three functions: one quick with two cases, one slow, one that starts processes and covers nothing."""

    tests: ClassVar = {
        "tests/a.py::quick[1]": {"seconds": 0.1},
        "tests/a.py::quick[2]": {"seconds": 0.2},
        "tests/a.py::slow": {"seconds": 5.0},
        "tests/group/b.py::processes": {"seconds": 1.0},
    }

    def covering(self, *_):
        return {test for test in self.tests if "a.py" in test and "[3]" not in test}

    def starting_processes(self):
        return {"tests/group/b.py::processes"}

    def others_like(self, tests):
        return {"tests/a.py::quick[3]"} & set(self.tests)


def test_each_function_has_its_turn_within_the_time():
    mutant = mutants_of("src/tokenyard/group/x.py", "a < b")[0]
    every = [
        "tests/a.py::quick[1]",
        "tests/a.py::slow",
        "tests/a.py::quick[2]",
        "tests/group/b.py::processes",
    ]
    assert choose(SmallRecord(), mutant, 60) == every
    assert choose(SmallRecord(), mutant, 1.5) == [every[0], every[2], every[3]]
    parts = [tests for tests, _ in tool.stages(SmallRecord(), mutant, (0.5, 1.5, 60))]
    assert parts == [[every[0], every[2]], [every[3]], [every[1]]]


class RecordOfDeclarations(SmallRecord):
    """No test runs the line."""

    tests: ClassVar = SmallRecord.tests | {"tests/test_declarations.py::test_it": {"seconds": 9.0}}

    def covering(self, path, first, last):
        return super().covering() if first < last else set()


def test_lines_that_run_while_modules_are_imported_meet_tests_of_declarations_first():
    mutant = mutants_of("src/tokenyard/group/x.py", "LIMIT = 3")[0]
    assert choose(RecordOfDeclarations(), mutant, 60)[0] == "tests/test_declarations.py::test_it"
    in_a_function = choose(RecordOfDeclarations(), mutant, 60, declares=False)
    assert (in_a_function[0], in_a_function[-1]) == (
        "tests/group/b.py::processes",
        "tests/test_declarations.py::test_it",
    )
    assert len(choose(RecordOfDeclarations(), mutant, 60)) == 5


class OneByOne:
    """Workers that try a mutant as soon as it is handed to them, and note the time that they take for it."""

    def __init__(self, clock):
        self.clock = clock

    def submit(self, meet, each):
        self.clock[0] += 10.0
        done = Future()
        done.set_result((each, "killed"))
        return done


@pytest.mark.parametrize(("seconds", "tried"), [(0, 0), (5, 1), (25, 3), (1000, 6)])
def test_after_its_time_no_further_mutant_is_tried(monkeypatch, seconds, tried):
    clock = [100.0]
    monkeypatch.setattr(tool.time, "monotonic", lambda: clock[0])
    found = tool.meet_in_turn(OneByOne(clock), 1, range(6), 100.0 + seconds)
    assert [mutant for mutant, _ in found] == [*range(tried)]


def test_a_quick_record_has_some_cases_of_each_function():
    tests = ["a.py::one", *(f"a.py::many[{n}]" for n in range(9)), "a.py::two[x]", "a.py::two[y]"]
    assert list(chosen_cases(tests, 1)) == ["a.py::one", "a.py::many[0]", "a.py::two[x]"]
    assert list(chosen_cases(tests, 3)) == [
        "a.py::one",
        *(f"a.py::many[{n}]" for n in (0, 4, 8)),
        "a.py::two[x]",
        "a.py::two[y]",
    ]


def test_cases_that_were_not_recorded_are_like_those_of_their_function_that_were(tmp_path):
    """They come behind the tests of a line; of a function that did not run nothing is known."""
    ran = {
        "tests/a.py::f[1]": {"seconds": 1.0, "processes": False, "passed": True},
        "tests/a.py::f[2]": {"seconds": 3.0, "processes": True, "passed": True},
    }
    (tmp_path / "tests.main.json").write_text(json.dumps(ran))
    (tmp_path / "others.main.json").write_text(json.dumps(["tests/a.py::f[3]", "tests/a.py::g[1]"]))
    record = Record(tmp_path)
    assert record.tests["tests/a.py::f[3]"] == {"seconds": 2.0, "processes": True, "passed": True}
    assert "tests/a.py::g[1]" not in record.tests
    assert record.others_like(["tests/a.py::f[1]"]) == {"tests/a.py::f[3]"}
    assert "tests/a.py::f[3]" in record.may_fail_by_itself()
    mutant = mutants_of("src/tokenyard/group/x.py", "a < b")[0]
    with_another = SmallRecord()
    with_another.tests = SmallRecord.tests | {"tests/a.py::quick[3]": {"seconds": 0.1}}
    assert choose(with_another, mutant, 60)[2:] == [
        "tests/a.py::quick[2]",
        "tests/a.py::quick[3]",
        "tests/group/b.py::processes",
    ]


def test_mutants_that_earlier_outcomes_tell_of_can_be_left_out(tmp_path):
    """Wherever their line stands now; another change of the same line is another mutant."""
    source = "a = 1 < 2\nb = 3\n"
    every = mutants_of("file.py", source)
    moved = next(mutant for mutant in mutants_of("file.py", "\n\n" + source) if mutant.before == "1 < 2")
    kept = tmp_path / "outcomes"
    kept.write_text(json.dumps({"mutant": str(moved), "verdict": "alive"}) + "\n")
    assert [m.before for m in tool.unseen(every, [kept])] == [m.before for m in every if m.before != "1 < 2"]
    assert tool.unseen(every, []) == every


_SMALL = "def double(x):\n    return x * 2\n"
_TESTS = {
    "killed": "def test_it(): assert small.double(2) == 4",
    "alive": "def test_it(): assert small.double(0) == 0",
    "timed out": "import time\ndef test_it():\n    while small.double(2) != 4: time.sleep(0.1)",
    "met by no test": "def test_it(): assert False  # without the mutant, too",
    "killed in a process": """
import multiprocessing
def test_it():
    process = multiprocessing.get_context("fork").Process(target=exit, args=(small.double(2),))
    process.start()
    process.join()
    assert process.exitcode == 4
""",
    "fails with the mutant, but not always": """
import pathlib
def test_it():
    failed = pathlib.Path(__file__).with_suffix(".failed")
    if small.double(2) != 4 and failed.exists():
        failed.unlink()
    elif small.double(2) != 4:
        failed.touch()
        assert False
""",
}


def start_small_worker(folder):
    trial._KEPT = ("src", "tests")
    trial.start_worker(folder, ["tests"])


def test_what_becomes_of_a_mutant(tmp_path):
    """With each of those tests, and with others, in both ways."""
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "small.py").write_text(_SMALL)
    freezing = "import gc\n\ndef pytest_collection_finish(session):\n    gc.freeze()\n"
    (tmp_path / "tests" / "conftest.py").write_text(freezing)  # as that of the suite does
    for number, test in enumerate(_TESTS.values()):
        (tmp_path / "tests" / f"test_{number}.py").write_text(f"import small\n{test}\n")
    for name in ("test_a_first.py", "test_z_last.py"):  # of packages that this machine does not have
        (tmp_path / "tests" / name).write_text("import missing\ndef test_it(): pass\n")
    mutant = next(m for m in mutants_of("src/small.py", _SMALL) if m.after == "(x // 2)")
    lists = [[f"tests/test_{number}.py::test_it"] for number in range(len(_TESTS))]
    lists += [["tests/test_nowhere.py::test_it"], ["tests/test_3.py::test_it", "tests/test_0.py::test_it"]]
    lists += [["tests/test_nowhere.py::test_it", "tests/test_0.py::test_it"]]
    trials = []
    for way, short in (("preloaded", 1), ("anew", 4)):  # seconds; "anew" starts pytest in them
        stages = [[(names, short if number == 2 else 60)] for number, names in enumerate(lists)]
        trials += [(mutant, each, (), (way,)) for each in stages]
    with tool.start_workers(1, start_small_worker, tmp_path) as workers:
        outcomes = [outcome for _, outcome in workers.map(trial.meet, trials)]
    each_way = [
        ("killed", "tests/test_0.py::test_it"),
        ("alive", None),
        ("timed out", None),
        ("met by no test", None),
        ("killed", "tests/test_4.py::test_it"),
        ("met by no test", None),
        ("met by no test", None),
        ("killed", "tests/test_0.py::test_it"),
        ("killed", "tests/test_0.py::test_it"),
    ]
    assert [(outcome.verdict, outcome.test) for outcome in outcomes] == each_way * 2


def test_functions_get_the_code_of_the_mutant():
    """Those that a module has, and those that others hold; where a line has several, nobody can tell which is meant."""
    source = "def f(x):\n    return [x * 2 for _ in [0]][0]\n\ndef g():\n    return lambda x: x * 2\n"
    names = {}
    exec(compile(source, "small.py", "exec"), names)
    held = names["g"]()
    functions = [names["f"], names["g"], held]
    for mutant in (m for m in mutants_of("small.py", source) if m.after == "(x // 2)"):
        replace_code(functions, codes_of(mutant.apply(source), "small.py"))
        assert is_in_a_function(mutant, source)
    assert names["f"](6) == 12  # the second mutant is without the first
    assert held(6) == names["g"]()(6) == 3
    with pytest.raises(ValueError, match="no function has the code that was changed"):
        replace_code([names["f"]], codes_of(source, "small.py"))
    with pytest.raises(ValueError, match="2 codes"):
        replace_code([names["g"]()], {("g.<locals>.<lambda>", 5): [names["f"].__code__] * 2})


def test_what_runs_while_modules_are_imported_is_met_in_fresh_processes():
    source = "LIMIT = 3\n\n@register(1)\ndef f(a=2):\n    return a + 4\n"
    inside = {m.before: is_in_a_function(m, source) for m in mutants_of("file.py", source)}
    assert inside == {"3": False, "2": False, "a + 4": True, "4": True}


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    """What is known is not tried again, but for those that lived, if asked."""
    kept = tmp_path / "outcomes"
    assert tool.known_outcomes(kept, again=False) == {}
    lines = [("a", "alive"), ("b", "killed"), ("c", "met by no test"), ("d", "alive"), ("d", "killed")]
    kept.write_text("".join(json.dumps({"mutant": m, "verdict": v, "tests": 3}) + "\n" for m, v in lines))
    verdicts = {m: outcome.verdict for m, outcome in tool.known_outcomes(kept, again=False).items()}
    assert verdicts == {"a": "alive", "b": "killed", "c": "met by no test", "d": "killed"}
    assert set(tool.known_outcomes(kept, again=True)) == {"b", "d"}


def test_the_core_is_what_runs_without_a_gpu():
    files = list(tool.core_files())
    assert "src/tokenyard/exchange/results.py" in files
    assert not [path for path in files if "kernels" in path or "cuda" in path]
    below_cuda = "if device.type == 'cuda':\n    f(1)\nelse:\n    f(2)"
    assert [after for _, after in changes(below_cuda)] == ["(device.type != 'cuda')", "pass", "3"]
    assert mutants_of("file.py", "def f(a): return a + 1\nb = 2", without=["f"])[0].before == "2"


def test_functions_that_only_a_gpu_runs_are_still_there():
    for pattern in tool.ONLY_ON_A_GPU:
        path, _, name = pattern.partition("::")
        if name:
            source = (ROOT / "src" / "tokenyard" / path.removeprefix("*/")).read_text()
            assert re.search(rf"(def|class) {name}[(:]", source), pattern


def test_mutants_that_change_nothing_are_still_in_the_source():
    """An entry whose line has changed says nothing any more."""
    same = tool.Equivalents()
    entries = same.mutants | same.constants
    paths = {path for path, *_ in entries}
    assert paths <= set(tool.core_files())
    found = {same.entry(mutant) for path in paths for mutant in tool.core_mutants(path)}
    assert entries - found == set()


def test_the_page_quotes_the_last_score():
    document = json.loads((ROOT / "bench" / "results" / "mutants-cpu.json").read_text())
    assert document["results"]["mutants"] >= 200
    assert tool.paragraph(document) in (ROOT / "docs" / "guide" / "faults.md").read_text()
