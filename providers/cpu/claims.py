"""What the cpu provider takes: one claim per node, or the reasons why not.

A node is served by kernels, by the executor itself (control flow, if every node of the bodies is served), or, where
nobody wrote a kernel yet, by ONNX's reference implementation as a counted stop-gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.providers.contract import Claim, Decline, Node
from outrider.providers.cpu import reference
from outrider.providers.cpu.kernels.frame import KERNELS, Kernel, Unsupported, find
from outrider.providers.wire.graph import Graph

OWN = "outrider"  # the domain of ops that `fusion/` makes; no model's
# Operators that the executor runs, with the lowest opset whose form it knows.
CONTROL = {"If": 1, "Loop": 1, "Scan": 8, "SequenceMap": 17}


@dataclass(frozen=True)
class Service:
    """How a lowered node is served. `kernel` is None for control flow."""

    kernel: Kernel[Any] | None
    parsed: Any = None
    reference: bool = False


def serve(step: Node) -> Service:
    """How a lowered node is served; raises Unsupported with all reasons. Bodies are looked at by the caller."""
    if step.domain == "" and step.op_type in CONTROL:
        since = CONTROL[step.op_type]
        if step.opset < since:
            raise Unsupported(f"{step.op_type} is run from opset {since} on, the node is at {step.opset}")
        return Service(None)
    try:
        kernel = find(step)
        return Service(kernel, kernel.parsed(step))
    except Unsupported as reason:
        own = str(reason)
    try:
        return Service(reference.stop_gap(step), reference=True)
    except Unsupported as reason:
        raise Unsupported(f"{own}; stop-gap: {reason}") from None


def offer(node: Node) -> Claim | Decline:
    """A claim of this one node, or the reason against it."""
    try:
        return Claim([node], reference=served_by_reference(node))
    except Unsupported as reason:
        return Decline(node, str(reason))


def offers(graph: Graph) -> list[Claim | Decline]:
    """The answer for a graph, node by node."""
    return [offer(node) for node in graph.nodes]


def served_by_reference(node: Node) -> bool:
    """True when the stop-gap serves a step of this node, or a node of its bodies. Raises Unsupported as `serve`."""
    found = False
    if node.domain == OWN:
        raise Unsupported(f"the domain {OWN} is this provider's own")
    for step in node.steps():
        service = serve(step)
        found = found or service.reference
        for _, body in step.bodies() if service.kernel is None else ():
            for inner in body.nodes:
                try:
                    found = served_by_reference(inner) or found
                except Unsupported as reason:
                    raise Unsupported(f"body node {inner.name} ({inner.label}): {reason}") from None
    return found


def operators() -> list[str]:
    """`domain::op` of everything that models may hold and that has a kernel or is run by the executor, sorted."""
    names = {f"{domain or 'ai.onnx'}::{op}" for domain, op in KERNELS if domain != OWN}
    return sorted(names | {f"ai.onnx::{op}" for op in CONTROL})
