"""Options of sessions and runs: names, defaults, and checks that happen before any process starts.

Options are frozen once made, so that what was checked is what counts; `dataclasses.replace` makes a changed copy.
Whatever the design knows but this build does not have yet raises UnsupportedOptionError when set to anything but its
default: nothing is accepted and ignored.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from outrider.scheduler import spec_text
from outrider.scheduler.cancelling import CancelToken
from outrider.scheduler.cores import usable_cores
from outrider.scheduler.errors import InvalidOptionError, UnknownOptionError, UnsupportedOptionError
from outrider.shm.spin import MAX_MICROSECONDS

OPTIMIZATIONS = ("none", "basic", "all")
STRATEGIES = ("priority", "cost", "pipeline", "replicate")
AT_ONCE = ("pipeline", "replicate")  # strategies by which workers compute at once
WEIGHING = ("cost", "pipeline")  # strategies that weigh costs
QUEUES = ("block", "reject")
MAX_IN_FLIGHT = 64
DEFAULT_OUTPUT_MEMORY = 1 << 30
# Accepted strings of the keys of `config`, after trimming and lowering; None: any string.
_CONFIG: dict[str, Mapping[str, Any] | None] = {
    "optimization": {"none": "none", "off": "none", "0": "none", "basic": "basic", "all": "all"},
    "ep.context_enable": {"0": False, "1": True, "false": False, "true": True},
    "ep.context_file_path": None,
    "ep.context_embed_mode": {"0": 0, "1": 1},
    "spin_us": {str(count): count for count in range(MAX_MICROSECONDS + 1)},
}
_CONFIG_EXPECTED = {
    "optimization": "none, basic, all",
    "ep.context_enable": "0, 1, true, false",
    "ep.context_embed_mode": "0, 1",
    "spin_us": f"0 to {MAX_MICROSECONDS}",
}
_CONFIG_DEFAULT: dict[str, Any] = {"ep.context_enable": False, "ep.context_file_path": "", "ep.context_embed_mode": 1}


def unknown_option(name: str, known: Collection[str], where: str) -> UnknownOptionError:
    """The error for an option name that does not exist, with near names first."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(sorted(known))}."
    return UnknownOptionError(f"{where} has no option {name!r}. {hint}", name=name, known=sorted(known))


def invalid_option(name: str, value: Any, expected: str) -> InvalidOptionError:
    """The error for an option value that cannot be taken."""
    message = f"option {name}={_written(value)} is not valid: expected {expected}."
    return InvalidOptionError(message, name=name, value=_plain(value), expected=expected)


def unsupported_option(name: str, value: Any, reason: str) -> UnsupportedOptionError:
    """The error for what is designed but not built."""
    message = f"{name}={_written(value)} is not supported yet: {reason}"
    return UnsupportedOptionError(message, option=name, value=_plain(value), reason=reason)


def _plain(value: Any) -> Any:
    """What an error can carry through pickle."""
    return value if isinstance(value, (str, int, float, bytes, type(None))) else _written(value)


def _written(value: Any) -> str:
    """A value as the caller wrote it."""
    return repr(dict(value) if isinstance(value, MappingProxyType) else value)


