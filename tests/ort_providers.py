"""`ort` with an execution provider that is pretended: onnxruntime's CPU provider, by another name and choosier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from outrider.providers.contract import Context, Node
from outrider.providers.ort import OrtProvider
from outrider.providers.ort.library import CPU, ExecutionProvider
from outrider.providers.ort.sessions import Builder, Built

NAME = "PretendedExecutionProvider"


class Pretended(ExecutionProvider):
    def attach(self, options: Any) -> list[Any]:
        return [CPU]


class PretendingBuilder(Builder):
    """Has sessions say that the pretended execution provider got what `takes` says."""

    def __init__(self, ort: Any, ep: ExecutionProvider, options: Any, threads: int, takes: Any) -> None:
        super().__init__(ort, ep, options, threads)
        self.takes = takes

    def ask(self, model: Any, nodes: Sequence[Node], *more: Any) -> Built:
        return self.renamed(super().ask(model, nodes, *more), self.takes(nodes, asked=True))

    def build(self, model: Any, nodes: Sequence[Node], *more: Any) -> Built:
        return self.renamed(super().build(model, nodes, *more), self.takes(nodes, asked=False))

    def renamed(self, built: Built, groups: list[set[str]]) -> Built:
        taken = set().union(*groups)
        others = [(name, names - taken) for name, names in built.groups]
        return dataclasses.replace(built, groups=[(NAME, frozenset(group)) for group in groups] + others)


class Choosy(OrtProvider):
    """Takes all nodes of a model, fused, or none; `lacks` are operators that it does not have."""

    lacks: frozenset[str] = frozenset({"Sigmoid"})

    def setup(self, context: Context) -> None:
        super().setup(context)
        ep = Pretended(NAME, (), {})
        self._builder = PretendingBuilder(self._ort, ep, self._options, context.threads, self.takes)

    def takes(self, nodes: Sequence[Node], asked: bool) -> list[set[str]]:
        return [] if any(node.op_type in self.lacks for node in nodes) else [{node.name for node in nodes}]


class Lonely(Choosy):
    """Takes nodes alone, and no two together when it comes to it."""

    def takes(self, nodes: Sequence[Node], asked: bool) -> list[set[str]]:
        return super().takes(nodes, asked) if asked or len(nodes) == 1 else []


class Fickle(Choosy):
    """Claims Tanh and does not run it then."""

    def takes(self, nodes: Sequence[Node], asked: bool) -> list[set[str]]:
        return [] if not asked and any(node.op_type == "Tanh" for node in nodes) else super().takes(nodes, asked)


class Paired(Choosy):
    """Takes a MatMul and the Add after it, fused, and nothing else."""

    def takes(self, nodes: Sequence[Node], asked: bool) -> list[set[str]]:
        makers = {value.name: node for node in nodes for value in node.outputs}
        pairs = []
        for node in nodes:
            maker = makers.get(node.inputs[0].name)
            if node.op_type == "Add" and maker is not None and maker.op_type == "MatMul":
                pairs.append({maker.name, node.name})
        return pairs


class Failing:
    """A session whose runs fail."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *_: Any) -> Any:
        raise RuntimeError("no such shape here")

    run_with_ort_values = run_with_iobinding


class FailingBuilder(PretendingBuilder):
    """Runs nothing that has a Tanh in it."""

    def build(self, model: Any, nodes: Sequence[Node], *more: Any) -> Built:
        built = super().build(model, nodes, *more)
        fails = any(node.op_type == "Tanh" for node in nodes)
        return dataclasses.replace(built, session=Failing(built.session)) if fails else built


class Weak(Choosy):
    """Takes Tanh and does not run it then."""

    def setup(self, context: Context) -> None:
        super().setup(context)
        ep = Pretended(NAME, (), {})
        self._builder = FailingBuilder(self._ort, ep, self._options, context.threads, self.takes)
