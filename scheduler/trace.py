"""The trace of one session: what the coordinator and its workers did, from start to stop, as one file.

Each process keeps its spans itself (`providers/wire/spans.py`); nothing is sent while runs go on. At the end they are
fetched from the workers in parts, and `chrome.py` makes the file.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from outrider.providers.wire import messages
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.spans import LIMIT, Args, Recorder, Span, span_of, timed
from outrider.scheduler import chrome
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.errors import InvalidOptionError, OutriderError, TraceError

if TYPE_CHECKING:
    from outrider.scheduler.deploy import Deployer
    from outrider.scheduler.fleet import Fleet
    from outrider.scheduler.inplace import Targets
    from outrider.scheduler.replica import Replica, Slot
    from outrider.scheduler.runner import Runner
    from outrider.scheduler.steady import Signature
    from outrider.scheduler.watching import Watch
    from outrider.scheduler.worker import Worker

log = logging.getLogger("outrider.trace")

VARIABLE = "OUTRIDER_TRACE"
ANSWER_SECONDS = 10.0  # that a worker may be busy when it is asked


def asked_for() -> str | None:
    """The path in OUTRIDER_TRACE, if set. Raises InvalidOptionError when no file can be made there."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    path = os.path.abspath(path)
    reason = unwritable(path)
    if reason:
        raise InvalidOptionError(
            f"{VARIABLE}={path!r} is not valid: {reason}", name=VARIABLE, value=path, expected="a path for a file"
        )
    return path


def profile_path(prefix: str) -> str:
    """The file of a profile that begins now. Raises InvalidOptionError when it cannot be made."""
    path = os.path.abspath(f"{prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}.json")
    reason = unwritable(path)
    if reason:
        expected = f"the beginning of a path where a file can be made ({reason})"
        raise invalid_option("profile_file_prefix", prefix, expected)
    return path


def checked_path(path: Any) -> str:
    """An absolute path to write a trace to. Raises TraceError when no file can be made there."""
    try:
        found = os.path.abspath(os.fsdecode(path))
    except TypeError as error:
        raise TraceError(f"stop_trace takes the path of a file, not {path!r}", reason="no path") from error
    reason = unwritable(found)
    if reason:
        raise TraceError(f"the trace cannot be written to {found}: {reason}; it goes on", path=found, reason=reason)
    return found


