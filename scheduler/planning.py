"""From claims to partitions: who owns each node, what one `compile` gets, what is dispatched together.

A pure function over plain data. Claims are indivisible; an earlier provider goes before a later one; pins are hard;
nodes made of constants only are computed by each consumer for itself where its provider can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.scheduler.waves import cyclic_groups, owner_waves, topological_order
from outrider.shm.errors import OutriderError

CALLER = -1  # as the producer of an edge

_FREE = -1  # a constant node that no unit runs as an ordinary node
_UNCLAIMED = -2


class ClaimError(OutriderError, ValueError):
    """A provider's claims are malformed: nodes that were not shown, overlapping claims, or an empty claim."""

    _fields = ("provider", "node", "reason")


@dataclass(frozen=True)
class PlanNode:
    """One node: names of the values it reads (captures of bodies included, omitted inputs left out) and makes.

    `constant`: deterministic, and every input is an initializer or made by a constant node.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constant: bool = False


@dataclass(frozen=True)
class Offer:
    """One claim: the provider's position in the priority order, and positions of nodes.

    `cost`: seconds that the provider says it takes for them; None where it says nothing.
    """

    provider: int
    nodes: tuple[int, ...]
    cost: float | None = None


@dataclass(frozen=True)
class ProviderTraits:
    """What the planner knows of a provider. `merge`: it takes neighbouring claims as one unit."""

    name: str
    merge: bool


@dataclass(frozen=True)
class DroppedClaim:
    """A claim that could not be kept although no other provider had taken a node of it."""

    offer: Offer
    reason: str


@dataclass(frozen=True)
class PlanUnit:
    """What one call of `compile` gets.

    `nodes` in topological order; `constant_nodes`, in topological order, are those that the unit computes for itself
    once; `claims` are positions of offers, those for constants only left out where claims are merged. Without `merge`,
    `nodes` are exactly those of the one claim.
    """

    provider: int
    nodes: tuple[int, ...]
    constant_nodes: tuple[int, ...]
    claims: tuple[int, ...]


@dataclass(frozen=True)
class PlanPartition:
    """Units (positions in `Plan.units`) of one provider that are dispatched together, in execution order."""

    provider: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The answer of `plan`.

    `owner`: the provider of each node; None for one that no unit runs as an ordinary node: a constant that only lies in
    `constant_nodes` or that nobody needs, or an unclaimed node. `partitions` are in an order in which they can run.
    `unclaimed` nodes are needed and belong to nobody; those among them whose pin is the reason are in `pin_declined`
    too, with the provider they are pinned to. The plan can run if `unclaimed` is empty.
    """

    owner: list[int | None]
    units: list[PlanUnit]
    partitions: list[PlanPartition]
    unclaimed: list[int] = field(default_factory=list)
    dropped: list[DroppedClaim] = field(default_factory=list)
    pin_declined: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Edge:
    """A value that crosses partitions. `producer` is a partition or CALLER; `consumers` are partitions, ascending."""

    value: str
    producer: int
    consumers: tuple[int, ...]
    to_caller: bool


