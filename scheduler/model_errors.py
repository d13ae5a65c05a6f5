"""What goes wrong between a file and the plain graph."""

from __future__ import annotations

from outrider.shm.errors import OutriderError


class ModelLoadError(OutriderError, ValueError):
    """The model cannot be used: `path` is where it came from ('<bytes>', '<ModelProto>'), `reason` says why."""

    _fields = ("path", "reason")


def load_error(path: str, reason: str) -> ModelLoadError:
    """The error of a model from `path` that cannot be used for this reason, a clause without a full stop."""
    return ModelLoadError(f"{path}: {reason}.", path=path, reason=reason)


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """There is no file at `path`."""


class ModelLimitError(OutriderError, ValueError):
    """The model is beyond a bound that protects the caller's process: `what`, the `limit`, and what was `got`."""

    _fields = ("what", "limit", "got")
