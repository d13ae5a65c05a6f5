"""Pins: which provider the user wants for which nodes."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.shm.errors import OutriderError


class PinNotFoundError(OutriderError, ValueError):
    """A pin names no node of the model. `suggestions` are names that look like it."""

    _fields = ("pin", "suggestions")


class UnknownProviderError(OutriderError, ValueError):
    """A pin asks for a provider that the session does not have. `known` are those it has."""

    _fields = ("provider", "known")


@dataclass(frozen=True)
class Resolved:
    """`assignment`: node position -> provider position. `constant`: (key, node name) of keys without any effect."""

    assignment: dict[int, int]
    constant: list[tuple[str, str]]


def resolve(pins: Mapping[str, str], names: Sequence[tuple[str, bool]], providers: Sequence[str]) -> Resolved:
    """Look up `pins` (key -> provider) among `names` (full node name, whether the node is made of constants only).

    A key that equals a full name is that node, also where it holds `*`, `?` or `[`; any other key is an
    `fnmatch.fnmatchcase` pattern over full names. Exact names go before patterns, then the first match in the order of
    `pins` counts. Constant nodes are computed where they are needed: no pin moves them, and a key that matches no other
    node is reported in `constant`. In a pattern, `[[]` stands for the character `[`.

    Raises PinNotFoundError for a key that matches no node, UnknownProviderError for a provider not in `providers`.
    """
    check_providers(pins, providers)
    positions: dict[str, list[int]] = {}
    for position, (name, _) in enumerate(names):
        positions.setdefault(name, []).append(position)
    assignment: dict[int, int] = {}
    constant: list[tuple[str, str]] = []
    # Stable: exact names first, both kinds in the user's order.
    for key in sorted(pins, key=lambda key: key not in positions):
        matched = positions.get(key) or [
            position for name, alike in positions.items() if fnmatch.fnmatchcase(name, key) for position in alike
        ]
        if not matched:
            raise _not_found(key, list(positions))
        movable = [position for position in matched if not names[position][1]]
        if not movable:
            constant.extend((key, names[position][0]) for position in sorted(matched))
        for position in movable:
            assignment.setdefault(position, providers.index(pins[key]))
    return Resolved(assignment, constant)


def check_providers(pins: Mapping[str, str], providers: Sequence[str]) -> None:
    """Raises UnknownProviderError for a pin to a provider that is not among `providers`."""
    for key, provider in pins.items():
        if provider not in providers:
            known = ", ".join(providers)
            raise UnknownProviderError(
                f"pin {key!r} asks for provider {provider!r}, which this session does not have; it has {known}",
                provider=provider,
                known=tuple(providers),
            )


def key_of(pins: Mapping[str, str], name: str, calls: Sequence[str] = ()) -> str | None:
    """The key of `pins` that counts for a node: its full name, a call that it was inlined from, else a pattern."""
    exact = (one for one in (name, *calls) if one in pins)
    return next(exact, next((key for key in pins if fnmatch.fnmatchcase(name, key)), None))


def _not_found(key: str, names: list[str]) -> PinNotFoundError:
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    hint = f"; names like it: {', '.join(near)}" if near else ""
    escape = "; to match a literal '[' in a pattern, write '[[]'" if "[" in key else ""
    return PinNotFoundError(
        f"pin {key!r} is neither the full name of a node nor a pattern that matches one{hint}{escape}. "
        "The placement report lists the full names.",
        pin=key,
        suggestions=tuple(near),
    )
