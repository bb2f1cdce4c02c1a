"""What commands print in a narrow terminal."""

import re

import typer
from typer.testing import CliRunner


def printed(function):
    """What a function prints, as a command's result has it."""
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [])


def words(text):
    """All words, without the lines of tables."""
    return set(re.sub(r"[━─│┃┏┓┗┛┡┩╇┳┻┼╋├┤┬┴└┘┌┐]", " ", text).split())


def out_of(command, folder, monkeypatch, columns):
    """What a command prints in a terminal of this width."""
    folder.mkdir()
    monkeypatch.setenv("COLUMNS", str(columns))
    result = command(folder, monkeypatch)
    assert result.exit_code == 0, result.output
    return result.stdout


def check_it_fits(command, columns, folder, monkeypatch):
    """Raise unless a command fits a terminal of this width, and shows every word or names the columns left out."""
    narrow = out_of(command, folder / "narrow", monkeypatch, columns)
    wide = out_of(command, folder / "wide", monkeypatch, 1000)
    assert max(map(len, narrow.splitlines())) <= columns
    # By itself it stands between the first and the last layer.
    assert "…" not in re.sub(r"(?<!\S)…(?!\S)", "", narrow)
    if "Left out for lack of width: " not in narrow:
        assert words(wide) - words(narrow) == set()
