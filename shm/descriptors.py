"""Descriptors with ids, sent over the socket pair that a worker inherits.

A message is a SOCK_SEQPACKET packet whose body is the ids (unsigned 64-bit little-endian) and whose SCM_RIGHTS control
data holds as many descriptors, in the same order. Other messages name descriptors by id; whoever reads such a name
takes the descriptor from here, and waits for it if it has not arrived yet.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping

from outrider.shm.errors import ChannelClosedError, DescriptorError

PER_MESSAGE = 200
"""Descriptors per message; the kernel takes 253."""

_CONTROL_BYTES = socket.CMSG_SPACE(253 * 4)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel, neither inheritable (hand one over with `pass_fds`)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class DescriptorChannel:
    """One end of a channel; `sock` is adopted. One thread sends, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._arrived: dict[int, int] = {}

    def send(self, descriptors: Mapping[int, int]) -> None:
        """Send duplicates of descriptors, by id. The originals stay the caller's and may be closed at once.

        Raises ChannelClosedError if the other end is gone, DescriptorError if the kernel refuses them.
        """
        items = list(descriptors.items())
        for at in range(0, len(items), PER_MESSAGE):
            part = items[at : at + PER_MESSAGE]
            body = struct.pack(f"<{len(part)}Q", *(identifier for identifier, _ in part))
            rights = array.array("i", [fd for _, fd in part])
            try:
                self._socket.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except (BrokenPipeError, ConnectionError) as error:
                raise ChannelClosedError("the other end of the descriptor channel is gone") from error
            except OSError as error:
                raise DescriptorError(
                    f"descriptors {[identifier for identifier, _ in part]} could not be sent: {error.strerror}",
                    descriptor=part[0][0],
                ) from error

    def receive(self, *, wait: bool = True) -> tuple[int, ...]:
        """Take one message in and return the ids it brought; `()` if there is none and `wait` is False.

        Raises ChannelClosedError at the end of the channel. DescriptorError if the message is malformed, was cut short
        or repeats an id: then every descriptor it brought is closed.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            body, control, got, _ = self._socket.recvmsg(8 * PER_MESSAGE, _CONTROL_BYTES, flags)
        except BlockingIOError:
            return ()
        except ConnectionError as error:
            raise ChannelClosedError("the other end of the descriptor channel is gone") from error
        fds = list(rights(control))
        if not body and not fds:
            raise ChannelClosedError("the other end of the descriptor channel is gone")
        reason = ""
        identifiers: tuple[int, ...] = ()
        if got & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            reason = "it was cut short; is the limit on open files reached (ulimit -n)?"
        elif len(body) != 8 * len(fds):
            reason = f"it has {len(body)} bytes of ids for {len(fds)} descriptors"
        else:
            identifiers = struct.unpack(f"<{len(fds)}Q", body)
            if len(set(identifiers)) < len(fds) or any(identifier in self._arrived for identifier in identifiers):
                reason = f"it repeats an id: {list(identifiers)}"
        if reason:
            for fd in fds:
                os.close(fd)
            raise DescriptorError(
                f"a message of descriptors was refused: {reason}", descriptor=identifiers[0] if identifiers else None
            )
        self._arrived.update(zip(identifiers, fds, strict=True))
        return identifiers

    def take(self, identifier: int, timeout: float | None = None) -> int:
        """The descriptor of that id, close-on-exec and the caller's from now on; waits until it arrives.

        Raises DescriptorError after `timeout` seconds (None: no limit), and as `receive`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while identifier not in self._arrived:
            if deadline is not None:
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                left = max(0.0, deadline - time.monotonic())
                if not poll.poll(left * 1000):
                    raise DescriptorError(
                        f"descriptor {identifier} did not arrive within {timeout} s", descriptor=identifier
                    )
            self.receive()
        return self._arrived.pop(identifier)

    def fileno(self) -> int:
        """The socket's descriptor, to poll on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket and all descriptors that arrived and were not taken."""
        arrived, self._arrived = self._arrived, {}
        for fd in arrived.values():
            os.close(fd)
        self._socket.close()


def rights(control: list[tuple[int, int, bytes]]) -> Iterator[int]:
    """The descriptors that came with a message, from what `recvmsg` gives as its control data."""
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
            yield from fds
