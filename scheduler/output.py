"""What a worker writes to its standard output and error: its last 64 KiB, and its lines as they become whole."""

from __future__ import annotations

import codecs
from collections import deque

KEPT_BYTES = 64 * 1024


class WorkerOutput:
    """Of one incarnation. Bytes come as they are read, which may be in the middle of a line or of a character."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

    def add(self, data: bytes) -> list[str]:
        """Take some bytes; returns the lines that they end, without line ends. A line of 64 KiB counts as ended."""
        self._chunks.append(data)
        self._size += len(data)
        while self._size - len(self._chunks[0]) > KEPT_BYTES:
            self._size -= len(self._chunks.popleft())
        return self._lines(self._decoder.decode(data))

    def end(self) -> list[str]:
        """No more will come; returns what was left of an unfinished line."""
        lines = self._lines(self._decoder.decode(b"", final=True))
        rest, self._partial = self._partial, ""
        return [*lines, rest] if rest else lines

    def tail(self) -> str:
        """The last 64 KiB."""
        return b"".join(self._chunks).decode(errors="replace")[-KEPT_BYTES:]

    def _lines(self, text: str) -> list[str]:
        *whole, self._partial = (self._partial + text).split("\n")
        if len(self._partial) > KEPT_BYTES:
            whole, self._partial = [*whole, self._partial], ""
        return [line.removesuffix("\r") for line in whole]
