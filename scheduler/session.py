"""The session: what the user holds. It checks, places, deploys, and hands runs to the runner."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from outrider.providers.wire.graph import TensorRef
from outrider.scheduler.accounts import placement_report, session_stats
from outrider.scheduler.deploy import Blueprint, Deployer, Generation
from outrider.scheduler.errors import (
    ForkedSessionError,
    ProviderUnavailableError,
    SessionClosedError,
    UnsupportedOptionError,
)
from outrider.scheduler.feeds import check_feeds, requested_outputs
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.metadata import ModelMetadata
from outrider.scheduler.model import LoadedModel, load_model
from outrider.scheduler.monitor import Worker
from outrider.scheduler.nodearg import NodeArg
from outrider.scheduler.options import RunOptions, SessionOptions, session_options
from outrider.scheduler.options import run_options as checked_run_options
from outrider.scheduler.placement import Placer, check_pins
from outrider.scheduler.report import PlacementReport
from outrider.scheduler.runner import Runner
from outrider.scheduler.shortage import limits_told
from outrider.scheduler.specs import parse_providers
from outrider.scheduler.steady import Signature
from outrider.shm.doorbell import Doorbell

INTERRUPTED_SECONDS = 0.5  # what a busy worker gets to stop by itself after Ctrl-C


class InferenceSession:
    """One model, placed on workers and ready to run.

        with InferenceSession("model.onnx", providers=["my_provider.py:MyProvider", "cpu"]) as session:
            outputs = session.run(None, {"x": array})

    `model`: path, bytes or ModelProto. `providers`: in priority order, 'cpu', 'null', 'package.module:Class',
    'file.py:Class', any of them in a pair with a dict of its options, or a ProviderSpec; None means ["cpu"].
    `sess_options` (onnxruntime's position) or `options`: a SessionOptions. Raises the errors of options and
    providers, then those of the model, before any process starts; then ProviderUnavailableError, UnsupportedOpError,
    PinDeclinedError, ClaimBrokenError and their kin. A context manager; `close` is idempotent, and results stay valid
    after it.
    """

    @limits_told()
    def __init__(
        self,
        model: Any,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        options: SessionOptions | None = None,
    ) -> None:
        chosen, threads = session_options(sess_options, options)
        shared: Fleet | None = chosen.fleet
        specs = [] if shared is not None else parse_providers(providers, provider_options)
        self._resources = _Resources()
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        try:
            loaded = load_model(model, chosen.base_dir)
            self._resources.loaded = loaded
            if shared is not None:
                shared.check_open()
                fleet = shared
                workers = fleet.select(providers, provider_options)
                check_pins(loaded, chosen.pins, [worker.name for worker in workers])
            else:
                check_pins(loaded, chosen.pins, [spec.display for spec in specs])
                fleet = Fleet._of(specs, chosen.start_deadline, threads)
                self._resources.own_fleet = fleet
                workers = fleet.workers
            if not workers:
                raise ProviderUnavailableError("no provider of this session has started", reason="none started")
            self._fleet = fleet
            for worker in workers:
                fleet.revive(worker)
            bells: list[Doorbell] = []
            self._resources.bells = bells
            for _ in range(chosen.max_in_flight):
                bells.append(Doorbell())
            number = fleet.next_session()
            deployer = Deployer(fleet, number, loaded.store.seal(), bells, chosen.load_deadline)
            runner = Runner(bells)
            self._resources.deployer = deployer
            self._resources.runner = runner
            self._resources.workers = workers
            fleet.monitor.listeners[number] = runner
            self._placer = Placer(loaded, workers, deployer, chosen)
            self._deployer = deployer
            self._runner = runner
            self._blueprint, generation = self._deploy(self._placer.place())
            runner.install(generation)
        except BaseException as error:
            self._resources.hurry(type(error))
            self._finalizer()
            raise
        self._loaded: LoadedModel = self._placer.loaded
        self._inputs = tuple(self._loaded.inputs)
        self._signature: Signature | None = None
        self._outputs = [value.name for value in self._loaded.outputs]
        self._defaults = {name: self._loaded.store.read(ref) for name, ref in self._loaded.defaults.items()}

    def _deploy(self, blueprint: Blueprint) -> tuple[Blueprint, Generation]:
        """Load the plan; plan again without what a provider refuses to compile."""
        while True:
            generation = self._deployer.deploy(blueprint)
            if not generation.refused:
                return blueprint, generation
            self._placer.refuse(blueprint, generation.refused)
            blueprint = self._placer.replan()

    # Runs ----------------------------------------------------------------------------------------------------------
    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Run the model; the outputs asked for (None: all), in order, each the caller's own.

        Raises the errors of feeds (nothing is sent then), KernelError, ProviderContractError, OutOfMemoryError,
        WorkerDiedError, SessionClosedError, ForkedSessionError. The session can be used after each but the last two.
        """
        self._check_open()
        checked_run_options(run_options)
        signature = self._signature
        feeds = input_feed
        if output_names is None and signature is not None and signature.fits(input_feed):
            wanted = self._outputs
        else:
            feeds = check_feeds(self._inputs, self._loaded.defaults, input_feed, output_names, self._outputs)
            wanted = requested_outputs(output_names, self._outputs)
            signature = Signature.of(feeds) if output_names is None else None
            self._signature = signature
        if self._runner.death is not None:
            self._revive()
        made = self._blueprint_outputs()
        computed = [name for name in dict.fromkeys(wanted) if name in made]
        results = self._runner.run(feeds, self._defaults, computed, signature)
        if len(computed) == len(wanted):
            return [results[name] for name in wanted]
        returned: list[Any] = []
        given: set[str] = set()
        for name in wanted:
            if name in results:
                returned.append(copy.deepcopy(results[name]) if name in given else results[name])
                given.add(name)
            else:
                returned.append(self._passed_through(name, feeds))
        return returned

    def _blueprint_outputs(self) -> Mapping[str, tuple[int, int]]:
        generation = self._runner.generation
        if generation is None:
            raise SessionClosedError("the session was closed", what="session")
        return generation.outputs

    def _passed_through(self, name: str, feeds: Mapping[str, Any]) -> Any:
        """An output that is an input or a constant of the model: a copy."""
        if name in feeds:
            value = feeds[name]
        elif name in self._defaults:
            value = self._defaults[name]
        else:
            value = self._constant(name)
        return np.array(value, order="C") if isinstance(value, np.ndarray) else copy.deepcopy(value)

    def _constant(self, name: str) -> np.ndarray[Any, Any]:
        ref = self._loaded.graph.constants[name]
        assert isinstance(ref, TensorRef)
        return self._loaded.store.read(ref)

    @limits_told()
    def _revive(self) -> None:
        """Start dead workers again and load a new generation; the session is as good as new after it."""
        with self._lock:
            if self._runner.death is None:
                return
            self._runner.slots.take_all()
            try:
                self._check_open()
                for worker in self._placer.workers:
                    self._fleet.revive(worker)
                self._blueprint, generation = self._deploy(self._blueprint)
                self._runner.install(generation)
            finally:
                self._runner.slots.give_all()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedSessionError(
                f"this session belongs to process {self._pid}; make a new one in this forked process",
                owner_pid=self._pid,
                pid=os.getpid(),
            )
        if not self._finalizer.alive:
            raise SessionClosedError("the session was closed", what="session")
        self._fleet.check_open()

    # What it is ----------------------------------------------------------------------------------------------------
    def get_inputs(self) -> list[NodeArg]:
        """The model's inputs that must be fed, in its order."""
        return [NodeArg.of(value) for value in self._loaded.inputs if value.name not in self._loaded.defaults]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that have an initializer and may be fed in its place."""
        return [NodeArg.of(value) for value in self._loaded.inputs if value.name in self._loaded.defaults]

    def get_outputs(self) -> list[NodeArg]:
        """The model's outputs as it declares them, in its order."""
        return [NodeArg.of(value) for value in self._loaded.outputs]

    def get_modelmeta(self) -> ModelMetadata:
        """What the model says about itself."""
        return self._loaded.metadata

    def get_providers(self) -> list[str]:
        """Names of the providers, in priority order."""
        return [worker.name for worker in self._placer.workers]

    def placement(self) -> PlacementReport:
        """Where each node runs and why."""
        return placement_report(self._placer, self._blueprint, self._fleet)

    def health(self) -> dict[str, dict[str, Any]]:
        """provider -> {state, incarnation, deaths, quarantined}."""
        return self._fleet.health()

    def stats(self) -> dict[str, Any]:
        """Counters: {runs, copies, copied_bytes, allocated_bytes, reference_nodes, partitions, providers}."""
        self._check_open()
        return session_stats(self._placer, self._blueprint, self._fleet, self._runner, self._deployer.session)

    def close(self) -> None:
        """Unload the model and, unless the fleet is shared, stop the workers. Results stay valid."""
        if os.getpid() == self._pid:
            self._finalizer()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._resources.hurry(kind)
        self.close()

    def __repr__(self) -> str:
        of = "" if self._resources.loaded is None else f" of {self._resources.loaded.path}"
        workers = ", ".join(worker.name for worker in self._resources.workers)
        return f"<InferenceSession{of} on {workers}{'' if self._finalizer.alive else ' (closed)'}>"

    # Not built yet -------------------------------------------------------------------------------------------------
    def _later(self, method: str) -> NoReturn:
        raise UnsupportedOptionError(
            f"InferenceSession.{method} is not built yet; use run()",
            option=f"InferenceSession.{method}",
            reason="not built yet",
        )

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Any = None,
        user_data: Any = None,
        run_options: RunOptions | None = None,
    ) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("run_async")

    def io_binding(self) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("io_binding")

    def run_with_iobinding(self, binding: Any) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("run_with_iobinding")

    def empty(self, name: str, shape: Sequence[int]) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("empty")

    def warmup(self, shapes: Any) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("warmup")

    def start_trace(self) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("start_trace")

    def stop_trace(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("stop_trace")

    def restart(self, provider: str) -> NoReturn:
        """Raises UnsupportedOptionError."""
        self._later("restart")


class _Resources:
    """All that a session must give back, in the order in which it must. It knows nothing of the session."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.loaded: LoadedModel | None = None
        self.own_fleet: Fleet | None = None
        self.deployer: Deployer | None = None
        self.runner: Runner | None = None
        self.workers: Sequence[Worker] = ()
        self.bells: Sequence[Doorbell] = ()

    def hurry(self, kind: type[BaseException] | None) -> None:
        """Whoever pressed Ctrl-C does not want to wait for a worker that is busy."""
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self.own_fleet is not None:
            self.own_fleet.monitor.patience = INTERRUPTED_SECONDS

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: all of this is its parent's
        with contextlib.ExitStack() as last_first:  # all of it, whatever interrupts
            if self.loaded is not None:
                last_first.callback(self.loaded.store.close)
            for bell in self.bells:
                last_first.callback(bell.close)
            if self.deployer is not None and self.own_fleet is None:
                last_first.callback(self._unload, self.deployer)
            if self.runner is not None:
                last_first.callback(self._leave, self.runner)
            if self.own_fleet is not None:
                last_first.callback(self.own_fleet.close)
            if self.deployer is not None:
                self.deployer.fleet.monitor.listeners.pop(self.deployer.session, None)
            if self.runner is not None:
                self.runner.on_closed()

    def _leave(self, runner: Runner) -> None:
        runner.slots.take_all()  # callers have left
        runner.release()
        runner.slots.give_all()

    def _unload(self, deployer: Deployer) -> None:
        if not deployer.fleet.closed:  # after the last deployment: what is loaded now stays unloaded
            deployer.unload(self.workers)
