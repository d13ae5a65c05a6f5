"""strategy="cost": islands that do not earn their hop go to another claimant.

An island is a partition of the plan by priority, or a connected piece of one. Its owner *saves* the seconds by which it
is faster than the claimant next to it; the island *costs* the hops into and out of it, and a copy of every byte that
crosses only because of it. An island that saves less than it costs goes to the claimant for which the difference is
largest. It goes as whole claims of both sides, never with a pinned node, never by a cost that is a lower bound.
Providers that tell no cost of their own are taken to be equally fast. Time is summed as if partitions ran one after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.scheduler.costs import Costs
from outrider.scheduler.planning import Offer, Plan, PlanNode

ATTEMPTS = 3
SWEEPS = 3  # over all islands: what moved in one makes neighbours for the next

Make = Callable[[Collection[int]], Plan]  # preferred offers -> plan


@dataclass(frozen=True)
class Move:
    """Nodes (positions) that went from one provider to another by `offers` of the latter, and why.

    `saved`: seconds by which the source was faster; `hops`, `nbytes`: partitions and crossing bytes that end with it.
    """

    nodes: tuple[int, ...]
    source: int
    target: int
    offers: tuple[int, ...]
    saved: float
    hops: int
    nbytes: int

    def gain(self, costs: Costs) -> float:
        """Seconds that a run takes less."""
        return self.hops * costs.crossing.hop + self.nbytes * costs.crossing.byte - self.saved


def plan_by_cost(
    make: Make, nodes: Sequence[PlanNode], offers: Sequence[Offer], pinned: Collection[int], costs: Costs
) -> tuple[Plan, list[Move]]:
    """The plan by priority with its islands moved, and the moves; without any if they would not make it cheaper.

    `make` plans with offers preferred; `pinned` are positions of nodes.
    """
    made = make(())
    if len(made.partitions) < 2 and all(offer.cost is None for offer in offers):
        return made, []  # no hop to save, and nobody is faster
    held = set(pinned)
    for _ in range(ATTEMPTS):
        islands = _Islands(made, nodes, offers, held, costs)
        before = islands.seconds(len(made.partitions))
        moves = [move for _ in range(SWEEPS) for move in islands.sweep()]
        if not moves:
            break
        better = make({offer for offer in islands.used if offer >= 0})
        astray = [
            position
            for position, node in enumerate(nodes)
            if not node.constant and better.owner[position] != islands.owner[position]
        ]
        if not astray:  # else some claims would wait for each other where they are now
            if islands.seconds(len(better.partitions)) >= before:
                break
            return better, _final(moves, made, better)
        held.update(astray)
        held.update(position for drop in better.dropped for position in drop.offer.nodes)
    return made, []


def _final(moves: Sequence[Move], made: Plan, better: Plan) -> list[Move]:
    """The moves that say where nodes are now; some have moved again, or back."""
    return [
        move
        for move in moves
        if any(made.owner[position] != better.owner[position] == move.target for position in move.nodes)
    ]


class _Islands:
    """The islands of a plan while they move: owners of nodes, and the blocks (partitions) that they form."""

    def __init__(
        self, made: Plan, nodes: Sequence[PlanNode], offers: Sequence[Offer], pinned: Collection[int], costs: Costs
    ) -> None:
        self.nodes = nodes
        self.offers = offers
        self.costs = costs
        self.owner = list(made.owner)
        self.used = [-1] * len(nodes)  # the offer by which a node runs
        self.fixed = bytearray(len(nodes))
        for position in pinned:
            self.fixed[position] = True
        self.block_of = [-1] * len(nodes)
        self.blocks: list[list[int]] = []
        for number, partition in enumerate(made.partitions):
            self.blocks.append([])
            for unit in partition.units:
                for claim in made.units[unit].claims:
                    for position in offers[claim].nodes:
                        self.used[position] = claim
                for position in made.units[unit].nodes:
                    self.block_of[position] = number
                    self.blocks[number].append(position)
                    self.fixed[position] |= nodes[position].constant  # made where it is needed
        self.joined = list(range(len(self.blocks)))  # union-find: blocks that have become one
        self.size = [len(block) for block in self.blocks]
        # Per provider, the offer that holds a node: the claimants.
        self.offered: dict[int, dict[int, int]] = {}
        for number, offer in enumerate(offers):
            mine = self.offered.setdefault(offer.provider, {})
            for position in offer.nodes:
                mine[position] = number
        self.maker: dict[str, int] = {}  # value -> the node that makes it
        self.readers: dict[str, list[int]] = {}
        self.flows: dict[str, dict[int, int]] = {}  # value -> owner -> how many of its nodes read it
        self.reads: list[list[tuple[str, int]]] = []  # of each node: values and their makers
        for position, node in enumerate(nodes):
            own = self.owner[position]
            read = []
            for value in dict.fromkeys(node.inputs):
                maker = self.maker.get(value)
                if maker is not None:
                    read.append((value, maker))
                    self.readers[value].append(position)
                    if own is not None:
                        counts = self.flows[value]
                        counts[own] = counts.get(own, 0) + 1
            self.reads.append(read)
            for value in node.outputs:
                self.maker[value] = position
                self.readers[value] = []
                self.flows[value] = {}

    def seconds(self, partitions: int) -> float:
        """Seconds of one run in so many partitions, one after the other, with nodes where they are now."""
        costs = self.costs
        found = partitions * costs.crossing.hop
        for position, claim in enumerate(self.used):
            if claim >= 0 and self.offers[claim].cost is None and not self.nodes[position].constant:
                found += costs.nodes[position].seconds
        found += sum(self.offers[claim].cost or 0.0 for claim in set(self.used) if claim >= 0)
        for value, counts in self.flows.items():
            owner = self.owner[self.maker[value]]
            if owner is not None and counts:
                found += costs.nbytes.get(value, 0) * costs.crossing.byte * (len(counts) - (owner in counts))
        return found

    def sweep(self) -> Iterator[Move]:
        """Look at every island once, the cheapest first, and move those that do not earn their hop."""
        seconds = [sum(self.costs.nodes[position].seconds for position in block) for block in self.blocks]
        for number in sorted(range(len(self.blocks)), key=lambda one: (seconds[one], one)):
            here = [position for position in self.blocks[number] if self._root(self.block_of[position]) == number]
            if not here or self._root(number) != number or len(here) < self.size[number]:
                continue  # it has become part of another block, or others of it
            move = self._best(here, whole=True)
            if move is not None:
                yield self._moved(move)
                continue
            pieces = self._pieces(here)
            for piece in pieces if len(pieces) > 1 else ():
                move = self._best(piece, whole=False)
                if move is not None:
                    yield self._moved(move)

    def _root(self, block: int) -> int:
        while self.joined[block] != block:
            self.joined[block] = self.joined[self.joined[block]]
            block = self.joined[block]
        return block

    def _pieces(self, members: Sequence[int]) -> list[list[int]]:
        """Connected pieces of a block, whole claims: by the first node, each in order."""
        top = {position: position for position in members}

        def root(position: int) -> int:
            while top[position] != position:
                top[position] = top[top[position]]
                position = top[position]
            return position

        first_of: dict[int, int] = {}  # claim -> its first node here
        for position in members:
            together = first_of.setdefault(self.used[position], position) if self.used[position] >= 0 else position
            for other in (together, *(maker for _, maker in self.reads[position])):
                if other in top:
                    low, high = sorted((root(position), root(other)))
                    top[high] = low
        found: dict[int, list[int]] = {}
        for position in members:
            found.setdefault(root(position), []).append(position)
        return [found[first] for first in sorted(found)]

    def _best(self, members: Sequence[int], whole: bool) -> Move | None:
        """The move of these nodes, all of one owner, that gains most; None if none gains anything. `whole`: a block."""
        source = self.owner[members[0]]
        if source is None or any(self.fixed[position] for position in members):
            return None
        inside = set(members)
        own = list(dict.fromkeys(self.used[position] for position in members))
        own_seconds = self._seconds(own, inside)
        if own_seconds is None:
            return None
        around = self._around(members)
        best: Move | None = None
        for target in sorted(self.offered):
            near = len(around.get(target, ()))
            if target == source or not (whole or near):
                continue
            claims = list(dict.fromkeys(self.offered[target].get(position, -1) for position in members))
            seconds = self._seconds(claims, inside)
            if seconds is None:
                continue
            hops = min(2, near) if whole else 0
            nbytes = self._crossing(members, inside, source, target)
            move = Move(tuple(members), source, target, tuple(claims), seconds - own_seconds, hops, nbytes)
            gain = move.gain(self.costs)
            if gain > 0 and (best is None or gain > best.gain(self.costs)):
                best = move
        return best

    def _seconds(self, claims: Sequence[int], inside: set[int]) -> float | None:
        """Seconds of these claims; None if one is not wholly inside, or its cost is a lower bound."""
        seconds = 0.0
        for claim in claims:
            if claim < 0:
                return None
            offer = self.offers[claim]
            running = [position for position in offer.nodes if not self.nodes[position].constant]
            if any(position not in inside for position in running):
                return None
            if offer.cost is not None:
                seconds += offer.cost
                continue
            for position in running:
                cost = self.costs.nodes[position]
                if not cost.exact:
                    return None
                seconds += cost.seconds
        return seconds

    def _around(self, members: Sequence[int]) -> dict[int, set[int]]:
        """Owner -> its blocks next to these nodes."""
        found: dict[int, set[int]] = {}
        for position in members:
            near = [maker for _, maker in self.reads[position]]
            for value in self.nodes[position].outputs:
                near += self.readers.get(value, ())
            for other in near:
                owner = self.owner[other]
                if owner is not None:
                    found.setdefault(owner, set()).add(self._root(self.block_of[other]))
        return found

    def _crossing(self, members: Sequence[int], inside: set[int], source: int, target: int) -> int:
        """Bytes that cross less when these nodes go from `source` to `target`; negative if more."""
        read: dict[str, tuple[int, int]] = {}  # value made elsewhere -> (its maker, how many of the members read it)
        less = 0
        for position in members:
            for value, maker in self.reads[position]:
                if maker not in inside:
                    read[value] = (maker, read.get(value, (0, 0))[1] + 1)
            for value in self.nodes[position].outputs:
                counts = self.flows[value]
                after = _shifted(counts, source, target, sum(one in inside for one in self.readers.get(value, ())))
                less += self.costs.nbytes.get(value, 0) * (len(counts.keys() - {source}) - len(after - {target}))
        for value, (maker, count) in read.items():
            owner = self.owner[maker]
            if owner is not None:
                counts = self.flows[value]
                after = _shifted(counts, source, target, count)
                less += self.costs.nbytes.get(value, 0) * (len(counts.keys() - {owner}) - len(after - {owner}))
        return less

    def _moved(self, move: Move) -> Move:
        source, target = move.source, move.target
        for position in move.nodes:
            for value, _ in self.reads[position]:
                counts = self.flows[value]
                counts[source] -= 1
                if not counts[source]:
                    del counts[source]
                counts[target] = counts.get(target, 0) + 1
        near = sorted(self._around(move.nodes).get(target, ()))
        home = near[0] if near else self._root(self.block_of[move.nodes[0]])
        for claim in move.offers:
            for position in self.offers[claim].nodes:
                self.used[position] = claim
        for position in move.nodes:
            old = self._root(self.block_of[position])
            self.size[old] -= 1
            self.size[home] += 1
            self.owner[position] = target
            self.block_of[position] = home
        for other in near[1:]:
            self.joined[other] = home
            self.size[home] += self.size[other]
        return move


def _shifted(counts: Mapping[int, int], source: int, target: int, moved: int) -> set[int]:
    """The owners that read a value after `moved` of its readers went from `source` to `target`."""
    after = set(counts)
    if moved:
        after.add(target)
        if counts.get(source, 0) == moved:
            after.discard(source)
    return after
