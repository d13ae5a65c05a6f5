"""Where the caller wants results of a run: layouts on the coordinator's board, one edge per result.

The layout number of the start word tells whether the run has any (`BOUND`); only then are the other words looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.providers.wire.messages import BOUND, START
from outrider.shm.board import TENSOR, Layout, number_of

if TYPE_CHECKING:
    from outrider.shm.board import BoardReader

Read = tuple["BoardReader", int, int]  # reader, edge, layout number: a word that was looked at


class Targets:
    """The results of one partition that may have a target, as output name -> edge of board 0 in `edges`."""

    def __init__(self, reader: BoardReader, edges: Mapping[str, int]) -> None:
        self._reader = reader
        self._edges = tuple(edges.items())

    def __bool__(self) -> bool:
        return bool(self._edges)

    def joined(self, slot: int, layouts: int) -> int:
        """`layouts`, the layout numbers of a run's inputs as one number, with those of its targets."""
        start = number_of(self._reader.word(START, slot))
        layouts = layouts << 16 | start
        if start != BOUND:
            return layouts
        for _, edge in self._edges:
            layouts = layouts << 16 | number_of(self._reader.word(edge, slot))
        return -layouts  # no number of a run without targets

    def of(self, slot: int, read: list[Read]) -> dict[str, Layout]:
        """Output name -> its target in the present run of a slot; adds the words it looked at to `read`.

        Call it when the run has started: another word of it was seen. Raises LayoutError for a malformed layout.
        """
        targets: dict[str, Layout] = {}
        if not self._edges:
            return targets
        start = number_of(self._reader.word(START, slot))
        read.append((self._reader, START, start))
        if start != BOUND:
            return targets
        for name, edge in self._edges:
            number = number_of(self._reader.word(edge, slot))
            read.append((self._reader, edge, number))
            layout = self._reader.layout(edge, slot, number)
            if layout.kind == TENSOR:
                targets[name] = layout
        return targets
