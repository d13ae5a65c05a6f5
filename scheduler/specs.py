"""What callers write in `providers=`, made into checked ProviderSpecs.

| entry | means |
|---|---|
| `cpu`, `null`, `chaos` | a provider of this package |
| `ort`, `ort:NAME` | ONNX Runtime with its CPU execution provider, or another one |
| `package.module:Class` | a class that the worker imports |
| `file.py:Class` | a class in a file; the path becomes absolute and must exist, but with `required=False` |
| `CPUExecutionProvider` | `cpu` |
| any other `XExecutionProvider` | `ort:XExecutionProvider` |
| `...:n` | instance n of any of these; `:0` is the first and left out |
| `...?key=value&key=value` | the same with fields of ProviderSpec and provider options (`spec_text.py`) |
| `(entry, dict)` | the same with provider options |
| `ProviderSpec` | as it is, `kind` checked; `kind` is then without `?...` |

In pins and reports a provider has the entry's kind with its instance, or its `name`.
Nothing is imported here: whether the class exists and is a provider, its worker finds out.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.scheduler import spec_text
from outrider.scheduler.checked import invalid_option, unsupported_option
from outrider.scheduler.errors import (
    InvalidOptionError,
    UnknownOptionError,
    UnknownProviderError,
    UnsupportedOptionError,
)
from outrider.scheduler.options import ProviderSpec

VARIABLE = "OUTRIDER_PROVIDERS"
SUFFIX = "ExecutionProvider"  # of onnxruntime's names
CPU_PROVIDER = "CPUExecutionProvider"
BUILT_IN = ("cpu", "null", "chaos", "ort")
_NOT_BUILT = {  # -> what there is instead
    "cuda": "; ONNX Runtime's is CUDAExecutionProvider",
    "sim": "",
    "openvino": "; ONNX Runtime's is OpenVINOExecutionProvider",
}
_EXPECTED = (
    "'cpu', 'null', 'chaos', 'ort', 'package.module:Class', 'file.py:Class', one of these with '?key=value&...', "
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
    base, instance = split_instance(kind)
    where, colon, name = base.rpartition(":")
    if not colon:
        return Target(kind=base, instance=instance)
    if where == "ort":
        return Target(kind="ort", part=name, instance=instance)
    if where.endswith(".py"):
        return Target(file=where, name=name, instance=instance)
    return Target(module=where, name=name, instance=instance)


def parse_providers(providers: Any, provider_options: Any = None) -> list[ProviderSpec]:
    """The providers of a session or fleet, in priority order.

    None means what the environment variable OUTRIDER_PROVIDERS lists, or `["cpu"]` where it is not set or empty.
    `provider_options`: as in onnxruntime, a list with one dict for each provider. Raises InvalidOptionError (an empty
    list, two equal names, an entry of another type), UnknownProviderError and UnsupportedOptionError.
    """
    if providers is None:
        text = os.environ.get(VARIABLE, "")
        if text.strip():
            with sourced(VARIABLE):
                return parse_list(text, provider_options)
        providers = ["cpu"]
    if isinstance(providers, (str, ProviderSpec)) or not isinstance(providers, Sequence):
        raise invalid_option("providers", providers, f"a list of {_EXPECTED}")
    return _parsed(providers, provider_options)


def parse_list(text: str, provider_options: Any = None) -> list[ProviderSpec]:
    """The providers of a comma-separated list. Raises as `parse_providers` does."""
    entries = spec_text.split_entries(text)
    try:
        return _parsed(entries, provider_options)
    except UnknownProviderError as error:
        if error.provider in entries[1:] and "?" in entries[entries.index(error.provider, 1) - 1]:
            story = f"{error.message} A comma that belongs to the value before it is written %2C."
            raise UnknownProviderError(story, **error.fields()) from error
        raise


def parse_provider(entry: Any) -> ProviderSpec:
    """One entry of `providers=` as a ProviderSpec whose `kind` is canonical and whose `display` is its name, else what
    the entry has before '?' in its short form.

    Raises InvalidOptionError, UnknownProviderError (the name of nothing), UnsupportedOptionError (not built yet).
    """
    if isinstance(entry, ProviderSpec):
        return _checked(entry)
    if isinstance(entry, str) and entry.strip():
        return _checked(ProviderSpec(**spec_text.arguments(entry.strip())))
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Mapping):
        return _checked(_with(ProviderSpec(**spec_text.arguments(entry[0].strip())), entry[1], "providers"))
    if isinstance(entry, type):
        raise _class_given(entry)
    raise invalid_option("providers", entry, f"entries to be {_EXPECTED}")


def _parsed(entries: Sequence[Any], provider_options: Any) -> list[ProviderSpec]:
    if not entries:
        raise invalid_option("providers", [], "at least one provider; leave it out for ['cpu']")
    specs = [parse_provider(entry) for entry in entries]
    if provider_options is not None:
        specs = _with_options(specs, provider_options)
    seen: set[str] = set()
    for spec in specs:
        if spec.display in seen:
            hint = (
                f"different names; tell two of one kind apart by a trailing ':n', as in {_next_instance(spec)!r}, "
                "or by a name: '?name=NAME', ProviderSpec(name=NAME)"
            )
            raise invalid_option("providers", [one.display for one in specs], hint)
        seen.add(spec.display)
    return specs


def _next_instance(spec: ProviderSpec) -> str:
    base, instance = split_instance(spec.display)
    return f"{base}:{instance + 1}"


@contextlib.contextmanager
def sourced(source: str) -> Iterator[None]:
    """Errors of entries that come from somewhere else than the caller's hand say so."""
    try:
        yield
    except (InvalidOptionError, UnknownOptionError, UnknownProviderError, UnsupportedOptionError) as error:
        raise type(error)(f"{source}: {error.message}", **error.fields()) from error


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
        merged.append(_with(spec, given, "provider_options") if given else spec)
    return merged


