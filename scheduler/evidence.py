"""What the boards of a generation say about the runs of one slot, taken together: what cannot be, and who began it.

A partition writes the words of its values, then its done word; a reader of it takes their run and their void for its
own. So the first partition, in the order of the plan, whose words cannot be is the one that made them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.providers.wire.messages import START
from outrider.scheduler.generation import Generation
from outrider.shm.board import VOID, BoardReader, number_of, run_of, word
from outrider.shm.errors import LayoutError
from outrider.shm.segment import Segment


def begun(generation: Generation, slot: int) -> int:
    """The last run of a slot that was begun; 0 before the first."""
    return run_of(generation.board.words[generation.board.index(START, slot)])


def first_void(generation: Generation, slot: int, run: int) -> tuple[int, int] | None:
    """(partition, board) of the first one that says that a value of the run will not come; None if none does."""
    for partition, board, words in _said(generation, slot):
        if any(run_of(one) == run and number_of(one) == VOID for one in words):
            return partition, board
    return None


def impossible(generation: Generation, slot: int) -> list[tuple[int, str]]:
    """(board, reason) of the workers whose words cannot be, the one that began it first.

    They tell of a run that nobody has begun, or a run is done and a value of it is not there.
    """
    found: dict[int, str] = {}
    for partition, board, words in _said(generation, slot):
        reason = _reason(generation, slot, words)
        if reason:
            found.setdefault(board, f"partition {partition} {reason}")
    return list(found.items())


def set_right(generation: Generation, board: int) -> int:
    """Take back what a dead worker's board says that cannot be: those values will not come. Returns the last run begun.

    Called before its successor goes on from there, when nobody writes the board.
    """
    segment = Segment(generation.descriptors.boards[board], writable=True)
    reader = generation.sides[board].reader
    for slot in range(generation.blueprint.slots):
        for partition, where, words in _said(generation, slot):
            if where == board and _reason(generation, slot, words):
                run = min(run_of(words[-1]), begun(generation, slot))  # a later one may have begun by now
                for edge in _edges(generation, partition):
                    segment.words[reader.index(edge, slot)] = word(run, VOID)
    return max(begun(generation, slot) for slot in range(generation.blueprint.slots))


def unreadable(generation: Generation, board: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, str, str]]:
    """Take back those values of a dead worker's board that nobody can read: (slot, run, value, reason) of each.

    `runs`: (slot, run) of those in flight. Its successor may give the number of such a layout to another value, and
    whoever reads the old one then would take that for it. Called like `set_right`.
    """
    segment = Segment(generation.descriptors.boards[board], writable=True)
    reader = generation.sides[board].reader
    found = []
    for slot, run in runs:
        for partition in generation.partitions_of[board]:
            edges = _edges(generation, partition)
            reason = next(filter(None, (_misread(reader, edge, slot, run) for edge in edges[:-1])), "")
            if reason:
                found.append((slot, run, f"partition {partition}", reason))
                for edge in edges:
                    segment.words[reader.index(edge, slot)] = word(run, VOID)
    return found


def _misread(reader: BoardReader, edge: int, slot: int, run: int) -> str:
    """Why the value of a run cannot be read; '' if it can, or is not there."""
    published = reader.word(edge, slot)
    if run_of(published) != run or number_of(published) == VOID:
        return ""
    try:
        reader.layout(edge, slot, number_of(published))
    except LayoutError as error:
        return str(error)
    return ""


def _reason(generation: Generation, slot: int, words: list[int]) -> str:
    """What is wrong with the words of a partition, as `_said` gives them; '' if nothing is."""
    runs = [run_of(one) for one in words]
    last = begun(generation, slot)  # read after the words: nobody tells of a run before it is begun
    if max(runs) > last:
        return f"tells of run {max(runs)}, the last one begun is {last}"
    if min(runs) < runs[-1]:
        return f"is done with run {runs[-1]}, and not all that it makes is there"
    return ""


def _edges(generation: Generation, partition: int) -> list[int]:
    """Those of its board whose words a partition writes, its done edge last."""
    outputs = generation.plans[partition].outputs
    return [*(output["edge"] for output in outputs if output["published"]), generation.dones[partition][1]]


def _said(generation: Generation, slot: int) -> Iterator[tuple[int, int, list[int]]]:
    """(partition, board, words: of its values, then of done), producers before consumers."""
    for partition, (board, done) in enumerate(generation.dones):
        read = generation.sides[board].reader.word
        last = read(done, slot)  # first: the values of what is done are there already
        yield partition, board, [*(read(edge, slot) for edge in _edges(generation, partition)[:-1]), last]
