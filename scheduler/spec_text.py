"""Providers as text, taken apart and put together: the same grammar on the command line, in `providers=[...]`, in
`OUTRIDER_PROVIDERS`.

    list  = entry *("," entry)
    entry = kind ["?" pair *("&" pair)]
    pair  = key "=" value

    ort?library=/x/libep.so&registration=foo,my_ep:MyEP?python=/venv/bin/python&threads=1,cpu

| key | what it sets |
|---|---|
| `name`, `python` | the field of ProviderSpec, as text |
| `threads`, `nice`, `required`, `debug` | the field; its value as below |
| `cpus` | cores: `3`, `0-3`, `0,2-3` |
| `memory_limit` | bytes, or `512MiB`, `2GiB`, `2GB` |
| `wrap` | words, divided as a shell divides them, or a list |
| `env.NAME` | an environment variable of the worker, as text |
| `option.KEY` | option KEY of the provider |
| any other `KEY` | the same; what looks like a misspelt field is an error, and so are `kind`, `env`, `options` |

Values are JSON (numbers, true, false, null, "text", [lists], {objects}) where they can be read as that, else text as it
stands; one that begins with `[`, `{` or `"` must be JSON. `%XX` is a byte of UTF-8 anywhere: `%`, `&`, a comma in a
list of entries, `?` in a kind and `=` in a key can only be written so. A comma within a value that begins with `[`, `{`
or `"` does not end the entry.

Pure: what a kind means is `specs.py`'s.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from outrider.scheduler.errors import InvalidOptionError

FIELDS = ("name", "python", "threads", "cpus", "nice", "memory_limit", "required", "wrap", "debug")
_RESERVED = {"kind": "the part before '?'", "env": "env.NAME=VALUE", "options": "KEY=VALUE, or option.KEY=VALUE"}
_NEAR = 0.85  # of difflib: 'requird', 'thread', 'cpu', but not 'num_threads'
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})?")
_JSON = ("[", "{", '"')  # what begins so is JSON
_IN_TEXT, _IN_KEY = "%&,", "%&,="  # what is written in escapes
_OPENING = {"[": "]", "{": "}"}
_UNITS = {"": 1, "b": 1} | {
    letter.lower() + suffix: base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\Z", re.ASCII)
_CORES = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?\Z", re.ASCII)


def split_entries(text: str) -> list[str]:
    """The entries of a comma-separated list, without the spaces around them. Raises InvalidOptionError."""
    entries, start, position, key = [], 0, 0, False
    while position < len(text):
        letter = text[position]
        if letter == ",":
            entries.append(text[start:position].strip())
            start, key = position + 1, False
        elif letter in "?&":
            key = True
        elif letter == "=" and key:
            key = False
            if text[position + 1 : position + 2] in _JSON:
                position = _value_end(text, position + 1) - 1
        position += 1
    return [*entries, text[start:].strip()]


def arguments(text: str) -> dict[str, Any]:
    """What an entry says, as keyword arguments of ProviderSpec: `kind` always, the others as far as they are given.

    Raises InvalidOptionError with the position, counted from 1.
    """
    kind, mark, query = text.partition("?")
    given: dict[str, Any] = {"kind": _decoded(text, 0, kind)}
    if not kind.strip():
        _refuse(text, 0, "a provider's kind first, such as cpu or package.module:Class")
    position = len(kind) + 1
    seen = set()
    for pair in query.split("&") if mark else ():
        key_text, equals, value_text = pair.partition("=")
        if not equals or not key_text:
            _refuse(text, position, f"key=value, not {pair!r}")
        key = _decoded(text, position, key_text)
        where, name = _meaning(text, position, key)
        if (where, name) in seen:
            _refuse(text, position, f"{key} once")
        seen.add((where, name))
        start = position + len(key_text) + 1
        value = _decoded(text, start, value_text)
        if where == "field":
            given[name] = _field_value(text, start, name, value)
        else:
            given.setdefault(where, {})[name] = value if where == "env" else _value(text, start, value)
        position += len(pair) + 1
    return given


def written(given: Mapping[str, Any]) -> str:
    """The entry that `arguments` reads as these. Raises ValueError for what no text can say: bytes, NaN, infinity."""
    plain = [(name, str(given[name])) for name in ("name", "python") if name in given]
    plain += [(f"env.{name}", text) for name, text in given.get("env", {}).items()]
    pairs = [(name, _field_text(name, given[name])) for name in FIELDS[2:] if name in given]
    pairs += [(k if _is_plain(k) else f"option.{k}", _value_text(v)) for k, v in given.get("options", {}).items()]
    written_pairs = [f"{_encoded(key, _IN_KEY)}={_encoded_text(text)}" for key, text in plain]
    written_pairs += [f"{_encoded(key, _IN_KEY)}={_encoded_value(text)}" for key, text in pairs]
    return _encoded(given["kind"], "%,?") + ("?" if written_pairs else "") + "&".join(written_pairs)


def read_value(text: str) -> Any:
    """A value as JSON where it can be read as that, else the text. Raises ValueError for what must be JSON and is not.

    Numbers too large for a float are text.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError:
        if text.lstrip()[:1] in _JSON:
            raise
        return text


