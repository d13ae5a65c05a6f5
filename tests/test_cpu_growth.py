"""Which extents vary, and how much room they get: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.providers.cpu.growth import (
    CHANGES,
    FREE_ROOM,
    PRIMED,
    REBUILT,
    REPLAYED,
    Entry,
    Growth,
    Signature,
    room,
)

pytestmark = pytest.mark.fast


def shapes(*given: tuple[int, ...]) -> Signature:
    return tuple(Entry(i, "fixed", "<f4", shape) for i, shape in enumerate(given))


def follow(growth: Growth, *signatures: Signature) -> list[str]:
    actions = []
    for signature in signatures:
        actions.append(growth.next(signature))
        growth.done(actions[-1], signature)
    return actions


def test_prime_rebuild_replay_and_a_batch_that_changes() -> None:
    growth = Growth()
    assert follow(growth, shapes((1, 4)), shapes((1, 5)), shapes((1, 6)), shapes((1, 7))) == [
        PRIMED, REBUILT, REPLAYED, REPLAYED,
    ]  # fmt: skip
    assert growth.varying == {(0, 1)}
    assert follow(growth, shapes((2, 7))) == [REBUILT]
    assert growth.varying == {(0, 0), (0, 1)}
    assert follow(growth, shapes((1, 9)), shapes((2, 3))) == [REPLAYED, REPLAYED]


def test_a_prompt_then_tokens() -> None:
    """(ids, past): the query shrinks after the prompt; the first token primes, the second rebuilds."""
    steps = [shapes((1, 10), (1, 0)), shapes((1, 1), (1, 10)), shapes((1, 1), (1, 11)), shapes((1, 1), (1, 12))]
    assert follow(Growth(), *steps, steps[0]) == [PRIMED, PRIMED, REBUILT, REPLAYED, PRIMED]


def test_varying_extents_move_in_either_direction_others_only_grow() -> None:
    growth = Growth()
    assert follow(growth, shapes((3, 4)), shapes((3, 5)), shapes((3, 2)), shapes((2, 2)), shapes((2, 3))) == [
        PRIMED, REBUILT, REPLAYED, PRIMED, REBUILT,
    ]  # fmt: skip
    assert growth.varying == {(0, 1)}


def test_growth_here_and_shrinking_there_is_no_growth() -> None:
    assert follow(Growth(), shapes((3,), (3,)), shapes((4,), (2,))) == [PRIMED, PRIMED]


@pytest.mark.parametrize(
    "other",
    [
        shapes((4, 4, 1)),
        shapes((4, 4), (1,)),
        (Entry(0, "fixed", "<f8", (4, 4)),),
        (Entry(0, "known", "<f4", (4, 4)),),
        (Entry(1, "fixed", "<f4", (4, 4)),),
        (Entry(0, "late", "", None),),
    ],
)
def test_another_form_primes(other: Signature) -> None:
    growth = Growth()
    follow(growth, shapes((4, 3)), shapes((4, 4)))
    assert growth.varying
    assert follow(growth, other) == [PRIMED]
    assert not growth.varying


def test_the_same_shapes_at_other_addresses_are_replayed() -> None:
    assert follow(Growth(), shapes((4, 3)), shapes((4, 3))) == [PRIMED, REPLAYED]


def test_asking_changes_nothing() -> None:
    growth = Growth()
    follow(growth, shapes((4, 3)))
    assert [growth.next(shapes((4, 4))) for _ in range(2)] == [REBUILT, REBUILT]


def test_room_for_many_changes_but_not_for_all() -> None:
    assert room(1000, 0) == 0
    assert room(1000, 8) == CHANGES * 8
    assert room(1000, 1000) == CHANGES * 1000
    assert room(10, FREE_ROOM) == FREE_ROOM
    assert room(4 * FREE_ROOM, FREE_ROOM) == 4 * FREE_ROOM


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_room_is_bounded(nbytes: int, change: int) -> None:
    assert 0 <= room(nbytes, change) <= max(nbytes, FREE_ROOM)
