"""What the boards of a generation say about one run, taken together: who waits for whom, and who tells what cannot be.

A partition writes the words of its values, then its done word; a reader of it takes their run and their void for its
own. So the first partition, in the order of the plan, whose words cannot be is the one that made them up.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.providers.wire.messages import START
from outrider.scheduler.generation import Generation
from outrider.shm.board import VOID, number_of, run_of


def begun(generation: Generation, slot: int) -> int:
    """The last run of a slot that was begun; 0 before the first."""
    return run_of(generation.board.words[generation.board.index(START, slot)])


def first_void(generation: Generation, slot: int, run: int) -> tuple[int, int] | None:
    """(partition, board) of the first one that says that a value of the run will not come; None if none does."""
    for partition, board, words in _said(generation, slot):
        if any(run_of(word) == run and number_of(word) == VOID for word in words):
            return partition, board
    return None


def first_impossible(generation: Generation, slot: int, run: int) -> tuple[int, str] | None:
    """(board, reason) of the first partition whose words cannot be while `run` is the last one begun.

    They tell of a later run, or the run is done and a value of it is not there. None if all may yet go well.
    """
    for partition, board, words in _said(generation, slot):
        runs = [run_of(word) for word in words]
        if max(runs) > run:
            return board, f"partition {partition} tells of run {max(runs)}, the last one begun is {run}"
        if runs[-1] == run and min(runs) < run:
            return board, f"partition {partition} is done with run {run}, and not all that it makes is there"
    return None


def _said(generation: Generation, slot: int) -> Iterator[tuple[int, int, list[int]]]:
    """(partition, board, words: of its values, then of done), producers before consumers."""
    for partition, ((board, done), edges) in enumerate(zip(generation.dones, generation.edges_of, strict=True)):
        read = generation.sides[board].reader.word
        last = read(done, slot)  # first: the values of what is done are there already
        yield partition, board, [*(read(edge, slot) for edge in edges), last]
