"""Makes every compiled unit look like a `Program`: plain callables, and providers compiled per signature."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import ClaimBrokenError, Place, Program, Provider, Run, Unit
from outrider.providers.wire.dtypes import onnx_name
from outrider.providers.wire.failures import error_to_plain, first_names
from outrider.shm.errors import OutriderError

SIGNATURES = 32  # compiled signatures kept per unit of a `per_signature` provider


class Plain(Program):
    """A callable that takes any shape: nothing to bind, outputs are returned as values."""

    def __init__(self, call: Run) -> None:
        self.call = call

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        call = self.call
        return lambda values: call(list(values))


class _Compiled:
    """One compiled signature. Unloaded when neither the cache nor a bound callable holds it any more."""

    def __init__(self, provider: Provider, unit: Unit) -> None:
        try:
            compiled = provider.compile(unit)
            self.program = as_program(compiled)
        except (OutriderError, MemoryError):
            raise
        except (Exception, SystemExit) as error:  # a provider may raise anything
            raise _broken(unit, error) from error
        weakref.finalize(self, provider.unload, compiled).atexit = False

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        run = self.program.bind(inputs, place)

        def call(values: Sequence[Any], keep: _Compiled = self) -> Sequence[Any]:
            return run(values)

        return call


def _broken(unit: Unit, error: BaseException) -> ClaimBrokenError:
    told = error_to_plain(error)
    reason = f"{told['type']}: {told['message']}"
    nodes = [node.name for node in unit.nodes]
    arriving = ", ".join(f"{value.name}: {value.dtype}{list(value.shape or ())}" for value in unit.inputs)
    return ClaimBrokenError(
        f"{first_names(nodes)} was claimed and cannot be compiled for {arriving or 'no inputs'}: {reason}",
        nodes=nodes,
        reason=reason,
        remote_traceback=told["traceback"],
    )


class PerSignature(Program):
    """Compiles the unit again for each signature of input dtypes and shapes; drops the least recently used ones."""

    def __init__(self, provider: Provider, unit: Unit) -> None:
        self.provider = provider
        self.unit = unit
        self._cache: dict[tuple[Any, ...], _Compiled] = {}

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        signature = tuple((x.dtype, x.shape) if isinstance(x, np.ndarray) else type(x) for x in inputs)
        compiled = self._cache.pop(signature, None)
        if compiled is None:
            values = tuple(
                dataclasses.replace(value, dtype=onnx_name(x.dtype), shape=x.shape)
                if isinstance(x, np.ndarray)
                else value
                for value, x in zip(self.unit.inputs, inputs, strict=True)
            )
            compiled = _Compiled(self.provider, dataclasses.replace(self.unit, inputs=values))
            if len(self._cache) >= SIGNATURES:
                self._cache.pop(next(iter(self._cache)))
        self._cache[signature] = compiled
        return compiled.bind(inputs, place)

    def unload(self) -> None:
        self._cache.clear()


def as_program(compiled: Run | Program) -> Program:
    """The Program itself, or a callable wrapped as one. Raises TypeError for anything else."""
    if isinstance(compiled, Program):
        return compiled
    if not callable(compiled):
        raise TypeError(f"compile() must return a callable or a Program, not {type(compiled).__name__}")
    return Plain(compiled)


def compile_unit(provider: Provider, unit: Unit) -> tuple[Program, Callable[[], None]]:
    """The unit as a Program, and what unloads it. Exceptions of the provider pass through."""
    if provider.per_signature:
        program = PerSignature(provider, unit)
        return program, program.unload
    compiled = provider.compile(unit)
    return as_program(compiled), lambda: provider.unload(compiled)
