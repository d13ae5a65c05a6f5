"""Runs one node through its cpu kernel and compares with an oracle that is not us.

Each kernel runs immediate and bound, in NumPy and, if it has one, in its compiled implementation, on one thread and on
several. The implementations are compared with each other, too; the numbers of threads, and the memory orders of the
inputs, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import outrider.providers.cpu.kernels  # noqa: F401  (registers the kernels)
from outrider.providers.cpu.kernels.frame import Bind, Dynamic, find
from outrider.providers.cpu.native import Library
from outrider.providers.wire.dtypes import NUMBER, onnx_name
from outrider.providers.wire.graph import OMITTED, Node, Value
from tests.native_library import libraries


class Recorded(Bind):
    """The bound mode in small: inputs hold rubbish while steps are recorded, `const` serves only what is named."""

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Any],
        consts: Sequence[int],
        library: Library | None = None,
        fortran: bool = True,
    ) -> None:
        self.actual = inputs
        self.consts = set(consts)
        self.recorded: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.places: list[Any] = []
        for i, item in enumerate(inputs):
            place = item
            if isinstance(item, np.ndarray) and item.dtype != object:
                place = np.zeros(item.shape, item.dtype)
                if fortran:  # kernels must take any strides
                    place = np.zeros(item.shape[::-1], item.dtype).T
                if i in self.consts:
                    place[...] = item
            self.places.append(place)
        super().__init__(node, [_locked(place) for place in self.places], _threads(library), library)

    def const(self, i: int) -> np.ndarray:
        if i not in self.consts:
            raise Dynamic(f"input {i}")
        return np.asarray(self.actual[i])

    def is_const(self, i: int) -> bool:
        return i in self.consts

    def value(self, i: int, make: Callable[[], Any]) -> None:
        raise Dynamic("value")

    def dynamic(self) -> None:
        raise Dynamic("dynamic")

    def step(self, fn: Callable[..., Any], *args: Any) -> None:
        self.recorded.append((fn, args))

    def run(self) -> list[Any]:
        """Fill the inputs and do the recorded work twice: the second run finds what the first one left."""
        for place, item in zip(self.places, self.actual, strict=True):
            if isinstance(place, np.ndarray) and place is not item:
                place[...] = item
        for _ in range(2):
            for fn, args in self.recorded:
                fn(*args)
        return self.results


def _threads(library: Library | None) -> int:
    return 1 if library is None else library.threads


def _locked(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        item = item.view()
        item.flags.writeable = False
    return item


def _dtype(item: Any) -> str:
    if item is None:
        return "undefined"
    if isinstance(item, list):
        return f"sequence({_dtype(item[0]) if item else 'float32'})"
    return onnx_name(np.asarray(item).dtype)


def _attribute(item: Any) -> Any:
    if isinstance(item, onnx.TensorProto):
        return numpy_helper.to_array(item)
    if isinstance(item, bytes):
        return item.decode()
    if isinstance(item, (int, float, str, onnx.GraphProto)):
        return item
    return [_attribute(one) for one in item]


def plain_node(proto: onnx.NodeProto, opset: int, inputs: Sequence[Any], results: Sequence[str | None]) -> Node:
    """A NodeProto as the plain Node that a provider sees; `results` are the dtypes of its outputs."""
    names = list(proto.input)
    while names and not names[-1]:
        names.pop()
    values = tuple(
        Value(name, _dtype(x), None if isinstance(x, list) else np.shape(x)) if name else OMITTED
        for name, x in zip(names, inputs, strict=False)
    )
    outputs = tuple(Value(name, dtype or "undefined") for name, dtype in zip(proto.output, results, strict=True))
    attributes = {a.name: _attribute(helper.get_attribute_value(a)) for a in proto.attribute}
    return Node(0, proto.name or "node", proto.op_type, proto.domain, opset, attributes, values, outputs)


def run_node(
    node: Node,
    inputs: Sequence[Any],
    consts: Sequence[int] | None = None,
    library: Library | None = None,
    fortran: bool = True,
) -> list[Any]:
    """The node's outputs: immediate when `consts` is None, else bound with those inputs known at bind time.

    `library`: the compiled kernels to use. `fortran`: the memory order of a bound node's inputs, else C.
    """
    entry = find(node)
    parsed = entry.parsed(node)
    inputs = list(inputs)[: len(node.inputs)]
    if consts is None:
        bind = Bind(node, [_locked(x) for x in inputs], _threads(library), library)
        entry.bind(bind, parsed)
        return bind.results
    recorded = Recorded(node, inputs, consts, library, fortran)
    entry.bind(recorded, parsed)
    return recorded.run()


def model_of(proto: onnx.NodeProto, inputs: Sequence[Any], opset: int) -> onnx.ModelProto:
    """A model of that one node; output types are left to inference."""
    infos = [
        helper.make_tensor_value_info(name, NUMBER[_dtype(x)], np.shape(x))
        for name, x in zip(proto.input, inputs, strict=False)
        if name
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    opsets = [helper.make_opsetid("", opset)]
    if proto.domain:
        opsets.append(helper.make_opsetid(proto.domain, 1))
    return helper.make_model(
        helper.make_graph([proto], "one", infos, outputs), opset_imports=opsets, ir_version=10 if opset < 25 else 13
    )


def ort_results(proto: onnx.NodeProto, inputs: Sequence[Any], opset: int) -> list[Any]:
    """What onnxruntime says, unoptimised, on one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    model = model_of(proto, inputs, opset).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {name: np.asarray(x, order="C") for name, x in zip(proto.input, inputs, strict=False) if name}
    return list(session.run(None, feeds))