@dataclass(frozen=True)
class UnitInterface:
    """What a unit takes in a run (values, in order of first use) and must return (in order of its nodes)."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class _Problem:
    nodes: Sequence[PlanNode]
    offers: Sequence[Offer]
    providers: Sequence[ProviderTraits]
    predecessors: list[tuple[int, ...]]
    constant: list[bool]
    reads_constants: list[bool]  # whether a predecessor is constant
    output_nodes: list[int]
    pins: Mapping[int, int]
    ranked: list[int]  # offers, those that keep a pin first, then the preferred, then by provider and position


@dataclass(frozen=True)
class _Assignment:
    """`place`: the offer by which a node runs, _FREE or _UNCLAIMED. `replicable`: per provider, a flag per node."""

    place: list[int]
    replicable: list[bytearray]


@dataclass(frozen=True)
class _Contracted:
    """Vertices are what cannot be divided: `members` nodes, by offer `claim` (_UNCLAIMED for none)."""

    members: list[list[int]]
    claim: list[int]
    owner: list[int]
    successors: list[list[int]]


def plan(
    nodes: Sequence[PlanNode],
    offers: Sequence[Offer],
    providers: Sequence[ProviderTraits],
    graph_outputs: Sequence[str],
    pins: Mapping[int, int] | None = None,
    preferred: Collection[int] = (),
) -> Plan:
    """Assign `nodes` (in topological order) to `providers` (in priority order) and cut them into partitions.

    A node goes to the first provider that claimed it. A claim lapses as a whole when one of its nodes is taken or is
    pinned elsewhere; a claim that holds a pinned node is looked at before all others. Claims that would wait for each
    other, or one for itself, are dropped, the least important first, and their nodes go to the next claimant.

    `pins`: node -> provider; those of constant nodes have no effect. Constants are shared, so they make no claim of a
    `merge` provider lapse; such a provider computes those that it claimed, with all that they are made of, in each of
    its units. Any other constant that is needed, or is a graph output, is an ordinary node of its first claimant.

    `preferred`: positions of offers that go before all others but those that keep a pin; a strategy chose them.

    Raises ClaimError for malformed offers, ValueError for nodes that are not in topological order.
    """
    problem = _state(nodes, offers, providers, graph_outputs, pins or {}, preferred)
    lost: set[int] = set()
    dropped: list[DroppedClaim] = []
    while True:
        assignment = _assign(problem, lost)
        contracted = _contract(problem, assignment)
        order = topological_order(contracted.successors)
        if len(order) == len(contracted.members):
            break
        for offer in _cyclic_offers(problem, assignment, contracted):
            lost.add(offer)
            dropped.append(DroppedClaim(offers[offer], _why_cyclic(problem, offer)))
    return _cut(problem, assignment, contracted, order, dropped)


def _state(
    nodes: Sequence[PlanNode],
    offers: Sequence[Offer],
    providers: Sequence[ProviderTraits],
    graph_outputs: Sequence[str],
    pins: Mapping[int, int],
    preferred: Collection[int],
) -> _Problem:
    _check_offers(nodes, offers, providers)
    constant = [node.constant for node in nodes]
    producer = {value: position for position, node in enumerate(nodes) for value in node.outputs}
    predecessors: list[tuple[int, ...]] = []
    reads_constants = [False] * len(nodes)
    for position, node in enumerate(nodes):
        needed = tuple({producer[value]: None for value in node.inputs if value in producer})
        for earlier in needed:
            if constant[earlier]:
                reads_constants[position] = True
            elif node.constant:
                raise ValueError(f"node {node.name!r} is marked constant but reads from {nodes[earlier].name!r}")
            if earlier >= position:
                raise ValueError(f"node {node.name!r} stands before {nodes[earlier].name!r}, whose output it reads")
        predecessors.append(needed)
    pins = {position: provider for position, provider in pins.items() if not constant[position]}
    ranked = sorted(range(len(offers)), key=lambda number: offers[number].provider)
    if preferred:
        first = frozenset(preferred)
        ranked.sort(key=lambda number: number not in first)
    if pins:
        keeps_pin = [any(pins.get(position) == offer.provider for position in offer.nodes) for offer in offers]
        ranked.sort(key=lambda number: not keeps_pin[number])
    output_nodes = list(dict.fromkeys(producer[value] for value in graph_outputs if value in producer))
    return _Problem(nodes, offers, providers, predecessors, constant, reads_constants, output_nodes, pins, ranked)


def _check_offers(nodes: Sequence[PlanNode], offers: Sequence[Offer], providers: Sequence[ProviderTraits]) -> None:
    def fail(offer: Offer, node: str | int | None, reason: str) -> ClaimError:
        name = providers[offer.provider].name
        text = f"provider {name!r} returned a claim that cannot be used: {reason}. Its claim() must be corrected."
        return ClaimError(text, provider=name, node=node, reason=reason)

    claimed = [bytearray(len(nodes)) for _ in providers]
    for offer in offers:
        if not offer.nodes:
            raise fail(offer, None, "it holds no node")
        mine = claimed[offer.provider]
        for position in offer.nodes:
            if not 0 <= position < len(nodes):
                raise fail(offer, position, f"node {position} is none of the {len(nodes)} that were shown")
            if mine[position]:
                node = nodes[position].name
                raise fail(offer, node, f"node {node!r} is claimed twice, but claims of one provider may not overlap")
            mine[position] = True


def _assign(problem: _Problem, lost: set[int]) -> _Assignment:
    """Give every node to a claim. Claims in `lost` are left out."""
    offers, constant, pins = problem.offers, problem.constant, problem.pins
    place = [_FREE] * len(problem.nodes)
    live: list[int] = []
    for number in problem.ranked:
        if number in lost:
            continue
        offer = offers[number]
        if len(offer.nodes) == 1 and not constant[offer.nodes[0]]:  # the common case, without the lists below
            only = offer.nodes[0]
            if place[only] == _FREE and (not pins or pins.get(only, offer.provider) == offer.provider):
                place[only] = number
                live.append(number)
            continue
        running = [position for position in offer.nodes if not constant[position]]
        if running:
            # Where claims are compiled as they are, their constants are theirs alone; a merging provider shares them.
            takes = running if problem.providers[offer.provider].merge else offer.nodes
            if any(place[position] != _FREE for position in takes):
                continue
            if pins and any(pins.get(position, offer.provider) != offer.provider for position in running):
                continue
            for position in takes:
                place[position] = number
        live.append(number)

    claimants: dict[int, list[int]] = {}  # of constants, most important first
    for number in live if any(constant) else ():
        for position in offers[number].nodes:
            if constant[position]:
                claimants.setdefault(position, []).append(number)
    replicable = [bytearray(len(problem.nodes)) for _ in problem.providers]
    for position in sorted(claimants):
        for number in claimants[position]:
            flags = replicable[offers[number].provider]
            if problem.providers[offers[number].provider].merge:
                flags[position] = all(flags[earlier] for earlier in problem.predecessors[position])

    for position, number in enumerate(place):
        if number == _FREE and not constant[position]:
            place[position] = _UNCLAIMED
    _place_constants(problem, _Assignment(place, replicable), claimants)
    return _Assignment(place, replicable)


def _place_constants(problem: _Problem, assignment: _Assignment, claimants: dict[int, list[int]]) -> None:
    """Make ordinary nodes of the constants that somebody needs and cannot compute for itself."""
    place = assignment.place
    reads = problem.reads_constants
    needed = [position for position in problem.output_nodes if place[position] == _FREE]
    work = [position for position, number in enumerate(place) if number != _FREE and reads[position]]
    while needed or work:
        while needed:
            position = needed.pop()
            if place[position] != _FREE:
                continue
            taken, place[position] = [position], _UNCLAIMED
            for number in claimants.get(position, ()):
                offer = problem.offers[number]
                if problem.providers[offer.provider].merge:
                    place[position] = number
                    break
                if all(place[other] == _FREE for other in offer.nodes if other != position):
                    taken = list(offer.nodes)
                    for other in taken:
                        place[other] = number
                    break
            work.extend(taken)
        if work:
            needed.extend(earlier for earlier in _awaited(problem, assignment, work.pop()) if place[earlier] == _FREE)


def _awaited(problem: _Problem, assignment: _Assignment, position: int) -> Sequence[int]:
    """The nodes that must have run before this one can: predecessors less constants that its unit replicates."""
    earlier = problem.predecessors[position]
    number = assignment.place[position]
    if number < 0:
        return earlier
    provider = problem.offers[number].provider
    if not problem.providers[provider].merge:
        return earlier
    flags = assignment.replicable[provider]
    return [node for node in earlier if not flags[node]]


def _contract(problem: _Problem, assignment: _Assignment) -> _Contracted:
    """One vertex per claim, per constant that a merging provider runs as an ordinary node, and per unclaimed node."""
    place = assignment.place
    members: list[list[int]] = []
    claim: list[int] = []
    owner: list[int] = []
    vertex_of = [-1] * len(place)
    vertex_of_claim: dict[int, int] = {}
    for position, number in enumerate(place):
        if number == _FREE:
            continue
        if number == _UNCLAIMED:
            alone, provider = True, len(problem.providers)  # nobody's nodes are cut too, and left out at the end
        else:
            provider = problem.offers[number].provider
            alone = problem.constant[position] and problem.providers[provider].merge
        vertex = -1 if alone else vertex_of_claim.get(number, -1)
        if vertex < 0:
            vertex = len(members)
            members.append([])
            claim.append(number)
            owner.append(provider)
            if not alone:
                vertex_of_claim[number] = vertex
        members[vertex].append(position)
        vertex_of[position] = vertex
    successors: list[list[int]] = [[] for _ in members]
    for position, vertex in enumerate(vertex_of):
        if vertex >= 0:
            reads = problem.reads_constants[position]
            for earlier in _awaited(problem, assignment, position) if reads else problem.predecessors[position]:
                if vertex_of[earlier] != vertex:
                    successors[vertex_of[earlier]].append(vertex)
    return _Contracted(members, claim, owner, successors)


def _cyclic_offers(problem: _Problem, assignment: _Assignment, contracted: _Contracted) -> list[int]:
    """The claims that a cycle among contracted claims costs, by position."""
    rank = {number: position for position, number in enumerate(problem.ranked)}
    groups = [vertex for vertex, members in enumerate(contracted.members) if len(members) > 1]
    groups.sort(key=lambda vertex: rank[contracted.claim[vertex]])
    edges = [
        (earlier, position)
        for position, number in enumerate(assignment.place)
        if number != _FREE
        for earlier in _awaited(problem, assignment, position)
    ]
    given_up = cyclic_groups(edges, [contracted.members[vertex] for vertex in groups])
    return sorted(contracted.claim[groups[position]] for position in given_up)


def _why_cyclic(problem: _Problem, number: int) -> str:
    names = [problem.nodes[position].name for position in problem.offers[number].nodes]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"the claim of {shown} cannot run in one step: nodes outside it need some of its outputs and feed others of "
        "its nodes, directly or through claims that go before it"
    )


def _cut(
    problem: _Problem,
    assignment: _Assignment,
    contracted: _Contracted,
    order: list[int],
    dropped: list[DroppedClaim],
) -> Plan:
    units: list[PlanUnit] = []
    partitions: list[PlanPartition] = []
    for block in owner_waves(contracted.owner, contracted.successors, order):
        provider = contracted.owner[block[0]]
        if provider == len(problem.providers):
            continue
        first = len(units)
        if problem.providers[provider].merge:
            running = [position for vertex in block for position in contracted.members[vertex]]
            claims = sorted(
                contracted.claim[vertex]
                for vertex in block
                # A constant that runs here may belong to a claim whose other nodes run elsewhere.
                if not problem.constant[contracted.members[vertex][0]]
            )
            units.append(_merged_unit(problem, assignment, provider, running, claims))
        else:
            for vertex in block:
                units.append(PlanUnit(provider, tuple(contracted.members[vertex]), (), (contracted.claim[vertex],)))
        partitions.append(PlanPartition(provider, tuple(range(first, len(units)))))
    place = assignment.place
    owner = [problem.offers[number].provider if number >= 0 else None for number in place]
    unclaimed = [position for position, number in enumerate(place) if number == _UNCLAIMED]
    pin_declined = [(position, problem.pins[position]) for position in unclaimed if position in problem.pins]
    return Plan(owner, units, partitions, unclaimed, dropped, pin_declined)


def _merged_unit(
    problem: _Problem, assignment: _Assignment, provider: int, running: list[int], claims: list[int]
) -> PlanUnit:
    """One unit of `running` nodes and the constants they need. Without a second way of making a value: a constant that
    is made of one that runs here as an ordinary node is an ordinary node too."""
    flags = assignment.replicable[provider]
    ordinary = set(running)
    replicated: set[int] = set()
    work = list(running)
    while work:
        for earlier in problem.predecessors[work.pop()]:
            if flags[earlier] and earlier not in ordinary and earlier not in replicated:
                replicated.add(earlier)
                work.append(earlier)
    constant_nodes: list[int] = []
    for position in sorted(replicated):
        if any(earlier in ordinary for earlier in problem.predecessors[position]):
            ordinary.add(position)
        else:
            constant_nodes.append(position)
    return PlanUnit(provider, tuple(sorted(ordinary)), tuple(constant_nodes), tuple(claims))


def edges(
    made: Plan, nodes: Sequence[PlanNode], graph_inputs: Sequence[str], graph_outputs: Sequence[str]
) -> list[Edge]:
    """Every value that crosses partitions, or to or from the caller: graph inputs in order, then by producer.

    `graph_inputs` include initializers that the caller may override. A graph input that nobody reads is left out; so
    are initializers, also as graph outputs, and what unclaimed nodes make.
    """
    partition_of = {unit: number for number, partition in enumerate(made.partitions) for unit in partition.units}
    producer, readers = _flow(made, nodes)
    result: list[Edge] = []
    returned = set(graph_outputs)
    made_in_order = dict.fromkeys([*graph_inputs, *producer])
    for value in made_in_order:
        source = partition_of[producer[value]] if value in producer else CALLER
        consumers = tuple(sorted({partition_of[unit] for unit in readers.get(value, ())} - {source}))
        if consumers or value in returned:
            result.append(Edge(value, source, consumers, value in returned))
    return result


def interfaces(
    made: Plan, nodes: Sequence[PlanNode], graph_inputs: Sequence[str], graph_outputs: Sequence[str]
) -> list[UnitInterface]:
    """What each unit takes and returns in a run; initializers and what it computes for itself are not among it."""
    producer, readers = _flow(made, nodes)
    given = set(graph_inputs)
    returned = set(graph_outputs)
    inputs: list[dict[str, None]] = [{} for _ in made.units]
    for value, units in readers.items():
        if value in producer or value in given:
            for unit in units:
                inputs[unit][value] = None
    outputs: list[list[str]] = [[] for _ in made.units]
    for value, unit in producer.items():
        if value in returned or value in readers:
            outputs[unit].append(value)
    return [
        UnitInterface(tuple(value for value in _read(made.units[unit], nodes) if value in inputs[unit]), tuple(returns))
        for unit, returns in enumerate(outputs)
    ]


def _read(unit: PlanUnit, nodes: Sequence[PlanNode]) -> list[str]:
    """The values that a unit reads and does not make, in order of first use."""
    mine = {value for position in (*unit.constant_nodes, *unit.nodes) for value in nodes[position].outputs}
    wanted = dict.fromkeys(value for position in unit.nodes for value in nodes[position].inputs)
    return [value for value in wanted if value and value not in mine]


def _flow(made: Plan, nodes: Sequence[PlanNode]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Value -> the unit that makes it for others, in execution order; value -> the units that read it from outside."""
    producer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for number, unit in enumerate(made.units):
        for position in unit.nodes:
            for value in nodes[position].outputs:
                if value:
                    producer.setdefault(value, number)  # a constant may be made in several places: the first serves all
        for value in _read(unit, nodes):
            readers.setdefault(value, []).append(number)
    return producer, readers
