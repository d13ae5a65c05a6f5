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
        Fleet,
        InferenceSession,
        ModelMetadata,
        NodeArg,
        OrtValue,
        PlacementReport,
        ProviderSpec,
        RunOptions,
        SessionOptions,
        errors,
        read_providers,
    )

__version__ = "0.1.0"
__all__ = [
    "CancelToken", "Fleet", "InferenceSession", "ModelMetadata", "NodeArg", "OrtValue", "PlacementReport",
    "ProviderSpec", "RunOptions", "SessionOptions", "errors", "read_providers",
]  # fmt: skip


if not TYPE_CHECKING:  # a misspelt name is an error for a type checker too

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Not `from outrider import scheduler`: that asks this very function for 'scheduler' first.
        scheduler = importlib.import_module("outrider.scheduler")
        if name == "scheduler":
            return scheduler
        if name not in __all__:
            raise AttributeError(f"module 'outrider' has no attribute {name!r}; it offers {', '.join(__all__)}")
        return getattr(scheduler, name)


def __dir__() -> list[str]:
    return ["__version__", "scheduler", *__all__]
