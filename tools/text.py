"""Plain tables for the terminal, and plain data for --json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import onnx_name

_FIRST = 4


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, the header first."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]


def visible(text: str) -> str:
    """The text with what no terminal should obey, such as escape sequences in the names of a model, written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def summarize(value: Any) -> dict[str, Any]:
    """{dtype, shape, min, mean, max} of an array of numbers; `first` values instead for strings; `kind` for the rest.

    Arrays without elements have neither.
    """
    if value is None:
        return {"kind": "none"}
    if isinstance(value, Mapping):
        return {"kind": "map", "count": len(value)}
    if isinstance(value, (list, tuple)):
        return {"kind": "sequence", "count": len(value), "items": [summarize(item) for item in value[:_FIRST]]}
    array = np.asarray(value)
    dtype = onnx_name(array.dtype)
    facts: dict[str, Any] = {"dtype": dtype, "shape": list(array.shape)}
    if array.size == 0:
        return facts
    if dtype == "string" or dtype.startswith("complex"):
        return facts | {"first": [str(item) for item in array.ravel()[:_FIRST]]}
    wide = array.astype(np.float64)
    if dtype == "bool" or "int" in dtype:
        return facts | {"min": int(array.min()), "mean": float(wide.mean()), "max": int(array.max())}
    with np.errstate(all="ignore"):
        return facts | {"min": float(wide.min()), "mean": float(wide.mean()), "max": float(wide.max())}


def row(name: str, facts: Mapping[str, Any]) -> list[str]:
    """A summary as cells: name, dtype, shape, values."""
    kind = facts.get("kind")
    if kind:
        return [name, kind, f"{facts['count']} items" if "count" in facts else "", ""]
    shape = f"[{', '.join(map(str, facts['shape']))}]"
    if "first" in facts:
        values = ", ".join(map(repr, facts["first"]))
    elif "min" in facts:
        values = f"min {facts['min']:.6g}  mean {facts['mean']:.6g}  max {facts['max']:.6g}"
    else:
        values = "empty"
    return [name, facts["dtype"], shape, values]


def plain(item: Any) -> Any:
    """Data that JSON can hold: numbers that are not finite become their names, unknown objects their text."""
    if isinstance(item, Mapping):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        return [plain(value) for value in item]
    if isinstance(item, np.generic):
        item = item.item()
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item if isinstance(item, (str, int, float, bool, type(None))) else str(item)


def milliseconds(seconds: float) -> str:
    """'12.3 ms'."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
