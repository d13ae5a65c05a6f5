"""Graph algorithms of the planner, over small integers: order, cycles among indivisible groups, owner waves.

Nothing here knows of ONNX, providers or claims. All of it is iterative and deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WALKS = 20  # through all edges, to tell which group is to blame for a cycle

Edge = tuple[int, int]
_Group = tuple[int, frozenset[int]]  # position among all groups, members


def topological_order(successors: Sequence[Sequence[int]]) -> list[int]:
    """The vertices so that every edge points forward; those on or behind a cycle are missing."""
    waiting = [0] * len(successors)
    for following in successors:
        for vertex in following:
            waiting[vertex] += 1
    order = [vertex for vertex, count in enumerate(waiting) if count == 0]
    for vertex in order:  # grows while it is walked
        for following_vertex in successors[vertex]:
            waiting[following_vertex] -= 1
            if waiting[following_vertex] == 0:
                order.append(following_vertex)
    return order


def strong_components(edges: Iterable[Edge]) -> dict[int, int]:
    """Strongly connected components (Tarjan 1972) of the vertices that `edges` names: vertex -> component number."""
    successors: dict[int, list[int]] = {}
    for source, target in edges:
        successors.setdefault(source, []).append(target)
        successors.setdefault(target, [])
    component: dict[int, int] = {}
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    open_vertices: list[int] = []
    found = 0
    for root in successors:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        open_vertices.append(root)
        walk = [(root, iter(successors[root]))]
        while walk:
            vertex, rest = walk[-1]
            for following in rest:
                if following not in index:
                    index[following] = low[following] = len(index)
                    open_vertices.append(following)
                    walk.append((following, iter(successors[following])))
                    break
                if following not in component:
                    low[vertex] = min(low[vertex], index[following])
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    low[parent] = min(low[parent], low[vertex])
                if low[vertex] == index[vertex]:
                    while True:
                        member = open_vertices.pop()
                        component[member] = found
                        if member == vertex:
                            break
                    found += 1
    return component


def left_and_entered(edges: Sequence[Edge], groups: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """The first of the disjoint `groups` that some path leaves and enters again, and a vertex outside on such a path.

    `edges` lead from smaller to larger numbers. Groups that are in each other's way only together are not meant. None
    if there is no such group, or if none is found within a few times the work of reading the edges.
    """
    at = _joined([(position, frozenset(members)) for position, members in enumerate(groups)])
    contracted = [(at.get(source, source), at.get(target, target)) for source, target in edges]
    component = strong_components((source, target) for source, target in contracted if source != target)
    size: dict[int, int] = {}
    for number in component.values():
        size[number] = size.get(number, 0) + 1
    following: dict[int, list[int]] = {}  # within a component that has a cycle
    for (source, target), (one, other) in zip(edges, contracted, strict=True):
        if one == other or (component[one] == component[other] and size[component[one]] > 1):
            following.setdefault(source, []).append(target)
    left = _WALKS * (len(edges) + 1)
    for position, members in enumerate(groups):
        inside, last = frozenset(members), max(members)
        if size.get(component.get(at[members[0]], -1), 1) == 1:
            continue
        work = [target for member in inside for target in following.get(member, ()) if target not in inside]
        seen = set(work)
        while work and left > 0:
            vertex = work.pop()
            for target in following.get(vertex, ()):
                left -= 1
                if target in inside:
                    return position, vertex
                if target < last and target not in seen:
                    seen.add(target)
                    work.append(target)
    return None


def cyclic_groups(edges: Sequence[Edge], groups: Sequence[Sequence[int]]) -> set[int]:
    """Which of the disjoint `groups` (most important first) must not be contracted, as positions in `groups`.

    `edges` is an acyclic graph. The rule is "contract all groups; in every strongly connected component give up the
    least important group; repeat until there is no cycle". Group k falls under it exactly if it lies on a cycle with
    groups 0…k contracted and all of them kept: of its component then, k is the first to be given up; and a component in
    which k is the least important is made of groups up to k. So the question is at which k the components join, which
    halving the groups answers in O(edges · log groups), where doing as the rule says is quadratic.
    """
    given_up: set[int] = set()
    work = [_cyclic_part(edges, [(position, frozenset(members)) for position, members in enumerate(groups)])]
    while work:
        # Invariant: this graph is acyclic while none of its groups is contracted, and all of it is cyclic when all are.
        graph, pending = work.pop()
        if len(pending) < 2:
            given_up.update(position for position, _ in pending)
            continue
        upper, lower = pending[: len(pending) // 2], pending[len(pending) // 2 :]
        at, contracted, component, cyclic = _contract(graph, upper)
        inside: list[Edge] = []
        between: list[Edge] = []
        for edge, (source, target) in zip(graph, contracted, strict=True):
            source_component, target_component = component[source], component[target]
            if source_component != target_component:
                between.append((source_component, target_component))
            elif source_component in cyclic:
                inside.append(edge)
        work.append((inside, [group for group in upper if _lies_in(group, at, component, cyclic)]))
        # From here on each component is one vertex. Members without edges lie on no cycle and drop out.
        condensed: list[_Group] = []
        for position, members in lower:
            vertices = {at.get(member, member) for member in members}
            condensed.append((position, frozenset(component[vertex] for vertex in vertices if vertex in component)))
        given_up.update(position for position, members in condensed if not cyclic.isdisjoint(members))
        work.append(_cyclic_part(between, condensed))
    return given_up


def _contract(
    graph: Sequence[Edge], groups: Sequence[_Group]
) -> tuple[dict[int, int], list[Edge], dict[int, int], set[int]]:
    """Member -> the vertex of its group; the edges then; component of each vertex then; components that are cyclic."""
    at = _joined(groups)
    contracted = [(at.get(source, source), at.get(target, target)) for source, target in graph]
    component = strong_components(contracted)
    once: set[int] = set()
    cyclic: set[int] = set()
    for number in component.values():
        (cyclic if number in once else once).add(number)
    return at, contracted, component, cyclic


def _joined(groups: Sequence[_Group]) -> dict[int, int]:
    """Member -> the vertex that stands for its group, and for all groups that share members with it (union-find)."""
    at: dict[int, int] = {}

    def stands_for(vertex: int) -> int:
        while at[vertex] != vertex:
            at[vertex] = at[at[vertex]]
            vertex = at[vertex]
        return vertex

    for _, members in groups:
        first: int | None = None
        for member in members:
            vertex = stands_for(member) if member in at else at.setdefault(member, member)
            if first is None:
                first = vertex
            at[vertex] = first
    return {member: stands_for(member) for member in at}


def _cyclic_part(graph: Sequence[Edge], groups: Sequence[_Group]) -> tuple[list[Edge], list[_Group]]:
    """What lies on a cycle when all groups are contracted."""
    at, contracted, component, cyclic = _contract(graph, groups)
    inside = [
        edge
        for edge, (source, target) in zip(graph, contracted, strict=True)
        if component[source] == component[target] and component[source] in cyclic
    ]
    return inside, [group for group in groups if _lies_in(group, at, component, cyclic)]


def _lies_in(group: _Group, at: dict[int, int], component: dict[int, int], cyclic: set[int]) -> bool:
    return any(component.get(at[member], -1) in cyclic for member in group[1])


def owner_waves(owner: Sequence[int], successors: Sequence[Sequence[int]], order: Sequence[int]) -> list[list[int]]:
    """Cut an acyclic graph into few blocks of one owner each, in an order in which they can run.

    `order` is a topological order of all vertices. Among owners with ready vertices the one with the longest chain of
    owner changes ahead is drained into one block (ties: more ready vertices, then the smaller owner).

    Invariant: when a block is emitted, every predecessor of its vertices is in it or in an earlier block. So the order
    of emission is a topological order of the quotient graph, which is therefore acyclic, and every block is convex.
    Each list is a topological order of its block.
    """
    changes = [0] * len(owner)  # most owner changes on any path from the vertex to a sink
    waiting = [0] * len(owner)
    for vertex in reversed(order):
        most = 0
        own = owner[vertex]
        for following in successors[vertex]:
            waiting[following] += 1
            ahead = changes[following] + (owner[following] != own)
            if ahead > most:
                most = ahead
        changes[vertex] = most

    owners = max(owner, default=-1) + 1
    ready: list[list[int]] = [[] for _ in range(owners)]
    longest = [-1] * owners  # max of `changes` over `ready`, kept along the way: scanning `ready` would be quadratic
    for vertex in reversed(range(len(owner))):  # a block takes from the end: small vertices first
        if waiting[vertex] == 0:
            ready[owner[vertex]].append(vertex)
            longest[owner[vertex]] = max(longest[owner[vertex]], changes[vertex])

    blocks: list[list[int]] = []
    while True:
        candidates = [candidate for candidate in range(owners) if ready[candidate]]
        if not candidates:
            return blocks
        chosen = max(candidates, key=lambda candidate: (longest[candidate], len(ready[candidate]), -candidate))
        block: list[int] = []
        queue = ready[chosen]
        while queue:
            vertex = queue.pop()
            block.append(vertex)
            for following in reversed(successors[vertex]):
                waiting[following] -= 1
                if waiting[following] == 0:
                    whose = owner[following]
                    ready[whose].append(following)
                    if changes[following] > longest[whose]:
                        longest[whose] = changes[following]
        longest[chosen] = -1
        blocks.append(block)


def last_ancestors(owners: Sequence[int], edges: Iterable[Edge]) -> list[list[int]]:
    """For each vertex and owner the last of its vertices that must come earlier, by any way; -1 for none.

    Vertices are in topological order: `edges` lead from smaller to larger numbers.
    """
    count = 1 + max(owners, default=-1)
    predecessors: list[list[int]] = [[] for _ in owners]
    for before, after in edges:
        predecessors[after].append(before)
    latest = [[-1] * count for _ in owners]
    for vertex, sources in enumerate(predecessors):
        mine = latest[vertex]
        for source in sources:
            for owner, ancestor in enumerate(latest[source]):
                mine[owner] = max(mine[owner], ancestor)
            mine[owners[source]] = max(mine[owners[source]], source)
    return latest


def own_before(owners: Sequence[int], edges: Iterable[Edge]) -> list[int]:
    """For each vertex the last one of the same owner that it waits for, directly or through others; -1 for none.

    Vertices are in topological order: `edges` lead from smaller to larger numbers.
    """
    return [latest[owner] for latest, owner in zip(last_ancestors(owners, edges), owners, strict=True)]
