"""One unit in a worker, bound to the places of its inputs and outputs, one binding per combination that occurs.

A known combination costs one dictionary look-up per run. A binding is good until a buffer that it writes to moves; a
layout number that got another meaning meanwhile is only asked for anew. Outputs that only the caller gets, and that are
large, are written straight into a block of the output pool; as the caller may hold earlier results, up to `VARIANTS`
bindings to different blocks are made, and beyond that the result is copied into a fresh block.

What a provider hands to its next unit without a place (`strided`, `export`) is loose: such an input is known by dtype
and shape, not by where it lies, and a partition that has one takes the general way in each run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import numpy as np

from outrider.providers.adapters import NotInPlaceError
from outrider.providers.contract import Program, Provider, ProviderContractError, Run, Unit
from outrider.providers.privates import Privates
from outrider.providers.resident import Resident, form_of, is_foreign, signature_of
from outrider.providers.traits import Traits
from outrider.providers.wire import values
from outrider.providers.wire.declared import has_type, told
from outrider.providers.wire.dtypes import NUMBER, is_string, is_tensor, name_as, numpy_dtype
from outrider.providers.wire.spans import Trace, timed
from outrider.shm.board import OWN, TENSOR, BoardWriter, Layout
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.segment import address_of

BINDINGS = 64  # kept per unit
VARIANTS = 4  # bindings of one combination to different output blocks
LEASE_BYTES = 64 * 1024  # results up to this size are copied by the caller, larger ones leased


@dataclass(frozen=True)
class OutputPort:
    """Where a unit output goes: its edge on this worker's board.

    `result`: only the caller reads it; `inside`: another unit of the partition reads it; `published`: others do.
    """

    name: str
    edge: int
    result: bool
    inside: bool
    published: bool = True


@dataclass
class Counters:
    """Work of the data plane in this worker."""

    bound: int = 0
    copies: int = 0
    copied_bytes: int = 0
    exports: int = 0
    exported_bytes: int = 0


@dataclass
class Placed:
    """A unit output that the run writes to its place."""

    array: np.ndarray  # read-only
    layout: Layout
    number: int  # of the layout
    record: tuple[int, int]  # where the version of the number's record is, and what it is


@dataclass
class Binding:
    """A unit bound to arrays. `run` writes the outputs that are placed and returns the values of the others."""

    inputs: tuple[Any, ...]  # held, so that their ids stay theirs
    placed: list[Placed | None]  # per output
    run: Run = field(init=False)
    stamps: list[tuple[int, int]] = field(default_factory=list)  # (index in `Places.stamps`, value) of its buffers
    changes: int = 0  # of the slot when buffers and numbers were as they are here
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (block, offset, bytes) in the output pool
    spilled: bool = False  # a large result has a place in the segment because the pool had no room for it


class BoundUnit:
    """A compiled unit and its bindings. `run` is called by the worker's main thread only.

    Blocks of the output pool that a run takes are settled by its caller: `published`, or `give_back_all` when it
    failed. `loose`: outputs of the last run that have no place.
    """

    def __init__(
        self,
        provider: str,
        instance: Provider,
        traits: Traits,
        resident: Resident,
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
        self.loose: list[int] = []
        self._instance = instance
        self._traits = traits
        self._resident = resident
        self._privates = Privates(counters) if traits.writable else None
        self.unit = unit
        self.program = program
        self.outputs = tuple(outputs)
        self._places = places
        self._board = board
        self._pool = pool
        self._counters = counters
        self._trace = trace
        self._bindings: dict[tuple[Any, ...], list[Binding]] = {}  # the least recently used first
        # (output, slot) -> the last stored array, read-only
        self._held: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self._last: Binding | None = None
        self._targets: Mapping[str, Layout] = {}  # of the present run

    def repeatable(self) -> Binding | None:
        """The binding of the last run, if calling it again with the same arrays is all there is to do."""
        last = self._last
        if last is None or last.spilled or None in last.placed:
            return None
        return last

    def run(
        self, slot: int, inputs: Sequence[Any], targets: Mapping[str, Layout], loose: Collection[int] = ()
    ) -> list[tuple[int, Any]]:
        """Run on `inputs`; returns (layout number, value) per output: read-only array, or the value as it is.

        `targets`: where the caller wants outputs, by name. One that has another dtype or shape goes elsewhere.
        `loose`: positions of inputs that lie somewhere else in each run. The number of a loose output that nobody else
        reads is 0.
        """
        wanted = [targets.get(port.name) for port in self.outputs] if targets else ()
        inputs_key = [id(x) if type(x) is np.ndarray and x.dtype != object else type(x) for x in inputs]
        for i in loose:
            inputs_key[i] = signature_of(inputs[i])
        key = (slot, *inputs_key, *wanted)
        self._targets = targets
        self.loose = []
        while True:
            binding = self._known(slot, key)
            if binding is None:
                binding = self._bind(slot, key, inputs, loose)
            for block, _, _ in binding.blocks:
                self._pool.take_again(block)
            self._last = binding
            try:
                returned = binding.run(inputs)
            except NotInPlaceError:
                for block, _, _ in binding.blocks:
                    self._pool.give_back(block)
                self._bindings.clear()
            else:
                return self._results(slot, binding, returned)

    def _known(self, slot: int, key: tuple[Any, ...]) -> Binding | None:
        """A binding that can be used now."""
        variants = self._bindings.pop(key, None)
        if variants is None:
            return None
        self._bindings[key] = variants
        for one in tuple(variants):
            if one.blocks and not all(self._pool.is_free(*block) for block in one.blocks):
                continue
            if one.changes == self._places.changes[slot] or self._up_to_date(slot, one):
                return one
            variants.remove(one)
        return None

    def _up_to_date(self, slot: int, binding: Binding) -> bool:
        """False if a buffer has moved. Asks for new numbers of layouts whose numbers mean something else now."""
        stamps = self._places.stamps
        if any(stamps[at] != stamp for at, stamp in binding.stamps):
            return False
        for port, placed in zip(self.outputs, binding.placed, strict=True):
            if placed is not None and self._board.words[placed.record[0]] != placed.record[1]:
                placed.number = self._places.number(port.edge, slot, placed.layout)
                placed.record = self._board.version_at(port.edge, slot, placed.number)
        binding.changes = self._places.changes[slot]
        return True

    def _results(self, slot: int, binding: Binding, returned: Sequence[Any]) -> list[tuple[int, Any]]:
        if not self.outputs:  # nobody reads what it makes
            return []
        if not isinstance(returned, (list, tuple)):
            raise self._broken(self.unit.nodes[-1].name, "a list of outputs", type(returned).__name__)
        if len(returned) != len(self.outputs):
            raise self._broken(self.unit.nodes[-1].name, f"{len(self.outputs)} outputs", f"{len(returned)}")
        return [
            self._store(i, slot, value) if placed is None else (placed.number, placed.array)
            for i, (placed, value) in enumerate(zip(binding.placed, returned, strict=True))
        ]

    def _bind(self, slot: int, key: tuple[Any, ...], inputs: Sequence[Any], loose: Collection[int]) -> Binding:
        pooled = len(self._bindings.get(key, ())) < VARIANTS
        held_inputs = tuple(
            x for i, x in enumerate(inputs) if type(x) is np.ndarray and x.dtype != object and i not in loose
        )
        binding = Binding(held_inputs, [None] * len(self.outputs))

        def place(i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
            if not 0 <= i < len(self.outputs):  # a unit whose outputs nobody reads has none
                count, node = len(self.outputs), self.unit.nodes[-1].name
                raise self._broken(node, f"{count} outputs", f"one that it placed as output {i}")
            self._check(i, dtype, len(shape))
            array, layout, number = self._place(i, slot, dtype, shape, pooled)
            edge = self.outputs[i].edge
            if layout.block is not None:
                binding.blocks.append((layout.block, layout.offset, layout.nbytes))
            elif layout.memory == OWN:
                at = self._places.stamp_index(edge, slot)
                binding.stamps.append((at, self._places.stamps[at]))
                if self.outputs[i].result and layout.nbytes > LEASE_BYTES:
                    binding.spilled = True
            held = array.view()
            held.flags.writeable = False
            binding.placed[i] = Placed(held, layout, number, self._board.version_at(edge, slot, number))
            return array

        with timed(self._trace.recorder, "bind", "bind") as args:
            if self._privates is None:
                binding.run = self.program.bind(inputs, place)
            else:
                own = self._privates.of(inputs)
                binding.run = self._privates.before(self.program.bind(own, place), own)
            args["bytes"] = sum(placed.array.nbytes for placed in binding.placed if placed is not None)
        for block, _, _ in binding.blocks:  # taken again by the run
            self._pool.give_back(block)
        self._counters.bound += 1
        binding.changes = self._places.changes[slot]
        if key not in self._bindings:
            while len(self._bindings) >= BINDINGS:
                self._bindings.pop(next(iter(self._bindings)))
        self._bindings.setdefault(key, []).append(binding)
        return binding

    def _place(
        self, i: int, slot: int, dtype: str, shape: tuple[int, ...], pooled: bool
    ) -> tuple[np.ndarray, Layout, int]:
        """A place for an output, in the output pool where it may lie there; its layout, and the number of that."""
        port, kind = self.outputs[i], numpy_dtype(dtype)
        target = self._targets.get(port.name)
        wanted = (self._pool.memory, NUMBER[dtype], shape)
        if target is not None and (target.memory, target.dtype, target.shape) == wanted:
            number = self._places.number(port.edge, slot, target)
            return self._pool.segment.array(target.offset, kind, shape), target, number
        nbytes = kind.itemsize * math.prod(shape)
        large = pooled and port.result and nbytes > LEASE_BYTES
        taken = self._pool.take(nbytes, port.name) if large else None
        if taken is not None:
            block, offset = taken
            segment, memory = self._pool.segment, self._pool.memory
        else:
            block, offset = None, self._places.offset(port.edge, slot, nbytes, port.name)
            segment, memory = self._places.segment, OWN
        layout = Layout(TENSOR, NUMBER[dtype], kind.itemsize, shape, offset, nbytes, block, memory)
        return segment.array(offset, kind, shape), layout, self._places.number(port.edge, slot, layout)

    def _store(self, i: int, slot: int, value: Any) -> tuple[int, Any]:
        """Keep a returned value: one counted copy."""
        port, declared = self.outputs[i], self.unit.outputs[i]
        if self._traits.loose:
            passed = self._passed(i, slot, value)
            if passed is not None:
                return passed
        if value is None and not is_tensor(declared.dtype) and has_type(None, declared.dtype):
            return self._places.nothing(port.edge, slot), None
        if is_tensor(declared.dtype) and not isinstance(value, np.ndarray):
            if not isinstance(value, np.generic):
                raise self._broken(port.name, f"an array of {declared.dtype}", type(value).__name__)
            value = np.asarray(value)
        if isinstance(value, np.ndarray) and not is_string(value.dtype):
            dtype = self._check_array(i, value)
            array, layout, number = self._place(i, slot, dtype, value.shape, pooled=True)
            begun = monotonic_ns() if self._trace.on else 0
            np.copyto(array, value)
            self._count(value.nbytes, port.name, begun)
            last = self._held.get((i, slot))
            if layout.block is None and last is not None and _same_place(last, number, array):
                return last  # the same object, so that the next unit finds its binding
            held = array.view()
            held.flags.writeable = False
            self._held[i, slot] = (number, held)
            return number, held
        if isinstance(value, np.ndarray):
            self._check(i, "string", value.ndim)
        if not has_type(value, declared.dtype):
            raise self._broken(port.name, declared.dtype, told(value))
        chunks = values.encode(value, declared.dtype)
        target, number = self._places.blob(port.edge, slot, values.size(chunks), port.name)
        begun = monotonic_ns() if self._trace.on else 0
        at = 0
        for chunk in chunks:
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
        self._count(at, port.name, begun)
        if port.inside and not isinstance(value, np.ndarray):
            # What it holds may lie in the unit's inputs, whose buffers others may write when this unit has run.
            value = values.decode(target)
        return number, value

    def _passed(self, i: int, slot: int, value: Any) -> tuple[int, Any] | None:
        """A value that reaches the next unit as it is; None for one that needs a place."""
        port = self.outputs[i]
        if self._traits.strided and isinstance(value, np.ndarray) and not is_string(value.dtype):
            # What lies in this worker's segment may be written again by the unit after the next.
            if port.published or self._places.segment.holds(value):
                return None
            self._check_array(i, value)
            value = value.view()
            value.flags.writeable = False
        elif self._traits.exports and is_foreign(value) and is_tensor(self.unit.outputs[i].dtype):
            dtype, shape = self._form(i, value)
            number = self._export(i, slot, value, dtype, shape) if port.published else 0
            self.loose.append(i)
            return number, value
        else:
            return None
        self.loose.append(i)
        return 0, value

    def _export(self, i: int, slot: int, value: Any, dtype: str, shape: tuple[int, ...]) -> int:
        """Have a value of the provider's own written to its place, and leave it for its own partitions."""
        port = self.outputs[i]
        array, _, number = self._place(i, slot, dtype, shape, pooled=True)
        self._instance.export(value, array)
        self._counters.exports += 1
        self._counters.exported_bytes += array.nbytes
        self._resident.keep(port.edge, slot, value)
        return number

    def _count(self, nbytes: int, name: str, begun: int) -> None:
        self._counters.copies += 1
        self._counters.copied_bytes += nbytes
        recorder = self._trace.recorder
        if recorder is not None and begun:
            recorder.add("copy", name, begun, monotonic_ns(), {"bytes": nbytes})

    def _check_array(self, i: int, value: np.ndarray) -> str:
        """Its dtype, which is as declared."""
        try:
            dtype = name_as(value.dtype, self.unit.outputs[i].dtype)
        except ValueError as error:
            raise self._broken(
                self.outputs[i].name, f"an array of {self.unit.outputs[i].dtype}", str(value.dtype)
            ) from error
        self._check(i, dtype, value.ndim)
        return dtype

    def _form(self, i: int, value: Any) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of a value of the provider's own, which are as declared."""
        try:
            dtype, shape = form_of(value)
        except TypeError as error:
            raise self._broken(self.outputs[i].name, f"an array of {self.unit.outputs[i].dtype}", str(error)) from error
        self._check(i, dtype, len(shape))
        return dtype, shape

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
