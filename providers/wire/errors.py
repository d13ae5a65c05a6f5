"""What is wrong with a message or a packed graph."""

from __future__ import annotations

from outrider.shm.errors import OutriderError


class WireError(OutriderError, ValueError):
    """Plain data from another process is malformed: `where` in it, and the `reason`."""

    _fields = ("where", "reason")


class ProtocolMismatchError(OutriderError, RuntimeError):
    """Coordinator and worker do not speak the same protocol version."""

    _fields = ("ours", "theirs")


class KernelError(OutriderError, RuntimeError):
    """A kernel raised while its unit ran. The worker lives on; the next run may succeed."""

    _fields = ("provider", "node", "op", "opset", "inputs", "cause", "remote_traceback")


class BrokenEdgeError(OutriderError, ValueError):
    """What another worker wrote for `value` on `edge` of `board` cannot be read, for this `reason`."""

    _fields = ("value", "board", "edge", "reason")


class RunCancelledError(OutriderError, RuntimeError):
    """The run was cancelled, by its CancelToken or its Future. `reason`: when, 'cancelled while it ran'."""

    _fields = ("reason",)
