"""The monitor: the one thread of a fleet that owns sockets, processes and deadlines. A thin shell around `lifecycle`.

It spawns workers (a worker dies with the thread that spawned it), reads the ROUTER socket, watches pidfds and the
workers' output, and hands replies to whoever waits for them. Other threads reach it by `call`, never by its sockets.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgpack
import zmq

from outrider.providers.contract import ProviderUnavailableError
from outrider.providers.wire import messages
from outrider.providers.wire.errors import ProtocolMismatchError, WireError
from outrider.scheduler import lifecycle
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.output import KEPT_BYTES
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.descriptors import DescriptorChannel, pair
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import OutriderError
from outrider.shm.progress import ProgressReader, create_progress

log = logging.getLogger("outrider.fleet")

STOP_SECONDS = 5.0
DESCRIPTORS = 24  # of a monitor, its sockets' threads and its first connections
# Without the folders of argv[3] while a worker imports itself: a numpy.py beside a model is not NumPy.
_BOOT = (
    "import sys, json; path, without = map(json.loads, sys.argv[2:4]); "
    "sys.path[:] = [entry for entry in path if entry not in without]; "
    "from outrider.providers.worker import main; main(int(sys.argv[1]), path)"
)
_NEEDED = ("outrider", "numpy", "zmq", "msgpack")


class Listener(Protocol):
    """What a loaded session wants to hear, on the monitor's thread: it must not block."""

    def on_failed(self, message: messages.Failed) -> None:
        """A partition did not run."""

    def on_death(self, died: Incarnation, error: WorkerDiedError) -> None:
        """A worker died without being asked to."""

    def on_closed(self) -> None:
        """The fleet was closed: nothing will be heard any more."""