def reference_results(proto: onnx.NodeProto, inputs: Sequence[Any], opset: int) -> list[Any]:
    """What `onnx.reference` says."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model_of(proto, inputs, opset))
    feeds = {name: np.asarray(x) for name, x in zip(proto.input, inputs, strict=False) if name}
    return list(evaluator.run(None, feeds))


def same(got: Any, expected: Any, rtol: float, atol: float, where: str = "") -> None:
    """Equal dtype and shape; floats within tolerance (nan equals nan), everything else equal."""
    if isinstance(expected, list):
        assert isinstance(got, list), where
        assert len(got) == len(expected), where
        for one, other in zip(got, expected, strict=True):
            same(one, other, rtol, atol, where)
        return
    got, expected = np.asarray(got), np.asarray(expected)
    if expected.dtype.kind in "OUST":
        assert got.shape == expected.shape, where
        assert got.astype(str).tolist() == expected.astype(str).tolist(), where
        return
    assert got.dtype == expected.dtype, f"{where}: dtype {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{where}: shape {got.shape}, not {expected.shape}"
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected, err_msg=where)
    else:
        wide = np.complex128 if got.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(got.astype(wide), expected.astype(wide), rtol=rtol, atol=atol, err_msg=where)


def check(
    op_type: str,
    inputs: Sequence[Any],
    *,
    opset: int = 21,
    domain: str = "",
    outputs: int | Sequence[str] = 1,
    oracle: str | Sequence[Any] = "ort",
    rtol: float = 1e-6,
    atol: float = 1e-6,
    consts: Sequence[int] | None = None,
    bound: bool = True,
    apart: float | None = None,
    **attributes: Any,
) -> list[Any]:
    """Assert that the kernel agrees with the oracle ('ort', 'reference' or the expected arrays) in both modes.

    `outputs`: a count, or names with '' for unwanted ones. Bound mode: with no input known first; where that is
    Dynamic, with `consts` known (default: all but the first). `bound=False` says that the node can only be bound in
    the run. `apart`: how far the two implementations may lie from each other, relatively, where that is not `rtol`.
    Returns the outputs of the immediate mode.
    """
    inputs = [np.asarray(x) if isinstance(x, np.generic) else x for x in inputs]
    names = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    feeds = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    proto = helper.make_node(op_type, feeds, names, domain=domain, **attributes)
    if isinstance(oracle, str):
        expected = (ort_results if oracle == "ort" else reference_results)(proto, inputs, opset)
    else:
        expected = list(oracle)
    rest = iter(expected)
    wanted = [next(rest) if name else None for name in names]
    node = plain_node(proto, opset, inputs, [None if e is None else _dtype(e) for e in wanted])
    return compare(node, inputs, wanted, rtol=rtol, atol=atol, consts=consts, bound=bound, apart=apart)


def compare(
    node: Node,
    inputs: Sequence[Any],
    wanted: Sequence[Any],
    *,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    consts: Sequence[int] | None = None,
    bound: bool = True,
    apart: float | None = None,
) -> list[Any]:
    """`check` for a node that is no NodeProto: `wanted` are the expected outputs, None for those nobody wants."""
    results = run_node(node, inputs)
    passes = [("immediate", results)]
    known: Sequence[int] | None = ()
    try:
        passes.append(("bound", run_node(node, inputs, ())))
    except Dynamic:
        known = None
        if bound:
            known = tuple(range(1, len(node.inputs)) if consts is None else consts)
            passes.append(("bound", run_node(node, inputs, known)))
    else:
        assert bound, "bound=False, yet the node was bound"
    for mode, got in [*passes, *_compiled(node, inputs, known)]:
        for i, want in enumerate(wanted):
            if want is not None:
                where = f"{node.op_type} output {i}, {mode}"
                same(got[i], want, rtol, atol, where)
                same(got[i], results[i], apart or rtol, atol, f"{where} beside NumPy")
    return results


def _compiled(node: Node, inputs: Sequence[Any], known: Sequence[int] | None) -> list[tuple[str, list[Any]]]:
    """The results of the compiled implementation by mode, if there is one; the same bits whatever must not matter."""
    found = libraries()
    if found is None:
        return []
    one, several = found
    one.forget()
    passes = [("compiled", run_node(node, inputs, None, one))]
    if known is not None:
        passes.append(("compiled, bound", run_node(node, inputs, known, one)))
    if not one.used:
        return []
    undeclared = one.used - find(node).compiled - {"copy"}  # any kernel may copy
    assert not undeclared, f"{node.op_type} uses {undeclared}; its kernel must be declared with compiled=..."
    where = f"{node.op_type}: one thread, and {several.threads}"
    identical(passes[0][1], run_node(node, inputs, None, several), where)
    if known is not None:
        where = f"{node.op_type}: inputs in C order, and in Fortran order on {several.threads} threads"
        identical(run_node(node, inputs, known, one, False), run_node(node, inputs, known, several), where)
    return passes


def identical(some: Sequence[Any], others: Sequence[Any], where: str) -> None:
    """Arrays of the same bits; other values are not looked at."""
    for i, (one, other) in enumerate(zip(some, others, strict=True)):
        if isinstance(one, np.ndarray) and one.dtype != object:
            assert one.tobytes() == other.tobytes(), f"{where}: output {i} has other bits"
