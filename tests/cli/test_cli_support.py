"""`tokenyard support`."""

from __future__ import annotations

from tests.cli.runner import call, call_json
from tokenyard.lab.support import marks, support_tables, to_markdown

BEGIN, END = marks("support")


def test_tables():
    assert call_json("support") == {"tables": [table.as_dict() for table in support_tables()]}
    shown = call("support").stdout
    for table in support_tables():
        assert table.title in shown
    assert "`" not in shown


def test_write(tmp_path):
    pages = [tmp_path / name for name in ("one.md", "two.md")]
    for page in pages:
        page.write_text(f"{BEGIN}\n{END}\n")
    assert [w["changed"] for w in call_json("support", "--write", *pages)["written"]] == [True, True]
    for page in pages:
        assert to_markdown() in page.read_text()
    assert call("support", "--write", *pages).stdout.splitlines() == [f"{page}: up to date" for page in pages]


def test_write_needs_files_and_files_need_write(tmp_path):
    for arguments in (["--write"], [tmp_path / "one.md"], ["--write", tmp_path / "none.md"]):
        result = call("support", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "error:" in result.stderr
        assert call_json("support", *arguments, exit_code=2)["error"]["type"] == "InputError"
