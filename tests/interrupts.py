"""KeyboardInterrupt at each moment in turn at which Python would let a signal's handler raise it."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")  # instructions after which CPython looks for signals


@contextmanager
def interrupted(files: str | tuple[str, ...], moments: int) -> Iterator[None]:
    """Raise KeyboardInterrupt in the code of files with these ends, after so many looks for a signal there."""
    left = moments
    before: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if before.get(frame, "").startswith(LOOKS):
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            before[frame] = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
