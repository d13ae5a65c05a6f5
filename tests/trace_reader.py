"""Reads a trace file as a viewer does, and checks what holds in every trace."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A span as it is in the file; times in ns."""

    kind: str
    name: str
    pid: int
    tid: int
    start: int
    end: int
    args: dict[str, Any]

    def holds(self, other: Shown) -> bool:
        return (self.pid, self.tid) == (other.pid, other.tid) and self.start <= other.start and other.end <= self.end


class TraceFile:
    """A trace, checked: names for all tracks, spans that nest, arrows from an earlier end to a later start."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path) as file:
            plain = json.load(file)
        events = plain["traceEvents"]
        self.missing: list[str] = plain["otherData"]["missing"]
        self.processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.spans = [
            Shown(e["cat"], e["name"], e["pid"], e["tid"], _ns(e["ts"]), _ns(e["ts"]) + _ns(e["dur"]), e["args"])
            for e in events
            if e["ph"] == "X"
        ]
        self._check_nesting()
        self.arrows = self._arrows(events)

    def of(self, kind: str, **args: Any) -> list[Shown]:
        """The spans of a kind with these args, by start."""
        found = [
            one for one in self.spans if one.kind == kind and all(one.args.get(k) == v for k, v in args.items())
        ]  # fmt: skip
        return sorted(found, key=lambda one: one.start)

    def inside(self, outer: Shown, kind: str) -> list[Shown]:
        return [one for one in self.of(kind) if outer.holds(one)]

    def _check_nesting(self) -> None:
        open_spans: dict[tuple[int, int], list[Shown]] = {}
        for one in sorted(self.spans, key=lambda one: (one.start, -one.end)):
            assert one.end >= one.start
            assert one.pid in self.processes and (one.pid, one.tid) in self.threads
            stack = open_spans.setdefault((one.pid, one.tid), [])
            while stack and stack[-1].end <= one.start:
                stack.pop()
            assert not stack or one.end <= stack[-1].end, (stack[-1], one)
            stack.append(one)

    def _arrows(self, events: list[dict[str, Any]]) -> list[tuple[str, Shown, Shown]]:
        """(value, the span that wrote it, the one that reads it)."""
        begun = {e["id"]: e for e in events if e["ph"] == "s"}
        ended = {e["id"]: e for e in events if e["ph"] == "f"}
        assert begun.keys() == ended.keys()
        arrows = []
        for number, event in begun.items():
            source, target = self._at(event), self._at(ended[number])
            assert event["name"] == ended[number]["name"]
            if source.kind == "copy":  # the caller may still be ringing others
                assert source.start <= target.start
            else:
                assert source.end <= target.start
            arrows.append((event["name"], source, target))
        return arrows

    def _at(self, event: dict[str, Any]) -> Shown:
        """The innermost span at the place of an event."""
        at = _ns(event["ts"])
        there = [
            one for one in self.spans
            if (one.pid, one.tid) == (event["pid"], event["tid"]) and one.start <= at <= one.end
        ]  # fmt: skip
        return max(there, key=lambda one: (one.start, -one.end))


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
