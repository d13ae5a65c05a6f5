"""What a worker may tell as its counters: numbers that can be added to those of others."""

from __future__ import annotations

from typing import Any

from outrider.providers.wire.errors import WireError


def checked(data: dict[str, Any]) -> dict[str, Any]:
    """`Stats.data`: {provider: its own, sessions: number in words -> {name: number, partitions: [[number, runs,
    seconds]], operators: {'domain::op': [runs, seconds]}}}. Raises WireError for anything else."""
    sessions = data.get("sessions")
    if type(data.get("provider")) is not dict or type(sessions) is not dict:
        raise _malformed("it lacks 'provider' or 'sessions'")
    for number, counters in sessions.items():
        if type(number) is not str or type(counters) is not dict:
            raise _malformed(f"session {number!r:.60}")
        for name, value in counters.items():
            if name == "partitions":
                good = type(value) is list and all(_are_numbers(one, 3) and type(one[0]) is int for one in value)
            elif name == "operators":
                good = type(value) is dict and all(type(key) is str and _are_numbers(value[key], 2) for key in value)
            else:
                good = type(name) is str and _are_numbers([value], 1)
            if not good:
                raise _malformed(f"{name!r:.60} is {value!r:.60}")
    return data


def _are_numbers(values: Any, count: int) -> bool:
    return type(values) is list and len(values) == count and all(type(one) in (int, float) for one in values)


def _malformed(what: str) -> WireError:
    return WireError(f"counters are malformed: {what}", where="Stats.data", reason="malformed")
