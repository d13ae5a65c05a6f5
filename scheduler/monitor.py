"""The monitor: the one thread of a fleet that owns sockets, processes and deadlines. A thin shell around `lifecycle`.

It spawns workers (a worker dies with the thread that spawned it), reads the ROUTER socket, watches pidfds and the
workers' output, and hands replies to whoever waits for them. Other threads reach it by `call`, never by its sockets.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import heapq
import itertools
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.providers.wire.errors import ProtocolMismatchError, WireError
from outrider.scheduler import dumps, lifecycle, story
from outrider.scheduler.closing import HURRIED_SECONDS, exiting
from outrider.scheduler.control_socket import ControlSocket, check_descriptors
from outrider.scheduler.errors import SessionClosedError
from outrider.scheduler.launch import launch
from outrider.scheduler.listener import Listener
from outrider.scheduler.log_queue import LogQueue
from outrider.scheduler.oom import OomKills
from outrider.scheduler.output import KEPT_BYTES
from outrider.scheduler.provider_file import loads
from outrider.scheduler.shortage import told
from outrider.scheduler.stalls import StallWarnings
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import ChannelClosedError, LayoutError, OutriderError
from outrider.shm.progress import RUN, STOP

log = logging.getLogger("outrider.fleet")

STOP_SECONDS = 5.0
DEATH_MILLISECONDS = 250  # between the end of a process's descriptors and that of its pidfd: microseconds
LONGEST = 86400.0  # seconds that it blocks
FULL_SECONDS = 5.0  # a worker that takes no messages for so long hangs
LAST_READS = 32  # of 64 KiB: more than a pipe holds
LAST_MESSAGES = 512  # more than a socket pair holds, where the system has Linux's default of 212 kB


class Monitor(threading.Thread):
    """Owns a fleet's sockets and processes. `shutdown` is idempotent, ends the thread, and leaves nothing behind.

    All descriptors are opened by the thread itself: no signal's handler is called there, so that none is lost half-way.
    `start` waits for that, and raises ProviderUnavailableError when the system refuses them.
    """

    def __init__(self, start_deadline: float) -> None:
        super().__init__(name="outrider-monitor", daemon=True)
        self.start_deadline = start_deadline
        self.patience = STOP_SECONDS
        self.workers: list[Worker] = []
        self.listeners: dict[int, Listener] = {}
        self._owner = os.getpid()
        self._replies: dict[tuple[Incarnation, tuple[Any, ...]], concurrent.futures.Future[Any]] = {}
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap: (when, order, what)
        self._order = itertools.count()
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closing = False
        self._ended = False
        self._watched: dict[int, Callable[[], object]] = {}
        self.log_queue = LogQueue()
        self._log = self.log_queue.logger(log.name)
        self._oom_kills = OomKills()

    def start(self) -> None:
        try:
            super().start()
            self._opened.result()
        except BaseException:  # KeyboardInterrupt: the thread may come or not; it would find nothing to do
            self._closing = True
            raise

    # From any thread ------------------------------------------------------------------------------------------------
    def call(self, action: Callable[[], None]) -> None:
        """Have the monitor do this soon, in order. After its end it is done at once, and finds all workers dead."""
        self._calls.append(action)
        self._wake.ring()
        if self._ended:
            self._do_calls()

    def request(
        self, to: Worker | Incarnation, message: messages.Message, reply: tuple[Any, ...]
    ) -> concurrent.futures.Future[Any]:
        """Send a message; the future gets the reply with that key (`_key_of`), or the death of who was asked."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        body = messages.pack(message)
        asked = _present(to)

        def send() -> None:
            if not asked.alive:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # who asked has left
                    future.set_exception(asked.death.again() if asked.death else _gone(asked))
                return
            self._replies[asked, reply] = future
            self._send(asked, body)

        self.call(send)
        return future

    def post(self, to: Worker | Incarnation, message: messages.Message) -> None:
        """Send a message that has no reply; one that is gone does not get it."""
        body = messages.pack(message)
        asked = _present(to)
        self.call(lambda: self._send(asked, body) if asked.alive else None)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have the monitor do this after so many seconds, unless it has ended by then; it must not block."""
        due = time.monotonic() + seconds
        self.call(lambda: heapq.heappush(self._timers, (due, next(self._order), action)))

    def kill(self, which: Worker | Incarnation, reason: str = "", spared: bool = False) -> None:
        """End a process, for this reason. `spared`: it is not to blame for that."""
        one = _present(which)

        def end() -> None:
            one.spared = one.spared or spared
            self._kill(one, reason)

        self.call(end)

    def end_if_deaf(self, one: Incarnation) -> None:
        """It takes no descriptors any more: that is its death, of which nobody was told yet, or the reason for it."""
        self.call(lambda: self._end_if_deaf(one))

    def start_worker(self, worker: Worker) -> Incarnation:
        """Start the worker's next incarnation, which is the present one from now on."""
        worker.current = one = worker.next_incarnation()
        self.call(lambda: self._spawn(one))
        return one

    def start_spare(self, worker: Worker) -> Incarnation:
        """Start the worker's next incarnation ahead."""
        worker.spare = one = worker.next_incarnation()
        one.ahead = True
        self.call(lambda: self._spawn(one))
        return one

    def hurry(self) -> None:
        """Do not wait long for workers that are busy when they are to stop."""
        self.patience = HURRIED_SECONDS
        if self._closing:
            self.call(self._hurry)

    def stop(self) -> None:
        """Have all workers asked to stop, and killed after `patience` seconds."""
        if not self._closing:
            self._closing = True
            if self.ident is not None:
                self.call(self._stop_all)

    def shutdown(self) -> None:
        """`stop`, wait for the end of the thread, and leave nothing behind."""
        if os.getpid() != self._owner:
            return  # a forked child has neither the thread nor the right
        self.stop()
        if self.ident is not None:
            self.join()

    # On the monitor's thread ----------------------------------------------------------------------------------------
    def run(self) -> None:
        try:
            self._open()
        except BaseException as error:  # whoever starts this thread raises it
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            StallWarnings(self).look()
            self._serve()
        except BaseException as error:  # a fault of ours: nobody may be left waiting for a monitor that is gone
            log.critical("the monitor of a fleet failed; its workers are ended", exc_info=True)
            self._abandon(error)
            raise
        finally:
            self._close()

    def _open(self) -> None:
        check_descriptors()
        with contextlib.ExitStack() as made:  # to be undone if the rest of it fails
            self._wake = Doorbell()
            made.callback(self._wake.close)
            self._pidfd = os.pidfd_open(os.getpid())
            made.callback(os.close, self._pidfd)
            self._socket = ControlSocket()
            made.pop_all()
        self._poller = zmq.Poller()
        self._poller.register(self._socket.router, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)

    def _serve(self) -> None:
        while not (self._closing and all(one.life.state == "dead" for one in self._incarnations())):
            for fd, _ in self._poller.poll(self._timeout()):
                if fd is self._socket.router:
                    self._receive()
                elif fd == self._wake.fileno():
                    self._wake.wait()
                elif fd in self._watched:
                    self._watched[fd]()
            self._do_calls()
            self._check_deadlines()

    def _do_calls(self) -> None:
        while True:
            try:
                action = self._calls.popleft()
            except IndexError:
                return
            action()

    def _abandon(self, error: BaseException) -> None:
        """End every worker and tell all who wait for one."""
        self._closing = True
        for one in self._incarnations():
            self._kill(one, f"the monitor of its fleet failed: {error!r}")
            code = -signal.SIGKILL if one.process is None else one.process.wait()
            one.facts = self._facts(one, code)
            one.life.state = "dead"
            if not one.ready.done():
                one.ready.set_exception(_unavailable(one, f"its monitor failed: {error!r}"))
            self._bury(one)
            if not one.ended.done():
                one.ended.set_result(None)
        for one in self._incarnations():
            self._close_pair(one)
        for fd in list(self._watched):
            self._unwatch(fd)
        for listener in list(self.listeners.values()):
            listener.on_closed()

    def _incarnations(self) -> list[Incarnation]:
        return [one for worker in self.workers for one in worker.incarnations()]

    def _timeout(self) -> int | None:
        """Milliseconds to the next deadline or timer; None without one."""
        times = [one.deadline[0] for one in self._incarnations() if one.deadline is not None]
        times += [self._timers[0][0]] if self._timers else []
        return max(0, int(min(LONGEST, min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for one in self._incarnations():
            if one.deadline is not None and one.deadline[0] <= now:
                seconds, one.deadline = one.deadline[1], None
                self._late(one, seconds)
        while self._timers and self._timers[0][0] <= now:
            _, _, action = heapq.heappop(self._timers)
            action()

    def _late(self, one: Incarnation, seconds: float) -> None:
        """Its deadline has passed. Where one is stuck that does not start belongs into the story."""

        def tell(_: str) -> None:
            self._tell(one, lifecycle.Late(seconds))

        if one.life.state == "starting":
            dumps.then(self, one, tell, keep=True)
        elif seconds < STOP_SECONDS and one.doing().kind == STOP:  # hurried, but it is not busy: its provider closes
            one.deadline = (time.monotonic() + STOP_SECONDS - seconds, STOP_SECONDS)
        else:
            self._tell(one, lifecycle.Late(seconds))

    def _spawn(self, one: Incarnation) -> None:
        failed: ProviderUnavailableError | None = None
        if self._closing:
            failed = _unavailable(one, "the fleet was closed")
        else:
            try:
                launch(one, self._socket.endpoint, self._pidfd)
            except ProviderUnavailableError as error:
                failed = error
            except (OSError, ValueError, TypeError) as error:
                failed = _unavailable(one, f"its process cannot be started: {told(error)}")
        if failed is not None:
            one.life.state = "dead"
            one.ended.set_result(None)
            if self._closing:
                _fail_closed(one.ready)
            else:
                one.ready.set_exception(failed)
            return
        if not one.worker.spec.debug:
            one.deadline = (time.monotonic() + self.start_deadline, self.start_deadline)
        self._watch(one.pidfd, lambda: self._exited(one))
        if one.pair is not None:
            self._watch(one.pair.fileno(), lambda: self._receive_from_pair(one))
        if one.output_fd >= 0:
            self._watch(one.output_fd, lambda: self._read_output(one))

    def _watch(self, fd: int, action: Callable[[], object]) -> None:
        self._watched[fd] = action
        self._poller.register(fd, zmq.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            del self._watched[fd]
            self._poller.unregister(fd)
            os.close(fd)

    def _read_output(self, one: Incarnation) -> bool:
        """Read some of what is there, and have its lines logged; False when nothing was."""
        try:
            data = os.read(one.output_fd, KEPT_BYTES)
        except BlockingIOError:
            return False
        if data:
            wanted = logging.getLogger(one.output_logger).isEnabledFor(logging.INFO)
            self.log_queue.put(one.output_logger, one.output.add(data, time.monotonic(), wanted))
        else:
            self.log_queue.put(one.output_logger, one.output.end())
            self._unwatch(one.output_fd)
        return bool(data)

    def _send(self, one: Incarnation, body: bytes) -> None:
        try:
            if one.pair is not None:
                one.pair.send(body, FULL_SECONDS)
            else:
                self._socket.send(one.identity, body, FULL_SECONDS)
        except OSError as error:  # it is gone or full, or descriptors are short: a large message to a pair takes one
            if not self._is_dying(one):
                self._log.error("worker %s cannot be reached (%s); it is killed", one.worker.name, str(error))
                self._kill(one, f"it could not be reached ({error})")

    def _receive(self) -> None:
        identity, body = self._socket.receive()
        one = next((one for one in self._incarnations() if one.identity == identity), None)
        if one is not None:  # else an earlier incarnation's last words
            self._close_pair(one)
            self._take(one, body)

    def _receive_from_pair(self, one: Incarnation) -> bool:
        """Take a message in, if there is one; False when nothing was."""
        if one.pair is None:
            return False
        try:
            body = one.pair.receive()
        except ChannelClosedError:
            self._close_pair(one)
            return False
        except LayoutError as error:
            self._broke(one, error)
            return False
        if body is not None:
            self._take(one, body)
        return body is not None

    def _close_pair(self, one: Incarnation) -> None:
        pair, one.pair = one.pair, None
        if pair is not None:
            del self._watched[pair.fileno()]
            self._poller.unregister(pair.fileno())
            pair.close()

    def _take(self, one: Incarnation, body: bytes) -> None:
        try:
            self._hear(one, messages.unpack(body))
        except (WireError, ProtocolMismatchError) as error:
            self._broke(one, error)

    def _broke(self, one: Incarnation, error: OutriderError) -> None:
        self._log.error("worker %s broke the protocol (%s); it is killed", one.worker.name, str(error))
        self._kill(one, f"it broke the protocol: {error}")

    def _hear(self, one: Incarnation, message: messages.Message) -> None:
        """Take a message in. Raises WireError for one that nobody asked for or that comes when it cannot."""
        if isinstance(message, (messages.Hello, messages.StartFailed)):
            if one.life.state == "ready" or message.incarnation != one.number:
                name = type(message).__name__
                raise WireError(f"it sent {name} a second time, or another's", where=name, reason="out of place")
            if isinstance(message, messages.StartFailed):
                self._tell(one, lifecycle.SaidStartFailed(message.reason, message.traceback))
            elif one.hello is None:
                one.hello = message
                self._tell(one, lifecycle.SaidHello())
        elif isinstance(message, messages.Failed):
            listener = self.listeners.get(message.session)
            if listener is not None:
                listener.on_failed(one, message)
        elif not isinstance(message, messages.Unloaded):  # nobody waits for that
            future = self._replies.pop((one, _key_of(message)), None)
            if future is None:
                name = type(message).__name__
                raise WireError(f"it sent {name}, which nobody asked for", where=name, reason="not asked for")
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # who asked has left
                future.set_result(message)

    def _exited(self, one: Incarnation) -> None:
        assert one.process is not None
        self._kill(one)  # what the provider started and left: until it is waited for, the group's number is its own
        code = one.process.wait()
        self._unwatch(one.pidfd)
        one.pidfd = -1
        for _ in range(LAST_MESSAGES):  # what it said last; a grandchild may keep its end open, and speak for ever
            if not self._receive_from_pair(one):
                break
        self._close_pair(one)
        for _ in range(LAST_READS):  # what it wrote last, as above
            if one.output_fd not in self._watched or not self._read_output(one):
                break
        if one.output_fd in self._watched:
            self.log_queue.put(one.output_logger, one.output.end())
            self._unwatch(one.output_fd)
        one.close_channel()
        one.deadline = None
        one.facts = self._facts(one, code)
        self._tell(one, lifecycle.Exited(code, story.last_words(one.facts, said=one.life.cause == "raised")))
        one.ended.set_result(None)

    def _tell(self, one: Incarnation, event: lifecycle.Event) -> None:
        for instruction in one.life.handle(event):
            if isinstance(instruction, lifecycle.Welcome):
                one.deadline = None
                assert one.hello is not None
                one.ready.set_result(one.hello)
            elif isinstance(instruction, lifecycle.Refuse):
                if self._closing:
                    _fail_closed(one.ready)
                else:
                    reason = one.killed or instruction.reason
                    if one.life.cause != "raised":  # then it says for itself what it loaded
                        reason += loads(one.worker.spec)
                    one.ready.set_exception(_unavailable(one, reason, instruction.detail))
            elif isinstance(instruction, lifecycle.Mourn):
                self._bury(one)
            elif isinstance(instruction, lifecycle.SendStop):
                self._send(one, messages.pack(messages.Stop()))
                one.deadline = (time.monotonic() + self.patience, self.patience)
            elif isinstance(instruction, lifecycle.Kill):
                self._kill(one)

    def _facts(self, one: Incarnation, code: int) -> story.Facts:
        """What is known of the end of a process, once it has been waited for."""
        worker, doing = one.worker, one.doing()
        stacks, one.stacks = one.stacks, None
        phase = "start" if one.life.state == "starting" else doing.phase
        facts = story.Facts(
            provider=worker.name,
            device=worker.device,
            incarnation=one.number,
            pid=one.pid,
            code=code,
            phase=phase,
            partition=doing.partition if phase in ("run", "load") else None,
            step=doing.step if phase in ("run", "load") else None,
            reason=one.killed or None,
            short=self._oom_kills.explain() if code == -signal.SIGKILL and not one.killed else None,
            memory_limit=worker.spec.memory_limit,
            passed_through=worker.spec.debug,
            stack=stacks.text() if stacks is not None else "",
            stderr=one.output.tail(),
        )
        if stacks is not None:
            stacks.close()
        return facts

    def _bury(self, one: Incarnation) -> None:
        worker, doing = one.worker, one.doing()
        assert one.facts is not None
        listeners = [] if one.ahead else list(self.listeners.values())
        told = [found for found in [listener.on_dying(one, doing) for listener in listeners] if found is not None]
        if told:
            one.facts = dataclasses.replace(one.facts, partition=told[0][0], nodes=told[0][1])
        elif doing.kind == RUN:  # it had just ended
            one.facts = dataclasses.replace(one.facts, phase="idle", partition=None, step=None)
        one.death = story.died(one.facts)
        if one.ahead:
            worker.spare_deaths += 1
        elif not one.spared:
            worker.restarts.died(time.monotonic())
        for key in [key for key in self._replies if key[0] is one]:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # who asked has left
                self._replies.pop(key).set_exception(one.death.again())
        for listener in listeners:
            listener.on_death(one)
        if one.ahead:
            self._log.warning("the spare of worker %s died: %s", worker.name, one.death)
            for listener in list(self.listeners.values()):
                listener.on_spare_lost(worker)

    def _end_if_deaf(self, one: Incarnation) -> None:
        if not self._is_dying(one):
            self._kill(one, "it broke the protocol: it closed its channel for descriptors")

    def _is_dying(self, one: Incarnation) -> bool:
        """Whether a process whose descriptors are closed has ended, or does so now."""
        if one.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(one.pidfd, select.POLLIN)
        return bool(poll.poll(DEATH_MILLISECONDS))

    def _kill(self, one: Incarnation, reason: str = "") -> None:
        if one.process is not None and one.process.returncode is None:
            one.killed = one.killed or reason
            with contextlib.suppress(ProcessLookupError):  # it is a zombie already; its pidfd will tell
                os.killpg(one.process.pid, signal.SIGKILL)

    def _stop_all(self) -> None:
        for one in self._incarnations():
            if one.process is None:
                one.life.state = "dead"
            self._tell(one, lifecycle.StopAsked())
        for listener in list(self.listeners.values()):
            listener.on_closed()

    def _hurry(self) -> None:
        for one in self._incarnations():
            if one.life.state == "stopping" and one.deadline is not None:
                one.deadline = (time.monotonic() + self.patience, self.patience)

    def _close(self) -> None:
        for future in self._replies.values():
            _fail_closed(future)
        self._replies.clear()
        self._timers.clear()
        self._ended = True
        self._do_calls()
        self._socket.close()
        for worker in self.workers:
            worker.bell.close()
            for one in worker.incarnations():
                one.progress = None
        self.log_queue.close()
        self._wake.close()
        os.close(self._pidfd)


def _key_of(message: messages.Message) -> tuple[Any, ...]:
    """The key under which a reply is waited for."""
    if isinstance(message, messages.Claims):
        return ("Claims", message.session, message.round)
    if isinstance(message, messages.Loaded):
        return ("Loaded", message.session, message.generation)
    if isinstance(message, messages.Resumed):
        return ("Resumed", message.session, message.generation)
    if isinstance(message, messages.Stats):
        return ("Stats", message.request)
    if isinstance(message, messages.TraceData):
        return ("TraceData", message.request)
    return (type(message).__name__,)


def _fail_closed(future: concurrent.futures.Future[Any]) -> None:
    """At the interpreter's exit, those that wait are daemon threads, which end where they are."""
    if not exiting():
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            future.set_exception(SessionClosedError("the fleet was closed", what="fleet"))


def _present(which: Worker | Incarnation) -> Incarnation:
    return which.current if isinstance(which, Worker) else which


def _gone(one: Incarnation) -> OutriderError:
    return _unavailable(one, "it is not running")


def _unavailable(one: Incarnation, reason: str, detail: str = "") -> ProviderUnavailableError:
    story = f"\n{detail.strip()}" if detail.strip() else ""
    name = one.worker.name
    return ProviderUnavailableError(f"provider {name} is not available: {reason}{story}", provider=name, reason=reason)