def read_bytes(text: str) -> int:
    """'2GiB', '1.5MB', '4096' as a number of bytes. Raises ValueError."""
    found = _SIZE.match(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ValueError("a number of bytes, or one with B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def read_cores(text: str) -> list[int]:
    """'3', '0-3', '0,2-3' as core numbers. Raises ValueError."""
    cores: list[int] = []
    for part in text.split(","):
        found = _CORES.match(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError("cores, as in 3, 0-3 or 0,2-3")
        cores += range(int(found[1]), int(found[2] or found[1]) + 1)
    return cores


def read_words(text: str) -> list[str]:
    """A command as a shell divides it. Raises ValueError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError("a command whose quotes are closed") from error


# Fields that are written in words of their own.
READERS = {"cpus": read_cores, "memory_limit": read_bytes, "wrap": read_words}


def _value_end(text: str, start: int) -> int:
    """Where the JSON text ends that begins at `start` with a bracket or quote. Nothing is decoded yet."""
    closing: list[str] = []
    position = start
    while position < len(text):
        letter = text[position]
        if closing and closing[-1] == '"':
            if letter == "\\":
                position += 1
            elif letter == '"':
                closing.pop()
        elif letter == '"':
            closing.append('"')
        elif letter in _OPENING:
            closing.append(_OPENING[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        position += 1
        if not closing:
            return position
    return _refuse(text, start, f"{closing[-1]} that closes this value; a text that begins so is written in quotes")


def _meaning(text: str, position: int, key: str) -> tuple[str, str]:
    """('field', name), ('env', name) or ('options', name)."""
    if key in FIELDS:
        return "field", key
    head, dot, rest = key.partition(".")
    if dot and head == "env":
        if not rest:
            _refuse(text, position, _RESERVED["env"])
        return "env", rest
    if dot and head == "option":
        return "options", rest
    if key in _RESERVED:
        _refuse(text, position, f"{_RESERVED[key]}; an option {key!r} of the provider is option.{key}")
    near = _near(key)
    if near:
        _refuse(text, position, f"{near}; an option {key!r} of the provider is option.{key}")
    return "options", key


def _near(key: str) -> str:
    """The field or prefix that a key seems to mean, '' if none."""
    head, dot, rest = key.partition(".")
    if dot:
        prefix = difflib.get_close_matches(head.lower(), ("env", "option"), n=1, cutoff=_NEAR)
        return f"{prefix[0]}.{rest}" if prefix else ""
    return next(iter(difflib.get_close_matches(key.lower(), FIELDS, n=1, cutoff=_NEAR)), "")


def _is_plain(key: str) -> bool:
    """Whether the provider's option of this name is written as it is."""
    return bool(key) and key not in FIELDS and key not in _RESERVED and not _near(key)


def _field_value(text: str, position: int, name: str, value: str) -> Any:
    if name in ("name", "python"):
        return value
    read = READERS.get(name)
    if read is None or value.startswith("["):
        return _value(text, position, value)
    try:
        return read(value)
    except ValueError as error:
        return _refuse(text, position, f"for {name} {error}")


def _field_text(name: str, value: Any) -> str:
    if name == "cpus" and len(value) and list(value) == list(range(value[0], value[-1] + 1)):
        return str(value[0]) if len(value) == 1 else f"{value[0]}-{value[-1]}"
    return _value_text(list(value) if name in ("cpus", "wrap") else value)


def _value(text: str, position: int, value: str) -> Any:
    try:
        return read_value(value)
    except ValueError as error:
        return _refuse(text, position, f"JSON ({error}); a text that begins so is written in quotes")


def _value_text(value: Any) -> str:
    if isinstance(value, str) and _stands(value):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text if _is_unicode(text) else json.dumps(value, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _stands(text: str) -> bool:
    """Whether a text is read as it is."""
    try:
        return _is_unicode(text) and read_value(text) == text
    except ValueError:
        return False


def _is_unicode(text: str) -> bool:
    """False for one with half a surrogate pair, which has no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _encoded_value(value: str) -> str:
    """A comma within brackets or quotes stays."""
    return _encoded(value, "%&" if value[:1] in _JSON else _IN_TEXT)


def _encoded_text(text: str) -> str:
    """What is read as text, whatever it begins with."""
    return _encoded(text[:1], _IN_TEXT + "".join(_JSON)) + _encoded(text[1:], _IN_TEXT)


def _encoded(text: str, special: str) -> str:
    return "".join(
        "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogateescape"))
        if letter in special or letter.isspace() or not letter.isprintable()
        else letter
        for letter in text
    )


def _decoded(text: str, position: int, part: str) -> str:
    """`part` of `text`, at `position`, with its escapes decoded."""
    if "%" not in part:
        return part
    data, end = bytearray(), 0
    for found in _ESCAPE.finditer(part):
        if found[1] is None:
            _refuse(text, position + found.start(), "two hexadecimal digits after %; a literal % is %25")
        data += part[end : found.start()].encode("utf-8", "surrogateescape")
        data.append(int(found[1], 16))
        end = found.end()
    data += part[end:].encode("utf-8", "surrogateescape")
    return data.decode("utf-8", "surrogateescape")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return number


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _refuse(text: str, position: int, expected: str) -> NoReturn:
    message = f"provider {text!r} is not valid at character {position + 1}: expected {expected}."
    raise InvalidOptionError(message, name="providers", value=text, expected=expected)
