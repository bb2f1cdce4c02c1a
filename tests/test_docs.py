"""The documentation is run: README.md and every page under docs/.

- A `python` block is executed; the blocks of one page share a namespace. `python no-run` is left alone (only
  for what needs a GPU).
- A `text title="output"` block is what the block before it printed, to the letter.
- A block with another title is a file. The page's `sh` blocks say how it is used, and so it is.
- Links lead somewhere, and the support tables are what the declarations give.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUPPORT_PAGES = [ROOT / name for name in ("README.md", "docs/support.md", "docs/guide/errors.md")]

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?)(?: *\{ ?#([\w-]+) ?\})? *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    info: str
    body: str
    line: int

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]*)"', self.info)
        return found.group(1) if found else None

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.title == "output"

    @property
    def is_file(self) -> bool:
        return self.title is not None and not self.is_output


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(match[1].strip(), match[2], text[: match.start()].count("\n") + 1)
        for match in _FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(page: Path, folder: Path) -> list[tuple[Block, str]]:
    """Run a page from top to bottom; return what was printed before each output block."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed, outputs = "", []
    for block in blocks(page):
        if block.is_output:
            outputs.append((block, printed))
        elif block.is_file:
            (folder / str(block.title)).write_text(block.body)
        elif block.language == "python" and "no-run" not in block.info:
            out = io.StringIO()
            # Empty lines in front give tracebacks the page's own line numbers.
            code = compile("\n" * block.line + block.body, str(page), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
        elif block.language == "sh":
            printed = "".join(
                run_command(line, folder) for line in block.body.splitlines() if is_command(line, folder)
            )
    return outputs


def is_command(line: str, folder: Path) -> bool:
    """Whether a line of a shell block uses one of the page's own files."""
    return any((folder / word).is_file() for word in shlex.split(line))


def run_command(line: str, folder: Path) -> str:
    program, *arguments = shlex.split(line)
    programs = {
        "python": [sys.executable],
        "tokenyard": [sys.executable, "-c", "from tokenyard.cli import main; main()"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }
    environment = {**os.environ, "COLUMNS": "140", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*programs[program], *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def comparable(text: str) -> str:
    """Times and the digits of a plan's hash may differ; nothing else."""
    text = re.sub(r"waited \d+\.\d s", "waited … s", text)
    return re.sub(r"\(plan [0-9a-f]{4}\)", "(plan …)", text).strip()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run_and_print_what_the_page_says(page, tmp_path):
    for block, printed in run_page(page, tmp_path):
        assert comparable(printed) == comparable(block.body), f"{name_of(page)}, line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_a_page_are_used_by_it(page):
    everything = blocks(page)
    commands = "\n".join(block.body for block in everything if block.language == "sh")
    for block in everything:
        assert not block.is_file or str(block.title) in commands, f"nothing on the page uses {block.title}"


def anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text())
    return {given or slug(heading) for heading, given in _HEADING.findall(text)}


def slug(heading: str) -> str:
    plain = re.sub(r"[`*]", "", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", SUPPORT_PAGES, ids=name_of)
def test_support_table_is_what_the_declarations_give(page, tmp_path):
    support = importlib.import_module("tokenyard.support")
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    support.rewrite(copy)
    assert copy.read_text() == page.read_text(), f"run: tokenyard support --write {name_of(page)}"
