"""Which extents of a program's inputs vary, learned from the signatures it is bound for. No memory, no arrays.

A program is *primed* by its first signature and by any change that is not growth. The first growth *rebuilds* it: the
extents that grew are known to vary, and what was seen to change gets room to grow. From then on these extents may move
in either direction, and the program is *replayed*: only ops that see a difference are bound again.
"""

from __future__ import annotations

from typing import NamedTuple

PRIMED, REBUILT, REPLAYED = "primed", "rebuilt", "replayed"
ACTIONS = (PRIMED, REBUILT, REPLAYED)

CHANGES = 128  # what changes gets room for so many more changes of the same size,
FREE_ROOM = 1 << 18  # bytes; up to this much, or its own size where that is more


class Entry(NamedTuple):
    """One input by its number: its state, and dtype and shape where it is an array."""

    number: int
    state: str
    dtype: str
    shape: tuple[int, ...] | None


Signature = tuple[Entry, ...]


class Growth:
    """`varying`: (number, axis) of the extents that vary."""

    def __init__(self) -> None:
        self.varying: frozenset[tuple[int, int]] = frozenset()
        self._last: Signature | None = None

    def next(self, signature: Signature) -> str:
        """What is to be done for `signature`; nothing is changed yet."""
        if self._last is None or _form(self._last) != _form(signature):
            return PRIMED
        changed = _changed(self._last, signature)
        if set(changed) <= self.varying:
            return REPLAYED
        return REBUILT if all(changed.values()) else PRIMED

    def done(self, action: str, signature: Signature) -> None:
        """The program was bound for `signature` in this way."""
        if action == PRIMED:
            self.varying = frozenset()
        elif self._last is not None:
            self.varying |= set(_changed(self._last, signature))
        self._last = signature


def room(nbytes: int, change: int) -> int:
    """Bytes to leave behind a value of `nbytes` whose size changed by up to `change` between two bindings."""
    return min(CHANGES * change, max(nbytes, FREE_ROOM))


def _form(signature: Signature) -> tuple[tuple[int, str, str, int], ...]:
    """All but the extents."""
    return tuple((one.number, one.state, one.dtype, -1 if one.shape is None else len(one.shape)) for one in signature)


def _changed(old: Signature, new: Signature) -> dict[tuple[int, int], bool]:
    """(number, axis) of the extents that differ, and whether they grew. The form must be the same."""
    return {
        (one.number, axis): after > before
        for one, other in zip(old, new, strict=True)
        if one.shape != other.shape
        for axis, (before, after) in enumerate(zip(one.shape or (), other.shape or (), strict=True))
        if before != after
    }
