"""The worker's end of the control plane where pyzmq is installed: a ZeroMQ DEALER."""

from __future__ import annotations

import select

import zmq

from outrider.shm.errors import ChannelFullError

VERSION: str = zmq.__version__


class DealerChannel:
    """A `Channel` to the ROUTER at `endpoint`, which knows it as `identity`.

    Its descriptor is ZeroMQ's own, which tells that something has changed, once.
    """

    FULL = select.POLLIN

    def __init__(self, endpoint: str, identity: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(endpoint)

    def send(self, body: bytes, patience: float = 0.0) -> None:
        """As `Channel.send`."""
        self._socket.setsockopt(zmq.SNDTIMEO, int(patience * 1000))
        try:
            self._socket.send(body)
        except zmq.Again:
            text = f"the coordinator has taken no message for {patience:g} s"
            raise ChannelFullError(text, seconds=patience) from None

    def receive(self) -> bytes | None:
        """As `Channel.receive`."""
        try:
            body: bytes = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return body

    def fileno(self) -> int:
        """As `Channel.fileno`."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self, linger: float = 0.0) -> None:
        """As `Channel.close`."""
        self._socket.close(linger=int(linger * 1000))
        self._context.term()