class Monitor(threading.Thread):
    """Owns a fleet's sockets and processes. `shutdown` is idempotent, ends the thread, and leaves nothing behind."""

    def __init__(self, start_deadline: float) -> None:
        super().__init__(name="outrider-monitor", daemon=True)
        _check_descriptors()
        self.start_deadline = start_deadline
        self.patience = STOP_SECONDS
        self.workers: list[Worker] = []
        self.listeners: dict[int, Listener] = {}
        self._owner = os.getpid()
        self._replies: dict[tuple[Incarnation, tuple[Any, ...]], concurrent.futures.Future[Any]] = {}
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = Doorbell()
        self._closing = False
        self._ended = False
        self._pidfd = os.pidfd_open(os.getpid())
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 1000)
        self._router.setsockopt(zmq.RCVHWM, 1000)
        self._router.setsockopt(zmq.SNDTIMEO, 5000)  # a queue that stays full is a worker that hangs
        self._folder, self._listener = _bound_without_a_name(self._router)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._watched: dict[int, Callable[[], object]] = {}

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

    def kill(self, which: Worker | Incarnation, reason: str = "") -> None:
        """End a process that does not answer, for this reason."""
        one = _present(which)
        self.call(lambda: self._kill(one, reason))

    def start_worker(self, worker: Worker) -> Incarnation:
        """Start the worker's next incarnation, which is the present one from now on."""
        worker.current = one = worker.next_incarnation()
        self.call(lambda: self._spawn(one))
        return one

    def start_spare(self, worker: Worker) -> Incarnation:
        """Start the worker's next incarnation ahead."""
        worker.spare = one = worker.next_incarnation()
        self.call(lambda: self._spawn(one))
        return one

    def shutdown(self) -> None:
        """Stop all workers (asked first, killed after 5 s), close everything, end the thread."""
        if os.getpid() != self._owner or self._closing:
            return  # a forked child has neither the thread nor the right
        self._closing = True
        if self.is_alive():
            self.call(self._stop_all)
            if threading.current_thread() is not self:  # a session may be collected on this thread
                self.join()
        else:
            self._close()

    # On the monitor's thread ----------------------------------------------------------------------------------------
    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a fault of ours: nobody may be left waiting for a monitor that is gone
            log.critical("the monitor of a fleet failed; its workers are ended", exc_info=True)
            self._abandon(error)
            raise
        finally:
            self._close()

    def _serve(self) -> None:
        while True:
            for fd, _ in self._poller.poll(self._timeout()):
                if fd is self._router:
                    self._receive()
                elif fd == self._wake.fileno():
                    self._wake.wait()
                elif fd in self._watched:
                    self._watched[fd]()
            self._do_calls()
            self._check_deadlines()
            if self._closing and all(one.life.state == "dead" for one in self._incarnations()):
                return

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
            self._kill(one)
            if one.process is not None:
                one.process.wait()
            one.life.state = "dead"
            if not one.ready.done():
                one.ready.set_exception(_unavailable(one, f"its monitor failed: {error!r}"))
            self._bury(one, lifecycle.Mourn(-signal.SIGKILL, "SIGKILL", f"the monitor failed: {error!r}"))
        for fd in list(self._watched):
            self._unwatch(fd)
        for listener in list(self.listeners.values()):
            listener.on_closed()

    def _incarnations(self) -> list[Incarnation]:
        return [one for worker in self.workers for one in worker.incarnations()]

    def _timeout(self) -> int | None:
        """Milliseconds to the next deadline; None without one."""
        times = [one.deadline[0] for one in self._incarnations() if one.deadline is not None]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for one in self._incarnations():
            if one.deadline is not None and one.deadline[0] <= now:
                seconds, one.deadline = one.deadline[1], None
                self._tell(one, lifecycle.Late(seconds))

    def _spawn(self, one: Incarnation) -> None:
        if self._closing:
            one.life.state = "dead"
            one.ready.set_exception(_unavailable(one, "the fleet was closed"))
            return
        try:
            self._launch(one)
        except (OSError, ValueError, TypeError) as error:
            one.life.state = "dead"
            one.ready.set_exception(_unavailable(one, f"its process cannot be started: {error}"))

    def _launch(self, one: Incarnation) -> None:
        worker = one.worker
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:  # the latter for what fails half-way
            ours, theirs = pair()
            kept.callback(ours.close)
            given.callback(theirs.close)
            boot = os.memfd_create("outrider-boot", os.MFD_CLOEXEC)
            given.callback(os.close, boot)
            reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            kept.callback(os.close, reader)
            given.callback(os.close, writer)
            os.set_blocking(writer, True)
            progress = create_progress()
            given.callback(os.close, progress)
            record = {
                "endpoint": f"ipc:///proc/self/fd/{self._listener}",
                "identity": one.identity.decode(),
                "name": worker.name,
                "kind": worker.kind,
                "options": dict(worker.spec.options),
                "device": worker.device,
                "threads": worker.threads,
                "incarnation": one.number,
                "spare": one is worker.spare,
                "parent": os.getpid(),
                "coordinator": self._pidfd,
                "doorbell": worker.bell.fileno(),
                "channel": theirs.fileno(),
                "progress": progress,
            }
            os.write(boot, msgpack.packb(record))
            os.lseek(boot, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(boot), *_paths()],  # -P: Python adds no folder of its own
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=environment(worker),
                pass_fds=(boot, self._pidfd, self._listener, worker.bell.fileno(), theirs.fileno(), progress),
                start_new_session=True,
            )
            kept.callback(process.wait)
            kept.callback(process.kill)
            one.progress = ProgressReader(progress)
            one.pidfd = os.pidfd_open(process.pid)
            kept.pop_all()
        one.process = process
        one.channel = DescriptorChannel(ours)
        one.deadline = (time.monotonic() + self.start_deadline, self.start_deadline)
        self._watch(one.pidfd, lambda: self._exited(one))
        self._watch(reader, lambda: self._read_output(one, reader))
        one.output_fd = reader

    def _watch(self, fd: int, action: Callable[[], object]) -> None:
        self._watched[fd] = action
        self._poller.register(fd, zmq.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            del self._watched[fd]
            self._poller.unregister(fd)
            os.close(fd)

    def _read_output(self, one: Incarnation, reader: int) -> bool:
        """Read what is there and log its lines; False when nothing was."""
        try:
            data = os.read(reader, KEPT_BYTES)
        except BlockingIOError:
            return False
        lines = one.output.add(data) if data else one.output.end()
        if not data:
            self._unwatch(reader)
        for line in lines:
            logging.getLogger(f"outrider.worker.{one.worker.name}").info("%s", line)
        return bool(data)

    def _send(self, one: Incarnation, body: bytes) -> None:
        try:
            self._router.send_multipart([one.identity, body])
        except zmq.ZMQError as error:
            log.error("worker %s cannot be reached (%s); it is killed", one.worker.name, str(error))
            self._kill(one, f"it could not be reached ({error})")

    def _receive(self) -> None:
        identity, *parts = self._router.recv_multipart()
        body = b"".join(parts)
        one = next((one for one in self._incarnations() if one.identity == identity), None)
        if one is None:
            return  # an earlier incarnation's last words
        try:
            message = messages.unpack(body)
        except (WireError, ProtocolMismatchError) as error:
            log.error("worker %s broke the protocol (%s); it is killed", one.worker.name, str(error))
            self._kill(one, f"it broke the protocol: {error}")
            return
        if isinstance(message, messages.Hello):
            one.hello = message
            self._tell(one, lifecycle.SaidHello())
        elif isinstance(message, messages.StartFailed):
            self._tell(one, lifecycle.SaidStartFailed(message.reason, message.traceback))
        elif isinstance(message, messages.Failed):
            listener = self.listeners.get(message.session)
            if listener is not None:
                listener.on_failed(message)
        else:
            future = self._replies.pop((one, _key_of(message)), None)
            if future is not None:
                future.set_result(message)

    def _exited(self, one: Incarnation) -> None:
        assert one.process is not None
        self._kill(one)  # what the provider started and left: until it is waited for, the group's number is its own
        code = one.process.wait()
        self._unwatch(one.pidfd)
        one.pidfd = -1
        reader = one.output_fd
        while reader in self._watched:  # what it wrote last; a grandchild may keep the pipe open
            if not self._read_output(one, reader):
                break
        self._unwatch(reader)
        one.close_channel()
        one.deadline = None
        self._tell(one, lifecycle.Exited(code, one.output.tail()))

    def _tell(self, one: Incarnation, event: lifecycle.Event) -> None:
        for instruction in one.life.handle(event):
            if isinstance(instruction, lifecycle.Welcome):
                one.deadline = None
                assert one.hello is not None
                one.ready.set_result(one.hello)
            elif isinstance(instruction, lifecycle.Refuse):
                one.ready.set_exception(_unavailable(one, instruction.reason, instruction.detail))
            elif isinstance(instruction, lifecycle.Mourn):
                one.worker.deaths += 1
                self._bury(one, instruction)
            elif isinstance(instruction, lifecycle.SendStop):
                self._send(one, messages.pack(messages.Stop()))
                one.deadline = (time.monotonic() + self.patience, self.patience)
            elif isinstance(instruction, lifecycle.Kill):
                self._kill(one)

    def _bury(self, one: Incarnation, death: lifecycle.Mourn) -> None:
        name = one.worker.name
        error = WorkerDiedError(
            f"worker {name} (incarnation {one.number}, pid {one.pid}) died: {lifecycle.exit_text(death.code)}."
            + (f" Its last output:\n{death.output}" if death.output.strip() else ""),
            provider=name,
            incarnation=one.number,
            exit_code=death.code,
            signal=death.signal,
            stderr=death.output,
        )
        one.death = error
        for key in [key for key in self._replies if key[0] is one]:
            self._replies.pop(key).set_exception(error.again())
        if one is one.worker.current:
            for listener in list(self.listeners.values()):
                listener.on_death(one, error)
        else:
            log.warning("the spare of worker %s died: %s", name, error)

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

    def _close(self) -> None:
        for future in self._replies.values():
            future.set_exception(ProviderUnavailableError("the fleet was closed", reason="closed"))
        self._replies.clear()
        self._ended = True
        self._do_calls()
        self._router.close(0)
        self._context.term()
        for worker in self.workers:
            worker.bell.close()
            for one in worker.incarnations():
                one.progress = None
        self._wake.close()
        os.close(self._pidfd)
        os.close(self._listener)
        os.close(self._folder)


def _check_descriptors() -> None:
    """ZeroMQ ends the process when it finds no descriptor for its threads: see to it that there are some."""
    held: list[int] = []
    try:
        for _ in range(DESCRIPTORS):
            held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        reason = f"a fleet needs {DESCRIPTORS} file descriptors and {len(held)} are left ({error.strerror})"
        raise ProviderUnavailableError(f"no worker can be started: {reason}; raise ulimit -n", reason=reason) from error
    finally:
        for fd in held:
            os.close(fd)


def _bound_without_a_name(router: zmq.Socket[bytes]) -> tuple[int, int]:
    """Bind an ipc:// endpoint and remove its file; returns descriptors of its folder and of it (O_PATH).

    Workers inherit the latter and connect to `/proc/self/fd/<number>`. So nobody else can reach the socket, and a
    coordinator that is killed leaves no file behind. It is bound through the folder's descriptor, as paths of sockets
    end at 107 bytes; that stays open while the socket does, which removes its file by that name when it closes.
    """
    try:
        path = tempfile.mkdtemp(prefix="outrider-")  # mode 0700
    except OSError as error:
        reason = f"no folder for the control socket can be made ({error.strerror}); set TMPDIR to one"
        raise ProviderUnavailableError(f"no worker can be started: {reason}", reason=reason) from error
    folder = -1
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        router.bind(f"ipc:///proc/self/fd/{folder}/c")
        return folder, os.open(f"{path}/c", os.O_PATH | os.O_CLOEXEC)
    except BaseException:
        if folder >= 0:
            os.close(folder)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):  # unlike rmtree, this needs no descriptor
            os.unlink(f"{path}/c")
        os.rmdir(path)


