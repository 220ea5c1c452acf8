"""Plots as SVG: text stays text, colours follow the reader's light or dark theme, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from fairlane.simulation.measures import Simulation, Timeline

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 64, 46
COLOURS = ("#2f6fdf", "#e07b29", "#2a9d6f", "#b5489b", "#8a6d3b", "#5b5fc7", "#c23b3b", "#4b8f9e")
"""Distinguishable with red-green colour blindness, on white and on black. More series repeat them."""
STYLE = """
svg { background: #ffffff; color: #1f2328; font: 13px system-ui, sans-serif }
text { fill: currentColor } .quiet { opacity: .65 } .title { font-size: 15px; font-weight: 600 }
line { stroke: currentColor; opacity: .18 }
@media (prefers-color-scheme: dark) { svg { background: #0d1117; color: #e6edf3 } }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """A name and its values."""

    name: str
    values: Sequence[float]


def plot_simulations(simulations: Sequence[Simulation]) -> str:
    """The waits of each class at p50, p95 and p99; one bar for each policy where there are two."""
    names = list(dict.fromkeys(group.name for each in simulations for group in each.classes))
    places = [f"{name} {which}" for name in names for which in ("p50", "p95", "p99")]
    bars = []
    for each in simulations:
        waits = {group.name: group.waits for group in each.classes}
        found = [waits.get(name) for name in names]
        bars.append(Series(each.policy, [v for w in found for v in ((w.p50, w.p95, w.p99) if w else (0.0, 0.0, 0.0))]))
    return plot_bars("Wait until started, by class", "seconds", places, bars)


def plot_timeline(timeline: Timeline, policy: str) -> tuple[str, str]:
    """Two plots over time: the slots that each class holds, and its waiting jobs."""
    running, waiting = ([*map(Series, timeline.classes, each)] for each in (timeline.running, timeline.waiting))
    seconds = timeline.column_seconds
    return (
        plot_areas(f"Slots held, by class: {policy}", "slots", seconds, running),
        plot_lines(f"Jobs waiting, by class: {policy}", "jobs", seconds, waiting),
    )


def plot_bars(title: str, unit: str, places: Sequence[str], bars: Sequence[Series]) -> str:
    """Groups of bars: one group for each place, one bar in it for each series."""
    top = _nice(max((value for each in bars for value in each.values), default=0.0))
    plot = _Plot(title, unit, top)
    step = plot.width / max(1, len(places))
    width = step * 0.7 / max(1, len(bars))
    for nth, each in enumerate(bars):
        plot.name(nth, each.name)
        for place, value in enumerate(each.values):
            x, y = plot.left + step * place + step * 0.15 + width * nth, plot.y(value)
            what = escape(f"{each.name}: {places[place]} {_shown(value)} {unit}")
            plot.add(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{plot.y(0) - y:.1f}" '
                f'fill="{_colour(nth)}"><title>{what}</title></rect>'
            )
    every = ceil(len(places) / 12)
    for place, name in enumerate(places):
        if place % every == 0:
            plot.text(plot.left + step * (place + 0.5), plot.y(0) + 18, name, "quiet", "middle")
    return plot.done()


def plot_areas(title: str, unit: str, column_seconds: float, areas: Sequence[Series]) -> str:
    """Areas over time, one on top of the other."""
    sums = [sum(values) for values in zip(*(each.values for each in areas), strict=True)]
    plot = _Plot(title, unit, _nice(max(sums, default=0.0)))
    plot.time(len(sums) * column_seconds)
    floor_of = [0.0] * len(sums)
    for nth, each in enumerate(areas):
        roof = [low + value for low, value in zip(floor_of, each.values, strict=True)]
        edge = [*plot.steps(roof), *reversed(plot.steps(floor_of))]
        plot.shape("polygon", nth, each.name, edge, f'fill="{_colour(nth)}"')
        floor_of = roof
    return plot.done()


def plot_lines(title: str, unit: str, column_seconds: float, lines: Sequence[Series]) -> str:
    """Lines over time."""
    plot = _Plot(title, unit, _nice(max((value for each in lines for value in each.values), default=0.0)))
    plot.time(max((len(each.values) for each in lines), default=0) * column_seconds)
    for nth, each in enumerate(lines):
        how = f'fill="none" stroke="{_colour(nth)}" stroke-width="2"'
        plot.shape("polyline", nth, each.name, plot.steps(each.values), how)
    return plot.done()


class _Plot:
    """A frame with an axis, a title and the names of its colours."""

    def __init__(self, title: str, unit: str, top: float) -> None:
        self.left = LEFT
        self.width = WIDTH - LEFT - RIGHT
        self._top = top or 1.0
        self._parts: list[str] = []
        self._name_x = float(LEFT)
        self.title = title
        self.text(LEFT, 24, title, "title")
        for nth in range(5):
            value = self._top * nth / 4
            self.add(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"/>')
            self.text(LEFT - 8, self.y(value) + 4, _shown(value), "quiet", "end")
        self.text(LEFT - 8, TOP - 12, unit, "quiet", "end")

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self._top

    def steps(self, values: Sequence[float]) -> list[tuple[float, float]]:
        """A level for each column."""
        width = self.width / max(1, len(values))
        return [(LEFT + width * (nth + side), self.y(value)) for nth, value in enumerate(values) for side in (0, 1)]

    def time(self, seconds: float) -> None:
        for nth in range(7):
            at = seconds * nth / 6
            self.text(LEFT + self.width * nth / 6, HEIGHT - BOTTOM + 18, f"{_shown(at)} s", "quiet", "middle")

    def name(self, nth: int, name: str) -> None:
        """One entry of the legend. Those that do not fit in one line are left to the tooltips."""
        shown = name if len(name) <= 48 else f"{name[:47]}…"
        if self._name_x + 24 + 7 * len(shown) > WIDTH:
            return
        self.add(f'<rect x="{self._name_x:.0f}" y="34" width="12" height="12" fill="{_colour(nth)}"/>')
        self.text(self._name_x + 17, 44, shown)
        self._name_x += 34 + 7 * len(shown)

    def shape(self, kind: str, nth: int, name: str, points: Sequence[tuple[float, float]], how: str) -> None:
        self.name(nth, name)
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<{kind} points="{places}" {how}><title>{escape(name)}</title></{kind}>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def add(self, part: str) -> None:
        self._parts.append(part)

    def done(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)}"><style>{STYLE}</style>'
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


def _colour(nth: int) -> str:
    return COLOURS[nth % len(COLOURS)]


def _nice(value: float) -> float:
    """The next round number at or above."""
    if value <= 0:
        return 1.0
    size = 10.0 ** floor(log10(value))
    return next(step * size for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * size >= value * 0.999)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
