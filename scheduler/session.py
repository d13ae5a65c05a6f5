"""The session: what the user holds. It checks, places, deploys, and hands runs to the runner."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.providers.wire.spans import timed
from outrider.scheduler.accounts import placement_report, session_stats
from outrider.scheduler.asynchronous import AsyncRuns, Job, RunFuture
from outrider.scheduler.checked import invalid_option, unsupported_option
from outrider.scheduler.closing import check_fork, closed_error
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.differences import Explained
from outrider.scheduler.dropin import accepts, names_given, refuse_cpu, without_arena
from outrider.scheduler.errors import ProviderUnavailableError
from outrider.scheduler.execution import Execution
from outrider.scheduler.feeds import check_feeds, requested_outputs
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.inplace import Array
from outrider.scheduler.iobinding import IOBinding, empty_for
from outrider.scheduler.metadata import ModelMetadata
from outrider.scheduler.model import LoadedModel, load_model
from outrider.scheduler.nodearg import NodeArg
from outrider.scheduler.options import WEIGHING, RunOptions, SessionOptions, session_options
from outrider.scheduler.options import run_options as checked_run_options
from outrider.scheduler.ortvalue import OrtValue
from outrider.scheduler.passing import PassedOn
from outrider.scheduler.pickling import Recipe
from outrider.scheduler.placement import Placer, check_pins
from outrider.scheduler.replica import Replica, RunAgain, Slot
from outrider.scheduler.report import PlacementReport
from outrider.scheduler.requiring import check_required, nobody
from outrider.scheduler.resources import CLOSED, Resources
from outrider.scheduler.restarting import restart
from outrider.scheduler.runner import Runner
from outrider.scheduler.shortage import limits_told
from outrider.scheduler.slots import Hold
from outrider.scheduler.specs import parse_providers
from outrider.scheduler.steady import Signature, Signatures
from outrider.scheduler.strategy import replicas
from outrider.scheduler.supervisor import Supervisor
from outrider.scheduler.warming import LEARNINGS, Checked, largest_sizes, made_feeds, run_everywhere, timed_partitions
from outrider.scheduler.watching import UNLIMITED, Watch, watch_for
from outrider.scheduler.worker import Worker
from outrider.shm.doorbell import Doorbell
from outrider.shm.processes import forks

ATTEMPTS = 8  # of a warmup that is interrupted by deaths


class InferenceSession(Explained):
    """One model, placed on workers and ready to run.

        with InferenceSession("model.onnx", providers=["my_provider.py:MyProvider", "cpu"]) as session:
            outputs = session.run(None, {"x": array})

    `model`: path, bytes or ModelProto. `providers`: in priority order, 'cpu', 'null', 'chaos', 'ort', 'ort:NAME',
    'package.module:Class', 'file.py:Class', any of them with '?key=value&...' or in a pair with a dict of its options,
    or a ProviderSpec; None means what OUTRIDER_PROVIDERS lists, else ["cpu"] (`outrider.scheduler.specs`).
    `sess_options` (onnxruntime's position) or `options`: a SessionOptions. Raises the errors of options and
    providers, then those of the model, before any process starts; then ProviderUnavailableError, UnsupportedOpError,
    PinDeclinedError, HeterogeneousPlacementRequiredError, ClaimBrokenError and their kin. A context manager; `close` is
    idempotent, and results stay valid after it. Pickled, a session from a path is made anew from that path where it is
    unpickled.
    """

    @accepts(path_or_bytes="model")
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
        chosen = session_options(sess_options, options)
        providers, provider_options = without_arena(providers, provider_options)
        shared: Fleet | None = chosen.fleet
        specs = [] if shared is not None else parse_providers(providers, provider_options)
        if chosen.without_cpu:
            specs = refuse_cpu(specs)
        check_required(specs, chosen)
        self._resources = Resources(self, chosen.profile_file_prefix if chosen.enable_profiling else None)
        tracing = self._resources.tracing
        self._recipe = Recipe.of(model, specs, chosen)
        self._forks = forks()
        self._options = chosen
        self._limited = watch_for(None, chosen) is not None
        try:
            with timed(tracing.recorder, "load", "model") as told:
                loaded = load_model(model, chosen.base_dir, free_dimensions=chosen.free_dimensions)
                told["nodes"] = len(loaded.graph.nodes)
            self._resources.loaded = loaded
            if shared is not None:
                shared.check_open()
                fleet = shared
                workers = fleet.select(providers, provider_options)
                if chosen.without_cpu:
                    refuse_cpu([worker.spec for worker in workers])
                check_required([worker.spec for worker in workers], chosen)
                check_pins(loaded, chosen, [worker.spec for worker in workers])
            else:
                check_pins(loaded, chosen, specs)
                with timed(tracing.recorder, "start", "workers"):
                    fleet = Fleet._of(specs, chosen, chosen.intra_op_num_threads or None)
                self._resources.own_fleet = fleet
                workers = fleet.workers
            if not workers:
                raise nobody(fleet.absent)
            self._fleet = fleet
            self._resources.workers = workers
            self._names = names_given(providers, [worker.spec for worker in workers])
            self._runner = self._replicated(loaded, fleet, workers, chosen)
            for replica in self._runner.replicas:
                replica.placer.loaded = self._runner.replicas[0].placer.loaded  # calls are inlined once
                self._resources.supervisors[replica].place(replica.placer.place())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._resources.hurry()
            self._resources.close_here()
            raise
        self._loaded: LoadedModel = self._runner.replicas[0].placer.loaded
        self._inputs = tuple(self._loaded.inputs)
        self._signatures = Signatures()
        self._outputs = [value.name for value in self._loaded.outputs]
        self._defaults = {name: self._loaded.store.read(ref) for name, ref in self._loaded.defaults.items()}
        passed_on = PassedOn(self._loaded, self._defaults)
        supervisors = self._resources.supervisors
        self._run = Execution(self._runner, supervisors, passed_on, self._defaults).run

    def _replicated(
        self, loaded: LoadedModel, fleet: Fleet, workers: Sequence[Worker], chosen: SessionOptions
    ) -> Runner:
        """The session's replicas, with nothing loaded yet: one, or as many as the strategy makes of these workers."""
        groups = replicas(workers, [worker.spec for worker in workers]) if chosen.strategy == "replicate" else [workers]
        bells: list[Doorbell] = []
        self._resources.bells = bells
        for _ in range(max(chosen.max_in_flight, len(groups))):
            bells.append(Doorbell())
        made: list[Replica] = []
        for number, group in enumerate(groups):
            mine = bells[number :: len(groups)]
            deployer = Deployer(fleet, fleet.next_session(), loaded.store.seal(), mine, chosen.load_deadline)
            self._resources.tracing.watch(deployer, group)
            made.append(Replica(Placer(loaded, group, deployer, chosen), deployer, mine, chosen.spin_us))
        runner = Runner(made, chosen.queue_size, chosen.queue == "reject")
        self._resources.asynchronous = AsyncRuns(runner.slots, fleet.monitor.call_later)
        self._resources.runner = runner
        self._resources.tracing.use(runner)
        for replica in made:
            fleet.monitor.listeners[replica.deployer.session] = replica
            self._resources.supervisors[replica] = Supervisor(replica, runner.slots, self._resources.tracing)
        return runner

    # Runs ----------------------------------------------------------------------------------------------------------
    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Run the model; the outputs asked for (None: all), in order, each the caller's own.

        Raises the errors of feeds (nothing is sent then), KernelError, ProviderContractError, OutOfMemoryError,
        WorkerDiedError, RunTimeoutError, RunCancelledError, SessionClosedError, ForkedSessionError. The session can be
        used after each but the last two.
        """
        if forks() != self._forks or self._resources.closed:
            self._check_open()
        if run_options is None and not self._limited:
            return self._run(*self._checked(output_names, input_feed))
        with watch_for(checked_run_options(run_options), self._options) or UNLIMITED as watch:
            return self._run(*self._checked(output_names, input_feed), watch=watch)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], object] | None = None,
        user_data: Any = None,
        run_options: RunOptions | None = None,
    ) -> RunFuture:
        """Ask for a run and go on; the Future gives what `run` would return or raise, and can be awaited in asyncio.

        The feed is checked now and its arrays are read when the run begins, in the order of asking: leave them alone
        until the Future is done. At most `queue_size` runs wait; then this call blocks, or raises QueueFullError with
        `queue='reject'`. `callback(results, user_data, error)` is called in a thread of the session just before the
        Future is done; `error` is '' or what went wrong, with no results then.
        """
        self._check_open()
        given = checked_run_options(run_options)
        if callback is not None and not callable(callback):
            raise invalid_option("callback", callback, "a function of (results, user_data, error), or None")
        checked, wanted, signature = self._checked(output_names, input_feed)
        feeds = dict(checked)  # the caller may put the next run's arrays into its own

        def work(hold: Hold[Slot], watch: Watch) -> list[Any]:
            self._check_open()
            return self._run(feeds, wanted, signature, watch=watch, hold=hold)

        job = Job(self._resources.asynchronous, work, callback, user_data, given, self._options)
        self._resources.asynchronous.submit(job)
        return job.future

    def io_binding(self) -> IOBinding:
        """Inputs and outputs to bind by reference, for `run_with_iobinding`."""
        self._check_open()
        return IOBinding(self)

    @accepts(iobinding="binding")
    def run_with_iobinding(self, binding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run the model on what `binding` binds; its `get_outputs` has the outputs then.

        Inputs that lie in memory which workers map (`empty`, OrtValue, results of this session) are not copied, nor are
        outputs bound to arrays that `empty` made for them. Any other bound output is written by one copy at the end.
        Raises what `run` raises, and DtypeMismatchError or ShapeMismatchError if an output that was made does not fit
        the memory it is bound to. After an error of a run that had begun the contents of bound outputs are undefined.
        """
        self._check_open()
        if not isinstance(binding, IOBinding) or binding.session is not self:
            raise invalid_option("binding", binding, "an IOBinding of this session")
        with watch_for(checked_run_options(run_options), self._options) or UNLIMITED as watch:
            binding.finish(self._run(*binding.prepare(), watch=watch))

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """`run`, with OrtValues returned."""
        results = self.run(output_names, input_dict_ort_values, run_options)
        declared = {value.name: value.dtype for value in self._loaded.outputs}
        names = requested_outputs(output_names, self._outputs)
        return [OrtValue.of(value, declared[name]) for name, value in zip(names, results, strict=True)]

    def empty(self, name: str, shape: Sequence[int]) -> Array:
        """A writable array of undefined contents for the input or output `name`, in memory shared with the workers.

        Feed it, and it is not copied; bind it with `io_binding` as the output it was made for, and the worker writes
        there. It is the caller's own, valid after `close`. The shape must agree with what is declared of an input; of
        an output only the run shows what it is. Raises InputNotFoundError, InvalidOptionError (a shape that is none, a
        value that is no tensor of numbers), RankMismatchError, ShapeMismatchError, OutOfMemoryError.
        """
        self._check_open()
        generation = self._runner.replicas[0].generation
        return empty_for(name, shape, self._inputs, self._loaded.outputs, generation)

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """See `OrtValue.ortvalue_from_shape_and_type`."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    def _checked(
        self, output_names: Sequence[str] | None, feed: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Sequence[str], Signature | None]:
        """The feed in its final form, the outputs to return, and the signature of the feed if it has one."""
        known = self._signatures.find(feed, output_names)
        if known is not None:
            return feed, known.wanted, known
        feeds = check_feeds(self._inputs, self._loaded.defaults, feed, output_names, self._outputs)
        wanted = requested_outputs(output_names, self._outputs)
        signature = Signature.of(feeds, output_names, wanted)
        if signature is not None:
            self._signatures.add(signature, feed, output_names)
        return feeds, wanted, signature

    @limits_told()
    def warmup(self, shapes: Any) -> None:
        """Run the model on zeros of these shapes, in every slot, so that real runs find their programs bound.

        `shapes`: input name -> shape, or a list of such dicts; inputs of static shape may be left out. With strategy
        'cost' or 'pipeline' the partitions are timed too, and the model is placed anew if that gives a better plan.
        Other runs wait meanwhile. Raises InvalidOptionError for what are no shapes, and the errors of `run`.
        """
        self._check_open()
        feeds = made_feeds(self._inputs, self._loaded.defaults, shapes)
        checked = [self._checked(None, feed) for feed in feeds]

        def warm() -> None:
            self._check_open()
            run_everywhere(self._runner, checked, self._defaults, self._options)
            self._learn(checked)

        for _ in range(ATTEMPTS):
            try:
                self._runner.slots.alone(warm)
                return
            except RunAgain as again:
                death = again.death
            for replica in self._runner.replicas:
                replica.settled()
        raise death or ProviderUnavailableError("the model was placed anew again and again", reason="moved")

    def _learn(self, checked: Sequence[Checked]) -> None:
        """Time the partitions, and place the model anew for what they took, while that changes anything."""
        replica = self._runner.replicas[0]
        if not checked or replica.placer.options.strategy not in WEIGHING:
            return
        sizes = largest_sizes(self._inputs, [feed for feed, *_ in checked])
        for _ in range(LEARNINGS):
            took = timed_partitions(self._runner, checked, self._defaults, lambda: self.stats()["per_partition"])
            blueprint = replica.placer.learn(took, sizes)
            plan, present = blueprint.plan, replica.blueprint.plan
            if (plan.partitions, plan.units) == (present.partitions, present.units):
                return
            self._resources.supervisors[replica].place_anew(blueprint)
            run_everywhere(self._runner, checked, self._defaults, self._options)

    def _check_open(self) -> None:
        self._resources.check("session", CLOSED)
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
        """Names of the providers, in priority order: 'CPUExecutionProvider' and its like as they were given."""
        return [self._names[worker.name] for worker in self._resources.workers]

    def get_provider_options(self) -> dict[str, dict[str, Any]]:
        """The options of each provider, under the names of `get_providers`."""
        return {self._names[worker.name]: dict(worker.spec.options) for worker in self._resources.workers}

    def set_providers(
        self, providers: Sequence[Any] | None = None, provider_options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Nothing, if these are the providers that the session has; else UnsupportedOptionError: make another one."""
        asked = parse_providers(*without_arena(providers, provider_options))
        held = [worker.spec for worker in self._resources.workers]
        if [(one.kind, one.options) for one in asked] != [(one.kind, one.options) for one in held]:
            reason = f"this session has {', '.join(self.get_providers())}; make another one with other providers."
            raise unsupported_option("set_providers", [spec.display for spec in asked], reason)

    def get_session_options(self) -> SessionOptions:
        """A copy of the session's options."""
        return replace(self._options)

    def enable_fallback(self) -> None:
        """Nothing, if the session was made with `fallback=True`, the default; else UnsupportedOptionError."""
        self._check_fallback("enable_fallback", True)

    def disable_fallback(self) -> None:
        """Nothing, if the session was made with `SessionOptions(fallback=False)`; else UnsupportedOptionError."""
        self._check_fallback("disable_fallback", False)

    def _check_fallback(self, method: str, wanted: bool) -> None:
        if self._options.fallback is not wanted:
            raise unsupported_option(method, None, f"make the session with SessionOptions(fallback={wanted}).")

    def placement(self) -> PlacementReport:
        """Where each node runs and why."""
        check_fork(self._resources.pid)
        return placement_report(self._runner.replicas, self._resources.workers, self._fleet)

    def health(self) -> dict[str, dict[str, Any]]:
        """provider -> {state, incarnation, deaths, quarantined, versions}, see `Fleet.health`."""
        check_fork(self._resources.pid)
        return self._fleet.health()

    def stats(self) -> dict[str, Any]:
        """Counters: {runs, copies, copied_bytes, allocated_bytes, reference_nodes, partitions, providers}, and

        - of each provider: `bound`, how often a unit was bound to places, and its own copies and memory, of which
          `edge_bytes` are its edges', and would be `edge_bytes_unshared` if none of them shared;
        - `per_partition`: [{partition, provider, nodes, runs, seconds}]: runs it served, and how long they took there
          (in the steady state one of 17 is timed, and stands for the others);
        - `per_operator`: 'domain::op' -> {nodes, runs, seconds}, of what was run while a trace was on;
        - `crossing`: {hop_seconds, byte_seconds}, measured on this machine, with a strategy that weighs them.
        """
        self._check_open()
        return session_stats(self._runner, self._resources.workers, self._fleet)

    def start_trace(self) -> None:
        """Record from now on what this process and the workers do for this session. Raises TraceError if that is on.

        A trace that OUTRIDER_TRACE has begun goes on, and belongs to `stop_trace` then.
        """
        self._check_open()
        self._resources.tracing.start()

    def stop_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded to `path`, whole or not at all: a file for ui.perfetto.dev or chrome://tracing.

        Raises TraceError when no trace is on, or the file cannot be written; the trace is kept then.
        """
        self._check_open()
        self._resources.tracing.stop(path)

    def end_profiling(self) -> str:
        """Write the profile that `SessionOptions.enable_profiling` began; returns the path of the file.

        It is a trace as `stop_trace` writes it. Raises TraceError when there is none, or it cannot be written.
        """
        self._check_open()
        return self._resources.tracing.end_profile()

    def close(self) -> None:
        """Unload the model and, unless the fleet is shared, stop the workers. Results stay valid.

        Runs in flight end with SessionClosedError. A worker that is busy for 5 s is killed. May be called again, from
        any thread, a callback or a signal's handler; see `closing.py` for who waits until all is closed. In a fork of
        the process that made the session it does nothing: there is nothing there to close.
        """
        self._resources.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """See `pickling.py`. Raises NotPicklableError, SessionClosedError."""
        if self._resources.closed:
            raise closed_error("session", CLOSED)
        return self._recipe.reduced(type(self))

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._resources.hurry()
        self._resources.close()

    def __repr__(self) -> str:
        of = "" if self._resources.loaded is None else f" of {self._resources.loaded.path}"
        workers = ", ".join(worker.name for worker in self._resources.workers)
        return f"<InferenceSession{of} on {workers}{' (closed)' if self._resources.closed else ''}>"

    def restart(self, provider: str) -> None:
        """End a provider's worker, start it anew, and place the model as if it had never failed.

        Deaths, back-off and quarantine of the provider are forgotten. Runs in flight end first; one at which it still
        is after a second raises RunCancelledError. Raises ProviderUnavailableError if the session has no such provider
        or it does not start, and the errors of planning.
        """
        self._check_open()
        restart(provider, self._runner, self._resources.supervisors, self._fleet)
