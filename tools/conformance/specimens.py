"""Small models of one operator or one common pattern, of which the project's own cases are made.

A specimen has free dimensions, so that one compiled unit can be given many shapes, and can be put into a larger graph
several times, each time with constants of its own. What it must answer, `onnx.reference` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from outrider.providers.wire.dtypes import NUMBER, numpy_dtype

OPSET = 21
WIDTH = 8
ROWS = ("N", WIDTH)
IMAGE = ("N", 3, 8, 8)
SIZE = 3  # of the free dimension, where nothing else is asked for
FLOATS = ("float32", "float64", "float16")
NUMBERS = (*FLOATS, "int32", "int64")

Shape = tuple[Any, ...]
Array = np.ndarray[Any, Any]
_TOLERANCES = {"float16": (1e-2, 2e-3), "float64": (1e-9, 1e-10)}  # relative and absolute
_TOLERANCE = (1e-3, 1e-5)


@dataclass(frozen=True)
class Step:
    """A node: `inputs` and `outputs` are names divided by blanks, '-' an omitted input."""

    op: str
    inputs: str
    outputs: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Constant:
    """A constant input: its dtype ('' the specimen's) and shape, drawn anew for each use, or `value` for all."""

    shape: Shape = ()
    dtype: str = ""
    value: Any = None


@dataclass(frozen=True)
class Specimen:
    """Steps from `x`, and further inputs, to `outputs`.

    `dtypes`: for which it is a case, the first one where nothing else is said. `older`: opsets in which it is one, too,
    if it is written alike there. `like`: its only output has the dtype and shape of `x`, its only input. `elementwise`:
    it can be given scalars. `special`: values that are not finite and that ONNX leaves no doubt about. `positive`:
    inputs are. `coarse`: they are 0 and 1, so that some are equal. `joins`: inputs must have the same rows. `large`:
    rows with which results are large enough to lie in the output pool.
    """

    name: str
    steps: tuple[Step, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    x: Shape = ROWS
    more: Mapping[str, Shape] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=lambda: {"y": ""})
    dtypes: tuple[str, ...] = FLOATS
    dtype: str = ""
    opset: int = OPSET
    older: tuple[int, ...] = (13, 17)
    like: bool = False
    elementwise: bool = False
    special: tuple[float, ...] = ()
    positive: bool = False
    coarse: bool = False
    joins: bool = False
    large: int = 4096

    @property
    def kind(self) -> str:
        """The dtype of `x`."""
        return self.dtype or self.dtypes[0]

    @property
    def operators(self) -> tuple[str, ...]:
        """Of its steps."""
        return tuple(step.op for step in self.steps)

    @property
    def group(self) -> str:
        """Its operator, or its name if it has several."""
        return self.steps[0].op if len(self.steps) == 1 else self.name

    @property
    def tolerance(self) -> tuple[float, float]:
        """Relative and absolute."""
        return _TOLERANCES.get(self.kind, _TOLERANCE)

    @property
    def fed(self) -> dict[str, Shape]:
        """Its inputs."""
        return {"x": self.x, **self.more}

    @property
    def may_be_empty(self) -> bool:
        """Whether ONNX and its reference leave no doubt about what comes of no rows."""
        return self.x == ROWS and "Reshape" not in self.operators

    @property
    def widens(self) -> bool:
        """Whether its rows may have another width."""
        return self.may_be_empty and "Split" not in self.operators

    @property
    def chains(self) -> bool:
        """Whether it can stand anywhere in a chain of such."""
        return self.like and self.kind == "float32" and not self.positive

    @property
    def free(self) -> bool:
        """Whether a dimension is free."""
        return any(isinstance(dim, str) for shape in self.fed.values() for dim in shape)

    def values(self, seed: int) -> dict[str, Array]:
        """Its constants, drawn with a seed."""
        random = np.random.default_rng(1000 + seed)
        return {
            name: self._drawn(random, one.shape, one.dtype or self.kind)
            if one.value is None
            else np.asarray(one.value, numpy_dtype(one.dtype or self.kind))
            for name, one in self.constants.items()
        }

    def feeds(self, size: int = SIZE, seed: int = 0) -> dict[str, Array]:
        """A value for each input; free dimensions are `size`."""
        random = np.random.default_rng(seed)
        return {
            name: self._drawn(random, tuple(size if isinstance(dim, str) else dim for dim in shape), self.kind)
            for name, shape in self.fed.items()
        }

    def _drawn(self, random: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
        if dtype == "bool" or self.coarse:
            return random.integers(0, 2, size=shape).astype(numpy_dtype(dtype))
        if "int" in dtype:
            low = 1 if dtype.startswith("uint") or self.positive else -9
            return random.integers(low, 10, size=shape).astype(numpy_dtype(dtype))
        drawn = random.standard_normal(size=shape)
        return np.asarray(np.abs(drawn) + 0.5 if self.positive else drawn).astype(numpy_dtype(dtype))


@dataclass(frozen=True)
class Part:
    """One use of a specimen in a graph: `prefix` of its names, `seed` of its constants, `reads`: input -> value.

    Inputs that it does not say are inputs of the graph. `fed`: its constants are, too.
    """

    specimen: Specimen
    prefix: str = ""
    seed: int = 0
    reads: Mapping[str, str] = field(default_factory=dict)
    fed: bool = False


@dataclass(frozen=True)
class Built:
    """A graph of parts, whose outputs are those of its parts, but for the parts of these prefixes."""

    parts: tuple[Part, ...]
    hidden: frozenset[str] = frozenset()

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model."""
        nodes, inputs, outputs, initializers = [], {}, [], []
        for part in self.parts:
            specimen, prefix = part.specimen, part.prefix
            names = {name: part.reads.get(name, prefix + name) for name in specimen.fed}
            for name, shape in specimen.fed.items():
                if name not in part.reads:
                    inputs[names[name]] = (specimen.kind, shape)
            for name, value in specimen.values(part.seed).items():
                names[name] = prefix + name
                if part.fed:
                    inputs[names[name]] = (specimen.constants[name].dtype or specimen.kind, value.shape)
                else:
                    initializers.append(numpy_helper.from_array(value, prefix + name))
            for number, step in enumerate(specimen.steps):
                read = ["" if one == "-" else names.get(one, prefix + one) for one in step.inputs.split()]
                made = [prefix + one for one in step.outputs.split()]
                label = f"{prefix}{specimen.name}.{number}"
                nodes.append(helper.make_node(step.op, read, made, name=label, **step.attributes))
            for name, dtype in specimen.outputs.items() if prefix not in self.hidden else ():
                outputs.append(helper.make_tensor_value_info(prefix + name, NUMBER[dtype or specimen.kind], None))
        fed = [helper.make_tensor_value_info(name, NUMBER[kind], shape) for name, (kind, shape) in inputs.items()]
        graph = helper.make_graph(nodes, "specimen", fed, outputs, initializers)
        opset = self.parts[0].specimen.opset
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)  # outputs must have some shape

    @cached_property
    def _reference(self) -> ReferenceEvaluator:
        return ReferenceEvaluator(self.proto)

    def feeds(self, size: int = SIZE, seed: int = 0) -> dict[str, Array]:
        """A value for each input."""
        made: dict[str, Array] = {}
        for number, part in enumerate(self.parts):
            drawn = part.specimen.feeds(size, seed + 100 * number)
            made |= {part.prefix + name: one for name, one in drawn.items() if name not in part.reads}
            if part.fed:
                made |= {part.prefix + name: one for name, one in part.specimen.values(part.seed).items()}
        return made

    def expected(self, feeds: Mapping[str, Array]) -> list[Any]:
        """What onnx.reference computes."""
        with np.errstate(all="ignore"):
            return [np.asarray(one) for one in self._reference.run(None, dict(feeds))]

    @property
    def tolerance(self) -> tuple[float, float]:
        """The widest of its parts."""
        return max(part.specimen.tolerance for part in self.parts)


def built(specimen: Specimen, **how: Any) -> Built:
    """The graph of one specimen."""
    return Built((Part(specimen, **how),))


def chained(specimens: Sequence[Specimen]) -> Built:
    """A chain of specimens that can be chained; every value in between is an output too."""
    parts, before = [], ""
    for number, specimen in enumerate(specimens):
        reads = {"x": before} if before else {}
        parts.append(Part(specimen, f"c{number}.", number, reads))
        before = f"c{number}.y"
    return Built(tuple(parts))


def scalar(specimen: Specimen) -> Specimen:
    """The same for tensors of rank 0."""
    return replace(specimen, x=(), more=dict.fromkeys(specimen.more, ()))


def fixed(specimen: Specimen) -> Specimen:
    """The same without free dimensions."""

    def sized(shape: Shape) -> Shape:
        return tuple(SIZE if isinstance(dim, str) else dim for dim in shape)

    more = {name: sized(shape) for name, shape in specimen.more.items()}
    return replace(specimen, x=sized(specimen.x), more=more)


def widened(specimen: Specimen, width: int) -> Specimen:
    """The same with another width."""

    def wide(shape: Shape) -> Shape:
        return tuple(width if dim == WIDTH else dim for dim in shape)

    if specimen.x != ROWS:
        return specimen
    constants = {name: replace(one, shape=wide(one.shape)) for name, one in specimen.constants.items()}
    more = {name: wide(shape) for name, shape in specimen.more.items()}
    return replace(specimen, x=wide(specimen.x), more=more, constants=constants)


def _one(op: str, inputs: str = "x", outputs: str = "y", **attributes: Any) -> tuple[Step, ...]:
    return (Step(op, inputs, outputs, attributes),)


def _unary(op: str, special: tuple[float, ...] = (), **more: Any) -> Specimen:
    attributes = more.pop("attributes", {})
    steps = (Step(op, "x", "y", attributes),)
    return Specimen(op, steps, like=True, elementwise=True, special=special, **more)


def _binary(op: str, **more: Any) -> Specimen:
    special = (np.inf, -np.inf, np.nan)
    return Specimen(
        op, _one(op, "x b"), more={"b": ROWS}, dtypes=NUMBERS, elementwise=True, special=special, joins=True, **more
    )


_ROUNDED = ("float32", "float16")  # onnx.reference rounds erf to float32
_INF = (np.inf, -np.inf)
_ALL = (*_INF, np.nan)
_ONES = {"w": Constant((WIDTH, WIDTH)), "b": Constant((WIDTH,))}
_FILTER = {"w": Constant((4, 3, 3, 3)), "b": Constant((4,))}
_NORM = {
    "scale": Constant((3,)), "shift": Constant((3,)), "mean": Constant((3,)),
    "variance": Constant((3,), value=[0.5, 1.0, 2.0]),
}  # fmt: skip  # before opset 14 onnx.reference computes with the mean of the batch
_PADS: dict[str, Any] = {"pads": [1, 1, 1, 1]}


def _index(*items: int) -> Constant:
    return Constant((len(items),), "int64", list(items))


SPECIMENS = (
    _unary("Relu", _INF),
    _binary("Add"),
    Specimen("MatMul", _one("MatMul", "x w"), {"w": Constant((WIDTH, WIDTH))}, like=True),
    _binary("Mul"),
    _unary("Sigmoid", _INF),
    _unary("Tanh", _INF),
    _binary("Sub"),
    _binary("Div", positive=True),
    _unary("Neg", _ALL, dtypes=NUMBERS),
    _unary("Abs", _ALL, dtypes=NUMBERS),
    _unary("Exp", _ALL),
    _unary("Sqrt", (np.inf, np.nan), positive=True),
    _unary("Erf", _INF, dtypes=_ROUNDED),
    _unary("Floor", _INF),
    _unary("Identity", _ALL, dtypes=(*NUMBERS, "bool", "uint8", "int8")),
    _unary("LeakyRelu", attributes={"alpha": 0.1}),
    _unary("Gelu", dtypes=_ROUNDED),
    _unary("Not", dtypes=("bool",)),
    Specimen("Softmax", _one("Softmax", axis=-1), like=True),
    Specimen("Clip", _one("Clip", "x low high"), {"low": Constant(value=-0.5), "high": Constant(value=0.5)}, like=True),
    Specimen("Clip-no-minimum", _one("Clip", "x - high"), {"high": Constant(value=0.5)}, like=True),
    Specimen("Add-constant", _one("Add", "x b"), {"b": Constant((WIDTH,))}, dtypes=NUMBERS, like=True),
    Specimen("Mul-scalar", _one("Mul", "x s"), {"s": Constant(())}, dtypes=NUMBERS, like=True),
    Specimen("Gemm", _one("Gemm", "x w b", transB=1), _ONES, like=True),
    Specimen("Gemm-no-C", _one("Gemm", "x w", alpha=0.5), {"w": _ONES["w"]}, like=True),
    Specimen(
        "LayerNormalization", _one("LayerNormalization", "x s b"),
        {"s": Constant((WIDTH,)), "b": Constant((WIDTH,))}, dtypes=("float32",), like=True,
    ),
    Specimen(
        "LayerNormalization-three-axes", _one("LayerNormalization", "x s", axis=1, epsilon=0.1),
        {"s": Constant((3, 8, 8))}, x=IMAGE, dtypes=("float32",), large=256,
    ),
    Specimen("Transpose", _one("Transpose", perm=[1, 0]), dtypes=(*NUMBERS, "bool", "uint8")),
    Specimen("Reshape", _one("Reshape", "x shape"), {"shape": _index(-1, 2)}, dtypes=(*NUMBERS, "bool")),
    Specimen("Flatten", _one("Flatten"), x=IMAGE, large=256),
    Specimen("Unsqueeze", _one("Unsqueeze", "x axes"), {"axes": _index(0)}, dtypes=NUMBERS),
    Specimen("Concat", _one("Concat", "x b", axis=1), more={"b": ROWS}, dtypes=NUMBERS, joins=True),
    Specimen("Slice", _one("Slice", "x low high axes"), {"low": _index(1), "high": _index(7), "axes": _index(1)},
             dtypes=NUMBERS),
    Specimen("Gather", _one("Gather", "x indices", axis=1), {"indices": _index(0, 5, 5, -1)}, dtypes=NUMBERS),
    Specimen("ReduceMean", _one("ReduceMean", "x axes"), {"axes": _index(1)}),
    Specimen("ReduceSum", _one("ReduceSum", "x axes", keepdims=0), {"axes": _index(-1)}, dtypes=NUMBERS),
    Specimen("ArgMax", _one("ArgMax", axis=1), outputs={"y": "int64"}),
    Specimen("Cast", _one("Cast", to=int(NUMBER["int64"])), outputs={"y": "int64"}, dtypes=("float32", "int32")),
    Specimen("Split", _one("Split", "x", "y z", axis=1, num_outputs=2), outputs={"y": "", "z": ""}, dtypes=NUMBERS),
    Specimen("Where", _one("Where", "m x b"), {"m": Constant((WIDTH,), "bool")}, more={"b": ROWS}, joins=True),
    Specimen("Equal", _one("Equal", "x b"), more={"b": ROWS}, outputs={"y": "bool"}, dtypes=NUMBERS, joins=True,
             coarse=True),
    Specimen("Conv", (Step("Conv", "x w b", "y", _PADS),), _FILTER, x=IMAGE, large=128),
    Specimen("Conv-no-bias", _one("Conv", "x w", strides=[2, 2]), {"w": _FILTER["w"]}, x=IMAGE, large=256),
    Specimen("ConvTranspose", _one("ConvTranspose", "x w"), {"w": Constant((3, 4, 2, 2))}, x=IMAGE, large=24),
    Specimen("BatchNormalization", _one("BatchNormalization", "x scale shift mean variance"), _NORM, x=IMAGE,
             dtypes=("float32",), older=(17,), large=128),
    Specimen("MaxPool", _one("MaxPool", kernel_shape=[2, 2], strides=[2, 2]), x=IMAGE, large=128),
    Specimen("AveragePool", _one("AveragePool", kernel_shape=[2, 2]), x=IMAGE, large=16),
    Specimen("GlobalAveragePool", _one("GlobalAveragePool"), x=IMAGE, large=512),
    Specimen(
        "QuantizeLinear", _one("QuantizeLinear", "x s zero"),
        {"s": Constant(value=0.1), "zero": Constant(dtype="uint8", value=100)}, outputs={"y": "uint8"},
        dtypes=("float32",), older=(),
    ),
    Specimen(
        "DequantizeLinear", _one("DequantizeLinear", "x s zero"),
        {"s": Constant(dtype="float32", value=0.1), "zero": Constant(dtype="uint8", value=3)},
        outputs={"y": "float32"}, dtypes=("uint8",), older=(),
    ),
    Specimen(
        "MatMul+Add+Relu",
        (Step("MatMul", "x w", "p"), Step("Add", "p b", "s"), Step("Relu", "s", "y")), _ONES, like=True,
    ),
    Specimen("Gemm+Relu", (Step("Gemm", "x w b", "s"), Step("Relu", "s", "y")), _ONES, like=True),
    Specimen(
        "MatMul+Add+Gelu",
        (Step("MatMul", "x w", "p"), Step("Add", "p b", "s"), Step("Gelu", "s", "y")), _ONES, dtypes=_ROUNDED,
        like=True,
    ),
    Specimen("Add+Relu", (Step("Add", "x b", "s"), Step("Relu", "s", "y")), more={"b": ROWS}, joins=True),
    Specimen("Sigmoid+Mul", (Step("Sigmoid", "x", "s"), Step("Mul", "x s", "y")), like=True),
    Specimen("Conv+Relu", (Step("Conv", "x w b", "s", _PADS), Step("Relu", "s", "y")), _FILTER, x=IMAGE, large=128),
    Specimen(
        "Conv+BatchNormalization+Relu",
        (
            Step("Conv", "x w", "p", _PADS), Step("BatchNormalization", "p scale shift mean variance", "s"),
            Step("Relu", "s", "y"),
        ),
        {"w": Constant((3, 3, 3, 3)), **_NORM}, x=IMAGE, dtypes=("float32",),
        older=(17,), large=128,
    ),
    Specimen(
        "MatMul+Softmax+MatMul",
        (Step("MatMul", "x k", "p"), Step("Softmax", "p", "s", {"axis": -1}), Step("MatMul", "s v", "y")),
        {"k": Constant((WIDTH, 6)), "v": Constant((6, WIDTH))}, like=True,
    ),
)  # fmt: skip
