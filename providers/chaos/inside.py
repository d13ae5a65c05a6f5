"""The inside of the worker that chaos lives in, which a provider has no business to know. Here it is the point.

The contract hands none of it out, so it is found where callers of the provider keep it: in the frames above. What a
worker looks like inside is no contract: `tests/test_chaos_provider.py` tells when it has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

NONSENSE = b"\xc1chaos"
"""No msgpack: this byte begins nothing."""
_GENERATION = 1  # word of a board's header
_OFFSET = 4  # word of a layout's record
_FAR = 1 << 62  # bytes; a multiple of any alignment, in no segment
_NUMBERS = 16  # layouts that a slot of an edge has


def _callers(has: Callable[[Any], bool]) -> Iterator[tuple[Any, Any]]:
    """(object, frame) of each method above whose object fits, the nearest first."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and has(owner):
            yield owner, frame
        frame = frame.f_back  # type: ignore[assignment]


class Inside:
    """The worker process, as seen from its provider's `setup`; a provider that is no worker's has no inside."""

    def __init__(self) -> None:
        self._control = next((one.control for one, _ in _callers(lambda one: hasattr(one, "control"))), None)

    def say_nonsense(self) -> None:
        """Send the coordinator bytes that are no message."""
        if self._control is not None:
            self._control._outbox.append(NONSENSE)
            self._control._wake.ring()


class Published:
    """The outputs of a unit in one run slot, as the worker is about to publish them. Made in `bind`, which it calls."""

    def __init__(self) -> None:
        binder, frame = next(_callers(lambda one: hasattr(one, "_board") and hasattr(one, "outputs")))
        self._board = binder._board
        self._slot: int = frame.f_locals["slot"]
        self._edges = [port.edge for port in binder.outputs]

    def spoil(self, fault: str) -> None:
        """'stale_reference': the board seems to be of another generation; 'wild_reference': values lie nowhere.

        Outputs without a fixed place are spared. It stays like that.
        """
        words = self._board.words
        if fault == "stale_reference":
            words[_GENERATION] += 1
        for record in self._records():
            if fault == "wild_reference":
                words[record + _OFFSET] = _FAR
            self._board._version += 1
            words[record] = self._board._version

    def _records(self) -> list[int]:
        """Where the records of all layouts are that the outputs have had in this slot."""
        numbers = range(1, _NUMBERS + 1)
        found = (self._board.version_at(edge, self._slot, number) for edge in self._edges for number in numbers)
        return [at for at, version in found if version]
