"""Options of sessions and runs: names, defaults, and checks that happen before any process starts.

SessionOptions and RunOptions accept assignment, as onnxruntime's do, and check it as they check their arguments; a
session takes a copy, so that what was checked is what counts. `dataclasses.replace` makes a changed copy. Whatever the
design knows but this build does not have yet raises UnsupportedOptionError when set to anything but its default:
nothing is accepted and ignored. `dropin_options.py` has the part that goes by onnxruntime's names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.scheduler import spec_text
from outrider.scheduler.cancelling import CancelToken
from outrider.scheduler.checked import Options, invalid_option, unknown_option, unsupported_option
from outrider.scheduler.cores import usable_cores
from outrider.scheduler.dropin_options import (
    DISABLE_CPU_FALLBACK,
    ENTRIES,
    EXTERNAL_FOLDER,
    RunAttributes,
    SessionAttributes,
    check_entry,
    is_foreign_entry,
    run_attributes,
    session_attributes,
)
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


@dataclass(kw_only=True, repr=False)
class SessionOptions(SessionAttributes):
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
      than workers and partitions shorter than that, and given up for a while where it mostly fails. Session entries of
      onnxruntime are listed in `dropin_options.ENTRIES`.

    The other attributes are onnxruntime's, see `docs/differences.md`. Of these

    - `intra_op_num_threads`: the threads of each provider that leaves them open; 0 for as many as there are cores.
    - `enable_profiling`: a trace is on from the start; `end_profiling`, or the end of the session, writes it to a file
      in the current folder, whose name begins with `profile_file_prefix`.
    - `free_dimensions`: name of a dimension -> its size; the model's inputs have that size then.

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

    def _check(self) -> None:
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
        self._check_attributes()
        self._not_yet("prefer", {}, "use `pins`, which are hard.")

    @property
    def spin_us(self) -> int:
        """Microseconds for which callers and workers look for what they wait for before they block; 0 by default."""
        return int(self.config.get("spin_us", "0"))

    @property
    def without_cpu(self) -> bool:
        """Whether nodes must not fall back to a CPU provider ('session.disable_cpu_ep_fallback')."""
        return self.config.get(DISABLE_CPU_FALLBACK) == "1"

    def _check_fleet(self) -> None:
        if self.fleet is None:
            return
        from outrider.scheduler.fleet import Fleet  # imports this module

        if not isinstance(self.fleet, Fleet):
            raise invalid_option("fleet", self.fleet, "an outrider.Fleet or None")
        if self.start_deadline != SessionOptions.start_deadline:
            expected = f"{SessionOptions.start_deadline} with a fleet, whose workers have started"
            raise invalid_option("start_deadline", self.start_deadline, expected)
        if self.intra_op_num_threads:
            expected = "0 with a fleet, whose workers have their threads; set ProviderSpec(threads=...) there"
            raise invalid_option("intra_op_num_threads", self.intra_op_num_threads, expected)

    def _apply_config(self) -> None:
        for key, text in self.config.items():
            if key in ENTRIES:
                self._apply_entry(key, text)
                continue
            if key not in _CONFIG:
                if is_foreign_entry(key):
                    name = f"SessionOptions.config[{key!r}]"
                    reason = (
                        f"docs/differences.md lists which are read; an `ort` provider takes the option 'session.{key}'."
                    )
                    raise unsupported_option(name, text, reason)
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

    def _apply_entry(self, key: str, text: str) -> None:
        check_entry(key, text)
        if key == EXTERNAL_FOLDER and text:
            if not os.path.isdir(text):
                raise invalid_option(f"config[{key!r}]", text, "an existing folder")
            if self.base_dir not in (None, os.path.abspath(text)):
                raise invalid_option(f"config[{key!r}]", text, f"{self.base_dir!r} as in base_dir=")
            self._set("base_dir", os.path.abspath(text))


@dataclass(kw_only=True, repr=False)
class RunOptions(RunAttributes):
    """Options of one run.

    - `deadline`: seconds from the call (of `run_async` too, its wait in the queue counts) after which it raises
      RunTimeoutError, at once.
    - `partition_deadline`: seconds that a partition of the run may take, looked at four times in that time. A worker
      that takes longer is ended, as if it had crashed.
    - `cancel`: a CancelToken; when it is used the run raises RunCancelledError. One token may serve many runs.
    - `terminate`: set it to True, from any thread, and runs under way with these options raise RunCancelledError, and
      so do later ones until it is False again.

    None: what the session's options say. A run that was given up stops in its workers at the next step of the `cpu`
    provider, or the next unit of another one; a worker that does not get there within a second is ended. The other
    attributes are onnxruntime's, see `docs/differences.md`; they change no result.
    """

    deadline: float | None = None
    partition_deadline: float | None = None
    cancel: CancelToken | None = None

    def _check(self) -> None:
        self._seconds("deadline", optional=True)
        self._seconds("partition_deadline", optional=True)
        if self.cancel is not None and not isinstance(self.cancel, CancelToken):
            raise invalid_option("cancel", self.cancel, "a CancelToken or None")
        self._check_attributes()
        token = self.__dict__.get("_terminator")
        if token is None or token.cancelled and not self.terminate:
            self._set("_terminator", CancelToken())
        if self.terminate:
            self.terminator.cancel()

    @property
    def terminator(self) -> CancelToken:
        """What `terminate` uses."""
        token: CancelToken = self.__dict__["_terminator"]
        return token


@dataclass(frozen=True, repr=False)
class ProviderSpec(Options):
    """One provider of a session or fleet: its kind, and how its worker process is started.

    - `kind`: 'cpu', 'null', 'chaos', 'ort', 'ort:NAME', 'NAMEExecutionProvider', 'package.module:Class',
      'file.py:Class'; a trailing ':n' tells instances apart.
    - `name`: replaces the string in pins and reports. `env`: environment variables of the worker.
    - `threads`: CPU threads, None for all usable cores; with strategy 'pipeline' or 'replicate' the session's workers
      share those evenly.
    - `required`: 'start', the session fails if this provider does not start; False, it is reported and skipped; 'all',
      as 'start', and every node must be this provider's, now and after any death (constants that are folded do not
      count): else HeterogeneousPlacementRequiredError, before any worker compiles.
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
      or newer and numpy there (`cpu` a NumPy 2), and nothing else; Outrider comes along. A provider that is not ours
      is found on that environment's path. PYTHONPATH and PYTHONHOME of this process are not passed on, those in `env`
      are.

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


