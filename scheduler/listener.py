"""What the monitor tells the sessions of its fleet."""

from __future__ import annotations

from typing import Protocol

from outrider.providers.wire import messages
from outrider.scheduler.overdue import Working
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.progress import Doing


class Listener(Protocol):
    """What a loaded session wants to hear, on the monitor's thread: it must not block."""

    def on_failed(self, sender: Incarnation, message: messages.Failed) -> None:
        """A partition did not run. Raises WireError for what the sender cannot know."""

    def on_dying(self, one: Incarnation, doing: Doing) -> tuple[int, list[str]] | None:
        """A worker has died: tell its restart policy what it completed. What it was running: (partition, nodes)."""

    def uses(self, one: Incarnation) -> bool:
        """Whether a successor of this process is to serve the session's present generation."""

    def on_death(self, one: Incarnation) -> None:
        """A worker died without being asked to; all were told by `on_dying`."""

    def on_spare_lost(self, worker: Worker) -> None:
        """The spare of a worker died."""

    def on_restart(self, worker: Worker) -> None:
        """A session had this worker restarted: what was held against it is forgotten. On that session's thread."""

    def on_closed(self) -> None:
        """The fleet was closed: nothing will be heard any more."""

    def look(self) -> None:
        """Look whether a worker says of a run in flight what cannot be. Called now and then."""

    def working(self) -> list[tuple[int, Working]]:
        """The runs in flight, and where workers are in them."""
