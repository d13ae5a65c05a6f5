"""Options of the `ort` provider, from `ProviderSpec.options` or the text of a spec.

| option | what it says |
|---|---|
| `library` | path of a plugin library that holds execution providers |
| `registration` | the name to register it under; the default is the one in `ort:NAME`, else the file's name |
| `custom_ops` | paths of libraries with custom operators: a list, or text with commas |
| `exclude` | operators to leave to others: a list, or text with commas; `Conv` or `com.microsoft::Gelu` |
| `cpu_fallback` | take nodes that the execution provider leaves to onnxruntime's CPU provider, too |
| `static_shapes` | compile for each signature of concrete shapes, for execution providers that want those |
| `session` | a dict: attributes of onnxruntime's SessionOptions, and config entries under their full names |
| `session.NAME` | one of them: `session.enable_mem_pattern`, `session.ep.context_enable` |
| any other | an option of the execution provider, handed on as text |

onnxruntime's own CPU provider has no options, so there any other name is an error. An execution provider may ignore
what it does not know: a name that is nearly one of ours is an error everywhere.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.providers.contract import ProviderUnavailableError

OURS = ("library", "registration", "custom_ops", "exclude", "cpu_fallback", "static_shapes", "session")
_NEAR = 0.8  # of difflib: `libary`, `custom_op`, `cpu-fallback`

# Attributes of onnxruntime.SessionOptions that may be set, and what they take.
_ATTRIBUTES: dict[str, type | tuple[str, ...]] = {
    "enable_cpu_mem_arena": bool,
    "enable_mem_pattern": bool,
    "enable_mem_reuse": bool,
    "use_deterministic_compute": bool,
    "inter_op_num_threads": int,
    "log_severity_level": int,
    "log_verbosity_level": int,
    "execution_mode": ("sequential", "parallel"),
    "execution_order": ("default", "priority_based", "memory_efficient"),
}
_ELSEWHERE = {
    "graph_optimization_level": "SessionOptions(optimization=...) sets it",
    "intra_op_num_threads": "ProviderSpec(threads=...) sets it",
    "enable_profiling": "use session.start_trace()",
    "profile_file_prefix": "use session.start_trace()",
    "optimized_model_filepath": "the model is cut into units, each a session of its own",
    "session.record_ep_graph_assignment_info": "it is always on",
    "session.disable_cpu_ep_fallback": "say required='all' of the provider",
    "session.model_external_initializers_file_folder_path": "weights are found where the model says",
    "use_per_session_threads": "each worker has threads of its own",
    "logid": "the logger outrider.worker.<provider> names the worker",
}
# onnxruntime ignores config entries that it does not know, and new versions know more: a name that is nearly one of
# these is taken for a slip of the pen.
# fmt: off
_KNOWN = (
    "disable_aot_function_inlining", "disable_double_qdq_remover", "disable_model_compile", "disable_prepacking",
    "disable_qdq_constant_folding", "disable_quant_qdq", "dynamic_block_base", "enable_dq_matmulnbits_fusion",
    "enable_quant_qdq_cleanup", "force_spinning_stop", "graph_optimizations_loop_level", "inter_op.allow_spinning",
    "inter_op.spin_backoff_max", "inter_op.spin_duration_us", "intra_op.allow_spinning", "intra_op.spin_backoff_max",
    "intra_op.spin_duration_us", "intra_op_thread_affinities", "qdq_matmulnbits_accuracy_level",
    "qdq_matmulnbits_block_size", "qdqisint8allowed", "set_denormal_as_zero", "strict_shape_type_inference",
    "use_device_allocator_for_initializers", "use_env_allocators", "x64quantprecision", "ep.context_embed_mode",
    "ep.context_enable", "ep.context_file_path", "mlas.disable_kleidiai", "mlas.use_lut_gemm",
    "optimization.disable_specified_optimizers", "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation", "optimization.minimal_build_optimizations",
)
# fmt: on
_SLIP = 0.93  # of difflib: one letter of twenty
_FULL = ("session.", "ep.", "optimization.", "mlas.", "memory.")  # how config entries of onnxruntime begin
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class OrtOptions:
    """The checked options. `attributes` and `entries` are for onnxruntime's session, `provider` is for the EP."""

    library: str = ""
    registration: str = ""
    custom_ops: tuple[str, ...] = ()
    exclude: frozenset[str] = frozenset()
    cpu_fallback: bool = False
    static_shapes: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    provider: Mapping[str, str] = field(default_factory=dict)


def unavailable(reason: str) -> ProviderUnavailableError:
    """The error of a provider that cannot start for this reason."""
    return ProviderUnavailableError(reason, provider="ort", reason=reason)