def unwritable(path: str) -> str:
    """Why no file can be made at an absolute path; '' if one can."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        return "it is a folder"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"files cannot be made in {folder}"
    return ""


class _Recording(Protocol):
    @property
    def recorder(self) -> Recorder | None: ...


_Self = TypeVar("_Self", bound=_Recording)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def spanned(kind: str) -> Callable[[Callable[Concatenate[_Self, _P], _R]], Callable[Concatenate[_Self, _P], _R]]:
    """Each call of a method is a span of this kind in the `recorder` of its object, if that has one."""

    def decorate(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
        @functools.wraps(method)
        def timed_method(self: _Self, /, *args: _P.args, **keywords: _P.kwargs) -> _R:
            with timed(self.recorder, kind, kind):
                return method(self, *args, **keywords)

        return timed_method

    return decorate


def run_traced(
    recorder: Recorder,
    runner: Runner,
    slot: Slot,
    feeds: Mapping[str, Any],
    defaults: Mapping[str, Any],
    wanted: Sequence[str],
    signature: Signature | None,
    targets: Targets | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """`runner.begin`, `wait` and `finish` with their spans: the run, its inputs, the wait for workers, its results."""
    counters, start = slot.counters, monotonic_ns()
    deployer, generation = slot.replica.deployer, slot.replica.generation
    where = {"session": deployer.session, "generation": 0 if generation is None else generation.number}
    args: Args = {"slot": slot.index, **where}
    name = "run"
    try:
        before = counters.copied_bytes
        run = runner.begin(slot, feeds, defaults, signature, targets, watch)
        begun, copied = monotonic_ns(), counters.copied_bytes
        args["run"], name = run, f"run {run}"
        recorder.add("copy", "inputs", start, begun, {"bytes": copied - before})
        try:
            runner.wait(slot, run)
        finally:
            woken = monotonic_ns()
            recorder.add("wait", "workers", begun, woken, {})
        results = runner.finish(slot, run, wanted, signature, waited=True)
        recorder.add("copy", "results", woken, monotonic_ns(), {"bytes": counters.copied_bytes - copied})
    except BaseException as error:
        args["error"] = type(error).__name__
        raise
    finally:
        recorder.add("run", name, start, monotonic_ns(), args)
    return results


class Tracing:
    """What start_trace, stop_trace and OUTRIDER_TRACE do to one session. May be used from any thread.

    With OUTRIDER_TRACE, or the beginning of the name of a `profile`, a trace is on from the beginning; `start` then
    takes it over. Raises InvalidOptionError when no file can be made there.
    """

    def __init__(self, profile: str | None = None) -> None:
        self._profile = None if profile is None else profile_path(profile)
        self._path = self._profile or asked_for()
        self._trace = None if self._path is None else SessionTrace()
        self._runner: Runner | None = None
        self._lock = threading.Lock()

    @property
    def recorder(self) -> Recorder | None:
        """Where the coordinator's spans go now."""
        return None if self._trace is None else self._trace.recorder

    # Told by the session ---------------------------------------------------------------------------------------------
    def watch(self, deployer: Deployer, workers: Sequence[Worker]) -> None:
        """These workers will be asked for claims, and load what `deployer` deploys."""
        trace = self._trace
        deployer.recorder = self.recorder
        if trace is not None:
            trace.watch(deployer.fleet, deployer.session, workers)

    def installed(self, replica: Replica) -> None:
        """A replica has a new generation."""
        trace = self._trace
        if trace is not None:
            trace.planned(replica)

    def use(self, runner: Runner) -> None:
        """Runs are made here."""
        self._runner = runner
        runner.recorder = self.recorder

    # For the user ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Trace from now on. Raises TraceError when a trace is on."""
        with self._lock:
            if self._path is not None:
                self._path = None
                return
            if self._trace is not None:
                raise TraceError("a trace is on already: end it with stop_trace(path)", reason="started twice")
            self._trace = SessionTrace()
            assert self._runner is not None
            for replica in self._runner.replicas:
                self.watch(replica.deployer, replica.blueprint.workers)
                self.installed(replica)
            self._runner.recorder = self.recorder

    def stop(self, path: Any) -> None:
        """End the trace and write it. Raises TraceError when none is on, or it cannot be written; then it is kept."""
        with self._lock:
            if self._trace is None:
                raise TraceError("no trace is on: begin one with start_trace()", reason="not started")
            target = checked_path(path)
            contents = self._end(self._trace, ANSWER_SECONDS)
            try:
                chrome.write(target, contents)
            except OSError as error:
                raise TraceError(
                    f"the trace cannot be written to {target}: {error.strerror}; call stop_trace with another path",
                    path=target,
                    reason=error.strerror,
                ) from error
            self._trace = self._path = None

    def end_profile(self) -> str:
        """End the profile that was on from the beginning, and write it; returns the file's path.

        Raises TraceError when there is none, or it cannot be written; then it is kept.
        """
        with self._lock:
            if self._profile is None or self._trace is None:
                reason = "no profile is on: SessionOptions.enable_profiling begins one with the session"
                raise TraceError(reason, reason="not started")
            contents = self._end(self._trace, ANSWER_SECONDS)
            try:
                written = chrome.write_beside(self._profile, contents)
            except OSError as error:
                reason = f"the profile cannot be written to {self._profile}: {error.strerror}"
                raise TraceError(reason, path=self._profile, reason=error.strerror) from error
            self._trace = self._path = self._profile = None
            return written

    def close(self, seconds: float) -> None:
        """The session ends: write the profile, or what OUTRIDER_TRACE asked for.

        Waits `seconds` for another thread that ends it.
        """
        if self._trace is None:
            return
        held = False
        try:
            for held in map(self._lock.acquire, (True,), (seconds,)):  # Ctrl-C may follow a call, see `slots.py`
                if held:
                    self._close()
        finally:
            if held:
                self._lock.release()

    def _close(self) -> None:
        trace, path = self._trace, self._path
        self._trace = self._path = None
        if trace is None:
            return
        if path is None:
            log.warning("a trace was started and never stopped: it is not written")
            return
        try:
            written = chrome.write_beside(path, self._end(trace, None))
        except OSError as error:
            log.error("the trace cannot be written to %s: %s", path, error.strerror)
            return
        if written != path:
            log.warning("%s is there already: the trace of this session is in %s", path, written)

    def _end(self, trace: SessionTrace, seconds: float | None) -> dict[str, Any]:
        if self._runner is not None:
            self._runner.recorder = None
            for replica in self._runner.replicas:
                replica.deployer.recorder = None
        return trace.finish(seconds)


