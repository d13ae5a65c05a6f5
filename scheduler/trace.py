"""The trace of one session: what the coordinator and its workers did, from start to stop, as one file.

Each process keeps its spans itself (`providers/wire/spans.py`); nothing is sent while runs go on. At the end they are
fetched from the workers in parts, and `chrome.py` makes the file.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from outrider.providers.wire import messages
from outrider.providers.wire.errors import WireError
from outrider.providers.wire.spans import Recorder, Span, span_of, timed
from outrider.scheduler import chrome
from outrider.scheduler.errors import InvalidOptionError, OutriderError, TraceError

if TYPE_CHECKING:
    from outrider.scheduler.deploy import Blueprint
    from outrider.scheduler.fleet import Fleet
    from outrider.scheduler.monitor import Worker

log = logging.getLogger("outrider.trace")

VARIABLE = "OUTRIDER_TRACE"
ANSWER_SECONDS = 10.0  # that a worker may be busy when it is asked


def asked_for() -> str | None:
    """The path in OUTRIDER_TRACE, if set. Raises InvalidOptionError when no file can be made there."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    path = os.path.abspath(path)
    reason = _unwritable(path)
    if reason:
        raise InvalidOptionError(
            f"{VARIABLE}={path!r} is not valid: {reason}", name=VARIABLE, value=path, expected="a path for a file"
        )
    return path


def checked_path(path: Any) -> str:
    """An absolute path to write a trace to. Raises TraceError when no file can be made there."""
    try:
        found = os.path.abspath(os.fsdecode(path))
    except TypeError as error:
        raise TraceError(f"stop_trace takes the path of a file, not {path!r}", reason="no path") from error
    reason = _unwritable(found)
    if reason:
        raise TraceError(f"the trace cannot be written to {found}: {reason}; it goes on", path=found, reason=reason)
    return found


def _unwritable(path: str) -> str:
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


class SessionTrace:
    """A trace that is on. `recorder` takes the coordinator's own spans; the session tells of workers and plans."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.start()
        self._workers: dict[tuple[int, int], Worker] = {}  # (worker, incarnation) that was asked to record
        self._pids: dict[tuple[int, int], int] = {}
        self._links: dict[int, Sequence[chrome.Link]] = {}
        self._notes: list[str] = []
        self._lock = threading.Lock()

    def watch(self, fleet: Fleet, session: int, workers: Sequence[Worker]) -> None:
        """Have these workers record; the next run of the session is seen by all of them that are not busy."""
        asked = []
        with self._lock:
            for worker in workers:
                key = (worker.index, worker.incarnation)
                if key not in self._workers:
                    self._workers[key], self._pids[key] = worker, worker.pid
                    asked.append((worker, fleet.ask_for_spans(worker, session, on=True)))
            for worker, answer in asked:
                try:
                    answer.result(ANSWER_SECONDS)
                except (TimeoutError, OutriderError) as error:
                    self._notes.append(
                        f"{worker.name}: {_why(error)} when the trace began; its first spans are missing"
                    )

    def planned(self, generation: int, blueprint: Blueprint) -> None:
        """Runs of this generation follow this plan."""
        makers = {value.name: node.name for node in blueprint.graph.nodes for value in node.outputs}
        self._links[generation] = [
            chrome.Link(edge.value, edge.producer, makers.get(edge.value, ""), tuple(edge.consumers), edge.to_caller)
            for edge in blueprint.edges
        ]

    def finish(self, fleet: Fleet | None, session: int) -> dict[str, Any]:
        """Stop recording everywhere and return the file's contents (`chrome.document`)."""
        with self._lock:
            own = self._own()
            others = []
            if fleet is not None and threading.current_thread() is fleet.monitor:  # it collected the session
                self._missing("the session was left to the garbage collector: spans of its workers are missing")
            elif fleet is not None:
                others = [self._of(fleet, session, key) for key in sorted(self._workers)]
            return chrome.document([own, *[one for one in others if one is not None]], self._links, self._notes)

    def _own(self) -> chrome.Process:
        recorder, spans = self.recorder, []
        recorder.on = False
        while recorder:
            spans += recorder.take()
        return chrome.Process(os.getpid(), "coordinator", dict(recorder.threads), spans, recorder.dropped)

    def _of(self, fleet: Fleet, session: int, key: tuple[int, int]) -> chrome.Process | None:
        worker, pid = self._workers[key], self._pids[key]
        name = f"{worker.name} (worker {pid})" if key[1] == 1 else f"{worker.name} (worker {pid}, start {key[1]})"
        if worker.incarnation != key[1]:
            self._missing(f"{name} died: its spans are missing")
            return None
        spans: list[Span] = []
        malformed = 0
        try:
            while True:
                data: messages.TraceData = fleet.ask_for_spans(worker, session, on=False).result(ANSWER_SECONDS)
                for plain in data.spans:
                    try:
                        spans.append(span_of(plain))
                    except WireError:
                        malformed += 1
                if not data.left or not data.spans:
                    break
        except (TimeoutError, OutriderError) as error:
            self._missing(f"{name}: {_why(error)}; spans of it are missing")
            data = messages.TraceData(0, [], 0, {}, 0, False)
        if data.ended:
            self._missing(f"{name} forgot the session: its spans are missing")
        if malformed:
            self._missing(f"{name}: {malformed} spans were malformed and are missing")
        return chrome.Process(pid, name, {pid: "main", **data.threads}, spans, data.dropped)

    def _missing(self, note: str) -> None:
        log.warning("trace: %s", note)
        self._notes.append(note)


def _why(error: BaseException) -> str:
    text = str(error).splitlines()
    return text[0] if text else f"it was busy for {ANSWER_SECONDS:g} s"
