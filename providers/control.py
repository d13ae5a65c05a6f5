"""The worker's control thread: it owns the channel to the coordinator, and watches the coordinator's pidfd.

Messages pass to main by a deque and the doorbell. If the coordinator dies, this thread ends the process at once; while
native code holds the GIL, the parent-death signal does.

The channel is ZeroMQ where pyzmq can be imported, else the socket pair that a worker in another environment inherits.
The coordinator answers on the one on which Hello came.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from typing import Any

from outrider.providers.wire import messages
from outrider.shm.channel import Channel, PairChannel
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import ChannelClosedError, ChannelFullError

EXIT_CONTROL = 4
LINGER = 2.0  # seconds in which what was queued last is to be sent

log = logging.getLogger("outrider.worker")


def connect(endpoint: str, identity: bytes, pair: int) -> tuple[Channel, str | None]:
    """The channel to the coordinator, and the version of pyzmq that it needs, None for the socket pair.

    `pair`: the descriptor of our end of it, -1 if this interpreter must have pyzmq. Raises ImportError.
    """
    if pair < 0:
        from outrider.providers.dealer import VERSION, DealerChannel

        return DealerChannel(endpoint, identity), VERSION
    try:
        from outrider.providers.dealer import VERSION, DealerChannel
    except (ImportError, OSError):  # pyzmq is not installed, or its library cannot be loaded
        return PairChannel(socket.socket(fileno=pair), messages.MAX_BYTES), None
    os.close(pair)
    return DealerChannel(endpoint, identity), VERSION


class Control(threading.Thread):
    """The channel's thread. `inbox` holds received messages for main; `send` may be called from any thread."""

    def __init__(self, channel: Channel, coordinator: int, bell: Doorbell) -> None:
        super().__init__(name="control", daemon=True)
        self.inbox: collections.deque[Any] = collections.deque()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._wake = Doorbell()
        self.bell = bell
        self._coordinator = coordinator
        self._channel = channel
        self._drained = threading.Event()
        self._stopping = False

    def send(self, message: messages.Message) -> None:
        """Queue a message. Raises WireError at once when it is not well-formed."""
        self._outbox.append(messages.pack(message))
        self._wake.ring()

    def run(self) -> None:
        try:
            self._serve()
        except ChannelClosedError:
            _end_with_coordinator()
        except BaseException:  # nobody could reach this worker any more, nor hear of it
            log.critical("the control thread of a worker failed", exc_info=True)
            os._exit(EXIT_CONTROL)

    def _serve(self) -> None:
        """Until `finish`, or until the coordinator is gone, which ends the process."""
        channel = self._channel
        poll = select.poll()
        for fd in (channel.fileno(), self._wake.fileno(), self._coordinator):
            poll.register(fd, select.POLLIN)
        while True:
            while (body := channel.receive()) is not None:
                self.inbox.append(messages.unpack(body))
                self.bell.ring()
            ready = {fd for fd, _ in poll.poll()}
            if self._coordinator in ready:
                _end_with_coordinator()
            if self._wake.fileno() in ready:
                self._wake.wait()
            self._send_queued(0.0)
            poll.modify(channel.fileno(), channel.FULL if self._outbox else select.POLLIN)
            if self._stopping:
                self._send_queued(LINGER)
                channel.close(LINGER)
                self._drained.set()
                return

    def _send_queued(self, patience: float) -> None:
        """Send what is queued, as far as there is room within so many seconds."""
        until = time.monotonic() + patience
        with contextlib.suppress(ChannelFullError):
            while self._outbox:
                self._channel.send(self._outbox[0], max(0.0, until - time.monotonic()))
                self._outbox.popleft()

    def finish(self) -> None:
        """Send what is queued (within 2 s) and close the channel."""
        self._stopping = True
        self._wake.ring()
        self._drained.wait(2 * LINGER)


def _end_with_coordinator() -> None:
    os.killpg(0, signal.SIGKILL)  # nobody is left to answer; what a provider started goes too
