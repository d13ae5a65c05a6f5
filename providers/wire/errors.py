"""What is wrong with a message or a packed graph."""

from __future__ import annotations

from outrider.shm.errors import OutriderError


class WireError(OutriderError, ValueError):
    """Plain data from another process is malformed: `where` in it, and the `reason`."""

    _fields = ("where", "reason")
