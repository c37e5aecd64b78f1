"""Lines over rounds as SVG: a panel a figure, a line a name. Text in, text out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, ACROSS = 340, 220, 3  # of a panel, and panels in a row
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 34, 36
COLOURS = ("#e07b39", "#2a78d6", "#888888")
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600 } "
    ".grid { stroke: #333; opacity: .12 } .line { fill: none; stroke-width: 2 }"
)


@dataclass(frozen=True)
class Panel:
    """A figure's values by name, one a round from the first on."""

    title: str
    lines: Mapping[str, Sequence[float]]


def drawing(panels: Sequence[Panel], below: str) -> str:
    """All panels and a legend; `below` is written under each panel."""
    places = len(panels) + 1
    wide, high = WIDTH * min(places, ACROSS), HEIGHT * math.ceil(places / ACROSS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
    ]
    bodies = [list(_panel(panel, below)) for panel in panels]
    bodies.append(list(_legend(list(panels[0].lines))))
    for place, body in enumerate(bodies):
        x, y = place % ACROSS * WIDTH, place // ACROSS * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *body, "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _ticks(high: float) -> list[float]:
    """Round values from 0 to `high` or above."""
    least = (high or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
    return [step * at for at in range(math.ceil((high or 1.0) / step) + 1)]


def _panel(panel: Panel, below: str) -> Iterator[str]:
    count = max(len(values) for values in panel.lines.values())
    ticks = _ticks(max(value for values in panel.lines.values() for value in values))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x(at: int) -> float:
        return LEFT + (right - LEFT) * at / max(1, count - 1)

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / ticks[-1]

    yield f'<text class="title" x="{LEFT}" y="{TOP - 14}">{escape(panel.title)}</text>'
    for tick in ticks:
        yield f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{right}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'
    for at in range(0, count, math.ceil(count / 10)):
        yield f'<text x="{x(at):.1f}" y="{bottom + 16}" text-anchor="middle">{at + 1}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{bottom + 31}" text-anchor="middle">{escape(below)}</text>'
    for colour, values in zip(COLOURS, panel.lines.values(), strict=False):
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in enumerate(values))
        yield f'<polyline class="line" stroke="{colour}" points="{points}"/>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    for at, (colour, name) in enumerate(zip(COLOURS, names, strict=False)):
        y = TOP + 20 + 24 * at
        yield f'<path class="line" stroke="{colour}" d="M{LEFT} {y}h28"/>'
        yield f'<text x="{LEFT + 38}" y="{y + 4}">{escape(name)}</text>'
