"""Lists how Outrider differs from onnxruntime, out of `scheduler/differences.py` and `scheduler/dropin_options.py`.

python docs/differences/make.py            # print
python docs/differences/make.py --write    # write docs/differences.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.scheduler import errors
from outrider.scheduler.differences import ABSENT
from outrider.scheduler.dropin import ARENA
from outrider.scheduler.dropin_options import ENTRIES, INDIFFERENT, ONLY, RUN_ENTRIES
from outrider.scheduler.specs import CPU_PROVIDER

PAGE = Path(__file__).resolve().parent.parent / "differences.md"

HEAD = """\
# Outrider instead of onnxruntime

*Made by `python docs/differences/make.py --write`. Tests keep it complete (every public name of the installed
onnxruntime is either there, called in the same way, or listed here) and true (each difference in behaviour has a
test).*

`import outrider as ort` is enough for most scripts. What they touch of `onnxruntime` is there under the same name: the
session and its methods, options that are assigned to, `RunOptions`, `OrtValue`, `IOBinding`, `NodeArg`,
`ModelMetadata`. `CPUExecutionProvider` is Outrider's provider `cpu`; any other `NAMEExecutionProvider` is ONNX Runtime
with that execution provider in a process of its own (`ort:NAMEExecutionProvider`). A whole test module that was written
for onnxruntime and passes with another import is `tests/test_dropin.py`.
"""

BEHAVIOUR: dict[str, str] = {
    "a_provider_that_is_absent": (
        "A provider that the caller names must start: `ProviderUnavailableError` says what is missing. onnxruntime "
        "warns and goes on with the CPU. For that, write `ProviderSpec('CUDAExecutionProvider', required=False)`."
    ),
    "a_provider_that_nobody_knows": "A name that is no provider is `UnknownProviderError`, not a warning.",
    "an_empty_list_of_providers": "`providers=[]` is an error; leave it out, and it is `['cpu']`.",
    "names_of_providers": (
        "`get_providers()` gives the names that the caller gave, and `'cpu'` where none was given. Pins, reports and "
        "errors have Outrider's names: `cpu`, `ort:CUDAExecutionProvider`."
    ),
    "other_providers_for_a_session": (
        "`set_providers` takes the providers that the session has, `enable_fallback` and `disable_fallback` what its "
        "option `fallback` says (True by default); anything else is `UnsupportedOptionError`: make another session."
    ),
    "fallback_to_the_cpu": (
        "Nodes go to the providers that are listed and to no other. `session.disable_cpu_ep_fallback` = `1` refuses "
        "`cpu` and `ort` in the list, as onnxruntime does, and asks of a single provider that it takes every node."
    ),
    "keywords_of_a_session": "An unknown keyword of `InferenceSession` is TypeError; onnxruntime ignores it.",
    "a_model_may_be_a_proto": "A model may be given as `onnx.ModelProto`.",
    "models_in_ort_format": "Models in ORT format (`.ort`) are refused: `ModelLoadError`.",
    "operators_of_the_cpu_provider": (
        "`CPUExecutionProvider` is Outrider's `cpu`, which lacks some operators: `UnsupportedOpError` names those that "
        "nobody takes. With `['CPUExecutionProvider', 'ort']` they go to onnxruntime in a worker."
    ),
    "a_fork_of_the_process": "A session is of one process: in a fork of it, it raises `ForkedSessionError`.",
    "the_version": "`__version__` is Outrider's: scripts that compare it with onnxruntime's take the wrong turn.",
    "levels_that_read_as_all": (
        "`ORT_ENABLE_EXTENDED` and `ORT_ENABLE_LAYOUT` are `optimization='all'`, which reads back as `ORT_ENABLE_ALL`."
    ),
    "options_are_checked_when_set": (
        "A wrong value of an option is an error when it is set (`InvalidOptionError`, a ValueError), and so is a value "
        "that cannot be had (`UnsupportedOptionError`) and a session entry that is not listed below. onnxruntime takes "
        "any entry. A negative number of threads is refused; 0 is as many as there are cores."
    ),
    "dimensions_that_are_not_there": (
        "`add_free_dimension_override_by_name` with a name that no dimension of the model's inputs has is an error."
    ),
    "options_of_onnxruntime": (
        "An `onnxruntime.SessionOptions` may be given, and is read once: its attributes, and the entries listed below. "
        "What leaves no trace in it cannot be seen: free-dimension overrides, added initializers, custom-operator "
        "libraries, providers added to it, other entries. An `onnxruntime.RunOptions` is read when the run begins."
    ),
    "symbols_have_one_size": "Dimensions of the same name must have one size in a run: `SymbolConflictError`.",
    "runs_to_come": (
        "`run_async` returns a Future. A feed that is wrong is an error of the call; onnxruntime calls back with it."
    ),
    "binding_is_checked_when_bound": "An unknown output is an error when it is bound; in onnxruntime, when it is run.",
    "a_profile": (
        "`end_profiling` writes a trace of all processes, for ui.perfetto.dev; without `enable_profiling` it raises "
        "`TraceError`, where onnxruntime returns ''."
    ),
    "a_run_that_is_terminated": "`RunOptions.terminate = True` ends runs under way with `RunCancelledError`.",
    "devices": "Values and bindings are in host memory: any device but 'cpu' is `UnsupportedOptionError`.",
    "random_numbers": "Random nodes draw in their workers; there is no `set_seed`.",
    "the_log": (
        "Outrider logs through `logging`, under 'outrider': `set_default_logger_severity` sets that logger's level, "
        "`log_severity_level` of sessions and runs makes no difference."
    ),
}

ERRORS: dict[str, tuple[str, ...]] = {
    "ValueError (an input is missing)": ("InputNotFoundError",),
    "InvalidArgument": (
        "InputNotFoundError", "OutputNotFoundError", "InputTypeError", "DtypeMismatchError", "RankMismatchError",
        "ShapeMismatchError", "InvalidOptionError",
    ),
    "NoSuchFile": ("ModelNotFoundError",),
    "InvalidProtobuf, InvalidGraph, NoModel": ("ModelLoadError", "ModelLimitError"),
    "NotImplemented": ("UnsupportedOpError",),
    "Fail, RuntimeException": ("KernelError", "RunCancelledError", "OutOfMemoryError"),
    "EPFail, DeviceReset": ("ProviderUnavailableError", "WorkerDiedError", "ClaimBrokenError"),
}  # fmt: skip

ORT = """\
What is refused below may be had of onnxruntime in a worker: the provider `ort` takes attributes and entries of its
session as options, as in `ort?session.execution_mode=parallel&session.session.disable_prepacking=1`."""

TITLES = {"onnxruntime": "The module"}


def absent(names: Mapping[str, str]) -> Iterator[str]:
    """The table of a class's absent names; names with the same reason are one line."""
    yield "| not there | because |"
    yield "|---|---|"
    for reason in dict.fromkeys(names.values()):
        same = ", ".join(f"`{name}`" for name in sorted(names) if names[name] == reason)
        yield f"| {same} | {reason} |"


