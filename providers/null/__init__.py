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
        symbols = _symbols(self.unit.inputs, inputs)
        for i, value in enumerate(self.unit.outputs):
            assert value.shape is not None
            place(i, value.dtype, tuple(_extent(value, dim, symbols) for dim in value.shape))
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


def _symbols(values: Sequence[Value], inputs: Sequence[Any]) -> dict[str, int]:
    """Symbol -> extent. Raises ProviderContractError when one symbol stands for two extents."""
    symbols: dict[str, int] = {}
    for value, item in zip(values, inputs, strict=True):
        if value.shape is None or not isinstance(item, np.ndarray):
            continue
        for dim, extent in zip(value.shape, item.shape, strict=True):
            if isinstance(dim, str) and symbols.setdefault(dim, extent) != extent:
                raise ProviderContractError(
                    f"dimension {dim!r} is {symbols[dim]} in one input of the unit and {extent} in {value.name!r}",
                    provider="null", node=value.name, expected=symbols[dim], got=extent,
                )  # fmt: skip
    return symbols


def _extent(value: Value, dim: int | str | None, symbols: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str) and dim in symbols:
        return symbols[dim]
    raise ProviderContractError(
        f"the null provider cannot tell dimension {dim!r} of {value.name!r} from the inputs of its unit",
        provider="null", node=value.name, expected="a dimension of an input", got=dim,
    )  # fmt: skip
