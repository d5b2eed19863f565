"""Plots as SVG, each for a light and a dark page. The same data gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from shared.report.data import BASELINE, Report, Results
from shared.report.tables import PARTS

NOTHING_YET = "not measured yet"


@dataclass(frozen=True)
class Theme:
    """Colours that colour-blind readers can tell apart (after Okabe and Ito), with contrast on the page behind."""

    name: str
    ink: str
    faint: str
    series: tuple[str, ...]


LIGHT = Theme(
    "light",
    "#1f2328",
    "#b8bec6",
    ("#0072B2", "#B85000", "#007A5A", "#A6447D", "#8A6A00", "#1F74A8", "#5E5E5E", "#4B3FA7", "#7A3B12", "#3D6B2E"),
)
DARK = Theme(
    "dark",
    "#e6e8eb",
    "#5b626b",
    ("#56B4E9", "#F0A04B", "#3CC9A0", "#E69BC4", "#E8DB4A", "#9CC9F2", "#BDBDBD", "#A79CF5", "#D8936A", "#93C583"),
)

STYLE = {
    "svg.hashsalt": "kv-ladder",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
}


def draw(paint: Callable[[Axes, Theme, Results], bool], report: Report, height: float) -> dict[str, bytes]:
    """`{"light": svg, "dark": svg}` of the primary results. `paint` returns False where it has nothing to show."""
    return {theme.name: _svg(paint, theme, report.primary, height) for theme in (LIGHT, DARK)}


def _svg(paint: Callable, theme: Theme, results: Results | None, height: float) -> bytes:
    parts = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "axes.edgecolor")
    colours = dict.fromkeys(parts, theme.ink)
    with matplotlib.rc_context(STYLE | colours):
        figure, axes = plt.subplots(figsize=(7.5, height))
        if results is None or not paint(axes, theme, results):
            plt.close(figure)
            figure, axes = plt.subplots(figsize=(7.5, 1.2))
            axes.axis("off")
            axes.text(0.5, 0.5, NOTHING_YET, ha="center", va="center", transform=axes.transAxes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return buffer.getvalue()


def ladder(variants: list[str]) -> Callable[[Axes, Theme, Results], bool]:
    """Bars: one decode step at batch 8, by step, with transformers' as a line across."""

    def paint(axes: Axes, theme: Theme, results: Results) -> bool:
        rows = {variant: results.row("end_to_end", variant, "chat", 8) for variant in variants}
        rows = {variant: row for variant, row in rows.items() if row and row.get("decode_step_ms")}
        if not rows:
            return False
        names, times = list(rows), [row["decode_step_ms"] for row in rows.values()]
        colours = [theme.faint if name.startswith(BASELINE) else theme.series[0] for name in names]
        axes.barh(range(len(names)), times, color=colours, height=0.66)
        for i, (name, row) in enumerate(rows.items()):
            ratio = "" if name == BASELINE else f", {row['x_transformers_decode']:.2f}× transformers"
            old = " (older code)" if results.is_stale(row) else ""
            _beside(axes, row["decode_step_ms"], i, f"{row['decode_step_ms']:.0f} ms{ratio}{old}")
        if BASELINE in rows:
            axes.axvline(rows[BASELINE]["decode_step_ms"], color=theme.ink, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.6 * max(times))
        axes.set_xlabel("milliseconds a decode step, batch 8")
        return True

    return paint


def where_time_goes(variants: list[str], workload: str, batch: int) -> Callable[[Axes, Theme, Results], bool]:
    """Stacked bars: the parts of a decode step. Parts are named above the longest bar or in the legend's one line."""

    def paint(axes: Axes, theme: Theme, results: Results) -> bool:
        rows = {variant: results.row("decode_step", variant, workload, batch) for variant in variants}
        rows = {variant: row for variant, row in rows.items() if row}
        if not rows:
            return False
        left = [0.0] * len(rows)
        for i, (part, label) in enumerate(PARTS.items()):
            widths = [max(0.0, row[f"{part}_ms"]) for row in rows.values()]
            colour = theme.faint if part == "floor" else theme.series[i - 1]
            axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.66, label=label)
            left = [a + b for a, b in zip(left, widths)]
        for i, row in enumerate(rows.values()):
            _beside(axes, left[i], i, f"{row['total_ms']:.0f} ms")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(left))
        axes.set_xlabel(f"milliseconds a decode step; {workload.replace('-', ' of ')} tokens, batch {batch}")
        axes.figure.legend(loc="outside upper left", ncols=len(PARTS), frameon=False, fontsize=9, handlelength=1.0)
        return True

    return paint


def sweep(
    suite: str, batch: int, xlabel: str, ylabel: str, scale: float = 1.0
) -> Callable[[Axes, Theme, Results], bool]:
    """Lines on two logarithmic axes, each named at its end."""

    def paint(axes: Axes, theme: Theme, results: Results) -> bool:
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in results.select(suite, batch=batch):
            lines.setdefault(row["variant"], []).append((int(row["workload"].rsplit("-", 1)[1]), scale * row["ms"]))
        if not lines:
            return False
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_plain))
            axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        _lines(axes, theme, lines)
        return True

    return paint


def matmul(axes: Axes, theme: Theme, results: Results) -> bool:
    """Lines: bytes of weights a second over the number of rows."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in results.select("matmul"):
        lines.setdefault(row["variant"], []).append((row["batch"], row["gb_per_s"]))
    if not lines:
        return False
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_xlabel("rows of the product (requests in the batch)")
    axes.set_ylabel("GB/s of weights")
    _lines(axes, theme, lines)
    return True


def cost_model(axes: Axes, theme: Theme, results: Results) -> bool:
    """Points: predicted over measured milliseconds; on the diagonal the model is right."""
    groups = {}
    for suite, time in (("write", "ms"), ("gather", "ms"), ("decode_step", "total_ms")):
        points = [(row[time], row["predicted_ms"]) for row in results.select(suite) if "predicted_ms" in row]
        if points:
            groups[suite.replace("_", " ")] = points
    if not groups:
        return False
    ends = [value for points in groups.values() for point in points for value in point]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=theme.faint, linewidth=1)
    for i, (name, points) in enumerate(groups.items()):
        style = {"color": theme.series[i], "marker": "os^"[i], "linestyle": "none", "markersize": 5}
        axes.plot(*zip(*points), label=name, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, ms")
    axes.set_ylabel("predicted, ms")
    axes.legend(frameon=False, fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
    return True


def _plain(value: float, position: int) -> str:
    """A tick's number without an exponent."""
    return f"{value:.0f}" if value >= 1 else f"{value:g}"


def _beside(axes: Axes, x: float, y: float, text: str) -> None:
    """Text just right of a bar's end."""
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center")


def _lines(axes: Axes, theme: Theme, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Draw lines and name each at its right end; names that would overlap are moved apart. Set the scales before."""
    ends = []
    for i, (name, points) in enumerate(lines.items()):
        points = sorted(points)
        colour = theme.series[i % len(theme.series)]
        axes.plot(*zip(*points), color=colour, marker="os^Dv<>p*h"[i % 10], markersize=4, linewidth=1.6)
        ends.append((points[-1], name, colour))
    axes.figure.canvas.draw()
    low = -1e9
    for (x, y), name, colour in sorted(ends, key=lambda end: end[0][1]):
        # Heights in points of this figure, so that two names never share a line of text.
        height = axes.transData.transform((x, y))[1] * 72 / axes.figure.dpi
        shift = max(0.0, low + 12 - height)
        low = height + shift
        axes.annotate(
            name,
            (x, y),
            xytext=(8, shift),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )
