"""Where each node went and why: the placement report, as data, text and a page.

Plain frozen data without any reference to the session. Domains are written out (`ai.onnx` for the default one).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.scheduler.health import ABSENT, FAILED, quarantine_text, state_text
from outrider.scheduler.report_html import render

CALLER = "caller"
EXAMPLES = 3
_LISTED = 20


@dataclass(frozen=True)
class PlacedPartition:
    """One partition, `id` in order of execution within a replica. `nodes`: full names. `weight_bytes`: constants its
    nodes read. `replica`: the number of the replica that it belongs to."""

    id: int
    provider: str
    nodes: tuple[str, ...]
    weight_bytes: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class NodeClaim:
    """A provider's offer for a node. `cost`: seconds in a run.

    `source`: 'claimed', the provider said so; 'measured', by `warmup`; 'estimated', from operator and shapes, and with
    an unknown part that is left out unless it is `exact`. What is known of several nodes is shared out among them.
    """

    provider: str
    cost: float
    source: str
    exact: bool = True

    def __str__(self) -> str:
        bound = "" if self.exact else "at least "
        return f"{self.provider}: {bound}{format_seconds(self.cost)} {self.source}"


@dataclass(frozen=True, slots=True)
class NodeDecline:
    """A provider does not take a node, or may not, for this reason."""

    provider: str
    reason: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.reason}"


@dataclass(frozen=True)
class PlacedNode:
    """One node of the model.

    `provider` and `partition` are None for a constant that its consumers compute for themselves. `reference`: served by
    `onnx.reference`, a stop-gap. `claims`, `declines`: of every provider that was asked one or the other, by priority.
    """

    name: str
    op: str
    domain: str
    provider: str | None
    partition: int | None
    reference: bool = False
    claims: tuple[NodeClaim, ...] = ()
    declines: tuple[NodeDecline, ...] = ()

    @property
    def label(self) -> str:
        """'ai.onnx::Relu'."""
        return f"{self.domain or 'ai.onnx'}::{self.op}"

    @property
    def place(self) -> str:
        """'cpu, partition 0', or 'constant'; and whether it is served by a stop-gap."""
        if self.partition is None:
            return self.provider or "constant"
        return f"{self.provider}, partition {self.partition}" + (" (onnx.reference)" if self.reference else "")


@dataclass(frozen=True)
class Transfer:
    """A value that crosses from a provider (or 'caller') to another; `nbytes` is None while its shape is not known."""

    value: str
    source: str
    target: str
    nbytes: int | None = None


@dataclass(frozen=True)
class PlacedProvider:
    """One provider, in priority order. `reason` says why one did not start or got nothing, '' otherwise.

    `seconds`: how long it is in a state that ends by time, 'back-off' or 'open'. `quarantined`: the nodes of each
    partition of this model that the provider gets no more. `operators`: (operator, how many nodes of it), of what it
    got, sorted.
    """

    name: str
    state: str
    nodes: int = 0
    weight_bytes: int = 0
    reason: str = ""
    seconds: float | None = None
    quarantined: tuple[tuple[str, ...], ...] = ()
    operators: tuple[tuple[str, int], ...] = ()

    @property
    def standing(self) -> str:
        """The state in words: 'ready', 'absent (no such device)', 'back-off (3 s), quarantined: n4, n5'."""
        state = state_text(self.state, self.seconds)
        if self.state in (ABSENT, FAILED):
            state += f" ({self.reason})"
        return ", ".join(filter(None, [state, quarantine_text(self.quarantined)]))

    @property
    def story(self) -> str:
        """The standing, and why it got nothing."""
        return self.standing + (f": {self.reason}" if self.reason and self.state not in (ABSENT, FAILED) else "")


@dataclass(frozen=True)
class Refusal:
    """One node that one provider declined."""

    node: str
    op: str
    domain: str
    provider: str
    reason: str


@dataclass(frozen=True)
class Declines:
    """All refusals of one operator by one provider for one reason; `examples` are up to three node names."""

    domain: str
    op: str
    provider: str
    reason: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.examples) + (", ..." if self.count > len(self.examples) else "")
        return f"{self.domain}::{self.op} declined by {self.provider}: {self.reason} [{self.count}: {shown}]"

    def to_dict(self) -> dict[str, Any]:
        """{domain, op, provider, reason, count, examples}."""
        return {
            "domain": self.domain, "op": self.op, "provider": self.provider, "reason": self.reason,
            "count": self.count, "examples": list(self.examples),
        }  # fmt: skip


def group_declines(refusals: Iterable[Refusal]) -> tuple[Declines, ...]:
    """Refusals grouped by (domain, op, provider, reason), sorted by these; examples are the first names when sorted.

    The same refusals give the same groups in whatever order they come.
    """
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for refusal in refusals:
        key = (refusal.domain or "ai.onnx", refusal.op, refusal.provider, refusal.reason)
        groups.setdefault(key, []).append(refusal.node)
    return tuple(
        Declines(*key, count=len(nodes), examples=tuple(sorted(nodes)[:EXAMPLES]))
        for key, nodes in sorted(groups.items())
    )


@dataclass(frozen=True)
class PlacementReport:
    """The placement of a model. `str()` for people, `to_dict()` for programs, `to_html()` for a browser.

    `nodes` are in graph order, `partitions` in order of execution, `providers` in priority order. `notes`: what else
    the user should know, such as a pin without effect.
    """

    partitions: Sequence[PlacedPartition] = ()
    nodes: Sequence[PlacedNode] = ()
    transfers: Sequence[Transfer] = ()
    declines: Sequence[Declines] = ()
    providers: Sequence[PlacedProvider] = ()
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Lists of plain dicts.

        `partitions` [{id, provider, nodes, weight_bytes}] with the names of the nodes, `nodes` [{name, op, domain,
        provider, partition, reference, claims, declines}] with claims [{provider, cost, source, exact}] (seconds, see
        NodeClaim) and declines [{provider, reason}], `transfers` [{value, from, to, bytes}], `declines` [{domain, op,
        provider, reason, count, examples}], `providers` [{name, state, reason, nodes, weight_bytes, operators}] with
        the number of nodes, in all and of each operator, and with `seconds` and `quarantined` (lists of names) where
        there are any.
        """
        return {
            "partitions": [
                {"id": one.id, "provider": one.provider, "nodes": list(one.nodes), "weight_bytes": one.weight_bytes}
                for one in self.partitions
            ],
            "nodes": [
                {
                    "name": one.name, "op": one.op, "domain": one.domain or "ai.onnx", "provider": one.provider,
                    "partition": one.partition, "reference": one.reference,
                    "claims": [
                        {"provider": claim.provider, "cost": claim.cost, "source": claim.source, "exact": claim.exact}
                        for claim in one.claims
                    ],
                    "declines": [{"provider": no.provider, "reason": no.reason} for no in one.declines],
                }
                for one in self.nodes
            ],
            "transfers": [
                {"value": one.value, "from": one.source, "to": one.target, "bytes": one.nbytes}
                for one in self.transfers
            ],
            "declines": [one.to_dict() for one in self.declines],
            "providers": [_provider_dict(one) for one in self.providers],
        }  # fmt: skip

    @property
    def reference_nodes(self) -> list[str]:
        """Nodes that `onnx.reference` serves."""
        return [one.name for one in self.nodes if one.reference]

    @property
    def replicas(self) -> int:
        """How many times the model is loaded."""
        return 1 + max((one.replica for one in self.partitions), default=0)

    @property
    def idle_providers(self) -> list[str]:
        """Providers that got no node."""
        return [one.name for one in self.providers if not one.nodes]

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  {line}" for line in self._provider_lines()]
        lines += _section("Partitions, in order", [self._partition_line(one) for one in self.partitions])
        lines += _section("Transfers", [_transfer_line(one) for one in self.transfers])
        lines += _section("Declined", [str(one) for one in self.declines], limit=None)
        served = self.reference_nodes
        if served:
            lines += _section("Served by onnx.reference, a slow stop-gap", [f"{len(served)} nodes: {_some(served)}"])
        lines += _section("Notes", list(self.notes), limit=None)
        return "\n".join(lines)

    def matching(self, pattern: str) -> list[PlacedNode]:
        """The node of this full name, else all whose names match it as a pattern (`fnmatch.fnmatchcase`)."""
        named = [one for one in self.nodes if one.name == pattern]
        return named or [one for one in self.nodes if fnmatch.fnmatchcase(one.name, pattern)]

    def to_html(self, title: str = "Placement") -> str:
        """A page of its own: no script, nothing fetched, every name escaped."""
        return render(self, title)

    def summary(self) -> str:
        """One line: how many nodes, partitions and providers. Constant nodes are computed by whoever reads them."""
        used = len(self.providers) - len(self.idle_providers)
        constant = sum(one.partition is None for one in self.nodes)
        nodes = _count(len(self.nodes), "node") + (f", {constant} of them constant," if constant else "")
        parts = [nodes, _count(len(self.partitions), "partition"), _count(used, "provider")]
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{parts[0]} in {parts[1]} on {parts[2]}{replicas}"

    def _provider_lines(self) -> list[str]:
        width = max((len(one.name) for one in self.providers), default=0)
        lines = []
        for one in self.providers:
            size = f"{_count(one.nodes, 'node')}, weights {format_bytes(one.weight_bytes)}"
            what = size if one.nodes else "got nothing"
            why = f", since {one.reason}" if one.reason and one.state not in (ABSENT, FAILED) else ""
            lines.append(f"{one.name:{width}}  {one.standing}: {what}{why}")
        return lines

    def _partition_line(self, one: PlacedPartition) -> str:
        size = f"{_count(len(one.nodes), 'node')}, weights {format_bytes(one.weight_bytes)}"
        replica = f"replica {one.replica}, " if self.replicas > 1 else ""
        return f"{one.id}  {replica}{one.provider}: {size}: {_some(one.nodes)}"


