"""Memory of the cpu provider: planned against naive, refused before it is touched, and prepacked weights."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import outrider
from outrider.providers.cpu import CpuProvider
from outrider.providers.cpu.modes import VARIANTS, packed_once
from outrider.providers.cpu.packing import Packing
from outrider.providers.wire.graph import Node, Value
from outrider.scheduler.options import smallest_memory
from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError
from outrider.shm.weights import WeightMap, WeightWriter
from tests.leaks import worker_pids
from tests.program_harness import Bound, compiled, graph_of, model, ready, unit_of

MIB = 1 << 20


# Planned and naive ----------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_chain_takes_two_buffers_and_not_one_per_value() -> None:
    proto = model(
        "agraph (float[N, 64] x) => (float[N, 64] y) "
        "{ a = Transpose<perm=[0, 1]>(x) b = Softmax(a) c = Softmax(b) d = Softmax(c) y = Softmax(d) }"
    )
    with compiled(proto) as (provider, program, unit):
        assert [one["planned"] for one in provider.stats()["memory"]] == [0]
        Bound(program, unit, {"x": np.ones((1000, 64), np.float32)}).run()
        [told] = provider.stats()["memory"]
    value = 1000 * 64 * 4
    assert told["naive"] >= 3 * value
    assert 2 * value <= told["peak"] <= told["planned"] < told["naive"]


def test_what_does_not_fit_is_refused_with_the_largest_values_and_nothing_is_touched() -> None:
    nodes = [
        helper.make_node("Add", ["x", "w"], ["wide"], name="n0"),
        helper.make_node("Softmax", ["wide"], ["soft"], name="n1"),
        helper.make_node("ReduceSum", ["soft", "axes"], ["y"], name="n2"),
    ]
    constants = {"w": np.ones(1000, np.float32), "axes": np.array([1])}
    proto = _model(nodes, ["N", 1], ["N", 1], constants)
    limit = smallest_memory(1)
    provider = outrider.ProviderSpec("cpu", threads=1, memory_limit=limit)
    with outrider.InferenceSession(proto, providers=[provider]) as session:
        [pid] = worker_pids()
        session.run(None, {"x": np.ones((4, 1), np.float32)})
        before = _resident(pid, "RssShmem")
        with pytest.raises(outrider.errors.OutOfMemoryError) as caught:
            session.run(None, {"x": np.ones((40_000, 1), np.float32)})  # 160 MB per value
        error = caught.value
        largest = dict(map(tuple, error.largest))
        assert {"wide", "soft"} & set(largest) and max(largest.values()) == 160_000_000
        assert "wide 160000000" in str(error) or "soft 160000000" in str(error)
        assert error.available < limit < error.asked
        assert _resident(pid, "RssShmem") - before < 4 * MIB
        assert session.run(None, {"x": np.ones((4, 1), np.float32)})[0].tolist() == [[pytest.approx(1)]] * 4


# Packed weights -------------------------------------------------------------------------------------------------------
@contextmanager
def weights(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Read-only copies as a worker has them."""
    writer, maps = WeightWriter("weights"), WeightMap()
    places = [writer.append(array) for array in arrays]
    fd = writer.seal()
    try:
        views = [maps.segment_view(fd, *place) for place in places]
    finally:
        os.close(fd)
    yield [np.ndarray(one.shape, one.dtype, buffer=view) for one, view in zip(arrays, views, strict=True)]


def node(inputs: int = 2, op_type: str = "MatMul", **attributes: Any) -> Node:
    given = tuple(Value(f"in{i}", "float32", None) for i in range(inputs))
    return Node(0, "n", op_type, "", 21, attributes, given, ())


