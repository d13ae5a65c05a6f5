"""msgpack: the installed one, else its pure-Python form, which a worker in another environment carries."""

from __future__ import annotations

import importlib
from typing import Any

OLDEST = (1, 0)  # before it, bytes and text were told apart otherwise


def _found() -> Any:
    """Raises ModuleNotFoundError where there is none."""
    try:
        carried = importlib.import_module("outrider.carried.msgpack")
    except ModuleNotFoundError:  # this is an installed Outrider, which requires it
        return importlib.import_module("msgpack")
    try:
        installed = importlib.import_module("msgpack")
        return installed if tuple(installed.version) >= OLDEST else carried
    except (ImportError, AttributeError, TypeError):  # something else of that name
        return carried


msgpack = _found()
