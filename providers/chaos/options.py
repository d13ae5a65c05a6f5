"""What chaos can be told: the faults, the phases in which each can happen, and the options, checked at its start.

phase   when                                                counted by `at`
start   in `setup`, before Hello                            -
claim   in `claim`                                          calls of `claim`
load    in `compile` of the faulty unit                     compilations of it
idle    when nothing was asked of it for `after` seconds    from the n-th pause on: 1 before its first run
run     in a run of the faulty unit, before it computes,    runs of it
        or with `late` when its results are written
stop    in `close`                                          -
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from outrider.providers.contract import ProviderUnavailableError

PHASES = ("start", "claim", "load", "idle", "run", "stop")
_ASKED = ("run", "start", "claim", "load", "stop")  # phases in which somebody waits for the provider
_RUN = ("run",)
_CLAIM = ("claim",)
_ANY = ("run", "start", "claim", "load", "idle", "stop")

FAULTS: Mapping[str, tuple[str, ...]] = {
    "none": _ANY,
    "sigsegv": _ANY,
    "sigabrt": _ANY,
    "sigkill": _ANY,
    "sigstop": _ANY,
    "exit": _ANY,
    "exception": _ASKED,
    "hang": _ASKED,
    "hang_gil": _ANY,
    "slow": _ASKED,
    "memory": _ANY,
    "stderr_flood": _ANY,
    "malformed_message": _ANY,
    "wrong_count": _RUN,
    "wrong_dtype": _RUN,
    "wrong_shape": _RUN,
    "stale_reference": _RUN,
    "wild_reference": _RUN,
    "claim_overlap": _CLAIM,
    "claim_unknown": _CLAIM,
    "claim_not_convex": _CLAIM,
    "refuse_compile": ("load", "run"),
}
"""Every fault, and the phases in which it can happen; the first of them is the default."""


@dataclass(frozen=True)
class Options:
    """The options of the chaos provider. Times are in seconds, sizes in bytes.

    `at`: which time it happens, counted from 1 in each incarnation; None for each time. `node`: the name or operator of
    the faulty node; None for the first that is compiled. `late`: in a run, when the results are written and not yet
    published. `incarnations`: those that misbehave; None for all. `seconds`:
    how long `slow` takes, and `malformed_message` waits to be thrown out. `bytes`: where `memory` ends (None: where the
    system ends it) and how much `stderr_flood` writes. `code`: of `exit`. `after`: length of the pause before a fault
    in phase 'idle'. `claims`: names or operators of the nodes it claims, of those that it could; None for all. `merge`:
    as in the contract. `provider`, `provider_options`: who computes. `record`: a file to which it appends a line of
    JSON for each incarnation and each fault, before it happens.
    """

    fault: str = "none"
    phase: str = ""
    at: int | None = 1
    node: str | None = None
    late: bool = False
    incarnations: tuple[int, ...] | None = None
    seconds: float | None = None
    bytes: int | None = None
    code: int = 9
    after: float = 0.05
    claims: tuple[str, ...] | None = None
    merge: bool = False
    provider: str = "cpu"
    provider_options: Mapping[str, Any] | None = None
    record: str | None = None


def _count(value: Any, low: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(fits, value))


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "fault": (_text, "the name of a fault"),
    "phase": (_text, "the name of a phase"),
    "at": (_or_none(_count), "a whole number from 1, or None for each time"),
    "node": (_or_none(_text), "the name or operator of a node, or None"),
    "late": (lambda value: isinstance(value, bool), "True or False"),
    "incarnations": (_or_none(_list(_count)), "a list of whole numbers from 1, or None for all"),
    "seconds": (_or_none(_number), "a positive number of seconds, or None"),
    "bytes": (_or_none(_count), "a positive number of bytes, or None"),
    "code": (lambda value: _count(value, 0) and value < 256, "an exit code from 0 to 255"),
    "after": (_number, "a positive number of seconds"),
    "claims": (_or_none(_list(_text)), "a list of names or operators of nodes, or None for all"),
    "merge": (lambda value: isinstance(value, bool), "True or False"),
    "provider": (_text, "the kind of another provider"),
    "provider_options": (_or_none(lambda value: isinstance(value, Mapping)), "a dict of that provider's options"),
    "record": (_or_none(_text), "the path of a file, or None"),
}


def parse_options(given: Mapping[str, Any]) -> Options:
    """The options, checked. Raises ProviderUnavailableError for one that does not exist or that has another value."""
    known = [field.name for field in fields(Options)]
    for name, value in given.items():
        if name not in known:
            raise _refused(f"no option {name!r}", name, known, "its options are")
        fits, expected = _EXPECTED[name]
        if not fits(value):
            raise _unavailable(f"its option {name} is {value!r}; write {expected}")
    read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    fault, phase = read.get("fault", "none"), read.get("phase", "")
    if fault not in FAULTS:
        raise _refused(f"no fault {fault!r}", fault, list(FAULTS), "its faults are")
    if phase and phase not in PHASES:
        raise _refused(f"no phase {phase!r}", phase, list(PHASES), "its phases are")
    if phase and phase not in FAULTS[fault]:
        raise _unavailable(f"{fault} cannot happen in phase {phase!r}, only in {', '.join(FAULTS[fault])}")
    return Options(**{**read, "phase": phase or FAULTS[fault][0]})


def _refused(what: str, given: str, known: list[str], these: str) -> ProviderUnavailableError:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return _unavailable(f"it has {what}{hint}; {these} {', '.join(known)}")


def _unavailable(reason: str) -> ProviderUnavailableError:
    return ProviderUnavailableError(f"the chaos provider was told what it cannot do: {reason}", reason=reason)
