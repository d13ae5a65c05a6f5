"""What callers write in `providers=`, made into checked ProviderSpecs.

| entry | means |
|---|---|
| `cpu`, `null`, `chaos` | a provider of this package |
| `package.module:Class` | a class that the worker imports |
| `file.py:Class` | a class in a file; the path becomes absolute and must exist |
| `CPUExecutionProvider` | `cpu` |
| `...:n` | instance n of any of these; `:0` is the first and left out |
| `(entry, dict)` | the same with provider options |
| `ProviderSpec` | as it is, `kind` checked |

Nothing is imported here: whether the class exists and is a provider, its worker finds out.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.scheduler.errors import UnknownProviderError
from outrider.scheduler.options import ProviderSpec, invalid_option, unsupported_option

BUILT_IN = ("cpu", "null", "chaos", "ort")
_NOT_BUILT = ("cuda", "sim", "openvino")
_EXPECTED = (
    "'cpu', 'null', 'chaos', 'package.module:Class', 'file.py:Class', "
    "(one of these, dict of options), or a ProviderSpec"
)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


@dataclass(frozen=True)
class Target:
    """Where a worker finds its provider: a `kind` of this package, or class `name` of a `module` or of a `file`.

    `part`: what follows the kind: the execution provider of `ort:NAME`.
    """

    kind: str = ""
    module: str = ""
    file: str = ""
    name: str = ""
    instance: int = 0
    part: str = ""


def target(kind: str) -> Target:
    """Take a checked `ProviderSpec.kind` apart."""
    base, instance = _split_instance(kind)
    where, colon, name = base.rpartition(":")
    if not colon:
        return Target(kind=base, instance=instance)
    if where == "ort":
        return Target(kind="ort", part=name, instance=instance)
    if where.endswith(".py"):
        return Target(file=where, name=name, instance=instance)
    return Target(module=where, name=name, instance=instance)


def parse_providers(providers: Any, provider_options: Any = None) -> list[ProviderSpec]:
    """The providers of a session or fleet, in priority order. None means `["cpu"]`.

    `provider_options`: as in onnxruntime, a list with one dict for each provider. Raises InvalidOptionError (an empty
    list, two equal names, an entry of another type), UnknownProviderError and UnsupportedOptionError.
    """
    if providers is None:
        providers = ["cpu"]
    if isinstance(providers, (str, ProviderSpec)) or not isinstance(providers, Sequence):
        raise invalid_option("providers", providers, f"a list of {_EXPECTED}")
    if not providers:
        raise invalid_option("providers", [], "at least one provider; leave it out for ['cpu']")
    specs = [parse_provider(entry) for entry in providers]
    if provider_options is not None:
        specs = _with_options(specs, provider_options)
    seen: set[str] = set()
    for spec in specs:
        if spec.display in seen:
            hint = "different names; tell two instances apart by a trailing ':n' or ProviderSpec(name=...)"
            raise invalid_option("providers", [one.display for one in specs], hint)
        seen.add(spec.display)
    return specs


def parse_provider(entry: Any) -> ProviderSpec:
    """One entry of `providers=` as a ProviderSpec whose `kind` is canonical and whose `display` is the entry's string.

    Raises InvalidOptionError, UnknownProviderError (the name of nothing), UnsupportedOptionError (not built yet).
    """
    if isinstance(entry, ProviderSpec):
        return _checked(entry)
    if isinstance(entry, str) and entry.strip():
        return _checked(ProviderSpec(entry))
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Mapping):
        return _checked(ProviderSpec(entry[0], options=entry[1]))
    if isinstance(entry, type):
        raise _class_given(entry)
    raise invalid_option("providers", entry, f"entries to be {_EXPECTED}")


def _class_given(entry: type) -> Exception:
    if entry.__module__ == "__main__":
        return _of_main(entry.__qualname__)
    text = f"{entry.__module__}:{entry.__qualname__}"
    return invalid_option("providers", entry, f"a string, since another process imports it: {text!r}")


def _of_main(name: str) -> Exception:
    way_out = f"a class that another process can import: move it to a file of its own and write 'that_file.py:{name}'"
    return invalid_option("providers", f"__main__:{name}", way_out)


def _with_options(specs: list[ProviderSpec], provider_options: Any) -> list[ProviderSpec]:
    if isinstance(provider_options, (str, Mapping)) or not isinstance(provider_options, Sequence):
        raise invalid_option("provider_options", provider_options, "a list with one dict for each provider")
    if len(provider_options) != len(specs):
        raise invalid_option("provider_options", provider_options, f"{len(specs)} dicts, one for each provider")
    merged = []
    for spec, given in zip(specs, provider_options, strict=True):
        if given and spec.options:
            raise invalid_option("provider_options", given, f"the options of {spec.display!r} in one place only")
        merged.append(replace(spec, options=given) if given else spec)
    return merged


def _split_instance(kind: str) -> tuple[str, int]:
    base, colon, number = kind.rpartition(":")
    if colon and number.isascii() and number.isdecimal():
        return base, int(number)
    return kind, 0


def _checked(spec: ProviderSpec) -> ProviderSpec:
    base, instance = _split_instance(spec.kind)
    if base == "CPUExecutionProvider":
        base = "cpu"
    word, colon, part = base.partition(":")
    if word.endswith("ExecutionProvider") and not colon:
        base, word, colon, part = f"ort:{word}", "ort", ":", word
    if word in _NOT_BUILT:
        raise unsupported_option("provider", spec.kind, f"this version has {', '.join(BUILT_IN)} and your own classes.")
    suffix = f":{instance}" if instance else ""
    name = spec.name or base + suffix
    if word in BUILT_IN:
        if colon and not (word == "ort" and part.isidentifier()):
            raise invalid_option("providers", spec.kind, f"{word!r} or {word + ':n'!r}, n the number of the instance")
        kind = base + suffix
    else:
        kind = _class_kind(base, spec.kind) + suffix
    return replace(spec, kind=kind, name=None if name == kind else name)


def _class_kind(base: str, given: str) -> str:
    where, colon, name = base.rpartition(":")
    if not colon:
        if base.endswith(".py") or os.sep in base:
            raise invalid_option("providers", given, f"the class too, as in '{base}:MyProvider'")
        near = difflib.get_close_matches(base.lower(), BUILT_IN, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(BUILT_IN)}."
        own = "A provider of your own is 'package.module:Class' or 'file.py:Class'."
        raise UnknownProviderError(f"there is no provider {base!r}. {hint} {own}", provider=given, known=list(BUILT_IN))
    if where == "__main__":
        raise _of_main(name)
    if not name.isidentifier():
        raise invalid_option("providers", given, "a class name after the last ':'")
    if where.endswith(".py"):
        path = os.path.abspath(os.path.expanduser(where))
        if not os.path.isfile(path):
            raise invalid_option("providers", given, f"an existing file; there is no {path}")
        return f"{path}:{name}"
    if not _DOTTED.match(where):
        raise invalid_option("providers", given, "'package.module:Class' or 'file.py:Class'")
    return f"{where}:{name}"
