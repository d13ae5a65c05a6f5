"""What a partition reads: the values that other workers and the coordinator have published."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.providers.binding import BINDINGS
from outrider.providers.resident import Resident
from outrider.providers.wire import values
from outrider.providers.wire.declared import value_misfit
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.errors import BrokenEdgeError, WireError
from outrider.providers.wire.graph import Value
from outrider.shm.board import ENCODED, NONE, BoardReader, Layout
from outrider.shm.errors import LayoutError


class InputPort:
    """One input edge as read by this worker: the value of a word, as a cached read-only array where it is a tensor.

    A layout keeps its array when it comes under another number, so what was bound to that is found again.
    """

    def __init__(
        self, declared: Value, reader: BoardReader, board: int, edge: int, slots: int, resident: Resident | None = None
    ) -> None:
        """`resident`: where an earlier partition of this worker may have left the value itself."""
        self.name = declared.name
        self.resident = resident
        self.reader = reader
        self.edge = edge
        self._declared = declared
        self._board = board
        self._numbered: list[dict[int, tuple[Layout, np.ndarray]]] = [{} for _ in range(slots)]
        self._arrays: list[dict[Layout, np.ndarray]] = [{} for _ in range(slots)]  # the least recently numbered first

    def value(self, slot: int, number: int) -> Any:
        """The value published under a layout number. Raises BrokenEdgeError when it is malformed."""
        try:
            return self._value(slot, number)
        except (LayoutError, WireError) as error:
            raise BrokenEdgeError(
                f"{self.name!r} cannot be read: {error}",
                value=self.name,
                board=self._board,
                edge=self.edge,
                reason=str(error),
            ) from error

    def _value(self, slot: int, number: int) -> Any:
        layout = self.reader.layout(self.edge, slot, number)
        held = self._numbered[slot].get(number)
        if held is not None and held[0] is layout:
            return held[1]
        if layout.kind == NONE:
            return None
        segment = self.reader.memory_of(layout)
        if layout.kind == ENCODED:
            value = values.decode(segment.view[layout.offset : layout.offset + layout.nbytes])
            misfit = value_misfit(self._declared, value)
            if misfit:
                raise WireError(misfit, where=self.name, reason="not as declared")
            return value
        arrays = self._arrays[slot]
        array = arrays.pop(layout, None)
        if array is None:
            array = segment.array(layout.offset, numpy_dtype(BY_NUMBER[layout.dtype]), layout.shape)
            array.flags.writeable = False
            if len(arrays) >= BINDINGS:
                arrays.pop(next(iter(arrays)))
        arrays[layout] = array
        self._numbered[slot][number] = (layout, array)
        return array
