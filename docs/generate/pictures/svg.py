"""Drawings as SVG: boxes, texts and arrows that look right in light and in dark mode, on the site and on GitHub.

A picture has a background of its own, and follows what the reader's system prefers. So its texts can be read whatever
page it stands on. It names no font that must be fetched, and leaves room for fonts that are wider than ours: a text
that would leave its box is an error when the picture is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

WIDTH = 640  # of all pictures: at the width of a phone, their texts are still about 9 points high

# Colors in light and in dark mode.
COLORS = {
    "page": ("#ffffff", "#1e2129"),
    "ink": ("#24292f", "#e6e8ee"),
    "muted": ("#57606a", "#a4aab8"),
    "line": ("#8c959f", "#7a8194"),
    "edge": ("#d0d7de", "#3d4350"),
    "blue": ("#cfe3ff", "#1f4470"),
    "amber": ("#ffe3b3", "#664613"),
    "green": ("#cdeccf", "#22572b"),
    "violet": ("#e7dbfb", "#49337a"),
    "pink": ("#ffd9e2", "#6b2a40"),
    "gray": ("#eceef1", "#30353f"),
}

_FONTS = {
    "sans": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "mono": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
}
# The width of a letter, in units of the font's size; that of a sans-serif font is a mean over English words.
_LETTER = {"sans": 0.56, "mono": 0.61}


@dataclass
class Drawing:
    """A picture of `WIDTH` by `height`, with a title that is read aloud where it cannot be seen."""

    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, color: str = "page", *, dashed: bool = False
    ) -> None:
        """A rectangle with an edge."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self.parts.append(f'<rect class="{color} box" {place} rx="3"{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        anchor: str = "start",
        font: str = "sans",
        color: str = "ink",
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """A line of text, its baseline at `y`; raise if it needs more than `room`."""
        needs = len(text) * size * _LETTER[font] * (1.06 if bold else 1)
        start = {"start": x, "middle": x - needs / 2, "end": x - needs}[anchor]
        if (room is not None and needs > room) or start < 0 or start + needs > WIDTH:
            raise ValueError(
                f"{text!r} takes about {needs:.0f} units from {start:.0f} on, and has {room or WIDTH}"
            )
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{color} {font}" {place}{weight}>{escape(text)}</text>')

    def boxed(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: list[str],
        color: str = "page",
        *,
        size: float = 14,
        font: str = "sans",
        dashed: bool = False,
        bold: bool = False,
    ) -> None:
        """A box with lines of text in its middle; the first of them may be bold."""
        self.box(x, y, width, height, color, dashed=dashed)
        step = size * 1.3
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.35
        if height < step * len(lines):
            raise ValueError(f"{lines} do not fit into a height of {height:.0f}")
        for number, line in enumerate(lines):
            self.text(
                x + width / 2,
                top + number * step,
                line,
                size=size,
                anchor="middle",
                font=font,
                bold=bold and number == 0,
                room=width - 6,
            )

    def arrow(self, *points: tuple[float, float], color: str = "line", dashed: bool = False) -> None:
        """A line through some points, with a head at the last."""
        path = " ".join(f"{'M' if index == 0 else 'L'}{_n(x)} {_n(y)}" for index, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path class="{color} wire" d="{path}" marker-end="url(#head)"{dash}/>')

    def __str__(self) -> str:
        size = f'width="{WIDTH}" height="{_n(self.height)}" viewBox="0 0 {WIDTH} {_n(self.height)}"'
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_style()}</style>",
                f"<defs>{head}</defs>",
                f'<rect class="page" width="{WIDTH}" height="{_n(self.height)}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _style() -> str:
    light, dark = ("".join(_rules(mode)) for mode in (0, 1))
    fonts = "".join(f".{name}{{font-family:{family}}}" for name, family in _FONTS.items())
    return f"{fonts}.wire{{fill:none;stroke-width:1.4}}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _rules(mode: int) -> list[str]:
    colors = {name: pair[mode] for name, pair in COLORS.items()}
    fills = [f".{name}{{fill:{color}}}" for name, color in colors.items()]
    return [
        *fills,
        f".box{{stroke:{colors['edge']}}}",
        f".wire.line{{fill:none;stroke:{colors['line']}}}",
        f".head{{fill:{colors['line']}}}",
    ]


def _n(value: float) -> str:
    """A number with at most one digit behind the point."""
    return f"{value:.1f}".removesuffix(".0")
