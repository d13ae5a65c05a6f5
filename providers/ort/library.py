"""onnxruntime itself, and the execution provider (EP) of it that a worker hosts: built in, or from a plugin library."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.providers.ort.options import OrtOptions, unavailable

CPU = "CPUExecutionProvider"
OLDEST = (1, 24)  # the first that tells which provider got which node
# The wheels that have an execution provider. Each is an onnxruntime of its own, so each wants its own environment.
_WHEELS = {
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
    "DmlExecutionProvider": "onnxruntime-directml",
    "MIGraphXExecutionProvider": "onnxruntime-migraphx",
    "QNNExecutionProvider": "onnxruntime-qnn",
}
# Those whose option `device_id` chooses the device.
_NUMBERED = frozenset({"CUDA", "Tensorrt", "NvTensorRTRTX", "MIGraphX", "ROCM", "Dml", "CANN"})


def onnxruntime() -> Any:
    """The package. Raises ProviderUnavailableError where it is missing, broken, or older than `OLDEST`."""
    # It would tell Microsoft of every worker, and leave files in the folder for temporary ones.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        package = importlib.import_module("onnxruntime")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise unavailable(f"onnxruntime is not installed in {sys.prefix}; pip install onnxruntime there") from error
        raise unavailable(f"onnxruntime cannot be imported: {error}") from error
    version = str(getattr(package, "__version__", "0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise unavailable(f"onnxruntime {version} does not tell which node goes where; install {wanted} or newer")
    return package


@dataclass(frozen=True)
class ExecutionProvider:
    """What sessions are made with. `devices`: of a plugin EP, the one that is used; none for what is built in."""

    name: str
    devices: tuple[Any, ...]
    options: Mapping[str, str]

    @property
    def own_cpu(self) -> bool:
        """True for onnxruntime's own CPU provider, which takes whatever onnxruntime knows."""
        return self.name == CPU

    def attach(self, options: Any) -> list[Any]:
        """Add the EP to a SessionOptions, or return it in the form of InferenceSession's `providers`."""
        if self.devices:
            options.add_provider_for_devices(list(self.devices), dict(self.options))
            return []
        return [CPU] if self.own_cpu else [(self.name, dict(self.options)), CPU]


def choose(ort: Any, part: str, device: int, options: OrtOptions) -> ExecutionProvider:
    """The EP of a spec: `part` is the NAME of `ort:NAME`, '' if there is none; `device` the n of `:n`.

    A plugin library is registered here. An instance takes the device of its number; an EP with one device gives that to
    every instance. Raises ProviderUnavailableError.
    """
    if options.library:
        return _plugged(ort, part, device, options)
    if part in ("", CPU):
        return ExecutionProvider(CPU, (), {})
    available = ort.get_available_providers()
    if part in available:
        chosen = dict(options.provider)
        if device and part.removesuffix("ExecutionProvider") in _NUMBERED:
            chosen.setdefault("device_id", str(device))
        return ExecutionProvider(part, (), chosen)
    devices = [one for one in ort.get_ep_devices() if one.ep_name == part]
    if devices:
        return ExecutionProvider(part, (_numbered(part, devices, device),), options.provider)
    hint = f"pip install {_WHEELS[part]}" if part in _WHEELS else "a plugin library is named by the option 'library'"
    elsewhere = ", best in an environment of its own (ProviderSpec(python=...))" if part in _WHEELS else ""
    raise unavailable(
        f"onnxruntime {ort.__version__} has no execution provider {part!r}, only {', '.join(available)}; "
        f"{hint}{elsewhere}"
    )


def check_custom_ops(ort: Any, libraries: Sequence[str]) -> None:
    """Load libraries of custom operators once, so that one that does not load stops the start.

    Raises ProviderUnavailableError.
    """
    for path in libraries:
        try:
            ort.SessionOptions().register_custom_ops_library(path)
        except Exception as error:  # onnxruntime's kinds have no common class
            raise unavailable(f"onnxruntime cannot load the custom operators of {path}: {said(error)}") from error


def _plugged(ort: Any, part: str, device: int, options: OrtOptions) -> ExecutionProvider:
    library = options.library
    stem = os.path.basename(library).split(".")[0].removeprefix("lib")
    registration = options.registration or part or stem
    known = {one.ep_name for one in ort.get_ep_devices()}
    try:
        ort.register_execution_provider_library(registration, library)
    except Exception as error:  # onnxruntime's own kinds, and whatever the library's loading brings
        raise unavailable(f"onnxruntime cannot register {library} as {registration!r}: {said(error)}") from error
    added = [one for one in ort.get_ep_devices() if one.ep_name not in known]
    names = sorted({one.ep_name for one in added})
    if not names:
        raise unavailable(f"{library} offers no device here: its execution providers find no hardware that they know")
    if not part and len(names) > 1:
        raise unavailable(f"{library} has several execution providers, {', '.join(names)}: say which, as in ort:NAME")
    name = part or names[0]
    if name not in names:
        raise unavailable(f"{library} has no execution provider {name!r}, only {', '.join(names)}")
    return ExecutionProvider(
        name, (_numbered(name, [one for one in added if one.ep_name == name], device),), options.provider
    )


def _numbered(name: str, devices: list[Any], device: int) -> Any:
    if len(devices) == 1:
        return devices[0]
    if device < len(devices):
        return devices[device]
    raise unavailable(f"{name} has {len(devices)} devices, 0 to {len(devices) - 1}; there is none of number {device}")


_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+ : )?")
_STATUS = re.compile(r"^Non-zero status code returned while running \S+ node\. Name:'.*?' Status Message: ", re.DOTALL)
_SOURCE = re.compile(r"/\S+/onnxruntime/\S+:\d+ [^\n]*?\) (?=\S)")


def said(error: BaseException, limit: int = 300) -> str:
    """What onnxruntime says, without where in its source and of which node; at most `limit` characters, in one line."""
    text = _SOURCE.sub("", _STATUS.sub("", _CODE.sub("", str(error)))).split("\nStacktrace")[0]
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
