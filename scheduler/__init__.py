"""The coordinator: session, model, lowering, placement, planning, supervision. Public names load when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.scheduler import errors
    from outrider.scheduler.cancelling import CancelToken
    from outrider.scheduler.dropin import (
        disable_telemetry_events,
        get_all_providers,
        get_available_providers,
        get_build_info,
        get_device,
        get_version_string,
        set_default_logger_severity,
        set_default_logger_verbosity,
    )
    from outrider.scheduler.dropin_options import ExecutionMode, ExecutionOrder, GraphOptimizationLevel
    from outrider.scheduler.fleet import Fleet
    from outrider.scheduler.iobinding import IOBinding
    from outrider.scheduler.metadata import ModelMetadata
    from outrider.scheduler.nodearg import NodeArg
    from outrider.scheduler.options import ProviderSpec, RunOptions, SessionOptions
    from outrider.scheduler.ortvalue import OrtValue
    from outrider.scheduler.report import PlacementReport
    from outrider.scheduler.session import InferenceSession
    from outrider.scheduler.spec_file import read_providers

__all__ = [
    "CancelToken", "ExecutionMode", "ExecutionOrder", "Fleet", "GraphOptimizationLevel", "IOBinding",
    "InferenceSession", "ModelMetadata", "NodeArg", "OrtValue", "PlacementReport", "ProviderSpec", "RunOptions",
    "SessionOptions", "disable_telemetry_events", "errors", "get_all_providers", "get_available_providers",
    "get_build_info", "get_device", "get_version_string", "read_providers", "set_default_logger_severity",
    "set_default_logger_verbosity",
]  # fmt: skip

_MODULES = {
    "CancelToken": "cancelling", "ExecutionMode": "dropin_options", "ExecutionOrder": "dropin_options",
    "Fleet": "fleet", "GraphOptimizationLevel": "dropin_options", "IOBinding": "iobinding",
    "InferenceSession": "session", "ModelMetadata": "metadata", "NodeArg": "nodearg", "OrtValue": "ortvalue",
    "PlacementReport": "report", "ProviderSpec": "options", "RunOptions": "options", "SessionOptions": "options",
    "disable_telemetry_events": "dropin", "get_all_providers": "dropin", "get_available_providers": "dropin",
    "get_build_info": "dropin", "get_device": "dropin", "get_version_string": "dropin", "read_providers": "spec_file",
    "set_default_logger_severity": "dropin", "set_default_logger_verbosity": "dropin",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("outrider.scheduler.errors")
    if name not in _MODULES:
        from outrider.scheduler.differences import no_such_name

        offered = f"module 'outrider.scheduler' has no attribute {name!r}; it offers {', '.join(__all__)}"
        raise no_such_name("onnxruntime", name, offered)
    value = getattr(importlib.import_module(f"outrider.scheduler.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
