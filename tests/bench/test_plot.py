"""Figures: written from values, alike every time, whole in one file."""

from __future__ import annotations

import importlib.util
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cb_ray.bench.plot import Line, Panel, check_figure, draw
from cb_ray.errors import ConfigError

PANELS = [
    Panel(title="Throughput", x="requests/s", y="tokens/s", lines=[Line("cb-ray", [1, 2, 4], [90.0, 170.0, None])]),
    Panel(
        title="Time to first token",
        x="requests/s",
        y="ms",
        log_y=True,
        lines=[Line("cb-ray", [1, 2], [12.0, 14.0]), Line("goal", [1, 2], [10.0, 10.0], dashed=True)],
    ),
    Panel(title="Replicas", x="s", y="replicas", lines=[Line("pool", [0, 5], [1, math.inf], steps=True)]),
]


def test_a_figure_is_one_file_and_alike_every_time(tmp_path: Path) -> None:
    """An SVG that opens anywhere: nothing is loaded from elsewhere; the same values make the same bytes."""
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    draw(PANELS, first, title="A sweep")
    draw(PANELS, second, title="A sweep")
    assert first.read_bytes() == second.read_bytes()
    links = [
        value
        for element in ElementTree.parse(first).iter()
        for name, value in element.attrib.items()
        if name.endswith("href") and not value.startswith("#")
    ]
    assert not links


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_other_formats(tmp_path: Path, kind: str) -> None:
    """The ending names the format."""
    file = tmp_path / f"figure.{kind}"
    draw(PANELS[:1], file)
    assert file.read_bytes().startswith({"png": b"\x89PNG", "pdf": b"%PDF"}[kind])


def test_what_cannot_be_drawn_is_said_before_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong ending, a missing directory and a missing library are errors of the command line, not of its last second."""
    with pytest.raises(ConfigError, match=r"\.svg"):
        check_figure(tmp_path / "figure.jpeg")
    with pytest.raises(ConfigError, match="no directory"):
        check_figure(tmp_path / "nowhere" / "figure.svg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cb-ray\[bench\]"):
        check_figure(tmp_path / "figure.svg")


def test_a_line_has_as_many_xs_as_ys() -> None:
    """A curve that lost a point would be drawn shifted."""
    with pytest.raises(ValueError, match="2 xs and 1 ys"):
        Line("cb-ray", [1, 2], [3])
