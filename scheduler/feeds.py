"""The check of a feed.

The check is pure and happens before anything is sent. The first fault in this order is reported:

1. the feed is not a mapping (InputTypeError)
2. the output names are no list (InvalidOptionError), or one, in the order given, is not an output (OutputNotFoundError)
3. for each fed name, in the order of the feed:
   a. it is not an input (InputNotFoundError)
   b. its value cannot be made into a value of the declared kind (InputTypeError)
   c. dtype (DtypeMismatchError)
   d. rank (RankMismatchError)
   e. a fixed dimension (ShapeMismatchError)
   f. a symbol that has another size already (SymbolConflictError)
4. a required input, in the order of the model, was not fed (InputNotFoundError)

Any value may be given as an OrtValue. Tensors may be numpy arrays (any strides, any byte order), numpy scalars, objects
with `numpy()` (torch), `__dlpack__`, `__array__` or a buffer; their dtype must be the declared one. Python numbers,
strings and nested lists of them have no dtype and take the declared one where nothing is lost in kind: bool to bool,
int to integers that hold it, int and float to floats. Strings may be arrays of str or of UTF-8 bytes and become object
arrays of str.
A sequence is a list or tuple, a map a mapping, an empty optional None.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import is_tensor, numpy_dtype, onnx_name
from outrider.providers.wire.graph import Dim, Shape, Value
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.dlpack import described, from_dlpack
from outrider.scheduler.errors import (
    DtypeMismatchError,
    InputNotFoundError,
    InputTypeError,
    OutputNotFoundError,
    RankMismatchError,
    ShapeMismatchError,
    SymbolConflictError,
)
from outrider.scheduler.nodearg import split_type
from outrider.scheduler.ortvalue import OrtValue


def requested_outputs(output_names: Any, known: Sequence[str]) -> list[str]:
    """The outputs a run returns, in order: those asked for, or all of `known` for None and an empty list.

    Raises OutputNotFoundError, and InvalidOptionError for what is no list of names.
    """
    if output_names is None:
        return list(known)
    if isinstance(output_names, (str, bytes)) or not isinstance(output_names, Sequence):
        raise invalid_option("output_names", output_names, "a list of output names, or None for all")
    for name in output_names:
        if name not in known:
            raise unknown_output(name, known)
    return list(output_names) or list(known)


def unknown_input(name: Any, known: Sequence[str]) -> InputNotFoundError:
    """The error for a name that no input has."""
    message = f"the model has no input {name!r}. {_near(name, known, 'inputs')}"
    return InputNotFoundError(message, name=name, known=list(known))


def unknown_output(name: Any, known: Sequence[str]) -> OutputNotFoundError:
    """The error for a name that no output has."""
    message = f"the model has no output {name!r}. {_near(name, known, 'outputs')}"
    return OutputNotFoundError(message, name=name, known=list(known))


def check_feeds(
    inputs: Sequence[Value],
    overridable: Collection[str],
    feed: Any,
    output_names: Any,
    known_outputs: Sequence[str],
) -> dict[str, Any]:
    """Check a feed against the model's inputs and return it with each value in its final form.

    `overridable`: inputs that have an initializer and may be left out. Tensors come back as numpy arrays of exactly the
    declared dtype in native byte order, not necessarily contiguous and not copied where that could be avoided; strings
    as object arrays of str; sequences as lists; maps as dicts; None for an empty optional. Errors, see the module.
    """
    if not isinstance(feed, Mapping):
        message = f"the input feed must be a dict from input name to value, not {type(feed).__name__}."
        raise InputTypeError(message, expected="dict", got=type(feed).__name__)
    requested_outputs(output_names, known_outputs)
    by_name = {value.name: value for value in inputs}
    checked: dict[str, Any] = {}
    symbols: dict[str, tuple[int, str]] = {}
    for name, given in feed.items():
        if name not in by_name:
            raise unknown_input(name, list(by_name))
        declared = by_name[name]
        wanted = _plain_dtype(declared.dtype)
        # numpy takes None for float64, so ask for it first.
        if wanted is not None and type(given) is np.ndarray and given.dtype == wanted:
            value: Any = given  # the common case, quickly
        else:
            value = _convert(name, declared.dtype, given)
        checked[name] = value
        if isinstance(value, np.ndarray) and declared.shape is not None:
            check_shape(name, declared.shape, value.shape, symbols)
    for value in inputs:
        if value.name not in checked and value.name not in overridable:
            fed = ", ".join(checked) or "none"
            message = f"the input {value.name!r} ({describe(value)}) was not fed. Fed were: {fed}."
            raise InputNotFoundError(message, name=value.name, known=list(by_name))
    return checked


def describe(value: Value) -> str:
    """'float32[batch, 3, ?]', or just the type where the shape is unknown or the value no tensor."""
    if value.shape is None or not is_tensor(value.dtype):
        return value.dtype
    return value.dtype + _dims(value.shape)


@lru_cache(maxsize=1024)
def _plain_dtype(dtype: str) -> np.dtype[Any] | None:
    """The numpy dtype that needs no conversion; None for strings and for what is no tensor."""
    return numpy_dtype(dtype) if is_tensor(dtype) and dtype != "string" else None


def _near(name: Any, known: Sequence[str], what: str) -> str:
    near = difflib.get_close_matches(str(name), known, n=3)
    return f"Did you mean {' or '.join(near)}?" if near else f"Its {what} are: {', '.join(known) or 'none'}."


def check_shape(name: str, declared: Shape, got: tuple[int, ...], symbols: dict[str, tuple[int, str]]) -> None:
    """Raise RankMismatchError, ShapeMismatchError or SymbolConflictError if an input's shape is not as declared.

    `symbols`: (size, input) of those met so far; new ones are added.
    """
    assert declared is not None
    if len(got) != len(declared):
        message = (
            f"input {name!r} has shape {list(got)}, but {len(declared)} dimensions are declared: {_dims(declared)}."
        )
        raise RankMismatchError(message, name=name, expected=len(declared), got=len(got))
    for axis, (dim, size) in enumerate(zip(declared, got, strict=True)):
        if isinstance(dim, int) and dim != size:
            message = f"input {name!r} has shape {list(got)}, but dimension {axis} of {_dims(declared)} must be {dim}."
            raise ShapeMismatchError(message, name=name, expected=declared, got=got, axis=axis)
    for dim, size in zip(declared, got, strict=True):
        if not isinstance(dim, str):
            continue
        first, where = symbols.setdefault(dim, (size, name))
        if first != size:
            message = f"the dimension {dim!r} is {size} in input {name!r}, but {first} in input {where!r}."
            raise SymbolConflictError(
                message, symbol=dim, first=first, second=size, first_input=where, second_input=name
            )  # fmt: skip


def _dims(shape: Sequence[Dim]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def _convert(name: str, dtype: str, given: Any) -> Any:
    if isinstance(given, OrtValue):
        given = given.value
    kind, inner = split_type(dtype)
    if kind == "optional":
        return None if given is None else _convert(name, inner[0], given)
    if given is None:
        raise _unfit(name, dtype, given, "None is for optional inputs only; leave out what is not required")
    if kind == "sequence":
        if not isinstance(given, (list, tuple)):
            raise _unfit(name, dtype, given, "a sequence is a list")
        return [_convert(f"{name}[{index}]", inner[0], item) for index, item in enumerate(given)]
    if kind == "map":
        if not isinstance(given, Mapping):
            raise _unfit(name, dtype, given, "a map is a dict")
        return {_key(name, inner[0], key): _convert(f"{name}[{key!r}]", inner[1], item) for key, item in given.items()}
    return _tensor(name, dtype, given)


def _key(name: str, dtype: str, key: Any) -> Any:
    """A key of a map: str, or int for the integer types."""
    if dtype == "string" and isinstance(key, str):
        return str(key)
    if dtype != "string" and isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise _unfit(name, dtype, key, f"the keys of this map are {'str' if dtype == 'string' else 'int'}")


def _tensor(name: str, dtype: str, given: Any) -> np.ndarray[Any, Any]:
    array = _as_array(name, dtype, given)
    if dtype == "string":
        return _strings(name, array)
    wanted = numpy_dtype(dtype)
    if array.dtype == wanted:
        return array
    if array.dtype.newbyteorder("=") == wanted:
        return array.astype(wanted)
    if array.dtype.kind == "O" and not all(isinstance(item, str) for item in array.flat):
        raise _unfit(name, dtype, given, "numpy makes an array of Python objects of it")
    if _is_plain(given):
        return _from_plain(name, dtype, array)
    raise _mismatch(name, dtype, array)


def _as_array(name: str, dtype: str, given: Any) -> np.ndarray[Any, Any]:
    if isinstance(given, np.ma.MaskedArray):
        raise _unfit(name, dtype, given, "a mask has no meaning here; fill it with .filled()")
    if isinstance(given, np.ndarray):
        return given if type(given) is np.ndarray else given.view(np.ndarray)
    if isinstance(given, (dict, set, frozenset)):
        raise _unfit(name, dtype, given, "give an array")
    try:
        # What other libraries raise here (a device tensor, a gradient, a ragged list) is theirs to choose.
        if not isinstance(given, np.generic) and callable(getattr(given, "numpy", None)):
            return np.asarray(given.numpy())
        if not hasattr(given, "__array__") and hasattr(given, "__dlpack__"):
            return from_dlpack(given)
        if isinstance(given, (list, tuple, str, bytes)) and dtype == "string":
            return _object_array(given)
        return np.asarray(given)
    except Exception as error:
        found = described(given)  # a type that numpy has only by `ml_dtypes`
        if found is not None:
            return found
        raise _unfit(name, dtype, given, f"{type(error).__name__}: {error}") from error


def _object_array(given: Any) -> np.ndarray[Any, Any]:
    """Strings as they are; numpy's own string type, which would drop trailing NULs, only finds out the shape."""
    array = np.asarray(given)
    return np.array(given, dtype=object).reshape(array.shape)


