"""The life of one incarnation of a worker, as a pure state machine: events in, instructions out.

    starting --Said Hello--> ready --Exited--> dead
    starting --Said StartFailed / Late--> failing --Exited--> dead
    any but dead --StopAsked--> stopping --Exited--> dead

The monitor feeds it and carries the instructions out; it never looks at a clock or a process itself.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class SaidHello:
    """The worker is set up."""


@dataclass(frozen=True)
class SaidStartFailed:
    """The worker says why it cannot be set up; it exits by itself."""

    reason: str
    traceback: str


@dataclass(frozen=True)
class Late:
    """The deadline of the present state has passed. `seconds`: how long it was."""

    seconds: float


@dataclass(frozen=True)
class StopAsked:
    """The fleet is being closed."""


@dataclass(frozen=True)
class Exited:
    """The process is gone: `code` as subprocess gives it, negative for a signal. `output`: last bytes it wrote."""

    code: int
    output: str


Event = SaidHello | SaidStartFailed | Late | StopAsked | Exited


@dataclass(frozen=True)
class Welcome:
    """The worker may be used."""


@dataclass(frozen=True)
class Refuse:
    """It did not start, for this reason."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Mourn:
    """It died without being asked to; whoever used it must be told."""

    code: int
    signal: str | None
    output: str


@dataclass(frozen=True)
class SendStop:
    """Ask it to stop."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""


Instruction = Welcome | Refuse | Mourn | SendStop | Kill


def signal_name(code: int) -> str | None:
    """'SIGKILL' for -9; None for an exit code that is no signal."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    name = signal_name(code)
    return f"it was ended by {name}" if name else f"it exited with code {code}"


class Lifecycle:
    """State of one incarnation: 'starting', 'failing', 'ready', 'stopping' or 'dead'.

    `cause` of a start that failed: 'raised' (it said why), 'late', 'died', 'closed'; '' otherwise. `detail`: the
    traceback that it told, ''. `code`: what it exited with, None before.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self.cause = ""
        self.code: int | None = None
        self.detail = ""
        self._welcomed = False
        self._reason = ""

    def handle(self, event: Event) -> list[Instruction]:
        """The next state and what to do. An event that means nothing in the present state does nothing."""
        state = self.state
        if state == "dead":
            return []
        if isinstance(event, Exited):
            self.state, self.code = "dead", event.code
            if not self._welcomed:
                self.cause = self.cause or "died"
                reason = self._reason or f"the process ended while starting: {exit_text(event.code)}"
                return [Refuse(reason, self.detail or event.output)]
            return [] if state == "stopping" else [Mourn(event.code, signal_name(event.code), event.output)]
        if isinstance(event, StopAsked):
            if state == "stopping":
                return []
            self.state = "stopping"
            if not self._welcomed and not self._reason:
                self.cause, self._reason = "closed", "the fleet was closed while it started"
            # What has not said Hello may not read messages yet.
            return [SendStop()] if state == "ready" else [Kill()]
        if isinstance(event, Late):
            if state == "starting":
                self.state, self.cause = "failing", "late"
                self._reason = f"it did not start within {event.seconds:g} s"
                return [Kill()]
            return [Kill()] if state == "stopping" else []
        if state != "starting":
            return []
        if isinstance(event, SaidStartFailed):
            self.state, self.cause = "failing", "raised"
            self._reason, self.detail = event.reason, event.traceback
            return []
        self.state = "ready"
        self._welcomed = True
        return [Welcome()]
