"""The API reference holds every public name, and says of each name, attribute and method what it is."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest

import tokenyard as ty
from docs.generate import catalog, descriptions, reference
from docs.generate.pictures import pictures
from tokenyard.experts import EXPERTS


def test_every_exported_name_is_on_a_page():
    assert catalog.missing() == []


def test_nothing_is_without_a_description():
    assert reference.undescribed() == []


def test_the_pages_are_what_the_sources_give():
    pages = reference.pages()
    assert {path.name for path in pages} == {path.name for path in reference.FOLDER.iterdir()}
    for path, text in pages.items():
        assert path.read_text() == text, "run: make docs"


_ELSEWHERE = """
import json, os, platform, sys
for library in ("triton", "torchao", "compressed_tensors", "matplotlib", "flashinfer", "vllm"):
    sys.modules[library] = None  # importing it fails, and it is not to be found
platform.machine = lambda: "aarch64"
os.environ |= {"TOKENYARD_EXCHANGE": "allgather", "TOKENYARD_PARANOID": "1"}
from docs.generate.pictures import pictures
from docs.generate.reference import pages
print(json.dumps({str(path): text for path, text in (pages() | pictures()).items()}))
"""


def test_pages_and_pictures_are_the_same_on_every_machine():
    """Without libraries that are not required, on another CPU, and whatever the environment says."""
    command = [sys.executable, "-c", _ELSEWHERE]
    root = reference.FOLDER.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    here = {str(path): text for path, text in (reference.pages() | pictures()).items()}
    assert json.loads(done.stdout) == here


def test_every_field_of_a_layer_is_in_its_table_with_its_default_and_its_choices():
    page = reference.pages()[reference.FOLDER / "layers.md"]
    section = page[page.index("## class LayerSpec") : page.index("## function plan")]
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", section, re.MULTILINE)}
    assert list(rows) == [field.name for field in dataclasses.fields(ty.LayerSpec)]
    assert rows["hidden_size"][1] == "`int`"
    assert rows["weight_on"][1] == "<code>'input' &#124; 'output' = 'output'</code>"
    assert all(f"`{name}`" in rows["experts"][2] for name in EXPERTS)


def test_what_has_no_description_is_found(monkeypatch):
    """A name that nobody put on a page, a field without a comment, a method without a docstring."""
    monkeypatch.setattr(ty, "__all__", [*ty.__all__, "launched"])
    monkeypatch.setattr(ty, "launched", object, raising=False)
    assert catalog.missing() == ["tokenyard.launched"]
    monkeypatch.setattr(ty.Plan.trim, "__doc__", None)
    monkeypatch.setattr(descriptions, "_description", lambda statement, comments: "")
    descriptions._declared.cache_clear()
    try:
        found = reference.undescribed()
    finally:
        descriptions._declared.cache_clear()
    assert {"Plan.trim", "LayerSpec.wire", "ReceivedRows.slots_R", "Group.rank", "FORMATS"} <= set(found)
    assert "Plan.extend" not in found


class Base:
    """Attributes, described in the ways that there are."""

    behind: int  # a comment behind it
    # A comment above it,
    # of two lines.
    above: str = "value"
    plain = 3
    _hidden = 4

    def __init__(self) -> None:
        self.assigned = 1  # where it is assigned
        self.first, self.second = 1, 2

    @property
    def computed(self) -> int:
        """No attribute."""
        return 1


class Derived(Base):
    """Another default."""

    above = "other"


@pytest.mark.parametrize(
    ("name", "type", "default", "text"),
    [
        ("behind", "int", "", "A comment behind it."),
        ("above", "str", "'other'", "A comment above it, of two lines."),
        ("plain", "", "3", ""),
        ("assigned", "", "", "Where it is assigned."),
        ("first", "", "", ""),
    ],
)
def test_comments_describe_attributes(monkeypatch, name, type, default, text):
    monkeypatch.setattr(Base, "__module__", "tokenyard.base")
    monkeypatch.setattr(Derived, "__module__", "tokenyard.base")
    monkeypatch.setattr(descriptions.inspect, "getsource", lambda cls: _SOURCES[cls.__name__])
    found = {one.name: one for one in descriptions.attributes(Derived)}
    assert list(found) == ["behind", "above", "plain", "assigned", "first", "second"]
    one = found[name]
    assert (one.type, one.default, one.text) == (type, default, text)


_SOURCES = {cls.__name__: descriptions.inspect.getsource(cls) for cls in (Base, Derived)}