def _provider_dict(one: PlacedProvider) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": one.name, "state": one.state, "reason": one.reason, "nodes": one.nodes,
        "weight_bytes": one.weight_bytes, "operators": dict(one.operators),
    }  # fmt: skip
    if one.seconds is not None:
        told["seconds"] = one.seconds
    if one.quarantined:
        told["quarantined"] = [list(nodes) for nodes in one.quarantined]
    return told


def format_bytes(count: int | None) -> str:
    """'512 B', '1.5 KiB', '3.0 GiB'; 'size not known' for None."""
    if count is None:
        return "size not known"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """'0', '3.2 µs', '1.5 ms', '2.1 s'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    if len(names) <= 2 * EXAMPLES:
        return ", ".join(names)
    return f"{', '.join(names[:EXAMPLES])}, ..., {names[-1]}"


def _transfer_line(one: Transfer) -> str:
    return f"{one.value}: {one.source} -> {one.target}, {format_bytes(one.nbytes)}"


def _section(title: str, rows: list[str], limit: int | None = _LISTED) -> list[str]:
    """Rows under a title, at most `limit` of them; nothing without rows."""
    if not rows:
        return []
    shown = rows if limit is None or len(rows) <= limit else [*rows[:limit], f"... and {len(rows) - limit} more"]
    return [title + ":", *(f"  {row}" for row in shown)]
