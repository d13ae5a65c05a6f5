"""The coordinator's end of the control plane: a ROUTER socket that has no name in the file system.

It is bound in a private folder, whose descriptor is kept; then its file and the folder are removed. Workers inherit a
descriptor of the removed file and connect to `/proc/self/fd/<number>`. So nobody else can reach the socket, and a
coordinator that is killed leaves no file behind. For one thread.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import zmq

from outrider.providers.contract import ProviderUnavailableError
from outrider.shm.errors import ChannelClosedError, ChannelFullError

DESCRIPTORS = 24  # of a monitor, its sockets' threads and its first connections


class ControlSocket:
    """`router`: what is polled. `endpoint`: the descriptor that workers inherit. Raises ProviderUnavailableError."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.SNDHWM, 1000)
        self.router.setsockopt(zmq.RCVHWM, 1000)
        try:
            self._folder, self.endpoint = _bound_without_a_name(self.router)
        except BaseException:
            self.router.close(0)
            self._context.term()
            raise

    def send(self, identity: bytes, body: bytes, patience: float) -> None:
        """Raises ChannelClosedError for an identity that is not connected, ChannelFullError as `Channel.send`."""
        self.router.setsockopt(zmq.SNDTIMEO, int(patience * 1000))
        try:
            self.router.send_multipart([identity, body])
        except zmq.Again:
            raise ChannelFullError(f"it has taken no message for {patience:g} s", seconds=patience) from None
        except zmq.ZMQError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self) -> tuple[bytes, bytes]:
        """Who sent the next message, and its body; blocks if there is none."""
        identity, *parts = self.router.recv_multipart()
        return identity, b"".join(parts)

    def close(self) -> None:
        """What is still queued is dropped."""
        self.router.close(0)
        self._context.term()
        os.close(self.endpoint)
        os.close(self._folder)


def check_descriptors() -> None:
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

    It is bound through the folder's descriptor, as paths of sockets end at 107 bytes; that stays open while the socket
    does, which removes its file by that name when it closes.
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
