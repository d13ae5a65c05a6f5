"""What became of a case: one of six kinds, decided from what happened by a pure function."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.scheduler.errors import (
    ClaimBrokenError,
    ClaimError,
    KernelError,
    ModelLimitError,
    ModelLoadError,
    OutriderError,
    ProviderContractError,
    ProviderUnavailableError,
    RunTimeoutError,
    UnsupportedOpError,
    WorkerDiedError,
)

PASS, UNSUPPORTED, MISMATCH, ERROR, CRASH, HANG = KINDS = (
    "PASS", "UNSUPPORTED", "MISMATCH", "ERROR", "CRASH", "HANG",
)  # fmt: skip
GOOD = (PASS, UNSUPPORTED)
_LATE = re.compile(r"\bwithin [\d.e+-]+ s\b|partition_deadline")
_TAKEN_BACK = re.compile(r"^(\w+\.)*ClaimBrokenError\b", re.MULTILINE)
_DETAIL = 4000  # characters


@dataclass(frozen=True)
class Outcome:
    """`kind`: one of KINDS. `reason`: in a line. `hint`: what probably is wrong, and what to do. `detail`: the
    provider's traceback, or its stack, the innermost call first, and its last output."""

    kind: str
    reason: str = ""
    hint: str = ""
    detail: str = ""

    @property
    def good(self) -> bool:
        """Whether it is no failure."""
        return self.kind in GOOD


class NotForIt(Exception):
    """The case has nothing for this provider: `reason` says what it lacks."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def classify(error: Exception | None = None, difference: str | None = None) -> Outcome:
    """The outcome of a case that ended with this error, or, without one, with this difference to what is right.

    Anything but an OutriderError or NotForIt is raised again: it is not the provider's.
    """
    if error is None:
        return Outcome(PASS) if difference is None else Outcome(MISMATCH, difference)
    if isinstance(error, NotForIt):
        return Outcome(UNSUPPORTED, error.reason)
    if isinstance(error, UnsupportedOpError):
        return Outcome(UNSUPPORTED, "; ".join(_declined(group) for group in error.groups or ()))
    if isinstance(error, (ModelLoadError, ModelLimitError)):
        return Outcome(UNSUPPORTED, f"no provider is asked, as the model is refused: {_line(error)}")
    if isinstance(error, ClaimBrokenError):
        return _taken_back(error)
    if isinstance(error, (WorkerDiedError, ProviderUnavailableError, RunTimeoutError)):
        return _lost(error)
    if isinstance(error, ProviderContractError) and error.node is not None:
        return Outcome(MISMATCH, _line(error), "What a unit returns must be as the model declares it.")
    if isinstance(error, OutriderError):
        return Outcome(ERROR, _line(error), _hint(error), _detail(error))
    raise error


def _declined(group: dict[str, object]) -> str:
    return f"{str(group['op'])}: {group['reason']}"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _rest(error: Exception) -> str:
    return str(error).partition("\n")[2][:_DETAIL]


def _taken_back(error: ClaimBrokenError) -> Outcome:
    told = _detail(error)
    if _TAKEN_BACK.search(told):
        return Outcome(UNSUPPORTED, f"taken back by compile(): {error.reason}")
    hint = "It claims what it cannot compile. claim() should decline it, or compile() raise ClaimBrokenError."
    return Outcome(ERROR, _line(error), hint, told)


def _lost(error: WorkerDiedError | ProviderUnavailableError | RunTimeoutError) -> Outcome:
    if isinstance(error, RunTimeoutError):
        return Outcome(HANG, _line(error), _HANGS, _rest(error))
    reason = str(error.reason or "")
    if isinstance(error, ProviderUnavailableError):
        late = bool(_LATE.search(reason))
        return Outcome(HANG if late else ERROR, reason or _line(error), _HANGS if late else "", _rest(error))
    where = f" at {', '.join(error.nodes)}" if error.nodes else ""
    told = "\n".join(text for text in (error.stack, error.stderr) if text)[:_DETAIL]
    if _LATE.search(reason):
        return Outcome(HANG, f"in {error.phase}{where}: {reason}", _HANGS, told)
    how = error.signal or f"exit code {error.exit_code}"
    because = f" ({reason})" if reason else ""
    return Outcome(CRASH, f"{how} in {error.phase}{where}{because}", _CRASHES.get(str(error.signal), ""), told)


_HANGS = "A call of the provider did not return in time; the stack tells where it was."
_CRASHES = {
    "SIGSEGV": "Native code used memory that is not its own, or wrote to an input: inputs are mapped read-only.",
    "SIGBUS": "Native code used memory that is not its own.",
    "SIGABRT": "A library gave up; see its last output.",
}


def _hint(error: OutriderError) -> str:
    if isinstance(error, ClaimError):
        return "claim() must name nodes of the graph that it was shown, each in one claim, that can run in one step."
    if isinstance(error, KernelError):
        if "read-only" in str(error.cause):
            return "It writes to its inputs, which are read-only: others read them too. Compute into new memory."
        return "It claims what it cannot run. claim() should decline it, with the reason."
    return ""


def _detail(error: OutriderError) -> str:
    return str(getattr(error, "remote_traceback", None) or "")[-_DETAIL:]
