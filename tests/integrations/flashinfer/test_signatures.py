"""Our class and functions take what FlashInfer's take: the same names, order, defaults and kinds of arguments."""

import ast
import inspect
import json
import textwrap

import pytest

from tests.integrations.flashinfer.signatures import STORED, parameters
from tokenyard.integrations import flashinfer

THEIRS = json.loads(STORED.read_text())
# What nothing in FlashInfer's arguments says: who the ranks are. Keywords, behind all of theirs.
OURS_TOO = {"__init__": ", group=None", "get_workspace": ", group=None"}


def ours(function):
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return parameters(definition)


@pytest.mark.parametrize("name", THEIRS["functions"])
def test_functions(name):
    assert name in flashinfer.__all__
    assert ours(getattr(flashinfer, name)) == THEIRS["functions"][name]


@pytest.mark.parametrize("name", THEIRS["methods"])
def test_methods(name):
    if THEIRS["methods"][name] == "property":
        assert name in flashinfer.MoeAlltoAll.__annotations__
    else:
        method = inspect.getattr_static(flashinfer.MoeAlltoAll, name)
        assert ours(inspect.unwrap(getattr(method, "__func__", method))) == THEIRS["methods"][
            name
        ] + OURS_TOO.get(name, "")


def test_layouts_of_scales():
    assert {layout.name: layout.value for layout in flashinfer.SfLayout} == THEIRS["SfLayout"]


def test_everything_was_read():
    assert set(THEIRS["functions"]) | {"MoeAlltoAll", "SfLayout"} == set(flashinfer.__all__)
    assert {"__init__", "dispatch", "combine", "get_workspace", "checkpoint_restore"} <= set(
        THEIRS["methods"]
    )
    assert THEIRS["methods"]["combine"].split(", ")[3] == "output_dtype=None"
