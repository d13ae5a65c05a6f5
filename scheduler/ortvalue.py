"""`OrtValue`: values that live on a device, named as in onnxruntime. Not built yet: making one says so."""

from __future__ import annotations

from typing import Any, NoReturn

from outrider.scheduler.options import unsupported_option


class OrtValue:
    """A value on a device. Every way to make one raises UnsupportedOptionError in this version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _later("OrtValue")

    @staticmethod
    def ortvalue_from_numpy(*args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedOptionError."""
        _later("OrtValue.ortvalue_from_numpy")

    @staticmethod
    def ortvalue_from_shape_and_type(*args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedOptionError."""
        _later("OrtValue.ortvalue_from_shape_and_type")

    @staticmethod
    def from_dlpack(*args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedOptionError."""
        _later("OrtValue.from_dlpack")


def _later(name: str) -> NoReturn:
    raise unsupported_option(name, None, "feed arrays; anything with __dlpack__ is taken.")
