"""Whole messages between two processes: what a channel is, and the one over a SOCK_SEQPACKET pair.

A packet of the pair is a message, or, for one of more than INLINE_BYTES, its length (unsigned 64-bit little-endian)
with the descriptor of a sealed memfd that holds it (SCM_RIGHTS). The kernel bounds how much may wait (about 212 kB;
a memfd counts for little): a channel that is full says so.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import socket
import struct
import time
from typing import Protocol

from outrider.shm.descriptors import rights
from outrider.shm.errors import ChannelClosedError, ChannelFullError, LayoutError
from outrider.shm.segment import ALL_SEALS, sealed

INLINE_BYTES = 32_768  # well below the least that a socket's buffer is set to
_LENGTH = struct.Struct("<Q")
_CONTROL_BYTES = socket.CMSG_SPACE(4 * 4)  # more than one descriptor is refused, and none is lost unseen


class Channel(Protocol):
    """One end of a channel, for one thread. Messages are not empty, arrive whole, in order, and once.

    `fileno()` is polled. Before that, always, `receive` is called until it gives None: there is no second sign of a
    message that had come before. `FULL`: what to poll it for while something waits to be sent.
    """

    FULL: int

    def send(self, body: bytes, patience: float = 0.0) -> None:
        """Raises ChannelFullError if there is no room within `patience` seconds, ChannelClosedError."""

    def receive(self) -> bytes | None:
        """The next message, None if there is none now. Raises ChannelClosedError, LayoutError for what is none."""

    def fileno(self) -> int:
        """The descriptor to poll."""

    def close(self, linger: float = 0.0) -> None:
        """Close this end. What was sent still arrives if that takes at most `linger` seconds."""


class PairChannel:
    """One end of a socket pair; `sock` is adopted. `most`: bytes that a message may have."""

    FULL = select.POLLIN | select.POLLOUT

    def __init__(self, sock: socket.socket, most: int) -> None:
        self._socket = sock
        self._most = most

    def send(self, body: bytes, patience: float = 0.0) -> None:
        """As `Channel.send`."""
        until = time.monotonic() + patience
        with contextlib.ExitStack() as kept:
            packet, control = body, []
            if len(body) > INLINE_BYTES:
                held = sealed("outrider-message", body)
                kept.callback(os.close, held)
                packet = _LENGTH.pack(len(body))
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held]))]
            while True:
                try:
                    self._socket.sendmsg([packet], control, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    if not self._room(until - time.monotonic()):
                        text = f"the other end has taken no message for {patience:g} s"
                        raise ChannelFullError(text, seconds=patience) from None
                except ConnectionError:
                    raise _closed() from None

    def _room(self, seconds: float) -> bool:
        """Wait at most so long for room; False if there is none."""
        if seconds <= 0:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def receive(self) -> bytes | None:
        """As `Channel.receive`."""
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            packet, control, got, _ = self._socket.recvmsg(INLINE_BYTES, _CONTROL_BYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionError:
            raise _closed() from None
        with contextlib.ExitStack() as taken:
            fds = list(rights(control))
            for fd in fds:
                taken.callback(os.close, fd)
            if len(fds) > 1:
                raise _malformed(f"it came with {len(fds)} descriptors")
            if got & socket.MSG_CTRUNC:
                raise _malformed("its descriptors were cut short; is the limit on open files reached (ulimit -n)?")
            if got & socket.MSG_TRUNC:
                raise _malformed(f"a packet has more than {INLINE_BYTES} bytes")
            if fds:
                return self._held(packet, fds[0])
        if not packet:
            raise _closed()
        return packet

    def _held(self, packet: bytes, fd: int) -> bytes:
        """The message in a memfd, which whoever sent it cannot change or shorten any more."""
        try:
            fixed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & ALL_SEALS == ALL_SEALS
        except OSError:  # not a memfd at all
            fixed = False
        if not fixed:
            raise _malformed("the descriptor that came with it is no sealed memfd")
        nbytes = os.fstat(fd).st_size
        if len(packet) != _LENGTH.size or _LENGTH.unpack(packet) != (nbytes,) or not 0 < nbytes <= self._most:
            raise _malformed(f"its memfd of {nbytes} bytes is not as announced, or over {self._most} bytes")
        with open(fd, "rb", closefd=False) as file:
            os.lseek(fd, 0, os.SEEK_SET)
            return file.read()

    def fileno(self) -> int:
        """As `Channel.fileno`."""
        return self._socket.fileno()

    def close(self, linger: float = 0.0) -> None:
        """As `Channel.close`; the kernel keeps what was sent."""
        self._socket.close()


def _closed() -> ChannelClosedError:
    return ChannelClosedError("the other end of the control channel is gone")


def _malformed(reason: str) -> LayoutError:
    return LayoutError(f"a packet was refused: {reason}", what="packet")
