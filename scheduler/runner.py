"""Runs: the calling thread writes the inputs and their words, rings the first workers, blocks on its slot's doorbell.

No message, descriptor, dispatcher or Future takes part in a run that goes well. The monitor's thread comes in only when
a partition failed or a worker died: it notes that and rings the slots' doorbells.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.providers.wire import messages, values
from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, numpy_dtype, onnx_name
from outrider.providers.wire.failures import first_names
from outrider.scheduler.deploy import Generation
from outrider.scheduler.errors import SessionClosedError, WorkerDiedError
from outrider.scheduler.failures import error_of
from outrider.scheduler.monitor import Worker
from outrider.scheduler.slots import Slots
from outrider.scheduler.steady import Signature, SteadyRun
from outrider.shm.board import ENCODED, NONE, VOID, number_of, run_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import OutriderError

FAILURE_SECONDS = 30.0  # between a void word and the message that explains it


@dataclass
class Input:
    """A model input in one slot: the place of its last layout."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: np.ndarray[Any, Any]
    number: int
    epoch: int
    default: bool  # it holds the model's own initializer


@dataclass
class Slot:
    """A run slot: one run at a time. `pending`: a run whose caller left before it ended, `words`: what starts it."""

    index: int
    bell: Doorbell
    inputs: dict[str, Input] = field(default_factory=dict)
    pending: int = 0
    words: Sequence[tuple[int, int]] = ()  # (edge of board 0, layout number)
    steady: SteadyRun | None = None


@dataclass
class Copies:
    """Copies made by the coordinator."""

    runs: int = 0
    copies: int = 0
    copied_bytes: int = 0


