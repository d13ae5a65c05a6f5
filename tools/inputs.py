"""Inputs and outputs of the command line: made from a signature, read from and written to .npy and .npz files."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import numpy_dtype
from outrider.scheduler.errors import InvalidOptionError, OutriderError
from outrider.scheduler.nodearg import NodeArg, split_type


class DataFileError(OutriderError, ValueError):
    """A .npy or .npz file cannot be read or written."""

    _fields = ("path", "reason")


def make_inputs(signature: Sequence[NodeArg], seed: int = 0, dims: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A value for each input: standard normals, integers and booleans 0 or 1, strings 'a' or 'b'.

    Dimensions that are not fixed are 1, or what `dims` says for their name (`free_dimensions`). Sequences get one item,
    maps and optionals are empty. The same seed and signature give the same values. Raises InvalidOptionError for a name
    in `dims` that no input has.
    """
    dims = dims or {}
    free = free_dimensions(signature)
    for name in dims:
        if name not in free:
            known = ", ".join(free) or "none"
            message = f"--dim {name}={dims[name]}: no input has the free dimension {name!r}. Free are: {known}."
            raise InvalidOptionError(message, name="dim", value=name, expected=known)
    random = np.random.default_rng(seed)
    made = {}
    for arg in signature:
        named = zip(arg.shape, _dimension_names(arg), strict=True)
        shape = tuple(dim if isinstance(dim, int) else dims.get(name, 1) for dim, name in named)
        made[arg.name] = _value(arg.dtype, shape, random)
    return made


def free_dimensions(signature: Sequence[NodeArg]) -> list[str]:
    """Names of the dimensions that are not fixed: their symbol, or `input.axis` for one without."""
    named = [pair for arg in signature for pair in zip(arg.shape, _dimension_names(arg), strict=True)]
    return sorted({name for dim, name in named if not isinstance(dim, int)})


def _dimension_names(arg: NodeArg) -> list[str]:
    return [str(dim or f"{arg.name}.{axis}") for axis, dim in enumerate(arg.shape)]


def _value(dtype: str, shape: tuple[int, ...], random: np.random.Generator) -> Any:
    kind, inner = split_type(dtype)
    if kind == "sequence":
        return [_value(inner[0], shape, random)]
    if kind == "map":
        return {}
    if kind == "optional":
        return None
    if dtype == "string":
        return random.choice(np.array(["a", "b"], dtype=object), size=shape) if shape else np.array("a", dtype=object)
    wanted = numpy_dtype(dtype)
    if dtype == "bool" or "int" in dtype:
        return random.integers(0, 2, size=shape).astype(wanted)
    real = random.standard_normal(size=shape)
    if dtype.startswith("complex"):
        return np.asarray(real + 1j * random.standard_normal(size=shape)).astype(wanted)
    return np.asarray(real).astype(wanted)


def read_inputs(texts: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of `name=file.npy` texts.

    Raises DataFileError, and InvalidOptionError for a text without '=' and for a name given twice.
    """
    loaded: dict[str, np.ndarray[Any, Any]] = {}
    for text in texts:
        name, equals, path = text.rpartition("=")
        if not equals or not name or name in loaded:
            expected = "each name once" if name in loaded else "name=file.npy"
            raise InvalidOptionError(
                f"--input {text}: expected {expected}.", name="input", value=text, expected=expected
            )
        loaded[name] = read_npy(path)
    return loaded


def restore(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """An array from a file as `dtype`; numpy's format has no bfloat16, float8 or int4 and stores raw bytes."""
    if array.dtype.kind == "V" and array.dtype.names is None and split_type(dtype)[0] == "tensor" and dtype:
        wanted = numpy_dtype(dtype)
        if wanted.itemsize == array.dtype.itemsize:
            return array.view(wanted)
    return array


def read_npy(path: str) -> np.ndarray[Any, Any]:
    """The array in a .npy file. Raises DataFileError."""
    array = _load(path)
    if not isinstance(array, np.ndarray):
        raise DataFileError(f"{path} is an archive; give it as --feed.", path=path, reason="not a .npy file")
    return array


def read_npz(path: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays in a .npz file. Raises DataFileError."""
    archive = _load(path)
    if isinstance(archive, np.ndarray):
        raise DataFileError(f"{path} holds one array; a .npz file is needed.", path=path, reason="not a .npz file")
    with archive:
        try:
            return {name: archive[name] for name in archive.files}
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise DataFileError(f"cannot read {path}: {error}", path=path, reason=str(error)) from error


def _load(path: str) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataFileError(f"there is no file {path}.", path=path, reason="not found") from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = "it holds pickled objects or is no numpy file" if isinstance(error, ValueError) else str(error)
        raise DataFileError(f"cannot read {path}: {reason}.", path=path, reason=reason) from error


def flatten(name: str, value: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors of a value with names: `y` itself, `y[0]` in a sequence, `y['key']` in a map; nothing for None."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flatten(f"{name}[{index}]", item)
    elif value is not None:
        yield name, np.asarray(value)


def write_npz(path: str, values: Mapping[str, Any]) -> None:
    """Write values, flattened, under exactly this path, at once or not at all. Raises DataFileError."""
    target = Path(path)
    try:
        handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name, value in values.items():
                for key, array in flatten(name, value):
                    with archive.open(f"{key}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, _storable(array), allow_pickle=False)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)
        os.replace(partial, target)
    except BaseException as error:
        os.unlink(partial)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise


def _unwritable(path: str, error: OSError) -> DataFileError:
    reason = error.strerror or str(error)
    return DataFileError(f"cannot write {path}: {reason}.", path=path, reason=reason)


def write_text(path: str, text: str) -> None:
    """Write a text file. Raises DataFileError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _storable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the .npy format can hold without pickle: strings with a fixed width, unknown types as raw bytes."""
    if array.dtype.kind == "O":
        return array.astype(str)
    if array.dtype.kind == "V" or array.dtype.name not in np.sctypeDict:
        return array.view(np.dtype(f"V{array.dtype.itemsize}"))
    return array