def _paths() -> tuple[str, str]:
    """The worker's `sys.path`, and what it does without until it has imported itself: the current folder. As JSON."""
    try:
        here = [os.getcwd()]
    except OSError:  # it was removed
        here = []
    # As the import system does, this skips what is no text; what is relative means nothing without a current folder.
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str) and (here or os.path.isabs(entry))]
    ours = {os.path.dirname(os.path.dirname(str(sys.modules[name].__file__))) for name in _NEEDED}
    return json.dumps(path), json.dumps([folder for folder in here if folder not in ours])


def environment(worker: Worker) -> dict[str, str]:
    """The environment of a worker: ours, no spinning thread pools, its thread count, and what its spec adds."""
    threads = str(worker.threads)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_THREAD_TIMEOUT": "4",  # the default burns 112 ms of CPU after each GEMM
        "OMP_WAIT_POLICY": "passive",
    }
    return {**os.environ, **fixed, **worker.spec.env}


def _key_of(message: messages.Message) -> tuple[Any, ...]:
    """The key under which a reply is waited for."""
    if isinstance(message, messages.Claims):
        return ("Claims", message.session, message.round)
    if isinstance(message, messages.Loaded):
        return ("Loaded", message.session, message.generation)
    if isinstance(message, messages.Resumed):
        return ("Resumed", message.session, message.generation)
    if isinstance(message, messages.Unloaded):
        return ("Unloaded", message.session)
    if isinstance(message, messages.Stats):
        return ("Stats", message.request)
    if isinstance(message, messages.TraceData):
        return ("TraceData", message.request)
    return (type(message).__name__,)


def _present(which: Worker | Incarnation) -> Incarnation:
    return which.current if isinstance(which, Worker) else which


def _gone(one: Incarnation) -> OutriderError:
    return _unavailable(one, "it is not running")


def _unavailable(one: Incarnation, reason: str, detail: str = "") -> ProviderUnavailableError:
    story = f"\n{detail.strip()}" if detail.strip() else ""
    name = one.worker.name
    return ProviderUnavailableError(f"provider {name} is not available: {reason}{story}", provider=name, reason=reason)
