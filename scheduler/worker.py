"""A worker as the coordinator sees it: a role in the fleet (`Worker`), and each process that plays it (`Incarnation`).

    role          current                    spare
    Worker  ──►   Incarnation 3, ready       Incarnation 4, starting, ready, or none

The role keeps its doorbell, its spec and the count of its incarnations; all that belongs to one process is in the
incarnation and ends with it. A spare is the next incarnation, started ahead. Both are changed by the monitor's thread
only, but for `current` and `spare`, which `Fleet.revive` exchanges under the fleet's lock.
"""

from __future__ import annotations

import concurrent.futures
import subprocess
import threading
from collections.abc import Iterator

from outrider.providers.wire import messages
from outrider.scheduler import lifecycle
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.muster import Muster
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.output import WorkerOutput
from outrider.scheduler.restarts import Restarts
from outrider.scheduler.specs import target
from outrider.scheduler.story import Facts
from outrider.shm.channel import PairChannel
from outrider.shm.descriptors import DescriptorChannel
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import ChannelClosedError
from outrider.shm.progress import NOTHING, Doing, ProgressReader
from outrider.shm.stackfile import StackFile


class Incarnation:
    """One process of a worker, from before it is started until after its death.

    `ready` resolves when it has said Hello, or fails with ProviderUnavailableError; `ended`
    when it is gone and all were told. `killed`: why the coordinator ended
    it, if it did, and `spared`: without blame. `ahead`: it is a spare. `facts` and `death`: once it has died without
    being asked to.
    """

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker = worker
        self.number = number
        self.life = lifecycle.Lifecycle()
        self.hello: messages.Hello | None = None
        self.ready: concurrent.futures.Future[messages.Hello] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.channel: DescriptorChannel | None = None
        self.pair: PairChannel | None = None  # for messages, until it is known that it speaks ZeroMQ
        self.output = WorkerOutput()
        self.output_fd = -1
        self.progress: ProgressReader | None = None
        self.stacks: StackFile | None = None
        self.deadline: tuple[float, float] | None = None  # (monotonic time, seconds it was)
        self.killed = ""
        self.spared = False
        self.ahead = False
        self.muster = Muster()
        self.facts: Facts | None = None  # of its end
        self.death: WorkerDiedError | None = None
        self._descriptor = 0
        self._channel_lock = threading.Lock()

    @property
    def identity(self) -> bytes:
        """The ROUTER's name for it: mail for an earlier incarnation never reaches it."""
        return f"{self.worker.index}/{self.number}".encode()

    @property
    def output_logger(self) -> str:
        """The name of the logger that gets the lines it writes."""
        return f"outrider.worker.{self.worker.name}"

    @property
    def alive(self) -> bool:
        """True between Hello and death."""
        return self.life.state == "ready"

    @property
    def pid(self) -> int:
        """Its process id, 0 before it has been started."""
        return 0 if self.process is None else self.process.pid

    def doing(self) -> Doing:
        """What it is doing, or was when it died."""
        return NOTHING if self.progress is None else self.progress.read()

    def send_descriptors(self, fds: list[int]) -> list[int]:
        """Send duplicates; the ids that messages may name them by. Raises WorkerDiedError when it is gone."""
        with self._channel_lock:
            ids = [self._descriptor + 1 + i for i in range(len(fds))]
            self._descriptor += len(fds)
            try:
                if self.channel is None:
                    raise ChannelClosedError(f"worker {self.worker.name} is not running")
                self.channel.send(dict(zip(ids, fds, strict=True)))
            except ChannelClosedError as error:  # the monitor may not have told of its death yet
                death = self.death
                if death is not None:
                    raise death.again() from error
                raise WorkerDiedError(
                    f"worker {self.worker.name} (incarnation {self.number}) died before it got its part of the model",
                    provider=self.worker.name,
                    incarnation=self.number,
                    nodes=[],
                ) from error
            return ids

    def close_channel(self) -> None:
        """It is gone: nothing can be sent any more."""
        with self._channel_lock:
            if self.channel is not None:
                self.channel.close()
                self.channel = None

    def __repr__(self) -> str:
        return f"<Incarnation {self.number} of {self.worker.name}, {self.life.state}>"


class Worker:
    """One worker of a fleet: what stays through its incarnations.

    `kind`: what it loads; `part`: see `Context.part`; `device`: the instance or device number.
    """

    def __init__(self, index: int, spec: ProviderSpec, threads: int) -> None:
        found = target(spec.kind)
        self.index = index
        self.name = spec.display
        self.kind = found.kind or f"{found.file or found.module}:{found.name}"
        self.part = found.part
        self.device = found.instance
        self.spec = spec
        self.threads = threads
        self.bell = Doorbell()  # the same one for every incarnation
        self.spare_deaths = 0
        self.restarts = Restarts()
        self.started = 0  # incarnations
        self.current = Incarnation(self, 0)
        self.current.life.state = "dead"
        self.current.ended.set_result(None)
        self.spare: Incarnation | None = None

    def incarnations(self) -> Iterator[Incarnation]:
        """Those that may have a process."""
        yield self.current
        spare = self.spare
        if spare is not None:
            yield spare

    def patience(self, seconds: float) -> float | None:
        """How long to wait for what should take it `seconds`: None, without end, while it is debugged."""
        return None if self.spec.debug else seconds

    def next_incarnation(self) -> Incarnation:
        """A new one, which nobody knows yet."""
        self.started += 1
        return Incarnation(self, self.started)

    @property
    def deaths(self) -> int:
        """How often an incarnation died without being asked to; spares are not counted."""
        return self.restarts.deaths

    # Of the present incarnation --------------------------------------------------------------------------------------
    @property
    def incarnation(self) -> int:
        """The number of the present incarnation, counted from 1; 0 before the first."""
        return self.current.number

    @property
    def life(self) -> lifecycle.Lifecycle:
        """Where the present incarnation is in its life."""
        return self.current.life

    @property
    def alive(self) -> bool:
        """Whether the present incarnation is, between Hello and death."""
        return self.current.alive

    @property
    def hello(self) -> messages.Hello | None:
        """What the present incarnation said of itself."""
        return self.current.hello

    @property
    def death(self) -> WorkerDiedError | None:
        """Of the present incarnation."""
        return self.current.death

    @property
    def pid(self) -> int:
        """Process id of the present incarnation, 0 before the first."""
        return self.current.pid
