"""The documentation is run: README.md and every page under docs/.

- A `python` block is executed; the blocks of one page share a namespace. One below a comment
  `<!-- not run: why -->` is left alone: say, it needs a GPU.
- A `text title="output"` block is what the block before it printed, to the letter.
- A block of another language that has a title is a file. The page's `sh` blocks use it, and so they are run.
- Links lead somewhere, and the support tables are what the declarations give.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from docs.generate import cli_reference, tables
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.formats import WEIGHT_FORMATS
from tokenyard.integrations.huggingface import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<not_run>[^\n]+) -->\n)?```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    info: str
    body: str
    line: int
    not_run: str | None  # why it is not run, if so

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
        return self.title is not None and self.language != "text"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            match["info"].strip(),
            match["body"],
            text[: match.start("info")].count("\n") + 1,
            match["not_run"],
        )
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
        elif block.language == "python" and block.not_run is None:
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
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab/src")])
    environment = {**os.environ, "COLUMNS": "140", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
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
    text = re.sub(r"\bprocess \d+", "process …", text)
    text = re.sub(r"waited \d+\.\d s", "waited … s", text)
    return re.sub(r"\(plan [0-9a-f]{4}\)", "(plan …)", text).strip()


@pytest.fixture
def kept_registries():
    """A page may add a family of models; no other test sees it."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


# They run all checks of an exchange: tests/conformance/test_check_page.py runs some on the same files.
LONG = [ROOT / "docs/guide/check.md", ROOT / "docs/guide/exchange-of-your-own.md"]


@pytest.mark.usefixtures("kept_registries")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page in LONG else ()) for page in PAGES],
    ids=name_of,
)
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
    """Where links into a page may lead: both on the site and on GitHub, which knows no `{ #anchor }`."""
    text = _FENCE.sub("", page.read_text())
    return {slug(heading) for heading in _HEADING.findall(text) if slug(heading) == github_slug(heading)}


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", _words(heading).strip())


def github_slug(heading: str) -> str:
    return _words(heading).replace(" ", "-")


def _words(heading: str) -> str:
    return re.sub(r"[^\w\s-]", "", heading.lower())


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


@pytest.mark.parametrize(("name", "command"), cli_reference.commands().items())
def test_every_option_of_a_command_is_in_its_section_of_the_reference(name, command):
    page = (ROOT / "docs/reference/cli.md").read_text()
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    options = {option for each in command.params for option in [*each.opts, *each.secondary_opts]}
    named = set(re.findall(r"--[\w-]+", section))
    assert {option for option in options if option.startswith("--")} <= named
    assert command.help


@pytest.mark.parametrize(
    ("page", "line", "names"),
    [
        ("docs/concepts.md", "| **exchange** |", EXCHANGES),
        ("docs/concepts.md", "| **experts** |", EXPERTS),
        ("docs/concepts.md", "| **format** |", WEIGHT_FORMATS),
        ("docs/guide/experts.md", "| name | what it is |", EXPERTS),
        ("docs/guide/gpus.md", "Weights stay as they are held", WEIGHT_FORMATS),
    ],
)
def test_what_can_be_chosen_is_all_named(page, line, names):
    """A part that came later is missing in no list."""
    text = (ROOT / page).read_text()
    start = text.index(line)
    # A line of a table stands for itself; its head, and any other line, for all that follows up to an empty one.
    cell = line.startswith(("| `", "| **"))
    listed = text[start : text.index("\n" if cell else "\n\n", start)]
    assert [name for name in names if f"`{name}`" not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_speaks_of_an_earlier_version(page):
    """Releases are in the changelog; a page says what is there."""
    assert not re.search(r"(?i)in this version", page.read_text())


def measured(name: str) -> Any:
    return json.loads((ROOT / "bench/results" / name).read_text())["results"]


def test_a_page_says_how_many_rounds_were_measured():
    rounds = json.loads((ROOT / "bench/results/paranoid-cpu.json").read_text())["setup"]["rounds"]
    (said,) = re.findall(r"medians of (\d+) rounds", (ROOT / "docs/guide/paranoid.md").read_text())
    assert rounds == int(said)


def test_a_page_says_how_long_each_exchange_takes():
    (told,) = re.findall(
        r"^\| time of a round trip.*$", (ROOT / "docs/guide/exchanges.md").read_text(), re.MULTILINE
    )
    took = {
        record["parameters"]["exchange"]: record["ours"]["median"]
        for record in measured("dispatch-cpu.json")
        if record["parameters"]["wire"] == "bf16"
    }
    columns = ("one_sided", "two_sided", "allgather")
    assert re.findall(r"(\d+) ms", told) == [f"{took[name]:.0f}" for name in columns]


@pytest.mark.parametrize("page", ["README.md", "docs/guide/faults.md"])
def test_a_page_says_how_late_an_error_was(page):
    found = measured("faults-cpu.json")
    # One that never starts is waited for as long as ranks may take to find each other.
    kinds = [kind for kind in found["kinds"] if kind["kind"] != "never starts"]
    late = max(kind["worst_s"] or 0.0 for kind in kinds) - found["deadline_s"]
    assert late < 2.5
    assert "within about two seconds of the" in (ROOT / page).read_text()


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_what_was_measured_declared_and_raised(name, tmp_path):
    copy = tmp_path / Path(name).name
    copy.write_text((ROOT / name).read_text())
    assert not tables.rewrite(copy), "run: python -m docs.generate"


def test_contributing_names_every_package():
    package = ROOT / "src" / "tokenyard"
    parts = {path.name + "/" for path in package.iterdir() if (path / "__init__.py").exists()}
    parts |= {path.name for path in package.glob("[a-z]*.py")}
    (section,) = re.findall(
        r"^## The packages$(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
    assert sorted(re.findall(r"^\| `([\w./]+)` \|", section, re.M)) == sorted(parts)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 7000


def test_guides_are_short_and_so_is_all_of_them_together():
    """A guide says what a user does and may expect. What was measured and refuted goes to `bench/notes`."""
    sizes = {page: len(page.read_bytes()) for page in PAGES if page.parent.name != "reference"}
    long = [name_of(page) for page, size in sizes.items() if page.parent.name == "guide" and size > 10_240]
    assert long == [], "move what was measured to bench/notes, and lists of names to docs/generate"
    assert sum(sizes.values()) <= 250_000


NOTES = sorted((ROOT / "bench/notes").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=name_of)
def test_files_that_a_page_names_are_there(page):
    """Records, notes and examples are named by their path, because they are not part of the site."""
    named = re.findall(
        r"`((?:bench|examples|tests/[\w/]+)/[\w./-]+\.(?:json|md|py|yaml|sbatch))`", page.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("note", NOTES, ids=name_of)
def test_a_note_has_its_date_and_is_named_by_a_page(note):
    assert re.search(r"\b(2026-\d\d-\d\d|November 2026)\b", note.read_text()[:500])
    pages = [page.read_text() for page in [*PAGES, *NOTES] if page != note]
    assert any(note.name in text for text in pages)


@pytest.mark.parametrize("note", NOTES, ids=name_of)
def test_links_of_a_note_lead_somewhere(note):
    test_links_lead_somewhere(note)


def test_the_page_on_installing_says_what_the_package_declares():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/install.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(declared["optional-dependencies"])
    torch = declared["dependencies"][0]
    assert f"{torch.replace('>=', ' ')} or newer" in page
