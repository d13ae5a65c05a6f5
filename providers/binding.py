"""One unit in a worker, bound to the places of its inputs and outputs, one binding per combination that occurs.

A known combination costs one dictionary look-up per run. Outputs that only the caller gets, and that are large, are
written straight into a block of the output pool; as the caller may hold earlier results, up to `VARIANTS` bindings to
different blocks are made, and beyond that the result is copied into a fresh block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import numpy as np

from outrider.providers.contract import Program, ProviderContractError, Run, Unit
from outrider.providers.wire import values
from outrider.providers.wire.dtypes import NUMBER, is_string, is_tensor, numpy_dtype, onnx_name
from outrider.providers.wire.spans import Trace, timed
from outrider.shm.board import TENSOR, BoardWriter, Layout
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.segment import address_of

BINDINGS = 64  # kept per unit
VARIANTS = 4  # bindings of one combination to different output blocks
LEASE_BYTES = 64 * 1024  # results up to this size are copied by the caller, larger ones leased


@dataclass(frozen=True)
class OutputPort:
    """Where a unit output goes: its edge on this worker's board; `result`: only the caller reads it."""

    name: str
    edge: int
    result: bool


@dataclass
class Counters:
    """Work of the data plane in this worker."""

    bound: int = 0
    copies: int = 0
    copied_bytes: int = 0


@dataclass
class _Binding:
    inputs: tuple[Any, ...]  # held, so that their ids stay theirs
    run: Run = field(init=False)
    numbers: list[int] = field(default_factory=list)  # layout number per output, -1 where the run returns a value
    arrays: list[np.ndarray | None] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (block, offset, bytes) in the output pool
    spilled: bool = False  # a large result has a place in the segment because the pool had no room for it


