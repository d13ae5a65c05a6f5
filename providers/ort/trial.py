"""Which nodes of a unit an execution provider cannot run, although it took them: found by running parts of it.

Some compile for the shapes that come, in the first run, and fail then for all that they fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import Node, Unit, Value
from outrider.providers.ort.library import said
from outrider.providers.ort.pieces import Attempt, cut
from outrider.providers.ort.sessions import Built, value_of
from outrider.providers.wire.dtypes import NUMBER


def failing(ort: Any, unit: Unit, inputs: Sequence[np.ndarray], attempt: Attempt) -> dict[str, str]:
    """The nodes that fail on these inputs, by name, and how. What reads what they make is built and not run.

    `inputs`: tensors of types that have an address.
    """
    values = {
        value.name: value_of(ort, item, NUMBER[value.dtype]) for value, item in zip(unit.inputs, inputs, strict=True)
    }

    def tried(nodes: Sequence[Node], reads: Sequence[Value], makes: Sequence[Value]) -> tuple[Built, frozenset[str]]:
        built, left = attempt(nodes, reads, makes)
        if not left and built.makes and all(name in values for name in built.inputs):
            feed = {name: values[name] for name in built.inputs}
            made = built.session.run_with_ort_values(list(built.outputs), feed)
            values.update(zip(built.makes, made, strict=True))
        return built, left

    return cut(unit, tried, said).refused