def _strings(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An object array of str."""
    if array.dtype.kind not in "OUST":
        raise _mismatch(name, "string", array)
    texts = np.empty(array.shape, dtype=object)
    for index, item in enumerate(array.flat):
        if isinstance(item, bytes):
            try:
                item = item.decode()
            except UnicodeDecodeError as error:
                raise _unfit(name, "string", item, f"element {index} is not UTF-8: {error}") from error
        if not isinstance(item, str):
            raise _unfit(name, "string", item, f"element {index} is {type(item).__name__}, not str")
        texts.flat[index] = str(item)
    return texts


def _leaves(given: Any) -> Iterator[Any]:
    stack = [given]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(item)
        else:
            yield item


def _is_plain(given: Any) -> bool:
    """Whether `given` has no dtype of its own: Python numbers and nested lists of them."""
    numbers = (bool, int, float, complex)
    return all(isinstance(leaf, numbers) and not isinstance(leaf, np.generic) for leaf in _leaves(given))


def _from_plain(name: str, dtype: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Python numbers, which numpy made int64, float64, ..., in the declared dtype, where the kind allows it."""
    wanted = numpy_dtype(dtype)
    integer = "int" in dtype
    accepted = {"bool": "b"}.get(dtype, "iu" if integer else "iufc" if dtype.startswith("complex") else "iuf")
    if array.dtype.kind not in accepted and array.size:
        raise _mismatch(name, dtype, array)
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
    if integer:
        fits = np.array_equal(converted.astype(array.dtype), array) and np.array_equal(converted < 0, array < 0)
    else:
        fits = dtype == "bool" or np.array_equal(np.isfinite(converted), np.isfinite(array))
    if not fits:
        raise _unfit(name, dtype, array.tolist(), f"a number is out of the range of {dtype}")
    return converted


def _mismatch(name: str, dtype: str, array: np.ndarray[Any, Any]) -> DtypeMismatchError:
    try:
        got = onnx_name(array.dtype.newbyteorder("="))
    except ValueError:  # a numpy dtype that ONNX does not have
        got = str(array.dtype)
    message = f"input {name!r} has dtype {got}, declared is {dtype}."
    if dtype != "string" and array.dtype.kind not in "OUSTMm":
        message += f" Convert it with .astype({str(numpy_dtype(dtype))!r}) if that is what you mean."
    return DtypeMismatchError(message, name=name, expected=dtype, got=got)


def _unfit(name: str, dtype: str, given: Any, why: str) -> InputTypeError:
    got = type(given).__name__
    return InputTypeError(f"input {name!r} must be {dtype}; got {got}: {why}.", name=name, expected=dtype, got=got)
