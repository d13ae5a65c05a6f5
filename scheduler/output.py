"""What a worker writes to its standard output and error: its last 64 KiB, and its lines, as many as may be logged.

A worker may write more than anyone wants to read. Then lines are counted instead of made: the text of a flood costs the
monitor's thread, and with it the interpreter lock, a search for line ends and no more.
"""

from __future__ import annotations

import codecs
import logging
from collections import deque

from outrider.scheduler.log_queue import Record

KEPT_BYTES = 64 * 1024
LINES = 1000
"""How many lines of one worker are logged in a second, and how many characters of them."""
CHARACTERS = 256 * 1024


class WorkerOutput:
    """Of one incarnation. Bytes come as they are read, which may be in the middle of a line or of a character."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._second = float("-inf")  # when the present second began
        self._lines = 0
        self._characters = 0
        self._dropped = 0  # lines, since it was last told
        self._inside_dropped = False

    def add(self, data: bytes, now: float, wanted: bool = True) -> list[Record]:
        """Take some bytes at the time `now` (seconds); returns what is to be logged, nothing unless `wanted`.

        Lines come without line ends; one of 64 KiB counts as ended. What is left out is told by count when there is
        room again, or at the `end`.
        """
        self._chunks.append(data)
        self._size += len(data)
        while self._size - len(self._chunks[0]) > KEPT_BYTES:
            self._size -= len(self._chunks.popleft())
        if now - self._second >= 1:
            self._second, self._lines, self._characters = now, 0, 0
        full = self._lines >= LINES or self._characters >= CHARACTERS
        if full or not wanted:
            self._skip(data, counted=wanted)
            return []
        if self._inside_dropped:
            _, end, data = data.partition(b"\n")
            if not end:
                return []
            self._inside_dropped = False
        return self._told() + self._allowed(self._cut(self._decoder.decode(data)))

    def end(self) -> list[Record]:
        """No more will come; returns what was left of an unfinished line, and what was left out."""
        lines = self._cut(self._decoder.decode(b"", final=True))
        rest, self._partial = self._partial, ""
        return self._allowed([*lines, rest] if rest else lines) + self._told()

    def tail(self) -> str:
        """The last 64 KiB."""
        return b"".join(self._chunks).decode(errors="replace")[-KEPT_BYTES:]

    def _cut(self, text: str) -> list[str]:
        *whole, self._partial = (self._partial + text).split("\n")
        if len(self._partial) > KEPT_BYTES:
            whole, self._partial = [*whole, self._partial], ""
        return [line.removesuffix("\r") for line in whole]

    def _allowed(self, lines: list[str]) -> list[Record]:
        """Those for which there is room in this second; the others are counted."""
        records: list[Record] = []
        for line in lines:
            if self._lines >= LINES or self._characters >= CHARACTERS:
                break
            self._lines += 1
            self._characters += len(line)
            records.append((logging.INFO, line))
        self._dropped += len(lines) - len(records)
        return records

    def _skip(self, data: bytes, counted: bool) -> None:
        """Make no lines of this; a line that began before or goes on afterwards is left out whole."""
        unfinished = not data.endswith(b"\n")
        if counted:
            self._dropped += data.count(b"\n") + unfinished - self._inside_dropped
        self._decoder.reset()
        self._partial, self._inside_dropped = "", unfinished

    def _told(self) -> list[Record]:
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return []
        return [(logging.WARNING, f"{dropped} lines of its output were left out: more than {LINES} in a second")]
