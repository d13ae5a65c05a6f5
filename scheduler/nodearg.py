"""How inputs and outputs of a model are described to the user: names of types as onnxruntime writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from outrider.providers.wire.graph import Dim, Value

_ORT_NAMES = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class NodeArg:
    """An input or output of the model, described as onnxruntime does.

    `type`: 'tensor(float)', 'seq(tensor(int64))', ...; `shape`: ints, symbols and None, [] also for unknown rank and
    for what is no tensor; `dtype`: Outrider's name, 'float32', 'sequence(int64)'.
    """

    name: str
    type: str
    shape: list[Dim]
    dtype: str

    @classmethod
    def of(cls, value: Value) -> NodeArg:
        """The description of a value of the plain graph."""
        return cls(value.name, type_name(value.dtype), list(value.shape or ()), value.dtype)

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape})"


def type_name(dtype: str) -> str:
    """onnxruntime's name of a type: 'float32' is 'tensor(float)', 'map(int64,float32)' 'map(int64,tensor(float))'."""
    kind, inner = split_type(dtype)
    if kind == "tensor":
        return f"tensor({_ORT_NAMES.get(dtype, dtype)})"
    if kind == "map":
        return f"map({inner[0]},{type_name(inner[1])})"
    return f"{'seq' if kind == 'sequence' else kind}({type_name(inner[0])})"


@lru_cache(maxsize=1024)
def split_type(dtype: str) -> tuple[str, tuple[str, ...]]:
    """('tensor', ()), ('sequence', (element,)), ('optional', (element,)) or ('map', (key, value)) of a type's name."""
    kind, bracket, rest = dtype.partition("(")
    if not bracket:
        return "tensor", ()
    inner = rest[:-1]
    return kind, tuple(inner.split(",", 1)) if kind == "map" else (inner,)
