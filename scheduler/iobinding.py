"""`IOBinding`: inputs and outputs of a run by reference, named as in onnxruntime.

What is bound is read and written anew by each `run_with_iobinding`: change a bound array in place and the next run sees
it. An output that is bound without memory is made by the run, each time anew, and got by `get_outputs`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.providers.wire.dtypes import is_tensor, numpy_dtype
from outrider.providers.wire.graph import Value
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.differences import Explained
from outrider.scheduler.errors import DtypeMismatchError, InputNotFoundError, InputTypeError
from outrider.scheduler.feeds import check_feeds, check_shape, unknown_input, unknown_output
from outrider.scheduler.generation import Generation
from outrider.scheduler.inplace import Array, Targets
from outrider.scheduler.ortvalue import OrtValue, array_at, check_device, checked_shape
from outrider.scheduler.pickling import refusing
from outrider.scheduler.steady import Signature
from outrider.shm.user import UserMemory, process_memory

if TYPE_CHECKING:
    from outrider.scheduler.session import InferenceSession


class IOBinding(Explained):
    """What the runs of one session read and write. `session.io_binding()` makes it, too. Not thread-safe."""

    def __init__(self, session: InferenceSession) -> None:
        session._check_open()
        self.session = session
        loaded = session._loaded
        self._inputs = {value.name: value for value in loaded.inputs}
        self._overridable: Collection[str] = loaded.defaults
        self._outputs = {value.name: value for value in loaded.outputs}
        # Never changed, only replaced: a run that was interrupted may still need them.
        self._fed: dict[str, Any] = {}
        self._targets: Targets | None = None
        self._signature: Signature | None = None
        self._bound: dict[str, OrtValue | None] = {}  # in the order of binding; None: made by the run
        self._results: list[OrtValue] = []

    __reduce__ = refusing("IOBinding", "it belongs to its session; make one by io_binding() of the other session")

    # Inputs ---------------------------------------------------------------------------------------------------------
    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Bind an input to an array, or to anything that `run` takes for it. Raises InputNotFoundError.

        Dtype and shape are checked by the run.
        """
        self._feed(name, arr_on_cpu)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to the caller's memory at `buffer_ptr`, which must live as long as it is bound.

        `element_type`: a numpy type or an ONNX number. Raises InputNotFoundError, InvalidOptionError, and
        UnsupportedOptionError for a device but 'cpu'.
        """
        check_device("IOBinding.bind_input", device_type, device_id)
        self._feed(name, array_at(element_type, shape, buffer_ptr))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to an OrtValue. Raises InputNotFoundError, InputTypeError."""
        self._feed(name, _checked("bind_ortvalue_input", name, ortvalue).value)

    def synchronize_inputs(self) -> None:
        """Nothing: inputs are in host memory."""

    def clear_binding_inputs(self) -> None:
        """Let go of all inputs."""
        self._fed, self._signature = {}, None

    # Outputs --------------------------------------------------------------------------------------------------------
    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Have the run return an output, or write it to the caller's memory at `buffer_ptr`.

        Raises OutputNotFoundError, DtypeMismatchError, InvalidOptionError (`buffer_ptr` without type or shape), and
        UnsupportedOptionError for a device but 'cpu'.
        """
        check_device("IOBinding.bind_output", device_type, device_id)
        if buffer_ptr is None:
            self._bind(name, None)
            return
        for what, given in (("element_type", element_type), ("shape", shape)):
            if given is None:
                raise invalid_option(what, None, "a value, as buffer_ptr is given")
        self._bind(name, OrtValue(array_at(element_type, shape, buffer_ptr)))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Have the run write an output into an OrtValue. Raises OutputNotFoundError, InputTypeError,
        DtypeMismatchError.
        """
        self._bind(name, _checked("bind_ortvalue_output", name, ortvalue))

    def synchronize_outputs(self) -> None:
        """Nothing: a run returns when its outputs are there."""

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order in which they were bound first; [] before it."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """What `get_outputs` holds, as arrays (lists, dicts, None) that later runs do not change."""
        bound = [value for value in self._bound.values() if value is not None]
        return [one.value.copy() if one in bound else one.value for one in self._results]

    def clear_binding_outputs(self) -> None:
        """Let go of all outputs, results included."""
        self._bound.clear()
        self._results.clear()
        self._targets = self._signature = None

    # For the session ------------------------------------------------------------------------------------------------
    def _feed(self, name: str, value: Any) -> None:
        if name not in self._inputs:
            raise unknown_input(name, list(self._inputs))
        self._fed = {**self._fed, name: value}

    def _bind(self, name: str, target: OrtValue | None) -> None:
        if name not in self._outputs:
            raise unknown_output(name, list(self._outputs))
        if target is not None:
            declared = self._outputs[name].dtype
            if not isinstance(target.value, np.ndarray) or not is_tensor(declared) or declared == "string":
                why = "only outputs that are tensors of numbers can be bound to memory; bind it without"
                raise InputTypeError(
                    f"output {name!r} ({declared}) cannot be written into {target.data_type()}: {why}.",
                    name=name,
                    expected=declared,
                    got=target.dtype,
                )
            if target.dtype != declared:
                raise DtypeMismatchError(
                    f"output {name!r} has dtype {declared}, it was bound to {target.dtype}.",
                    name=name,
                    expected=declared,
                    got=target.dtype,
                )
            if not target.value.flags.writeable:
                raise InputTypeError(
                    f"output {name!r} was bound to read-only memory.",
                    name=name,
                    expected=declared,
                    got="memory",
                )
        self._bound[name] = target
        self._targets = self._signature = None

    def prepare(self) -> tuple[Mapping[str, Any], Sequence[str], Signature | None, Targets | None]:
        """The feed in its final form, the outputs to make, the signature of the feed if it has one, and the targets.

        Raises the errors of feeds, and InvalidOptionError if no output is bound.
        """
        wanted = list(self._bound)
        if not wanted:
            raise invalid_option("binding", self, "at least one output to be bound (bind_output)")
        feeds: Mapping[str, Any] = self._fed
        if self._signature is None or not self._signature.fits(feeds):
            inputs, outputs = list(self._inputs.values()), list(self._outputs)
            feeds = check_feeds(inputs, self._overridable, feeds, wanted, outputs)
            self._signature = Signature.of(feeds)
        arrays = {name: target.value for name, target in self._bound.items() if target is not None}
        if self._targets is None and arrays:
            self._targets = Targets(arrays)
        return feeds, wanted, self._signature, self._targets

    def finish(self, values: Sequence[Any]) -> None:
        """Take the outputs of a run, one per bound output."""
        self._results = []
        for (name, target), value in zip(self._bound.items(), values, strict=True):
            self._results.append(OrtValue.of(value, self._outputs[name].dtype) if target is None else target)


def empty_for(
    name: str, shape: Sequence[int], inputs: Sequence[Value], outputs: Sequence[Value], generation: Generation | None
) -> Array:
    """See `InferenceSession.empty`: an input lies in the memory of this process, an output where its worker writes."""
    declared = {value.name: value for value in (*outputs, *inputs)}
    if name not in declared:
        message = f"the model has no input or output {name!r}. It has {', '.join(map(str, declared))}."
        raise InputNotFoundError(message, name=name, known=list(declared))
    value, dims = declared[name], checked_shape(shape)
    if not is_tensor(value.dtype) or value.dtype == "string":
        raise invalid_option(
            "name", name, f"a tensor of numbers; {name!r} is {value.dtype}, feed and get that as it is"
        )
    fed = any(value.name == name for value in inputs)
    if fed and value.shape is not None:
        check_shape(name, value.shape, dims, {})
    memory: UserMemory = process_memory()
    if not fed and generation is not None and name in generation.targets:
        board, _ = generation.outputs[name]
        memory = generation.sides[board].arrays
    return memory.empty(numpy_dtype(value.dtype), dims, f"an array for {name!r}")


def _checked(method: str, name: str, value: Any) -> OrtValue:
    if not isinstance(value, OrtValue):
        got = type(value).__name__
        message = f"IOBinding.{method} of {name!r} needs an OrtValue of outrider; got {got}."
        raise InputTypeError(message, name=name, expected="OrtValue", got=got)
    return value
