"""What all options have in common: checks by name, typed errors with near names, a repr of what differs, assignment.

`Options` is the base of dataclasses. `Assignable` ones may be changed after they were made, by assignment as in
onnxruntime; each assignment is checked as the constructor checks, and has no effect where it fails. Whoever takes them
takes a copy that is `fixed`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

from outrider.scheduler.differences import Explained
from outrider.scheduler.errors import InvalidOptionError, UnknownOptionError, UnsupportedOptionError


def unknown_option(name: str, known: Collection[str], where: str) -> UnknownOptionError:
    """The error for an option name that does not exist, with near names first."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(sorted(known))}."
    return UnknownOptionError(f"{where} has no option {name!r}. {hint}", name=name, known=sorted(known))


def invalid_option(name: str, value: Any, expected: str) -> InvalidOptionError:
    """The error for an option value that cannot be taken."""
    message = f"option {name}={_written(value)} is not valid: expected {expected}."
    return InvalidOptionError(message, name=name, value=_plain(value), expected=expected)


def unsupported_option(name: str, value: Any, reason: str) -> UnsupportedOptionError:
    """The error for what is designed but not built."""
    message = f"{name}={_written(value)} is not supported yet: {reason}"
    return UnsupportedOptionError(message, option=name, value=_plain(value), reason=reason)


def _plain(value: Any) -> Any:
    """What an error can carry through pickle."""
    return value if isinstance(value, (str, int, float, bytes, type(None))) else _written(value)


def _written(value: Any) -> str:
    """A value as the caller wrote it."""
    return repr(dict(value) if isinstance(value, MappingProxyType) else value)


class Options(Explained):
    """Unknown keywords are typed errors with near names; repr shows what differs from the defaults."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every subclass is a dataclass

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        known = [one.name for one in fields(cls)]
        for name in keywords:
            if name not in known:
                raise unknown_option(name, known, cls.__name__)
        return super().__new__(cls)

    def __repr__(self) -> str:
        shown = []
        for one in fields(self):
            value = getattr(self, one.name)
            value = dict(value) if isinstance(value, Mapping) else value
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if value != default:
                shown.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return _remade, (type(self), {key: dict(v) if isinstance(v, Mapping) else v for key, v in given.items()})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _one_of(self, name: str, accepted: Sequence[Any]) -> None:
        value = getattr(self, name)
        if not any(value is one or (isinstance(value, str) and value == one) for one in accepted):
            raise invalid_option(name, value, ", ".join(map(repr, accepted)))

    def _integer(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            span = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
            raise invalid_option(name, value, span + (" or None" if optional else ""))
        self._set(name, int(value))

    def _seconds(self, name: str, optional: bool) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        try:
            number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise invalid_option(name, value, "a positive number of seconds" + (" or None" if optional else ""))
        self._set(name, number)

    def _mapping(self, name: str, values: type | tuple[type, ...] = object, what: str = "anything") -> None:
        value = getattr(self, name)
        expected = f"a dict from str to {what}"
        if not isinstance(value, Mapping):
            raise invalid_option(name, value, expected)
        for key, item in value.items():
            if not isinstance(key, str) or not isinstance(item, values):
                raise invalid_option(name, value, f"{expected}, not {key!r}: {item!r}")
        self._set(name, MappingProxyType(dict(value)))

    def _boolean(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise invalid_option(name, getattr(self, name), "True or False")

    def _text(self, name: str) -> None:
        if not isinstance(getattr(self, name), str):
            raise invalid_option(name, getattr(self, name), "a str")

    def _not_yet(self, name: str, default: Any, reason: str) -> None:
        value = getattr(self, name)
        if value != default:
            raise unsupported_option(f"{type(self).__name__}.{name}", value, reason)


def _remade(kind: type[Options], given: dict[str, Any]) -> Any:
    return kind(**given)


class Assignable(Options):
    """Options that accept assignment until `fixed`. A subclass checks itself in `_check`, which may be called again."""

    def __post_init__(self) -> None:
        self._check()
        self._set("_state", "made")

    def _check(self) -> None:
        """Check every field, and put it into its final form. Raises the errors of options."""

    def fixed(self) -> Self:
        """A copy that does not change any more."""
        copy = dataclasses.replace(self)
        copy._set("_state", "fixed")
        return copy

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__.get("_state", "new")
        if state == "fixed":
            kind = type(self).__name__
            raise AttributeError(f"the {kind} of a session do not change; change your own, for another session")
        known = [one.name for one in fields(self)]
        if state == "new" or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        if name not in known:
            raise unknown_option(name, known, type(self).__name__)
        changed = type(self).__new__(type(self))  # other threads may use this one meanwhile
        before = dict(self.__dict__)
        changed.__dict__.update(before)
        changed._set(name, value)
        changed._check()
        self.__dict__.update({key: new for key, new in changed.__dict__.items() if before.get(key, self) is not new})

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} can be set, not deleted")
