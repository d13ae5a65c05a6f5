"""Products whose residual is larger than they are, which nobody could know when it was fused with them.

The sum then has the broadcast shape of both. This is rare and slow: the product goes to scratch memory, is spread, and
gets its epilogue there, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.epilogue import PAD, RESIDUAL, Epilogue, finish_product
from outrider.providers.cpu.kernels.frame import Bind
from outrider.providers.cpu.kernels.precision import finish, target


def with_larger_residual(b: Bind, bind: Callable[[Bind, Any], None], p: Any, shape: Sequence[int], axis: int) -> bool:
    """Bind the node here if its residual has more elements than the product of `shape`. False where it has not.

    `bind` is the kernel, whose `p.epilogue` is what follows the product; `axis`: that of the features. Raises
    ValueError where the two do not broadcast.
    """
    if not p.epilogue.residual or not b.has(RESIDUAL):
        return False
    whole = np.broadcast_shapes(tuple(shape), b.array(RESIDUAL).shape)
    if whole == tuple(shape):
        return False
    alone = _Alone(b)
    bind(alone, replace(p, epilogue=Epilogue()))
    y = b.out(0, whole, b.array(0).dtype)
    total = target(b, y)
    b.step(np.copyto, total, alone.results[0], "unsafe")
    finish_product(b, total, p.epilogue, axis - len(shape))
    finish(b, y, total)
    return True


class _Alone(Bind):
    """The node without what follows the product; its output is scratch memory of the node."""

    def __init__(self, b: Bind) -> None:
        inputs = [item if i < 2 or i == PAD else None for i, item in enumerate(b.inputs)]
        super().__init__(b.node, inputs, b.threads, b.library, b.team)
        self._node = b

    def const(self, i: int) -> np.ndarray:
        return self._node.const(i)

    def is_const(self, i: int) -> bool:
        return self._node.is_const(i)

    def out(self, i: int, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        place = self._node.scratch(shape, dtype, order)
        self.set(i, place)
        return place

    def scratch(self, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        return self._node.scratch(shape, dtype, order)

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        return self._node.packed(key, i, make)

    def step(self, fn: Callable[..., Any], *args: Any) -> None:
        self._node.step(fn, *args)
