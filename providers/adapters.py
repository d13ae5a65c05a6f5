"""Makes every compiled unit look like a `Program`: callables, those that write to `out`, compilation per signature."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import ClaimBrokenError, Place, Program, Provider, Run, RunInto, Unit
from outrider.providers.resident import form_of, is_foreign, signature_of
from outrider.providers.rewriting import rewritten
from outrider.providers.states import States, digest_of
from outrider.providers.traits import Traits
from outrider.providers.wire.dtypes import is_tensor, name_as
from outrider.providers.wire.failures import error_to_plain, first_names, text_of
from outrider.providers.wire.shapes import concrete, symbols_of
from outrider.shm.errors import OutriderError

log = logging.getLogger("outrider.worker")

SIGNATURES = 32  # compiled signatures kept per unit of a `per_signature` provider


class NotInPlaceError(Exception):
    """A callable that should have written outputs to their places returned values instead: bind again, and call again.

    The places are not asked for a second time.
    """


class Plain(Program):
    """A callable that takes any shape: nothing to bind, outputs are returned as values."""

    def __init__(self, call: Run) -> None:
        self.call = call

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        call = self.call
        return lambda values: call(list(values))


class Writing(Program):
    """The callable of a provider with `writes_out`: it gets a place for each output whose shape is known.

    Bound calls raise NotInPlaceError.
    """

    def __init__(self, call: RunInto, unit: Unit) -> None:
        self.call = call
        self.unit = unit
        self._returned: set[int] = set()  # outputs that came as values although they had a place

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        call, count = self.call, len(self.unit.outputs)
        symbols = _symbols(self.unit, inputs)
        out: list[np.ndarray | None] = [None] * count
        for i, value in enumerate(self.unit.outputs):
            shape = concrete(value.shape, symbols)
            if shape is not None and is_tensor(value.dtype) and value.dtype != "string" and i not in self._returned:
                out[i] = place(i, value.dtype, shape)
        placed = [i for i in range(count) if out[i] is not None]

        def run(values: Sequence[Any]) -> Sequence[Any]:
            returned = call(list(values), list(out))
            if returned is None and len(placed) == count:
                return written
            if isinstance(returned, (list, tuple)) and len(returned) == count:
                late = [i for i in placed if returned[i] is not None and returned[i] is not out[i]]
            else:
                late = placed  # whoever gets it without a place will say what is wrong
            if late:
                self._returned.update(late)
                raise NotInPlaceError
            return returned  # type: ignore[return-value]  # None is complained of by whoever stores the outputs

        written: list[None] = [None] * count
        return run


def _extents(item: Any) -> tuple[int, ...] | None:
    """The shape of an array, the provider's own included; None for what has none."""
    if isinstance(item, np.ndarray):
        return tuple(item.shape)
    return form_of(item)[1] if is_foreign(item) else None


def _symbols(unit: Unit, inputs: Sequence[Any]) -> dict[str, int | None]:
    return symbols_of([value.shape for value in unit.inputs], map(_extents, inputs))


class _Compiled:
    """One compiled signature. Unloaded when neither the cache nor a bound callable holds it any more."""

    def __init__(self, compiler: Compiler, unit: Unit, whole: bytes) -> None:
        try:
            compiled, self.program = compiler.compiled(unit, whole)
        except (OutriderError, MemoryError):
            raise
        except (Exception, SystemExit) as error:  # a provider may raise anything
            raise _broken(unit, error) from error
        weakref.finalize(self, compiler.provider.unload, compiled).atexit = False

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        run = self.program.bind(inputs, place)

        def call(values: Sequence[Any], keep: _Compiled = self) -> Sequence[Any]:
            return run(values)

        return call


def _broken(unit: Unit, error: BaseException) -> ClaimBrokenError:
    told = error_to_plain(error)
    reason = f"{told['type']}: {told['message']}"
    nodes = names_of(unit)
    arriving = ", ".join(f"{value.name}: {value.dtype}{list(value.shape or ())}" for value in unit.inputs)
    return ClaimBrokenError(
        f"{first_names(nodes)} was claimed and cannot be compiled for {arriving or 'no inputs'}: {reason}",
        nodes=nodes,
        reason=reason,
        remote_traceback=told["traceback"],
    )


class PerSignature(Program):
    """Compiles the unit again for each signature of input dtypes and shapes; drops the least recently used ones."""

    def __init__(self, compiler: Compiler, unit: Unit) -> None:
        self.compiler = compiler
        self.unit = unit
        self._whole = compiler.digest(unit)
        self._cache: dict[tuple[Any, ...], _Compiled] = {}

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        signature = tuple([signature_of(item) for item in inputs])
        compiled = self._cache.pop(signature, None)
        if compiled is None:
            compiled = _Compiled(self.compiler, for_signature(self.unit, inputs), self._whole)
            if len(self._cache) >= SIGNATURES:
                self._cache.pop(next(iter(self._cache)))
        self._cache[signature] = compiled
        return compiled.bind(inputs, place)

    def unload(self) -> None:
        self._cache.clear()


