"""Chart: a sweep's points as one HTML file that needs nothing else; a pure function to text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from .points import Point

WIDTH, HEIGHT, MARGIN = 900, 540, 70
MOST_LABELS = 24  # more would cover each other; hovering tells all
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>rollsift sweep</title>
<style>
  :root {{ color-scheme: light dark; font: 14px system-ui, sans-serif }}
  svg {{ width: 100%; max-width: {width}px; display: block; margin: 2em auto }}
  text {{ fill: currentColor }}
  .axis, .grid {{ stroke: currentColor; opacity: .5 }}
  .grid {{ opacity: .12 }}
  circle {{ fill: #2a78d6; opacity: .85 }}
  circle.all {{ fill: #e07b39 }}
  circle:hover {{ opacity: 1; stroke: currentColor; stroke-width: 2 }}
  .name {{ font-size: 12px }}
  .note {{ text-align: center }}
</style>
<svg viewBox="0 0 {width} {height}" role="img">
<title>Mean length against mean reward of what each setting keeps</title>
{body}
</svg>
<p class="note">{note}</p>
</html>
"""


def chart(points: Sequence[Point]) -> str:
    """Mean length against mean reward of what each point keeps, and of all rollouts."""
    marks = _marks(points)
    if marks:
        across, up = _Axis(mark.length for mark in marks), _Axis(mark.reward for mark in marks)
        body = "\n".join([*_frame(across, up), *_dots(marks, across, up)])
    else:
        body = ""
    empty = [point.label for point in points if not point.kept.rollouts]
    note = f"Nothing is kept by: {'; '.join(empty)}" if empty else "Hover over a point for more."
    return _PAGE.format(width=WIDTH, height=HEIGHT, body=body, note=escape(note))


@dataclass(slots=True)
class _Mark:
    """A dot: what lies at one place, by label, with the text that hovering shows."""

    length: float
    reward: float
    told: dict[str, str] = field(default_factory=dict)


def _marks(points: Sequence[Point]) -> list[_Mark]:
    marks: dict[tuple[float, float], _Mark] = {}
    for point in points:
        for label, totals in (("all", point.all), (point.label, point.kept)):
            length, reward = totals.mean("response_length"), totals.mean("reward")
            if length is None or reward is None:
                continue
            mark = marks.setdefault((length, reward), _Mark(length, reward))
            mark.told[label] = (
                f"{label}\nmean length {length:,.1f}, mean reward {reward:.4f}\n"
                f"{totals.rollouts:,} rollouts, {totals.tokens:,} tokens"
            )
    return list(marks.values())


class _Axis:
    """A range of values, widened to round ticks, and where each value lies in it, 0 to 1."""

    def __init__(self, values: Iterable[float]) -> None:
        found = list(values)
        low, high = min(found), max(found)
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        step = _round_step((high - low + 2 * room) / 6)
        first, last = math.floor((low - room) / step), math.ceil((high + room) / step)
        self.ticks = [step * i for i in range(first, last + 1)]

    def place(self, value: float) -> float:
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next((power * digit for digit in (1, 2, 5) if power * digit >= least), power * 10)


def _x(axis: _Axis, value: float) -> str:
    return f"{MARGIN + axis.place(value) * (WIDTH - 2 * MARGIN):.1f}"


def _y(axis: _Axis, value: float) -> str:
    return f"{HEIGHT - MARGIN - axis.place(value) * (HEIGHT - 2 * MARGIN):.1f}"


def _frame(across: _Axis, up: _Axis) -> Iterable[str]:
    left, right, top, bottom = MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN
    for tick in across.ticks:
        x = _x(across, tick)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:,.6g}</text>'
    for tick in up.ticks:
        y = _y(up, tick)
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left - 8}" y="{y}" dy=".35em" text-anchor="end">{tick:,.6g}</text>'
    yield f'<path class="axis" fill="none" d="M{left} {top}V{bottom}H{right}"/>'
    middle = f'x="{WIDTH // 2}" text-anchor="middle"'
    yield f'<text {middle} y="{HEIGHT - 20}">mean length of the kept responses</text>'
    yield f'<text x="{left}" y="{top - 20}" text-anchor="middle">mean reward</text>'


def _dots(marks: Sequence[_Mark], across: _Axis, up: _Axis) -> Iterable[str]:
    for mark in marks:
        x, y = _x(across, mark.length), _y(up, mark.reward)
        hover = escape("\n\n".join(mark.told.values()))
        kind = "all" if "all" in mark.told else "point"
        yield f'<circle class="{kind}" cx="{x}" cy="{y}" r="7"><title>{hover}</title></circle>'
        if kind == "all" or len(marks) <= MOST_LABELS:
            first, *others = mark.told
            name = escape(f"{first} and {len(others)} more" if others else first)
            side, dx = ("start", 11) if across.place(mark.length) < 0.5 else ("end", -11)
            at = f'x="{x}" y="{y}" dx="{dx}" dy=".35em" text-anchor="{side}"'
            yield f'<text class="name" {at}>{name}</text>'