def halves(array: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    return array[:1] * 2, [array[1:] * 2]


@pytest.mark.fast
def test_units_share_what_is_made_of_the_same_constant() -> None:
    packing, calls = Packing(), []

    def make(array: np.ndarray) -> np.ndarray:
        calls.append(array)
        return array * 2

    with weights(np.ones((4, 4), np.float32), np.zeros(4, np.float32)) as (w, v):
        first = packing.packed(node(), "a", 1, [None, w], make)
        assert packing.packed(node(), "a", 1, [None, w], make) is first and len(calls) == 1
        others = [
            packing.packed(node(transB=1), "a", 1, [None, w], make),
            packing.packed(node(op_type="Gemm"), "a", 1, [None, w], make),
            packing.packed(node(), "b", 1, [None, w], make),
            packing.packed(node(), "a", 1, [None, w.T], make),
            packing.packed(node(3), "a", 1, [None, w, v], make),
            packing.packed(node(3), "a", 1, [None, w, None], make),
            packing.packed(node(value=v), "a", 1, [None, w], make),  # nobody compares attributes that are arrays
            packing.packed(node(value=v), "a", 1, [None, w], make),
        ]
        assert len({id(one) for one in [first, *others]}) == 9
        del first, others, calls[:]
        gc.collect()
        packing.packed(node(), "a", 1, [None, w], make)
        assert len(calls) == 1  # nobody used it any more


@pytest.mark.fast
def test_computed_constants_are_not_taken_for_one_another() -> None:
    """Their memory is another array's once they are gone."""
    packing = Packing()
    made = [packing.packed(node(), "a", 1, [None, np.full(4, i)], np.copy) for i in range(3)]
    assert [one.value[0] for one in made] == [0, 1, 2]


@pytest.mark.fast
def test_constants_that_only_others_were_made_from_are_let_go() -> None:
    proto = model(
        "agraph (float[N, 4] x) => (float[N, 2] y) "
        "<int8[4, 2] q = {1, 2, 3, 4, 5, 6, 7, 8}, float[2] scale = {0.5, 2}> "
        "{ wide = Cast<to=1>(q) w = Mul(wide, scale) y = MatMul(x, w) }"
    )
    provider = ready(CpuProvider())
    with graph_of(proto) as graph:
        unit = unit_of(graph, "all")
        program = provider.compile(unit)
        for rows in (3, 5):
            x = np.arange(4.0 * rows, dtype=np.float32).reshape(rows, 4)
            [y] = Bound(program, unit, {"x": x}).run()
            np.testing.assert_array_equal(y, x @ (np.arange(1, 9).reshape(4, 2) * np.float32([0.5, 2])))
        held = [program.code.names[number] for number in program.code._items]
        assert (held, len(program.code.folded)) == (["w"], 0)
        provider.unload(program)
    provider.close()


@pytest.mark.fast
def test_variants_of_a_packed_weight_are_bounded() -> None:
    proto = model(
        "agraph (float[N, 4] x) => (float[N, 2] y) <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w) }"
    )
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"x": np.ones((3, 4), np.float32)})
        [op] = program.code.ops
        items = [None, program.code.constant(op.inputs[1])]
        for at in range(3 * VARIANTS):
            kept = packed_once(program.code, op, f"{at // 2}", 1, lambda w, at=at: w + at, items[1].value, items)
            assert kept[0, 0] == 1 + at // 2 * 2
        assert len(program.code.packed[op, 1]) == VARIANTS
        assert bound.run()[0].tolist() == [[16, 20]] * 3


@pytest.mark.fast
def test_bytes_of_what_is_packed_are_counted_without_views_of_the_original() -> None:
    with weights(np.ones((4, 4), np.float32)) as (w,):
        made = Packing().packed(node(), "a", 1, [None, w], halves)
        assert (made.source, made.nbytes) == (64, 64)
        assert Packing().packed(node(), "a", 1, [None, w], lambda array: [array.T]).nbytes == 0


@pytest.mark.fast
def test_packing_a_large_weight_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with weights(np.ones((1 << 12, 1 << 10), np.float32)) as (w,), pytest.raises(OutOfMemoryError, match="packed in1"):
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        Packing().packed(node(), "a", 1, [None, w], lambda array: pytest.fail("it was made"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_packed_original_leaves_the_resident_memory_of_the_worker(compiled: bool) -> None:
    """In NumPy 24 MiB of half precision, 48 once widened; compiled 48 MiB, as much in panels.

    After the first run the worker has these, and not those.
    """
    kind, numpy_kind = (TensorProto.FLOAT, np.float32) if compiled else (TensorProto.FLOAT16, np.float16)
    w = np.full((2048, 6144), 1 / 1024, numpy_kind)
    nodes = [
        helper.make_node("Cast", ["x"], ["given"], to=kind, name="n0"),
        helper.make_node("MatMul", ["given", "w"], ["product"], name="n1"),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT, name="n2"),
    ]
    proto = _model(nodes, ["N", 2048], ["N", 6144], {"w": w})
    provider = outrider.ProviderSpec("cpu", threads=1, options={"compiled": compiled})
    with outrider.InferenceSession(proto, providers=[provider]) as session:
        if compiled and not session.stats()["providers"]["cpu"]["compiled"]["families"]:
            pytest.skip("there is no library of compiled kernels, nor a compiler")
        [pid] = worker_pids()
        anonymous, shared = _resident(pid, "RssAnon"), _resident(pid, "RssShmem")
        [y] = session.run(None, {"x": np.ones((1, 2048), np.float32)})
        np.testing.assert_array_equal(y, np.full((1, 6144), 2))
        [told] = session.stats()["providers"]["cpu"]["memory"]
        anonymous, shared = _resident(pid, "RssAnon") - anonymous, _resident(pid, "RssShmem") - shared
    made = 2048 * 6144 * 4
    assert told["originals"] == w.nbytes
    assert made <= told["packed"] < 1.1 * made
    assert anonymous < 1.3 * made
    assert shared < 0.3 * w.nbytes


def _model(nodes: Sequence[Any], x: list[Any], y: list[Any], constants: dict[str, np.ndarray]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    serialized: bytes = proto.SerializeToString()
    return serialized


def _resident(pid: int, name: str) -> int:
    """Bytes of resident memory of a process, of one kind."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) << 10
