"""A unit made runnable: what the worker binds once per combination of places and then calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import Place, Program, Run, Trace, Unit
from outrider.providers.cpu.arena import Scratch
from outrider.providers.cpu.binding import Binding
from outrider.providers.cpu.blocks import Code
from outrider.providers.cpu.fusion import fuse
from outrider.providers.cpu.items import FIXED, KNOWN, LATE, LATE_ITEM, Item
from outrider.providers.cpu.lineage import Lineage
from outrider.providers.cpu.native import Library
from outrider.providers.cpu.packing import Packing
from outrider.providers.cpu.team import Team
from outrider.providers.cpu.usage import Memory, program_memory


class CpuProgram(Program):
    """Made from a unit. Level 'all': with its nodes fused; 'none' and 'basic': as written, each by its kernel.

    `fused`: how many ops each pattern made.
    """

    def __init__(
        self,
        unit: Unit,
        scratch: Scratch,
        threads: int,
        trace: Trace | None = None,
        reshape: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
        library: Library | None = None,
        packing: Packing | None = None,
        team: Team | None = None,
    ) -> None:
        nodes = (*unit.constant_nodes, *unit.nodes)
        self.code = Code(
            nodes, unit.inputs, unit.outputs, unit.constants, trace, reshape, cancelled, library, packing, team
        )
        self.fused: Mapping[str, int] = fuse(self.code) if unit.optimization == "all" else {}
        self.bound = 0
        self.unbound_nodes = 0
        self._lineage = Lineage(self.code, self.code.top, scratch, threads)

    @property
    def reference_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that the stop-gap serves, bodies included."""
        return self.code.reference_nodes

    @property
    def high(self) -> int:
        """Bytes of scratch memory that the bindings made so far need."""
        return self.code.high

    @property
    def reshaped(self) -> Counter[str]:
        """How many bindings were made in which way (`growth.py`)."""
        return self._lineage.counts

    @property
    def memory(self) -> Memory:
        """The memory of the latest binding, and of the weights."""
        return program_memory(self.code, self._lineage.last)

    @property
    def kernels(self) -> Counter[str]:
        """How many bound steps of the latest binding each compiled kernel does, and `numpy` the others."""
        last = self._lineage.last
        return Counter() if last is None else last.kernels

    def unload(self) -> None:
        """Let go of what it holds; it is not bound or run any more."""
        self.code.let_go()

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        """See `Program.bind`. Values returned instead of placed are valid until the next run of this worker."""
        block = self.code.top
        items = {number: _item(item) for number, item in zip(block.formals, inputs, strict=True)}
        binding = self._lineage.bind(items, place=place)
        if not self.bound:
            self.code.forget_sources()
        self.bound += 1
        self.unbound_nodes = len({op.origin.name for late in binding.late for op in late.ops})
        if not binding.late and len(binding.placed) == len(block.results):
            return _Straight(binding)
        return _Mixed(binding)


class _Straight:
    """All steps bound, all outputs placed."""

    def __init__(self, binding: Binding) -> None:
        self._run = binding.run
        self._nothing = [None] * len(binding.results)

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self._run({})
        return self._nothing


class _Mixed:
    """Some inputs or outputs are values of the run."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        block = binding.block
        self._late = tuple((i, n) for i, n in enumerate(block.formals) if binding.item(n).state == LATE)

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        binding = self._binding
        env = {number: inputs[i] for i, number in self._late}
        binding.run(env)
        results: list[Any] = []
        for i, (number, item) in enumerate(zip(binding.block.results, binding.results, strict=True)):
            if i in binding.placed:
                results.append(None)
            else:
                results.append(env[number] if item.state == LATE else item.value)
        return results


def _item(given: Any) -> Item:
    """The state of a unit input: an array stays where it is, None stays None, anything else comes with the run."""
    if given is None:
        return Item(KNOWN)
    if isinstance(given, np.ndarray) and not given.dtype.hasobject:
        return Item(FIXED, given)
    return LATE_ITEM
