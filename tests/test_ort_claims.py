"""The search for what an execution provider takes, and the cutting of units, against pretended ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.contract import Node, Unit, Value
from outrider.providers.ort import pieces
from outrider.providers.ort.claims import LIMIT, Found, Item, Raised, Search, Taken

pytestmark = pytest.mark.fast

Answer = Callable[[tuple[int, ...]], Taken | Raised]
CHAIN = {i: (i + 1,) for i in range(100)}


def items(kinds: Sequence[str]) -> list[Item]:
    """A chain of nodes of these kinds."""
    return [Item(kind, CHAIN[i] if i + 1 < len(kinds) else ()) for i, kind in enumerate(kinds)]


def searched(kinds: Sequence[str], answer: Answer) -> tuple[Found, list[tuple[int, ...]]]:
    search = Search(len(kinds), lambda: items(kinds))
    asked = []
    while (question := search.question()) is not None:
        asked.append(question)
        search.answer(answer(question))
    return search.stop("not asked"), asked


@dataclass
class Pretended:
    """An execution provider. `lacks`: kinds it has not; `breaks`: kinds that cannot be built; `pairs`: kinds that it
    takes only right after one another."""

    kinds: Sequence[str]
    lacks: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()
    pairs: tuple[str, str] | None = None
    all_or_nothing: bool = False
    fuses: bool = True
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, question: tuple[int, ...]) -> Taken | Raised:
        self.asked.append(question)
        if any(self.kinds[i] in self.breaks for i in question):
            return Raised("no kernel")
        taken = self.taken(question)
        if self.all_or_nothing and len(taken) < len(question):
            return Taken()
        if self.fuses:
            return Taken((frozenset(taken),) if taken else ())
        return Taken(tuple(frozenset([i]) for i in sorted(taken)))

    def taken(self, question: tuple[int, ...]) -> set[int]:
        if self.pairs is not None:
            first, second = self.pairs
            inside = set(question)
            starts = [i for i in question if i + 1 in inside and (self.kinds[i], self.kinds[i + 1]) == (first, second)]
            return {j for i in starts for j in (i, i + 1)}
        return {i for i in question if self.kinds[i] not in self.lacks}


KINDS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=30)
SOME = st.frozensets(st.sampled_from("abcde"))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(KINDS, SOME, SOME, st.booleans(), st.booleans())
def test_what_is_taken_alone_is_claimed_alone(
    kinds: list[str], lacks: frozenset[str], breaks: frozenset[str], all_or_nothing: bool, fuses: bool
) -> None:
    ep = Pretended(kinds, lacks, breaks, None, all_or_nothing, fuses)
    found, asked = searched(kinds, ep)
    assert found.alone == {i for i, kind in enumerate(kinds) if kind not in lacks | breaks}
    assert found.groups == []
    assert set(found.declined) == set(range(len(kinds))) - found.alone
    assert all(
        found.declined[i] == "no kernel" for i, kind in enumerate(kinds) if kind in breaks and i in found.declined
    )
    assert len(asked) <= LIMIT


@settings(deadline=None, derandomize=True, max_examples=200)
@given(KINDS, st.booleans())
def test_what_is_taken_in_company_only_is_claimed_so(kinds: list[str], all_or_nothing: bool) -> None:
    ep = Pretended(kinds, pairs=("a", "b"), all_or_nothing=all_or_nothing)
    found, _ = searched(kinds, ep)
    assert found.alone == set()
    claimed = set().union(*found.groups)
    assert sum(map(len, found.groups)) == len(claimed)  # no node twice
    assert claimed <= ep.taken(tuple(range(len(kinds))))
    if not all_or_nothing:
        assert claimed == ep.taken(tuple(range(len(kinds))))
    assert claimed | set(found.declined) == set(range(len(kinds)))
    for group in found.groups:  # as it was answered
        assert isinstance(ep(tuple(sorted(group))), Taken)
        assert ep.taken(tuple(sorted(group))) == group


def test_a_pair_among_what_is_lacking_is_found_by_halving() -> None:
    found, asked = searched("xxxabxxxxx", Pretended("xxxabxxxxx", pairs=("a", "b"), all_or_nothing=True))
    assert found.groups == [frozenset({3, 4})]
    assert len(asked) < 30


def test_a_pair_that_halving_cuts_is_declined() -> None:
    found, _ = searched("xxxxabxxxx", Pretended("xxxxabxxxx", pairs=("a", "b"), all_or_nothing=True))
    assert found.groups == [] and set(found.declined) == set(range(10))


def test_equal_kinds_are_asked_once() -> None:
    ep = Pretended("ab" * 40, lacks=frozenset("b"), all_or_nothing=True)
    found, asked = searched("ab" * 40, ep)
    assert found.alone == set(range(0, 80, 2))
    assert [question for question in asked if len(question) == 1] == [(0,), (1,)]


def test_one_question_is_enough_where_each_node_is_told_for_itself() -> None:
    found, asked = searched("abab", Pretended("abab", fuses=False))
    assert (found.alone, asked) == ({0, 1, 2, 3}, [(0, 1, 2, 3)])


def test_a_search_that_is_stopped_declines_what_it_has_not_asked() -> None:
    search = Search(3, lambda: items("abc"))
    search.answer(Taken())
    search.answer(Taken((frozenset([0]),)))
    found = search.stop("no time")
    assert found.alone == {0}
    assert found.declined == {1: "no time", 2: "no time"}
    assert search.question() is None


def test_nothing_is_asked_about_nothing() -> None:
    assert Search(0, list).question() is None


# Units in pieces -----------------------------------------------------------------------------------------------------
def chain(length: int) -> Unit:
    values = [Value(f"v{i}", "float32", (2,)) for i in range(length + 1)]
    nodes = tuple(
        Node(i, f"n{i}", "Relu", "", 17, {}, (values[i],), (values[i + 1],)) for i in range(length)
    )  # fmt: skip
    return Unit(nodes, (values[0],), (values[-1],), {})


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(1, 20), st.sets(st.integers(0, 19)), st.sets(st.integers(0, 19)), st.integers(1, 20))
def test_pieces_run_every_node_once_in_order(length: int, lacking: set[int], breaking: set[int], most: int) -> None:
    unit = chain(length)
    built = []

    def attempt(
        nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> tuple[object, frozenset[str]]:
        if any(node.index in breaking for node in nodes):
            raise RuntimeError("does not build")
        left = {node.name for node in nodes if node.index in lacking}
        if len(nodes) > most:
            left = {node.name for node in nodes}
        made = (tuple(node.index for node in nodes), [one.name for one in inputs], [one.name for one in outputs])
        if not left:
            built.append(made)
        return made, frozenset(left)

    found = pieces.cut(unit, attempt, str)  # type: ignore[arg-type]
    refused = {i for i in range(length) if i in lacking | breaking}
    assert set(found.refused) == {f"n{i}" for i in refused}
    assert all(found.refused[f"n{i}"] == "does not build" for i in refused & breaking)
    assert all(found.refused[f"n{i}"] == pieces.LEFT for i in refused - breaking)
    ran = [i for indices, _, _ in found.built for i in indices]
    assert ran == sorted(set(range(length)) - refused)
    for indices, inputs, outputs in found.built:
        assert inputs == [f"v{indices[0]}"]
        assert outputs == [f"v{indices[-1] + 1}"]


def test_short_memory_is_no_reason_to_try_smaller_pieces() -> None:
    tried = []

    def attempt(nodes: Sequence[Node], *_: object) -> tuple[object, frozenset[str]]:
        tried.append(len(nodes))
        raise MemoryError("too large")

    with pytest.raises(MemoryError):
        pieces.cut(chain(5), attempt, str)  # type: ignore[arg-type]
    assert tried == [5]