class _Options:
    """Unknown keywords are typed errors with near names; repr shows what differs from the defaults."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every subclass is a dataclass

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        known = [one.name for one in fields(cls)]
        for name in keywords:
            if name not in known:
                raise unknown_option(name, known, cls.__name__)
        return super().__new__(cls)

    def __repr__(self) -> str:
        shown = []
        for one in fields(self):
            value = getattr(self, one.name)
            value = dict(value) if isinstance(value, Mapping) else value
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if value != default:
                shown.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return _remade, (type(self), {key: dict(v) if isinstance(v, Mapping) else v for key, v in given.items()})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _one_of(self, name: str, accepted: Sequence[Any]) -> None:
        value = getattr(self, name)
        if not any(value is one or (isinstance(value, str) and value == one) for one in accepted):
            raise invalid_option(name, value, ", ".join(map(repr, accepted)))

    def _integer(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            span = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
            raise invalid_option(name, value, span + (" or None" if optional else ""))
        self._set(name, int(value))

    def _seconds(self, name: str, optional: bool) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        try:
            number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise invalid_option(name, value, "a positive number of seconds" + (" or None" if optional else ""))
        self._set(name, number)

    def _mapping(self, name: str, values: type | tuple[type, ...] = object, what: str = "anything") -> None:
        value = getattr(self, name)
        expected = f"a dict from str to {what}"
        if not isinstance(value, Mapping):
            raise invalid_option(name, value, expected)
        for key, item in value.items():
            if not isinstance(key, str) or not isinstance(item, values):
                raise invalid_option(name, value, f"{expected}, not {key!r}: {item!r}")
        self._set(name, MappingProxyType(dict(value)))

    def _boolean(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise invalid_option(name, getattr(self, name), "True or False")

    def _not_yet(self, name: str, default: Any, reason: str) -> None:
        value = getattr(self, name)
        if value != default:
            raise unsupported_option(f"{type(self).__name__}.{name}", value, reason)


def _remade(kind: type[_Options], given: dict[str, Any]) -> Any:
    return kind(**given)


@dataclass(frozen=True, kw_only=True, repr=False)
class SessionOptions(_Options):
    """How a session is made and runs. Times are in seconds, memory in bytes.

    - `optimization`: 'none' (as written), 'basic' (bit-equal inside a unit), 'all' (within tolerance).
    - `strategy`: 'priority', each node to the first provider that claims it; 'cost', the same, but what does not earn
      its hop between workers goes to another claimant, as far as costs are known (`warmup` measures them); 'pipeline',
      workers of one kind share a model in balanced stages: k stages are full with k + 1 runs in flight; 'replicate',
      each worker of a kind has the whole model and runs go to one that is free.
    - `fallback`: nodes that a provider claimed go to the next claimant when it cannot compile them, at load or for a
      new shape, or when its worker has died twice in a row while it ran them; else ClaimBrokenError, WorkerDiedError.
    - `replay`: a partition that was running when its worker died runs once more on its successor; if False, a run never
      executes a partition twice and raises WorkerDiedError. Random nodes are never run twice.
    - `spares`: 0, or 1 to keep a second process of each worker started and loaded, which takes over at once.
    - `start_deadline`, `claim_deadline`, `load_deadline`: how long a worker may take to start, to answer what it
      claims, and to compile.
    - `deadline`, `partition_deadline`: of each run that has none of its own, see RunOptions; the latter also of those
      that `warmup` makes.
    - `max_in_flight`: 1 to 64 runs at once, but at least one per replica. Others wait in the order in which they were
      asked for, `queue_size` of them at most: then `run_async` blocks, or, with `queue='reject'`, both kinds of run
      raise QueueFullError.
    - `pins`: node name or pattern -> provider; hard. A body runs where the node that holds it runs. `prefer`: the soft
      form, not built yet.
    - `fleet`: use this Fleet's workers instead of starting some. `base_dir`: the folder of external data for a model
      given as bytes or proto. `output_memory`: bytes of results that a worker lends out before they are copied instead.
    - `config`: more as strings, for configuration files. 'optimization': as above. 'spin_us', '0' to '1000': how many
      microseconds callers and workers look for what they wait for before they block; worth it only with more idle cores
      than workers and partitions shorter than that, and given up for a while where it mostly fails.

    Raises InvalidOptionError, UnknownOptionError, UnsupportedOptionError.
    """

    optimization: str = "all"
    strategy: str = "priority"
    fallback: bool = True
    replay: bool = True
    deadline: float | None = None
    partition_deadline: float | None = None
    start_deadline: float = 30
    claim_deadline: float = 60
    load_deadline: float = 600
    max_in_flight: int = 2
    queue: str = "block"
    queue_size: int = 64
    pins: Mapping[str, str] = field(default_factory=dict)
    prefer: Mapping[str, str] = field(default_factory=dict)
    fleet: Any = None
    base_dir: str | os.PathLike[str] | None = None
    spares: int = 0
    output_memory: int = DEFAULT_OUTPUT_MEMORY
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._one_of("optimization", OPTIMIZATIONS)
        self._one_of("strategy", STRATEGIES)
        self._boolean("fallback")
        self._boolean("replay")
        for name in ("deadline", "partition_deadline"):
            self._seconds(name, optional=True)
        for name in ("start_deadline", "claim_deadline", "load_deadline"):
            self._seconds(name, optional=False)
        self._integer("max_in_flight", 1, MAX_IN_FLIGHT)
        self._one_of("queue", QUEUES)
        self._integer("queue_size", 1)
        self._mapping("pins", str, "str (node name or pattern to provider)")
        self._mapping("prefer", str, "str (node name or pattern to provider)")
        self._check_fleet()
        if self.base_dir is not None:
            if not isinstance(self.base_dir, (str, os.PathLike)) or not os.path.isdir(self.base_dir):
                raise invalid_option("base_dir", self.base_dir, "an existing folder or None")
            self._set("base_dir", os.path.abspath(os.fspath(self.base_dir)))
        self._integer("spares", 0, 1)
        self._integer("output_memory", 0)
        self._mapping("config", str, "str")
        self._apply_config()
        self._not_yet("prefer", {}, "use `pins`, which are hard.")

    @property
    def spin_us(self) -> int:
        """Microseconds for which callers and workers look for what they wait for before they block; 0 by default."""
        return int(self.config.get("spin_us", "0"))

    def _check_fleet(self) -> None:
        if self.fleet is None:
            return
        from outrider.scheduler.fleet import Fleet  # imports this module

        if not isinstance(self.fleet, Fleet):
            raise invalid_option("fleet", self.fleet, "an outrider.Fleet or None")
        if self.start_deadline != SessionOptions.start_deadline:
            expected = f"{SessionOptions.start_deadline} with a fleet, whose workers have started"
            raise invalid_option("start_deadline", self.start_deadline, expected)

    def _apply_config(self) -> None:
        for key, text in self.config.items():
            if key not in _CONFIG:
                raise unknown_option(key, list(_CONFIG), "SessionOptions.config")
            accepted = _CONFIG[key]
            if accepted is None:
                value: Any = text if text.strip() else ""
            elif text.strip().lower() in accepted:
                value = accepted[text.strip().lower()]
            else:
                raise invalid_option(f"config[{key!r}]", text, _CONFIG_EXPECTED[key])
            if key == "optimization":
                if self.optimization not in ("all", value):
                    raise invalid_option("config['optimization']", text, f"{self.optimization!r} as in optimization=")
                self._set("optimization", value)
            elif key != "spin_us" and value != _CONFIG_DEFAULT[key]:
                name = f"SessionOptions.config[{key!r}]"
                raise unsupported_option(name, text, "EPContext models are not written yet.")


@dataclass(frozen=True, kw_only=True, repr=False)
class RunOptions(_Options):
    """Options of one run.

    - `deadline`: seconds from the call (of `run_async` too, its wait in the queue counts) after which it raises
      RunTimeoutError, at once.
    - `partition_deadline`: seconds that a partition of the run may take, looked at four times in that time. A worker
      that takes longer is ended, as if it had crashed.
    - `cancel`: a CancelToken; when it is used the run raises RunCancelledError. One token may serve many runs.

    None: what the session's options say. A run that was given up stops in its workers at the next step of the `cpu`
    provider, or the next unit of another one; a worker that does not get there within a second is ended.
    """

    deadline: float | None = None
    partition_deadline: float | None = None
    cancel: CancelToken | None = None

    def __post_init__(self) -> None:
        self._seconds("deadline", optional=True)
        self._seconds("partition_deadline", optional=True)
        if self.cancel is not None and not isinstance(self.cancel, CancelToken):
            raise invalid_option("cancel", self.cancel, "a CancelToken or None")


@dataclass(frozen=True, repr=False)
class ProviderSpec(_Options):
    """One provider of a session or fleet: its kind, and how its worker process is started.

    - `kind`: 'cpu', 'null', 'chaos', 'ort', 'ort:NAME', 'package.module:Class', 'file.py:Class'; a trailing ':n' tells
      instances apart.
    - `name`: replaces the string in pins and reports. `env`: environment variables of the worker.
    - `threads`: CPU threads, None for all usable cores; with strategy 'pipeline' or 'replicate' the session's workers
      share those evenly.
    - `required`: 'start', the session fails if this provider does not start; False, it is reported and skipped.
    - `options`: passed to the provider's `setup(context)` as `context.options`; plain data: text, numbers, bytes, None,
      and lists and dicts of these.
    - `cpus`: the cores that the worker may use; `threads` is then by default their number. `nice`: its niceness, 19 the
      humblest; below that of this process needs privileges.
    - `memory_limit`: bytes of memory that the worker may have. The kernel refuses private memory beyond it, by what is
      asked for, used or not, stacks and buffers of threads included (RLIMIT_DATA). Outrider refuses shared memory
      beyond it, by what the worker has touched of any, weights in the model file included; files of external weights
      do not count. A kernel that is refused memory raises OutOfMemoryError.
    - `wrap`: a command that the worker is started by, such as `["gdb", "--args"]`, `["strace", "-f"]`, `["nice"]`:
      it gets the worker's own command line behind its arguments, and must run it with the descriptors it inherits.
    - `debug`: the worker may leave a core dump, has no deadline for its start, claims, loading and partitions, and
      writes to this process's standard output and error instead of `logging`. With `wrap` it has its standard input
      too.

    - `python`: another interpreter, or the folder of a virtual environment, that runs the worker. It needs Python 3.10
      or newer and numpy there, and nothing else; Outrider comes along. A provider that is not ours is found on that
      environment's path. PYTHONPATH and PYTHONHOME of this process are not passed on, those in `env` are.

    `required='all'` is not built yet.
    `outrider.scheduler.specs.parse_provider` checks and completes `kind`.
    """

    kind: str
    name: str | None = None
    python: str | os.PathLike[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    cpus: Sequence[int] | None = None
    nice: int | None = None
    memory_limit: int | None = None
    required: str | bool = "start"
    options: Mapping[str, Any] = field(default_factory=dict)
    debug: bool = False
    wrap: Sequence[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not self.kind.strip():
            raise invalid_option("kind", self.kind, "a provider's name such as 'cpu' or 'package.module:Class'")
        self._set("kind", self.kind.strip())
        if self.name is not None and (not isinstance(self.name, str) or not self.name.strip()):
            raise invalid_option("name", self.name, "a non-empty str or None")
        self._mapping("env", str, "str")
        self._integer("threads", 1, optional=True)
        self._one_of("required", ("start", False, "all"))
        self._mapping("options")
        for key, item in self.options.items():
            if not _travels(item):
                expected = f"plain data, which can travel to the worker, but {key!r} is {item!r}"
                raise invalid_option("options", self.options, expected)
        self._boolean("debug")
        self._set_python()
        if self.required == "all":
            raise unsupported_option("ProviderSpec.required", "all", "pin '*' to the provider instead.")
        self._set_cpus()
        self._integer("nice", -20, 19, optional=True)
        self._integer("memory_limit", 1, optional=True)
        self._check_memory_limit()
        self._set_wrap()

    def _set_python(self) -> None:
        """Made absolute, so that it names the same one when the current folder is another."""
        if self.python is None:
            return
        given = os.fspath(self.python) if isinstance(self.python, (str, os.PathLike)) else None
        if not isinstance(given, str) or not given.strip() or "\0" in given:
            expected = "the path of an interpreter or of a virtual environment's folder, or None"
            raise invalid_option("python", self.python, expected)
        self._set("python", os.path.abspath(os.path.expanduser(given)))

    def _set_cpus(self) -> None:
        if self.cpus is None:
            return
        usable = sorted(os.sched_getaffinity(0))
        expected = f"cores that this process may use, of {', '.join(map(str, usable))}, or None"
        whole = isinstance(self.cpus, Collection) and all(type(core) is int for core in self.cpus)
        if not whole or not self.cpus or not set(self.cpus) <= set(usable):
            raise invalid_option("cpus", self.cpus, expected)
        self._set("cpus", sorted(set(self.cpus)))

    def _check_memory_limit(self) -> None:
        """A worker that the limit would end before it is there is refused here."""
        if self.memory_limit is None:
            return
        threads = self.threads or len(self.cpus or ()) or usable_cores()
        least = smallest_memory(threads)
        if self.memory_limit < least:
            expected = f"at least {least} bytes for a worker of {threads} threads (set by threads=) or None"
            raise invalid_option("memory_limit", self.memory_limit, expected)

    def _set_wrap(self) -> None:
        words = [self.wrap] if isinstance(self.wrap, str) else self.wrap
        if not isinstance(words, Sequence) or not all(isinstance(word, str) and word for word in words):
            raise invalid_option("wrap", self.wrap, "a list of words: a program and its arguments")
        self._set("wrap", list(words))

    @property
    def display(self) -> str:
        """The provider's name in pins, reports and errors."""
        return self.name or self.kind

    def __str__(self) -> str:
        """The spec as an entry of `providers=`; its repr where no text can say it (options with bytes, NaN)."""
        default = ProviderSpec(self.kind)
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        changed = {name: value for name, value in given.items() if name == "kind" or value != getattr(default, name)}
        try:
            return spec_text.written(changed)
        except ValueError:
            return repr(self)


