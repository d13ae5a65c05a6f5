"""Programs for growing shapes: made from the ones before, bit-equal to programs built from nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import InferenceSession
from outrider.providers.contract import KernelError, Unit
from outrider.providers.cpu import lineage
from outrider.providers.cpu.arena import Region, Scratch
from outrider.providers.cpu.binding import Binding
from outrider.providers.cpu.blocks import Code
from outrider.providers.cpu.growth import FREE_ROOM
from outrider.providers.cpu.items import FIXED, Item, Root
from outrider.providers.cpu.lineage import Lineage
from outrider.providers.cpu.records import Record
from outrider.providers.cpu.walk import Walk
from outrider.shm.errors import OutOfMemoryError
from tests.decoding import EACH, HEADS, WIDTH, decoder, growing_graphs
from tests.oracle import run_ort
from tests.program_harness import graph_of, model, unit_of

BUFFER = 1 << 17  # bytes of each input's and output's memory, more than any value needs


class Poisoned(Walk):
    """Fills every piece of memory with rubbish, to its end, as soon as the plan calls it free."""

    def free_if_dead(self, root: Root) -> None:
        if root.readers == 0:
            memory = self.region.scratch.array(root.offset, np.dtype(np.uint8), (root.end - root.start,))
            self._records.append(Record("poison", None, (), {}, (partial(memory.fill, 0xFF),)))
        super().free_if_dead(root)


class Bench:
    """One unit, bound again and again by a lineage, and from nothing in memory of its own.

    Inputs and outputs lie at the start of buffers, so that their addresses stay until `move` is called.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        nodes = (*unit.constant_nodes, *unit.nodes)
        self.code, self._code = (Code(nodes, unit.inputs, unit.outputs, unit.constants) for _ in range(2))
        self._scratch = [Scratch(), Scratch()]
        self.lineage = Lineage(self.code, self.code.top, self._scratch[0], 1)
        self._buffers: dict[Any, np.ndarray] = {}
        self.binding: Binding | None = None

    def move(self, key: Any) -> None:
        """Input by name, output by position: it lies elsewhere from now on."""
        self._buffers[key] = np.zeros(BUFFER, np.uint8)

    def _array(self, key: Any, shape: Sequence[int], dtype: Any) -> np.ndarray:
        if key not in self._buffers:
            self.move(key)
        return np.ndarray(tuple(shape), dtype, self._buffers[key])

    def bind(self, feeds: Mapping[str, np.ndarray]) -> int:
        """Bind for these inputs; returns how many records were taken over."""
        before = [] if self.binding is None else self.binding.records
        self._feed(feeds)
        place = partial(self._placed, "made")
        self.binding = self.lineage.bind(self._items(feeds), place=place)
        return sum(one is other for one, other in zip(before, self.binding.records, strict=False))

    def check(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Bind, run twice, and compare every bit with a walk; returns the outputs."""
        self.bind(feeds)
        fresh = Walk(
            self._code, self._code.top, Region(self._scratch[1]), self._items(feeds), partial(self._placed, "fresh")
        ).bound()
        assert self.binding is not None
        for _ in range(2):
            got, expected = self._run(self.binding, "made"), self._run(fresh, "fresh")
            for one, other, value in zip(got, expected, self.unit.outputs, strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape), value.name
                assert one.tobytes() == other.tobytes(), value.name
            for name, value in feeds.items():
                np.testing.assert_array_equal(self._array(name, value.shape, value.dtype), value)
        return got

    def _feed(self, feeds: Mapping[str, np.ndarray]) -> None:
        for name, value in feeds.items():
            self._array(name, value.shape, value.dtype)[...] = value

    def _items(self, feeds: Mapping[str, np.ndarray]) -> dict[int, Item]:
        numbers = dict(zip((value.name for value in self.unit.inputs), self.code.top.formals, strict=True))
        return {n: Item(FIXED, self._array(name, feeds[name].shape, feeds[name].dtype)) for name, n in numbers.items()}

    def _placed(self, who: str, i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._array((who, i), shape, np.dtype(dtype))

    def _run(self, binding: Binding, who: str) -> list[np.ndarray]:
        for place in binding.placed.values():
            place[...] = np.ones((), place.dtype)
        env: dict[int, Any] = {}
        binding.run(env)
        results = zip(binding.block.results, binding.results, strict=True)
        found = [
            binding.placed.get(i, env[number] if item.state == "late" else item.value)
            for i, (number, item) in enumerate(results)
        ]
        return [np.array(value) for value in found]


def bench(text: str) -> Any:
    return graph_of(model(text))


def ramp(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) % 7 - 3


# --- the decoder ------------------------------------------------------------------------------------------------------


def test_130_tokens_through_a_session_are_bit_equal_to_rebuilding() -> None:
    proto = decoder()
    rng = np.random.default_rng(1)
    tokens = rng.standard_normal((130, 1, 1, WIDTH)).astype(np.float32)
    feeds = {name: rng.standard_normal((1, HEADS, 3, EACH)).astype(np.float32) for name in "kv"}
    with (
        InferenceSession(proto, providers=["cpu"]) as session,
        InferenceSession(proto, providers=[("cpu", {"reshape": False})]) as rebuilt,
    ):
        for step, token in enumerate(tokens):
            feeds["x"] = token
            got, expected = session.run(None, feeds), rebuilt.run(None, feeds)
            for one, other in zip(got, expected, strict=True):
                assert one.tobytes() == other.tobytes(), step
            if step % 40 == 0:
                for one, other in zip(got, run_ort(proto.SerializeToString(), feeds).values(), strict=True):
                    np.testing.assert_allclose(one, other, 1e-4, 1e-5)
            feeds["k"], feeds["v"] = got[1], got[2]
        counts = session.stats()["providers"]["cpu"]["reshaped"]
        assert sum(counts.values()) == 130
        assert counts["replayed"] >= 126
        assert set(rebuilt.stats()["providers"]["cpu"]["reshaped"].values()) == {0}


def test_only_ops_that_see_the_past_are_bound_again() -> None:
    with graph_of(decoder()) as graph:
        b = Bench(unit_of(graph))
        feeds = {"x": ramp(1, 1, WIDTH)}
        taken = []
        for past in range(3, 40):
            feeds |= {name: ramp(1, HEADS, past, EACH) for name in "kv"}
            taken.append(b.bind(feeds))
            b.check(feeds)
        assert b.binding is not None
        names = [record.op.origin.op_type for record in b.binding.records if record.op is not None]
        assert len(names) == len(graph.nodes)
        attention = 14  # two Concats, Transpose, 2 MatMuls, Mul, Shape, Gather, Range, Cast, Add, Softmax, ...
        assert min(taken[2:]) >= len(names) - attention - 1  # y is placed, so always bound again


def test_a_moved_input_prevents_the_use_of_what_reads_it() -> None:
    with graph_of(decoder()) as graph:
        b = Bench(unit_of(graph))
        feeds = {"x": ramp(1, 1, WIDTH)}
        for past in range(3, 9):
            feeds |= {name: ramp(1, HEADS, past, EACH) for name in "kv"}
            usual = b.bind(feeds)
        b.move("x")
        feeds |= {name: ramp(1, HEADS, 9, EACH) for name in "kv"}
        assert b.bind(feeds) < usual
        feeds["x"] = -feeds["x"]
        b.check(feeds)
        assert b.lineage.counts["replayed"] >= 5
        feeds |= {name: ramp(1, HEADS, 10, EACH) for name in "kv"}
        assert b.bind(feeds) == usual


# --- what grows, and what does not ------------------------------------------------------------------------------------

TWO = """agraph (float[B, S] x, float[B, 2] m) => (float[B, S] x2, float[B, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
    a = Neg(x)  x2 = Mul(a, a)  c = Exp(m)  d = MatMul(c, w)  y = Relu(d) }"""


def test_prime_rebuild_replay_and_a_batch_that_changes() -> None:
    with bench(TWO) as graph:
        b = Bench(unit_of(graph))
        seen = []
        for batch, length in [(1, 4), (1, 5), (1, 6), (1, 7), (2, 7), (2, 6)]:
            before = dict(b.lineage.counts)
            b.check({"x": ramp(batch, length), "m": ramp(batch, 2)})
            seen.append(next(k for k, v in b.lineage.counts.items() if v != before.get(k, 0)))
        assert seen == ["primed", "rebuilt", "replayed", "replayed", "rebuilt", "replayed"]


def test_growth_beyond_the_room_rebuilds_with_more() -> None:
    with bench("agraph (float[N] x) => (float[N] y) { a = Exp(x) b = Neg(a) y = Add(a, b) }") as graph:
        b = Bench(unit_of(graph))
        for n in range(1, 400):
            b.check({"x": ramp(n)})
        assert b.lineage.counts == {"primed": 1, "rebuilt": 3, "replayed": 395}


def test_room_is_bounded_and_gone_when_the_program_is_primed() -> None:
    with bench("agraph (float[N] x) => (float[N] y) { a = Exp(x) b = Neg(a) y = Add(a, b) }") as graph:
        b = Bench(unit_of(graph))
        marks = []
        for n in (3, 3000, 3001, 2):
            b.bind({"x": ramp(n)})
            assert b.binding is not None
            marks.append(b.binding.region.high)
        assert b.lineage.counts == {"primed": 1, "rebuilt": 1, "replayed": 2}
        exact = 2 * 12032
        assert exact < marks[1] <= exact + 2 * FREE_ROOM
        b.bind({"x": ramp(2)[:, None]})
        assert b.lineage.counts["primed"] == 2
        assert b.binding.region.high == 128


def test_without_memory_for_room_a_program_does_without_room() -> None:
    with bench("agraph (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }") as graph:
        b = Bench(unit_of(graph))
        b.check({"x": ramp(3)})
        real = Region.allocate

        def scarce(region: Region, value: str, shape: Any, dtype: Any, room: int = 0) -> Any:
            if room:
                raise OutOfMemoryError("none left", value=value, asked=room, available=0)
            return real(region, value, shape, dtype)

        with mock.patch.object(Region, "allocate", scarce):
            b.check({"x": ramp(40)})
        assert b.lineage.counts == {"primed": 2}


# --- what changes with the extents ------------------------------------------------------------------------------------

CHANGING: dict[str, tuple[str, list[int], dict[str, int]]] = {
    "a branch that flips": (
        """agraph (float[N] x) => (float[N] y) <int64[1] four = {4}> {
            n = Shape(x)  c = Less(n, four)
            y = If (c) <then_branch = t () => (float[N] a) { a = Neg(x) },
                        else_branch = e () => (float[N] b) { d = Exp(x)  b = Add(d, x) }> }""",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 2, "replayed": 3},
    ),
    "a known value that changes": (
        """agraph (float[N] x) => (float[1, N] y, int64[2] s) <int64[1] one = {1}> {
            n = Shape(x)  s = Concat<axis = 0>(one, n)  a = Reshape(x, s)  y = Neg(a) }""",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "an input that passes through": (
        "agraph (float[N] x) => (float[N] y, float[N] z) { y = Identity(x)  z = Relu(y) }",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "an output that is read inside": (
        "agraph (float[N] x) => (float[N] y, float[N] z) { y = Neg(x)  a = Exp(y)  z = Mul(a, y) }",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "what only the run knows": (
        "agraph (float[N] x) => (int64[1, K] y, float[N] z) { a = Relu(x)  y = NonZero(a)  b = Exp(a)  z = Neg(b) }",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "a loop over a capture": (
        """agraph (float[N] x) => (float[N] y) <int64 n = {3}> {
            a = Neg(x)
            y = Loop (n, , x) <body = b (int64 i, bool c, float[N] v) => (bool d, float[N] u) {
                d = Identity(c)  e = Exp(a)  f = Mul(e, a)  u = Add(v, f) }> }""",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "a view that was a copy": (
        """agraph (float[N, 3] x) => (float[K] y) <int64[1] flat = {-1}> {
            a = Exp(x)  b = Transpose(a)  c = Reshape(b, flat)  d = Exp(c)  y = Add(c, d) }""",
        [2, 3, 4, 1, 2],
        {"primed": 1, "rebuilt": 3, "replayed": 1},
    ),
    "a known value that grows large": (
        "agraph (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = EyeLike(x)  z = Neg(y) }",
        [2, 3, 4, 6000],
        {"primed": 1, "rebuilt": 2, "replayed": 1},
    ),
    "a random operator": (
        """agraph (float[N] x, float[2] m) => (float[N] y, float[2] z) {
            r = RandomNormalLike<seed = 1.0>(m)  z = Add(r, m)  y = Neg(x) }""",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "a random operator in a body": (
        """agraph (float[N] x, float[2] m) => (float[N] y, float[2] z) <int64 n = {3}> {
            y = Neg(x)
            z = Loop (n, , m) <body = b (int64 i, bool c, float[2] v) => (bool d, float[2] u) {
                d = Identity(c)  r = RandomNormalLike<seed = 1.0>(v)  u = Add(v, r) }> }""",
        [1, 2, 3, 4, 5, 6],
        {"primed": 1, "rebuilt": 1, "replayed": 4},
    ),
    "a body behind memory that grows": (
        """agraph (float[N] x, float[2] m) => (float[N] y) <int64 n = {3}, float[1] one = {1}> {
            a = Exp(x)
            z = Loop (n, , one) <body = b (int64 i, bool c, float[1] v) => (bool d, float[1] u) {
                d = Identity(c)  e = Exp(v)  u = Neg(e) }>
            y = Add(a, z) }""",
        [1, 2, 3, 300, 301],
        {"primed": 1, "rebuilt": 2, "replayed": 2},
    ),
    "a body that reads around it, behind memory that grows": (
        """agraph (float[N] x, float[2] m) => (float[N] y) <int64 n = {3}, float[1] one = {1}> {
            a = Exp(x)  k = ReduceSum(m)
            z = Loop (n, , one) <body = b (int64 i, bool c, float[1] v) => (bool d, float[1] u) {
                d = Identity(c)  e = Exp(v)  u = Sub(e, k) }>
            y = Add(a, z) }""",
        [1, 2, 3, 300, 301],
        {"primed": 1, "rebuilt": 2, "replayed": 2},
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_with_the_extents(name: str) -> None:
    text, sizes, counts = CHANGING[name]
    with bench(text) as graph:
        b = Bench(unit_of(graph))
        for n in sizes:
            x = ramp(n, 3) if "float[N, 3] x" in text else ramp(n)
            b.check({"x": x} | ({"m": ramp(2)} if " m)" in text else {}))
        assert b.lineage.counts == counts


def test_a_body_is_reshaped_with_the_program_around_it() -> None:
    """As in decoders whose branches, with and without a past, are merged: a branch is a program of its own."""
    text = """agraph (bool c, float[4, P] k, float[4, 4] m) => (float[4, Q] y) {
        y = If (c) <
            then_branch = t () => (float[4, Q] a) { n = MatMul(m, m)  o = Exp(n)  q = MatMul(o, k)  a = Neg(q) },
            else_branch = e () => (float[4, Q] b) { b = Relu(k) }> }"""
    with bench(text) as graph:
        b = Bench(unit_of(graph))
        kept = []
        b.check({"c": np.array(True), "k": ramp(4, 1), "m": ramp(4, 4)})
        for past in range(2, 9):  # it changes: the If is in the stretch from now on
            b.check({"c": np.array(True), "k": ramp(4, past), "m": ramp(4, 4)})
            assert b.binding is not None
            body = b.binding.late[0].bodies["then_branch"]  # type: ignore[attr-defined]
            kept.append(body._bind(()).binding.records)
        assert body.lineage.counts == {"primed": 1, "rebuilt": 1, "replayed": 5}
        assert [one is other for one, other in zip(kept[-1], kept[-2], strict=True)] == [True, True, False, False]


def test_an_error_while_reshaping_names_the_node_and_changes_nothing() -> None:
    with bench("agraph (float[N] x, float[M] z) => (float[N] y) { a = Neg(x) [add] y = Add(a, z) }") as graph:
        b = Bench(unit_of(graph))
        for n in (2, 3, 4):
            b.check({"x": ramp(n), "z": ramp(n)})
        with pytest.raises(KernelError) as caught:
            b.bind({"x": ramp(5), "z": ramp(6)})
        assert caught.value.node == "add"
        b.check({"x": ramp(5), "z": ramp(5)})
        assert b.lineage.counts == {"primed": 1, "rebuilt": 1, "replayed": 2}


def test_a_program_that_never_fits_is_left_alone() -> None:
    """The branch flips each time: after a few attempts nothing is compared any more."""
    text = CHANGING["a branch that flips"][0]
    with bench(text) as graph, mock.patch.object(lineage, "reshape", wraps=lineage.reshape) as reshape:
        b = Bench(unit_of(graph))
        for n in (1, 2, *(4, 3) * 10):
            b.check({"x": ramp(n)})
        assert reshape.call_count == lineage.MISFITS
        assert b.lineage.counts == {"primed": 1, "rebuilt": 21}


# --- property ---------------------------------------------------------------------------------------------------------

EXTENTS = st.tuples(st.integers(0, 5), st.integers(1, 5))
STEPS = st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 1), st.sampled_from(("", "", "x", "w", "y"))), max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(growing_graphs(), EXTENTS, STEPS, st.integers(0, 2**31))
def test_reshaped_is_bit_equal_to_built_from_nothing(
    proto: onnx.ModelProto, extents: tuple[int, int], steps: list[tuple[int, int, str]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n, m = extents
    with graph_of(proto) as graph, mock.patch.object(lineage, "Walk", Poisoned):
        b = Bench(unit_of(graph))
        for dn, dm, moved in [(0, 0, ""), *steps]:
            n, m = max(n + dn, 0), m + dm
            if moved:
                b.move(("made", 0) if moved == "y" else moved)
            shapes = {"x": (n, m), "z": (n, m), "w": (m, n)}
            b.check({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
