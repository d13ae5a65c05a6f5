"""ONNX's backend test suite, loaded once and kept in `$OUTRIDER_CACHE/suite`.

The suite generates its node cases in Python at import, which costs 7 to 17 s per process. Here every case is written
once to one file, under a folder named after the versions of onnx and numpy, and read back one at a time: model bytes,
inputs and expected outputs as protobuf, tolerances as the suite gives them. Nothing that we computed is kept.

The nine 'real' models are structure only: their weights come from ConstantOfShape, the suite makes their input as
`arange(n) / n` and ships the expected output.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import onnx
from onnx import numpy_helper

from outrider.providers.wire.lasting import VARIABLE, cache_folder
from outrider.scheduler.checked import invalid_option

KINDS = ("node", "real", "simple", "pytorch-converted", "pytorch-operator")
_FOLDER = "a folder that can be written to, where the cases of ONNX's suite are kept"
FORMAT = 1  # of the cache; count it up when `_encode` or `_write` change


@dataclass(frozen=True)
class Case:
    """One model and what it must answer. `data`: (inputs by name, outputs in the model's order), usually one pair."""

    name: str
    kind: str
    rtol: float
    atol: float
    model: bytes
    data: list[tuple[dict[str, Any], list[Any]]]


@dataclass(frozen=True)
class Suite:
    """Names are unique in the suite; `read` loads one case from the cache."""

    path: Path
    index: dict[str, tuple[int, int]]

    def names(self) -> list[str]:
        return list(self.index)

    def read(self, name: str) -> Case:
        offset, size = self.index[name]
        with open(self.path, "rb") as file:
            file.seek(offset)
            raw = msgpack.unpackb(file.read(size))
        raw["data"] = [
            ({key: _decode(item) for key, item in inputs.items()}, [_decode(item) for item in outputs])
            for inputs, outputs in raw["data"]
        ]
        return Case(**raw)


def load_suite() -> Suite:
    """The suite of the installed onnx, from the cache if it is there. Raises InvalidOptionError without a cache."""
    base = cache_folder()
    if base is None:
        raise invalid_option(VARIABLE, None, _FOLDER)
    folder = Path(base, "suite", f"{FORMAT}-onnx-{onnx.__version__}-numpy-{np.__version__}")
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as scratch:
                part = Path(scratch) / "part"
                part.mkdir()
                _write(part)
                _move(part, folder)
        except OSError as error:
            raise invalid_option(VARIABLE, base, f"{_FOLDER} ({error})") from error
    index = msgpack.unpackb((folder / "index.msgpack").read_bytes())
    return Suite(folder / "cases.bin", {name: (offset, size) for name, offset, size in index})


def _move(part: Path, folder: Path) -> None:
    try:
        os.rename(part, folder)
    except OSError:
        if not folder.exists():  # else another process was quicker
            raise


def _write(folder: Path) -> None:
    index = []
    with open(folder / "cases.bin", "wb") as file:
        for case in _generate():
            body = msgpack.packb(case)
            index.append((case["name"], file.tell(), len(body)))
            file.write(body)
    (folder / "index.msgpack").write_bytes(msgpack.packb(index))


def _generate() -> Iterator[dict[str, Any]]:
    """The cases in the suite's order, as plain data."""
    from onnx.backend.test.loader import load_model_tests

    for kind in KINDS:
        with warnings.catch_warnings(action="ignore"):  # of casts and divisions that its cases are about
            cases = load_model_tests(kind=kind)
        for case in cases:
            if case.model is not None:
                model, data = case.model, case.data_sets
            elif case.model_dir is not None:
                model, data = _from_folder(Path(case.model_dir))
            else:
                model, data = _light(Path(onnx.__file__).parent.parent / str(case.url))
            names = _fed(model)
            yield {
                "name": case.name,
                "kind": kind,
                "rtol": case.rtol,
                "atol": case.atol,
                "model": model.SerializeToString(),
                "data": [
                    (dict(zip(names, map(_encode, inputs), strict=False)), [_encode(item) for item in outputs])
                    for inputs, outputs in data or ()
                ],
            }


def _fed(model: onnx.ModelProto) -> list[str]:
    """The graph's inputs that are no initializers, in order."""
    given = {item.name for item in model.graph.initializer}
    return [item.name for item in model.graph.input if item.name not in given]


def _from_folder(folder: Path) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    """`model.onnx` with `test_data_set_*/{input,output}_*.pb`."""
    model = onnx.load(folder / "model.onnx")
    inputs = {item.name: item for item in model.graph.input}
    types = [inputs[name].type for name in _fed(model)], [item.type for item in model.graph.output]
    data = []
    for place in sorted(folder.glob("test_data_set_*")):
        sides = []
        for side, kinds in zip(("input", "output"), types, strict=True):
            count = len(list(place.glob(f"{side}_*.pb")))
            files = [place / f"{side}_{i}.pb" for i in range(count)]
            sides.append([_parse(file.read_bytes(), kind) for file, kind in zip(files, kinds, strict=False)])
        data.append((sides[0], sides[1]))
    return model, data


def _parse(raw: bytes, kind: onnx.TypeProto) -> Any:
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(raw))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(raw))
    return onnx.TensorProto.FromString(raw)


def _light(path: Path) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    model = onnx.load(path)
    given = {item.name for item in model.graph.initializer}
    inputs = []
    for item in model.graph.input:
        if item.name not in given:
            shape = [dim.dim_value or 1 for dim in item.type.tensor_type.shape.dim]
            count = int(np.prod(shape))
            inputs.append((np.arange(count).reshape(shape) / count).astype(np.float32))
    stem = path.with_suffix("")
    outputs = [
        onnx.TensorProto.FromString(Path(f"{stem}_output_{i}.pb").read_bytes()) for i in range(len(model.graph.output))
    ]
    return model, [(inputs, outputs)]


def _encode(value: Any) -> Any:
    """A tensor becomes TensorProto bytes, a sequence a list of those, an empty optional None. Scalars become rank 0."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, onnx.TensorProto):
        return value.SerializeToString()
    array = np.asarray(value)
    return numpy_helper.from_array(array.astype(object) if array.dtype.kind in "US" else array).SerializeToString()


def _decode(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_decode(item) for item in value]
    array = numpy_helper.to_array(onnx.TensorProto.FromString(value))
    if array.dtype == object:
        text = [item.decode() if isinstance(item, bytes) else item for item in array.ravel()]
        return np.array(text, object).reshape(array.shape)
    return array
