"""The page of a run: one HTML file with its charts and tables inside, which opens from the disk."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_zero.tools import run_charts


_MOST_WAITS = 5
_STYLE = """body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
h1,h2{line-height:1.2}table{border-collapse:collapse;width:100%;min-width:40em}td,th{text-align:left;
padding:.2em .8em .2em 0;border-bottom:1px solid #ddd;vertical-align:top;overflow-wrap:anywhere}
td:first-child{white-space:nowrap}
td:nth-child(2){min-width:6.5em}section{overflow-x:auto}svg{max-width:100%;height:auto}
.fails{color:#a00;font-weight:bold}"""


def render(facts: Mapping[str, Any]) -> str:
    """The page of what `ZeroRunReport` has gathered; the same facts are in it as JSON, under the id `facts`."""
    sections = [
        ("Who keeps what", _placement(facts)),
        ("Memory", _memory(facts)),
        ("Communication", _bytes(facts)),
        ("Time", _times(facts)),
        ("Timeline of a step", _timeline(facts)),
        ("Loss and skipped steps", _losses(facts)),
        ("Configuration", _configuration(facts)),
        ("Parity certificate", _certificate(facts)),
    ]
    body = "\n".join(f"<section><h2>{title}</h2>\n{text}\n</section>" for title, text in sections if text)
    title = html.escape(f"{facts['model']}: stage {facts['stage']} on {facts['ranks']} rank(s)")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    data = json.dumps(facts).replace("<", "\\u003c")  # nothing in it may end the element
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{facts['device']}; {html.escape(versions)}.</p>\n"
        f'{body}\n<script type="application/json" id="facts">{data}</script>\n</body></html>\n'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def cells(row: Sequence[Any], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)

    lines = [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _size(nbytes: float) -> str:
    unit, name = run_charts.scale([nbytes])
    return f"{nbytes / unit:.3g} {name}"


def _placement(facts: Mapping[str, Any]) -> str:
    return run_charts.placement(facts["stage"], facts["placement"]) + f"<p>{html.escape(facts['arranged'])}</p>"


def _memory(facts: Mapping[str, Any]) -> str:
    lines, plan, peaks = facts["memory"], facts["plan"], facts["peaks"]
    if not lines:
        return ""
    steps = [line["step"] for line in lines]
    kinds = {kind: [line["categories"][kind] for line in lines] for kind in lines[0]["categories"]}
    drawn = run_charts.memory(steps, kinds, plan["predicted_resident"] if plan else None)
    peak = next((found for found in peaks if found["rank"] == 0), None)
    if peak:
        measured = f"measured in step {peak['step']}, {peak['moment'] or 'its moment not known'}"
        drawn += run_charts.peak({"plan": plan["predicted_peak_kinds"]} if plan else {}, {measured: peak["bytes"]})
    if plan:
        drawn += run_charts.against_plan(plan["measured_kinds"], plan["predicted_kinds"])
        rows = [(kind, _size(nbytes)) for kind, nbytes in plan["predicted_peak_kinds"].items()]
        rows += [
            ("in all", _size(plan["predicted_peak"])),
            (
                "measured",
                f"{_size(plan['measured_peak'])} ({plan['measured_peak'] / plan['predicted_peak'] - 1:+.1%})",
            ),
        ]
        drawn += _table(("the plan's peak", ""), rows)
    rows = [(f"rank {each['rank']}", _size(each["bytes"]), each["step"], each["moment"] or "") for each in peaks]
    return drawn + (_table(("peak of", "measured", "in step", "at its moment"), rows) if rows else "")


def _bytes(facts: Mapping[str, Any]) -> str:
    history = facts["steps"]
    if not history:
        return ""
    far = [step.get("far", 0) for step in history]
    near = [step.get("sent", 0) - sent for step, sent in zip(history, far, strict=True)]
    each = {name: _per_step(history, sent) for name, sent in (("inside a node", near), ("between nodes", far))}
    size, unit = run_charts.scale([sum(sent) for sent in zip(*each.values(), strict=True)])
    parts = {name: [value / size for value in values] for name, values in each.items()}
    steps = [step["step"] for step in history]
    drawn = run_charts.stacked("bytes", "Bytes sent by rank 0", f"{unit} per step", steps, parts)
    rows = [(name, _size(sum(values))) for name, values in (("inside a node", near), ("between nodes", far))]
    return drawn + _table(("link", "sent by rank 0 in all"), rows)


def _per_step(history: Sequence[Mapping[str, float]], sums: Sequence[float]) -> list[float]:
    """Each entry of the history may stand for several steps."""
    return [value / entry["steps"] for entry, value in zip(history, sums, strict=True)]


def _times(facts: Mapping[str, Any]) -> str:
    history = facts["steps"]
    if not history:
        return ""
    parts = {
        "waiting for gathers": [step.get("gather", 0.0) for step in history],
        "waiting for reductions": [step.get("reduce", 0.0) for step in history],
        "optimizer": [step.get("optimizer", 0.0) for step in history],
    }
    rest = [step["seconds"] - sum(values) for step, *values in zip(history, *parts.values(), strict=True)]
    parts = {"forward and backward": [max(0.0, value) for value in rest], **parts}
    steps = [step["step"] for step in history]
    total = sum(map(sum, parts.values())) or 1.0
    rows = [(name, f"{sum(values):.3g} s", f"{sum(values) / total:.0%}") for name, values in parts.items()]
    each = {name: _per_step(history, values) for name, values in parts.items()}
    drawn = run_charts.stacked("time", "Time of a step on rank 0", "seconds", steps, each)
    return drawn + _table(("phase", "in all", "share"), rows)


def _timeline(facts: Mapping[str, Any]) -> str:
    found, taken = facts["timeline"], [step["seconds"] / step["steps"] for step in facts["steps"]]
    if not found:
        return ""
    seconds, error = found["seconds"], found["error"]
    rows = [("predicted", _seconds(seconds))]
    rows += [("predictions there miss by up to", f"{error:.0%}")] if error else []
    rows += [("measured, median", _seconds(statistics.median(taken)))] if taken else []
    rows += [(f"waits for {what}", _seconds(spent)) for what, spent in list(found["waits"].items())[:_MOST_WAITS]]
    said = f"<p>Predicted for {html.escape(found['machine'])}, without data loading and other work of the machine.</p>"
    return run_charts.timeline(found["lanes"], found["parts"], seconds) + said + _table(("of a step", ""), rows)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _losses(facts: Mapping[str, Any]) -> str:
    points, skipped = facts["losses"], facts["skipped"]
    said = f"<p>{sum(entry['steps'] for entry in facts['steps']):.0f} steps, {len(skipped)} of them skipped.</p>"
    if skipped:
        said += _table(
            ("skipped step", "inf or nan first in"), [(each["step"], each["first_bad"]) for each in skipped]
        )
    if not points:
        return said
    steps, values = zip(*points, strict=True)
    return run_charts.losses(steps, values, [each["step"] for each in skipped]) + said


def _configuration(facts: Mapping[str, Any]) -> str:
    rows = [(row["key"], row["value"], row["source"], row["does"]) for row in facts["configuration"]]
    notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in facts["notes"])
    rest = "<p>Everything else is as it is when nobody sets it.</p>"
    return _table(("key", "value", "source", "what it does"), rows) + notes + rest


def _certificate(facts: Mapping[str, Any]) -> str:
    found = facts["certificate"]
    if not found:
        return ""
    verdict = "Every promise holds." if found["holds"] else '<span class="fails">Not every promise holds.</span>'
    rows = [
        (each["promise"], each["verdict"], "" if each["largest"] is None else f"{each['largest']:.1e}", each["why"])
        for each in found["verdicts"]
    ]
    table = _table(("promise", "verdict", "largest difference", "why"), rows)
    return f"<p>{html.escape(found['model'])}, {found['ranks']} rank(s). {verdict}</p>{table}"
