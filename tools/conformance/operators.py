"""Operator cases: the node cases of ONNX's backend suite, and a small set of the project's own.

The suite says what is right in its cases; in those of the own set `onnx.reference` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import onnx

from outrider.providers.wire.dtypes import BY_NUMBER
from outrider.scheduler.numbering import RANDOM
from outrider.tools.conformance.compare import difference
from outrider.tools.conformance.outcomes import Outcome
from outrider.tools.conformance.running import Rig, answers, forms
from outrider.tools.conformance.specimens import SPECIMENS, Specimen, built, fixed
from outrider.tools.conformance.suite import Suite

SUITE, OWN = "onnx", "own"  # the first part of a case's name
_DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Selection:
    """What is asked for: patterns of names, operators, dtypes, opsets; an empty one selects all.

    A case has the dtypes of its inputs and outputs, and is in when one of them is asked for.
    """

    only: tuple[str, ...] = ()
    operators: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    opsets: frozenset[int] = frozenset()

    def name(self, name: str) -> bool:
        """Whether a case of this name is in; the part before the '/' may be left out."""
        if not self.only:
            return True
        tail = name.partition("/")[2]
        return any(fnmatchcase(name, pattern) or fnmatchcase(tail, pattern) for pattern in self.only)

    def family(self, first: str) -> bool:
        """Whether cases whose names begin with this can be in."""
        heads = [pattern.partition("/")[0] if "/" in pattern else "*" for pattern in self.only]
        return not heads or any(fnmatchcase(first, head) for head in heads)

    def content(self, case: Case) -> bool:
        """Whether a case of these operators, dtypes and opset is in."""
        return (
            (not self.operators or not self.operators.isdisjoint(case.operators))
            and (not self.dtypes or not self.dtypes.isdisjoint(case.dtypes))
            and (not self.opsets or case.opset in self.opsets)
        )


@dataclass(frozen=True)
class Case:
    """One model with inputs and what it must answer: pairs of (inputs by name, outputs in order)."""

    name: str
    model: bytes
    data: Sequence[tuple[dict[str, Any], list[Any]]]
    rtol: float
    atol: float
    pattern: str = ""

    @cached_property
    def _graph(self) -> onnx.ModelProto:
        return onnx.load_from_string(self.model)

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """Its operators, each once, in order."""
        return tuple(dict.fromkeys(node.op_type for node in self._graph.graph.node))

    @property
    def group(self) -> str:
        """What the case is about: its operator, or pattern of operators, or 'several'."""
        return self.pattern or (self.operators[0] if len(self.operators) == 1 else "several")

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Element types of its inputs and outputs, as 'float32'."""
        found = set()
        for value in (*self._graph.graph.input, *self._graph.graph.output):
            kind = value.type
            while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
                kind = getattr(kind, str(kind.WhichOneof("value"))).elem_type
            found.add(BY_NUMBER.get(kind.tensor_type.elem_type, "undefined"))
        return frozenset(found)

    @cached_property
    def opset(self) -> int:
        """Of the default domain, 0 for a model that has none."""
        found = [one.version for one in self._graph.opset_import if one.domain in _DEFAULT_DOMAINS]
        return int(found[0]) if found else 0

    @property
    def random(self) -> bool:
        """Whether its operators draw numbers, so that only the form of an answer can be right or wrong."""
        return not RANDOM.isdisjoint(self.operators) and any(map(_draws, self._graph.graph.node))

    def run(self, rig: Rig, shapes_only: bool = False) -> Outcome:
        """On the provider alone. `shapes_only`: values do not count."""
        return rig.run(lambda: self._difference(rig, shapes_only or self.random))

    def _difference(self, rig: Rig, shapes_only: bool) -> str | None:
        with rig.alone(self.model) as session:
            for inputs, expected in self.data:
                if shapes_only:
                    found = difference(forms(expected), forms(session.run(None, inputs)), 0, 0)
                else:
                    found = answers(session, inputs, expected, (self.rtol, self.atol))
                if found is not None:
                    return found
        return None


def _draws(node: onnx.NodeProto) -> bool:
    return node.op_type in RANDOM and (node.op_type != "Dropout" or (len(node.input) > 2 and bool(node.input[2])))


def suite_cases(suite: Suite, selection: Selection) -> Iterator[Case]:
    """The node cases of ONNX's suite."""
    for name in suite.names():
        full = f"{SUITE}/{name}"
        if selection.name(full):
            raw = suite.read(name)
            case = Case(full, raw.model, raw.data, raw.rtol, raw.atol)
            if raw.kind == "node" and raw.data and selection.content(case):
                yield case


def own_cases(selection: Selection) -> Iterator[Case]:
    """Every specimen in its dtypes, without free dimensions, in older opsets, and with operands to broadcast."""
    for specimen in SPECIMENS:
        for suffix, variant in _variants(specimen):
            name = f"{OWN}/{specimen.name}-{suffix}"
            if selection.name(name):
                case = _own(name, variant)
                if selection.content(case):
                    yield case


def _variants(specimen: Specimen) -> Iterator[tuple[str, Specimen]]:
    for dtype in specimen.dtypes:
        yield dtype, dataclasses.replace(specimen, dtype=dtype)
    yield "fixed-shapes", fixed(specimen)
    for opset in specimen.older:
        if _written_alike(specimen, opset):
            yield f"opset{opset}", dataclasses.replace(specimen, opset=opset)
    if specimen.joins and not specimen.constants and specimen.name != "Concat":
        (second,) = specimen.more
        for what, x, b in _BROADCASTS:
            yield f"broadcast-{what}", dataclasses.replace(specimen, x=x, more={second: b})


_BROADCASTS: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = (
    ("rows", ("N", 8), (8,)),
    ("columns", ("N", 8), ("N", 1)),
    ("both", ("N", 1), (1, 8)),
    ("scalar", ("N", 8), ()),
    ("scalars", (), ()),
    ("left", (8,), (2, "N", 8)),
)


def _written_alike(specimen: Specimen, opset: int) -> bool:
    """Whether its steps are there in this opset, and written as in the newest."""
    for step in specimen.steps:
        try:
            now, then = (onnx.defs.get_schema(step.op, version) for version in (specimen.opset, opset))
        except onnx.defs.SchemaError:
            return False
        if len(then.inputs) != len(now.inputs) or not set(step.attributes) <= set(then.attributes):
            return False
    return True


def _own(name: str, specimen: Specimen) -> Case:
    graph = built(specimen)
    feeds = graph.feeds()
    return Case(
        name, graph.proto.SerializeToString(), [(feeds, graph.expected(feeds))], *specimen.tolerance, specimen.group
    )
