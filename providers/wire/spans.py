"""Spans: what a process did from when to when, kept while a session is traced.

A span is a plain tuple (kind, name, thread, start, end, args): `start` and `end` in nanoseconds of CLOCK_MONOTONIC,
which is one clock for all processes of a host; `thread` the system's number of the thread; `args` a flat dict of text
and whole numbers ('bytes', 'run', 'partition', 'error' ...), or one of such. Kinds: load, start, claim, plan, deploy,
compile, run, partition, unit, step, bind, copy, wait.

A Recorder keeps the latest spans of one session in one process, and counts what it had to drop. A Trace is what a
worker hands to its provider: it leads to the recorder of the session whose work is being done, if that is traced.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from time import monotonic_ns
from typing import Any

from outrider.providers.wire.errors import WireError
from outrider.providers.wire.failures import text_of

Args = dict[str, Any]
Span = tuple[str, str, int, int, int, Args]

KINDS = frozenset(
    ("load", "start", "claim", "plan", "deploy", "compile", "run", "partition", "unit", "step", "bind", "copy", "wait")
)
LIMIT = 100_000  # spans kept per session and process
CHUNK_BYTES = 1 << 20  # of one message, about
NAME_LENGTH = 200
_SPAN_BYTES = 64  # of a span without its texts
_HERE = threading.local()  # number: the system's, of this thread


class Recorder:
    """The latest spans of one session in one process. May be used from several threads.

    `on`: whether it is to be added to, for its owner. `dropped`: spans that were forgotten since the last `start`.
    `operators`: 'domain::op' -> [runs, seconds], over all that was ever recorded. `steps`: how many were ever told.
    `threads`: number -> name of those that recorded.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.on = False
        self.dropped = 0
        self.operators: dict[str, list[float]] = {}
        self.threads: dict[int, str] = {}
        self.steps = 0
        self._spans: deque[Span] = deque()
        self._limit = limit
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    def start(self) -> None:
        """Forget the spans so far, and be on; the totals of `operators` stay."""
        with self._lock:
            self.on = True
            self._spans.clear()
            self.dropped = 0

    def add(self, kind: str, name: str, start: int, end: int, args: Args) -> None:
        """Keep a span of this thread; the oldest one goes where there is no room."""
        try:
            thread = _HERE.number
        except AttributeError:
            thread = _HERE.number = threading.get_native_id()
        with self._lock:
            if thread not in self.threads:
                self.threads[thread] = threading.current_thread().name
            if len(self._spans) >= self._limit:
                self._spans.popleft()
                self.dropped += 1
            self._spans.append((kind, name, thread, start, end, args))

    def step(self, name: str, op: str, start: int, end: int, args: Args) -> None:
        """Keep the span of one step of a unit, and count it for its operator."""
        self.add("step", name, start, end, args)
        self.steps += 1
        if op:
            self.count(op, end - start)

    def count(self, op: str, nanoseconds: int) -> None:
        """One more execution of an operator, 'domain::op'."""
        total = self.operators.get(op)
        if total is None:
            total = self.operators[op] = [0, 0.0]
        total[0] += 1
        total[1] += nanoseconds / 1e9

    @contextlib.contextmanager
    def timed(self, kind: str, name: str, args: Args | None = None) -> Iterator[Args]:
        """Keep the span of a block. Yields its args, to be added to; an exception's class is noted as 'error'."""
        noted: Args = {} if args is None else args
        start = monotonic_ns()
        try:
            yield noted
        except BaseException as error:
            noted["error"] = type(error).__name__
            raise
        finally:
            self.add(kind, name, start, monotonic_ns(), noted)

    def take(self, nbytes: int = CHUNK_BYTES) -> list[Span]:
        """Remove and return the oldest spans, of about so many bytes as a message, at least one if there is any."""
        taken: list[Span] = []
        with self._lock:
            while self._spans and nbytes > 0:
                span = self._spans.popleft()
                nbytes -= _size(span)
                taken.append(span)
        return taken


