"""Runs: the calling thread writes the inputs and their words, rings the first workers, blocks on its slot's doorbell.

No message, descriptor, dispatcher or Future takes part in a run that goes well. The monitor's thread comes in only when
a partition failed or a worker died: the replica notes that and rings the slots' doorbells.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.wire import values
from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, numpy_dtype, onnx_name
from outrider.providers.wire.spans import Recorder
from outrider.scheduler.deploy import START, Generation
from outrider.scheduler.replica import Copies, Input, Replica, Slot
from outrider.scheduler.slots import Slots
from outrider.scheduler.steady import Signature, SteadyRun
from outrider.shm.board import ENCODED, NONE, VOID, number_of, run_of


class Runner:
    """The data plane of a session. A run takes one of the slots; slots of all replicas stand in one queue.

        slot = runner.slots.take()
        try:
            run = runner.begin(slot, feeds, defaults, signature)
            results = runner.finish_steadily(slot, run)
            if results is None:
                results = runner.finish(slot, run, wanted, signature)
        finally:
            runner.slots.give(slot)

    Both raise KernelError, ProviderContractError, OutOfMemoryError, WorkerDiedError, SessionClosedError.
    """

    def __init__(self, replicas: Sequence[Replica], queue_size: int | None = None, reject: bool = False) -> None:
        self.replicas = tuple(replicas)
        slots = [slot for replica in replicas for slot in replica.slots]
        spread = (lambda slot: slot.replica) if len(replicas) > 1 else None  # runs in flight over the replicas
        self.slots: Slots[Slot] = Slots(slots, queue_size, reject, spread)
        self.recorder: Recorder | None = None  # of the session's trace
        self._runs = itertools.count(1)

    def counters(self) -> Copies:
        """Runs that ended well, and the copies made for them in this process."""
        total = Copies()
        for slot in self.slots.items:
            total.runs += slot.counters.runs
            total.copies += slot.counters.copies
            total.copied_bytes += slot.counters.copied_bytes
        return total

    def begin(
        self, slot: Slot, feeds: Mapping[str, Any], defaults: Mapping[str, Any], signature: Signature | None
    ) -> int:
        """Start a run on checked feeds in a slot that the caller has taken; returns its number.

        `defaults`: initializers of inputs that were not fed. `signature`: of the feed, if it has one.
        """
        replica = slot.replica
        if replica.ended:
            replica.check()
        if slot.pending:
            self._drain(slot)
        generation = replica.generation
        assert generation is not None
        run = next(self._runs)
        for leases in generation.leases:
            leases.sweep()  # results that were dropped make room for this run's
        steady = slot.steady
        if steady is not None and steady.signature is signature and steady.generation is generation:
            slot.words = steady.words
            slot.feeds = feeds
            slot.pending = run
            steady.start(feeds, run)
            slot.counters.add(steady.nbytes, steady.copies)
            return run
        slot.steady = None
        slot.words = [
            (edge, self._write(generation, slot, name, edge, feeds, defaults))
            for name, edge in generation.inputs.items()
        ]
        slot.feeds = feeds
        slot.pending = run
        self._start(generation, slot)
        return run

    def finish_steadily(self, slot: Slot, run: int) -> list[Any] | None:
        """Wait for a run that has begun; all outputs in order if it went like the last one of its slot, else None."""
        steady = slot.steady
        if steady is None or not steady.complete or self._wait_steadily(slot, steady, run):
            return None
        results = steady.results(run)
        if results is not None:
            slot.pending = 0
            slot.feeds = None
            slot.counters.runs += 1
            slot.counters.add(steady.returned_bytes, len(results))
        return results

    def wait(self, slot: Slot, run: int) -> None:
        """Wait for a run that has begun, to `finish` it later as `waited`. Raises what a wait can raise there."""
        self._wait(slot, run)

    def finish(
        self, slot: Slot, run: int, wanted: Sequence[str], signature: Signature | None, waited: bool = False
    ) -> dict[str, Any]:
        """Wait for a run that has begun; those model outputs of `wanted` that workers make, by name."""
        replica = slot.replica
        generation = replica.generation
        assert generation is not None
        steady = slot.steady
        waited = waited or (steady is not None and steady.complete)  # in `finish_steadily`
        failed = self._wait(slot, run) if waited or steady is None else self._wait_steadily(slot, steady, run)
        slot.pending = 0
        if failed:
            slot.feeds = None
            self._release_results(generation, slot.index, run, ())
            raise replica.story(run)
        results: dict[str, Any] = {}
        made = generation.outputs
        computed = [name for name in dict.fromkeys(wanted) if name in made]
        try:
            for name in computed:
                result = None if steady is None else steady.result(name, run)
                if result is None:
                    result = self._read(generation, slot, *made[name])
                else:
                    slot.counters.add(result.nbytes)
                results[name] = result
        finally:
            if len(results) < len(made):
                kept = computed[: len(results) + 1]  # with the one whose reading failed, if any: it may be leased
                self._release_results(generation, slot.index, run, [made[name] for name in kept])
        slot.counters.runs += 1
        if steady is None and signature is not None:
            assert slot.feeds is not None
            slot.steady = self._steady(generation, slot, slot.feeds, signature, wanted)
        slot.feeds = None
        return results

    def _steady(
        self,
        generation: Generation,
        slot: Slot,
        feeds: Mapping[str, Any],
        signature: Signature,
        wanted: Sequence[str],
    ) -> SteadyRun | None:
        """What the run that has just ended can be repeated by; None if an input has no place of its own."""
        places = {name: slot.inputs[name].array for name in feeds if name in slot.inputs}
        if any(name in generation.inputs and name not in places for name in feeds):
            return None
        fed = {name: place for name, place in places.items() if name in generation.inputs}
        steady = SteadyRun(signature, generation, slot.index, fed, slot.words)
        steady.learn(slot.index, wanted)
        return steady

    def _wait_steadily(self, slot: Slot, steady: SteadyRun, run: int) -> bool:
        """`_wait`, with nothing to look up. Only for a run that nobody has waited for: its rings are still to come."""
        bell, replica = slot.bell.fileno(), slot.replica
        void = slot.spin.until(lambda: steady.ended(run)) if slot.spin.wanted else None
        if void is not None:
            return void
        while True:
            os.read(bell, 8)
            void = steady.ended(run)
            if void is not None:
                return void
            if replica.ended:
                return self._wait(slot, run)  # tells the story

    def _start(self, generation: Generation, slot: Slot) -> None:
        """Publish the words of the slot's pending run and ring. To do so again changes nothing."""
        board = generation.board
        board.publish(START, slot.index, slot.pending, 1)
        for edge, number in slot.words:
            board.publish(edge, slot.index, slot.pending, number)
        for bell in generation.first_bells:
            bell.ring()

    def _drain(self, slot: Slot) -> None:
        """See a run to its end whose caller has left, at whatever moment that was, and give its results back."""
        generation = slot.replica.generation
        assert generation is not None
        self._start(generation, slot)
        self._wait(slot, slot.pending)
        run, slot.pending, slot.feeds = slot.pending, 0, None
        self._release_results(generation, slot.index, run, ())

    def _write(
        self,
        generation: Generation,
        slot: Slot,
        name: str,
        edge: int,
        feeds: Mapping[str, Any],
        defaults: Mapping[str, Any],
    ) -> int:
        """Copy one input to its place; returns the layout number."""
        places = generation.places
        default = name not in feeds
        value = defaults[name] if default else feeds[name]
        if value is None:
            slot.inputs.pop(name, None)
            return places.nothing(edge, slot.index)
        if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
            slot.inputs.pop(name, None)
            chunks = values.encode(value)
            target, number = places.blob(edge, slot.index, values.size(chunks), name)
            at = 0
            for chunk in chunks:
                target[at : at + len(chunk)] = chunk
                at += len(chunk)
            slot.counters.add(at)
            return number
        held = slot.inputs.get(name)
        if held is None or held.shape != value.shape or held.dtype != value.dtype:
            code = NUMBER[onnx_name(value.dtype)]
            array, number = places.tensor(edge, slot.index, code, value.dtype, value.shape, name)
            held = slot.inputs[name] = Input(value.dtype, value.shape, array, number, False)
        if not (default and held.default):
            np.copyto(held.array, value)
            held.default = default
            slot.counters.add(value.nbytes)
        return held.number

    def _wait(self, slot: Slot, run: int) -> bool:
        """Block until every last partition is done with `run`; True if one of them is void."""
        replica = slot.replica
        generation = replica.generation
        assert generation is not None
        lasts = [(generation.sides[board].reader.word, edge) for board, edge in generation.lasts]
        while True:
            failed = False
            for read, edge in lasts:
                word = read(edge, slot.index)
                if run_of(word) != run:
                    break
                failed = failed or number_of(word) == VOID
            else:
                return failed
            if replica.death is not None:
                raise replica.died(slot, run, replica.death)
            replica.check()
            slot.bell.wait()

    def _read(self, generation: Generation, slot: Slot, board: int, edge: int) -> Any:
        """A result of the caller's own: copied, or leased from the worker's output pool."""
        side = generation.sides[board]
        layout = side.reader.layout(edge, slot.index, number_of(side.reader.word(edge, slot.index)))
        if layout.kind == NONE:
            return None
        segment = side.reader.segment
        if layout.kind == ENCODED:
            slot.counters.add(layout.nbytes)
            return values.decode(segment.view[layout.offset : layout.offset + layout.nbytes])
        if layout.block is not None:
            return side.leases.lease(layout, numpy_dtype(BY_NUMBER[layout.dtype]))
        slot.counters.add(layout.nbytes)
        return generation.result(board, layout).copy()

    def _release_results(self, generation: Generation, slot: int, run: int, kept: Sequence[tuple[int, int]]) -> None:
        """Give back the output blocks that nobody will read."""
        for board, edge in generation.results:
            side = generation.sides[board]
            word = side.reader.word(edge, slot)
            if (board, edge) in kept or run_of(word) != run or number_of(word) == VOID:
                continue
            block = side.reader.layout(edge, slot, number_of(word)).block
            if block is not None:
                side.leases.release_now(block)
