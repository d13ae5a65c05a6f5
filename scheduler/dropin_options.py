"""Options under onnxruntime's names: what may be assigned to SessionOptions and RunOptions, and what it means here.

Three kinds of attributes and session entries:

- those that mean the same here (`graph_optimization_level`, `intra_op_num_threads`, `enable_profiling`,
  `add_free_dimension_override_by_name`, `terminate`, 'session.disable_cpu_ep_fallback', ...);
- those that can make no difference to results, since they tell onnxruntime how to manage its memory, its log or threads
  that do not exist here: any value that onnxruntime takes is taken (`INDIFFERENT`);
- those that ask for what is not there: only the value that holds here anyway is taken (`ONLY`, `ENTRIES`), any other is
  UnsupportedOptionError.

Other names do not exist; `differences.py` has them with reasons.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from outrider.scheduler.checked import Assignable, Options, invalid_option, unknown_option, unsupported_option
from outrider.scheduler.errors import ConfigEntryNotFoundError


class _Level(enum.IntEnum):
    """An enumeration that is written as onnxruntime writes it."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class GraphOptimizationLevel(_Level):
    """`SessionOptions.graph_optimization_level`: 'none', 'basic', or, each of the last three, 'all'."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(_Level):
    """`SessionOptions.execution_mode`: the nodes of a worker run one after another."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(_Level):
    """`SessionOptions.execution_order`: only the default is there."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


_OPTIMIZATION = {
    GraphOptimizationLevel.ORT_DISABLE_ALL: "none",
    GraphOptimizationLevel.ORT_ENABLE_BASIC: "basic",
    GraphOptimizationLevel.ORT_ENABLE_EXTENDED: "all",
    GraphOptimizationLevel.ORT_ENABLE_LAYOUT: "all",
    GraphOptimizationLevel.ORT_ENABLE_ALL: "all",
}
_LEVEL = {text: level for level, text in _OPTIMIZATION.items()}

INDIFFERENT = {
    "SessionOptions": (
        "inter_op_num_threads", "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "log_severity_level",
        "log_verbosity_level", "logid",
    ),
    "RunOptions": ("log_severity_level", "log_verbosity_level", "logid", "only_execute_path_to_fetches"),
}  # fmt: skip
"""Attributes whose value makes no difference to results, and none here."""

ONLY: dict[str, tuple[Any, str]] = {
    "execution_mode": (
        ExecutionMode.ORT_SEQUENTIAL,
        "nodes of one worker run one after another; those of several do not wait for each other.",
    ),
    "execution_order": (ExecutionOrder.DEFAULT, "the planner orders the nodes."),
    "optimized_model_filepath": ("", "no optimized model is written."),
    "use_deterministic_compute": (False, "no provider is asked for that."),
    "use_per_session_threads": (True, "each worker has threads of its own."),
}
"""Attributes of SessionOptions of which one value holds, and why there is no other."""

DISABLE_CPU_FALLBACK = "session.disable_cpu_ep_fallback"
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"

ENTRIES: dict[str, tuple[str, ...] | None] = {
    DISABLE_CPU_FALLBACK: ("0", "1"),
    EXTERNAL_FOLDER: None,
    "session.intra_op.allow_spinning": ("0",),
    "session.inter_op.allow_spinning": ("0",),
    "session.force_spinning_stop": ("0", "1"),
    "session.load_model_format": ("ONNX",),
    "session.save_model_format": ("ONNX",),
    "session.set_denormal_as_zero": ("0",),
    "session.use_env_allocators": ("0",),
    "session.use_device_allocator_for_initializers": ("0",),
    "session.disable_prepacking": ("0",),
    "session.disable_quant_qdq": ("0",),
    "session.disable_double_qdq_remover": ("0",),
    "session.enable_quant_qdq_cleanup": ("0",),
    "session.dynamic_block_base": ("0",),
    "session.intra_op_thread_affinities": ("",),
    "session.record_ep_graph_assignment_info": ("0",),
    "session.disable_aot_function_inlining": ("0",),
    "session.strict_shape_type_inference": ("0",),
    "optimization.enable_gelu_approximation": ("0",),
    "optimization.disable_specified_optimizers": ("",),
    "optimization.minimal_build_optimizations": ("",),
}
"""onnxruntime's session entries that are read, and their accepted values (None: any); the first one of several is the
default. 'session.disable_cpu_ep_fallback' = '1' refuses the cpu providers, and asks of a single provider that it takes
every node; 'session.model_external_initializers_file_folder_path' is `base_dir`; nothing spins between runs."""

_AREAS = ("session", "session_state", "ep", "optimization", "mlas", "memory")
_HINTS = {
    "session.intra_op.allow_spinning": "no pool spins; config={'spin_us': ...} has callers and workers look for work.",
    "session.intra_op_thread_affinities": "use ProviderSpec(cpus=...).",
    "session.record_ep_graph_assignment_info": "session.placement() tells it always.",
}

RUN_ENTRIES: dict[str, tuple[str, ...] | None] = {
    "memory.enable_memory_arena_shrinkage": None,
    "disable_synchronize_execution_providers": ("0", "1"),
}
"""onnxruntime's run entries that are taken; they make no difference to results, and none here."""


