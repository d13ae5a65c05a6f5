"""Outrider runs one ONNX model across several processes. Public names are those of `outrider.scheduler`.

Lazy on purpose: a worker imports `outrider.providers` and must not pull in the scheduler with it.
"""

import importlib
import sys
from typing import Any

if not sys.platform.startswith("linux"):
    raise ImportError(f"Outrider runs on Linux only (it needs memfd, eventfd and pidfd); this is {sys.platform!r}.")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    # Not `from outrider import scheduler`, which asks this function for the attribute 'scheduler' first.
    scheduler = importlib.import_module("outrider.scheduler")
    if name == "scheduler":
        return scheduler
    try:
        return getattr(scheduler, name)
    except AttributeError:
        offered = ", ".join(scheduler.__all__)
        raise AttributeError(f"module 'outrider' has no attribute {name!r}; it offers {offered}") from None


def __dir__() -> list[str]:
    scheduler = importlib.import_module("outrider.scheduler")
    return [*globals(), *scheduler.__all__]
