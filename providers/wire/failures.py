"""Errors as plain data, so that they cross processes without losing their story."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

from outrider.shm.errors import OutriderError

_PLAIN = (str, int, float, bool, type(None))


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)


def error_to_plain(error: BaseException) -> dict[str, Any]:
    """`{type, message, fields, traceback}` of any exception; only an OutriderError has fields."""
    story = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    fields = {name: _plain(value) for name, value in error.fields().items()} if isinstance(error, OutriderError) else {}
    return {"type": type(error).__name__, "message": str(error), "fields": fields, "traceback": story[-65536:]}


def error_from_plain(plain: dict[str, Any], kinds: Iterable[type[OutriderError]]) -> OutriderError | None:
    """The error again, when its type is one of `kinds`; None for a type that is not ours."""
    for kind in kinds:
        if kind.__name__ == plain.get("type"):
            fields = plain.get("fields")
            known = {k: v for k, v in fields.items() if k in kind._fields} if isinstance(fields, dict) else {}
            return kind(str(plain.get("message")), **known)
    return None
