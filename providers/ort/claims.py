"""What an execution provider takes of a graph: a search in questions and answers, without onnxruntime.

Execution providers are asked by building a session, and many answer all or nothing: one operator that they lack and
they take no node. So the whole graph is asked first, then one node of each kind that is left over, alone. A node that
is taken alone is claimed alone: neighbours are compiled together, and cut apart again where that does not work. What
is not taken alone may still be taken in company: the groups of it are asked with the nodes around them that were taken,
and halved while nothing is taken. Those are claimed as the groups that the execution provider made of them, at worst
as it made them of the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

LIMIT = 1000  # questions about one graph
COMPANY = 64  # of those, questions about nodes in company
NOT_TAKEN = "the execution provider does not take it"


@dataclass(frozen=True)
class Item:
    """A node as the search sees it. Equal `kind`s get equal answers alone; `after`: positions that read it."""

    kind: Hashable
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Taken:
    """An answer: the groups of nodes that the execution provider got, each one fused or a single node."""

    groups: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True)
class Raised:
    """An answer: the model could not be built, and why."""

    reason: str


@dataclass
class Found:
    """Nodes claimed alone, groups claimed whole, and why the others are not taken."""

    alone: set[int] = field(default_factory=set)
    groups: list[frozenset[int]] = field(default_factory=list)
    declined: dict[int, str] = field(default_factory=dict)


class Search:
    """Ask `question()`, give the answer to `answer`, until there is none; then `stop` tells what was found.

    `items` makes as many as `count`, when one question is not enough. `left`: why a node is not taken.
    """

    def __init__(self, count: int, items: Callable[[], Sequence[Item]], left: str = NOT_TAKEN) -> None:
        self._count = count
        self._make_items = items
        self._left = left
        self._hopeless: set[int] = set()  # no model with one of them can be built
        self.found = Found()
        self.asked = 0
        self._items: Sequence[Item] = ()
        self._questions = self._steps()
        self._now: tuple[int, ...] | None = next(self._questions, None)
        self._answer: Taken | Raised = Taken()

    def question(self) -> tuple[int, ...] | None:
        """The positions of the nodes to ask about, in order; None when the search is over."""
        return self._now

    def answer(self, answer: Taken | Raised) -> None:
        """What the execution provider takes of the question."""
        self.asked += 1
        self._answer = answer
        self._now = None if self.asked >= LIMIT else next(self._questions, None)

    def stop(self, reason: str) -> Found:
        """No more questions; what was not asked is declined for this reason."""
        self._now = None
        known = self.found.alone.union(*self.found.groups, self.found.declined)
        self.found.declined.update((i, reason) for i in range(self._count) if i not in known)
        return self.found

    def _steps(self) -> Iterator[tuple[int, ...]]:
        everything = tuple(range(self._count))
        if not everything:
            return
        yield everything
        whole = self._answer.groups if isinstance(self._answer, Taken) else ()
        self.found.alone.update(i for group in whole if len(group) == 1 for i in group)
        if len(self.found.alone) == self._count:
            return
        self._items = self._make_items()
        yield from self._kinds()
        yield from self._company()
        for group in whole:
            if any(i in self.found.declined for i in group):
                self._in_company(group)

    def _kinds(self) -> Iterator[tuple[int, ...]]:
        """One node of each kind that is not known to be taken alone."""
        kinds: dict[Hashable, list[int]] = {}
        for i, item in enumerate(self._items):
            if i not in self.found.alone:
                kinds.setdefault(item.kind, []).append(i)
        for same in kinds.values():
            yield (same[0],)
            if isinstance(self._answer, Taken) and any(same[0] in group for group in self._answer.groups):
                self.found.alone.update(same)
            else:
                reason = self._answer.reason if isinstance(self._answer, Raised) else self._left
                self.found.declined.update(dict.fromkeys(same, reason))
                if isinstance(self._answer, Raised):
                    self._hopeless.update(same)

    def _in_company(self, group: frozenset[int]) -> None:
        """A group is claimed whole, if none of it is already; its nodes are not claimed alone as well."""
        if any(group & other for other in self.found.groups):
            return
        self.found.groups.append(group)
        self.found.alone -= group
        for i in group:
            self.found.declined.pop(i, None)

    def _company(self) -> Iterator[tuple[int, ...]]:
        """What was not taken alone, with what is around it."""
        waiting = self._neighbourhoods()
        seen: set[tuple[Hashable, ...]] = set()
        asked = 0
        while waiting and asked < COMPANY:
            nodes = waiting.pop()
            kinds = tuple(self._items[i].kind for i in nodes)
            if len(nodes) < 2 or kinds in seen or not any(i in self.found.declined for i in nodes):
                continue
            asked += 1
            yield nodes
            taken = self._answer.groups if isinstance(self._answer, Taken) else ()
            made = [group for group in taken if len(group) > 1 and any(i in self.found.declined for i in group)]
            for group in made:
                self._in_company(group)
            if not made:
                seen.add(kinds)
                middle = len(nodes) // 2
                waiting += [nodes[:middle], nodes[middle:]]

    def _neighbourhoods(self) -> list[tuple[int, ...]]:
        """Connected pieces of what was declined alone and the nodes next to it."""
        beside: list[set[int]] = [set() for _ in self._items]
        for i, item in enumerate(self._items):
            for j in item.after:
                beside[i].add(j)
                beside[j].add(i)
        open_ = {i for i in self.found.declined if i not in self._hopeless}
        open_ |= {j for i in open_ for j in beside[i] if j in self.found.alone}
        pieces = []
        while open_:
            piece, edge = set(), [min(open_)]
            while edge:
                i = edge.pop()
                if i in open_:
                    open_.discard(i)
                    piece.add(i)
                    edge += beside[i]
            pieces.append(tuple(sorted(piece)))
        return pieces[::-1]
