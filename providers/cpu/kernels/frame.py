"""The frame every kernel is written against.

A kernel is one function per operator, written for the operator's opset-21 form (and what later opsets add):

    @kernel("Softmax", since=13, dtypes={0: FLOATS}, parse=lambda node: Axis(node.attributes.get("axis", -1)))
    def softmax(b: Bind, p: Axis) -> None:
        x = b.array(0)
        y = b.out(0, x.shape, x.dtype)
        b.step(_softmax, x, y, p.value)

It runs once per signature (dtypes and shapes of the inputs), not once per run: it looks at its inputs' shapes, asks for
the places of its outputs and records *steps*, calls with fixed arguments that do the work in every run. In the bound
mode the contents of `b.array(i)` are not there yet; only its address, dtype and shape are. What must be known to shape
the output (the `shape` input of Reshape, `axes` of Squeeze) is read with `b.const(i)`; when the signature does not
determine it, that raises `Dynamic`, and the node joins the unbound stretch: bound and executed anew in each run, when
every input is there.

So one function serves both modes, and rules keep it honest:

- never read contents except through `b.const(i)` (or inside a step);
- never `x.reshape(...)` an input at bind time: it may copy and freeze stale data. Use `b.reshaped(x, shape)`;
- a step writes only to arrays that `out`, `reuse` or `scratch` gave; inputs are read-only;
- results have exactly the shape and dtype ONNX says; outputs beyond `b.outputs` are not asked for;
- the same inputs (shapes, dtypes, addresses, contents where known) give the same steps, and steps keep nothing from run
  to run: what a node gave is used again while its inputs are the same (random operators: `deterministic=False`);
- strides of inputs must not show in the bits of results: where a routine depends on them, use `b.contiguous(x)`;
- memory order is the producer's choice: shapes are always ONNX's, `order` says how the memory lies (channels last for
  images). An output of the unit is C-contiguous whatever was asked for, so look at the strides of what you got.

Two implementations: where `b.compiled(family)` gives the library, its kernels may do the work, by `b.step(library.call(
name, tasks, ...))`; where it is None the same values come from NumPy, within the bound that the kernel documents.

`parse` is called with the node when it is claimed and again when it is bound, so what is claimed can be compiled; it
raises `Unsupported(reason)` for what the kernel does not take, and its result reaches the kernel as `p` (None without
`parse`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.providers.cpu.kernels.copying import copier
from outrider.providers.cpu.native import FAMILIES, Library
from outrider.providers.cpu.team import Team
from outrider.providers.wire.dtypes import is_raw
from outrider.providers.wire.graph import Node

P = TypeVar("P")


class Unsupported(Exception):
    """This kernel does not take this node; the message is the reason of the Decline."""


class Dynamic(Exception):
    """What shapes the output is known only in the run: the node is bound then."""


class Bind:
    """One node being bound, in its immediate mode: inputs are present, steps are executed at once.

    The program (`program.py`) has the bound mode as a subclass; kernels cannot tell them apart.

    `inputs[i]`: an array, None for an omitted optional input, or a list, dict or object array where ONNX has sequences,
    maps and strings. `outputs`: how many leading outputs exist; `wanted(i)` tells whether output i has a name.
    """

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Any],
        threads: int = 1,
        library: Library | None = None,
        team: Team | None = None,
    ) -> None:
        self.node = node
        self.inputs = list(inputs)
        self.outputs = len(node.outputs)
        self.threads = threads
        self.library = library
        self.team = team
        self.results: list[Any] = [None] * self.outputs

    # What the node says --------------------------------------------------------------------------------------------
    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, decoded; `default` where the node leaves it out."""
        return self.node.attributes.get(name, default)

    def wanted(self, i: int) -> bool:
        """True when output i exists and has a name."""
        return i < self.outputs and self.node.outputs[i].name != ""

    def compiled(self, family: str) -> Library | None:
        """The compiled kernels if this family of them is there and switched on."""
        library = self.library
        return library if library is not None and family in library.families else None

    # Inputs --------------------------------------------------------------------------------------------------------
    def has(self, i: int) -> bool:
        """True when input i is given."""
        return i < len(self.inputs) and self.inputs[i] is not None

    def array(self, i: int) -> np.ndarray:
        """Input i at its fixed address; contents are there only inside steps. May be any strided view, read-only."""
        item = self.inputs[i]
        assert isinstance(item, np.ndarray), f"input {i} of {self.node.name} is {type(item).__name__}"
        return item

    def const(self, i: int) -> np.ndarray:
        """Input i's contents, now. Raises Dynamic when only the run knows them."""
        return self.array(i)

    def is_const(self, i: int) -> bool:
        """True when `const(i)` would not raise: worth asking where prepacking weights is an optimisation only."""
        return True

    # Outputs -------------------------------------------------------------------------------------------------------
    def out(self, i: int, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        """The place of output i: writable, dense, contents undefined until a step fills it.

        `order`: the axes, outermost in memory first; C order if None, and for outputs of the unit.
        """
        place = ordered(tuple(int(d) for d in shape), order, lambda dims: np.empty(dims, np.dtype(dtype)))
        self.set(i, place)
        return place

    def reuse(self, i: int, source: int, dtype: Any = None) -> np.ndarray:
        """Like `out` with the shape and memory order of input `source`, in its memory where it dies here.

        Only for steps that may read and write the same array element by element (ufuncs).
        """
        x = self.array(source)
        return self.out(i, x.shape, x.dtype if dtype is None else dtype, order_of(x))

    def view(self, i: int, array: np.ndarray) -> None:
        """Output i is this view of an input (transpose, slice, squeeze): no step, no memory."""
        self.set(i, array)

    def fixed(self, i: int, array: Any) -> None:
        """Output i is known now and stays (Shape, Size): it is a constant for what follows."""
        self.set(i, np.asarray(array))

    def value(self, i: int, make: Callable[[], Any]) -> None:
        """Output i is whatever `make()` returns in the run (lists, object arrays, data-dependent sizes).

        Only valid when the node is unbound: raises Dynamic in the bound mode.
        """
        self.set(i, make())

    def dynamic(self) -> None:
        """Say that this node can only be bound in the run (NonZero, Unique): raises Dynamic in the bound mode."""

    def set(self, i: int, item: Any) -> None:
        """Record output i; for the modes, not for kernels."""
        if i < self.outputs:
            self.results[i] = item

    # Memory and work -----------------------------------------------------------------------------------------------
    def scratch(self, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        """Writable dense memory for this node's steps only, in C order or `order`; others use it afterwards."""
        return ordered(tuple(int(d) for d in shape), order, lambda dims: np.empty(dims, np.dtype(dtype)))

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        """`make(const(i))`, made once per unit and shared by all signatures (prepacked weights). Raises Dynamic."""
        return make(self.const(i))

    def reshaped(self, x: np.ndarray, shape: Iterable[int]) -> np.ndarray:
        """`x` with another shape: a view where memory allows, else a scratch copy that a step refreshes in each run."""
        target = tuple(int(d) for d in shape)
        view = x.view()
        try:
            view.shape = target  # unlike reshape(), never copies
        except AttributeError:
            return self.contiguous(x).reshape(target)
        return view

    def contiguous(self, x: np.ndarray, order: Sequence[int] | None = None) -> np.ndarray:
        """`x` itself when its memory is dense and in `order` (None: C), else a scratch copy refreshed in every run."""
        if (x if order is None else x.transpose(order)).flags.c_contiguous:
            return x
        copy = self.scratch(x.shape, x.dtype, order)
        self.copy(copy, x)
        return copy

    def copy(self, y: np.ndarray, x: np.ndarray) -> None:
        """Record y[...] = x, of one dtype and shapes that broadcast to y's; y shares no memory with x."""
        self.step(copier(self.library, y, x))

    def shares(self, nanoseconds: float) -> int:
        """In how many shares to do so much work of NumPy: more than one where several threads do that."""
        return 1 if self.team is None else self.team.shares(nanoseconds)

    def at_once(self, fn: Callable[[Any], Any], shares: Sequence[Any]) -> None:
        """A step that does `fn(share)` for each of the shares, as many as `shares()` said, each in a thread.

        They write to different places. The result must be the same whoever does them.
        """
        if len(shares) == 1:
            self.step(fn, *shares)
        else:
            assert self.team is not None
            self.step(self.team.run, [partial(fn, share) for share in shares])

    def step(self, fn: Callable[..., Any], *args: Any) -> None:
        """Work of every run: `fn(*args)`, result ignored. `np.add` and its like take the output as last positional."""
        fn(*args)


def ordered(
    shape: tuple[int, ...], order: Sequence[int] | None, make: Callable[[tuple[int, ...]], np.ndarray]
) -> np.ndarray:
    """An array of this shape whose memory, C-contiguous from `make(dims)`, has its axes in `order`."""
    if order is None:
        return make(shape)
    back = sorted(range(len(order)), key=lambda axis: order[axis])
    return make(tuple(shape[axis] for axis in order)).transpose(back)


def order_of(x: np.ndarray) -> tuple[int, ...] | None:
    """The axes of `x`, outermost in memory first; None for C order, and where the memory is not dense."""
    if x.flags.c_contiguous or not x.size:
        return None
    order = tuple(sorted(range(x.ndim), key=lambda axis: (-x.strides[axis], axis)))
    return order if x.transpose(order).flags.c_contiguous else None


def order_like(x: np.ndarray) -> tuple[int, ...] | None:
    """The order for a new value to lie as `x` does, which may be a view with gaps; None for C order."""
    if x.flags.c_contiguous or not x.size or min(x.strides) <= 0:
        return None
    order = tuple(sorted(range(x.ndim), key=lambda axis: (-x.strides[axis], axis)))
    return None if order == tuple(range(x.ndim)) else order


def channels_last(rank: int) -> tuple[int, ...]:
    """The order [N, *spatial, C] of a value [N, C, *spatial]."""
    return (0, *range(2, rank), 1)


@dataclass(frozen=True)
class Kernel(Generic[P]):
    """A registered kernel. `since` is the first opset it serves; the highest one not above the node's is taken.

    `compiled`: the families of compiled kernels that may do its work.
    """

    op_type: str
    domain: str
    since: int
    bind: Callable[[Bind, Any], None]
    parse: Callable[[Node], P] | None
    dtypes: Mapping[int, frozenset[str]]
    deterministic: bool
    compiled: frozenset[str] = frozenset()

    def parsed(self, node: Node) -> P | None:
        """What `parse` makes of the node; raises Unsupported with the reason."""
        for i, allowed in self.dtypes.items():
            if i < len(node.inputs) and node.inputs[i].dtype not in allowed:
                dtype = node.inputs[i].dtype
                if dtype != "undefined" or node.inputs[i].name:  # an omitted input is the parser's business
                    raise Unsupported(f"input {i} is {dtype}, the kernel takes {', '.join(sorted(allowed))}")
        for value in (*node.inputs, *node.outputs):
            if is_raw(value.dtype):
                raise Unsupported(f"{value.dtype} needs the ml_dtypes package, which is not installed in this worker")
        return self.parse(node) if self.parse is not None else None


KERNELS: dict[tuple[str, str], list[Kernel[Any]]] = {}


def kernel(
    op_type: str,
    *,
    since: int = 1,
    domain: str = "",
    parse: Callable[[Node], Any] | None = None,
    dtypes: Mapping[int, Iterable[str]] | None = None,
    deterministic: bool = True,
    compiled: str | Iterable[str] = (),
) -> Callable[[Callable[[Bind, Any], None]], Callable[[Bind, Any], None]]:
    """Register the decorated function as the kernel of an operator.

    `dtypes`: input position -> ONNX dtypes it takes (missing positions take anything). Stack the decorator to serve
    several operators with one function. `deterministic=False` keeps the node from being folded (random operators).
    `compiled`: the families whose compiled kernels it may call, for the page of operators and for tests.
    """

    def register(fn: Callable[[Bind, Any], None]) -> Callable[[Bind, Any], None]:
        allowed = {i: frozenset(names) for i, names in (dtypes or {}).items()}
        families = frozenset([compiled] if isinstance(compiled, str) else compiled)
        if not families <= set(FAMILIES):
            raise ValueError(f"no families {', '.join(sorted(families - set(FAMILIES)))} of compiled kernels")
        entry = Kernel(op_type, domain, since, fn, parse, allowed, deterministic, families)
        versions = KERNELS.setdefault((domain, op_type), [])
        if any(other.since == since for other in versions):
            raise ValueError(f"two kernels for {domain or 'ai.onnx'}::{op_type} since {since}")
        versions.append(entry)
        versions.sort(key=lambda k: k.since)
        return fn

    return register


def find(node: Node) -> Kernel[Any]:
    """The kernel for a lowered node. Raises Unsupported with what exists instead."""
    versions = KERNELS.get((node.domain, node.op_type))
    if not versions:
        near = sorted({domain or "ai.onnx" for domain, op in KERNELS if op == node.op_type})
        hint = f"; the domain {', '.join(near)} has one" if near else ""
        raise Unsupported(f"no kernel for {node.label}{hint}")
    fitting = [k for k in versions if k.since <= node.opset]
    if not fitting:
        since = ", ".join(str(k.since) for k in versions)
        raise Unsupported(f"kernel for {node.label} serves opsets from {since}, the node is at {node.opset}")
    return fitting[-1]