class Runner:
    """The data plane of a session. `run` may be called from any thread; it takes one of the slots."""

    def __init__(self, slot_bells: Sequence[Doorbell]) -> None:
        self.slots = Slots([Slot(i, bell) for i, bell in enumerate(slot_bells)])
        self.counters = Copies()
        self.generation: Generation | None = None
        self.death: WorkerDiedError | None = None  # of a worker of the present generation
        self.closed = False
        self._runs = itertools.count(1)
        self._failures: dict[int, OutriderError] = {}
        self._failed = threading.Condition()

    # Told by the monitor's thread -----------------------------------------------------------------------------------
    def on_failed(self, message: messages.Failed) -> None:
        """A partition failed: keep the first story of each run."""
        generation = self.generation
        if generation is None or message.generation != generation.number:
            return
        with self._failed:
            if message.run not in self._failures:
                self._failures[message.run] = error_of(message, generation)
                while len(self._failures) > 256:  # stories of runs whose callers had left
                    self._failures.pop(next(iter(self._failures)))
            self._failed.notify_all()

    def on_death(self, worker: Worker, error: WorkerDiedError) -> None:
        """A worker died: every run of a generation that used it ends with this error."""
        generation = self.generation
        if generation is None or worker.index + 1 not in generation.sides:
            return
        self.death = error
        self.wake()

    def on_closed(self) -> None:
        """The fleet was closed: every run ends with SessionClosedError."""
        self.closed = True
        self.wake()

    def wake(self) -> None:
        """Have every blocked caller look at `death` and `closed`."""
        with self._failed:
            self._failed.notify_all()
        for slot in self.slots.items:
            slot.bell.ring()

    # Called by the session ------------------------------------------------------------------------------------------
    def release(self) -> None:
        """Let go of the generation and what refers to its memory. The caller has taken all slots, or none was used."""
        for slot in self.slots.items:
            slot.inputs.clear()
            slot.steady = None
            slot.pending = 0
        self.generation = None

    def install(self, generation: Generation) -> None:
        """Use a new generation. The session has taken all slots, or has not run yet."""
        self.release()
        self.generation = generation
        self.death = None
        for side in generation.sides.values():  # one that died before the generation was here was told of to nobody
            death = side.worker.death
            if death is not None and death.incarnation >= side.incarnation:
                self.death = death

    def run(
        self,
        feeds: Mapping[str, Any],
        defaults: Mapping[str, Any],
        wanted: Sequence[str],
        signature: Signature | None = None,
    ) -> dict[str, Any]:
        """One run on checked feeds; the model outputs of `wanted` that a worker makes, by name.

        `defaults`: initializers of inputs that were not fed. `signature`: of the feed, if it has one. Raises
        KernelError, ProviderContractError, OutOfMemoryError, WorkerDiedError, SessionClosedError.
        """
        slot = self.slots.take()
        try:
            self._check()
            if slot.pending:
                self._finish(slot)
            return self._run_in(slot, feeds, defaults, wanted, signature)
        finally:
            self.slots.give(slot)

    def _check(self) -> None:
        if self.closed:
            raise SessionClosedError("the session was closed", what="session")
        if self.death is not None:
            raise self.death.again()

    def _run_in(
        self,
        slot: Slot,
        feeds: Mapping[str, Any],
        defaults: Mapping[str, Any],
        wanted: Sequence[str],
        signature: Signature | None,
    ) -> dict[str, Any]:
        generation = self.generation
        assert generation is not None
        index = slot.index
        run = next(self._runs)
        for side in generation.sides.values():
            side.leases.sweep()  # results that were dropped make room for this run's
        steady = slot.steady
        if steady is not None and steady.signature is signature and steady.generation is generation:
            slot.words = steady.words
            slot.pending = run
            steady.start(feeds, run)
            self._count(steady.nbytes, steady.copies)
            failed = self._wait_steadily(slot, steady, run)
        else:
            steady = slot.steady = None
            slot.words = [
                (edge, self._write(generation, slot, name, edge, feeds, defaults))
                for name, edge in generation.inputs.items()
            ]
            slot.pending = run
            self._start(generation, slot)
            failed = self._wait(slot, run)
        slot.pending = 0
        if failed:
            self._release_results(generation, index, run, ())
            raise self._story(run)
        results: dict[str, Any] = {}
        try:
            for name in wanted:
                result = None if steady is None else steady.result(name, run)
                if result is None:
                    result = self._read(generation, index, *generation.outputs[name])
                else:
                    self._count(result.nbytes)
                results[name] = result
        finally:
            if len(results) < len(generation.outputs):
                kept = wanted[: len(results) + 1]  # with the one whose reading failed, if any: it may be leased
                self._release_results(generation, index, run, [generation.outputs[name] for name in kept])
        self.counters.runs += 1
        if steady is None and signature is not None:
            slot.steady = self._steady(generation, slot, feeds, signature)
        return results

    def _steady(
        self, generation: Generation, slot: Slot, feeds: Mapping[str, Any], signature: Signature
    ) -> SteadyRun | None:
        """What the run that has just ended can be repeated by; None if an input has no place of its own."""
        places = {name: slot.inputs[name].array for name in feeds if name in slot.inputs}
        if any(name in generation.inputs and name not in places for name in feeds):
            return None
        fed = {name: place for name, place in places.items() if name in generation.inputs}
        steady = SteadyRun(signature, generation, slot.index, fed, slot.words)
        steady.learn(slot.index)
        return steady

    def _wait_steadily(self, slot: Slot, steady: SteadyRun, run: int) -> bool:
        """`_wait`, with nothing to look up."""
        while True:
            void = steady.ended(run)
            if void is not None:
                return void
            if self.death is not None or self.closed:
                return self._wait(slot, run)  # tells the story
            slot.bell.wait()

    def _start(self, generation: Generation, slot: Slot) -> None:
        """Publish the words of the slot's pending run and ring. To do so again changes nothing."""
        board = generation.board
        board.publish(messages.START, slot.index, slot.pending, messages.UNBOUND)
        for edge, number in slot.words:
            board.publish(edge, slot.index, slot.pending, number)
        for bell in generation.first_bells:
            bell.ring()

    def _finish(self, slot: Slot) -> None:
        """See a run to its end whose caller has left, at whatever moment that was, and give its results back."""
        generation = self.generation
        assert generation is not None
        self._start(generation, slot)
        self._wait(slot, slot.pending)
        run, slot.pending = slot.pending, 0
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
            return places.nothing(edge, slot.index)
        if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
            slot.inputs.pop(name, None)
            chunks = values.encode(value)
            target, number = places.blob(edge, slot.index, values.size(chunks), name)
            at = 0
            for chunk in chunks:
                target[at : at + len(chunk)] = chunk
                at += len(chunk)
            self._count(at)
            return number
        held = slot.inputs.get(name)
        if held is None or held.shape != value.shape or held.dtype != value.dtype or held.epoch != places.epoch:
            code = NUMBER[onnx_name(value.dtype)]
            array, number = places.tensor(edge, slot.index, code, value.dtype, value.shape, name)
            held = slot.inputs[name] = Input(value.dtype, value.shape, array, number, places.epoch, False)
        if not (default and held.default):
            np.copyto(held.array, value)
            held.default = default
            self._count(value.nbytes)
        return held.number

    def _wait(self, slot: Slot, run: int) -> bool:
        """Block until every last partition is done with `run`; True if one of them is void."""
        generation = self.generation
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
            if self.death is not None:
                raise self._died(generation, slot, run, self.death)
            self._check()
            slot.bell.wait()

    def _died(self, generation: Generation, slot: Slot, run: int, death: WorkerDiedError) -> WorkerDiedError:
        """The death, with the first partition that the dead worker owed to this run."""
        for partition, (board, edge) in enumerate(generation.dones):
            side = generation.sides[board]
            if side.worker.name == death.provider and run_of(side.reader.word(edge, slot.index)) != run:
                nodes = generation.partition_nodes[partition]
                first, *output = death.message.splitlines()  # then what it wrote
                how, about, rest = first.partition(" Its last output:")
                owed = f"{how} It owed partition {partition} ({first_names(nodes)}).{about}{rest}"
                story = "\n".join([owed, *output])
                return WorkerDiedError(story, **{**death.fields(), "partition": partition, "nodes": nodes})
        return death.again()

    def _read(self, generation: Generation, slot: int, board: int, edge: int) -> Any:
        """A result of the caller's own: copied, or leased from the worker's output pool."""
        side = generation.sides[board]
        layout = side.reader.layout(edge, slot, number_of(side.reader.word(edge, slot)))
        if layout.kind == NONE:
            return None
        segment = side.reader.segment
        if layout.kind == ENCODED:
            self._count(layout.nbytes)
            return values.decode(segment.view[layout.offset : layout.offset + layout.nbytes])
        if layout.block is not None:
            return side.leases.lease(layout, numpy_dtype(BY_NUMBER[layout.dtype]))
        self._count(layout.nbytes)
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

    def _story(self, run: int) -> OutriderError:
        """Why the run is void."""
        with self._failed:
            told = self._failed.wait_for(lambda: run in self._failures or self.death or self.closed, FAILURE_SECONDS)
            if run in self._failures:
                return self._failures.pop(run)
        if told and self.death is not None:
            return self.death.again()
        return SessionClosedError("the session was closed while a run was failing", what="session")

    def _count(self, nbytes: int, copies: int = 1) -> None:
        self.counters.copies += copies
        self.counters.copied_bytes += nbytes
