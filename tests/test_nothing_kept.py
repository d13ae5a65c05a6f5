"""What a run had is let go when it ends, without Python's collector: it may come late, and values are large."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from onnx import TensorProto, helper

from outrider.providers.wire import values
from outrider.providers.wire.errors import KernelError
from outrider.providers.wire.failures import error_to_plain, fail
from outrider.providers.wire.graph import Node, Value
from outrider.scheduler import InferenceSession, SessionOptions
from tests.builders import model, node, tensor

pytestmark = pytest.mark.fast

X = Value("x", "float32", ("N",), False)
NEG = Node(0, "n", "Neg", "", 21, {}, (X,), (X,))


def _encoded(array: np.ndarray) -> None:
    values.encode([array, {"k": array}])


def _failed(array: np.ndarray) -> None:
    with contextlib.suppress(KernelError):
        try:
            fail((NEG,), (X,), (array,), ArithmeticError("unlucky"))
        except KernelError as error:
            fail((NEG,), (X,), (array,), error)


def _told(array: np.ndarray) -> None:
    try:
        fail((NEG,), (X,), (array,), KernelError("node n failed", node="n"))
    except KernelError as error:
        error_to_plain(error)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("use", [_encoded, _failed, _told])
def test_a_value_is_let_go(use: Callable[[np.ndarray], None]) -> None:
    array = np.ones(3, np.float32)
    alive = weakref.ref(array)
    with without_collector():
        use(array)
        del array
        assert alive() is None


def test_a_fed_sequence_is_let_go() -> None:
    nodes = [node("SequenceLength", "q", "n")]
    sequence = model(nodes, [], [tensor("n", [], TensorProto.INT64)])
    sequence.graph.input.append(helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, None))
    array = np.ones(3, np.float32)
    alive = weakref.ref(array)
    with InferenceSession(sequence) as session, without_collector():
        assert session.run(None, {"q": [array, array]}) == [2]
        del array
        assert alive() is None


def test_blocks_of_a_result_that_nobody_asks_for_come_back_when_it_grows() -> None:
    """Its size is known in the run only: too small for a block when the run was learned, large later."""
    nodes = [node("NonZero", "x", "where", "a"), node("ReduceSum", "x", "sum", "b", keepdims=0)]
    both = model(nodes, [tensor("x", ["N"])], [tensor("where", [1, "K"], TensorProto.INT64), tensor("sum", [])])
    small, large = np.zeros(20_000, np.float32), np.ones(20_000, np.float32)
    with InferenceSession(both, options=SessionOptions(max_in_flight=1, output_memory=1 << 20)) as session:
        for x, total in [*[(small, 0)] * 3, *[(large, 20_000)] * 20]:
            assert session.run(["sum"], {"x": x}) == [total]
        copies = session.stats()["copies"]
        (where,) = session.run(["where"], {"x": large})
        assert where.shape == (1, 20_000)
        assert session.stats()["copies"] - copies == 2  # x, and `where` into a block of the pool; not out of it
