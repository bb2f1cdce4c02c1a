"""The site, built as `make docs` builds it: what a page says in Markdown is what its HTML shows.

`mkdocs build --strict` finds links that lead nowhere. It does not find a fence that it took for a paragraph, nor the
headings that such a fence swallows. So the site is built once here, and each page is compared with its source.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

# What a shell's commands may be marked as.
SHELLS = ("sh", "bash", "shell", "zsh", "console")

_FENCE = re.compile(r"^(?P<indent> *)```.*?\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADING = re.compile(r"^(#+) +(.*?) *$", re.MULTILINE)
_VOID = ("img", "br", "hr", "input")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@dataclass
class Shown:
    """What a reader sees of a page: its code blocks, its headings, and the text that is neither."""

    blocks: list[str] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    """Reads the article of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = Shown()
        self._inside: list[str] = []  # the article and what it holds

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag == "article" or self._inside:
            if tag not in _VOID:
                self._inside.append("permalink" if "headerlink" in classes else tag)
            if tag == "pre":
                self.shown.blocks.append("")
            elif re.fullmatch("h[1-6]", tag):
                self.shown.headings.append((int(tag[1]), ""))

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag not in _VOID:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        heading = any(re.fullmatch("h[1-6]", tag) for tag in self._inside)
        if not self._inside or "permalink" in self._inside:
            return
        if "pre" in self._inside:
            self.shown.blocks[-1] += data
        elif heading:
            level, text = self.shown.headings[-1]
            self.shown.headings[-1] = (level, text + data)
        else:
            self.shown.prose.append(data)


def shown(site: Path, page: Path) -> Shown:
    path = page.relative_to(DOCS)
    folder = path.parent if path.stem == "index" else path.with_suffix("")
    reader = _Reader()
    reader.feed((site / folder / "index.html").read_text())
    return reader.shown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_is_a_code_block_and_every_heading_a_heading(site, page):
    text = _COMMENT.sub("", page.read_text())
    fences = [
        re.sub(f"^{match['indent']}", "", match["body"], flags=re.M).rstrip("\n")
        for match in _FENCE.finditer(text)
    ]
    headings = [(len(marks), plain(heading)) for marks, heading in _HEADING.findall(_FENCE.sub("", text))]
    found = shown(site, page)
    assert [block.rstrip("\n") for block in found.blocks] == fences
    assert found.headings == headings
    # A fence that became prose; an escaped pipe in code, of which GitHub removes the backslash, and the site does not.
    assert [text for text in found.prose if "```" in text or r"\|" in text] == []


def test_shell_lines_wrap(site):
    """A long command is read to its end without scrolling: the stylesheet lets the blocks of shells wrap."""
    css = (site / "stylesheets" / "site.css").read_text()
    (wrapping,) = re.findall(r"([^{}]*)\{[^}]*white-space: pre-wrap;[^}]*\}", css)
    told = "".join(page.read_text() for page in PAGES)
    languages = {language for language in re.findall(r"^ *```(\w+)", told, re.M) if language in SHELLS}
    assert languages
    built = "".join(page.read_text() for page in site.rglob("*.html"))
    for language in languages:
        assert f'<div class="language-{language} highlight">' in built
        assert f".language-{language} code" in wrapping


def plain(heading: str) -> str:
    """A heading without its marks."""
    return _LINK.sub(r"\1", heading).replace("`", "").replace("\\", "")


def linked(page: Path) -> set[Path]:
    """The pages that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+\.md)", _FENCE.sub("", page.read_text()))
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_is_linked_from_the_index_or_from_that_of_its_section():
    """A page that is missing in the navigation is an error of the build."""
    from_index = linked(DOCS / "index.md") | {DOCS / "index.md"}
    for page in PAGES:
        section = page.parent / "index.md"
        assert page in from_index or (section in from_index and page in linked(section)), name_of(page)


def test_a_page_outside_of_the_navigation_is_an_error_of_the_build(tmp_path):
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    assert config.validation.nav.omitted_files == logging.WARNING


def test_only_pages_and_pictures_are_published(site):
    kinds = {path.suffix for path in site.rglob("*") if path.is_file() and "assets" not in path.parts}
    assert kinds <= {".html", ".svg", ".png", ".css", ".xml", ".gz", ".json", ".js"}