def run_options(value: Any) -> RunOptions | None:
    """What the caller gave as `run_options`, in our form; InvalidOptionError for what is none of either library."""
    if value is None or isinstance(value, RunOptions):
        return value
    if _is_foreign(value, "RunOptions"):
        return RunOptions(**run_attributes(value))
    raise invalid_option("run_options", value, "an outrider.RunOptions, an onnxruntime.RunOptions or None")


def session_options(sess_options: Any, options: Any) -> SessionOptions:
    """The options of a session from its two arguments, as a copy that does not change any more.

    `sess_options` is SessionOptions of either library, `options` ours; giving both is InvalidOptionError.
    """
    if sess_options is not None and options is not None:
        raise invalid_option("options", options, "one of sess_options and options, not both")
    given = options if options is not None else sess_options
    if given is None:
        return SessionOptions().fixed()
    if isinstance(given, SessionOptions):
        return given.fixed()
    if options is None and _is_foreign(given, "SessionOptions"):
        return SessionOptions(**session_attributes(given)).fixed()
    raise invalid_option(
        "sess_options" if options is None else "options", given,
        "an outrider.SessionOptions" + (" or onnxruntime.SessionOptions" if options is None else ""),
    )  # fmt: skip


def _is_foreign(value: Any, name: str) -> bool:
    """Whether it is a `name` of onnxruntime, which need not be imported for that."""
    return type(value).__name__ == name and type(value).__module__.partition(".")[0] == "onnxruntime"