def for_signature(unit: Unit, inputs: Sequence[Any]) -> Unit:
    """The unit with dtypes and shapes of what arrived, and the shapes of outputs as far as they follow from those."""
    symbols = _symbols(unit, inputs)
    arriving = []
    for value, item in zip(unit.inputs, inputs, strict=True):
        if isinstance(item, np.ndarray):
            value = dataclasses.replace(value, dtype=name_as(item.dtype, value.dtype), shape=item.shape)
        elif is_foreign(item):
            dtype, shape = form_of(item)
            value = dataclasses.replace(value, dtype=dtype, shape=shape)
        arriving.append(value)
    leaving = [
        dataclasses.replace(value, shape=concrete(value.shape, symbols) or value.shape) for value in unit.outputs
    ]
    return dataclasses.replace(unit, inputs=tuple(arriving), outputs=tuple(leaving))


def as_program(compiled: Run | RunInto | Program, writes_out: bool, unit: Unit) -> Program:
    """The Program itself, or a callable of a provider that `writes_out` or not, wrapped as one. Raises TypeError for
    anything else.
    """
    if isinstance(compiled, Program):
        return compiled
    if not callable(compiled):
        raise TypeError(f"compile() must return a callable or a Program, not {type(compiled).__name__}")
    if not unit.outputs:  # nobody reads what it makes: callables need not cope with that
        return Plain(lambda inputs: [])
    return Writing(compiled, unit) if writes_out else Plain(compiled)  # type: ignore[arg-type]


class Compiler:
    """From units to programs, by way of the provider's `rewrite`, `load`, `compile` and `save`.

    `states`: where it keeps what it saves. `counts`: what was done so far, by name.
    """

    def __init__(self, provider: Provider, traits: Traits, states: States | None) -> None:
        self.provider = provider
        self.traits = traits
        self.counts: Counter[str] = Counter()
        self._states = states

    def program(self, unit: Unit) -> tuple[Program, Callable[[], None]]:
        """The unit as a Program, and what unloads it. Exceptions of the provider pass through."""
        if self.traits.rewrites and unit.optimization != "none":
            before, unit = unit, rewritten(self.provider, unit)
            self.counts.update(nodes_before=len(before.nodes), nodes_rewritten=len(unit.nodes))
        if self.traits.per_signature:
            program = PerSignature(self, unit)
            return program, program.unload
        compiled, made = self.compiled(unit, self.digest(unit))
        return made, lambda: self.provider.unload(compiled)

    def digest(self, unit: Unit) -> bytes:
        """What its states are told apart by; nothing where none are kept."""
        return b"" if self._states is None else digest_of(unit)

    def compiled(self, unit: Unit, whole: bytes) -> tuple[Run | RunInto | Program, Program]:
        """What the provider makes of a unit, and that as a Program. `whole`: the digest of all signatures."""
        writes_out, states = self.traits.writes_out, self._states
        if states is None:
            compiled = self.provider.compile(unit)
            return compiled, as_program(compiled, writes_out, unit)
        key = states.key(whole, unit)
        found = self._loaded(states, key, unit)
        if found is not None:
            return found
        compiled = self.provider.compile(unit)
        program = as_program(compiled, writes_out, unit)
        self._save(states, key, unit, compiled)
        return compiled, program

    def _loaded(self, states: States, key: str, unit: Unit) -> tuple[Run | RunInto | Program, Program] | None:
        try:
            with states.reading(key) as state:
                if state is None:
                    return None
                compiled = self.provider.load(unit, state)
                program = as_program(compiled, self.traits.writes_out, unit)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # a provider may raise anything
            told = f"{type(error).__name__}: {text_of(error)}"
            log.warning("the state of %s does not load and is dropped: %s", first_names(names_of(unit)), told)
            self.counts["states_dropped"] += 1
            return None
        self.counts["states_loaded"] += 1
        return compiled, program

    def _save(self, states: States, key: str, unit: Unit, compiled: Run | RunInto | Program) -> None:
        try:
            state = self.provider.save(compiled)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # a provider may raise anything
            told = f"{type(error).__name__}: {text_of(error)}"
            log.warning("the state of %s is not kept, save() raised %s", first_names(names_of(unit)), told)
            return
        if state is None:
            return
        if not isinstance(state, (bytes, bytearray, memoryview)):
            raise TypeError(f"save() must return bytes or None, not {type(state).__name__}")
        self.counts["states_saved"] += states.write(key, bytes(state))


def names_of(unit: Unit) -> list[str]:
    """Of its nodes."""
    return [node.name for node in unit.nodes]
