"""What the system refuses when a session starts, as a typed error that says which limit to raise."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from outrider.scheduler.errors import ProviderUnavailableError

_LIMITS = {
    errno.EMFILE: "raise the number of open files (ulimit -n)",
    errno.ENFILE: "the machine has too many open files",
    errno.EFBIG: "raise the size of files (ulimit -f), which bounds shared memory too",
}


def told(error: Exception) -> str:
    """What went wrong when a process was started, and which limit to raise if it is one."""
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return f"{error.strerror}: raise the number of processes (ulimit -u)"
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return f"{error.strerror}: {_LIMITS[error.errno]}"
    return str(error)


@contextlib.contextmanager
def limits_told() -> Iterator[None]:
    """Within it, a limit of the process that is reached raises ProviderUnavailableError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        reason = told(error)
        raise ProviderUnavailableError(f"the workers cannot be set up: {reason}", reason=reason) from error
