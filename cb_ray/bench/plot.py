"""Figures of benchmarks: curves in panels, written to a file.

    draw([Panel(title="Throughput", x="requests/s", y="tokens/s", lines=[Line("cb-ray", [1, 2], [90, 170])])], Path("sweep.svg"))

Owns the look of every figure. What is drawn is a value; matplotlib (the extra `bench`) is imported only to draw it, with no
display and no settings of the user's. Knows nothing of what was measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

FORMATS = ("svg", "png", "pdf")
_COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
_STYLE = {
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e2e8f0",
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "path",  # the same everywhere, whichever fonts a reader has
    "svg.hashsalt": "cb-ray",  # equal figures are equal files
}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. `xs` and `ys` are of one length; a y that is None or not finite leaves a gap. `dashed` for bounds and goals."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    dashed: bool = False
    steps: bool = False  # a value that holds until the next x, such as a number of replicas

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys):
            raise ValueError(f"line {self.label!r} has {len(self.xs)} xs and {len(self.ys)} ys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. Lines of equal labels have equal colours in all panels of a figure."""

    title: str
    x: str
    y: str
    lines: Sequence[Line] = field(default_factory=tuple)
    log_x: bool = False
    log_y: bool = False


def check_figure(path: Path) -> None:
    """Before an hour is spent on measuring: raises ConfigError where `draw` could not write `path`."""
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ConfigError(f"a figure ends in {', '.join('.' + name for name in FORMATS)}; got {path}", field="plot")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {path.absolute().parent} to write {path.name} to", field="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib; pip install 'cb-ray[bench]' brings it", field="plot")


def draw(panels: Sequence[Panel], path: Path, title: str = "", columns: int = 2) -> None:
    """Write `panels`, row by row, to `path`, whose ending names the format. Raises ConfigError as `check_figure` does."""
    check_figure(path)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colours = {label: _COLOURS[number % len(_COLOURS)] for number, label in enumerate(labels)}
    style: dict[Any, Any] = {**mpl.rcParamsDefault, **_STYLE}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.2 * columns, 3.4 * rows + 0.4 * bool(title)), layout="constrained")
        FigureCanvasAgg(figure)
        for place, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            for line in panel.lines:
                ys = [float("nan") if y is None else y for y in line.ys]
                axes.plot(
                    line.xs,
                    ys,
                    label=line.label,
                    color=colours[line.label],
                    linestyle="--" if line.dashed else "-",
                    drawstyle="steps-post" if line.steps else "default",
                    marker="o" if len(ys) <= 24 and not line.dashed else None,
                    markersize=3.5,
                )
            if panel.log_x:
                axes.set_xscale("log")
            if panel.log_y:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            if panel.lines:
                axes.legend(loc="upper left")  # "best" is slow with many points, and says so
        if title:
            figure.suptitle(title)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
