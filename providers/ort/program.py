"""A unit as one onnxruntime session, or as several in a row, bound to the places of its inputs and outputs.

Inputs are bound by their addresses, and outputs whose shape is known to where their readers look for them; a run then
only calls the sessions. A shape is known where the inputs are as declared and inference's shape of the output follows
from theirs. Other outputs are bound anew in each run, since onnxruntime would write into what it returned before, and
are copied once by the worker. What has no address (strings, sequences, maps, none) goes by value instead.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from outrider.providers.contract import ClaimBrokenError, Place, Program, Run, Unit, Value
from outrider.providers.ort.library import said
from outrider.providers.ort.sessions import Built, value_of
from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, PACKED, is_tensor, numpy_dtype
from outrider.providers.wire.failures import fail, first_names
from outrider.shm.errors import OutriderError

_NODE = re.compile(r"Name:'(.*?)' Status Message", re.DOTALL)
_NO_MEMORY = ("Failed to allocate memory", "bad allocation", "bad_alloc")


@dataclass
class Counters:
    """What the programs of a provider did."""

    bound: int = 0
    returned: int = 0  # outputs that went by value, to be copied


@dataclass
class _Step:
    """One session of a bound run. `late`: inputs that another session makes; `fresh`: outputs of unknown shape."""

    session: Any
    binding: Any
    late: list[str] = field(default_factory=list)
    fresh: list[tuple[int, str, str]] = field(default_factory=list)  # (position, name in the session, value)


class OrtProgram(Program):
    """`pieces`: sessions in the order in which they run. `fragile`: a first run that fails takes the claim back."""

    def __init__(self, ort: Any, unit: Unit, pieces: Sequence[Built], fragile: bool, counters: Counters) -> None:
        self.pieces: list[Built] = list(pieces)
        self._ort = ort
        self._unit = unit
        self._fragile = fragile
        self._counters = counters
        self._values = {value.name: value for node in unit.nodes for value in node.outputs}
        self._values.update((value.name, value) for value in (*unit.inputs, *unit.outputs))
        told = [one for piece in pieces for one in zip(piece.makes, piece.session.get_outputs(), strict=True)]
        self._types = {name: str(one.type) for name, one in told}
        # An empty shape is a scalar's, or not known.
        self._inferred = {name: tuple(one.shape) for name, one in told if one.shape and all(map(_is_extent, one.shape))}

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        """See `Program.bind`. The callable raises KernelError with the node that onnxruntime names."""
        self._counters.bound += 1
        addressed = all(
            isinstance(item, np.ndarray) and has_address(value.dtype)
            for value, item in zip(self._unit.inputs, inputs, strict=True)
        )
        by_address = addressed and all(_is_plain(told) for told in self._types.values())
        return self._told(self._bound(inputs, place) if by_address else self._by_value)

    # By address ----------------------------------------------------------------------------------------------------
    def _bound(self, inputs: Sequence[np.ndarray], place: Place) -> Run:
        arrays = {value.name: item for value, item in zip(self._unit.inputs, inputs, strict=True)}
        symbols = symbols_of(self._unit.inputs, inputs)
        outputs = [value.name for value in self._unit.outputs]
        for i, value in enumerate(self._unit.outputs):
            if (shape := self._shape(value, symbols)) is not None:
                arrays[value.name] = place(i, value.dtype, shape)
        placed = frozenset(arrays)
        between = [self._values[name] for name in self._types if name not in outputs and name in self._values]
        for value in between:
            if (shape := self._shape(value, symbols)) is not None:
                arrays[value.name] = np.empty(shape, numpy_dtype(value.dtype))
        steps = [self._step(piece, arrays) for piece in self.pieces]
        results: list[Any] = [None] * len(outputs)
        if len(steps) == 1 and not steps[0].fresh:
            session, binding = steps[0].session, steps[0].binding

            def straight(_: Sequence[Any]) -> Sequence[Any]:
                session.run_with_iobinding(binding)
                return results

            return straight
        returned = [(i, name) for i, name in enumerate(outputs) if name not in placed]
        counters = self._counters

        def run(given: Sequence[Any], keep: Mapping[str, np.ndarray] = arrays) -> Sequence[Any]:
            made: dict[str, Any] = {}
            for step in steps:
                for name in step.late:
                    step.binding.bind_ortvalue_input(name, made[name])
                for _, name, _ in step.fresh:
                    step.binding.bind_output(name)
                step.session.run_with_iobinding(step.binding)
                if step.fresh:
                    got = step.binding.get_outputs()
                    made.update((value, got[position]) for position, _, value in step.fresh)
            counters.returned += len(returned)
            answer: list[Any] = [None] * len(outputs)
            for at, name in returned:
                answer[at] = array_of(made[name])
            return answer

        return run

    def _shape(self, value: Value, symbols: Mapping[str, int] | None) -> tuple[int, ...] | None:
        """What inference tells of an output or inner value for these inputs: Outrider's, else onnxruntime's."""
        if symbols is None or value.name not in self._types or not has_address(value.dtype):
            return None
        shape = known_shape(value, symbols)
        return self._inferred.get(value.name) if shape is None else shape

    def _step(self, piece: Built, arrays: Mapping[str, np.ndarray]) -> _Step:
        step = _Step(piece.session, piece.session.io_binding())
        for name in piece.inputs:
            if name in arrays:
                step.binding.bind_input(name, "cpu", 0, *self._address(name, arrays[name]))
            else:
                step.late.append(name)
        for position, (name, value) in enumerate(zip(piece.outputs, piece.makes, strict=True)):
            if value in arrays:
                step.binding.bind_output(name, "cpu", 0, *self._address(value, arrays[value]))
            else:
                step.binding.bind_output(name)  # in this order `get_outputs` returns them
                step.fresh.append((position, name, value))
        return step

    def _address(self, name: str, array: np.ndarray) -> tuple[int, list[int], int]:
        """Element type by ONNX's number, shape, address."""
        return NUMBER[self._values[name].dtype], list(array.shape), array.__array_interface__["data"][0]

    # By value ------------------------------------------------------------------------------------------------------
    def _by_value(self, inputs: Sequence[Any]) -> Sequence[Any]:
        values = {value.name: item for value, item in zip(self._unit.inputs, inputs, strict=True)}
        for piece in self.pieces:
            feed = {name: self._fed(name, values[name]) for name in piece.inputs}
            values.update(zip(piece.makes, piece.session.run(list(piece.outputs), feed), strict=True))
        self._counters.returned += len(self._unit.outputs)
        return [values[value.name] for value in self._unit.outputs]

    def _fed(self, name: str, item: Any) -> Any:
        """What `InferenceSession.run` understands: an OrtValue where numpy has no such type."""
        declared = self._values[name].dtype
        if isinstance(item, np.ndarray) and item.dtype != object and has_address(declared):
            return value_of(self._ort, np.ascontiguousarray(item), NUMBER[declared])
        return item

    # Failures ------------------------------------------------------------------------------------------------------
    def _told(self, run: Run) -> Run:
        """The callable with failures that say which node it was."""
        proven = not self._fragile

        def call(inputs: Sequence[Any]) -> Sequence[Any]:
            nonlocal proven
            try:
                results = run(inputs)
            except (OutriderError, MemoryError):
                raise
            except Exception as error:  # onnxruntime's kinds have no common class
                self._raise(error, inputs, proven)
            proven = True
            return results

        return call

    def _raise(self, error: Exception, inputs: Sequence[Any], proven: bool) -> NoReturn:
        text = str(error)
        if any(sign in text for sign in _NO_MEMORY):
            raise MemoryError(said(error)) from error
        found = _NODE.search(text)
        named = [node for node in self._unit.nodes if found and node.name == found[1]]
        if not proven:
            nodes = [node.name for node in named or self._unit.nodes]
            reason = f"onnxruntime took it and cannot run it: {said(error)}"
            raise ClaimBrokenError(f"{first_names(nodes)}: {reason}", nodes=nodes, reason=reason) from error
        if named:
            fail(named, named[0].inputs, [], error)
        fail(self._unit.nodes, self._unit.inputs, inputs, error)

    def unload(self) -> None:
        """Let the sessions go; bindings that are still held keep theirs."""
        self.pieces.clear()