def timed(recorder: Recorder | None, kind: str, name: str, args: Args | None = None) -> Any:
    """`recorder.timed(...)`; without a recorder nothing is kept."""
    return contextlib.nullcontext({}) if recorder is None else recorder.timed(kind, name, args)


class Trace:
    """What a provider sees of tracing, as `context.trace`; using it is optional.

    `on`: True while a traced session has this worker claim, compile or run; look at it before taking any time. Steps
    that are told show inside the worker's own span of the unit, and are counted in `stats()["per_operator"]`.
    """

    def __init__(self) -> None:
        self.on = False
        self.recorder: Recorder | None = None

    def span(
        self, name: str, start: int, end: int, op: str = "", nbytes: int = 0, kernel: str = "", operations: int = 0
    ) -> None:
        """A step that this thread has done: `start`, `end` from `time.monotonic_ns()`.

        `name`: of the node; `op`: its `label`, 'domain::op'; `nbytes`: of what it made; `kernel`: what computed it;
        `operations`: multiplications and additions, where they are known. Raises ValueError for an end before its
        start.
        """
        if start > end:
            raise ValueError(f"the span {name!r} ends {start - end} ns before it starts")
        if self.recorder is not None:
            args: Args = {"bytes": nbytes}
            if op:
                args["op"] = op
            if kernel:
                args["kernel"] = kernel
            if operations:
                args["operations"] = operations
            self.recorder.step(name, op, start, end, args)

    def into(self, recorder: Recorder | None) -> Trace:
        """For the worker: what is done in a `with` of this belongs to the session of `recorder`, None if not traced."""
        self.recorder, self.on = recorder, recorder is not None
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        self.recorder, self.on = None, False


# As messages --------------------------------------------------------------------------------------------------------
def plain_span(span: Span) -> list[Any]:
    """The span as a message carries it: texts are short, and have UTF-8."""
    kind, name, thread, start, end, args = span
    return [kind, _text(name), thread, start, end, _plain(args)]


def span_of(body: Any) -> Span:
    """The span again. Raises WireError for anything else than what `plain_span` makes."""
    if type(body) is not list or len(body) != 6:
        raise _malformed("six fields")
    kind, name, thread, start, end, args = body
    texts, numbers = (kind, name), (thread, start, end)
    if any(type(one) is not str for one in texts) or any(type(one) is not int for one in numbers) or kind not in KINDS:
        raise _malformed("(kind, name, thread, start, end, args)")
    if not 0 <= start <= end < 1 << 63 or not 0 <= thread < 1 << 32:
        raise _malformed("an end after its start")
    if type(args) is not dict or not _is_plain(args, deep=True):
        raise _malformed("args of text and whole numbers")
    return kind, name, thread, start, end, args


def _malformed(expected: str) -> WireError:
    return WireError(f"a span must have {expected}", where="TraceData.spans", reason="malformed")


def _is_plain(args: Mapping[Any, Any], deep: bool) -> bool:
    for key, value in args.items():
        if type(key) is not str:
            return False
        if type(value) not in (str, int, bool) and not (deep and type(value) is dict and _is_plain(value, deep=False)):
            return False
    return True


def _text(value: Any) -> str:
    return text_of(value)[:NAME_LENGTH]


def _plain(args: Mapping[str, Any]) -> Args:
    made: Args = {}
    for key, value in args.items():
        if isinstance(value, Mapping):
            made[_text(key)] = _plain(value)
        elif isinstance(value, int):
            made[_text(key)] = value if -(1 << 63) <= value < 1 << 64 else str(value)
        else:
            made[_text(key)] = _text(value)
    return made


def _size(span: Span) -> int:
    inner = sum(len(value) * _SPAN_BYTES for value in span[5].values() if isinstance(value, dict))
    return _SPAN_BYTES + 2 * min(len(span[1]), NAME_LENGTH) + 16 * len(span[5]) + inner
