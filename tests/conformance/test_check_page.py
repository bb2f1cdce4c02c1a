"""The worked example of docs/guide/check.md: its commands are run, and what they find is what the page says."""

import json
import re
import subprocess
import sys

import pytest

from tests.cli.runner import call, call_json, leave_few_checks
from tests.test_docs import ROOT, blocks
from tokenyard.conformance.batch_data import DATA

PAGE = blocks(ROOT / "docs" / "guide" / "check.md")
FILE = (ROOT / "examples" / "my_parts.py").read_text()


def check(folder, *options):
    """What `tokenyard check` prints in a folder, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", "from tokenyard.cli import main; main()", "check", *options],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    return done.stdout, done.returncode


def import_from(folder, module, monkeypatch):
    """This process imports a module of a folder, and forgets it when the test ends."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, module, None)  # what the end of the test takes away
    del sys.modules[module]


def told(after):
    """The lines of the first plain block behind this one, but for what the drawn cases and the clock decide."""
    at = next(n for n, block in enumerate(PAGE) if after in block.body)
    text = next(block for block in PAGE[at + 1 :] if block.language == "text").body
    lines = [line for line in text.splitlines() if line.strip() and line != "…"]
    return [_plain(line) for line in lines if not re.search(r" in \d+ s$|^  Case\(|× mxfp8: ", line)]


def _plain(text):
    """Without the number of drawn cases that pass by chance."""
    return re.sub(r"✗ +\d+/24", "✗ some/24", text)


def test_the_transport_of_the_other_page_passes_random_cases(tmp_path, monkeypatch):
    """As the page recommends. Threads run its named checks in tests/test_docs.py; here processes run cases, too."""
    (file,) = [
        block for block in blocks(ROOT / "docs" / "guide" / "exchange-of-your-own.md") if block.is_file
    ]
    (tmp_path / str(file.title)).write_text(file.body)
    import_from(tmp_path, "plain_transport", monkeypatch)
    leave_few_checks(monkeypatch)
    plain = ("--exchange", "plain_transport:PlainTransport", "--ranks", "processes", "--rounds", 10)
    document = call_json("check", *plain, "--cases", 48)
    assert document["passed"]
    drawn = document["histogram"]
    assert drawn["data"].keys() <= DATA.keys()
    assert len(drawn["data"]) > 4
    assert drawn["sum"]["choices"] >= 5  # whose results are counted otherwise


def change(folder, old, new):
    assert old in FILE
    (folder / "my_parts.py").write_text(FILE.replace(old, new))


def test_the_example_as_a_program_prints_what_the_page_says():
    (command,) = [block.body for block in PAGE if block.language == "sh" and "# prints: " in block.body]
    done = subprocess.run(
        [sys.executable, "my_parts.py"],
        cwd=ROOT / "examples",
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.stdout.strip() == command.split("# prints: ")[1].strip(), done.stderr


def test_the_example_passes_some_checks(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(FILE)
    import_from(tmp_path, "my_parts", monkeypatch)
    leave_few_checks(monkeypatch)
    mine = ("--exchange", "my_parts:PairwiseTransport", "--format", "my_parts:Int8Rows")
    assert call_json("check", *mine, "--cases", 12, "--rounds", 10)["passed"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_passes(tmp_path):
    (tmp_path / "my_parts.py").write_text(FILE)
    command = next(b.body for b in PAGE if b.language == "sh" and "--cases 48" in b.body).split()
    out, code = check(tmp_path, *command[2:])
    assert code == 0
    for line in told("--cases 48"):
        assert line in out
    assert "48 of 48 cases and 208 of 208 checks passed" in out


IN_ORDER = ("in_order = [parts[source] for source in range(world)]", "in_order = list(parts.values())")


def test_the_first_finding_of_a_broken_exchange_is_the_one_of_the_page(tmp_path, monkeypatch):
    change(tmp_path, *IN_ORDER)
    import_from(tmp_path, "my_parts", monkeypatch)
    leave_few_checks(monkeypatch)
    mine = ("--exchange", "my_parts:PairwiseTransport", "--format", "mxfp8", "--ranks", "threads")
    result = call("check", *mine, "--cases", 4, "--rounds", 10)
    assert result.exit_code == 1
    (line,) = (line for line in told("--cases 24") if "row 5 is token 0 of rank 3" in line)
    assert line in result.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_broken_exchange_is_reported_as_the_page_says(tmp_path):
    change(tmp_path, *IN_ORDER)
    command = next(b.body for b in PAGE if b.language == "sh" and "--cases 24" in b.body).split()
    out, code = check(tmp_path, *command[2:])
    assert code == 1
    lines = told("--cases 24")
    assert any("row 5 is token 0 of rank 3" in line for line in lines)
    for line in lines:
        assert line in _plain(out)


def test_a_broken_format_is_reported_as_the_page_says(tmp_path, monkeypatch):
    change(tmp_path, "x_TH.abs().amax(dim=1, keepdim=True)", "x_TH.abs().amax().expand(len(x_TH), 1)")
    import_from(tmp_path, "my_parts", monkeypatch)
    leave_few_checks(monkeypatch)
    quick = ("--exchange", "two_sided", "--cases", 0, "--ranks", "threads", "--rounds", 1)
    result = call("check", "--format", "my_parts:Int8Rows", *quick)
    assert result.exit_code == 1
    page = (ROOT / "docs" / "guide" / "check.md").read_text()
    found = [line for line in result.stdout.splitlines() if line.startswith(("✗ int8_rows, ", "  also: "))]
    assert len(found) == 2
    assert all(line in page for line in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exchange", "my_parts:Nothing"], "cannot be loaded"),
        (["--format", "no_such_module:Format"], "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_loaded_is_exit_code_two(tmp_path, options, message):
    (tmp_path / "my_parts.py").write_text(FILE)
    out, code = check(tmp_path, *options, "--json")
    assert code == 2
    assert message in json.loads(out)["error"]["found"]
