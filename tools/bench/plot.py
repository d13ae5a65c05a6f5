"""Rows as an SVG: horizontal bars, one panel per unit, the spread of the rounds as a line, the budget as a mark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from outrider.tools.bench.measure import Row

LABELS, BARS, FIGURES, STEP = 380, 420, 130, 22  # widths of the three columns, and the height of a bar's row
_SMALLEST = 100.0  # from this share between the longest and the shortest bar on, the axis is logarithmic
_LEGEND = "blue: budget met; red: missed; grey: no budget. Black mark: the budget; thin line: spread of the rounds"
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-weight:bold;font-size:14px}.unit,.axis{fill:#666;font-size:11px}"
    ".bar{fill:#4c78a8}.missed{fill:#c44e52}.plain{fill:#9aa5b1}.budget{stroke:#111;stroke-width:2}"
    ".spread{stroke:#222;stroke-width:1}.grid{stroke:#ddd}"
)


def svg(benches: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """An SVG document; `benches`: names with their rows. Rows that were not measured are left out.

    Blue bars keep to their budget, red ones do not, grey ones have none.
    """
    parts: list[str] = [f'<text class="axis" x="10" y="16">{_LEGEND}</text>']
    top = 24
    for name, rows in benches:
        parts.append(f'<text class="title" x="10" y="{top + 16}">outrider bench {escape(name)}</text>')
        top += 30
        for unit in dict.fromkeys(row.unit for row in rows):
            shown = [row for row in rows if row.unit == unit and row.value is not None]
            if shown:
                parts += _panel(unit, shown, top)
                top += STEP * len(shown) + 44
    width = LABELS + BARS + FIGURES
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", f'<rect width="{width}" height="{top}" fill="white"/>', *parts, "</svg>\n"]
    )


class _Axis:
    """Where a value lies in a panel: from 0 on, or logarithmic where bars differ too much."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        self.most, least = max(positive), min(positive)
        self.log = self.most / least >= _SMALLEST
        self.least = 10 ** math.floor(math.log10(least)) if self.log else 0.0

    def at(self, value: float) -> float:
        """Pixels from the left edge of the panel."""
        if not self.log:
            share = value / self.most
        elif value <= self.least:
            share = 0.0
        else:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        return LABELS + min(1.0, max(0.0, share)) * (BARS - 10)

    def ticks(self) -> list[float]:
        """Where grid lines stand."""
        if self.log:
            first, last = round(math.log10(self.least)), math.floor(math.log10(self.most))
            return [10.0**power for power in range(first, last + 1)]
        step = 10 ** math.floor(math.log10(self.most))
        step = next(part for part in (step / 5, step / 2, step, step * 2) if self.most / part <= 6)
        return [step * count for count in range(int(self.most / step) + 1)]


def _panel(unit: str, rows: Sequence[Row], top: int) -> Iterator[str]:
    axis = _Axis([one or 0.0 for row in rows for one in (row.value, row.high, row.limit)])
    bottom = top + 20 + STEP * len(rows)
    yield f'<text class="unit" x="{LABELS}" y="{top + 12}">{escape(unit)}{" (logarithmic)" if axis.log else ""}</text>'
    for tick in axis.ticks():
        x = f"{axis.at(tick):.1f}"
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{top + 18}" y2="{bottom}"/>'
        yield f'<text class="axis" x="{x}" y="{bottom + 12}" text-anchor="middle">{tick:g}</text>'
    for number, row in enumerate(rows):
        y = top + 20 + STEP * number
        assert row.value is not None
        end = axis.at(row.value)
        kind = {None: "plain", True: "bar", False: "missed"}[row.met]
        yield f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(row.what)}</text>'
        width = f"{max(1.0, end - LABELS):.1f}"
        yield f'<rect class="{kind}" x="{LABELS}" y="{y + 3}" width="{width}" height="{STEP - 8}"/>'
        if row.low is not None and row.high is not None:
            middle = y + STEP / 2 - 1
            left, right = axis.at(row.low), axis.at(row.high)
            yield f'<line class="spread" x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"/>'
        if row.limit is not None:
            x = f"{axis.at(row.limit):.1f}"
            yield f'<line class="budget" x1="{x}" x2="{x}" y1="{y + 1}" y2="{y + STEP - 3}"/>'
        right = LABELS + BARS + 6
        yield f'<text class="axis" x="{right}" y="{y + 14}">{row.value:.4g}</text>'
        if row.ratio is not None:
            yield f'<text class="axis" x="{right + FIGURES // 2}" y="{y + 14}">{row.ratio:.2f} x</text>'
