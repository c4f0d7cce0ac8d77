"""Draws the charts of a run's page, each as SVG that needs no other file.

matplotlib and not a library that draws in the browser: a page stays under 1 MB, opens without a network, prints, and
needs no JavaScript (plotly's offline pages carry 4 MB of it).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch


COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")  # Paul Tol's bright scheme
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_MOST_RANKS = 16
_FAR = 4  # a limit so many times the longest bar would leave nothing to see of the bars


def scale(values: Sequence[float]) -> tuple[float, str]:
    """The unit of bytes in which the largest of `values` is at least 1."""
    largest = max(values, default=0.0)
    return next(((size, name) for size, name in _UNITS if largest >= size), (1.0, "bytes"))


def _svg(figure: Figure, name: str) -> str:
    target = io.StringIO()
    # Text stays text, and the same chart has the same identifiers; its name keeps them apart from other charts'.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg id="{name}" role="img" ', 1)


def _axes(width: float, height: float, title: str, **labels: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, **labels)
    if "step" in labels.values():
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def stacked(name: str, title: str, label: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]]) -> str:
    """Bars per step, one colour for each part; parts that are zero throughout are left out."""
    figure, axes = _axes(7.5, 3.2, title, xlabel="step", ylabel=label)
    _stack(axes, steps, parts)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, name)


def _stack(axes: Axes, steps: Sequence[int], parts: Mapping[str, Sequence[float]]) -> None:
    bottom = [0.0] * len(steps)
    for colour, (part, values) in zip(COLOURS, parts.items(), strict=False):
        if any(values):
            axes.bar(steps, values, bottom=bottom, width=0.9, color=colour, label=part)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]


def memory(steps: Sequence[int], kinds: Mapping[str, Sequence[int]], planned: float | None) -> str:
    """What the rank holds after each step, and what the plan says of that."""
    totals = [sum(values) for values in zip(*kinds.values(), strict=True)]
    size, unit = scale([*totals, planned or 0])
    figure, axes = _axes(7.5, 3.2, "Memory of rank 0, after each step", xlabel="step", ylabel=unit)
    _stack(axes, steps, {kind: [value / size for value in values] for kind, values in kinds.items()})
    if planned is not None:
        axes.axhline(planned / size, color="black", linewidth=1, linestyle="--", label="plan")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, "memory")


def peak(parts: Mapping[str, Mapping[str, float]], wholes: Mapping[str, float]) -> str:
    """One bar each, on a scale of their own: what is known by kind, and what is known as a whole."""
    size, unit = scale([*wholes.values(), *(sum(kinds.values()) for kinds in parts.values())])
    figure, axes = _axes(7.5, 0.9 + 0.5 * (len(parts) + len(wholes)), "Memory of rank 0, at its peak", xlabel=unit)
    _bars(axes, parts, size)
    for what, value in wholes.items():
        axes.barh(what, value / size, 0.6, color="#555555")
    axes.invert_yaxis()
    if parts:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, "peak")


def _bars(axes: Axes, parts: Mapping[str, Mapping[str, float]], size: float) -> None:
    """One stacked bar each; a kind has the same colour in all, and is named once."""
    kinds = dict(
        zip(dict.fromkeys(kind for found in parts.values() for kind in found), (*COLOURS, *COLOURS), strict=False)
    )
    named: set[str] = set()
    for what, found in parts.items():
        left = 0.0
        for kind, value in found.items():
            if value:
                label = None if kind in named else kind
                axes.barh(what, value / size, 0.6, left=left, color=kinds[kind], label=label)
                left += value / size
                named.add(kind)


def stages(parts: Mapping[str, Mapping[str, float]], limit: int, title: str) -> str:
    """The peak of each row of a plan; the memory that there is as a line, where the bars are still seen beside it."""
    size, unit = scale([sum(kinds.values()) for kinds in parts.values()])
    largest = max(sum(kinds.values()) for kinds in parts.values())
    near = limit < _FAR * largest
    room = "" if near else f" (of {limit / size:,.0f} {unit})"
    figure, axes = _axes(8.5, 1.2 + 0.4 * len(parts), title, xlabel=f"{unit} at the peak{room}")
    _bars(axes, parts, size)
    if near:
        axes.axvline(limit / size, color="black", linewidth=1, linestyle="--", label="memory")
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, "stages")


def against_plan(measured: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """Between steps, by kind: two bars each."""
    kinds = [kind for kind in {**predicted, **measured} if measured.get(kind) or predicted.get(kind)]
    size, unit = scale([*measured.values(), *predicted.values()])
    figure, axes = _axes(7.5, 0.9 + 0.5 * len(kinds), "Between steps, against the plan", xlabel=unit)
    for offset, colour, what, found in (
        (-0.2, COLOURS[0], "measured", measured),
        (0.2, COLOURS[6], "plan", predicted),
    ):
        places = [place + offset for place in range(len(kinds))]
        axes.barh(places, [found.get(kind, 0) / size for kind in kinds], 0.38, color=colour, label=what)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, "plan")


def losses(steps: Sequence[int], values: Sequence[float], skipped: Sequence[int]) -> str:
    figure, axes = _axes(7.5, 3.0, "Loss", xlabel="step", ylabel="loss")
    axes.plot(steps, values, marker=".", color=COLOURS[0], label="loss")
    for number, step in enumerate(skipped):
        axes.axvline(step, color=COLOURS[4], linewidth=1, label="skipped step" if number == 0 else None)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, "loss")


def timeline(
    lanes: Mapping[str, Sequence[tuple[float, float]]], parts: Sequence[tuple[str, float]], seconds: float
) -> str:
    """When each stream is busy in one step; the first one, which computes, in the colours of the parts of a step."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms")
    figure, axes = _axes(7.5, 1.2 + 0.35 * len(lanes), "One step of rank 0", xlabel=unit)
    colours = dict(zip(dict.fromkeys(name for name, _ in parts), COLOURS, strict=False))
    for row, spans in enumerate(lanes.values()):
        at = [next((name for name, begun in reversed(parts) if begun <= start), "") for start, _ in spans]
        drawn = [COLOURS[-1] if row else colours.get(part, COLOURS[-1]) for part in at]
        bars = [(start * scale, (stop - start) * scale) for start, stop in spans]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=drawn)
    axes.set(xlim=(0, seconds * scale), yticks=range(len(lanes)), yticklabels=list(lanes))
    axes.invert_yaxis()
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return _svg(figure, "timeline")


def placement(stage: int, rows: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Who keeps what: for each kind and rank the part that it keeps, as (begin, length) between 0 and 1."""
    ranks = min(_MOST_RANKS, max(len(parts) for parts in rows.values()))
    figure = Figure(figsize=(7.5, 1.0 + 0.28 * ranks), layout="constrained")
    more = "" if ranks == max(map(len, rows.values())) else f" (the first {ranks} ranks)"
    figure.suptitle(f"Stage {stage}: what each rank keeps between uses{more}")
    for axes, colour, (kind, parts) in zip(figure.subplots(1, len(rows)), COLOURS, rows.items(), strict=False):
        for rank, (begin, length) in enumerate(parts[:ranks]):
            axes.barh(rank, 1, 0.8, color="none", edgecolor=COLOURS[6])
            axes.barh(rank, length, 0.8, left=begin, color=colour)
        axes.set(title=kind, xlim=(0, 1), xticks=[], yticks=range(ranks))
        axes.set_yticklabels(
            [f"rank {rank}" for rank in range(ranks)] if axes.get_subplotspec().is_first_col() else []
        )
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
    return _svg(figure, "placement")