def bases(name: str) -> str:
    """The built-in errors that an error of ours is, too."""
    found = [base.__name__ for base in getattr(errors, name).__mro__ if base.__module__ == "builtins"]
    return ", ".join(base for base in found if base not in ("Exception", "BaseException", "object"))


def entries(listed: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    """The table of entries and the values that they may have."""
    yield "| entry | values |"
    yield "|---|---|"
    for key, values in listed.items():
        told = "any" if values is None else ", ".join(f"`{value}`" if value else "empty" for value in values)
        yield f"| `{key}` | {told} |"


def page() -> str:
    """The page as it should be."""
    lines = [HEAD, "## Behaviour", ""]
    lines += [f"- {text}" for text in BEHAVIOUR.values()]
    lines += ["", "## Errors", ""]
    lines += ["All are in `outrider.errors` and derive from `OutriderError`; most are a built-in error too.", ""]
    lines += ["| onnxruntime raises | Outrider raises |", "|---|---|"]
    for theirs, ours in ERRORS.items():
        told = ", ".join(f"`{name}`" + (f" ({bases(name)})" if bases(name) else "") for name in ours)
        lines.append(f"| {theirs} | {told} |")
    lines += ["", "## Options", ""]
    lines += ["These attributes may have any value, since it makes no difference to results, and none here:", ""]
    lines += [f"- `{kind}`: {', '.join(f'`{name}`' for name in names)}" for kind, names in INDIFFERENT.items()]
    lines += [f"- options of `{CPU_PROVIDER}`: {', '.join(f'`{name}`' for name in ARENA)}"]
    lines += ["", ORT]
    lines += ["", "Of these only one value can be had:", "", "| `SessionOptions` | value | because |", "|---|---|---|"]
    lines += [f"| `{name}` | `{value!s}` | {reason.rstrip('.')} |" for name, (value, reason) in ONLY.items()]
    lines += ["", "Entries that are read (`add_session_config_entry`, `SessionOptions(config=...)`):", ""]
    lines += entries(ENTRIES)
    lines += ["", "Entries of a run (`add_run_config_entry`); they make no difference:", ""]
    lines += entries(RUN_ENTRIES)
    lines += ["", "## Names", ""]
    lines += ["Whoever asks for one of these gets `NoSuchNameError`, an AttributeError: `hasattr` is False."]
    for where, names in ABSENT.items():
        if names:
            lines += ["", f"### {TITLES.get(where, f'`{where}`')}", "", *absent(names)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
