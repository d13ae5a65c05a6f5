"""Operators on strings: object arrays of str, so these nodes are bound in the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.wire.graph import Node

_STRING = frozenset({"string"})


def _objects(items: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """An object array of that shape; items may be anything, so numpy must not look into them."""
    made = np.empty(len(items), object)
    for i, item in enumerate(items):
        made[i] = item
    return made.reshape(tuple(shape))


@kernel("StringConcat", since=20, dtypes={0: _STRING, 1: _STRING})
def string_concat(b: Bind, p: None) -> None:
    """StringConcat-20: element-wise, with broadcasting."""
    x, y = np.broadcast_arrays(b.array(0), b.array(1))
    b.value(0, lambda: _objects([str(i) + str(j) for i, j in zip(x.flat, y.flat, strict=True)], x.shape))


def _parse_regex(node: Node) -> re.Pattern[str]:
    pattern = str(node.attributes.get("pattern", ""))
    try:
        return re.compile(pattern)
    except re.error as error:
        raise Unsupported(f"pattern {pattern!r} is no regular expression here: {error}") from None


@kernel("RegexFullMatch", since=20, dtypes={0: _STRING}, parse=_parse_regex)
def regex_full_match(b: Bind, p: re.Pattern[str]) -> None:
    """RegexFullMatch-20: bool, True where the whole string matches. RE2's syntax as far as Python's `re` shares it."""
    b.dynamic()
    x = b.array(0)
    found = [p.fullmatch(str(item)) is not None for item in x.flat]
    b.value(0, lambda: np.array(found, bool).reshape(x.shape))


def _parse_split(node: Node) -> tuple[str | None, int]:
    maxsplit = node.attributes.get("maxsplit")
    return str(node.attributes.get("delimiter", "")) or None, -1 if maxsplit is None else int(maxsplit)


@kernel("StringSplit", since=20, dtypes={0: _STRING}, parse=_parse_split)
def string_split(b: Bind, p: tuple[str | None, int]) -> None:
    """StringSplit-20: pieces along a new last axis, filled up with '', and their int64 counts."""
    b.dynamic()
    x = b.array(0)
    pieces = [str(item).split(*p) for item in x.flat]
    width = max((len(piece) for piece in pieces), default=0)
    padded = [part for piece in pieces for part in piece + [""] * (width - len(piece))]
    b.value(0, lambda: _objects(padded, (*x.shape, width)))
    b.value(1, lambda: np.array([len(piece) for piece in pieces], np.int64).reshape(x.shape))


_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def _parse_normalizer(node: Node) -> tuple[str, bool, frozenset[str]]:
    attributes = node.attributes
    action = str(attributes.get("case_change_action", "NONE"))
    if action not in _CASES:
        raise Unsupported(f"case_change_action={action!r}, the kernel takes {', '.join(_CASES)}")
    return action, bool(attributes.get("is_case_sensitive", 0)), frozenset(map(str, attributes.get("stopwords", [])))


@kernel("StringNormalizer", since=10, dtypes={0: _STRING}, parse=_parse_normalizer)
def string_normalizer(b: Bind, p: tuple[str, bool, frozenset[str]]) -> None:
    """StringNormalizer-10 of [C] or [1, C]: stop words removed, case changed; the locale is Unicode's."""
    b.dynamic()
    x = b.array(0)
    action, sensitive, stopwords = p
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise ValueError(f"StringNormalizer {b.node.name}: shape {x.shape}, not [C] or [1, C]")
    stops = stopwords if sensitive else {word.lower() for word in stopwords}
    texts = [str(item) for item in x.flat]
    kept = [_CASES[action](text) for text in texts if (text if sensitive else text.lower()) not in stops] or [""]
    b.value(0, lambda: _objects(kept, (len(kept),) if x.ndim == 1 else (1, len(kept))))
