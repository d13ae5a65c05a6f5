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
from outrider.scheduler.closing import HURRIED_SECONDS, exiting
from outrider.scheduler.errors import SessionClosedError, WorkerDiedError
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.output import KEPT_BYTES, WorkerOutput
from outrider.shm.descriptors import DescriptorChannel, pair
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import ChannelClosedError

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

    def on_death(self, worker: Worker, error: WorkerDiedError) -> None:
        """A worker died without being asked to."""

    def on_closed(self) -> None:
        """The fleet was closed: nothing will be heard any more."""


class Worker:
    """One worker of a fleet, through its incarnations. `ready` resolves when the present one has said Hello."""

    def __init__(self, index: int, name: str, kind: str, device: int, spec: ProviderSpec, threads: int) -> None:
        self.index = index
        self.name = name
        self.kind = kind
        self.device = device
        self.spec = spec
        self.threads = threads
        self.bell = Doorbell()  # the same one for every incarnation
        self.incarnation = 0
        self.deaths = 0
        self.life = lifecycle.Lifecycle()
        self.hello: messages.Hello | None = None
        self.ready: concurrent.futures.Future[messages.Hello] = concurrent.futures.Future()
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.channel: DescriptorChannel | None = None
        self.output = WorkerOutput()
        self.output_fd = -1
        self.deadline: tuple[float, float] | None = None  # (monotonic time, seconds it was)
        self.death: WorkerDiedError | None = None
        self._descriptor = 0
        self._channel_lock = threading.Lock()

    @property
    def identity(self) -> bytes:
        """The ROUTER's name for the present incarnation: mail for an earlier one never reaches it."""
        return f"{self.index}/{self.incarnation}".encode()

    @property
    def alive(self) -> bool:
        """True between Hello and death."""
        return self.life.state == "ready"

    @property
    def pid(self) -> int:
        """Process id of the present incarnation, 0 before the first."""
        return 0 if self.process is None else self.process.pid

    def send_descriptors(self, fds: list[int]) -> list[int]:
        """Send duplicates; the ids that messages may name them by. Raises WorkerDiedError when it is gone."""
        with self._channel_lock:
            ids = [self._descriptor + 1 + i for i in range(len(fds))]
            self._descriptor += len(fds)
            try:
                if self.channel is None:
                    raise ChannelClosedError(f"worker {self.name} is not running")
                self.channel.send(dict(zip(ids, fds, strict=True)))
            except ChannelClosedError as error:  # the monitor may not have told of its death yet
                death = self.death
                if death is not None and death.incarnation == self.incarnation:
                    raise death.again() from error
                raise WorkerDiedError(
                    f"worker {self.name} (incarnation {self.incarnation}) died before it got its part of the model",
                    provider=self.name,
                    incarnation=self.incarnation,
                    nodes=[],
                ) from error
            return ids

    def tail(self) -> str:
        """The last 64 KiB that the process wrote to its standard output and error."""
        return self.output.tail()


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
        self._replies: dict[tuple[int, tuple[Any, ...]], concurrent.futures.Future[Any]] = {}
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
        self, worker: Worker, message: messages.Message, reply: tuple[Any, ...]
    ) -> concurrent.futures.Future[Any]:
        """Send a message; the future gets the reply with that key (`_key_of`), or the worker's death."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        body = messages.pack(message)

        def send() -> None:
            if _session_of(reply) not in (None, *self.listeners):
                future.set_exception(SessionClosedError("the session was closed", what="session"))
                return
            if not worker.alive:
                death = worker.death
                future.set_exception(death.again() if death else _unavailable(worker, "it is not running"))
                return
            self._replies[worker.index, reply] = future
            self._send(worker, body)

        self.call(send)
        return future

    def post(self, worker: Worker, message: messages.Message) -> None:
        """Send a message that has no reply; a worker that is gone does not get it."""
        body = messages.pack(message)
        self.call(lambda: self._send(worker, body) if worker.alive else None)

    def kill(self, worker: Worker) -> None:
        """End a worker that does not answer."""
        self.call(lambda: self._kill(worker))

    def start_worker(self, worker: Worker) -> None:
        """Start the worker's next incarnation; `worker.ready` is a new future."""
        worker.ready = concurrent.futures.Future()
        self.call(lambda: self._spawn(worker))

    def forget(self, session: int) -> None:
        """A session is closed: it hears nothing more, and who waits for an answer to it gets SessionClosedError."""
        self.listeners.pop(session, None)

        def forget() -> None:
            for key in [key for key in self._replies if _session_of(key[1]) == session]:
                self._replies.pop(key).set_exception(SessionClosedError("the session was closed", what="session"))

        self.call(forget)

    def hurry(self) -> None:
        """Do not wait long for workers that are busy when they are to stop."""
        self.patience = HURRIED_SECONDS
        if self._closing:
            self.call(self._hurry)

    def stop(self) -> None:
        """Have all workers asked to stop, and killed after `patience` seconds."""
        if not self._closing:
            self._closing = True
            self.call(self._stop_all)

    def shutdown(self) -> None:
        """`stop`, wait for the end of the thread, and leave nothing behind."""
        if os.getpid() != self._owner:
            return  # a forked child has neither the thread nor the right
        self.stop()
        if self.ident is None:  # never started
            self._close()
        else:
            self.join()

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
            if self._closing and all(worker.life.state == "dead" for worker in self.workers):
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
        for worker in self.workers:
            self._kill(worker)
            if worker.process is not None:
                worker.process.wait()
            worker.life.state = "dead"
            if not worker.ready.done():
                worker.ready.set_exception(_unavailable(worker, f"its monitor failed: {error!r}"))
            self._bury(worker, lifecycle.Mourn(-signal.SIGKILL, "SIGKILL", f"the monitor failed: {error!r}"))
        for fd in list(self._watched):
            self._unwatch(fd)
        for listener in list(self.listeners.values()):
            listener.on_closed()

    def _timeout(self) -> int | None:
        """Milliseconds to the next deadline; None without one."""
        times = [worker.deadline[0] for worker in self.workers if worker.deadline is not None]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.deadline is not None and worker.deadline[0] <= now:
                seconds, worker.deadline = worker.deadline[1], None
                self._tell(worker, lifecycle.Late(seconds))

    def _spawn(self, worker: Worker) -> None:
        if self._closing:
            _fail_closed(worker.ready)
            return
        worker.incarnation += 1
        worker.life = lifecycle.Lifecycle()
        worker.hello = None
        worker.output = WorkerOutput()
        try:
            self._launch(worker)
        except (OSError, ValueError, TypeError) as error:
            worker.life.state = "dead"
            worker.ready.set_exception(_unavailable(worker, f"its process cannot be started: {error}"))

    def _launch(self, worker: Worker) -> None:
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
            record = {
                "endpoint": f"ipc:///proc/self/fd/{self._listener}",
                "identity": worker.identity.decode(),
                "name": worker.name,
                "kind": worker.kind,
                "options": dict(worker.spec.options),
                "device": worker.device,
                "threads": worker.threads,
                "incarnation": worker.incarnation,
                "parent": os.getpid(),
                "coordinator": self._pidfd,
                "doorbell": worker.bell.fileno(),
                "channel": theirs.fileno(),
            }
            os.write(boot, msgpack.packb(record))
            os.lseek(boot, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(boot), *_paths()],  # -P: Python adds no folder of its own
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=environment(worker),
                pass_fds=(boot, self._pidfd, self._listener, worker.bell.fileno(), theirs.fileno()),
                start_new_session=True,
            )
            kept.callback(process.wait)
            kept.callback(process.kill)
            worker.pidfd = os.pidfd_open(process.pid)
            kept.pop_all()
        worker.process = process
        worker.channel = DescriptorChannel(ours)
        worker.deadline = (time.monotonic() + self.start_deadline, self.start_deadline)
        self._watch(worker.pidfd, lambda: self._exited(worker))
        self._watch(reader, lambda: self._read_output(worker, reader))
        worker.output_fd = reader

    def _watch(self, fd: int, action: Callable[[], object]) -> None:
        self._watched[fd] = action
        self._poller.register(fd, zmq.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            del self._watched[fd]
            self._poller.unregister(fd)
            os.close(fd)

    def _read_output(self, worker: Worker, reader: int) -> bool:
        """Read what is there and log its lines; False when nothing was."""
        try:
            data = os.read(reader, KEPT_BYTES)
        except BlockingIOError:
            return False
        lines = worker.output.add(data) if data else worker.output.end()
        if not data:
            self._unwatch(reader)
        for line in lines:
            logging.getLogger(f"outrider.worker.{worker.name}").info("%s", line)
        return bool(data)

    def _send(self, worker: Worker, body: bytes) -> None:
        try:
            self._router.send_multipart([worker.identity, body])
        except zmq.ZMQError as error:
            log.error("worker %s cannot be reached (%s); it is killed", worker.name, error)
            self._kill(worker)

    def _receive(self) -> None:
        identity, *parts = self._router.recv_multipart()
        body = b"".join(parts)
        worker = next((one for one in self.workers if one.identity == identity), None)
        if worker is None:
            return  # an earlier incarnation's last words
        try:
            message = messages.unpack(body)
        except (WireError, ProtocolMismatchError) as error:
            log.error("worker %s broke the protocol (%s); it is killed", worker.name, error)
            self._kill(worker)
            return
        if isinstance(message, messages.Hello):
            worker.hello = message
            self._tell(worker, lifecycle.SaidHello())
        elif isinstance(message, messages.StartFailed):
            self._tell(worker, lifecycle.SaidStartFailed(message.reason, message.traceback))
        elif isinstance(message, messages.Failed):
            listener = self.listeners.get(message.session)
            if listener is not None:
                listener.on_failed(message)
        else:
            future = self._replies.pop((worker.index, _key_of(message)), None)
            if future is not None:
                future.set_result(message)

    def _exited(self, worker: Worker) -> None:
        assert worker.process is not None
        self._kill(worker)  # what the provider started and left: until it is waited for, the group's number is its own
        code = worker.process.wait()
        self._unwatch(worker.pidfd)
        worker.pidfd = -1
        reader = worker.output_fd
        while reader in self._watched:  # what it wrote last; a grandchild may keep the pipe open
            if not self._read_output(worker, reader):
                break
        self._unwatch(reader)
        with worker._channel_lock:
            if worker.channel is not None:
                worker.channel.close()
                worker.channel = None
        worker.deadline = None
        self._tell(worker, lifecycle.Exited(code, worker.tail()))

    def _tell(self, worker: Worker, event: lifecycle.Event) -> None:
        for instruction in worker.life.handle(event):
            if isinstance(instruction, lifecycle.Welcome):
                worker.deadline = None
                assert worker.hello is not None
                worker.ready.set_result(worker.hello)
            elif isinstance(instruction, lifecycle.Refuse):
                if self._closing:
                    _fail_closed(worker.ready)
                else:
                    worker.ready.set_exception(_unavailable(worker, instruction.reason, instruction.detail))
            elif isinstance(instruction, lifecycle.Mourn):
                worker.deaths += 1
                self._bury(worker, instruction)
            elif isinstance(instruction, lifecycle.SendStop):
                self._send(worker, messages.pack(messages.Stop()))
                worker.deadline = (time.monotonic() + self.patience, self.patience)
            elif isinstance(instruction, lifecycle.Kill):
                self._kill(worker)

    def _bury(self, worker: Worker, death: lifecycle.Mourn) -> None:
        error = WorkerDiedError(
            f"worker {worker.name} (incarnation {worker.incarnation}, pid {worker.pid}) died: "
            f"{lifecycle.exit_text(death.code)}."
            + (f" Its last output:\n{death.output}" if death.output.strip() else ""),
            provider=worker.name,
            incarnation=worker.incarnation,
            exit_code=death.code,
            signal=death.signal,
            stderr=death.output,
        )
        worker.death = error
        for key in [key for key in self._replies if key[0] == worker.index]:
            self._replies.pop(key).set_exception(error.again())
        for listener in list(self.listeners.values()):
            listener.on_death(worker, error)

    def _kill(self, worker: Worker) -> None:
        if worker.process is not None and worker.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it is a zombie already; its pidfd will tell
                os.killpg(worker.process.pid, signal.SIGKILL)

    def _stop_all(self) -> None:
        for worker in self.workers:
            if worker.process is None:
                worker.life.state = "dead"
            self._tell(worker, lifecycle.StopAsked())
        for listener in list(self.listeners.values()):
            listener.on_closed()

    def _hurry(self) -> None:
        for worker in self.workers:
            if worker.life.state == "stopping" and worker.deadline is not None:
                worker.deadline = (time.monotonic() + self.patience, self.patience)

    def _close(self) -> None:
        for future in self._replies.values():
            _fail_closed(future)
        self._replies.clear()
        self._ended = True
        self._do_calls()
        self._router.close(0)
        self._context.term()
        for worker in self.workers:
            worker.bell.close()
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
    if isinstance(message, messages.Unloaded):
        return ("Unloaded", message.session)
    if isinstance(message, messages.Stats):
        return ("Stats", message.request)
    if isinstance(message, messages.TraceData):
        return ("TraceData", message.request)
    return (type(message).__name__,)


def _session_of(reply: tuple[Any, ...]) -> int | None:
    """The session number that a reply's key has; None for replies that concern no session."""
    return reply[1] if reply[0] in ("Claims", "Loaded", "Unloaded") else None


def _fail_closed(future: concurrent.futures.Future[Any]) -> None:
    """At the interpreter's exit, those that wait are daemon threads, which end where they are."""
    if not exiting():
        future.set_exception(SessionClosedError("the fleet was closed", what="fleet"))


def _unavailable(worker: Worker, reason: str, detail: str = "") -> ProviderUnavailableError:
    story = f"\n{detail.strip()}" if detail.strip() else ""
    return ProviderUnavailableError(
        f"provider {worker.name} is not available: {reason}{story}", provider=worker.name, reason=reason
    )
