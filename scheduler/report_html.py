"""The placement report as one HTML page: a drawing of the partitions in order, then tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.scheduler.report import PlacementReport

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 84em; padding: 0 1em; color: #1b1f24; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 .4em; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .25em 1.2em .25em 0; vertical-align: top; }
th { white-space: nowrap; } td { overflow-wrap: break-word; } .long { overflow-wrap: anywhere; min-width: 14em; }
th { border-bottom: 1px solid #888; font-weight: 600; } td { border-bottom: 1px solid #e3e6ea; }
.number { text-align: right; white-space: nowrap; } .scroll { overflow-x: auto; }
summary { cursor: pointer; color: #4878a8; }
svg text { font: 12px system-ui, sans-serif; }
"""
_COLOURS = ("#4878a8", "#c2703d", "#5a9367", "#8c5a94", "#a3863a", "#4b8a8c", "#a84f5b", "#6b6f76")
_DRAWN = 200
_ROWS = 2000
_STEP, _LANE = 46, 34
_SHOWN = 4  # names in a cell; more are folded
_LONG = 24  # characters; longer texts may break anywhere, or they would push the other columns off the page


def render(report: PlacementReport, title: str) -> str:
    """The page. Longer tables than 2,000 rows end with how many more there are."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(report.summary())}</p>",
        _drawing(report),
        _table("Providers", ("provider", "state", "nodes", "weight bytes"), [
            (one.name, one.story, one.nodes, one.weight_bytes)
            for one in report.providers
        ]),
        _table("Notes", ("note",), [(note,) for note in report.notes]),
        _table("Partitions", ("partition", "replica", "provider", "nodes", "weight bytes", "names"), [
            (one.id, one.replica, one.provider, len(one.nodes), one.weight_bytes, one.nodes)
            for one in report.partitions
        ]),
        _table("Transfers", ("value", "from", "to", "bytes"), [
            (one.value, one.source, one.target, "not known" if one.nbytes is None else one.nbytes)
            for one in report.transfers
        ]),
        _table("Declined", ("operator", "provider", "reason", "count", "examples"), [
            (f"{one.domain}::{one.op}", one.provider, one.reason, one.count, one.examples)
            for one in report.declines
        ]),
        _table("Nodes", ("node", "operator", "has it", "claimed by, cost", "declined by"), [
            (one.name, one.label, one.place, tuple(map(str, one.claims)), tuple(map(str, one.declines)))
            for one in report.nodes
        ]),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    names = "".join(f"<th>{escape(one)}</th>" for one in columns)
    lines = [f"<h2>{escape(title)}</h2>", f'<div class="scroll"><table><tr>{names}</tr>']
    lines += [f"<tr>{''.join(_cell(item) for item in row)}</tr>" for row in rows[:_ROWS]]
    lines.append("</table></div>")
    if len(rows) > _ROWS:
        lines.append(f"<p>... and {len(rows) - _ROWS:,} more.</p>")
    return "\n".join(lines)


def _cell(item: object) -> str:
    """Several texts stand below each other, the end of a long list folded."""
    if isinstance(item, tuple):
        texts = [escape(str(text)) for text in item]
        kind = ' class="long"' if any(len(str(text)) > _LONG for text in item) else ""
        shown, more = "<br>".join(texts[:_SHOWN]), texts[_SHOWN:]
        if more:
            shown += f"<details><summary>{len(more):,} more</summary>{'<br>'.join(more)}</details>"
        return f"<td{kind}>{shown}</td>"
    if isinstance(item, int):
        return f'<td class="number">{item:,}</td>'
    text = str(item)
    kind = ' class="long"' if len(text) > _LONG else ""
    return f"<td{kind}>{escape(text)}</td>"


def _drawing(report: PlacementReport) -> str:
    """One lane for each provider, one box for each partition, in order of execution from left to right."""
    lanes = {one.name: row for row, one in enumerate(report.providers)}
    drawn = [one for one in report.partitions if one.provider in lanes][:_DRAWN]
    if not drawn:
        return ""
    left = 20 + 7 * max(len(name) for name in lanes)
    width, height = left + _STEP * len(drawn), _LANE * len(lanes)
    shapes = []
    for name, row in lanes.items():
        middle = row * _LANE + _LANE // 2
        shapes.append(f'<line x1="{left}" y1="{middle}" x2="{width}" y2="{middle}" stroke="#ccd1d7"/>')
        shapes.append(f'<text x="0" y="{middle + 4}">{escape(name)}</text>')
    for column, one in enumerate(drawn):
        row = lanes[one.provider]
        x, y = left + column * _STEP + 4, row * _LANE + 5
        tip = f"<title>partition {one.id}: {len(one.nodes)} nodes, {one.weight_bytes:,} bytes of weights</title>"
        size = f'width="{_STEP - 8}" height="{_LANE - 10}" rx="3"'
        box = f'<rect x="{x}" y="{y}" {size} fill="{_COLOURS[row % len(_COLOURS)]}">{tip}</rect>'
        label = f'<text x="{x + _STEP // 2 - 4}" y="{y + 16}" text-anchor="middle" fill="#fff">{len(one.nodes)}</text>'
        shapes.append(box + label)
    total = len(report.partitions)
    more = f"<p>The first {_DRAWN} of {total:,} partitions.</p>" if total > _DRAWN else ""
    svg = f'<svg width="{width}" height="{height}" role="img" aria-label="partitions in order">{"".join(shapes)}</svg>'
    return f'<h2>Partitions in order (nodes in each)</h2>\n<div class="scroll">{svg}</div>{more}'
