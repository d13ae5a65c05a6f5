"""From the text of a provider spec to an instance: `cpu`, `null`, `chaos`, `package.module:Class`, `file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

from outrider.providers.contract import Provider, ProviderUnavailableError

BUILT_IN = {
    "cpu": "outrider.providers.cpu:CpuProvider",
    "chaos": "outrider.providers.chaos:ChaosProvider",
    "null": "outrider.providers.null:NullProvider",
    "ort": "outrider.providers.ort:OrtProvider",
}


def load_provider(kind: str) -> Provider:
    """Import and instantiate a provider. Raises ProviderUnavailableError that says what is missing.

    Exceptions of the module's own code at import, and of the class's constructor, pass through with their traceback.
    """
    module_name, _, class_name = BUILT_IN.get(kind, kind).rpartition(":")
    if not module_name:
        raise _unavailable(kind, f"{kind!r} names no class; write package.module:Class or file.py:Class")
    module = _from_file(kind, module_name) if module_name.endswith(".py") else _from_package(kind, module_name)
    found = getattr(module, class_name, None)
    if found is None:
        offers = sorted(
            name
            for name, item in vars(module).items()
            if isinstance(item, type) and issubclass(item, Provider) and item is not Provider
        )
        hint = f"it offers {', '.join(offers)}" if offers else "it offers no subclass of Provider"
        raise _unavailable(kind, f"{module_name} has no class {class_name!r}; {hint}")
    if not (isinstance(found, type) and issubclass(found, Provider)):
        raise _unavailable(kind, f"{kind} is no subclass of outrider.providers.contract.Provider; derive it from that")
    made: Provider = found()
    return made


def _unavailable(kind: str, reason: str) -> ProviderUnavailableError:
    return ProviderUnavailableError(reason, provider=kind, reason=reason)


def _from_package(kind: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise _unavailable(kind, f"there is no module {error.name!r} on the worker's sys.path") from error
        raise  # a package that the module itself imports is missing: its own traceback says it best


def _from_file(kind: str, path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise _unavailable(kind, f"there is no file {path!r}")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _unavailable(kind, f"{path!r} is no Python file")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # so that it finds the files beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module