def _with(spec: ProviderSpec, options: Any, where: str) -> ProviderSpec:
    """The spec with these options, which it must not have already."""
    if spec.options and options:
        raise invalid_option(where, options, f"the options of {spec.display!r} in one place only")
    return replace(spec, options=options) if options else spec


def split_instance(kind: str) -> tuple[str, int]:
    """A kind without its `:n`, and n, 0 where there is none."""
    base, colon, number = kind.rpartition(":")
    if colon and number.isascii() and number.isdecimal():
        return base, int(number)
    return kind, 0


def _checked(spec: ProviderSpec) -> ProviderSpec:
    base, instance = split_instance(spec.kind)
    if base == CPU_PROVIDER:
        base = "cpu"
    word, colon, part = base.partition(":")
    if word.endswith(SUFFIX) and not colon:
        base, word, colon, part = f"ort:{word}", "ort", ":", word
    if word in _NOT_BUILT:
        others = f"there are {', '.join(BUILT_IN)} and your own classes{_NOT_BUILT[word]}."
        raise unsupported_option("provider", spec.kind, others)
    suffix = f":{instance}" if instance else ""
    name = spec.name or base + suffix
    if word in BUILT_IN:
        if colon and not (word == "ort" and part.isidentifier()):
            raise invalid_option("providers", spec.kind, f"{word!r} or {word + ':n'!r}, n the number of the instance")
        kind = base + suffix
    else:
        kind = _class_kind(base, spec.kind, needed=spec.required is not False) + suffix
    return replace(spec, kind=kind, name=None if name == kind else name)


def _class_kind(base: str, given: str, needed: bool) -> str:
    where, colon, name = base.rpartition(":")
    if "?" in base and not os.path.isfile(os.path.abspath(os.path.expanduser(where))):
        way_out = "ProviderSpec's other fields for what follows '?', or the whole as a string in providers=[...]"
        raise invalid_option("kind", given, way_out)
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
        if needed and not os.path.isfile(path):  # else its absence is one more that is reported
            raise invalid_option("providers", given, f"an existing file; there is no {path}")
        return f"{path}:{name}"
    if not _DOTTED.match(where):
        raise invalid_option("providers", given, "'package.module:Class' or 'file.py:Class'")
    return f"{where}:{name}"
