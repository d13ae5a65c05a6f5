"""The message catalogue of the control plane: each message declared once, checked when packed and when unpacked.

    coordinator -> worker    Claim  Load  Resume  Unload  Promote  StatsRequest  TraceRequest  Stop
    worker -> coordinator    Hello  StartFailed  Claims  Loaded  Resumed  Unloaded  Failed  Stats  TraceData

A message travels as one msgpack map: its fields plus `type` and `protocol`. A worker runs third-party native code and
is not trusted in form: an unknown type, a missing or surplus field or a wrong type is a `WireError` on either side.
Errors travel as plain data (`error_to_plain`) and become the same class with the same fields on the other side. Tensor
bytes never travel here; `TensorRef`s, descriptor ids and board indices do.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider.providers.wire.codec import msgpack
from outrider.providers.wire.errors import ProtocolMismatchError, WireError

START = 0
"""The edge of board 0 whose word starts a run. Its layout number is one of the following two."""
UNBOUND = 1
"""The run's results go where the worker likes."""
BOUND = 2
"""Some results of the run have a target: the words of the `target` edges tell which, and where."""
CANCEL = 1
"""The edge of board 0 whose word names a run that nobody waits for any more: workers do no more for it than they must.
Its layout number is 1 and means nothing."""
FIRST_INPUT = 2
"""The first edge of board 0 that carries a value."""
USER_MEMORY = 0xFFFF
"""The number under which layouts of board 0 name the memory of the user's process."""

PROTOCOL = 2
MAX_BYTES = 1 << 30  # a body larger than this is refused before it is parsed


@dataclass(frozen=True)
class Hello:
    """The provider is set up and waits for work. `declares`: all that it says of itself (`traits.Traits.plain`)."""

    pid: int
    incarnation: int
    merge: bool
    wants_model: bool
    declares: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class StartFailed:
    """The provider could not be imported, made or set up; the process exits next."""

    incarnation: int
    reason: str
    traceback: str


@dataclass(frozen=True)
class Claim:
    """Ask for claims on a graph (`pack_graph` form). `weights`: weight segment -> id of its descriptor.

    `model`: the ONNX form of the whole model (`pack_model`), for a provider that wants one.
    """

    session: int
    round: int
    graph: dict[str, Any]
    weights: dict[int, int]
    model: dict[str, Any] | None


@dataclass(frozen=True)
class Claims:
    """The answer.

    `claims`: [{nodes: [index], reference: bool, cost: seconds or None}]; `declines`: [{node: index, reason}].
    """

    session: int
    round: int
    claims: list[dict[str, Any]]
    declines: list[dict[str, Any]]
    error: dict[str, Any] | None


@dataclass(frozen=True)
class Load:
    """Compile these partitions and take part in runs, unless they are `held` until `Resume` comes.

    `boards`: [{board, segment (descriptor id), edges}]: the writers this worker reads or is; `board` 0 is the
    coordinator, whose edge START starts each run and CANCEL ends one early. `own` is this worker's board. `memories`:
    [{memory, segment (descriptor id)}]: what layouts of board 0 may name beside its own segment: USER_MEMORY, and as
    memory n the output pool of board n. `pool`: descriptor id of this worker's output pool, whose release words start
    at word `pool_words` of the coordinator's segment. `bells`: descriptor ids of the workers' doorbells by board;
    `slot_bells`: those of the run slots. `spin_us`: how many microseconds it looks for more work before it blocks.
    `model`: as in `Claim`. `partitions`: see `PartitionPlan`.
    """

    session: int
    generation: int
    held: bool
    slots: int
    own: int
    optimization: str
    weights: dict[int, int]
    model: dict[str, Any] | None
    boards: list[dict[str, int]]
    memories: list[dict[str, int]]
    bells: dict[int, int]
    slot_bells: list[int]
    spin_us: int
    pool: int
    pool_words: int
    pool_blocks: int
    pool_bytes: int
    partitions: list[dict[str, Any]]


@dataclass(frozen=True)
class PartitionPlan:
    """One partition inside `Load`.

    `inputs`: [{name, board, edge}]; `outputs`: [{name, edge, buffer, result, target, published, inside}] on the
    worker's own board: edges of one `buffer` are never needed at the same time; `result` for those that go to the
    caller only, `target` the edge of board 0 that says where the caller wants such a one (-1 for others), `published`
    for those that leave the partition, `inside` for those that another unit of it reads; `units`: [{key, graph,
    constants}] with the number of leading constant nodes, and None for the graph of a key that the worker has compiled
    for this session; `rings`: boards of the workers to wake; `done`: the edge whose word says
    that the partition has run; `last`: no partition waits for it, so it wakes the caller; `after`: the last partition
    of the same worker that this one waits for, directly or through others, -1 for none.
    """

    partition: int
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    units: list[dict[str, Any]]
    rings: list[int]
    done: int
    last: bool
    after: int


@dataclass(frozen=True)
class Loaded:
    """`refused`: [{partition, unit, nodes, reason, traceback}]; empty when everything compiled.

    `nodes`: the names of those nodes of the unit that the provider cannot serve; [] for the whole unit.
    """

    session: int
    generation: int
    refused: list[dict[str, Any]]


