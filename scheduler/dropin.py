"""`import outrider as ort`: what makes a script that was written for onnxruntime run with another import.

Names of providers and keywords as onnxruntime has them, and its functions of the module. Names that are not here are in
`differences.py`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from outrider import __version__
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.specs import CPU_PROVIDER, SUFFIX, parse_provider, target

ARENA = ("arena_extend_strategy", "use_arena")  # options of it that make no difference to results
PROBE_SECONDS = 60.0  # that onnxruntime may take to be imported
_SEVERITIES = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)

log = logging.getLogger("outrider.session")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def accepts(**renamed: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A method that takes a keyword under onnxruntime's name too: `accepts(path_or_bytes="model")`."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(method)
        def called(*args: _P.args, **keywords: _P.kwargs) -> _R:
            for theirs, ours in renamed.items():
                if theirs in keywords:
                    if ours in keywords:
                        raise TypeError(
                            f"{method.__qualname__}() got {ours!r} and {theirs!r}, two names of one argument"
                        )
                    keywords[ours] = keywords.pop(theirs)
            return method(*args, **keywords)

        called.__dict__["renamed"] = renamed
        return called

    return decorate


# Providers ------------------------------------------------------------------------------------------------------------
def names_given(providers: Sequence[Any] | None, specs: Sequence[ProviderSpec]) -> dict[str, str]:
    """Name of each provider -> what `get_providers` calls it: '...ExecutionProvider' where the caller did."""
    names = {spec.display: spec.display for spec in specs}
    for entry in providers or ():
        text = entry[0] if isinstance(entry, tuple) and entry else entry
        if isinstance(text, str):
            given = text.partition("?")[0].strip()
            if given not in names and given.partition(":")[0].endswith(SUFFIX):
                ours = parse_provider(given).display
                if ours in names:
                    names[ours] = given
    return names


def without_arena(providers: Any, provider_options: Any) -> tuple[Any, Any]:
    """Both arguments of a session without the options of 'CPUExecutionProvider' that only manage its memory.

    onnxruntime takes any option for it. What is malformed passes as it is; `parse_providers` refuses it.
    """
    if not isinstance(providers, (list, tuple)):
        return providers, provider_options
    kept = [
        (entry[0], _plain(entry[1])) if isinstance(entry, tuple) and len(entry) == 2 and _is_cpu(entry[0]) else entry
        for entry in providers
    ]
    if isinstance(provider_options, (list, tuple)) and len(provider_options) == len(kept):
        provider_options = [
            _plain(given) if _is_cpu(entry) else given for entry, given in zip(kept, provider_options, strict=True)
        ]
    return kept, provider_options


def _is_cpu(entry: Any) -> bool:
    return isinstance(entry, str) and entry.strip() == CPU_PROVIDER


def _plain(options: Any) -> Any:
    if not isinstance(options, Mapping):
        return options
    return {key: value for key, value in options.items() if key not in ARENA}


def refuse_cpu(specs: Sequence[ProviderSpec]) -> list[ProviderSpec]:
    """The providers of a session that disables fallback to the CPU; one alone must take every node.

    Raises InvalidOptionError if one of them is a CPU provider, as onnxruntime does.
    """
    for spec in specs:
        if _computes_on_cpu(spec):
            expected = "'0' with a CPU provider in the list of providers; leave that out"
            raise invalid_option("session.disable_cpu_ep_fallback", "1", f"{expected} ({spec.display})")
    return [replace(spec, required="all") for spec in specs] if len(specs) == 1 else list(specs)


def _computes_on_cpu(spec: ProviderSpec) -> bool:
    """Whether it is our CPU provider or onnxruntime's, or hands nodes on to the latter."""
    where, options = target(spec.kind), spec.options
    if where.kind != "ort":
        return where.kind == "cpu"
    if where.part == CPU_PROVIDER or not (where.part or "library" in options):
        return True
    return str(options.get("cpu_fallback", False)).lower() not in ("false", "0")


@dataclass(frozen=True)
class _Installed:
    """What the onnxruntime beside us offers."""

    available: tuple[str, ...] = (CPU_PROVIDER,)
    known: tuple[str, ...] = (CPU_PROVIDER,)
    device: str = "CPU"


_ASK = (
    "import json, onnxruntime as o; "
    "print(json.dumps([o.get_available_providers(), o.get_all_providers(), o.get_device()]))"
)


@functools.cache
def _installed() -> _Installed:
    """Asked once, in a process of its own: nothing of it is loaded into this one."""
    env = {"ORT_DISABLE_TELEMETRY": "1", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env,
            timeout=PROBE_SECONDS, check=True,
        )  # fmt: skip
        available, known, device = json.loads(done.stdout.splitlines()[-1])
        return _Installed(tuple(available), tuple(known), device)
    except subprocess.CalledProcessError as error:
        told = error.stderr.strip().splitlines()
        if not told or "No module named 'onnxruntime'" not in told[-1]:
            log.warning("onnxruntime cannot tell its execution providers: %s", told[-1] if told else str(error))
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        log.warning("onnxruntime cannot tell its execution providers: %s", str(error))
    return _Installed()


def get_available_providers() -> list[str]:
    """Names for `providers=` that can be had here: those of the installed onnxruntime, and 'CPUExecutionProvider'.

    The former run in it (`ort:NAME`), the latter is Outrider's `cpu`. A process is started to ask, once.
    """
    return list(_installed().available)


def get_all_providers() -> list[str]:
    """All names of execution providers that the installed onnxruntime knows, of whatever build."""
    return list(_installed().known)


def get_device() -> str:
    """What the installed onnxruntime was built for: 'CPU', 'GPU', ...; 'CPU' without one."""
    return _installed().device


# The module -----------------------------------------------------------------------------------------------------------
def get_version_string() -> str:
    """Outrider's version."""
    return __version__


def get_build_info() -> str:
    """Outrider's name and version."""
    return f"Outrider {__version__}"


def set_default_logger_severity(severity: int, /) -> None:
    """Set the level of the logger 'outrider': 0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR, 4 CRITICAL. InvalidOptionError."""
    if not isinstance(severity, int) or not 0 <= severity < len(_SEVERITIES):
        raise invalid_option("severity", severity, "0 (all), 1 (information), 2 (warnings), 3 (errors) or 4 (fatal)")
    logging.getLogger("outrider").setLevel(_SEVERITIES[severity])


def set_default_logger_verbosity(verbosity: int, /) -> None:
    """Nothing: it is for debug builds of onnxruntime. InvalidOptionError for what is no integer."""
    if not isinstance(verbosity, int):
        raise invalid_option("verbosity", verbosity, "an integer")


def disable_telemetry_events() -> None:
    """Nothing: there are none."""
