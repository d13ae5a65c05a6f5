"""Elementwise float32 operators that hand values to one another only, as one `outrider::Chain`. Within tolerance.

    any tree, or graph, of the operators of `INSTRUCTIONS` whose inner values nobody else reads

An operator joins the one that reads it if it is not known to be smaller: what is computed for a row once would
otherwise be computed for every element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.draft import Draft

# Operators with an instruction of the same name and operands; Max, Min and Sum take any number of operands.
INSTRUCTIONS = frozenset(
    ("Add", "Sub", "Mul", "Div", "Pow", "Neg", "Abs", "Sqrt", "Exp", "Log", "Tanh", "Erf", "Sigmoid", "Relu",
     "HardSwish", "Reciprocal", "Floor", "Ceil", "Round", "Softplus", "Softsign", "Mish", "Sign")
)  # fmt: skip
_FOLDS = {"Max": "Max", "Min": "Min", "Sum": "Add"}
_WITH_ATTRIBUTES = {
    "LeakyRelu": (("alpha", 0.01),),
    "HardSigmoid": (("alpha", 0.2), ("beta", 0.5)),
    "Swish": (("alpha", 1.0),),
    "Elu": (("alpha", 1.0),),
    "Celu": (("alpha", 1.0),),
    "ThresholdedRelu": (("alpha", 1.0),),
    "Gelu": (),
    "Clip": (),
}
INPUTS, STEPS = 12, 24  # at most, of one chain
Instruction = list[Any]


def fuse_chains(draft: Draft) -> None:
    """All of them, from the last operator up."""
    for op in reversed(draft.ops):
        if draft.has(op) and joins(op):
            group = _group(draft, op)
            if sum(one.step.op_type != "Chain" for one in group) > 0 and (len(group) > 1 or op.step.domain):
                _chain(draft, group)


def joins(op: Op) -> bool:
    """True for an operator that has an instruction."""
    step = op.step
    if any(value.dtype not in ("float32", "undefined") for value in (*step.inputs, *step.outputs)) or not step.inputs:
        return False
    if step.domain:
        return step.domain == "outrider" and step.op_type == "Chain"
    if step.op_type in _FOLDS:
        return len(step.inputs) > 1
    return step.op_type in INSTRUCTIONS or step.op_type in _WITH_ATTRIBUTES


def _group(draft: Draft, root: Op) -> list[Op]:
    """The operators of a chain that ends in `root`, the last one first."""
    group = [root]
    shape = draft.shape(root.outputs[0])
    grown = True
    while grown:
        grown = False
        for number in [number for op in group for number in op.inputs if number != ABSENT]:
            op = draft.maker(number) or draft.own(number, "Chain")
            if op is None or op in group or not joins(op) or smaller(draft.shape(number), shape):
                continue
            if draft.closed([*group, op], root.outputs[0]) and _fits(draft, [*group, op]):
                group.append(op)
                grown = True
    return group


def smaller(a: Sequence[Any] | None, b: Sequence[Any] | None) -> bool:
    """True for a shape that is known to have 1, or no axis, where the other has not."""
    if a is None or b is None or len(a) != len(b):
        return True
    return any(one == 1 and two != 1 for one, two in zip(a, b, strict=True))


def _fits(draft: Draft, ops: Sequence[Op]) -> bool:
    made = {op.outputs[0] for op in ops}
    inputs = {number for op in ops for number in op.inputs} - made
    return len(inputs) <= INPUTS and sum(len(op.step.attributes.get("program", [0])) for op in ops) <= STEPS


class _Program:
    """A program being written. Operands are values until all inputs are known."""

    def __init__(self, draft: Draft) -> None:
        self.inputs: list[int] = []
        self.lines: list[tuple[str, list[tuple[str, int]]]] = []
        self._draft = draft
        self._made: dict[int, int] = {}  # number -> line

    def operand(self, number: int) -> tuple[str, int]:
        """The operand that a value is."""
        if number in self._made:
            return "line", self._made[number]
        if number not in self.inputs:
            self.inputs.append(number)
        return "input", self.inputs.index(number)

    def constant(self, value: float) -> tuple[str, int]:
        """The operand that a number is: an input of one element."""
        return self.operand(self._draft.derived(f"the number {value:g}", (), lambda: np.array(value)))

    def line(self, name: str, *operands: tuple[str, int]) -> tuple[str, int]:
        """One instruction more."""
        self.lines.append((name, list(operands)))
        return "line", len(self.lines) - 1

    def add(self, op: Op) -> None:
        """The instructions of an operator."""
        result = self._instructions(op)
        self._made[op.outputs[0]] = result[1]

    def _instructions(self, op: Op) -> tuple[str, int]:
        kind, get = op.step.op_type, op.step.attributes.get
        if kind == "Chain":
            return self._inlined(op)
        operands = [self.operand(number) for number in op.inputs if number != ABSENT]
        if kind in _FOLDS:
            result = operands[0]
            for other in operands[1:]:
                result = self.line(_FOLDS[kind], result, other)
            return result
        if kind == "Pow" and self._draft.scalar(op.inputs[1]) == 2.0:
            return self.line("Mul", operands[0], operands[0])
        if kind == "Clip":
            low, high = ([*op.inputs[1:], ABSENT, ABSENT])[:2]
            given = [
                self.constant(unbounded) if number == ABSENT else self.operand(number)
                for number, unbounded in ((low, -np.inf), (high, np.inf))
            ]
            return self.line("Clip", operands[0], *given)
        parameters = [self.constant(float(get(name, default))) for name, default in _WITH_ATTRIBUTES.get(kind, ())]
        if kind == "Gelu" and get("approximate", "none") == "tanh":
            kind = "GeluTanh"
        return self.line(kind, *operands, *parameters)

    def _inlined(self, op: Op) -> tuple[str, int]:
        inputs = [self.operand(number) for number in op.inputs]
        results: list[tuple[str, int]] = []
        for name, *operands in op.step.attributes["program"]:
            given = [inputs[k] if k < len(inputs) else results[k - len(inputs)] for k in operands]
            results.append(self.line(name, *given))
        return results[-1]

    def written(self) -> list[Instruction]:
        """As the attribute `program`."""
        first = len(self.inputs)
        return [
            [name, *[at if kind == "input" else first + at for kind, at in operands]] for name, operands in self.lines
        ]


def _chain(draft: Draft, group: list[Op]) -> None:
    program, order = _Program(draft), draft.ordered(group)
    for op in order:
        program.add(op)
    names = "+".join(dict.fromkeys(op.label.partition("::")[2] for op in order))
    draft.replace("chain", group, "Chain", program.inputs, {"program": program.written()}, title=names)
