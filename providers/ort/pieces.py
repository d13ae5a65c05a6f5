"""Compiling a unit: in one session where that takes all its nodes, else in several that run one after another.

Execution providers take nodes alone that they refuse together with others, and the other way round. What is built is
the only answer that counts: what a session leaves to onnxruntime's CPU provider is tried again on its own, and so is
what it takes; what cannot be built is cut in halves; a single node that is still left over is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.providers.contract import Node, Unit, Value
from outrider.providers.ort.sessions import Built

LEFT = "the execution provider leaves it to onnxruntime's CPU provider"
LIMIT = 200  # builds for one unit


# Builds a session; with the names of the nodes that the execution provider does not run.
Attempt = Callable[[Sequence[Node], Sequence[Value], Sequence[Value]], tuple[Built, frozenset[str]]]


@dataclass
class Pieces:
    """The sessions of a unit in order, and the nodes that none of them takes, each with its reason."""

    built: list[Built] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def cut(unit: Unit, attempt: Attempt, reason: Callable[[Exception], str]) -> Pieces:
    """Sessions for a unit. `attempt` builds one and raises what onnxruntime raises; `reason` words that.

    MemoryError passes through.
    """
    pieces = Pieces()
    builds = 0
    waiting = [list(unit.nodes)]  # in order, the next one last
    while waiting:
        nodes = waiting.pop()
        builds += 1
        if builds > LIMIT:
            told = f"no way to cut its unit was found in {LIMIT} builds"
            pieces.refused.update((node.name, told) for left in (nodes, *waiting) for node in left)
            break
        try:
            built, left = attempt(*part_of(unit, nodes))
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime's kinds have no common class
            left, why = frozenset(node.name for node in nodes), reason(error)
        else:
            why = LEFT
            if not left:
                pieces.built.append(built)
                continue
        if len(nodes) == 1:
            pieces.refused[nodes[0].name] = why
        else:
            waiting += reversed(_divided(nodes, left))
    return pieces


def _divided(nodes: Sequence[Node], left: frozenset[str]) -> list[list[Node]]:
    """Runs of nodes that were taken and that were not, in order; halves where all are the same."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and (runs[-1][0].name in left) == (node.name in left):
            runs[-1].append(node)
        else:
            runs.append([node])
    if len(runs) > 1:
        return runs
    middle = len(nodes) // 2
    return [list(nodes[:middle]), list(nodes[middle:])]


def part_of(unit: Unit, chosen: Sequence[Node]) -> tuple[list[Node], list[Value], list[Value]]:
    """A part of a unit: its nodes after the constant ones that it needs, what it reads, and what others read of it."""
    if len(chosen) == len(unit.nodes):
        return [*unit.constant_nodes, *unit.nodes], list(unit.inputs), list(unit.outputs)
    needed = reads_of(chosen)
    constants: list[Node] = []
    for node in reversed(unit.constant_nodes):
        if any(value.name in needed for value in node.outputs):
            constants.append(node)
            needed.update(reads_of([node]))
    nodes = [*reversed(constants), *chosen]
    made = {value.name for node in nodes for value in node.outputs}
    known = {value.name: value for value in unit.inputs}
    inputs = [known.get(name, v) for name, v in needed.items() if name not in made and name not in unit.constants]
    inside = {node.name for node in chosen}
    wanted = {value.name for value in unit.outputs}
    wanted.update(reads_of([node for node in unit.nodes if node.name not in inside]))
    outputs = [value for node in chosen for value in node.outputs if value.name in wanted]
    return nodes, inputs, outputs


def reads_of(nodes: Sequence[Node]) -> dict[str, Value]:
    """What nodes and their bodies read, by name."""
    return {value.name: value for node in nodes for value in (*node.inputs, *node.captures) if value.name}
