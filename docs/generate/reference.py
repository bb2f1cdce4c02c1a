"""The API reference: a page for each part of the package, written from docstrings, signatures and fields.

Each name of the catalog has its signature, its docstring, its attributes and its methods. Descriptions of attributes
and constants are comments in the source (`docs.generate.descriptions`). `undescribed()` names whatever has no
description; a test holds it empty.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import html
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from docs.generate import check_reference, cli_reference, error_table
from docs.generate.catalog import PAGES, Name, Page, names
from docs.generate.descriptions import attributes, constant, written
from tokenyard.experts import ACTIVATIONS, EXPERTS
from tokenyard.formats import FORMATS, WEIGHT_FORMATS
from tokenyard.routing import PLACEMENTS
from tokenyard_lab.markdown import markdown_table

FOLDER = Path(__file__).resolve().parent.parent / "reference"

# Names that can be chosen for a field, from the registries: a new format is a new choice here, too.
CHOICES = {
    ("LayerSpec", "wire"): FORMATS,
    ("LayerSpec", "combine_wire"): [name for name, kind in FORMATS.items() if kind.combine_dtypes],
    ("LayerSpec", "expert_rows"): FORMATS,
    ("LayerSpec", "activation"): ACTIVATIONS,
    ("LayerSpec", "weights"): WEIGHT_FORMATS,
    ("LayerSpec", "placement"): PLACEMENTS,
    ("LayerSpec", "experts"): EXPERTS,
    ("ExpertsSpec", "weights"): WEIGHT_FORMATS,
}


def undescribed() -> list[str]:
    """Names, attributes and methods without a description."""
    found = [name.name for name in names() if not _text(name)]
    for name in names():
        if isinstance(name.value, type):
            found += [f"{name.name}.{one.name}" for one in attributes(name.value) if not one.text]
            found += [
                f"{name.name}.{method}" for method, value in _methods(name.value).items() if not _doc(value)
            ]
    return found


def pages() -> dict[Path, str]:
    """All pages of the reference, by the file that they belong into."""
    of_names = {FOLDER / f"{page.name}.md": _page(page) for page in PAGES}
    others = {
        "index": _index(),
        "cli": cli_reference.page(),
        "checks": check_reference.page(),
        "messages": error_table.page(),
    }
    return {**{FOLDER / f"{name}.md": text for name, text in others.items()}, **of_names}


def _index() -> str:
    parts = [
        "# Reference",
        "Every public name, from its docstring and its source. `make docs` writes these pages; what is missing a "
        "description here is a failing test.",
        "Fields of a dataclass that have no default must be given. `import tokenyard` loads a name when it is first "
        "used, and torch with it. [Options of the commands](cli.md) has the command line, "
        "[Named checks](checks.md) what `tokenyard check` asks, [Error messages](messages.md) what errors look like.",
    ]
    for page in PAGES:
        parts.append(f"## {page.title}")
        for package in page.names:
            listed = [name for name in names() if name.page is page and name.package == package]
            rows = [
                (f"[`{name.name}`]({page.name}.md#{name.anchor})", _linked(_summary(name), None))
                for name in listed
            ]
            parts.append(_table((f"from `{package}`", "what it is"), rows))
    return "\n\n".join(parts) + "\n"


def _page(page: Page) -> str:
    parts = [f"# {page.title}", page.about]
    for name in names():
        if name.page is page:
            parts += _section(name)
    return "\n\n".join(parts) + "\n"


def _section(name: Name) -> list[str]:
    heading = name.heading.replace("__version__", "`__version__`")  # else Markdown makes it bold
    parts = [f"## {heading}", f"`from {name.package} import {name.name}`"]
    if name.kind == "constant":
        return [*parts, _linked(_text(name), name), *_value(name.value)]
    if name.kind == "function" or _is_made_by_calling(name.value):
        parts.append(_signature(name.name, name.value))
    parts += _docstring(name.value, name)
    if isinstance(name.value, type):
        parts += _bases(name) + _attributes(name)
        parts += [part for method in _methods(name.value) for part in _method(name, method)]
    return parts


def _is_enum(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, enum.Enum)


def _is_made_by_calling(cls: type) -> bool:
    """Whether users make objects of a class with arguments that no table of fields shows."""
    made_elsewhere = "Made by" in (cls.__doc__ or "") or issubclass(cls, BaseException)
    return not (made_elsewhere or dataclasses.is_dataclass(cls) or _is_enum(cls) or inspect.isabstract(cls))


def _bases(name: Name) -> list[str]:
    known = {other.value: other for other in names() if isinstance(other.value, type)}
    bases = [known[base] for base in name.value.__mro__[1:] if base in known]
    if not bases:
        return []
    return [f"A kind of {_link(bases[0], name)}, with its attributes and methods."]


def _attributes(name: Name) -> list[str]:
    rows = []
    kinds = [
        other.value for other in names() if isinstance(other.value, type) and other.value is not name.value
    ]
    inherited = {
        one.name: one for base in name.value.__mro__[1:] if base in kinds for one in attributes(base)
    }
    for one in attributes(name.value):
        if inherited.get(one.name) == one or (one.name == "when" and inherited):
            continue  # when an error is raised, its docstring says
        choices = CHOICES.get((name.name, one.name))
        text = _linked(one.text, name)
        if choices is not None:
            text += f" Names: {', '.join(f'`{choice}`' for choice in choices)}."
        kind = _type(name.value, one.type) if one.type else ""
        value = one.default if _is_enum(name.value) else " = ".join(filter(None, (kind, one.default)))
        rows.append((f"`{one.name}`", _code(value), _escaped(text)))
    if not rows:
        return []
    columns = (
        ("member", "value") if _is_enum(name.value) else ("attribute", "type, and default if it has one")
    )
    return [_table((*columns, "meaning"), rows)]


def _type(cls: type, text: str) -> str:
    """A type as a reader wants it: the choices of a `Literal`, and no word on what belongs to the class."""
    text = text.removeprefix("ClassVar[").removesuffix("]") if text.startswith("ClassVar[") else text
    try:
        choices = get_args(eval(text, vars(sys.modules[cls.__module__])))
    except NameError:  # a name that is there for type checkers only
        choices = ()
    return " | ".join(map(repr, choices)) if choices and all(isinstance(c, str) for c in choices) else text


def _methods(cls: type) -> dict[str, Any]:
    """The public methods and properties that a class adds to those of its documented bases, in their order."""
    bases = [other.value for other in names() if isinstance(other.value, type) and other.value is not cls]
    inherited = {member for base in cls.__mro__[1:] if base in bases for member in _members(base)}
    return {name: value for name, value in _members(cls).items() if name not in inherited}


def _members(cls: type) -> dict[str, Any]:
    own = [kind for kind in cls.__mro__ if kind.__module__.startswith("tokenyard.")]
    found: dict[str, Any] = {}
    for kind in reversed(own):
        for name, value in vars(kind).items():
            inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            inner = getattr(inner, "func", inner) if isinstance(inner, functools.cached_property) else inner
            is_method = inspect.isfunction(inner) or isinstance(inner, property)
            if inspect.isfunction(inner) and inner.__name__ != name:
                continue  # another name for a function that is there already
            is_public = not name.startswith("_") or name == "__call__"
            is_field = name in getattr(cls, "__dataclass_fields__", ())
            if is_method and is_public and not is_field and name not in found:
                found[name] = inspect.getattr_static(cls, name)
    return found


def _method(name: Name, method: str) -> list[str]:
    value = _methods(name.value)[method]
    inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if isinstance(inner, property | functools.cached_property):
        getter: Any = inner.fget if isinstance(inner, property) else inner.func
        returns = inspect.signature(getter).return_annotation
        shown = f"{name.name}.{method}: {returns}" if isinstance(returns, str) else f"{name.name}.{method}"
        code = _fence(shown)
    else:
        shown = method if method == "__call__" else f"{name.name}.{method}"
        code = _signature(shown, inner, cut=not isinstance(value, staticmethod))
    # Markdown makes `__call__` bold where it is no code.
    heading = f"`{name.name}.{method}`" if method.startswith("__") else f"{name.name}.{method}"
    return [f"### {heading}", code, *_docstring(value, name)]


def _signature(shown: str, value: Any, *, cut: bool = False) -> str:
    """How something is called, as Python code; long signatures have a line for each parameter."""
    signature = inspect.signature(value)
    parameters = list(signature.parameters.values())[1 if cut else 0 :]
    defaults = _defaults(value)
    texts, star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            texts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        text = f"{stars}{parameter.name}"
        annotation = parameter.annotation
        if annotation is not parameter.empty:
            text += f": {annotation if isinstance(annotation, str) else annotation.__name__}"
        if parameter.default is not parameter.empty:
            text += f" = {written(parameter.default) or defaults.get(parameter.name, '…')}"
        texts.append(text)
    returns = signature.return_annotation
    arrow = f" -> {returns}" if isinstance(returns, str) and not isinstance(value, type) else ""
    line = f"{shown}({', '.join(texts)}){arrow}"
    if len(line) > 100:
        line = f"{shown}(\n    " + ",\n    ".join(texts) + f",\n){arrow}"
    return _fence(line)


def _defaults(value: Any) -> dict[str, str]:
    """Defaults as the source has them, for those that cannot be written otherwise."""
    function = getattr(value, "__init__") if isinstance(value, type) else value  # noqa: B009
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(node, ast.FunctionDef)
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {argument.arg: ast.unparse(default) for argument, default in pairs if default is not None}


def _fence(code: str) -> str:
    return f"<!-- not run: a signature -->\n```python\n{code}\n```"


def _value(value: Any) -> list[str]:
    """The keys of a registry, or a plain value."""
    if isinstance(value, dict):
        return ["Keys: " + ", ".join(f"`{key}`" for key in value) + "."]
    return [f"`{written(value)}`"]


def _doc(value: Any) -> str:
    value = value.func if isinstance(value, functools.cached_property) else value
    return inspect.cleandoc(value.__doc__ or "")


def _text(name: Name) -> str:
    """The whole description of a name. A constant is described by the comment above it."""
    if name.kind == "constant":
        return constant(name.package, name.name)
    doc = vars(name.value).get("__doc__") if isinstance(name.value, type) else name.value.__doc__
    # Python writes a signature where a dataclass has no docstring.
    return "" if not doc or doc.startswith(f"{name.name}(") else inspect.cleandoc(doc)


def _summary(name: Name) -> str:
    """The first sentence, or paragraph."""
    first = _text(name).split("\n\n")[0].split(">>>")[0]
    return _escaped(" ".join(first.split()))


def _docstring(value: Any, name: Name) -> list[str]:
    """A docstring as Markdown: examples become blocks of code."""
    text = _doc(value) if not isinstance(value, type) else _text(name)
    parts = []
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith(">>>"):
            parts.append(f"```pycon\n{_without_directives(block)}\n```")
        elif re.search(r"^>>> ", block, re.M):
            said, _, code = block.partition("\n>>> ")
            parts += [_linked(said, name), f"```pycon\n{_without_directives('>>> ' + code)}\n```"]
        elif block.startswith("    "):
            parts.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            parts.append(_linked(block, name))
    return parts


def _without_directives(code: str) -> str:
    return re.sub(r"\s*# doctest:.*", "", code)


def _linked(text: str, here: Name | None) -> str:
    """Text in which the names of the reference are links."""
    counts = Counter(name.name for name in names())
    known = {name.name: name for name in names() if counts[name.name] == 1 and name is not here}
    page = here.page if here is not None else None

    def link(found: re.Match[str]) -> str:
        name = known.get(found[1])
        if name is None or (here is not None and name.name == here.name):
            return found[0]
        where = "" if name.page is page else f"{name.page.name}.md"
        return f"[`{found[1]}`]({where}#{name.anchor})"

    return re.sub(r"(?<!\[)`(\w+)`(?!\])", link, text)


def _link(name: Name, here: Name) -> str:
    where = "" if name.page is here.page else f"{name.page.name}.md"
    return f"[`{name.name}`]({where}#{name.anchor})"


def _code(text: str) -> str:
    """Code in a cell of a table. The site and GitHub read an escaped `|` in it differently, but not this one."""
    if "|" in text:
        return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return markdown_table(columns, (tuple(map(_escaped, row)) for row in rows))
