"""The null provider: takes every node whose output shapes follow from the signature, and computes nothing.

It publishes the places of its outputs unwritten, through the same data plane as any provider: what a run costs with it
is the cost of the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import (
    Claim,
    Context,
    Decline,
    Graph,
    Node,
    Place,
    Program,
    Provider,
    ProviderContractError,
    ProviderUnavailableError,
    Run,
    Unit,
    Value,
)
from outrider.providers.wire.dtypes import is_tensor
from outrider.providers.wire.shapes import concrete, symbols_of


class NullProvider(Provider):
    """Takes no options."""

    merge = True

    def setup(self, context: Context) -> None:
        """Raises ProviderUnavailableError for an option: there are none."""
        if context.options:
            names = ", ".join(sorted(context.options))
            raise ProviderUnavailableError(
                f"the null provider has no option {names}; remove it", provider="null", reason=f"unknown option {names}"
            )

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """One claim per node with fixed-size outputs of known rank whose symbols all occur among its inputs."""
        return [_offer(node) for node in graph.nodes]

    def compile(self, unit: Unit) -> Program:
        """A program that only asks for places."""
        return NullProgram(unit)


class NullProgram(Program):
    """Asks for the place of every output when bound, and does nothing in a run."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        """Shapes are the declared ones, symbols taken from `inputs`."""
        came = [item.shape if isinstance(item, np.ndarray) else None for item in inputs]
        symbols = symbols_of([value.shape for value in self.unit.inputs], came)
        for i, value in enumerate(self.unit.outputs):
            place(i, value.dtype, _shape(value, symbols))
        nothing: list[Any] = [None] * len(self.unit.outputs)
        return lambda _: nothing


def _offer(node: Node) -> Claim | Decline:
    """Reasons name positions, not values, so that the report can group them."""
    known = {dim for value in (*node.inputs, *node.captures) if not value.constant for dim in value.shape or ()}
    for i, value in enumerate(node.outputs):
        if not value.name:
            continue
        if not is_tensor(value.dtype) or value.dtype == "string":
            return Decline(node, f"output {i} is {value.dtype}, which has no fixed size")
        if value.shape is None:
            return Decline(node, f"the rank of output {i} is unknown")
        for dim in value.shape:
            if dim is None:
                return Decline(node, f"output {i} has an unknown dimension")
            if isinstance(dim, str) and dim not in known:
                return Decline(node, f"dimension {dim!r} of output {i} occurs in no input of the node")
    return Claim([node])


def _shape(value: Value, symbols: dict[str, int | None]) -> tuple[int, ...]:
    """The shape of an output in numbers. Raises ProviderContractError for one that the inputs do not tell."""
    shape = concrete(value.shape, symbols)
    if shape is None:
        raise ProviderContractError(
            f"the null provider cannot tell the shape {value.shape} of {value.name!r} from the inputs of its unit",
            provider="null", node=value.name, expected="dimensions of inputs", got=str(value.shape),
        )  # fmt: skip
    return shape
