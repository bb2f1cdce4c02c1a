"""Mutants: the source of the core with one small change that should break a test.

A mutant swaps an operator, moves a number by one, negates a condition, or drops a copy, a call or a `raise`. Messages,
annotations and decorators are left alone: what they say is tested elsewhere, or not at all by running. So is what
stands below `if … == "cuda"`: no test of the core has a GPU.
"""

import ast
import random
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# For limits of time: no clock stands exactly at one, so nothing depends on which side the limit itself is.
_OPPOSITES = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_COPIES = ("clone", "contiguous", "copy", "detach")


@dataclass(frozen=True)
class Mutant:
    """One change: where it is, what stood there, and what stands there instead."""

    path: str  # from the root of the repository
    line: int
    before: str
    after: str
    start: int  # of what is replaced, in characters of the file
    end: int
    source_line: str  # the line without its indentation, by which `equivalent.toml` finds it again

    def apply(self, source):
        """The source with this change, line numbers as they were."""
        missing = self.before.count("\n") - self.after.count("\n")
        return source[: self.start] + self.after + "\\\n" * missing + source[self.end :]

    def __str__(self):
        flat = " ".join(self.before.split()), " ".join(self.after.split())
        return f"{self.path}:{self.line}: {flat[0]} → {flat[1]} in: {self.source_line}"


def mutants_of(path, source, without=()):
    """Every mutant of a file, in the order of its lines, but for functions and classes of these names."""
    found = []
    starts = _line_starts(source)
    lines = source.splitlines()

    def add(node, after):
        start = starts[node.lineno - 1] + _characters(lines[node.lineno - 1], node.col_offset)
        end = starts[node.end_lineno - 1] + _characters(lines[node.end_lineno - 1], node.end_col_offset)
        before = source[start:end]
        made = Mutant(path, node.lineno, before, after, start, end, lines[node.lineno - 1].strip())
        # Expressions are put in parentheses; only what takes the place of several lines may not fit there.
        if "\n" not in before or _is_valid(made.apply(source)):
            found.append(made)

    for node in _running_code(ast.parse(source), without):
        for after in _changes(node):
            add(node, after)
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def draw(mutants, count, seed):
    """So many mutants, evenly over the lines that have any, the same for the same seed."""
    by_line = {}
    for mutant in mutants:
        by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in lines]


def _changes(node):
    """What may stand in a node's place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        others = _COMPARISONS | (_OPPOSITES if "time.monotonic()" in _text(node) else {})
        yield _text(ast.Compare(node.left, [others[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield _text(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _text(ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _text(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COPIES:
        if not node.args:
            yield _text(node.func.value)
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"
    elif isinstance(node, ast.Break):
        yield "continue"
    elif isinstance(node, ast.Continue):
        yield "break"


def _running_code(tree, without):
    """The nodes whose change can change what runs: no annotations, decorators, messages or imports for types."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in without:
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.If) and name == "body" and _text(node.test).endswith("== 'cuda')"):
                continue
            if name in ("annotation", "returns", "decorator_list", "type_params", "type_comment"):
                continue
            if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
                continue
            if isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Assign) and any(_text(each) == "__all__" for each in node.targets):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue  # `zip` says by it that lists are of one length; they are
            children = value if isinstance(value, list) else [value]
            waiting.extend(child for child in children if isinstance(child, ast.AST))


def _text(node):
    return f"({made})" if " " in (made := ast.unparse(node)) and not isinstance(node, ast.Name) else made


def _is_text(node):
    """Whether an addition joins strings, which is part of a message."""
    return any(isinstance(side, ast.JoinedStr) or _is_string(side) for side in (node.left, node.right))


def _is_string(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_valid(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _line_starts(source):
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _characters(line, utf8_bytes):
    """How many characters so many bytes of a line are: `ast` counts bytes."""
    return len(line.encode()[:utf8_bytes].decode())
