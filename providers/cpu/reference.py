"""The stop-gap: a node that has no kernel yet, evaluated by `onnx.reference`.

Slow, and counted in the report. The node becomes a model of one node; its evaluator is made at the first run, once per
combination of input types, and kept. Operators that ONNX defines as functions of others come along. What the reference
implementation is known to get wrong is refused here. `onnx` is imported only when such a node is looked at.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from outrider.providers.contract import Node, Value
from outrider.providers.cpu.kernels.frame import Bind, Kernel, Unsupported
from outrider.providers.wire.dtypes import NUMBER, is_tensor, numpy_dtype, onnx_name

RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
# Domain -> module below onnx.reference.ops.
_LIBRARIES = {
    "": "",
    "ai.onnx.ml": ".aionnxml",
    "ai.onnx.preview": ".aionnx_preview",
    "ai.onnx.preview.training": ".aionnx_preview_training",
}


def stop_gap(step: Node) -> Kernel[Any]:
    """A kernel that evaluates this node; raises Unsupported when it cannot, or would be wrong."""
    if importlib.util.find_spec("onnx") is None:
        raise Unsupported("the onnx package is not installed in this worker")
    if any(True for _ in step.bodies()):
        raise Unsupported("it has bodies")
    _guard(step)
    _known(step.domain, step.op_type, step.opset)
    evaluator = _Evaluator(step)
    return Kernel(step.op_type, step.domain, 1, evaluator.bind, None, {}, step.op_type not in RANDOM)


def _guard(step: Node) -> None:
    """Refuse what `onnx.reference` computes wrongly."""
    op = step.op_type if step.domain == "" else ""
    if op == "BatchNormalization" and (step.opset < 14 or step.attributes.get("training_mode", 0)):
        raise Unsupported("onnx.reference is wrong on BatchNormalization before opset 14 and in training")
    if op == "GlobalMaxPool" and (step.inputs[0].shape is None or len(step.inputs[0].shape) != 4):
        raise Unsupported("onnx.reference is wrong on GlobalMaxPool unless its input has 4 dimensions")
    if op == "GatherElements" and step.attributes.get("axis", 0) < 0:
        raise Unsupported("onnx.reference is wrong on GatherElements with a negative axis")
    if op in ("QuantizeLinear", "DequantizeLinear") and step.opset < 19:
        raise Unsupported(f"onnx.reference is wrong on {op} before opset 19")
    if op == "ImageDecoder" and importlib.util.find_spec("PIL") is None:
        raise Unsupported("onnx.reference needs the Pillow package for ImageDecoder")


@lru_cache(maxsize=1024)
def _known(domain: str, op_type: str, opset: int) -> None:
    """Raise Unsupported unless the reference implementation has the operator, or ONNX defines it as a function."""
    import onnx.defs

    try:
        schema: Any = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        raise Unsupported(f"ONNX has no operator {domain or 'ai.onnx'}::{op_type} at opset {opset}") from None
    if schema.deprecated:
        raise Unsupported(f"{op_type} is deprecated at opset {opset}")
    if domain == "" and (schema.has_function or schema.has_context_dependent_function):
        return
    if domain not in _LIBRARIES:
        raise Unsupported(f"onnx.reference does not have the domain {domain}")
    library = importlib.import_module(f"onnx.reference.ops{_LIBRARIES[domain]}")
    try:
        library.load_op(domain, op_type, opset)
    except Exception as reason:  # the reference package raises several kinds, some of them private
        raise Unsupported(f"onnx.reference does not have it ({type(reason).__name__})") from None


class _Evaluator:
    """One node as a model, for the input types that occur."""

    def __init__(self, step: Node) -> None:
        self.step = step
        self._evaluators: dict[tuple[Any, ...], Any] = {}

    def bind(self, b: Bind, _: Any) -> None:
        b.dynamic()
        results = self._evaluate(b.inputs)
        kept = [value for value in self.step.outputs if value.name]
        by_name = dict(zip((value.name for value in kept), results, strict=True))
        for i, value in enumerate(self.step.outputs):
            if value.name:
                b.value(i, _returns(_checked(value, by_name[value.name])))

    def _evaluate(self, inputs: Sequence[Any]) -> list[Any]:
        given = {f"i{i}": item for i, item in enumerate(inputs) if self.step.inputs[i].name}
        key = tuple(_signature(item) for item in given.values())
        if key not in self._evaluators:
            self._evaluators[key] = self._make(given)
        results: list[Any] = self._evaluators[key].run(None, given)
        return results

    def _make(self, given: dict[str, Any]) -> Any:
        import onnx
        from onnx import helper
        from onnx.reference import ReferenceEvaluator

        step = self.step
        names = [f"i{i}" if value.name else "" for i, value in enumerate(step.inputs)]
        outputs = [f"o{i}" if value.name else "" for i, value in enumerate(step.outputs)]
        node = onnx.NodeProto(op_type=step.op_type, domain=step.domain, input=names, output=outputs)
        node.attribute.extend(_attribute(step, key, item) for key, item in step.attributes.items())
        infos = [_info(name, item, step.inputs[int(name[1:])]) for name, item in given.items()]
        results = [onnx.ValueInfoProto(name=name) for name in outputs if name]
        graph = helper.make_graph([node], "node", infos, results)
        opsets = [helper.make_opsetid(step.domain, step.opset)]
        if step.domain:  # function bodies of other domains are written in ai.onnx
            opsets.append(helper.make_opsetid("", onnx.defs.onnx_opset_version()))
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def _returns(result: Any) -> Callable[[], Any]:
    return lambda: result


def _signature(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        return item.dtype, item.ndim
    if isinstance(item, list):
        return "sequence", _signature(item[0]) if item else None
    return type(item)


def _info(name: str, item: Any, declared: Value) -> Any:
    """The declaration of an input: the type that arrived, dimensions unknown."""
    import onnx
    from onnx import helper

    if isinstance(item, np.ndarray):
        dtype = declared.dtype if is_tensor(declared.dtype) else onnx_name(item.dtype)
        return helper.make_tensor_value_info(name, NUMBER[dtype], [None] * item.ndim)
    if isinstance(item, list):
        element = onnx_name(item[0].dtype) if item and isinstance(item[0], np.ndarray) else "float32"
        return helper.make_tensor_sequence_value_info(name, NUMBER[element], None)
    return onnx.ValueInfoProto(name=name)


def _attribute(step: Node, key: str, item: Any) -> Any:
    """An AttributeProto; empty lists take their type from the schema."""
    import onnx
    from onnx import helper

    if isinstance(item, np.ndarray):
        return helper.make_attribute(key, _tensor(item))
    if isinstance(item, (list, tuple)) and item and isinstance(item[0], np.ndarray):
        return helper.make_attribute(key, [_tensor(one) for one in item])
    if isinstance(item, (list, tuple)) and not item:
        schema: Any = onnx.defs.get_schema(step.op_type, step.opset, step.domain)
        kind: Any = int(schema.attributes[key].type)
        return onnx.AttributeProto(name=key, type=kind)
    return helper.make_attribute(key, list(item) if isinstance(item, tuple) else item)


def _tensor(array: np.ndarray) -> Any:
    from onnx import helper, numpy_helper

    if array.dtype.hasobject:
        texts: list[Any] = [str(one).encode() for one in array.ravel()]
        return helper.make_tensor("", NUMBER["string"], array.shape, texts)
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))


def _checked(declared: Value, result: Any) -> Any:
    """The result in the form the graph declares: arrays, of the declared dtype."""
    if isinstance(result, np.generic) or (not isinstance(result, (np.ndarray, list, dict)) and result is not None):
        result = np.asarray(result)
    if not isinstance(result, np.ndarray) or not is_tensor(declared.dtype):
        return result
    if declared.dtype == "string":
        return result.astype(object)
    wanted = numpy_dtype(declared.dtype)
    if result.dtype == wanted:
        return result
    if result.dtype.itemsize == wanted.itemsize and result.dtype.kind == "V":
        return result.view(wanted)
    return result.astype(wanted)
