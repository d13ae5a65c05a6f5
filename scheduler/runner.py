"""Runs: the calling thread writes the inputs and their words, rings the first workers, blocks on its slot's doorbell.

No message, descriptor, dispatcher or Future takes part in a run that goes well. The monitor's thread comes in only when
a partition failed or a worker died: the replica notes that and rings the slots' doorbells.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.wire import messages, values
from outrider.providers.wire.declared import value_misfit
from outrider.providers.wire.dtypes import BY_NUMBER, NUMBER, numpy_dtype, onnx_name
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.spans import Recorder
from outrider.scheduler import blame, overdue
from outrider.scheduler.generation import Generation
from outrider.scheduler.inplace import Admission, Array, Targets, check_target, disjoint
from outrider.scheduler.replica import Input, Replica, Slot
from outrider.scheduler.slots import Slots
from outrider.scheduler.steady import MISSES, SIGNATURES, Copies, Signature, SteadyRun
from outrider.scheduler.watching import Watch
from outrider.shm.board import ENCODED, NONE, OWN, VOID, Layout, number_of, run_of
from outrider.shm.errors import LayoutError


class Runner:
    """The data plane of a session. A run takes one of the slots; slots of all replicas stand in one queue.

        slot = runner.slots.take(hold)
        run = runner.begin(slot, feeds, defaults, signature)
        results = runner.finish_steadily(slot, run)
        if results is None:
            results = runner.finish(slot, run, wanted, signature)
        runner.slots.give(hold)

    A worker sees a run when it sees a word of it: the words of targets are written first, then the start word, then
    those of the inputs. Both methods raise KernelError, ProviderContractError, OutOfMemoryError, WorkerDiedError,
    SessionClosedError.
    """

    def __init__(self, replicas: Sequence[Replica], queue_size: int | None = None, reject: bool = False) -> None:
        self.replicas = tuple(replicas)
        slots = [slot for replica in replicas for slot in replica.slots]
        spread = (lambda slot: slot.replica) if len(replicas) > 1 else None  # runs in flight over the replicas
        shut = (lambda slot: slot.replica.troubled) if len(replicas) > 1 else None
        self.slots: Slots[Slot] = Slots(slots, queue_size, reject, spread, shut)
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
        self,
        slot: Slot,
        feeds: Mapping[str, Any],
        defaults: Mapping[str, Any],
        signature: Signature | None,
        targets: Targets | None = None,
        watch: Watch | None = None,
    ) -> int:
        """Start a run on checked feeds in a slot that the caller has taken; returns its number.

        `defaults`: initializers of inputs that were not fed. `signature`: of the feed, if it has one. `targets`: the
        memory that outputs are bound to; runs of one signature have the same. `watch`: what may end the wait early.
        """
        slot.watch = watch
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
        steady = None if signature is None else slot.steady.get(signature)
        if steady is not None:
            steady = steady.fitting(generation, feeds)
        if steady is not None:
            slot.words = steady.words
            slot.feeds, slot.targets = feeds, targets
            slot.pending = run
            steady.start(feeds, run, slot.repeated is steady)
            slot.repeated = steady
            slot.counters.add(steady.nbytes, steady.copies)
            return run
        slot.forget()
        generation.sweep()
        spans: list[tuple[int, int, int]] = []
        words = [
            (edge, self._write(generation, slot, name, edge, feeds, defaults, spans))
            for name, edge in generation.inputs.items()
        ]
        aims = [] if targets is None else self._aim(generation, slot, targets, spans)
        # Whoever sees an input knows whether there are targets, and finds them.
        slot.words = [*aims, (messages.START, messages.BOUND if aims else messages.UNBOUND), *words]
        slot.feeds, slot.targets = feeds, targets
        slot.pending = run
        self._start(generation, slot)
        return run

    def finish_steadily(self, slot: Slot, run: int) -> list[Any] | None:
        """Wait for a run that has begun; all outputs in order if it went like the last one of its slot, else None."""
        steady = slot.repeated
        if steady is None or not steady.complete or self._wait_steadily(slot, steady, run):
            return None
        results = steady.results(run, slot.targets)
        if results is not None:
            slot.pending = 0
            slot.feeds = slot.targets = None
            slot.counters.runs += 1
            slot.counters.add(steady.returned_bytes, steady.returned_copies)
        return results

    def wait(self, slot: Slot, run: int) -> None:
        """Wait for a run that has begun, to `finish` it later as `waited`. Raises what a wait can raise there."""
        self._wait(slot, run)

    def finish(
        self, slot: Slot, run: int, wanted: Sequence[str], signature: Signature | None, waited: bool = False
    ) -> dict[str, Any]:
        """Wait for a run that has begun; those model outputs of `wanted` that workers make, by name.

        Outputs with a target are written there. Raises, beside the errors of the run, DtypeMismatchError and
        ShapeMismatchError for one that has another dtype or shape than its target; nothing was copied then.
        """
        replica = slot.replica
        generation = replica.generation
        assert generation is not None
        steady = slot.repeated
        waited = waited or (steady is not None and steady.complete)  # in `finish_steadily`
        failed = waited or steady is None or self._wait_steadily(slot, steady, run)
        failed = failed and self._wait(slot, run)
        if failed:
            slot.pending = 0
            slot.feeds = slot.targets = None
            self._release_results(generation, slot.index, run, ())
            raise replica.story(slot, run)
        targets = {} if slot.targets is None else slot.targets.arrays
        results: dict[str, Any] = {}
        made = generation.outputs
        computed = [name for name in dict.fromkeys(wanted) if name in made]
        taken = 0
        try:
            for name, target in targets.items():
                if name in made and (steady is None or not steady.holds(name, run)):
                    layout = self._layout(generation, slot, run, name)
                    check_target(name, target, BY_NUMBER.get(layout.dtype, "undefined"), layout.shape)
            for name in computed:
                taken += 1
                if steady is not None and steady.holds(name, run):
                    results[name] = steady.result(name, targets.get(name), slot.counters)
                else:
                    results[name] = self._read(generation, slot, run, name, targets.get(name))
        finally:
            slot.pending = 0  # not before: what a dead worker has made is kept for runs that have not ended
            if len(results) < len(made):
                kept = computed[:taken]  # with the one whose reading failed, if any: it may be leased
                self._release_results(generation, slot.index, run, [made[name] for name in kept])
        slot.counters.runs += 1
        if steady is not None and steady.complete:
            steady.misses += 1
            if steady.misses >= MISSES and signature is not None:
                slot.steady.pop(signature, None)
        if steady is None and signature is not None:
            if signature.again:
                assert slot.feeds is not None
                self._learn(generation, slot, slot.feeds, signature, wanted)
            signature.again = True
        slot.feeds = slot.targets = None
        return results

    def _learn(
        self,
        generation: Generation,
        slot: Slot,
        feeds: Mapping[str, Any],
        signature: Signature,
        wanted: Sequence[str],
    ) -> None:
        """Keep what the run that has just ended can be repeated by, unless an input has no place of its own.

        Where nothing is computed there is nothing to repeat, and nobody who would ring.
        """
        if not generation.lasts:
            return
        fed: dict[str, Array | None] = {}
        defaults: list[tuple[Array, Array]] = []
        for name in generation.inputs:
            held = slot.inputs.get(name)
            if held is None:
                return
            if name in feeds:
                fed[name] = held.array
            else:
                assert held.array is not None and held.default is not None
                defaults.append((held.array, held.default))
        steady = SteadyRun(generation, slot.index, feeds, fed, defaults, slot.words)
        steady.learn(slot.index, wanted, slot.targets)
        steady.follow(slot.steady.pop(signature, None))
        while len(slot.steady) >= SIGNATURES:
            slot.steady.pop(next(iter(slot.steady)))
        slot.steady[signature] = steady

    def _wait_steadily(self, slot: Slot, steady: SteadyRun, run: int) -> bool:
        """`_wait`, with nothing to look up. Only for a run that nobody has waited for: its rings are still to come."""
        watch = slot.watch
        bell, replica = slot.bell.fileno(), slot.replica
        void = slot.spin.until(lambda: steady.ended(run)) if slot.spin.wanted else None
        if void is not None:
            return void
        while True:
            if watch is None:
                try:
                    os.eventfd_read(bell)  # quicker than os.read, but a handled signal ends it
                except InterruptedError:
                    continue
            else:
                overdue.wait(slot, run, watch)
            void = steady.ended(run)
            if void is not None:
                return void
            if replica.ended:
                return self._wait(slot, run)  # tells the story

    def _start(self, generation: Generation, slot: Slot) -> None:
        """Publish the words of the slot's pending run and ring. To do so again changes nothing."""
        board = generation.board
        for edge, number in slot.words:
            board.publish(edge, slot.index, slot.pending, number)
        for bell in generation.first_bells:
            bell.ring()

    def _drain(self, slot: Slot) -> None:
        """See a run to its end whose caller has left, at whatever moment that was, and give its results back."""
        generation = slot.replica.generation
        assert generation is not None
        slot.forget()
        self._start(generation, slot)
        overdue.give_up(slot, slot.pending)
        self._wait(slot, slot.pending, earlier=True)
        run, slot.pending, slot.feeds, slot.targets = slot.pending, 0, None, None
        slot.replica.dismiss(run)
        self._release_results(generation, slot.index, run, ())

    def _write(
        self,
        generation: Generation,
        slot: Slot,
        name: str,
        edge: int,
        feeds: Mapping[str, Any],
        defaults: Mapping[str, Any],
        spans: list[tuple[int, int, int]],
    ) -> int:
        """Copy one input to its place, unless it is read where it lies; returns the layout number.

        The bytes of one that is not copied are added to `spans`, (memory, offset, bytes).
        """
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
        code = NUMBER[onnx_name(value.dtype)]
        there = None if default or not value.nbytes else generation.reach.find(value)
        if there is not None and slot.admissions.setdefault(name, Admission()).admits(there):
            number = places.elsewhere(edge, slot.index, code, value.dtype, value.shape, *there)
            slot.inputs[name] = Input(value.dtype, value.shape, None, number)
            spans.append((*there, value.nbytes))
            return number
        held = slot.inputs.get(name)
        if held is None or held.array is None or held.shape != value.shape or held.dtype != value.dtype:
            array, number = places.tensor(edge, slot.index, code, value.dtype, value.shape, name)
            held = slot.inputs[name] = Input(value.dtype, value.shape, array, number)
        if not default or held.default is not value:
            assert held.array is not None
            held.default = None  # should this be interrupted, nobody knows what is there
            np.copyto(held.array, value)
            held.default = value if default else None
            slot.counters.add(value.nbytes)
        return held.number

    def _aim(
        self, generation: Generation, slot: Slot, targets: Targets, spans: list[tuple[int, int, int]]
    ) -> list[tuple[int, int]]:
        """The words of the targets that workers can write; all others are written by `finish`. [] if there are none.

        `spans`: bytes that the run reads where they lie, which no result may overwrite.
        """
        places = generation.places
        aims: dict[str, tuple[int, int]] = {}
        for name, array in targets.arrays.items():
            edge, there = generation.targets.get(name), generation.reach.find(array)
            if edge is None or there is None or there[0] != generation.outputs[name][0]:
                continue
            if array.nbytes and disjoint(spans, *there, array.nbytes):
                spans.append((*there, array.nbytes))
                code = NUMBER[onnx_name(array.dtype)]
                aims[name] = edge, places.elsewhere(edge, slot.index, code, array.dtype, array.shape, *there)
        if aims:
            for name, edge in generation.targets.items():
                if name not in aims:
                    aims[name] = edge, places.nothing(edge, slot.index)
        return list(aims.values())

    def _wait(self, slot: Slot, run: int, earlier: bool = False) -> bool:
        """Block until every last partition is done with `run`; True if one of them is void.

        `earlier`: it is not the run of the slot's present caller. Raises RunTimeoutError and RunCancelledError too,
        when the caller's Watch says so.
        """
        replica = slot.replica
        generation = replica.generation
        assert generation is not None
        lasts = [(generation.sides[board].reader.word, edge) for board, edge in generation.lasts]
        while True:
            failed = False
            for read, edge in lasts:
                word = read(edge, slot.index)
                if run_of(word) != run:
                    if run_of(word) > run:
                        blame.accuse(replica, slot, awaited=not earlier)
                    break
                failed = failed or number_of(word) == VOID
            else:
                return failed
            if replica.ended:
                replica.check(slot, run)
            watch = slot.watch
            if earlier:
                overdue.wait_for_earlier(slot, watch)
            elif watch is None:
                slot.bell.wait()
            else:
                overdue.wait(slot, run, watch)

    def _layout(self, generation: Generation, slot: Slot, run: int, name: str) -> Layout:
        """What was published of a result. Raises ProviderContractError if that cannot be."""
        board, edge = generation.outputs[name]
        reader = generation.sides[board].reader
        word = reader.word(edge, slot.index)
        try:
            if run_of(word) != run:
                raise LayoutError(f"it is of run {run_of(word)}, and run {run} has ended", what=f"edge {edge}")
            return reader.layout(edge, slot.index, number_of(word))
        except LayoutError as error:
            raise blame.broken(slot.replica, board, name, str(error)) from error

    def _read(self, generation: Generation, slot: Slot, run: int, name: str, target: Array | None) -> Any:
        """A result of the caller's own: in its target, or copied, or leased from the worker's output pool.

        Raises ProviderContractError if it is none of these.
        """
        board, edge = generation.outputs[name]
        side = generation.sides[board]
        layout = self._layout(generation, slot, run, name)
        if layout.kind == NONE:
            return None
        try:
            if target is not None and generation.reach.find(target) == (layout.memory, layout.offset):
                return target
            if layout.memory != OWN and layout.block is None:
                raise LayoutError("it lies where another array of the caller's may be", what="memory")
            if target is not None:
                np.copyto(target, generation.result(board, layout))
                slot.counters.add(layout.nbytes)
                if layout.block is not None:
                    side.leases.release_now(layout.block)
                return target
            if layout.kind == ENCODED:
                slot.counters.add(layout.nbytes)
                view = side.reader.memory_of(layout).view
                value = values.decode(view[layout.offset : layout.offset + layout.nbytes])
                misfit = value_misfit(side.declared.edges[edge], value)
                if misfit:
                    raise LayoutError(misfit, what="value")
                return with_plain_maps(value)
            if layout.block is not None:
                return side.leases.lease(layout, numpy_dtype(BY_NUMBER[layout.dtype]))
        except (LayoutError, WireError) as error:
            raise blame.broken(slot.replica, board, name, str(error)) from error
        slot.counters.add(layout.nbytes)
        return generation.result(board, layout).copy()

    def _release_results(self, generation: Generation, slot: int, run: int, kept: Sequence[tuple[int, int]]) -> None:
        """Give back the output blocks that nobody will read."""
        for board, edge in generation.results:
            side = generation.sides[board]
            word = side.reader.word(edge, slot)
            if (board, edge) in kept or run_of(word) != run or number_of(word) == VOID:
                continue
            with contextlib.suppress(LayoutError):  # a malformed one is nobody's; who made it is told by its reader
                block = side.reader.layout(edge, slot, number_of(word)).block
                if block is not None:
                    side.leases.release_now(block)


def with_plain_maps(value: Any) -> Any:
    """A result as onnxruntime gives it: what maps hold are numbers and texts of Python, not arrays without axes."""
    if isinstance(value, dict):
        return {key: one.item() if isinstance(one, np.ndarray) and not one.ndim else one for key, one in value.items()}
    if isinstance(value, list):
        return [with_plain_maps(one) if isinstance(one, (dict, list)) else one for one in value]
    return value