class BoundUnit:
    """A compiled unit and its bindings. `run` is called by the worker's main thread only.

    Blocks of the output pool that a run takes are settled by its caller: `published`, or `give_back_all` when it
    failed.
    """

    def __init__(
        self,
        provider: str,
        unit: Unit,
        program: Program,
        outputs: Sequence[OutputPort],
        places: Places,
        board: BoardWriter,
        pool: PoolWriter,
        counters: Counters,
        trace: Trace,
    ) -> None:
        self.provider = provider
        self.unit = unit
        self.program = program
        self.outputs = tuple(outputs)
        self._places = places
        self._board = board
        self._pool = pool
        self._counters = counters
        self._trace = trace
        self._bindings: dict[tuple[Any, ...], list[_Binding]] = {}
        # (output, slot) -> the last stored array, read-only
        self._held: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self._epoch = places.epoch
        self._last: _Binding | None = None

    def repeatable(self) -> Run | None:
        """The bound callable of the last run, if calling it again with the same arrays is all there is to do."""
        last = self._last
        if last is None or last.blocks or last.spilled or -1 in last.numbers:
            return None
        return last.run

    def run(self, slot: int, inputs: Sequence[Any]) -> list[tuple[int, Any]]:
        """Run on `inputs`; returns (layout number, value) per output: read-only array, or the value as it is."""
        if self._epoch != self._places.epoch:
            self._moved()
        key = (slot, *[id(x) if type(x) is np.ndarray and x.dtype != object else type(x) for x in inputs])
        variants = self._bindings.get(key)
        binding = None
        if variants is not None:
            for candidate in variants:
                if not candidate.blocks or all(self._pool.is_free(*block) for block in candidate.blocks):
                    binding = candidate
                    break
        if binding is None:
            binding = self._bind(slot, key, inputs, pooled=variants is None or len(variants) < VARIANTS)
        for block, _, _ in binding.blocks:
            self._pool.take_again(block)
        self._last = binding
        return self._results(slot, binding, binding.run(inputs))

    def _results(self, slot: int, binding: _Binding, returned: Sequence[Any]) -> list[tuple[int, Any]]:
        if not self.outputs:  # nobody reads what it makes
            return []
        if not isinstance(returned, (list, tuple)):
            raise self._broken(self.unit.nodes[-1].name, "a list of outputs", type(returned).__name__)
        if len(returned) != len(self.outputs):
            raise self._broken(self.unit.nodes[-1].name, f"{len(self.outputs)} outputs", f"{len(returned)}")
        results: list[tuple[int, Any]] = []
        for i, value in enumerate(returned):
            number = binding.numbers[i]
            if number >= 0:
                results.append((number, binding.arrays[i]))
            else:
                results.append(self._store(i, slot, value))
        return results

    def _moved(self) -> None:
        """A buffer moved: what was bound to old places is not used again."""
        self._bindings.clear()
        self._held.clear()
        self._last = None
        self._epoch = self._places.epoch

    def _bind(self, slot: int, key: tuple[Any, ...], inputs: Sequence[Any], pooled: bool) -> _Binding:
        count = len(self.outputs)
        held_inputs = tuple(x for x in inputs if type(x) is np.ndarray and x.dtype != object)
        binding = _Binding(held_inputs, numbers=[-1] * count, arrays=[None] * count)

        def place(i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
            self._check(i, dtype, len(shape))
            array, number, block = self._place(i, slot, dtype, shape, pooled)
            binding.numbers[i] = number
            if block is not None:
                binding.blocks.append(block)
            elif self.outputs[i].result and array.nbytes > LEASE_BYTES:
                binding.spilled = True
            held = array.view()
            held.flags.writeable = False
            binding.arrays[i] = held
            return array

        epoch = self._places.epoch
        with timed(self._trace.recorder, "bind", "bind") as args:
            binding.run = self.program.bind(inputs, place)
            args["bytes"] = sum(array.nbytes for array in binding.arrays if array is not None)
        for block, _, _ in binding.blocks:  # taken again by the run
            self._pool.give_back(block)
        self._counters.bound += 1
        if epoch != self._places.epoch:  # a buffer moved meanwhile: older bindings point to its old place
            self._moved()
        while len(self._bindings) >= BINDINGS:
            self._bindings.pop(next(iter(self._bindings)))
        self._bindings.setdefault(key, []).append(binding)
        return binding

    def _place(
        self, i: int, slot: int, dtype: str, shape: tuple[int, ...], pooled: bool
    ) -> tuple[np.ndarray, int, tuple[int, int, int] | None]:
        port, kind = self.outputs[i], numpy_dtype(dtype)
        if pooled and port.result:
            nbytes = kind.itemsize * math.prod(shape)
            taken = self._pool.take(nbytes, port.name) if nbytes > LEASE_BYTES else None
            if taken is not None:
                block, offset = taken
                layout = Layout(TENSOR, NUMBER[dtype], kind.itemsize, shape, offset, nbytes, block)
                number = self._board.number(port.edge, slot, layout)
                return self._pool.segment.array(offset, kind, shape), number, (block, offset, nbytes)
        array, number = self._places.tensor(port.edge, slot, NUMBER[dtype], kind, shape, port.name)
        return array, number, None

    def _store(self, i: int, slot: int, value: Any) -> tuple[int, Any]:
        """Keep a returned value: one counted copy."""
        port, declared = self.outputs[i], self.unit.outputs[i]
        if value is None and not is_tensor(declared.dtype):
            return self._places.nothing(port.edge, slot), None
        if is_tensor(declared.dtype) and not isinstance(value, np.ndarray):
            if not isinstance(value, np.generic):
                raise self._broken(port.name, f"an array of {declared.dtype}", type(value).__name__)
            value = np.asarray(value)
        if isinstance(value, np.ndarray) and not is_string(value.dtype):
            try:
                dtype = onnx_name(value.dtype)
            except ValueError as error:
                raise self._broken(port.name, f"an array of {declared.dtype}", str(value.dtype)) from error
            self._check(i, dtype, value.ndim)
            array, number, block = self._place(i, slot, dtype, value.shape, pooled=True)
            begun = monotonic_ns() if self._trace.on else 0
            np.copyto(array, value)
            self._count(value.nbytes, port.name, begun)
            last = self._held.get((i, slot))
            if block is None and last is not None and _same_place(last, number, array):
                return last  # the same object, so that the next unit finds its binding
            held = array.view()
            held.flags.writeable = False
            self._held[i, slot] = (number, held)
            return number, held
        if isinstance(value, np.ndarray):
            self._check(i, "string", value.ndim)
        chunks = values.encode(value)
        target, number = self._places.blob(port.edge, slot, values.size(chunks), port.name)
        begun = monotonic_ns() if self._trace.on else 0
        at = 0
        for chunk in chunks:
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
        self._count(at, port.name, begun)
        return number, value

    def _count(self, nbytes: int, name: str, begun: int) -> None:
        self._counters.copies += 1
        self._counters.copied_bytes += nbytes
        recorder = self._trace.recorder
        if recorder is not None and begun:
            recorder.add("copy", name, begun, monotonic_ns(), {"bytes": nbytes})

    def _check(self, i: int, dtype: str, rank: int) -> None:
        declared = self.unit.outputs[i]
        if declared.dtype not in ("undefined", dtype, f"optional({dtype})"):
            raise self._broken(declared.name, f"dtype {declared.dtype}", dtype)
        if declared.shape is not None and len(declared.shape) != rank:
            raise self._broken(declared.name, f"rank {len(declared.shape)}", f"rank {rank}")

    def _broken(self, what: str, expected: str, got: str) -> ProviderContractError:
        return ProviderContractError(
            f"provider {self.provider} should return {expected} for {what!r}, it returned {got}",
            provider=self.provider,
            node=what,
            expected=expected,
            got=got,
        )


def _same_place(last: tuple[int, np.ndarray], number: int, array: np.ndarray) -> bool:
    held = last[1]
    same_form = held.shape == array.shape and held.dtype == array.dtype
    return last[0] == number and same_form and address_of(held) == address_of(array)
