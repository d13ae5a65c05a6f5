"""The files that hold a provider's code, found without running any of it in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.specs import CPU_PROVIDER, target

_ORT_OWN = ("", CPU_PROVIDER)  # what `ort` and `ort:NAME` name that is ONNX Runtime's own code
_ORT_LIBRARIES = ("library", "custom_ops")  # options of `ort` that are paths


def is_foreign(spec: ProviderSpec) -> bool:
    """Whether a provider runs somebody else's code."""
    found = target(spec.kind)
    return not found.kind or (found.kind == "ort" and (found.part not in _ORT_OWN or bool(_libraries(spec))))


def foreign_files(spec: ProviderSpec) -> list[str] | None:
    """The files of somebody else's code that a provider starts with, as far as they are told; None if none can be."""
    found = target(spec.kind)
    if found.kind == "ort":
        runtime = _module_file("onnxruntime") if spec.python is None else None
        return [*_libraries(spec), *([] if runtime is None else [runtime])]
    # Which modules another interpreter would find is not known here.
    file = found.file if spec.python is not None else provider_file(spec.kind)
    return [file] if file else None


def loads(spec: ProviderSpec) -> str:
    """Which libraries a provider loads, to be told when it dies of them; '' if none is named."""
    libraries = _libraries(spec) if target(spec.kind).kind == "ort" else []
    return f" (it loads {', '.join(libraries)})" if libraries else ""


def _libraries(spec: ProviderSpec) -> list[str]:
    return [path for option in _ORT_LIBRARIES for path in _paths(spec.options.get(option))]


def _paths(given: object) -> list[str]:
    """The paths that an option names: a list, or text with commas."""
    if isinstance(given, str):
        return [os.path.abspath(os.path.expanduser(one.strip())) for one in given.split(",") if one.strip()]
    return [path for one in given for path in _paths(one)] if isinstance(given, Sequence) else []


def provider_file(kind: str) -> str | None:
    """The file of a provider of somebody else's, by a checked `ProviderSpec.kind`; None if it cannot be told.

    `importlib.util.find_spec("a.b")` imports `a`, whose code belongs in the worker. So each package is looked for in
    the folders of the one around it, by the last part of its name.
    """
    found = target(kind)
    return found.file or (_module_file(found.module) if found.module else None)


def _module_file(name: str) -> str | None:
    parts = name.split(".")
    folders: list[str] | None = None  # sys.path
    spec: ModuleSpec | None = None
    for depth, part in enumerate(parts, 1):
        if depth > 1 and folders is None:
            return None  # the one before is no package
        spec = PathFinder.find_spec(part, folders) or _found_otherwise(".".join(parts[:depth]), folders)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        folders = None if places is None else list(places)
    return spec.origin if spec is not None and spec.has_location else None


def _found_otherwise(name: str, folders: list[str] | None) -> ModuleSpec | None:
    """What finders other than `sys.path` know, such as those of editable installs."""
    for finder in sys.meta_path:
        if finder is PathFinder or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(name, folders)
        except Exception:  # anyone's finder, which may count on the package around being imported
            continue
        if spec is not None:
            return spec
    return None
