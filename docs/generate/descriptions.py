"""How the attributes of a class are described in its source: by a comment above or behind each of them.

    class Group(ABC):
        rank: int  # counts within the group
        # Seconds that any single wait may take.
        deadline: float

Constants of a module are described in the same way. An attribute that is only assigned in a method
(`self.plan = plan`) is described where it is assigned. A subclass that sets an attribute of its base class inherits
the description.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Attribute:
    """A public attribute of a class."""

    name: str
    type: str  # as the source has it; empty where it does not say
    default: str  # as Python writes it; empty where there is none
    text: str  # what it means; empty where nobody has described it


def attributes(cls: type) -> list[Attribute]:
    """The public attributes of a class and of its bases in this package, bases first."""
    found: dict[str, Attribute] = {}
    for kind in reversed(_own_bases(cls)):
        for name, (annotation, text) in _declared(kind).items():
            before = found.get(name)
            found[name] = Attribute(
                name=name,
                type=annotation or (before.type if before else ""),
                default=_default(cls, name),
                text=text or (before.text if before else ""),
            )
    hidden = {
        name for kind in cls.__mro__ for name, value in vars(kind).items() if isinstance(value, property)
    }
    return [attribute for attribute in found.values() if attribute.name not in hidden]


def constant(package: str, name: str) -> str:
    """What a constant means: the comment above it, in the module that sets it."""
    source = inspect.getsource(importlib.import_module(package))
    for statement in ast.parse(source).body:
        if any(target == name for target, _ in _targets(statement, ast.Name)):
            return _description(statement, _comments(source))
        if isinstance(statement, ast.ImportFrom) and any(alias.name == name for alias in statement.names):
            return constant(str(statement.module), name)
    home = getattr(importlib.import_module(package), "_HOME_OF", {})[name]
    return constant(f"{package}.{home}", name)


def _own_bases(cls: type) -> list[type]:
    return [kind for kind in cls.__mro__ if kind.__module__.startswith("tokenyard.")]


@functools.cache
def _declared(cls: type) -> dict[str, tuple[str, str]]:
    """Type and description of the attributes that one class declares or assigns, by name."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = _comments(source)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    for statement in definition.body:
        for name, annotation in _targets(statement, ast.Name):
            found[name] = (annotation, _description(statement, comments))
    for method in definition.body:
        if not isinstance(method, ast.FunctionDef) or _is_property(method):
            continue
        for node in ast.walk(method):
            for name, annotation in _targets(node, ast.Attribute):
                text = _description(node, comments)
                # The first assignment that says something counts.
                if name not in found or (text and not found[name][1]):
                    found[name] = (found.get(name, (annotation, ""))[0] or annotation, text)
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _is_property(method: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in method.decorator_list)


def _targets(statement: ast.AST, kind: type[ast.Name | ast.Attribute]) -> list[tuple[str, str]]:
    """What a statement assigns: names of a class body, or attributes of `self`."""
    targets: list[ast.expr] = []
    annotation = ""
    if isinstance(statement, ast.AnnAssign):
        targets, annotation = [statement.target], ast.unparse(statement.annotation).strip("'\"")
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            targets += target.elts if isinstance(target, ast.Tuple) else [target]
    if kind is ast.Name:
        return [(target.id, annotation) for target in targets if isinstance(target, ast.Name)]
    return [
        (target.attr, annotation)
        for target in targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    ]


def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """The comments of some source by line: their text, and whether they stand alone on their line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.strip().startswith("#")
            found[token.start[0]] = (token.string.lstrip("# ").rstrip(), alone)
    return found


def _description(statement: Any, comments: dict[int, tuple[str, bool]]) -> str:
    """The comment behind a statement, or those above it."""
    for line in (statement.end_lineno, statement.lineno):
        text, alone = comments.get(line or 0, ("", True))
        if not alone and not text.startswith(("type:", "noqa")):
            return _sentence(text)
    lines: list[str] = []
    line = statement.lineno - 1
    while comments.get(line, ("", False))[1]:
        lines.insert(0, comments[line][0])
        line -= 1
    return _sentence(" ".join(lines))


def _sentence(text: str) -> str:
    """A comment as a sentence: with a capital letter, and a full stop."""
    text = " ".join(text.split())
    if not text:
        return ""
    if re.match(r"[a-z]+\b", text):  # not `code`, float32 or vLLM
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "…", ":")) else text + "."


def _default(cls: type, name: str) -> str:
    """The default of a dataclass field, or the value of a class attribute, as it is written in Python."""
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    if name in fields:
        field = fields[name]
        if field.default is not dataclasses.MISSING:
            return written(field.default)
        if field.default_factory is not dataclasses.MISSING:
            return "[]" if field.default_factory is list else "{}" if field.default_factory is dict else "…"
        return ""
    value = inspect.getattr_static(cls, name, dataclasses.MISSING)
    if value is dataclasses.MISSING or inspect.ismemberdescriptor(value):
        return ""
    return written(value.value if isinstance(value, enum.Enum) else value)


def written(value: object) -> str:
    """A value as it is written in Python, or nothing where that says nothing."""
    if isinstance(value, tuple):
        return f"({', '.join(map(written, value))}{',' if len(value) == 1 else ''})"
    text = repr(value)
    return "" if "<" in text or " object at " in text else text