def check_entry(key: str, text: str) -> None:
    """Check one of onnxruntime's session entries. Raises UnsupportedOptionError, or KeyError for one not listed."""
    accepted = ENTRIES[key]
    if accepted is not None and text not in accepted:
        only = " and ".join(map(repr, accepted))
        reason = _HINTS.get(key, f"only {only} can be had; an `ort` provider takes the option 'session.{key}'.")
        raise unsupported_option(f"SessionOptions.config[{key!r}]", text, reason)


def is_foreign_entry(key: str) -> bool:
    """Whether a key has the form of onnxruntime's: 'session.use_env_allocators'."""
    return key.partition(".")[0] in _AREAS and "." in key


_Enum = TypeVar("_Enum", bound=_Level)


def member(name: str, value: Any, kind: type[_Enum]) -> _Enum:
    """A member of an enumeration, ours or onnxruntime's. Raises InvalidOptionError for anything else."""
    if isinstance(value, kind):
        return value
    if type(value).__name__ == kind.__name__ and getattr(value, "name", None) in kind.__members__:
        return kind[value.name]
    raise invalid_option(name, value, f"a {kind.__name__}: {', '.join(kind.__members__)}")


@dataclass(kw_only=True, repr=False)
class SessionAttributes(Assignable):
    """The part of SessionOptions that has onnxruntime's names."""

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: ExecutionOrder = ExecutionOrder.DEFAULT
    enable_profiling: bool = False
    profile_file_prefix: str = "onnxruntime_profile_"
    optimized_model_filepath: str = ""
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True
    free_dimensions: Mapping[str, int] = field(default_factory=dict)

    optimization: str = "all"
    config: Mapping[str, str] = field(default_factory=dict)

    def _check_attributes(self) -> None:
        for name in ("intra_op_num_threads", "inter_op_num_threads"):
            self._integer(name, 0)
        self._set("execution_mode", member("execution_mode", self.execution_mode, ExecutionMode))
        self._set("execution_order", member("execution_order", self.execution_order, ExecutionOrder))
        for name in (
            "enable_profiling", "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse",
            "use_deterministic_compute", "use_per_session_threads",
        ):  # fmt: skip
            self._boolean(name)
        for name in ("profile_file_prefix", "optimized_model_filepath"):
            self._text(name)
        _check_log(self)
        self._mapping("free_dimensions", int, "int (name of a dimension to its size)")
        for name, size in self.free_dimensions.items():
            if isinstance(size, bool) or size < 1:
                raise invalid_option("free_dimensions", self.free_dimensions, f"positive sizes, not {name!r}: {size}")
        for name, (value, reason) in ONLY.items():
            if getattr(self, name) != value:
                raise unsupported_option(f"SessionOptions.{name}", getattr(self, name), reason)

    @property
    def graph_optimization_level(self) -> GraphOptimizationLevel:
        """`optimization` under its other name; ORT_ENABLE_EXTENDED and ORT_ENABLE_LAYOUT read as ORT_ENABLE_ALL."""
        return _LEVEL[self.optimization]

    @graph_optimization_level.setter
    def graph_optimization_level(self, value: GraphOptimizationLevel) -> None:
        level = member("graph_optimization_level", value, GraphOptimizationLevel)
        self.optimization = _OPTIMIZATION[level]

    def add_session_config_entry(self, key: str, value: str, /) -> None:
        """Set one entry of `config`. Raises UnknownOptionError, InvalidOptionError, UnsupportedOptionError."""
        self.config = {**self.config, key: value}

    def get_session_config_entry(self, key: str, /) -> str:
        """The text of an entry that was set. Raises ConfigEntryNotFoundError, a LookupError and RuntimeError."""
        return _entry(self.config, key, "SessionOptions")

    def add_free_dimension_override_by_name(self, name: str, size: int, /) -> None:
        """Fix a named dimension of the model: its inputs have that size then.

        A model that has no dimension of that name is refused by the session.
        """
        self.free_dimensions = {**self.free_dimensions, name: size}


