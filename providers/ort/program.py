"""A unit as one onnxruntime session, or as several in a row, bound to the places of its inputs and outputs.

Inputs are bound by their addresses, and outputs whose shape is known to where their readers look for them; a run then
only calls the sessions. onnxruntime wants the exact shape of what it is to write into, and declared shapes lie in real
models. So the first run on inputs of some shapes takes place while it is bound, with outputs that onnxruntime makes;
those that come out as expected have places from then on. The others are bound anew in each run, since onnxruntime would
write into what it returned before, and are copied once by the worker. What has no address (strings, sequences, maps,
none) goes by value instead.
"""

from __future__ import annotations

import ctypes
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from outrider.providers.contract import ClaimBrokenError, Node, Place, Program, Run, Unit
from outrider.providers.ort.library import said
from outrider.providers.ort.pieces import Attempt
from outrider.providers.ort.sessions import Built, value_of
from outrider.providers.ort.trial import Build, failing
from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, PACKED, is_tensor, numpy_dtype
from outrider.providers.wire.failures import fail, first_names
from outrider.providers.wire.packing import extended, pack, unpack
from outrider.providers.wire.shapes import concrete, fits, symbols_of
from outrider.shm.errors import OutriderError

_NODE = re.compile(r"Name:'(.*?)' Status Message", re.DOTALL)
_Result = TypeVar("_Result")
SIGNATURES = 1024  # of inputs, whose shapes of outputs are kept
_NO_MEMORY = ("Failed to allocate memory", "bad allocation", "bad_alloc")


@dataclass
class Counters:
    """What the programs of a provider did."""

    bound: int = 0
    returned: int = 0  # outputs that went by value, to be copied


@dataclass(eq=False)
class _Step:
    """One session of a bound run. `late`: inputs that another session makes; `fresh`: outputs of unknown shape."""

    session: Any
    binding: Any
    late: list[str] = field(default_factory=list)
    fresh: list[tuple[int, str, str]] = field(default_factory=list)  # (position, name in the session, value)


