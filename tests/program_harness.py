"""Runs whole small models through the cpu provider in this process: models as ONNX text, onnxruntime as oracle."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx.parser

from outrider.providers.constants import Constants
from outrider.providers.contract import Claim, Context, Decline, Graph, Program, Unit
from outrider.providers.cpu import CpuProvider
from outrider.providers.wire.dtypes import numpy_dtype
from outrider.scheduler.model import load_model
from tests.kernel_harness import same
from tests.oracle import run_ort


def model(text: str, opset: int = 21, **opsets: int) -> onnx.ModelProto:
    """A model from the body of ONNX text: `agraph (float[N] x) => (float[N] y) { y = Relu(x) }`."""
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": opset, **opsets}.items())
    parsed: onnx.ModelProto = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}")
    return parsed


@contextmanager
def graph_of(proto: onnx.ModelProto) -> Iterator[Graph]:
    """The plain graph as a provider sees it."""
    loaded = load_model(proto)
    try:
        loaded.store.seal()
        yield Constants(loaded.store.segments).graph(loaded.graph)
    finally:
        loaded.store.close()


def unit_of(graph: Graph, optimization: str = "basic") -> Unit:
    """The whole graph as one unit."""
    constant = {node.index for node in graph.nodes if all(value.constant for value in node.outputs if value.name)}
    return Unit(
        nodes=tuple(node for node in graph.nodes if node.index not in constant),
        inputs=graph.inputs,
        outputs=graph.outputs,
        constants=graph.constants,
        constant_nodes=tuple(node for node in graph.nodes if node.index in constant),
        optimization=optimization,
    )


def ready(provider: Any, **options: Any) -> Any:
    """The provider, set up."""
    provider.setup(Context(options, 0, 1, logging.getLogger("outrider")))
    return provider


class Bound:
    """A program bound to places of its own. Each run finds rubbish in its places and must leave its inputs alone."""

    def __init__(self, program: Program, unit: Unit, feeds: Mapping[str, Any]) -> None:
        self.unit = unit
        self.places: dict[int, np.ndarray] = {}
        self.inputs = [self._held(feeds[value.name]) for value in unit.inputs]
        self._run = program.bind(self.inputs, self._place)

    @staticmethod
    def _held(item: Any) -> Any:
        if not isinstance(item, np.ndarray):
            return item
        item = np.array(item)
        item.flags.writeable = False
        return item

    def _place(self, i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        assert i not in self.places, "a place was asked for twice"
        self.places[i] = np.empty(shape, numpy_dtype(dtype))
        return self.places[i]

    def run(self, feeds: Mapping[str, Any] | None = None) -> list[Any]:
        """The outputs, those in places copied; `feeds` of the same signature replace what was there."""
        inputs = list(self.inputs)
        for i, value in enumerate(self.unit.inputs):
            if feeds is None:
                continue
            if isinstance(inputs[i], np.ndarray) and not inputs[i].dtype.hasobject:
                inputs[i].flags.writeable = True
                inputs[i][...] = feeds[value.name]
                inputs[i].flags.writeable = False
            else:
                inputs[i] = feeds[value.name]
        before = [np.array(item) if isinstance(item, np.ndarray) else item for item in inputs]
        for place in self.places.values():
            place[...] = np.ones((), place.dtype)
        returned = self._run(inputs)
        assert len(returned) == len(self.unit.outputs)
        results = [self.places[i].copy() if i in self.places else returned[i] for i in range(len(returned))]
        for old, new in zip(before, inputs, strict=True):
            same(new, old, 0, 0, "an input was changed")
        return results


@contextmanager
def compiled(
    proto: onnx.ModelProto, optimization: str = "basic", **options: Any
) -> Iterator[tuple[CpuProvider, Any, Unit]]:
    """(provider, program, unit) of the whole model; every node must be claimed."""
    provider = ready(CpuProvider(), **options)
    with graph_of(proto) as graph:
        declined = [offer for offer in provider.claim(graph) if isinstance(offer, Decline)]
        assert not declined, declined
        unit = unit_of(graph, optimization)
        program = provider.compile(unit)
        yield provider, program, unit
        provider.unload(program)
    provider.close()


def run_cpu(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """The outputs of one model, run twice in one binding: the second run must not see what the first one left."""
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, feeds)
        first = bound.run()
        for one, other in zip(first, bound.run(), strict=True):
            same(one, other, 0, 0, "the second run differs")
        return first


def check_model(
    proto: onnx.ModelProto,
    feeds: Mapping[str, Any],
    expected: Sequence[Any] | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-6,
) -> list[Any]:
    """Assert that the cpu provider gives `expected`, or what onnxruntime gives."""
    if expected is None:
        expected = list(run_ort(proto.SerializeToString(), feeds).values())
    got = run_cpu(proto, feeds)
    assert len(got) == len(expected)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if other is None:
            assert one is None
        else:
            same(one, other, rtol, atol, f"output {i}")
    return got


def offers(proto: onnx.ModelProto, provider: Any = None) -> list[Claim | Decline]:
    """What the provider says about each node."""
    with graph_of(proto) as graph:
        answer: list[Claim | Decline] = ready(provider or CpuProvider()).claim(graph)
        return answer
