"""Tables that fit any terminal without cutting a cell.

A table that is too wide for its console is made to fit, in this order: cells wrap between words; lines and padding
between columns are removed; less needed columns are removed, and a line below names them; in the end every row becomes
a list of its cells, each with its heading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenyard.cli.output import console, has_a_width, say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table


class _Widths(NamedTuple):
    """The width of a column with no word broken, with no line of a cell broken, and with its heading on one line."""

    least: int
    cells: int
    most: int


def show_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    right: Sequence[str] = (),
    less_needed: Sequence[str] = (),
    **options: Any,
) -> None:
    """Make a table of text and print it. `right` are the headings of figures; options are those of rich's `Table`."""
    from rich.table import Table

    table = Table(title_justify="left", **options)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*row)
    print_table(table, less_needed=less_needed)


def print_table(table: Table, *, less_needed: Sequence[str] = ()) -> None:
    """Print a table, which is changed if it does not fit. `less_needed` are headings, in the order of removal."""
    out = console()
    for column in table.columns:
        # A figure stays beside its unit. A column that may be removed does not wrap: it is removed instead.
        if column.no_wrap or column.justify == "right" or column.header in less_needed:
            column.no_wrap = False  # its heading may wrap, and would be cut otherwise
            column.min_width = _widths(out, column).cells
    if not has_a_width(out):
        out.width = max(out.width, sum(_widths(out, column).most for column in table.columns) + _frame(table))
    if _least(out, table) > out.width:
        _make_compact(table)
    all_columns, left_out = table.columns, []
    for heading in less_needed:
        if _least(out, table) <= out.width:
            break
        if any(column.header == heading for column in table.columns):
            left_out.append(heading)
            _choose(table, [column for column in table.columns if column.header != heading])
    if _least(out, table) > out.width:
        _choose(table, all_columns)
        out.print(_as_lists(table))
        return
    _set_widths(out, table)
    out.print(table)
    if left_out:
        said = f"Left out for lack of width: {', '.join(left_out)}. A wider terminal shows them."
        say(said, style="dim")


def _widths(out: Console, column: Column) -> _Widths:
    from rich.measure import Measurement

    unlimited = out.options.update(width=10_000)
    heading = Measurement.get(out, unlimited, column.header)
    ranges = [Measurement.get(out, unlimited, cell) for cell in column.cells]
    cells = max([heading.minimum, *(one.maximum for one in ranges)])
    least = max([heading.minimum, column.min_width or 0, *(one.minimum for one in ranges)])
    return _Widths(least, cells, max(cells, heading.maximum))


def _frame(table: Table) -> int:
    """The columns of the console that lines and padding take."""
    _, right, _, left = table.padding
    edges = len(table.columns) - 1 + 2 * table.show_edge if table.box is not None else 0
    return edges + len(table.columns) * (left + right) - (0 if table.pad_edge else left + right)


def _least(out: Console, table: Table) -> int:
    return sum(_widths(out, column).least for column in table.columns) + _frame(table)


def _make_compact(table: Table) -> None:
    from rich import box

    table.box, table.padding, table.show_edge, table.pad_edge = box.SIMPLE, (0, 0, 0, 0), False, False


def _choose(table: Table, columns: list[Column]) -> None:
    table.columns = columns
    for index, column in enumerate(columns):
        column._index = index


def _set_widths(out: Console, table: Table) -> None:
    """Give every column the width of its longest word; the rest goes to cells that would wrap, then to headings."""
    widths = [_widths(out, column) for column in table.columns]
    given = [width.least for width in widths]
    for wanted in ([width.cells for width in widths], [width.most for width in widths]):
        spare = out.width - _frame(table) - sum(given)
        needy = sorted(range(len(widths)), key=lambda number: wanted[number] - given[number])
        # Columns that need the least come first; what they leave of their share goes to the others.
        for place, number in enumerate(needy):
            share = min(wanted[number] - given[number], spare // (len(needy) - place))
            spare -= share
            given[number] += share
    for column, width in zip(table.columns, given, strict=True):
        column.width = width


def _as_lists(table: Table) -> RenderableType:
    """Every row as a list of its cells, with their headings."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.table import Table as Grid

    lists: list[RenderableType] = [table.title] if table.title else []
    for row in zip(*(column.cells for column in table.columns), strict=True):
        grid = Grid.grid(padding=(0, 2))
        grid.add_column(style="dim", overflow="fold", no_wrap=False)
        grid.add_column(overflow="fold")
        for column, cell in zip(table.columns, row, strict=True):
            grid.add_row(column.header, cell)
        lists += [Rule(style="dim"), grid]
    lists += [table.caption] if table.caption else []
    return Group(*lists)
