"""Bounds on a model, checked in Python before the first call into ONNX's C++.

Functions multiply: 27 three-line functions, each calling the one before twice, are 134 million nodes, and shape
inference would expand them in the caller's process, where nothing can interrupt it. So the size *after* expansion is
computed first, as a product over the call graph, in time linear in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from outrider.scheduler.model_errors import ModelLimitError, ModelLoadError

MAX_BYTES = 2**31 - 1  # what protobuf can hold
MAX_NODES = 1_000_000  # in the file, bodies and functions included, and again after expansion
MAX_DEPTH = 64  # of bodies in bodies and calls in calls together
MAX_BODIES = 30  # of bodies alone: protobuf parses 32
MAX_DENSE_BYTES = 2**30  # of one sparse tensor made dense

FunctionKey = tuple[str, str, str]


def function_key(item: onnx.NodeProto | onnx.FunctionProto) -> FunctionKey:
    """(domain, name, overload) of a function, or of the function a node would call; 'ai.onnx' is ''."""
    name = item.op_type if isinstance(item, onnx.NodeProto) else item.name
    return ("" if item.domain == "ai.onnx" else item.domain), name, item.overload


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs among a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def check_bytes(nbytes: int, path: str) -> None:
    """ModelLimitError when a file is larger than protobuf can hold."""
    if nbytes > MAX_BYTES:
        raise ModelLimitError(
            f"{path} is {nbytes:,} bytes; protobuf holds at most {MAX_BYTES:,}. Save the weights as external data.",
            what="bytes", limit=MAX_BYTES, got=nbytes,
        )  # fmt: skip


def check_limits(model: onnx.ModelProto, path: str) -> int:
    """Count the nodes of the model after function expansion, and raise before that could hurt.

    Raises ModelLimitError (nodes, nesting, expansion) or ModelLoadError (functions that call themselves, in order).
    """
    counter = _Counter(model.functions, path)
    total, _ = counter.measure(model.graph.node, 0)
    for key in counter.functions:  # those that nothing calls are checked and inferred too
        counter.function(key, 0)
    return total


class _Counter:
    def __init__(self, functions: Iterable[onnx.FunctionProto], path: str) -> None:
        self.path = path
        self.functions = {function_key(f): f for f in functions}
        self.sizes: dict[FunctionKey, tuple[int, int]] = {}  # function -> nodes after expansion, depth
        self.calling: list[FunctionKey] = []
        self.in_file = 0

    def measure(self, nodes: Iterable[onnx.NodeProto], depth: int, within: int = 0) -> tuple[int, int]:
        """Nodes after expansion, and how deep bodies and calls nest below here, `within` so many bodies."""
        self._check_depth(depth)
        if within > MAX_BODIES:
            raise ModelLimitError(
                f"{self.path}: bodies of control flow nest more than {MAX_BODIES} deep.",
                what="nesting", limit=MAX_BODIES, got=within,
            )  # fmt: skip
        total = below = 0
        for node in nodes:
            self.in_file += 1
            total += 1
            if self.functions:
                key = function_key(node)
                if key in self.functions:
                    size, deep = self.function(key, depth + 1)
                    total += size
                    below = max(below, deep + 1)
            for body in bodies(node):
                size, deep = self.measure(body.node, depth + 1, within + 1)
                total += size
                below = max(below, deep + 1)
            if total > MAX_NODES or self.in_file > MAX_NODES:
                self._too_many(total)
        return total, below

    def function(self, key: FunctionKey, depth: int) -> tuple[int, int]:
        known = self.sizes.get(key)
        if known is None:
            if key in self.calling:
                cycle = [*self.calling[self.calling.index(key) :], key]
                reason = "functions call themselves: " + " -> ".join(_spell(k) for k in cycle)
                raise ModelLoadError(f"{self.path}: {reason}. ONNX has no recursion.", path=self.path, reason=reason)
            self.calling.append(key)
            known = self.measure(self.functions[key].node, depth)
            self.calling.pop()
            self.sizes[key] = known
        self._check_depth(depth + known[1])
        return known

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            inside = f" (in {_spell(self.calling[0])} and what it calls)" if self.calling else ""
            raise ModelLimitError(
                f"{self.path}: bodies and function calls nest more than {MAX_DEPTH} deep{inside}.",
                what="nesting", limit=MAX_DEPTH, got=depth,
            )  # fmt: skip

    def _too_many(self, got: int) -> None:
        inside = f" in {_spell(self.calling[0])}" if self.calling else ""
        raise ModelLimitError(
            f"{self.path}: more than {MAX_NODES:,} nodes after its functions are expanded{inside}.",
            what="nodes", limit=MAX_NODES, got=max(got, self.in_file),
        )  # fmt: skip


def _spell(key: FunctionKey) -> str:
    domain, name, overload = key
    return f"{domain or 'ai.onnx'}::{name}" + (f":{overload}" if overload else "")
