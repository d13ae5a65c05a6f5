"""Which nodes of a unit an execution provider cannot run, although it took them: found by running parts of it.

Some compile for the shapes that come, in the first run, and fail then for all that they fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import Node, Unit, Value
from outrider.providers.ort.library import said
from outrider.providers.ort.pieces import Attempt, cut
from outrider.providers.ort.sessions import Built, value_of
from outrider.providers.wire.dtypes import NUMBER

Build = Callable[[Sequence[Node], Sequence[Value], Sequence[Value]], Built]


def failing(ort: Any, unit: Unit, inputs: Sequence[np.ndarray], attempt: Attempt, rescue: Build) -> dict[str, str]:
    """The nodes that fail on these inputs, by name, and how.

    `inputs`: tensors of types that have an address. `rescue`: builds a session on onnxruntime's CPU provider, which
    runs the nodes that fail, so that those after them can be tried, too. Where it fails as well, they are only built.
    """
    values = {
        value.name: value_of(ort, item, NUMBER[value.dtype]) for value, item in zip(unit.inputs, inputs, strict=True)
    }
    own = {node.name for node in unit.nodes}

    def run(built: Built) -> None:
        if not all(name in values for name in built.inputs):
            return
        feed = {name: values[name] for name in built.inputs}
        values.update(zip(built.makes, built.session.run_with_ort_values(list(built.outputs), feed), strict=True))

    def tried(nodes: Sequence[Node], reads: Sequence[Value], makes: Sequence[Value]) -> tuple[Built, frozenset[str]]:
        single = sum(node.name in own for node in nodes) == 1
        try:
            built, left = attempt(nodes, reads, makes)
            if not left and makes:
                run(built)
        except MemoryError:
            raise
        except Exception:  # onnxruntime's kinds have no common class
            if single and makes:
                run(rescue(nodes, reads, makes))
            raise
        if left and single and makes:
            run(rescue(nodes, reads, makes))
        return built, left

    return cut(unit, tried, said).refused