def parse_options(given: Mapping[str, Any], own_cpu: bool) -> OrtOptions:
    """Check what the user wrote. `own_cpu`: the execution provider is onnxruntime's own CPU provider.

    Raises ProviderUnavailableError that names the option.
    """
    session: dict[str, Any] = {}
    provider: dict[str, str] = {}
    for name, value in given.items():
        if name == "session":
            if not isinstance(value, Mapping):
                raise unavailable(f"option 'session' of ort is a dict, not {value!r}")
            session.update(value)
        elif name.startswith("session."):
            session[_session_name(name.removeprefix("session."))] = value
        elif name not in OURS:
            provider[name] = _passed_on(name, value, own_cpu)
    attributes, entries = _session_options(session)
    library = _file("library", given["library"]) if "library" in given else ""
    if "registration" in given and not library:
        raise unavailable("option 'registration' of ort names a plugin library; say 'library' too")
    return OrtOptions(
        library,
        _text("registration", given["registration"]) if "registration" in given else "",
        tuple(_file("custom_ops", one) for one in _items("custom_ops", given.get("custom_ops", ()))),
        frozenset(_label(one) for one in _items("exclude", given.get("exclude", ()))),
        _flag("cpu_fallback", given.get("cpu_fallback", False)),
        _flag("static_shapes", given.get("static_shapes", False)),
        attributes,
        entries,
        provider,
    )


def _passed_on(name: str, value: Any, own_cpu: bool) -> str:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), OURS, 1, 0.5 if own_cpu else _NEAR)
    if own_cpu:
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(OURS)}"
        raise unavailable(f"onnxruntime's CPU provider has no option {name!r}; {hint}")
    if near:
        raise unavailable(f"ort has no option {name!r}; did you mean {near[0]!r}?")
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise unavailable(f"option {name!r} goes to the execution provider as text; {value!r} is none")


def _session_name(name: str) -> str:
    """What `session.NAME` names: an attribute, a config entry, or one with the word `session.` in its own name."""
    return name if name in _ATTRIBUTES or name in _ELSEWHERE or name.startswith(_FULL) else f"session.{name}"


def _session_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    attributes: dict[str, Any] = {}
    entries: dict[str, str] = {}
    for name, value in given.items():
        if name in _ELSEWHERE:
            raise unavailable(f"ort does not take the session option {name!r}: {_ELSEWHERE[name]}")
        if name in _ATTRIBUTES:
            attributes[name] = _attribute(name, value, _ATTRIBUTES[name])
        elif name.startswith(_FULL):
            if slip := _slip(name.removeprefix("session.")):
                raise unavailable(f"onnxruntime has no session option {name!r}; did you mean {slip!r}?")
            entries[name] = ("1" if value else "0") if isinstance(value, bool) else str(value)
        else:
            near = difflib.get_close_matches(name, [*_ATTRIBUTES, *_ELSEWHERE], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"attributes are {', '.join(_ATTRIBUTES)}"
            raise unavailable(f"onnxruntime has no session option {name!r}; {hint}; entries begin with {_begin()}")
    return attributes, entries


def _slip(name: str) -> str:
    """What was meant by a name that is nearly one of onnxruntime's, '' for any other."""
    known = [*_KNOWN, *_ATTRIBUTES, *(one.removeprefix("session.") for one in _ELSEWHERE)]
    near = difflib.get_close_matches(name, known, 1, _SLIP)
    return near[0] if near and name not in known else ""


def _begin() -> str:
    return ", ".join(map(repr, _FULL))


def _attribute(name: str, value: Any, kind: type | tuple[str, ...]) -> Any:
    if kind is bool:
        return _flag(f"session.{name}", value)
    if isinstance(kind, tuple):
        if str(value).lower() in kind:
            return str(value).lower()
        raise unavailable(f"session option {name!r} of ort is one of {', '.join(kind)}, not {value!r}")
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(value)
    except (TypeError, ValueError) as error:
        raise unavailable(f"session option {name!r} of ort is a number, not {value!r}") from error


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise unavailable(f"option {name!r} of ort is true or false, not {value!r}")


def _text(name: str, value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise unavailable(f"option {name!r} of ort is a text, not {value!r}")


def _items(name: str, value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple, set, frozenset)) or not all(isinstance(one, str) and one for one in items):
        raise unavailable(f"option {name!r} of ort is a list of texts, not {value!r}")
    return [one.strip() for one in items]


def _file(name: str, value: Any) -> str:
    path = os.path.abspath(os.path.expanduser(_text(name, value)))
    if not os.path.isfile(path):
        raise unavailable(f"option {name!r} of ort: there is no file {path}")
    return path


def _label(text: str) -> str:
    """An operator as reports write it: `ai.onnx::Conv`."""
    return text if "::" in text else f"ai.onnx::{text}"
