"""The coordinator: session, model, lowering, placement, planning, supervision. Public names load when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.scheduler import errors
    from outrider.scheduler.cancelling import CancelToken
    from outrider.scheduler.fleet import Fleet
    from outrider.scheduler.metadata import ModelMetadata
    from outrider.scheduler.nodearg import NodeArg
    from outrider.scheduler.options import ProviderSpec, RunOptions, SessionOptions
    from outrider.scheduler.ortvalue import OrtValue
    from outrider.scheduler.report import PlacementReport
    from outrider.scheduler.session import InferenceSession
    from outrider.scheduler.spec_file import read_providers

__all__ = [
    "CancelToken", "Fleet", "InferenceSession", "ModelMetadata", "NodeArg", "OrtValue", "PlacementReport",
    "ProviderSpec", "RunOptions", "SessionOptions", "errors", "read_providers",
]  # fmt: skip

_MODULES = {
    "CancelToken": "cancelling", "Fleet": "fleet", "InferenceSession": "session", "ModelMetadata": "metadata",
    "NodeArg": "nodearg", "OrtValue": "ortvalue", "PlacementReport": "report", "ProviderSpec": "options",
    "RunOptions": "options", "SessionOptions": "options", "read_providers": "spec_file",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("outrider.scheduler.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'outrider.scheduler' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"outrider.scheduler.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
