"""What `health()` says of a provider, from its worker's life and the restart policy; and the same in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.providers.wire.failures import first_names
from outrider.scheduler.restarts import Restarts

ABSENT, FAILED = "absent", "failed"


def told(
    state: str,
    incarnation: int,
    deaths: int,
    quarantined: Sequence[Mapping[str, Any]] = (),
    restarts: Restarts | None = None,
    now: float = 0.0,
    reason: str = "",
) -> dict[str, Any]:
    """{state, incarnation, deaths, quarantined}, plain data.

    `state`: 'starting', 'ready', 'failing', 'stopping' or 'dead', where the present incarnation is in its life, or
    'absent' for a provider that the fleet does without, for a `reason`. A dead worker is told more exactly by its
    `restarts` at the time `now`: 'back-off' or 'open' (the breaker, after five deaths in a row), with the `seconds`
    until it may start again, or 'failed', with the `reason`. 'dead' then means that whoever needs it starts it.
    `quarantined`: partitions that the provider gets no more, as `Quarantine.of` gives them: [{model, nodes, deaths}].
    """
    found: dict[str, Any] = {"state": state, "incarnation": incarnation, "deaths": deaths}
    found["quarantined"] = [dict(one) for one in quarantined]
    if state == "dead" and restarts is not None:
        if restarts.failed is not None:
            found["state"], reason = FAILED, restarts.failed
        seconds = restarts.wait(now)
        if 0 < seconds < math.inf:
            found["state"], found["seconds"] = "open" if restarts.open else "back-off", seconds
    if reason:
        found["reason"] = reason
    return found


def state_text(state: str, seconds: float | None = None) -> str:
    """'ready', 'back-off (3 s)': a state, and for how long it is so, in whole seconds that have begun."""
    return state if seconds is None else f"{state} ({math.ceil(seconds)} s)"


def quarantine_text(quarantined: Sequence[Sequence[str]]) -> str:
    """'quarantined: a, b; c' for the nodes of two partitions; '' for none."""
    return f"quarantined: {'; '.join(map(first_names, quarantined))}" if quarantined else ""
