"""One run from slot to results, and once more where what it ran on has been replaced meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import ClaimBrokenError, ProviderUnavailableError
from outrider.scheduler.errors import OutriderError
from outrider.scheduler.inplace import Targets
from outrider.scheduler.passing import PassedOn
from outrider.scheduler.replica import Replica, RunAgain, Slot, busy, same_again
from outrider.scheduler.runner import Runner
from outrider.scheduler.slots import Hold
from outrider.scheduler.steady import Signature
from outrider.scheduler.supervisor import Supervisor
from outrider.scheduler.trace import run_traced
from outrider.scheduler.watching import Watch


class Execution:
    """Of one session. `defaults`: what the initializers hold that may be fed."""

    def __init__(
        self,
        runner: Runner,
        supervisors: Mapping[Replica, Supervisor],
        passed_on: PassedOn,
        defaults: Mapping[str, Any],
    ) -> None:
        self._runner = runner
        self._supervisors = supervisors
        self._passed_on = passed_on
        self._defaults = defaults

    def run(
        self,
        feeds: Mapping[str, Any],
        wanted: Sequence[str],
        signature: Signature | None,
        targets: Targets | None = None,
        watch: Watch | None = None,
        hold: Hold[Slot] | None = None,
    ) -> list[Any]:
        """One run in the slot that is held, or else in the next free one.

        A run that has to begin again does so each time a provider has fallen out of the plan, so it comes to an end.
        """
        slots = self._runner.slots
        if hold is None:
            hold = Hold()
        death: OutriderError | None = None
        try:
            while True:
                slot = hold.item
                if slot is None:
                    recorder = self._runner.recorder
                    if recorder is None:
                        slot = slots.take(hold, watch)
                    else:
                        with recorder.timed("wait", "slot"):
                            slot = slots.take(hold, watch)
                try:
                    results = self._run_in(slot, feeds, wanted, signature, targets, watch)
                    break
                except RunAgain as again:
                    death = again.death or death
                except ClaimBrokenError as error:
                    if not self._take_back(slot, error):
                        raise
                    death = error
                except ProviderUnavailableError as error:
                    if death is not None:  # it was running, and cannot begin again
                        raise same_again(death) from error
                    raise
                replica = slot.replica
                slots.give(hold)
                self._settle(replica, watch)
            slots.give(hold)
        except BaseException:
            slots.give(hold, last=busy(hold))  # not in a `finally`: Ctrl-C may come within the one above
            raise
        return results

    def _settle(self, replica: Replica, watch: Watch | None) -> None:
        """Wait until a replica has its new generation, or none."""
        if watch is None:
            replica.settled()
            return
        watch.waker = replica.stir
        while not replica.settled(watch.left("while the model was placed anew")):
            pass

    def _take_back(self, slot: Slot, error: ClaimBrokenError) -> bool:
        """A provider cannot compile a unit for a new shape: have the plan made anew. False if that is not wanted."""
        replica = slot.replica
        generation = replica.generation
        placer = replica.placer
        worker = next((one for one in placer.workers if one.name == error.provider), None)
        if worker is None or not placer.replaceable(worker) or generation is None or not error.nodes:
            return False
        self._supervisors[replica].refuse(generation.number, list(error.nodes), worker.name, str(error.reason))
        return True

    def _run_in(
        self,
        slot: Slot,
        feeds: Mapping[str, Any],
        wanted: Sequence[str],
        signature: Signature | None,
        targets: Targets | None,
        watch: Watch | None,
    ) -> list[Any]:
        """One run in a slot that the caller has taken. `targets`: of outputs in `wanted`, which names each once."""
        passed = {} if targets is None else self._passed_on.bound(slot, targets, wanted, feeds)
        runner, recorder = self._runner, self._runner.recorder
        if recorder is None:
            run = runner.begin(slot, feeds, self._defaults, signature, targets, watch)
            ordered = runner.finish_steadily(slot, run)
            if ordered is not None:
                return ordered
            results = runner.finish(slot, run, wanted, signature)
        else:
            results = run_traced(recorder, runner, slot, feeds, self._defaults, wanted, signature, targets, watch)
        for name, (target, value) in passed.items():
            if target is None:
                results[name] = value
            else:
                np.copyto(target, value)
                slot.counters.add(target.nbytes)
                results[name] = target
        if len(results) == len(wanted):
            return [results[name] for name in wanted]
        returned: list[Any] = []
        given: set[str] = set()
        for name in wanted:
            if name in results:
                returned.append(copy.deepcopy(results[name]) if name in given else results[name])
                given.add(name)
            else:
                returned.append(self._passed_on.copied(name, feeds))
        return returned