@dataclass(frozen=True)
class _Member:
    """A worker that was asked to record."""

    fleet: Fleet
    session: int
    worker: Worker
    incarnation: int
    pid: int

    @property
    def name(self) -> str:
        """As the trace shows it."""
        again = "" if self.incarnation == 1 else f", start {self.incarnation}"
        return f"{self.worker.name} (worker{again})"


class SessionTrace:
    """One trace. `recorder` takes the coordinator's own spans; workers are asked for theirs in the end."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.start()
        self._members: dict[tuple[int, int, int], _Member] = {}
        self._links: dict[tuple[int, int], Sequence[chrome.Link]] = {}
        self._notes: list[str] = []
        self._contents: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def watch(self, fleet: Fleet, session: int, workers: Sequence[Worker]) -> None:
        """Have these workers record, from now on unless they are busy."""
        asked = []
        with self._lock:
            for worker in workers:
                key = (session, worker.index, worker.incarnation)
                if key not in self._members:
                    self._members[key] = member = _Member(fleet, session, worker, worker.incarnation, worker.pid)
                    asked.append((member, fleet.ask_for_spans(worker, session, on=True)))
            for member, answer in asked:
                try:
                    answer.result(ANSWER_SECONDS)
                except (TimeoutError, OutriderError) as error:
                    self._missing(f"{member.name}: {_why(error)}, so its first spans are missing")

    def planned(self, replica: Replica) -> None:
        """Runs of the replica's present generation follow its present plan."""
        blueprint, generation = replica.blueprint, replica.generation
        if generation is None:
            return
        makers = {value.name: node.name for node in blueprint.graph.nodes for value in node.outputs}
        self._links[replica.deployer.session, generation.number] = [
            chrome.Link(edge.value, edge.producer, makers.get(edge.value, ""), tuple(edge.consumers), edge.to_caller)
            for edge in blueprint.edges
        ]

    def finish(self, seconds: float | None) -> dict[str, Any]:
        """Stop recording everywhere; returns the file's contents (`chrome.document`), the same ones when asked again.

        `seconds`: that a worker may be busy; None: as many as it gets when its fleet is closed.
        """
        with self._lock:
            if self._contents is None:
                processes = [self._own()]
                for _, member in sorted(self._members.items()):
                    processes += self._of(member, member.fleet.monitor.patience if seconds is None else seconds)
                self._contents = chrome.document(processes, self._links, self._notes)
            return self._contents

    def _own(self) -> chrome.Process:
        recorder, spans = self.recorder, list[Span]()
        recorder.on = False
        while recorder:
            spans += recorder.take()
        return chrome.Process(os.getpid(), "coordinator", dict(recorder.threads), spans, recorder.dropped)

    def _of(self, member: _Member, seconds: float) -> list[chrome.Process]:
        """What the worker recorded; [] if nothing can be had."""
        if member.worker.incarnation != member.incarnation:
            self._missing(f"{member.name} died: its spans are missing")
            return []
        if threading.current_thread() is member.fleet.monitor:  # it collected the session, and cannot wait for itself
            self._missing(f"{member.name}: the session was not closed, so its spans are missing")
            return []
        spans: list[Span] = []
        malformed = dropped = 0
        threads = {member.pid: "main"}
        try:
            while True:
                ask = member.fleet.ask_for_spans(member.worker, member.session, on=False)
                data: messages.TraceData = ask.result(seconds)
                threads, dropped = {**data.threads, **threads}, data.dropped
                for plain in data.spans:
                    try:
                        spans.append(span_of(plain))
                    except WireError:
                        malformed += 1
                if data.ended:
                    self._missing(f"{member.name} has forgotten the session: its spans are missing")
                if not data.left or not data.spans or len(spans) + malformed > LIMIT:
                    break
        except (TimeoutError, OutriderError) as error:
            self._missing(f"{member.name}: {_why(error)}, so spans of it are missing")
        if malformed:
            self._missing(f"{member.name}: {malformed} spans were malformed and are missing")
        return [chrome.Process(member.pid, member.name, threads, spans, dropped)]

    def _missing(self, note: str) -> None:
        log.warning("trace: %s", note)
        self._notes.append(note)


def _why(error: BaseException) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else "it was busy"