@dataclass(frozen=True)
class Resume:
    """Take over the board of the worker's dead predecessor and serve what it owes to the runs in flight.

    `first`, `end`: the bytes of the segment for new values; all others behind the board may be given up but for `keep`,
    [[offset, bytes]]. `taken`: blocks of the output pool, see `Leases.taken`.
    """

    session: int
    generation: int
    first: int
    end: int
    keep: list[list[int]]
    taken: list[list[int]]


@dataclass(frozen=True)
class Resumed:
    """It has taken over; `error` (`error_to_plain`) says why not."""

    session: int
    generation: int
    error: dict[str, Any] | None


@dataclass(frozen=True)
class Promote:
    """A spare becomes the worker: it waits on the worker's doorbell from now on."""


@dataclass(frozen=True)
class Unload:
    """Forget the session: programs, boards, mappings."""

    session: int


@dataclass(frozen=True)
class Unloaded:
    """The session is forgotten."""

    session: int


@dataclass(frozen=True)
class Failed:
    """A partition did not run; its outputs were published void. `error` as `error_to_plain`."""

    session: int
    generation: int
    run: int
    slot: int
    partition: int
    error: dict[str, Any]


@dataclass(frozen=True)
class StatsRequest:
    """Ask for counters. `request` comes back in the answer."""

    request: int


@dataclass(frozen=True)
class Stats:
    """The counters: {provider, sessions}."""

    request: int
    data: dict[str, Any]


@dataclass(frozen=True)
class TraceRequest:
    """`on`: trace this session from now on, from nothing; else stop, and send the next part of what was recorded."""

    request: int
    session: int
    on: bool


@dataclass(frozen=True)
class TraceData:
    """The answer: none of the spans when tracing begins, else about 1 MB of them, oldest first (`spans.plain_span`).

    `left`: how many are still there, to be asked for. `threads`: those that recorded, by number. `dropped`: spans for
    which there was no room. `ended`: the session was not traced here.
    """

    request: int
    spans: list[Any]
    left: int
    threads: dict[int, str]
    dropped: int
    ended: bool


@dataclass(frozen=True)
class Stop:
    """Close the provider and exit."""


Message = (
    Hello
    | StartFailed
    | Claim
    | Claims
    | Load
    | Loaded
    | Resume
    | Resumed
    | Promote
    | Unload
    | Unloaded
    | Failed
    | StatsRequest
    | Stats
    | TraceRequest
    | TraceData
    | Stop
)
CATALOGUE: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}
_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = _HINTS.get(kind)
    if hints is None:
        hints = _HINTS[kind] = typing.get_type_hints(kind)
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """True when a plain value, with all that it contains, has the declared type; a bool is no int, an int no float."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin is typing.Union or origin is types.UnionType:
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is list:
        (item,) = typing.get_args(hint)
        return type(value) is list and _all_fit(value, item)
    if origin is dict:
        key, item = typing.get_args(hint)
        return type(value) is dict and _all_fit(value, key) and _all_fit(value.values(), item)
    if hint is type(None):
        return value is None
    return type(value) is hint


def _all_fit(values: Iterable[Any], hint: Any) -> bool:
    if hint is Any:
        return True
    if type(hint) is type:  # int, str, bool, by far the most frequent
        return set(map(type, values)) <= {hint}
    return all(_fits(value, hint) for value in values)


def _checked(kind: type[Any], body: dict[str, Any]) -> Any:
    hints = _hints(kind)
    for name, hint in hints.items():
        if name not in body:
            raise WireError(f"{kind.__name__} lacks the field {name!r}", where=kind.__name__, reason="missing field")
        if not _fits(body[name], hint):
            raise WireError(
                f"{kind.__name__}.{name} should be {hint}, got {type(body[name]).__name__}",
                where=f"{kind.__name__}.{name}",
                reason="wrong type",
            )
    surplus = body.keys() - hints.keys()
    if surplus:
        names = ", ".join(sorted(map(repr, surplus)))
        raise WireError(f"{kind.__name__} has no field {names}", where=kind.__name__, reason="surplus field")
    return kind(**body)


def plan_of(body: Any) -> PartitionPlan:
    """A checked PartitionPlan from its plain form inside `Load`."""
    if type(body) is not dict:
        raise WireError("a partition must be a map", where="Load.partitions", reason="wrong type")
    plan: PartitionPlan = _checked(PartitionPlan, body)
    return plan


def pack(message: Message) -> bytes:
    """Body of a message. Raises WireError when a field does not have its declared type."""
    kind = type(message)
    body = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    _checked(kind, body)
    body["type"] = kind.__name__
    body["protocol"] = PROTOCOL
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def unpack(body: bytes) -> Message:
    """The message in `body`. Raises WireError when it is malformed, ProtocolMismatchError for another protocol."""
    if len(body) > MAX_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over {MAX_BYTES}", where="message", reason="too large")
    try:
        plain = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:  # TypeError: a list as a map's key
        raise WireError(f"a message is no msgpack: {error}", where="message", reason="not msgpack") from error
    if type(plain) is not dict:
        raise WireError("a message must be a map", where="message", reason="wrong type")
    theirs = plain.pop("protocol", None)
    if theirs != PROTOCOL:
        raise ProtocolMismatchError(
            f"the other side speaks protocol {theirs!r}, this side {PROTOCOL}: both must be the same Outrider",
            ours=PROTOCOL,
            theirs=theirs,
        )
    name = plain.pop("type", None)
    kind = CATALOGUE.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"no message is called {name!r}", where="message", reason="unknown type")
    message: Message = _checked(kind, plain)
    return message
