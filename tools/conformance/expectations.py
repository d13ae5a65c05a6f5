"""Expected failures: which cases are known not to pass, as a TOML file.

    [MISMATCH]
    "onnx/test_gelu_*" = "the device approximates Erf"

One table for each kind of outcome; keys are names of cases or patterns, values say why. The first entry that fits a
case counts, exact names before patterns. A case that passes though it is listed, or fails otherwise than listed, is a
failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import tomllib

from outrider.tools.conformance.cases import Result
from outrider.tools.conformance.outcomes import KINDS, PASS
from outrider.tools.inputs import DataFileError, write_text


@dataclass(frozen=True)
class Expectation:
    """Cases that `pattern` fits end as `kind`, for this `reason`."""

    pattern: str
    kind: str
    reason: str


def read_expectations(path: str) -> tuple[Expectation, ...]:
    """The entries of a file. Raises DataFileError for what is none."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataFileError(f"cannot read {path}: {reason}.", path=path, reason=reason) from error
    found = []
    for kind, entries in tables.items():
        if kind == PASS or kind not in KINDS or not isinstance(entries, dict):
            raise _wrong(path, f"tables are called {', '.join(KINDS[1:])}, not {kind!r}")
        for pattern, reason in entries.items():
            if not isinstance(reason, str):
                raise _wrong(path, f"[{kind}] {pattern!r} is to be a text that says why, not {reason!r}")
            found.append(Expectation(pattern, kind, reason))
    return tuple(found)


def _wrong(path: str, reason: str) -> DataFileError:
    return DataFileError(f"{path} is no file of expected failures: {reason}.", path=path, reason=reason)


def expected(name: str, entries: Sequence[Expectation]) -> Expectation | None:
    """The entry that counts for a case."""
    exact = (one for one in entries if one.pattern == name)
    fitting = (one for one in entries if fnmatchcase(name, one.pattern))
    return next(exact, None) or next(fitting, None)


def surprise(result: Result, entry: Expectation | None) -> str:
    """What is wrong with a result, '' if nothing is."""
    kind = result.outcome.kind
    if entry is None:
        return "" if result.outcome.good else kind
    if kind == entry.kind:
        return ""
    if kind == PASS:
        return f"passes, and is listed as {entry.kind}"
    return f"{kind}, and is listed as {entry.kind}"


def unmet(entries: Sequence[Expectation], names: Iterable[str]) -> list[str]:
    """Patterns that fit no case."""
    known = list(names)
    return [one.pattern for one in entries if not any(fnmatchcase(name, one.pattern) for name in known)]


def write_expectations(path: str, found: Sequence[Result], old: Sequence[Expectation]) -> None:
    """Write a file that lists what failed, with the reasons of `old` entries where those stand.

    Raises DataFileError.
    """
    lines = ["# Cases that do not pass, and why. A case that is listed here and passes fails the run."]
    for kind in KINDS[1:]:
        rows = []
        for one in found:
            entry = expected(one.name, old)
            kept = entry is not None and entry.kind == one.outcome.kind
            if one.outcome.kind == kind and (kept or not one.outcome.good):
                reason = entry.reason if entry is not None and kept else one.outcome.reason
                rows.append(f"{_quoted(one.name)} = {_quoted(reason)}")
        if rows:
            lines += ["", f"[{kind}]", *rows]
    write_text(path, "\n".join(lines) + "\n")


def _quoted(text: str) -> str:
    """A basic string of TOML."""
    escaped = (f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else "\\" + c if c in '\\"' else c for c in text)
    return f'"{"".join(escaped)}"'