@dataclass(kw_only=True, repr=False)
class RunAttributes(Assignable):
    """The part of RunOptions that has onnxruntime's names."""

    terminate: bool = False
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    only_execute_path_to_fetches: bool = False
    config: Mapping[str, str] = field(default_factory=dict)

    def _check_attributes(self) -> None:
        self._boolean("terminate")
        self._boolean("only_execute_path_to_fetches")
        _check_log(self)
        self._mapping("config", str, "str")
        for key, text in self.config.items():
            name = f"RunOptions.config[{key!r}]"
            if key not in RUN_ENTRIES:
                if is_foreign_entry(key) or key == "gpu_graph_id":
                    raise unsupported_option(name, text, f"read are {', '.join(RUN_ENTRIES)}.")
                raise unknown_option(key, list(RUN_ENTRIES), "RunOptions.config")
            accepted = RUN_ENTRIES[key]
            if accepted is not None and text not in accepted:
                raise invalid_option(name, text, " or ".join(map(repr, accepted)))

    def add_run_config_entry(self, key: str, value: str, /) -> None:
        """Set one entry of `config`. Raises UnknownOptionError, InvalidOptionError, UnsupportedOptionError."""
        self.config = {**self.config, key: value}

    def get_run_config_entry(self, key: str, /) -> str:
        """The text of an entry that was set. Raises ConfigEntryNotFoundError, a LookupError and RuntimeError."""
        return _entry(self.config, key, "RunOptions")


def _check_log(options: Options) -> None:
    options._integer("log_severity_level", -1, 4)
    options._integer("log_verbosity_level", -1)
    options._text("logid")


def _entry(config: Mapping[str, str], key: str, where: str) -> str:
    if key not in config:
        raise ConfigEntryNotFoundError(f"{where} has no entry {key!r}: it was not set.", key=key, known=sorted(config))
    return config[key]


def session_attributes(theirs: Any) -> dict[str, Any]:
    """Keywords of our SessionOptions for what an onnxruntime.SessionOptions asks for.

    Raises UnsupportedOptionError for an attribute that was changed and is none of ours. What leaves no trace in that
    object cannot be seen: free-dimension overrides, added initializers, custom-operator libraries, providers, and
    entries that are not in `ENTRIES`.
    """

    def refuse(name: str, value: Any) -> NoReturn:
        raise unsupported_option(f"onnxruntime.SessionOptions.{name}", value, "use outrider.SessionOptions.")

    untouched = type(theirs)()
    made: dict[str, Any] = {}
    level = str(getattr(theirs.graph_optimization_level, "name", ""))
    if level not in GraphOptimizationLevel.__members__:
        refuse("graph_optimization_level", theirs.graph_optimization_level)
    made["optimization"] = _OPTIMIZATION[GraphOptimizationLevel[level]]
    for name in dir(untouched):
        value = None if name.startswith("_") or name == "graph_optimization_level" else getattr(theirs, name)
        if value is None or callable(value) or value == getattr(untouched, name):
            continue
        if name not in SessionAttributes.__dataclass_fields__:
            refuse(name, value)
        made[name] = value
    if made.get("intra_op_num_threads", 0) < 0:  # onnxruntime chooses then
        del made["intra_op_num_threads"]
    made["config"] = found(theirs.get_session_config_entry, [*ENTRIES, "ep.context_enable"])
    return made


def run_attributes(theirs: Any) -> dict[str, Any]:
    """Keywords of our RunOptions for what an onnxruntime.RunOptions asks for now; a later `terminate` is not seen."""
    names = [name for name in RunAttributes.__dataclass_fields__ if name != "config" and hasattr(theirs, name)]
    return {name: getattr(theirs, name) for name in names} | {"config": found(theirs.get_run_config_entry, RUN_ENTRIES)}


def found(get: Any, keys: Any) -> dict[str, str]:
    """The entries that were set, of those that can be asked for."""
    entries = {}
    for key in keys:
        try:
            entries[key] = get(key)
        except RuntimeError:  # not set
            continue
    return entries