def smallest_memory(threads: int) -> int:
    """Bytes of `memory_limit` with which a worker starts and multiplies matrices, leaving some for its work.

    Measured as VmData: 79 MiB after the start with one thread, 111 after the first product, whose buffers OpenBLAS asks
    for; each further thread is 40 MiB, of which 8 are its stack. Threads beyond the machine's cores it does not start.
    """
    return (128 + 48 * (min(threads, os.cpu_count() or 1) - 1)) << 20


def _travels(item: Any) -> bool:
    """Whether msgpack carries it and gives it back."""
    if isinstance(item, Mapping):
        return all(isinstance(key, str) and _travels(value) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return all(map(_travels, item))
    if isinstance(item, int):
        return -(1 << 63) <= item < 1 << 64
    return item is None or isinstance(item, (str, float, bytes))


_NO_OPTIONS = RunOptions()


def run_options(value: Any) -> RunOptions:
    """What the caller gave as `run_options`: None or RunOptions; InvalidOptionError for anything else."""
    if value is None:
        return _NO_OPTIONS
    if isinstance(value, RunOptions):
        return value
    raise invalid_option("run_options", value, "an outrider.RunOptions or None")


def session_options(sess_options: Any, options: Any) -> tuple[SessionOptions, int | None]:
    """The options of a session from its two arguments, and the thread count that onnxruntime's options ask for.

    `sess_options` is SessionOptions of either library, `options` ours; giving both is InvalidOptionError.
    """
    if sess_options is not None and options is not None:
        raise invalid_option("options", options, "one of sess_options and options, not both")
    given = options if options is not None else sess_options
    if given is None:
        return SessionOptions(), None
    if isinstance(given, SessionOptions):
        return given, None
    if options is None and type(given).__module__.partition(".")[0] == "onnxruntime":
        return from_onnxruntime(given)
    raise invalid_option(
        "sess_options" if options is None else "options", given,
        "an outrider.SessionOptions" + (" or onnxruntime.SessionOptions" if options is None else ""),
    )  # fmt: skip


_FROM_ORT_LEVEL = {
    "ORT_DISABLE_ALL": "none", "ORT_ENABLE_BASIC": "basic", "ORT_ENABLE_EXTENDED": "all", "ORT_ENABLE_LAYOUT": "all",
    "ORT_ENABLE_ALL": "all",
}  # fmt: skip
# Attributes of onnxruntime.SessionOptions that say how it manages itself, and the two that are read.
_ORT_SKIPPED = frozenset({
    "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "log_severity_level", "log_verbosity_level",
    "logid", "profile_file_prefix", "graph_optimization_level", "intra_op_num_threads",
})  # fmt: skip
# Its config entries cannot be listed, so those that people set are asked for by name: key -> the value that holds here.
_ORT_ENTRIES = {
    "ep.context_enable": "0", "session.disable_cpu_ep_fallback": "0", "session.disable_quant_qdq": "0",
    "session.dynamic_block_base": "0", "session.inter_op.allow_spinning": "0", "session.intra_op.allow_spinning": "0",
    "session.intra_op_thread_affinities": "", "session.load_model_format": "ONNX",
    "session.model_external_initializers_file_folder_path": "", "session.set_denormal_as_zero": "0",
    "session.use_env_allocators": "0",
}  # fmt: skip


def from_onnxruntime(sess_options: Any) -> tuple[SessionOptions, int | None]:
    """Our options and the thread count (None: as many as usable) that an onnxruntime.SessionOptions asks for.

    Read are `graph_optimization_level` and `intra_op_num_threads`. Anything else that was changed and would be missed
    is UnsupportedOptionError; free-dimension overrides, added initializers and custom-operator libraries leave no trace
    in that object and cannot be seen.
    """

    def refuse(name: str, value: Any) -> NoReturn:
        raise unsupported_option(f"onnxruntime.SessionOptions.{name}", value, "use outrider.SessionOptions.")

    untouched = type(sess_options)()
    level = _FROM_ORT_LEVEL.get(sess_options.graph_optimization_level.name)
    if level is None:
        refuse("graph_optimization_level", sess_options.graph_optimization_level.name)
    for name in dir(untouched):
        if name.startswith("_") or name in _ORT_SKIPPED:
            continue
        value = getattr(sess_options, name)
        if not callable(value) and value != getattr(untouched, name):
            refuse(name, value)
    for key, held in _ORT_ENTRIES.items():
        try:
            entry = sess_options.get_session_config_entry(key)
        except RuntimeError:  # not set
            continue
        if entry != held:
            refuse(f"get_session_config_entry({key!r})", entry)
    threads = sess_options.intra_op_num_threads
    return SessionOptions(optimization=level), threads if threads > 0 else None
