"""One unit and what is bound for it, without processes: numbers of layouts that are redefined, buffers that move."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.binding import LEASE_BYTES, BoundUnit, Counters, OutputPort
from outrider.providers.contract import Place, Program, Provider, ProviderContractError, Run, Unit
from outrider.providers.resident import Resident
from outrider.providers.traits import Traits
from outrider.providers.wire.graph import Node, Value
from outrider.providers.wire.spans import Trace
from outrider.shm.board import LAYOUTS_PER_EDGE, BoardReader, BoardWriter
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.segment import Segment, create_segment

pytestmark = pytest.mark.fast

BLOCKS = 8


class Doubles(Program):
    """y = 2 x and z = 4 x."""

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        (x,) = inputs
        targets = [place(i, "uint8", x.shape) for i in range(2)]

        def run(_: Sequence[Any]) -> list[None]:
            for i, target in enumerate(targets, 1):
                np.left_shift(x, i, target)
            return [None, None]

        return run


class Bench:
    """A unit whose first output is a result for the caller and whose second one is an edge; `released` is the caller's
    side of the output pool."""

    def __init__(self) -> None:
        pool, own = (self._segment() for _ in range(2))
        self.released = memoryview(bytearray(8 * BLOCKS)).cast("Q")
        self.pool = PoolWriter(pool, self.released, 0, BLOCKS, memory=1)
        self.board = BoardWriter(own, 2, 1, 1)
        self.places = Places(own, self.board, 2, 1)
        self.reader = BoardReader(own, 2, 1, 1, {1: pool})
        values = [Value(name, "uint8", ("N",)) for name in "xyz"]
        node = Node(0, "n", "Doubles", "", 1, {}, tuple(values[:1]), tuple(values[1:]))
        unit = Unit(
            nodes=(node,), inputs=tuple(values[:1]), outputs=tuple(values[1:]), constants={}, constant_nodes=(),
            optimization="all", opsets={},
        )  # fmt: skip
        ports = [OutputPort("y", 0, True, False), OutputPort("z", 1, False, False)]
        self.counters = Counters()
        self.unit = BoundUnit(
            "p",
            Provider(),
            Traits(),
            Resident({}),
            unit,
            Doubles(),
            ports,
            self.places,
            self.board,
            self.pool,
            self.counters,
            Trace(),
        )

    @staticmethod
    def _segment() -> Segment:
        fd = create_segment("bench", 1 << 30)
        try:
            return Segment(fd, writable=True)
        finally:
            os.close(fd)

    def run(self, x: np.ndarray) -> int | None:
        """Run, read back what the numbers name, and check it; the block of the output pool that holds the result."""
        block = None
        for edge, (number, _) in enumerate(self.unit.run(0, [x], {})):
            layout = self.reader.layout(edge, 0, number)
            segment = self.reader.memory_of(layout)
            np.testing.assert_array_equal(segment.array(layout.offset, np.uint8, layout.shape), x << edge + 1)
            block = layout.block if edge == 0 else block
        self.pool.published()
        return block


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from([*range(20), *range(LEASE_BYTES + 1, LEASE_BYTES + 21)]), st.booleans()),
        min_size=20,
        max_size=120,
    )
)
def test_every_number_names_what_was_written(runs: list[tuple[int, bool]]) -> None:
    """More shapes than numbers, and results that the caller holds for a while."""
    bench = Bench()
    inputs: dict[int, np.ndarray] = {}
    held: list[int] = []
    for size, release in runs:
        x = inputs.setdefault(size, np.arange(size, dtype=np.uint8) & 31)
        block = bench.run(x)
        if block is not None:
            assert block not in held
            held.append(block)
        if held and (release or len(held) == BLOCKS):
            bench.released[held.pop(0)] += 1


def test_shapes_that_come_back_are_bound_once() -> None:
    bench = Bench()
    inputs = [np.arange(size, dtype=np.uint8) & 31 for size in range(1, 41)]
    for _ in range(3):
        for x in inputs:
            bench.run(x)
    assert bench.counters.bound == len(inputs)


def test_a_number_that_is_taken_from_a_binding_of_the_same_inputs_is_missed() -> None:
    """Two blocks hold the same result in turn. When both are free, the number of block 1 has been taken and that of
    block 0 is the next to be: numbering the one anew must not leave the other with a number that is gone."""
    bench = Bench()
    large, alike = (np.arange(LEASE_BYTES + 1, dtype=np.uint8) & 31 for _ in range(2))
    assert (bench.run(large), bench.run(large)) == (0, 1)
    bench.released[0] += 1
    assert bench.run(alike) == 0  # bound anew to the same place: its number is the younger one now
    for size in range(1, LAYOUTS_PER_EDGE):
        bench.run(np.arange(size, dtype=np.uint8) & 31)
    bench.released[0] += 1
    bench.released[1] += 1
    assert (bench.run(large), bench.run(large)) == (0, 1)
    assert bench.counters.bound == 3 + LAYOUTS_PER_EDGE - 1


@pytest.mark.parametrize("position", [-1, 2])
def test_a_place_for_an_output_that_the_unit_does_not_have_is_refused(position: int) -> None:
    class Surplus(Program):
        def bind(self, inputs: Sequence[Any], place: Place) -> Run:
            place(position, "uint8", inputs[0].shape)
            raise AssertionError("a place was given")

    bench = Bench()
    bench.unit.program = Surplus()
    with pytest.raises(ProviderContractError, match=f"output {position}") as caught:
        bench.run(np.arange(3, dtype=np.uint8))
    assert (caught.value.provider, caught.value.node) == ("p", "n")
