"""The file that holds a provider's class, found without running any of it in this process."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

from outrider.scheduler.specs import target


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
