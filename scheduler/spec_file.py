"""Providers from a TOML file.

    [[provider]]                      # in priority order
    kind = "my_ep:MyEP"               # as ProviderSpec.kind
    name = "mine"                     # this and what follows may be left out
    python = "venv/bin/python"
    threads = 2
    cpus = "0-3"                      # or [0, 1, 2, 3]
    memory_limit = "2GiB"             # or bytes
    required = false
    env = { MY_FLAG = "1" }
    [provider.options]                # of the provider itself
    library = "/x/libep.so"

Keys are the fields of ProviderSpec, any other is an error. Relative paths in `kind` and `python` start at the folder of
the file; a provider is still called by what the file says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tomllib

from outrider.scheduler.checked import unknown_option
from outrider.scheduler.errors import InvalidOptionError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.spec_text import FIELDS, READERS
from outrider.scheduler.specs import parse_provider, parse_providers, sourced, split_instance

_KEYS = ("kind", *FIELDS, "env", "options")


def read_providers(path: str | os.PathLike[str]) -> list[ProviderSpec]:
    """The providers that a TOML file lists, checked, for `providers=` of a session or fleet.

    Raises InvalidOptionError (a file that cannot be read or is no TOML, a value that cannot be taken, two equal names),
    UnknownOptionError, UnknownProviderError, UnsupportedOptionError; with the place in the file.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(path, f"is no TOML: {error}") from error
    with sourced(path):
        for key in document:
            if key != "provider":
                raise unknown_option(key, ["provider"], "a file of providers")
        tables = document.get("provider", [])
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            raise _invalid(path, "lists no provider; each is a table [[provider]]")
        folder = os.path.dirname(os.path.abspath(path))
        specs = []
        for number, table in enumerate(tables, 1):
            with sourced(f"[[provider]] number {number}"):
                specs.append(_spec(table, folder))
        return parse_providers(specs)


def _spec(table: Mapping[str, Any], folder: str) -> ProviderSpec:
    given = dict(table)
    for key in given:
        if key not in _KEYS:
            raise unknown_option(key, _KEYS, "a provider")
    kind = given.get("kind")
    if not isinstance(kind, str):
        message = f"kind={kind!r} is not valid: expected a provider's kind, such as 'cpu'."
        raise InvalidOptionError(message, name="kind", value=kind if kind is None else repr(kind), expected="a str")
    for key, read in READERS.items():
        if isinstance(given.get(key), str):
            try:
                given[key] = read(given[key])
            except ValueError as error:
                message = f"{key}={given[key]!r} is not valid: expected {error}."
                raise InvalidOptionError(message, name=key, value=given[key], expected=str(error)) from error
    python = given.get("python")
    if isinstance(python, str) and python.strip():
        given["python"] = os.path.join(folder, os.path.expanduser(python))
    where = kind.partition(".py:")[0]
    if where != kind and not os.path.isabs(os.path.expanduser(where)):
        base, instance = split_instance(kind)
        given["kind"] = os.path.join(folder, kind)
        given.setdefault("name", f"{base}:{instance}" if instance else base)
    return parse_provider(ProviderSpec(**given))


def _invalid(path: str, what: str) -> InvalidOptionError:
    return InvalidOptionError(f"{path} {what}.", name="providers", value=path, expected="a TOML file of providers")
