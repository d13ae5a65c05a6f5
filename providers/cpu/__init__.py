"""The cpu provider: ONNX operators as kernels in NumPy and C, bound once per signature and run from one arena.

Kernels (`kernels/`, `sequences.py`) register themselves with the frame. `claims.py` says what is taken, `blocks.py`
resolves names, `fusion/` makes one op of several, `walk.py` binds a block to addresses, `reshape.py` makes a binding
from an earlier one, `lineage.py` chooses. `control.py` runs bodies, `reference.py` is the stop-gap for what has no
kernel, `program.py` is what the worker sees.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import outrider.providers.cpu.kernels  # noqa: F401 (registers the kernels)
import outrider.providers.cpu.sequences  # noqa: F401 (registers the kernels)
from outrider.providers.contract import (
    Claim,
    Context,
    Decline,
    Graph,
    Provider,
    ProviderUnavailableError,
    Trace,
    Unit,
)
from outrider.providers.cpu.arena import Scratch
from outrider.providers.cpu.claims import offers
from outrider.providers.cpu.growth import ACTIONS
from outrider.providers.cpu.native import FAMILIES, Library, NativeError, load
from outrider.providers.cpu.native.blas import single_thread
from outrider.providers.cpu.packing import Packing
from outrider.providers.cpu.program import CpuProgram
from outrider.providers.cpu.team import Team

__all__ = ["CpuProgram", "CpuProvider"]


class CpuProvider(Provider):
    """Serves ONNX on the CPU. `threads` of the context go to the kernels.

    Options: `reshape` (bool, True): programs for new shapes are made from earlier ones where that saves work.
    `compiled` (bool or names of families, joined by '+'; True): which compiled kernels are used. Without a library, and
    if it is False, everything runs in NumPy; `stats()` says so.
    """

    merge = True

    def __init__(self) -> None:
        self._threads = 1
        self._reshape = True
        self._trace = Trace()
        self._cancelled: Callable[[], bool] = lambda: False
        self._programs: list[CpuProgram] = []
        self._scratch: Scratch | None = None
        self._library: Library | None = None
        self._packing = Packing()
        self._team: Team | None = None
        self._ready = False  # the kernels are chosen
        self._families: tuple[str, ...] = ()
        self._without = "no model has been loaded"  # why there is no library
        self._warn: Callable[..., None] = lambda *args: None

    def setup(self, context: Context) -> None:
        """Raises ProviderUnavailableError for an unknown option or value of one, and for a NumPy that is too old."""
        if int(np.__version__.partition(".")[0]) < 2:
            reason = f"it needs NumPy 2 or newer, and this is {np.__version__} of {sys.prefix}; upgrade it there"
            raise ProviderUnavailableError(f"the cpu provider cannot run: {reason}", provider="cpu", reason=reason)
        unknown = sorted(set(context.options) - {"compiled", "reshape"})
        if unknown:
            names = ", ".join(unknown)
            raise ProviderUnavailableError(
                f"the cpu provider has no option {names}; remove it, or write 'compiled' or 'reshape'",
                provider="cpu", reason=f"unknown option {names}",
            )  # fmt: skip
        families = _families(context.options.get("compiled", True))
        reshape = context.options.get("reshape", True)
        if not isinstance(reshape, bool):
            raise ProviderUnavailableError(
                f"the cpu provider's option reshape is {reshape!r}; write True or False",
                provider="cpu", reason=f"reshape={reshape!r} is not a bool",
            )  # fmt: skip
        self._reshape = reshape
        self._threads, self._trace, self._cancelled = context.threads, context.trace, context.cancelled
        self._families, self._warn = families, context.logger.warning
        if not families:
            self._without = "the option compiled says so"

    def _load_library(self) -> None:
        """With the first model, which may take minutes to load: the kernels may have to be compiled."""
        if self._ready:
            return
        self._ready = True
        try:
            if self._families:
                self._library = load(self._families, self._threads)
        except NativeError as reason:
            self._without = str(reason)
            self._warn("the cpu provider runs in NumPy only: %s", self._without)
        # Two pools that share out work would disturb each other: BLAS has one thread where there is another pool.
        if (self._library is not None or self._threads > 1) and single_thread() and self._library is None:
            self._team = Team(self._threads)

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """One claim per node that is served, reasons for the others."""
        return offers(graph)

    def compile(self, unit: Unit) -> CpuProgram:
        """Raises ClaimBrokenError when a node of the unit is not served after all."""
        if self._scratch is None:
            self._scratch = Scratch()
        self._load_library()
        program = CpuProgram(
            unit, self._scratch, self._threads, self._trace, self._reshape, self._cancelled, self._library,
            self._packing, self._team,
        )  # fmt: skip
        self._programs.append(program)
        return program

    def unload(self, compiled: Callable[[Sequence[Any]], Sequence[Any]] | Any) -> None:
        """Forget a program; scratch memory that only it needed goes back to the system."""
        self._programs = [program for program in self._programs if program is not compiled]
        if isinstance(compiled, CpuProgram):
            compiled.unload()
        if self._scratch is not None:
            self._scratch.trim(max((program.high for program in self._programs), default=0))

    def stats(self) -> Mapping[str, Any]:
        """Of the loaded units: stop-gap nodes and their operators, bindings made, nodes bound in each run, bytes.

        `fused`: how many ops each pattern of `fusion/` made. `reshaped`: bindings by how they were made (`growth.py`).
        `compiled`: the families of compiled kernels in use, what they were compiled for and where they are `from`
        (wheel or cache), or why there are none. `steps`: bound steps of the latest bindings, by compiled kernel, or
        `numpy`. `memory`: `usage.Memory` of each unit, as a dict.
        """
        operators: Counter[str] = Counter()
        fused: Counter[str] = Counter()
        steps: Counter[str] = Counter()
        reshaped = Counter(dict.fromkeys(ACTIONS, 0))
        for program in self._programs:
            served = {op.origin.name: op.origin.label for op in program.code.ops if op.reference}
            operators.update(served.values())
            fused.update(program.fused)
            reshaped.update(program.reshaped)
            steps.update(program.kernels)
        return {
            "reference_nodes": sum(operators.values()),
            "reference_ops": dict(sorted(operators.items())),
            "programs_bound": sum(program.bound for program in self._programs),
            "fused": dict(sorted(fused.items())),
            "reshaped": dict(reshaped),
            "unbound_nodes": sum(program.unbound_nodes for program in self._programs),
            "arena_bytes": 0 if self._scratch is None else self._scratch.mark,
            "compiled": self._compiled(),
            "steps": dict(sorted(steps.items())),
            "memory": [program.memory._asdict() for program in self._programs],
        }

    def _compiled(self) -> Mapping[str, Any]:
        library = self._library
        if library is None:
            return {"families": [], "reason": self._without}
        return {
            "families": sorted(library.families),
            "target": library.target,
            "from": library.origin,
            "threads": library.threads,
        }

    def close(self) -> None:
        """Give all memory back."""
        self._programs.clear()
        if self._scratch is not None:
            self._scratch.trim(0)
        if self._library is not None:
            self._library.stop()
        if self._team is not None:
            self._team.stop()


def _families(option: Any) -> tuple[str, ...]:
    """Raises ProviderUnavailableError for what `compiled` does not take."""
    if isinstance(option, bool):
        return FAMILIES if option else ()
    names = tuple(option.split("+")) if isinstance(option, str) else ()
    if not names or not set(names) <= set(FAMILIES):
        raise ProviderUnavailableError(
            f"the cpu provider's option compiled is {option!r}; write True, False or families out of "
            f"{', '.join(FAMILIES)}, joined by '+'",
            provider="cpu", reason=f"compiled={option!r}",
        )  # fmt: skip
    return names
