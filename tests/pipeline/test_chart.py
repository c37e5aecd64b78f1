"""The drawing of a sweep: one file that needs nothing else, and that no label can break."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import polars as pl
import pytest

from rollsift.pipeline.chart import MOST_LABELS, chart
from rollsift.pipeline.points import Point
from rollsift.schemas.recipe import Recipe


def _point(keys: dict[str, str], *kept: tuple[int, float]) -> Point:
    """A point that keeps these (length, reward); all are (100, 0.5)."""
    point = Point(keys, Recipe())
    for totals, rows in ((point.kept, kept), (point.all, [(100, 0.5)])):
        schema = {"response_length": pl.Int64, "reward": pl.Float64}
        frame = pl.DataFrame(rows, schema=schema, orient="row")
        totals.add(frame.with_columns(correct=pl.lit(True)))
    return point


def _svg(page: str) -> ET.Element:
    found = re.search("<svg.*</svg>", page, re.DOTALL)
    assert found
    return ET.fromstring(found[0])


def _dots(page: str) -> dict[str, tuple[float, float]]:
    """Label -> place of each dot; a label is the first line of what hovering shows."""
    dots = {}
    for circle in _svg(page).iter("circle"):
        title = circle.find("title")
        assert title is not None
        assert title.text
        dots[title.text.split("\n")[0]] = float(circle.attrib["cx"]), float(circle.attrib["cy"])
    return dots


def test_every_point_and_the_baseline_are_drawn_where_they_belong() -> None:
    """Longer is to the right, more reward is higher up, the same baseline is drawn once."""
    dots = _dots(chart([_point({"k": "2"}, (40, 0.9)), _point({"k": "8"}, (70, 0.6))]))
    assert set(dots) == {"k=2", "k=8", "all"}
    assert dots["k=2"][0] < dots["k=8"][0] < dots["all"][0]
    assert dots["k=2"][1] < dots["k=8"][1] < dots["all"][1]
    middle = [(a + b) / 2 for a, b in zip(dots["k=2"], dots["all"], strict=True)]
    assert dots["k=8"][0] == pytest.approx(middle[0], abs=0.1)


def test_points_at_one_place_are_told_together() -> None:
    """A dot that would cover another carries both names; hovering tells of each."""
    page = chart([_point({"k": "16"}, (100, 0.5)), _point({"k": "32"}, (100, 0.5))])
    assert list(_dots(page)) == ["all"]
    assert "k=16" in page
    assert "k=32" in page
    assert "all and 2 more" in page


def test_the_page_needs_no_network_and_no_script() -> None:
    """Nothing is loaded from anywhere, nothing runs."""
    page = chart([_point({"k": "2"}, (40, 0.9))])
    assert not re.search(r"https?:|src=|href=|<script|@import|url\(", page)


def test_no_value_of_the_grid_can_leave_its_text() -> None:
    """Marks of HTML in a value are shown, not obeyed."""
    evil = "</title><script>alert(1)</script>&\"'{body}"
    page = chart([_point({"correct": evil}, (40, 0.9)), _point({"correct": evil + "2"})])
    assert "<script" not in page
    assert f"correct={evil}" in _dots(page)


def test_points_that_keep_nothing_are_named() -> None:
    """They have no place in the drawing, so they are told below it."""
    page = chart([_point({"k": "2"}, (40, 0.9)), _point({"min_mean": "2"})])
    assert set(_dots(page)) == {"k=2", "all"}
    assert "Nothing is kept by: min_mean=2" in page
    empty = chart([Point({"k": "2"}, Recipe())])
    assert not _dots(empty)
    assert "Nothing is kept by: k=2" in empty


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e5, 123_456_789.0])
def test_any_range_is_drawn_within_the_frame(scale: float) -> None:
    """Dots stay inside the axes whatever the numbers are, a single one and negative ones too."""
    for rows in ([(1, scale)], [(1, scale), (1_000_000, -scale)], [(5, 0.0), (5, scale)]):
        points = [_point({"k": str(i)}, row) for i, row in enumerate(rows, 1)]
        for x, y in _dots(chart(points)).values():
            assert 70 <= x <= 830
            assert 70 <= y <= 470


def test_many_points_carry_no_names() -> None:
    """Past a number that can be read, only the baseline is named; hovering tells the rest."""
    page = chart([_point({"k": str(k)}, (k, 0.1 * k)) for k in range(1, MOST_LABELS + 5)])
    names = [text.text for text in _svg(page).iter("text") if text.get("class") == "name"]
    assert names == ["all"]