# Values --------------------------------------------------------------------------------------------------------------
def has_address(dtype: str) -> bool:
    """True for tensors that onnxruntime has in the same form as Outrider; 2- and 4-bit types it packs."""
    return is_tensor(dtype) and dtype != "string" and dtype not in PACKED


def _is_plain(told: str) -> bool:
    """The same of onnxruntime's name of a type, 'tensor(float)'."""
    return told.startswith("tensor(") and told != "tensor(string)" and not told.endswith(("int4)", "int2)", "e2m1)"))


def symbols_of(values: Iterable[Value], items: Iterable[Any]) -> dict[str, int] | None:
    """Symbol -> extent of the inputs of a run; None when they are not as declared, and nothing follows from that."""
    symbols: dict[str, int] = {}
    for value, item in zip(values, items, strict=True):
        if value.shape is None:
            continue
        if len(value.shape) != item.ndim:
            return None
        for dim, extent in zip(value.shape, item.shape, strict=True):
            if (isinstance(dim, int) and dim != extent) or (
                isinstance(dim, str) and symbols.setdefault(dim, extent) != extent
            ):
                return None
    return symbols


def known_shape(value: Value, symbols: Mapping[str, int]) -> tuple[int, ...] | None:
    """The declared shape of a value in a run with these symbols; None where it is not known."""
    if value.shape is None:
        return None
    shape: list[int] = []
    for dim in value.shape:
        extent = symbols.get(dim) if isinstance(dim, str) else dim
        if extent is None:
            return None
        shape.append(extent)
    return tuple(shape)


def _is_extent(dim: Any) -> bool:
    return isinstance(dim, int) and dim >= 0


def array_of(value: Any) -> np.ndarray:
    """The array of an OrtValue, over its memory, which the array keeps alive."""
    number = int(value.element_type())
    dtype = numpy_dtype(BY_NUMBER[number])
    if dtype.isbuiltin == 1 and BY_NUMBER[number] == dtype.name:
        array: np.ndarray = value.numpy()
        return array
    shape = tuple(value.shape())
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(value.data_ptr())
    memory.keep = value
    return np.frombuffer(memory, dtype).reshape(shape)
