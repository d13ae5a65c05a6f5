"""What follows when a worker has told what cannot be: the error that names it, and its end.

Who spoils its own board once may have spoilt it for good, so the process is ended; its successor goes on from what is
left when that was set right (`evidence.py`). Called by who runs, and for `look` by the monitor.
"""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

from outrider.providers.contract import ProviderContractError
from outrider.providers.wire import values
from outrider.providers.wire.declared import value_misfit
from outrider.providers.wire.errors import BrokenEdgeError, WireError
from outrider.providers.wire.messages import CANCEL
from outrider.scheduler.evidence import impossible
from outrider.shm.board import ENCODED, VOID, number_of, run_of
from outrider.shm.errors import LayoutError

if TYPE_CHECKING:
    from outrider.scheduler.replica import Replica, Slot

END_SECONDS = 5.0  # for a process that was killed to be gone


def broken(replica: Replica, board: int, value: str, reason: str) -> ProviderContractError:
    """What to raise when a worker's board says of a value what cannot be.

    The worker is gone when this returns, so that the caller's next run does not meet its end.
    """
    generation = replica.generation
    assert generation is not None
    one = generation.sides[board].serving
    _end(replica, board, f"it broke the protocol: {value}: {reason}")
    concurrent.futures.wait([one.ended], END_SECONDS)
    return misread(one.worker.name, value, reason)


def misread(provider: str, value: str, reason: str) -> ProviderContractError:
    """What to raise for a value that cannot be what its worker, which has ended, told of it."""
    return ProviderContractError(
        f"provider {provider} broke its contract and was ended: what it told of {value!r} cannot be: {reason}",
        provider=provider,
        node=value,
        expected="a value as declared, in memory of its own",
        got=reason,
    )


def broken_edge(replica: Replica, slot: Slot, run: int, teller: int, told: BrokenEdgeError) -> ProviderContractError:
    """A worker, `teller`, could not read what another wrote. That one is blamed if it is so, else who says it."""
    generation = replica.generation
    assert generation is not None
    side = generation.sides.get(told.board) if type(told.board) is int else None
    declared = side.declared.edges.get(told.edge) if side is not None and type(told.edge) is int else None
    if side is None or declared is None:
        return broken(replica, teller, str(told.value), "it is said to come from where nothing does")
    if told.board in generation.spoilt or run <= generation.righted.get(told.board, 0):
        # It was ended for another run meanwhile, and what there was to see may have been set right.
        return misread(side.worker.name, declared.name, str(told.reason))
    published = side.reader.word(told.edge, slot.index)
    if run_of(published) != run or number_of(published) == VOID:
        return broken(replica, teller, declared.name, "it was not there to be read")
    try:
        layout = side.reader.layout(told.edge, slot.index, number_of(published))
        if layout.kind == ENCODED:
            value = values.decode(side.reader.memory_of(layout).view[layout.offset :][: layout.nbytes])
            reason = value_misfit(declared, value)
        else:
            reason = ""
    except (LayoutError, WireError) as error:
        reason = str(error)
    if reason:
        return broken(replica, told.board, declared.name, reason)
    return broken(replica, teller, declared.name, f"it is well-formed, and yet: {told.reason}")


def look(replica: Replica) -> None:
    """Whether a worker says of a run in flight what cannot be: such a run ends, and nobody waits for it in vain."""
    for slot in replica.slots:
        if slot.pending:
            accuse(replica, slot)


def accuse(replica: Replica, slot: Slot, awaited: bool = True) -> None:
    """End the slot's run if a word of it cannot be, with the error that names who made it up, and that worker.

    Those whom it misled are ended too, and nobody blames them. `awaited`: the run's caller is there to be told.
    """
    generation = replica.generation
    if generation is None:
        return
    run, found = slot.pending, impossible(generation, slot.index)
    found = [(board, reason) for board, reason in found if board not in generation.spoilt]  # else it is ended already
    if not found:
        return
    board, reason = found[0]
    name = generation.sides[board].worker.name
    error = ProviderContractError(
        f"provider {name} broke its contract and was ended: {reason}",
        provider=name,
        expected="words of runs that have begun, each after what it announces",
        got=reason,
    )
    cancel = generation.board.words[generation.board.index(CANCEL, slot.index)]
    if awaited and run_of(cancel) != run:
        replica.end(slot.index, run, error)
    for position, (one, why) in enumerate(found):
        _end(replica, one, f"it broke the protocol: {why}", spared=position > 0)


def _end(replica: Replica, board: int, reason: str, spared: bool = False) -> None:
    generation = replica.generation
    assert generation is not None
    generation.spoilt.add(board)
    replica.deployer.fleet.monitor.kill(generation.sides[board].serving, reason, spared)
