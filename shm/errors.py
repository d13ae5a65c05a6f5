"""The root of all errors, and those of memory.

Every error carries its facts as attributes: a class lists them in `_fields`, the constructor takes the message and the
fields by keyword. That (`message`, `fields()`) is also what pickles and what crosses processes, so nothing of the story
is lost on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class OutriderError(Exception):
    """Root of Outrider's errors. `message` says what happened, to what, why, and what to do."""

    _fields: tuple[str, ...] = ()

    if TYPE_CHECKING:  # the names in `_fields` are attributes

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        unknown = set(fields) - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        for name in self._fields:
            setattr(self, name, fields.get(name))
        story = fields.get("remote_traceback")
        if story and hasattr(self, "add_note"):  # from Python 3.11: shown wherever this error's own traceback is
            self.add_note(f"In the worker:\n{str(story).rstrip()}")

    def __str__(self) -> str:
        # KeyError and OSError among the built-in bases would show repr() or an errno.
        return self.message

    def fields(self) -> dict[str, Any]:
        """The facts this error carries, by name."""
        return {name: getattr(self, name) for name in self._fields}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields())


def _rebuild(kind: type[OutriderError], message: str, fields: dict[str, Any]) -> OutriderError:
    return kind(message, **fields)


class OutOfMemoryError(OutriderError, MemoryError):
    """Memory is short. Nothing was touched: `value` asked for `asked` bytes where `available` bytes were left.

    `largest`: where `value` is the memory of many values, the largest of them, as [name, bytes].
    """

    _fields = ("value", "asked", "available", "largest")


class LayoutError(OutriderError, ValueError):
    """A layout or reference read from another process is malformed: out of bounds, misaligned, or wrong in size."""

    _fields = ("what", "segment", "offset", "nbytes", "limit")


class DescriptorError(OutriderError, RuntimeError):
    """A descriptor that a message names never arrived, or arrived twice."""

    _fields = ("descriptor",)


class ChannelClosedError(OutriderError, ConnectionError):
    """The other end of a channel is gone."""

    _fields = ()


class ChannelFullError(OutriderError, TimeoutError):
    """The other end of a channel takes no messages: what may wait there has waited for `seconds`."""

    _fields = ("seconds",)


class RangesFullError(OutriderError, ValueError):
    """No free range of the size asked for is left. `largest`: bytes of the largest one that is."""

    _fields = ("asked", "largest")


class WeightFileChangedError(OutriderError, OSError):
    """A file of external weights is missing, or no longer the one that the model was loaded with."""

    _fields = ("path", "reason", "expected", "found")
