"""Outrider runs one ONNX model across several processes.

    from outrider import InferenceSession
    with InferenceSession("model.onnx") as session:
        outputs = session.run(None, {"x": array})

The names are those of `outrider.scheduler`. They load when asked for: a worker imports `outrider.providers` and must
not pull in the scheduler with it. A provider of your own derives from `outrider.providers.contract.Provider`.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError(f"Outrider runs on Linux only (it needs memfd, eventfd and pidfd); this is {sys.platform!r}.")

if TYPE_CHECKING:
    from outrider import scheduler as scheduler
    from outrider.scheduler import (
        CancelToken,
        ExecutionMode,
        ExecutionOrder,
        Fleet,
        GraphOptimizationLevel,
        InferenceSession,
        IOBinding,
        ModelMetadata,
        NodeArg,
        OrtValue,
        PlacementReport,
        ProviderSpec,
        RunOptions,
        SessionOptions,
        disable_telemetry_events,
        errors,
        get_all_providers,
        get_available_providers,
        get_build_info,
        get_device,
        get_version_string,
        read_providers,
        set_default_logger_severity,
        set_default_logger_verbosity,
    )

__version__ = "0.1.0"
__all__ = [
    "CancelToken", "ExecutionMode", "ExecutionOrder", "Fleet", "GraphOptimizationLevel", "IOBinding",
    "InferenceSession", "ModelMetadata", "NodeArg", "OrtValue", "PlacementReport", "ProviderSpec", "RunOptions",
    "SessionOptions", "disable_telemetry_events", "errors", "get_all_providers", "get_available_providers",
    "get_build_info", "get_device", "get_version_string", "read_providers", "set_default_logger_severity",
    "set_default_logger_verbosity",
]  # fmt: skip


if not TYPE_CHECKING:  # a misspelt name is an error for a type checker too

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Not `from outrider import scheduler`: that asks this very function for 'scheduler' first.
        scheduler = importlib.import_module("outrider.scheduler")
        if name == "scheduler":
            return scheduler
        return getattr(scheduler, name) if name in __all__ else scheduler.__getattr__(name)


def __dir__() -> list[str]:
    return ["__version__", "scheduler", *__all__]
