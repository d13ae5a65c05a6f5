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
    # Not `from outrider import scheduler`: that asks this very function for 'scheduler' first.
    scheduler = importlib.import_module("outrider.scheduler")
    if name == "scheduler":
        return scheduler
    if name not in scheduler.__all__:
        offered = ", ".join(scheduler.__all__)
        raise AttributeError(f"module 'outrider' has no attribute {name!r}; it offers {offered}")
    return getattr(scheduler, name)


def __dir__() -> list[str]:
    return ["__version__", "scheduler", *importlib.import_module("outrider.scheduler").__all__]