class OrtProgram(Program):
    """`pieces`: sessions in the order in which they run. `fragile`: a first run that fails takes the claim back.

    `again`: compiles the unit with other inputs. `attempt` and `rescue`: see `trial.py`.
    """

    def __init__(
        self,
        ort: Any,
        unit: Unit,
        pieces: Sequence[Built],
        fragile: bool,
        counters: Counters,
        again: Callable[[Unit], OrtProgram],
        attempt: Attempt,
        rescue: Build,
    ) -> None:
        self.pieces: list[Built] = list(pieces)
        self._ort = ort
        self._unit = unit
        self._fragile = fragile
        self._counters = counters
        self._again = again
        self._attempt = attempt
        self._rescue = rescue
        self._loose: OrtProgram | None = None
        self._steps: weakref.WeakSet[_Step] = weakref.WeakSet()
        self._outputs = [value.name for value in unit.outputs]
        self._values = {value.name: value for node in unit.nodes for value in node.outputs}
        self._values.update((value.name, value) for value in (*unit.inputs, *unit.outputs))
        told = [one for piece in pieces for one in zip(piece.makes, piece.session.get_outputs(), strict=True)]
        self._types = {name: str(one.type) for name, one in told}
        # An empty shape is a scalar's, or not known.
        self._inferred = {name: tuple(one.shape) for name, one in told if one.shape and all(map(_is_extent, one.shape))}
        self._shapes: dict[tuple[tuple[int, ...], ...], dict[str, tuple[int, ...]]] = {}  # by those of the inputs

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        """See `Program.bind`. The first call of what is returned must be for the present contents of the inputs.

        Both raise KernelError with the node that onnxruntime names, or ClaimBrokenError.
        """
        self._counters.bound += 1
        declared = [value.shape for value in self._unit.inputs]
        came = [item.shape if isinstance(item, np.ndarray) else None for item in inputs]
        symbols = symbols_of(declared, came)
        if not all(fits(shape, extents, symbols) for shape, extents in zip(declared, came, strict=True)):
            return self._unshaped().bind(inputs, place)
        addressed = all(
            isinstance(item, np.ndarray) and is_tensor(value.dtype) and value.dtype != "string"
            for value, item in zip(self._unit.inputs, inputs, strict=True)
        )
        proven = not self._fragile or tuple(came) in self._shapes
        if not (addressed and all(map(_is_plain, self._types.values()))):
            return self._told(self._by_value, proven)
        return self._told(self._told(lambda given: self._bound(given, symbols, place), proven)(inputs), True)

    def _unshaped(self) -> OrtProgram:
        """The same unit for inputs of any shape: what its inputs were declared as is not true."""
        if self._loose is None:
            inputs = tuple(replace(value, shape=None) for value in self._unit.inputs)
            self._loose = self._again(replace(self._unit, inputs=inputs))
        return self._loose

    # By address ----------------------------------------------------------------------------------------------------
    def _bound(self, inputs: Sequence[np.ndarray], symbols: Mapping[str, int | None], place: Place) -> Run:
        arrays = {
            value.name: item for value, item in zip(self._unit.inputs, inputs, strict=True) if has_address(value.dtype)
        }
        signature = tuple(item.shape for item in inputs)
        shapes = self._shapes.get(signature)
        first: dict[str, Any] | None = None
        if shapes is None:
            first = _run([self._step(piece, arrays) for piece in self.pieces], self._packed(inputs))
            came = {name: tuple(one.shape()) for name, one in first.items()}
            shapes = {name: shape for name, shape in came.items() if shape == self._shape(name, symbols)}
            if len(self._shapes) >= SIGNATURES:
                self._shapes.pop(next(iter(self._shapes)))
            self._shapes[signature] = shapes
        for i, name in enumerate(self._outputs):
            if name in shapes:
                arrays[name] = place(i, self._values[name].dtype, shapes[name])
        for name in shapes:  # between two sessions
            if name not in arrays:
                arrays[name] = np.empty(shapes[name], numpy_dtype(self._values[name].dtype))
        run = self._repeated([self._step(piece, arrays) for piece in self.pieces], shapes, arrays)
        if first is None:
            return run
        waiting: list[dict[str, Any]] = [first]

        def call(given: Sequence[Any]) -> Sequence[Any]:
            if not waiting:
                return run(given)
            made = waiting.pop()
            for name in self._outputs:
                if name in shapes:
                    np.copyto(arrays[name], array_of(made[name]))
            return self._answer(made, shapes)

        return call

    def _repeated(self, steps: Sequence[_Step], placed: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Run:
        """What runs the sessions, and returns what has no place."""
        if len(steps) == 1 and not (steps[0].fresh or steps[0].late):
            (step,) = steps
            results: list[Any] = [None] * len(self._outputs)

            def straight(_: Sequence[Any]) -> Sequence[Any]:
                step.session.run_with_iobinding(step.binding)
                return results

            return straight

        def run(given: Sequence[Any], keep: Mapping[str, np.ndarray] = arrays) -> Sequence[Any]:
            return self._answer(_run(steps, self._packed(given)), placed)

        return run

    def _packed(self, inputs: Sequence[np.ndarray]) -> dict[str, Any]:
        """OrtValues of the inputs that onnxruntime packs."""
        given = zip(self._unit.inputs, inputs, strict=True)
        return {value.name: packed_value(self._ort, x, value.dtype) for value, x in given if value.dtype in PACKED}

    def _answer(self, made: Mapping[str, Any], placed: Mapping[str, Any]) -> list[Any]:
        """What a bound callable returns: None for outputs that have places."""
        answer = [None if name in placed else array_of(made[name]) for name in self._outputs]
        self._counters.returned += sum(one is not None for one in answer)
        return answer

    def _shape(self, name: str, symbols: Mapping[str, int | None]) -> tuple[int, ...] | None:
        """The shape that inference tells of an output or inner value: Outrider's, else onnxruntime's."""
        value = self._values.get(name)
        if value is None or not has_address(value.dtype):
            return None
        shape = concrete(value.shape, symbols)
        return self._inferred.get(name) if shape is None else shape

    def _step(self, piece: Built, arrays: Mapping[str, np.ndarray]) -> _Step:
        step = _Step(piece.session, piece.session.io_binding())
        self._steps.add(step)
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
        self._counters.returned += len(self._outputs)
        return [values[name] for name in self._outputs]

    def _fed(self, name: str, item: Any) -> Any:
        """What `InferenceSession.run` understands: an OrtValue where numpy has no such type."""
        declared = self._values[name].dtype
        if isinstance(item, np.ndarray) and declared in PACKED:
            return packed_value(self._ort, item, declared)
        if isinstance(item, np.ndarray) and has_address(declared):
            return value_of(self._ort, item, NUMBER[declared])
        return item

    # Failures ------------------------------------------------------------------------------------------------------
    def _told(self, run: Callable[[Sequence[Any]], _Result], proven: bool) -> Callable[[Sequence[Any]], _Result]:
        """The callable with failures that say which node it was.

        `proven`: the execution provider has run these shapes before, so that a failure takes no claim back.
        """

        def call(inputs: Sequence[Any]) -> _Result:
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
            raise self._broken(error, named, inputs) from error
        if named:
            fail(named, named[0].inputs, [], error)
        fail(self._unit.nodes, self._unit.inputs, inputs, error)

    def _broken(self, error: Exception, named: Sequence[Node], inputs: Sequence[Any]) -> ClaimBrokenError:
        """What an execution provider that fails its first run takes back: the nodes that fail, if they can be found."""
        failed = {node.name: said(error) for node in named}
        if not failed and all(map(has_address, (value.dtype for value in self._unit.inputs))):
            failed = failing(self._ort, self._unit, inputs, self._attempt, self._rescue)
        failed = failed or {node.name: said(error) for node in self._unit.nodes}
        reason = f"onnxruntime took it and cannot run it: {'; '.join(dict.fromkeys(failed.values()))}"
        return ClaimBrokenError(f"{first_names(list(failed))}: {reason}", nodes=list(failed), reason=reason)

    def unload(self) -> None:
        """Let the sessions go, also from bindings that wait for the collector. Weights go last: sessions use them."""
        for step in tuple(self._steps):
            step.session = step.binding = None
        self.pieces.clear()
        if self._loose is not None:
            self._loose.unload()


def _run(steps: Sequence[_Step], made: dict[str, Any]) -> dict[str, Any]:
    """Run sessions one after another. `made`: inputs that are not bound; with what comes that has no place."""
    for step in steps:
        for name in step.late:
            step.binding.bind_ortvalue_input(name, made[name])
        for _, name, _ in step.fresh:
            step.binding.bind_output(name)
        step.session.run_with_iobinding(step.binding)
        if step.fresh:
            got = step.binding.get_outputs()
            made.update((value, got[position]) for position, _, value in step.fresh)
    return made


# Values --------------------------------------------------------------------------------------------------------------
def has_address(dtype: str) -> bool:
    """True for tensors that onnxruntime has in the same form as Outrider; 2- and 4-bit types it packs."""
    return is_tensor(dtype) and dtype != "string" and dtype not in PACKED


def _is_plain(told: str) -> bool:
    """True for onnxruntime's names of types, 'tensor(float)', that arrays of numbers have."""
    return told.startswith("tensor(") and told != "tensor(string)"


def _is_extent(dim: Any) -> bool:
    return isinstance(dim, int) and dim >= 0


def array_of(value: Any) -> np.ndarray:
    """The array of an OrtValue, over its memory, which the array keeps alive."""
    number = int(value.element_type())
    dtype = numpy_dtype(BY_NUMBER[number])
    if dtype.isbuiltin == 1 and BY_NUMBER[number] == dtype.name:
        array: np.ndarray = value.numpy()
        return array
    shape, name = tuple(value.shape()), BY_NUMBER[number]
    count = math.prod(shape)
    nbytes = -(-count // PACKED[name]) if name in PACKED else count * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
    memory.keep = value
    if name not in PACKED:
        return np.frombuffer(memory, dtype).reshape(shape)
    return extended(unpack(np.frombuffer(memory, np.uint8), name, count), name).view(dtype).reshape(shape)


def packed_value(ort: Any, array: np.ndarray, dtype: str) -> Any:
    """An OrtValue of a 2- or 4-bit type; `array` has one element per byte."""
    room = np.zeros(array.shape, np.uint8)  # onnxruntime takes its shape, and reads as many bytes as that needs
    data = pack(array, dtype)
    room.reshape(-1)[: data.size] = data
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(room, NUMBER[dtype])
