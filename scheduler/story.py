"""The story of a death: from what is known of it to the `WorkerDiedError` that the caller reads.

Pure: the monitor collects the facts of an incarnation, whoever knows the run adds the partition and the earlier deaths
(`dataclasses.replace`), and `died` writes it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.providers.wire.failures import first_names
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.lifecycle import exit_text, signal_name
from outrider.scheduler.oom import says_so
from outrider.shm.stackfile import FATAL

# A phase, and what the worker did then; {what} is the partition where one is known.
PHASES = {
    "start": "while it started",
    "claim": "while it was asked what it claims",
    "load": "while it compiled {what}",
    "run": "while it ran {what}",
    "idle": "while it was idle",
    "stop": "while it stopped",
}
ATTEMPT_OUTPUT = 2000
"""How many characters of its output an earlier death keeps."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Facts:
    """What is known of the death of one incarnation.

    - `provider`, `device`, `incarnation`, `pid`: which one. `code`: how it ended, as subprocess says it.
    - `phase`: what it was doing, one of `PHASES`; `partition`, `nodes` (full names), `step` (how many units of
      the partition had run): where, as far as it is known.
    - `reason`: why we killed it, a clause ('it ran longer than ...'); None if we did not.
    - `short`: what the kernel says about a lack of memory (`OomKills.explain`), None if nothing.
    - `memory_limit`: of its spec, in bytes. `passed_through`: its output went to ours and was not kept.
    - `stack`, `stderr`: of its Python threads, and the tail of what it wrote.
    - `attempts`: the earlier deaths of the same run, oldest first, as `attempt` writes them.
    """

    provider: str
    device: int
    incarnation: int
    pid: int
    code: int
    phase: str
    partition: int | None = None
    nodes: Sequence[str] = ()
    step: int | None = None
    reason: str | None = None
    short: str | None = None
    memory_limit: int | None = None
    passed_through: bool = False
    stack: str = ""
    stderr: str = ""
    attempts: Sequence[Mapping[str, Any]] = ()


def died(facts: Facts) -> WorkerDiedError:
    """The error, with all its fields. Its message: what happened, where, why, what to do; then stack and output."""
    hint = hint_of(facts)
    head = f"worker {facts.provider} (incarnation {facts.incarnation}, pid {facts.pid}) died {_place(facts)}: "
    head += exit_text(facts.code)
    if facts.reason:
        head += f", by us: {facts.reason.rstrip('.')}"
    parts = [head + "." + (f" {hint}" if hint else "")]
    if facts.attempts:
        parts.append("Before that in this run:\n" + "\n".join(f"  {_told(one)}" for one in facts.attempts))
    parts += _left_behind(facts)
    return WorkerDiedError(
        "\n".join(parts),
        provider=facts.provider,
        device=facts.device,
        incarnation=facts.incarnation,
        phase=facts.phase,
        partition=facts.partition,
        nodes=list(facts.nodes),
        step=facts.step,
        signal=signal_name(facts.code),
        exit_code=facts.code,
        reason=facts.reason,
        hint=hint,
        stack=facts.stack,
        stderr=facts.stderr,
        attempts=[dict(one) for one in facts.attempts],
    )


def last_words(facts: Facts, said: bool = False) -> str:
    """What a process that ended while starting left: what that means, its stack, its output. May be empty.

    `said`: it told itself why it does not start, so that how it ended means nothing.
    """
    hint = None if said else hint_of(facts)
    return "\n".join([*([hint] if hint else []), *_left_behind(facts)])


def _left_behind(facts: Facts) -> list[str]:
    parts = []
    if facts.stack:
        parts.append(f"Its Python stack:\n{facts.stack}")
    elif signal_name(facts.code) in FATAL:
        parts.append("It left no Python stack: its provider handles that signal itself, or the stack was gone.")
    if facts.stderr.strip():
        parts.append(f"Its last output:\n{facts.stderr.rstrip()}")
    elif facts.passed_through:
        parts.append("Its output was passed through (debug=True).")
    return parts


def attempt(error: WorkerDiedError) -> dict[str, Any]:
    """An earlier death as one entry of `attempts`: plain data, and of its output the end only."""
    told = {name: value for name, value in error.fields().items() if name != "attempts"}
    return {**told, "nodes": list(error.nodes or []), "stderr": (error.stderr or "")[-ATTEMPT_OUTPUT:]}


def hint_of(facts: Facts) -> str | None:
    """What the death means and what to do about it, in a sentence or two; None where nobody knows more.

    A lack of memory is named only if the kernel says so, or if the process had a limit and said itself that memory was
    refused.
    """
    if facts.short:
        return f"Out of memory: {facts.short}. Use smaller inputs or fewer workers, or give it more memory."
    if facts.reason:
        return None
    name = signal_name(facts.code)
    if facts.memory_limit is not None and name != "SIGKILL" and says_so(f"{facts.stderr}\n{facts.stack}"):
        limit = f"{facts.memory_limit / _MIB:.0f} MiB"
        return f"Out of memory: it may use {limit} (memory_limit) and was refused more. Raise that limit."
    if name in FATAL:
        return (
            "Native code of the provider crashed; ProviderSpec(debug=True, wrap=['gdb', '--args']) runs it under a "
            "debugger."
        )
    if name is None:
        return "Something in the process ended it; its last output may say why."
    return None


def _place(facts: Facts) -> str:
    what = "the model"
    if facts.partition is not None:
        what = f"partition {facts.partition}"
        if facts.nodes:
            what += f" ({first_names(facts.nodes)})"
        if facts.step:
            what += f", after {facts.step} of its units"
    return PHASES[facts.phase].format(what=what)


def _told(one: Mapping[str, Any]) -> str:
    """An earlier death in a line."""
    where = f" in partition {one['partition']}" if one.get("partition") is not None else ""
    why = f" ({one['reason']})" if one.get("reason") else ""
    return f"{one['provider']} (incarnation {one['incarnation']}) died{where}: {exit_text(one['exit_code'])}{why}"
